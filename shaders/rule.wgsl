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
// sub-step, `h` the value head, `d` the key channel.

fn key_row(row: u32, h: u32, d: u32) -> u32 {
  return (row * params.heads + h / (params.value_heads / params.heads)) * K + d;
}

// Each pass keeps inverse norms where it likes and provides inverse_norm(number, t).
fn normalized(number: u32, t: u32, x: f32) -> f32 {
  if (NORMALIZE) {
    return x * inverse_norm(number, t);
  }
  return x;
}

// The values whose norm has this number, not yet normalised.
fn norm_operand(number: u32, token: u32, h: u32, d: u32) -> f32 {
  if (number == NORM_Q) {
    return f32(q[params.q_at + key_row(token, h, d)]);
  }
  if (number == NORM_E) {
    return f32(x1[params.x1_at + key_row(token, h, d)]);
  }
  return f32(k[params.k_at + key_row(token * FACTORS + number - NORM_K, h, d)]);
}

fn query_at(token: u32, t: u32, h: u32, d: u32) -> f32 {
  return normalized(NORM_Q, t, norm_operand(NORM_Q, token, h, d));
}

fn vector_at(code: u32, token: u32, t: u32, i: u32, h: u32, d: u32) -> f32 {
  if (code == VECTOR_K || code == VECTOR_B_TIMES_K) {
    let number = NORM_K + i / PATTERN;
    var x = normalized(number, t, norm_operand(number, token, h, d));
    if (code == VECTOR_B_TIMES_K) {
      x *= f32(x1[params.x1_at + (token * params.value_heads + h) * K + d]);
    }
    return x;
  }
  if (code == VECTOR_E) {
    return normalized(NORM_E, t, norm_operand(NORM_E, token, h, d));
  }
  if (code == VECTOR_P) {
    return f32(x1[params.x1_at + key_row(token, h, d)]);
  }
  if (code == VECTOR_MINUS_A) {
    return -f32(x1[params.x1_at + key_row(token, h, d)]);
  }
  if (code == VECTOR_B) {
    return x2_load(key_row(token, h, d));
  }
  return 0.0;
}

// The read vector b of sub-step i.
fn read_at(token: u32, t: u32, i: u32, h: u32, d: u32) -> f32 {
  return vector_at(select(READ_1, READ_0, i % PATTERN == 0u), token, t, i, h, d);
}

// The write vector of sub-step i, without its gate.
fn write_at(token: u32, t: u32, i: u32, h: u32, d: u32) -> f32 {
  return vector_at(select(WRITE_1, WRITE_0, i % PATTERN == 0u), token, t, i, h, d);
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

// alpha = exp(g) of channel d.
fn alpha_at(token: u32, h: u32, d: u32) -> f32 {
  if (DECAY == 0u) {
    return 1.0;
  }
  var i = h;
  var row = params.value_heads;
  if (DECAY == 2u) {
    i = h * K + d;
    row *= K;
  }
  let x = f32(g[params.g_at + token * row + i]);
  if (DECAY_FORM == DECAY_LOG) {
    return exp_decay(x);
  }
  let a_log = gates_load(params.a_log_at + h);
  let dt_bias = gates_load(params.dt_bias_at + i);
  return exp_decay(log_decay_from(DECAY_FORM, x + dt_bias, a_log, params.lower_bound));
}
