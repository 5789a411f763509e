// Sizes and offsets of one dispatch. Lengths and offsets come from here, never from arrayLength: the
// bindings are slices of buffers that belong to somebody else.

struct Params {
  heads: u32,          // H
  value_heads: u32,    // HV
  first_head: u32,     // value heads first_head .. first_head + head_count are processed
  head_count: u32,
  chunk_count: u32,    // prefill: entries of the table that are chunks
  piece_at: u32,       // prefill: where the entries start that this pass goes through after the chunks, and
  piece_count: u32,    // how many there are
  row_count: u32,      // decode: batch rows
  tokens: u32,         // decode: tokens of each row, of which
  first_token: u32,    // first_token .. last_token are processed
  last_token: u32,
  scale: f32,          // o = scale S^T q
  lower_bound: f32,    // of the decay gate
  // Where each operand starts in its binding, in elements.
  q_at: u32,
  k_at: u32,
  x1_at: u32,
  x2_at: u32,
  g_at: u32,
  v_at: u32,
  o_at: u32,
  initial_at: u32,
  state_at: u32,
  beta_at: u32,
  gamma_at: u32,
  a_log_at: u32,
  dt_bias_at: u32,
  scratch_at: u32,
  halves_at: u32,      // matrix tier, in vec4s of float16
  transition_at: u32,  // segments: M of each
  unused_0: u32,
  unused_1: u32,
  unused_2: u32,
}

@group(0) @binding(0) var<uniform> params: Params;

// Sizes of a head and the number of sub-steps a token, known when the pipeline is built: a rule has a pattern
// of PATTERN sub-steps, FACTORS times; k, v and beta have FACTORS rows a token.
override K: u32 = 128u;
override V: u32 = 128u;
override PATTERN: u32 = 2u;
override FACTORS: u32 = 1u;

fn substeps() -> u32 {
  return PATTERN * FACTORS;
}

// Workgroup counts above 65,535 are folded into two dimensions.
fn group_index(id: vec3<u32>, count: vec3<u32>) -> u32 {
  return id.y * count.x + id.x;
}
