// The content z of a sub-step: 0, v, or w * v.

const CONTENT_ZERO = 0u;
const CONTENT_V = 1u;
const CONTENT_W_TIMES_V = 2u; // x2 * v
override CONTENT_0: u32 = 0u;
override CONTENT_1: u32 = 1u;

fn content_code(i: u32) -> u32 {
  return select(CONTENT_1, CONTENT_0, i % PATTERN == 0u);
}

// What a content is made of, as it lies in memory.
struct StoredContent {
  v: Element,
  w: Element,
}

// Sub-step `i` of row `token` of the bindings, value head `h`, value column `c`.
fn stored_content_at(token: u32, i: u32, h: u32, c: u32) -> StoredContent {
  let code = content_code(i);
  var stored: StoredContent;
  if (code != CONTENT_ZERO) {
    stored.v = v_stored(((token * FACTORS + i / PATTERN) * params.value_heads + h) * V + c);
  }
  if (code == CONTENT_W_TIMES_V) {
    stored.w = x2_stored((token * params.value_heads + h) * V + c);
  }
  return stored;
}

fn content_of(stored: StoredContent, i: u32) -> f32 {
  let code = content_code(i);
  if (code == CONTENT_ZERO) {
    return 0.0;
  }
  return f32(stored.v) * select(1.0, f32(stored.w), code == CONTENT_W_TIMES_V);
}

fn content_at(token: u32, i: u32, h: u32, c: u32) -> f32 {
  return content_of(stored_content_at(token, i, h, c), i);
}

// The same of columns c .. c + 3, with something else where a column is not there.
fn content_four_at(token: u32, i: u32, h: u32, c: u32) -> vec4<f32> {
  let code = content_code(i);
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

// The same of columns c .. c + 3 as they lie in memory.
struct StoredFour {
  v: vec4<Element>,
  w: vec4<Element>,
}

fn stored_four_at(token: u32, i: u32, h: u32, c: u32) -> StoredFour {
  let code = content_code(i);
  var stored: StoredFour;
  if (code != CONTENT_ZERO) {
    stored.v = v_stored_four(((token * FACTORS + i / PATTERN) * params.value_heads + h) * V, c);
  }
  if (code == CONTENT_W_TIMES_V) {
    stored.w = x2_stored_four((token * params.value_heads + h) * V, c, V);
  }
  return stored;
}

fn four_of(stored: StoredFour, i: u32) -> vec4<f32> {
  let code = content_code(i);
  if (code == CONTENT_ZERO) {
    return vec4<f32>();
  }
  return vec4<f32>(stored.v) * select(vec4<f32>(1.0), vec4<f32>(stored.w), code == CONTENT_W_TIMES_V);
}
