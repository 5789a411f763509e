// How a chunk lies in scratch memory. A chunk has C tokens, R = n C sub-steps, and CZ of these have a content.
// Its tensors are, per value head, as pass 1 leaves them -> as passes 2-3 leave them (README, "The chunk form"):
//
//   inverse  [R/4][ROWS] vec4  L, below it A            ->  T = (I + L)^-1, below it A T
//   product  [KP/4][ROWS] vec4  B, below it Q, by slabs  ->  -T B, below it Q - A T B
//            [CZ/4][ROWS] vec4                           ->  the columns of T and A T that meet a content
//   writes   [R/4][KP] vec4    a_r decayed to the end of the chunk
//   decay    [KP]              the whole chunk's decay, exp G_C
//
// B holds the reads b_r and Q the queries scale q_t, both decayed from the start. With them a chunk acts on the
// state as
//
//   [U; O] = product [S; Z],   S <- Diag(decay) S + writes^T U
//
// Every left operand of a product lies as [columns / 4][rows] vec4: four columns of a row in a vec4, rows side
// by side, so that neighbouring threads, which work on neighbouring rows, read neighbouring words. Only B and Q,
// which are a right operand, lie row by row, in slabs of FB channels that occupy the words of the same
// channels of the product that replaces them.
// Chunks come from table[0 .. chunk_count], as (first row of the bindings, tokens, -, -).

override C: u32 = 32u;
override R: u32 = 64u;
override ROWS: u32 = R + C;
// K rounded up to a multiple of 16; the channels above K hold zeros.
override KP: u32 = 128u;
// Channels of a slab.
override FB: u32 = 32u;
// Content j of a chunk belongs to sub-step CONTENT_STRIDE j + CONTENT_OFFSET.
override CONTENT_STRIDE: u32 = 2u;
override CONTENT_OFFSET: u32 = 1u;
override CZ: u32 = R / CONTENT_STRIDE;

override INVERSE: u32 = 0u;
override PRODUCT: u32 = R * ROWS;
override WRITES: u32 = PRODUCT + (KP + CZ) * ROWS;
override WHOLE_DECAY: u32 = WRITES + R * KP;
// Room behind the decay for what the scan's last tile of channels reads in vain.
override TAIL: u32 = 0u;
// Floats of one chunk of one head, a multiple of 4.
override STRIDE: u32 = WHOLE_DECAY + KP + TAIL;

@group(0) @binding(1) var<storage, read> table: array<vec4<u32>>;

// Start of a chunk's scratch, in vec4s: `chunk` of this step, value head number `head` of this step.
fn scratch_base(chunk: u32, head: u32) -> u32 {
  return (params.scratch_at + (chunk * params.head_count + head) * STRIDE) / 4u;
}
