// A rule as decay and sub-steps: each token does S <- Diag(alpha) S and then, for i < PATTERN * FACTORS,
//
//   S <- S + gate_i write_i (content_i - read_i^T S)^T
//
// The codes below are chosen when the pipeline is built, from the same table that drives the float64
// reference (src/rule.rs). Sub-step i uses entry i % PATTERN.
// content.wgsl has the contents.

const VECTOR_NONE = 0u;
const VECTOR_K = 1u;
const VECTOR_E = 2u;          // x1
const VECTOR_P = 3u;          // x1
const VECTOR_MINUS_A = 4u;    // -x1
const VECTOR_B = 5u;          // x2
const VECTOR_B_TIMES_K = 6u;  // x1 * k, x1 with one row a value head

const GATE_ONE = 0u;
const GATE_BETA = 1u;
const GATE_GAMMA = 2u;

override WRITE_0: u32 = 2u;
override WRITE_1: u32 = 1u;
override READ_0: u32 = 2u;
override READ_1: u32 = 1u;
override GATE_0: u32 = 2u;
override GATE_1: u32 = 1u;

// Sub-step 0 reads the state before the token's decay (RWKV-7).
override UNDECAYED: bool = false;

// 0: no decay, 1: one alpha a head, 2: one alpha a channel.
override DECAY: u32 = 2u;
override DECAY_FORM: u32 = 0u;
override BETA_FORM: u32 = 0u;
override GAMMA_FORM: u32 = 0u;

// q, k and e are divided by sqrt(sum x^2 + 1e-6).
override NORMALIZE: bool = false;
const NORM_EPSILON = 1e-6;

// Norms are kept by number: q, x1 (e), then the rows of k.
const NORM_Q = 0u;
const NORM_E = 1u;
const NORM_K = 2u;

// `token` is a row of the bindings, `t` the same token's number in the chunk (for its norm), `i` the
// sub-step, `h` the value head, `d` the key channel. What ends in `four_at` gives channels d .. d + 3, those at or
// beyond K as if the row went on with zeros (and an alpha of 1); its loads have no branches, so that they overlap.

// Where row `row` of an operand with H heads starts.
fn key_row(row: u32, h: u32) -> u32 {
  return (row * params.heads + h / (params.value_heads / params.heads)) * K;
}

// The same with HV heads.
fn value_row(row: u32, h: u32) -> u32 {
  return (row * params.value_heads + h) * K;
}

// Every four channels that a thread of this pass has exist.
override ALL_CHANNELS: bool = false;

fn is_channel(d: u32) -> vec4<bool> {
  if (ALL_CHANNELS) {
    return vec4<bool>(true);
  }
  return vec4<u32>(d, d + 1u, d + 2u, d + 3u) < vec4<u32>(K);
}

// Each pass keeps inverse norms where it likes and provides inverse_norm(number, t).
fn normalizing(number: u32, t: u32) -> f32 {
  if (NORMALIZE) {
    return inverse_norm(number, t);
  }
  return 1.0;
}

// The values whose norm has this number, not yet normalised.
fn norm_operand(number: u32, token: u32, h: u32, d: u32) -> f32 {
  if (number == NORM_Q) {
    return q_load(key_row(token, h) + d);
  }
  if (number == NORM_E) {
    return x1_load(key_row(token, h) + d);
  }
  return k_load(key_row(token * FACTORS + number - NORM_K, h) + d);
}

fn query_of(x: vec4<f32>, t: u32, d: u32) -> vec4<f32> {
  return select(vec4<f32>(), normalizing(NORM_Q, t) * x, is_channel(d));
}
fn query_four_at(token: u32, t: u32, h: u32, d: u32) -> vec4<f32> {
  return query_of(q_load_four(key_row(token, h), d), t, d);
}

// What the operand of a vector is multiplied by: its inverse norm, or its sign.
fn vector_factor(code: u32, t: u32, i: u32) -> f32 {
  if (code == VECTOR_K || code == VECTOR_B_TIMES_K) {
    return normalizing(NORM_K + i / PATTERN, t);
  }
  if (code == VECTOR_E) {
    return normalizing(NORM_E, t);
  }
  return select(1.0, -1.0, code == VECTOR_MINUS_A);
}

// The vector from the operands' channels.
fn vector_of(code: u32, k: vec4<f32>, x1: vec4<f32>, x2: vec4<f32>, t: u32, i: u32, d: u32) -> vec4<f32> {
  if (code == VECTOR_NONE) {
    return vec4<f32>();
  }
  var x = vector_factor(code, t, i) * x1;
  if (code == VECTOR_K) {
    x = vector_factor(code, t, i) * k;
  } else if (code == VECTOR_B_TIMES_K) {
    x = vector_factor(code, t, i) * k * x1;
  } else if (code == VECTOR_B) {
    x = x2;
  }
  return select(vec4<f32>(), x, is_channel(d));
}

