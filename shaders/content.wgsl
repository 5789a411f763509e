// The content z of a sub-step: 0, v, or w * v.

const CONTENT_ZERO = 0u;
const CONTENT_V = 1u;
const CONTENT_W_TIMES_V = 2u; // x2 * v
override CONTENT_0: u32 = 0u;
override CONTENT_1: u32 = 1u;

// Sub-step `i` of row `token` of the bindings, value head `h`, value column `c`.
fn content_at(token: u32, i: u32, h: u32, c: u32) -> f32 {
  let code = select(CONTENT_1, CONTENT_0, i % PATTERN == 0u);
  if (code == CONTENT_ZERO) {
    return 0.0;
  }
  let row = token * FACTORS + i / PATTERN;
  var z = v_load((row * params.value_heads + h) * V + c);
  if (code == CONTENT_W_TIMES_V) {
    z *= x2_load((token * params.value_heads + h) * V + c);
  }
  return z;
}

// The same of columns c .. c + 3, with something else where a column is not there.
fn content_four_at(token: u32, i: u32, h: u32, c: u32) -> vec4<f32> {
  let code = select(CONTENT_1, CONTENT_0, i % PATTERN == 0u);
  if (code == CONTENT_ZERO) {
    return vec4<f32>();
  }
  let row = token * FACTORS + i / PATTERN;
  var z = v_load_four((row * params.value_heads + h) * V, c);
  if (code == CONTENT_W_TIMES_V) {
    z *= x2_load_four((token * params.value_heads + h) * V, c, V);
  }
  return z;
}
