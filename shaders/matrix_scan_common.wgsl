// What both forms of the matrix tier's scan share.

@group(0) @binding(10) var<storage, read> initial: array<f32>;           // [N, HV, K, V]
@group(0) @binding(11) var<storage, read_write> state: array<f32>;       // [N, HV, K, V]
// (Only read, but not declared so: NVIDIA's compiler moves loads of what nobody writes down to where they are used, past any
// barrier, so that nothing is asked for ahead.)
@group(0) @binding(12) var<storage, read_write> floats: array<vec4<f32>>;
@group(0) @binding(13) var<storage, read_write> halves: array<vec4<f16>>;

override VB: u32 = 16u;          // value columns a workgroup
override THREADS: u32 = 256u;
override TRANSITION: bool = false;
override VALUE_BLOCKS: u32 = (V + VB - 1u) / VB;
override KEY_BLOCKS: u32 = (K + VB - 1u) / VB;

// Pieces follow the chunks in the table: (first chunk, chunks, state or NOWHERE, source + 4 x its state).
const SOURCE_INITIAL = 1u;
const SOURCE_CARRIED = 2u;
const SOURCE_IDENTITY = 3u;
const NOWHERE = 0xffffffffu;

// Element (d, c) of the state that a piece starts from, where that is one of the states in memory. (What is not there is read
// from the last row or column and dropped, and the branch is the caller's: so loads overlap.)
fn initial_at(origin: u32, d: u32, c: u32) -> f32 {
  let s = initial[params.initial_at + (origin * K + min(d, K - 1u)) * V + min(c, V - 1u)];
  return select(0.0, s, d < K && c < V);
}

fn carried_at(origin: u32, d: u32, c: u32) -> f32 {
  let s = state[params.state_at + (origin * K + min(d, K - 1u)) * V + min(c, V - 1u)];
  return select(0.0, s, d < K && c < V);
}

fn identity_at(d: u32, c: u32) -> f32 {
  return select(0.0, 1.0, d == c && d < K);
}

// The same of the one that it ends with.
fn keep_state(source: u32, place: u32, d: u32, c: u32, s: f32) {
  if (source == SOURCE_IDENTITY) {
    if (c < K && d < K) {
      // Transposed, as the join reads it.
      state[params.transition_at + (place * K + c) * K + d] = s;
    }
  } else if (c < V && d < K) {
    state[params.state_at + (place * K + d) * V + c] = s;
  }
}

// Where vector lid + y THREADS of a part lies in workgroup memory, with so many a row.
fn placed(lid: u32, y: u32, quads: u32, pitch: u32) -> u32 {
  if (THREADS % quads == 0u) {
    // At a fixed distance.
    return lid / quads * pitch + lid % quads + y * (THREADS / quads * pitch);
  }
  let i = lid + y * THREADS;
  return i / quads * pitch + i % quads;
}

// The power of two that takes a number with these bits to between 8 and 16, as bits; its inverse as a number, with room for
// that over `below_one`. (Float16 holds the smallest float32 all the same.)
fn unit_of(largest_bits: u32) -> u32 {
  return (clamp(largest_bits >> 23u, 18u, 253u) - 3u) << 23u;
}

fn inverse_of(unit: u32) -> f32 {
  return bitcast<f32>(0x7f000000u - unit);
}

// 1 / x of a power of two, which no division has to find.
fn inverse_power(x: f32) -> f32 {
  return inverse_of(bitcast<u32>(x));
}

// The power of two itself.
fn unit_from(largest: f32) -> f32 {
  return bitcast<f32>(unit_of(bitcast<u32>(largest)));
}
