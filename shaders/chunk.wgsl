// How a chunk lies in scratch memory. A chunk has C tokens and R = n C sub-steps. Its tensors are, per value
// head, as passes 1-2 leave them -> as passes 3-4 leave them (README, "The chunk form"):
//
//   reads    [R, KP]  b_r decayed from the start of the chunk (B)  ->  W = T B
//   queries  [C, KP]  scale q_t decayed from the start (Q)         ->  Q - A W
//   writes   [R, KP]  a_r decayed to the end of the chunk
//   decay    [KP]     the whole chunk's decay, exp G_C
//   inverse  [R, R]   L                                            ->  T = (I + L)^-1
//   masked   [C, R]   A                                            ->  A T
//   norms    [2 + FACTORS, C]
//
// With them a chunk acts on the state as U = T Z - W S, O = (A T) Z + (Q - A W) S, S <- Diag(decay) S + writes^T U.
// Chunks come from table[0 .. chunk_count], as (first row of the bindings, tokens, -, -).

override C: u32 = 32u;
override R: u32 = 64u;
// K rounded up to a multiple of 16; the channels above K hold zeros.
override KP: u32 = 128u;

override READS: u32 = 0u;
override QUERIES: u32 = R * KP;
override WRITES: u32 = (R + C) * KP;
override WHOLE_DECAY: u32 = (2u * R + C) * KP;
override INVERSE: u32 = (2u * R + C + 1u) * KP;
override MASKED: u32 = INVERSE + R * R;
override NORMS: u32 = MASKED + C * R;
// Floats of one chunk of one head.
override STRIDE: u32 = NORMS + (2u + FACTORS) * C;

@group(0) @binding(1) var<storage, read> table: array<vec4<u32>>;

// Start of a chunk's scratch: `chunk` of this step, value head number `head` of this step.
fn scratch_base(chunk: u32, head: u32) -> u32 {
  return params.scratch_at + (chunk * params.head_count + head) * STRIDE;
}