// Which operands a vector needs, and the row of x1.
fn needs_k(code: u32) -> bool {
  return code == VECTOR_K || code == VECTOR_B_TIMES_K;
}
fn needs_x1(code: u32) -> bool {
  return code == VECTOR_E || code == VECTOR_P || code == VECTOR_MINUS_A || code == VECTOR_B_TIMES_K;
}
fn x1_row(code: u32, token: u32, h: u32) -> u32 {
  return select(key_row(token, h), value_row(token, h), code == VECTOR_B_TIMES_K);
}

fn vector_four_at(code: u32, token: u32, t: u32, i: u32, h: u32, d: u32) -> vec4<f32> {
  var k4: vec4<f32>;
  var x14: vec4<f32>;
  var x24: vec4<f32>;
  if (needs_k(code)) {
    k4 = k_load_four(key_row(token * FACTORS + i / PATTERN, h), d);
  }
  if (needs_x1(code)) {
    x14 = x1_load_four(x1_row(code, token, h), d);
  }
  if (code == VECTOR_B) {
    x24 = x2_load_four(key_row(token, h), d, K);
  }
  return vector_of(code, k4, x14, x24, t, i, d);
}

// The read vector b of sub-step i.
fn read_code(i: u32) -> u32 {
  return select(READ_1, READ_0, i % PATTERN == 0u);
}
fn read_four_at(token: u32, t: u32, i: u32, h: u32, d: u32) -> vec4<f32> {
  return vector_four_at(read_code(i), token, t, i, h, d);
}

// The write vector of sub-step i, without its gate.
fn write_code(i: u32) -> u32 {
  return select(WRITE_1, WRITE_0, i % PATTERN == 0u);
}
fn write_four_at(token: u32, t: u32, i: u32, h: u32, d: u32) -> vec4<f32> {
  return vector_four_at(write_code(i), token, t, i, h, d);
}

fn gate_at(token: u32, i: u32, h: u32) -> f32 {
  let code = select(GATE_1, GATE_0, i % PATTERN == 0u);
  if (code == GATE_BETA) {
    let row = token * FACTORS + i / PATTERN;
    return gate_from(BETA_FORM, gates_load(params.beta_at + row * params.value_heads + h));
  }
  if (code == GATE_GAMMA) {
    return gate_from(GAMMA_FORM, gates_load(params.gamma_at + token * params.value_heads + h));
  }
  return 1.0;
}

// alpha = exp(g), from the operand's value x and, in forms that have one, the bias.
fn alpha_from(x: f32, h: u32, bias: f32) -> f32 {
  if (DECAY_FORM == DECAY_LOG) {
    return exp_decay(x);
  }
  let a_log = gates_load(params.a_log_at + h);
  return exp_decay(log_decay_from(DECAY_FORM, x + bias, a_log, params.lower_bound));
}

fn bias_at(i: u32) -> f32 {
  if (DECAY_FORM == DECAY_LOG) {
    return 0.0;
  }
  return gates_load(params.dt_bias_at + i);
}

// From the operand's channels; one value stands in all four where there is one a head.
fn alpha_of(g: vec4<f32>, h: u32, d: u32) -> vec4<f32> {
  var x = vec4<f32>(1.0);
  if (DECAY == 1u) {
    x = vec4<f32>(alpha_from(g.x, h, bias_at(h)));
  }
  if (DECAY == 2u) {
    let bias = h * K + min(vec4<u32>(d, d + 1u, d + 2u, d + 3u), vec4<u32>(K - 1u));
    x.x = alpha_from(g.x, h, bias_at(bias.x));
    x.y = alpha_from(g.y, h, bias_at(bias.y));
    x.z = alpha_from(g.z, h, bias_at(bias.z));
    x.w = alpha_from(g.w, h, bias_at(bias.w));
  }
  return select(vec4<f32>(1.0), x, is_channel(d));
}
fn alpha_four_at(token: u32, h: u32, d: u32) -> vec4<f32> {
  var g4: vec4<f32>;
  if (DECAY == 1u) {
    g4 = vec4<f32>(g_load(token * params.value_heads + h));
  }
  if (DECAY == 2u) {
    g4 = g_load_four(value_row(token, h), d);
  }
  return alpha_of(g4, h, d);
}
