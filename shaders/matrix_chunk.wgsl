// How a chunk lies in the matrix tier's scratch memory. A chunk has C tokens and R = N C sub-steps. Per value head, in
// float32 (`floats`):
//
//   decay     [KP]              the whole chunk's decay, exp G_C
//   unit      [1]               a power of two at which U cannot overflow float16
//   powers    [3]               powers of two by which reads, writes and queries are divided, so that float16 holds
//                               vectors of any size: W and U are over the first, writes over the second, Q and A over
//                               the third; A over the part below one of the second, too (see `below_one`), and W times it
//   w_unit    [1]               a power of two at which W cannot overflow float16
//
// and in float16 (`halves`):
//
//   left      [R + C, KP]       -W = -T B over Q; B and Q are decayed from the start of the chunk
//   lower     [R + C, R]        T = (I + L)^-1 over A
//   writes    [R, KP]           a_r decayed to the end of the chunk
//
// Behind all floats each workgroup of pass 1 has L [R, R] over A [C, R], used where decays are strong.
//
// With them U = T Z - W S, O = Q S + A U, and S <- Diag(decay) S + writes^T U.

override N: u32 = PATTERN * FACTORS;  // sub-steps a token
override CHUNK: u32 = 32u;
override R: u32 = N * CHUNK;
// K rounded up to a multiple of 16; the channels above K hold zeros.
override KP: u32 = 128u;

override WHOLE_DECAY: u32 = 0u;
override UNIT: u32 = WHOLE_DECAY + KP;
override POWERS: u32 = UNIT + 1u;
override W_UNIT: u32 = UNIT + 4u;
override FLOATS: u32 = UNIT + 8u;

override KEY_TILES: u32 = KP / EDGE;
override LOWER_TILES: u32 = R / EDGE;
override ROW_TILES: u32 = (R + CHUNK) / EDGE;
override LOWER: u32 = (R + CHUNK) * KP;
override WRITES: u32 = LOWER + (R + CHUNK) * R;
override HALVES: u32 = WRITES + R * KP;

@group(0) @binding(1) var<storage, read> table: array<vec4<u32>>;

// Start of a chunk's floats, and of its halves in vec4s: `chunk` of this step, value head number `head` of it.
fn floats_base(chunk: u32, head: u32) -> u32 {
  return params.scratch_at + (chunk * params.head_count + head) * FLOATS;
}

fn halves_base(chunk: u32, head: u32) -> u32 {
  return params.halves_at + (chunk * params.head_count + head) * (HALVES / 4u);
}

// What is left of the contents after writes this small is as small, beside them no more than float16 holds: so S is taken over
// the writes' power as well where that is below one, down to here. (S may also be far larger than contents times writes. From
// here to that there is room for both.)
const SMALLEST_BELOW_ONE = 1.0 / 16384.0;

fn below_one(writes_power: f32) -> f32 {
  return clamp(writes_power, SMALLEST_BELOW_ONE, 1.0);
}

fn largest_of(x: vec4<f32>) -> f32 {
  let y = max(abs(x.xy), abs(x.zw));
  return max(y.x, y.y);
}
