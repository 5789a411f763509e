// Matrix tier, pass 3 of 3, sequential over the chunks of a sequence, parallel over sequences, heads and blocks of
// VB value columns (columns of S are independent). Per chunk
//
//   (U; O) = left (S; Z)                    [R + C, VB]
//   S = Diag(exp G_C) S + writes^T U        [K, VB]
//
// on matrix units: float16 operands, float32 sums, float32 state. (S; Z) are scaled by a power of two that takes
// the largest of them to between 8 and 16, found anew for each chunk, so that no size of contents or state
// overflows or vanishes; U by `unit` on top where that could overflow. Both are exact and undone in float32.

@group(0) @binding(10) var<storage, read> initial: array<f32>;           // [N, HV, K, V]
@group(0) @binding(11) var<storage, read_write> state: array<f32>;       // [N, HV, K, V]
@group(0) @binding(12) var<storage, read> floats: array<f32>;
@group(0) @binding(13) var<storage, read> halves: array<vec4<f16>>;

override VB: u32 = 16u;
override THREADS: u32 = 64u;
// Subgroups: ROW_GROUPS x STEP_GROUPS x (VB / EDGE). Each has a column of tiles; of those above (U; O) every
// ROW_GROUPS-th share, of the sums over (S; Z) every STEP_GROUPS-th.
override ROW_GROUPS: u32 = 2u;
override STEP_GROUPS: u32 = 1u;
override GROUPS: u32 = ROW_GROUPS * STEP_GROUPS;
override ROWS_EACH: u32 = ROW_TILES / ROW_GROUPS;    // at most 16
override STEPS_EACH: u32 = LEFT_TILES / STEP_GROUPS;
override STATE_EACH: u32 = (KEY_TILES + GROUPS - 1u) / GROUPS;  // at most 16
// Matrices in workgroup memory are rows of VB / 4 vec4; those of float16 have two more, to spread the banks.
override QUADS: u32 = VB / 4u;
override PITCH: u32 = QUADS + 2u;
override STATE_SIZE: u32 = STATE_EACH * GROUPS * EDGE * QUADS;
override SUMS_SIZE: u32 = STEP_GROUPS * (R + CHUNK) * QUADS;
override CONTENTS_SIZE: u32 = CF * QUADS;
override OPERAND_SIZE: u32 = max(KP + CF, R) * PITCH;

var<workgroup> s: array<vec4<f32>, STATE_SIZE>;           // [K][VB]
var<workgroup> sums: array<vec4<f32>, SUMS_SIZE>;         // [STEP_GROUPS][R + C][VB]
var<workgroup> contents: array<vec4<f32>, CONTENTS_SIZE>; // [CF][VB]
var<workgroup> operand: array<vec4<f16>, OPERAND_SIZE>;   // (S; Z), then U
var<workgroup> largest: atomic<u32>;

// Pieces follow the chunks in the table: (first chunk, chunks, state, source).
const SOURCE_INITIAL = 1u;
const SOURCE_CARRIED = 2u;

fn load_contents(chunk: u32, h: u32, column: u32, lid: u32) {
  let first = table[chunk].x;
  let count = table[chunk].y;
  for (var i = lid; i < CONTENTS_SIZE; i += THREADS) {
    let row = i / QUADS;
    let t = row / FACTORS;
    var z = vec4<f32>();
    for (var q = 0u; q < 4u; q++) {  // unrolled
      let c = column + i % QUADS * 4u + q;
      if (t < count && c < V) {
        z[q] = content_at(first + t, row % FACTORS * PATTERN + PATTERN - 1u, h, c);
      }
    }
    contents[i] = z;
  }
}

fn largest_of(x: vec4<f32>) -> f32 {
  let y = max(abs(x.xy), abs(x.zw));
  return max(y.x, y.y);
}

@compute @workgroup_size(THREADS)
fn main(
  @builtin(workgroup_id) group: vec3<u32>,
  @builtin(num_workgroups) groups: vec3<u32>,
  @builtin(local_invocation_index) lid: u32,
  @builtin(subgroup_id) subgroup: u32,
  @builtin(subgroup_invocation_id) lane: u32,
) {
  let item = group.y * groups.x + group.x;
  let column_blocks = (V + VB - 1u) / VB;
  if (item >= params.piece_count * params.head_count * column_blocks) {
    return;
  }
  let column = item % column_blocks * VB;
  let head = item / column_blocks % params.head_count;
  let h = params.first_head + head;
  let piece = table[params.chunk_count + item / column_blocks / params.head_count];
  let state_base = (piece.z * params.value_heads + h) * K * V + column;
  let tile_column = subgroup / GROUPS * (EDGE / 4u);
  let row_tile = subgroup % ROW_GROUPS * ROWS_EACH;
  let step_group = subgroup % GROUPS / ROW_GROUPS;
  let state_tile = subgroup % GROUPS * STATE_EACH;

  for (var i = lid; i < STATE_SIZE; i += THREADS) {
    let d = i / QUADS;
    var x = vec4<f32>();
    for (var q = 0u; q < 4u; q++) {  // unrolled
      let c = i % QUADS * 4u + q;
      if (d < K && column + c < V) {
        let at = state_base + d * V + c;
        if (piece.w == SOURCE_INITIAL) {
          x[q] = initial[params.initial_at + at];
        } else if (piece.w == SOURCE_CARRIED) {
          x[q] = state[params.state_at + at];
        }
      }
    }
    s[i] = x;
  }
  if (lid == 0u) {
    atomicStore(&largest, 0u);
  }
  if (piece.y > 0u) {
    load_contents(piece.x, h, column, lid);
  }
  workgroupBarrier();

  for (var chunk = piece.x; chunk < piece.x + piece.y; chunk++) {
    let floats_at = floats_base(chunk, head);
    let halves_at = halves_base(chunk, head);

    // (S; Z) as float16 in units of 2^e, and what S keeps.
    var peak = 0.0;
    for (var i = lid; i < KP * QUADS; i += THREADS) {
      peak = max(peak, largest_of(s[i]));
    }
    for (var i = lid; i < CONTENTS_SIZE; i += THREADS) {
      peak = max(peak, largest_of(contents[i]));
    }
    peak = subgroupMax(peak);
    if (lane == 0u) {
      atomicMax(&largest, bitcast<u32>(peak));
    }
    workgroupBarrier();
    let exponent = clamp(atomicLoad(&largest) >> 23u, 4u, 253u);
    let up = bitcast<f32>((257u - exponent) << 23u);
    let down = bitcast<f32>((exponent - 3u) << 23u);
    for (var i = lid; i < KP * QUADS; i += THREADS) {
      let x = s[i];
      operand[i / QUADS * PITCH + i % QUADS] = vec4<f16>(x * up);
      s[i] = x * floats[floats_at + WHOLE_DECAY + i / QUADS];
    }
    for (var i = lid; i < CONTENTS_SIZE; i += THREADS) {
      operand[(KP + i / QUADS) * PITCH + i % QUADS] = vec4<f16>(contents[i] * up);
    }
    workgroupBarrier();

    // (U; O).
    var acc: array<MatrixSum, 16>;
    for (var i = 0u; i < ROWS_EACH; i++) {  // unrolled
      acc[i] = MatrixSum();
    }
    for (var x = 0u; x < STEPS_EACH; x++) {
      let step = step_group * STEPS_EACH + x;
      let right = coopLoadT<MatrixRight>(&operand[step * EDGE * PITCH + tile_column], PITCH);
      for (var i = 0u; i < ROWS_EACH; i++) {  // unrolled
        let at = halves_at + ((row_tile + i) * LEFT_TILES + step) * (TILE / 4u);
        acc[i] = coopMultiplyAdd(coopLoadT<MatrixLeft>(&halves[at], EDGE / 4u), right, acc[i]);
      }
    }
    for (var i = 0u; i < ROWS_EACH; i++) {  // unrolled
      let row = step_group * (R + CHUNK) + (row_tile + i) * EDGE;
      coopStoreT(acc[i], &sums[row * QUADS + tile_column], QUADS);
    }
    workgroupBarrier();

    let first = table[chunk].x;
    let count = table[chunk].y;
    let unit = floats[floats_at + UNIT];
    for (var i = lid; i < R * QUADS; i += THREADS) {
      var x = sums[i];
      for (var g = 1u; g < STEP_GROUPS; g++) {
        x += sums[g * (R + CHUNK) * QUADS + i];
      }
      operand[i / QUADS * PITCH + i % QUADS] = vec4<f16>(x * unit);
    }
    for (var i = lid; i < CHUNK * QUADS; i += THREADS) {
      var x = sums[R * QUADS + i];
      for (var g = 1u; g < STEP_GROUPS; g++) {
        x += sums[(g * (R + CHUNK) + R) * QUADS + i];
      }
      x *= down;
      let t = i / QUADS;
      if (t < count) {
        let to = params.o_at + ((first + t) * params.value_heads + h) * V + column + i % QUADS * 4u;
        for (var q = 0u; q < 4u; q++) {  // unrolled
          if (column + i % QUADS * 4u + q < V) {
            o[to + q] = Element(x[q]);
          }
        }
      }
    }
    if (lid == 0u) {
      atomicStore(&largest, 0u);
    }
    if (chunk + 1u < piece.x + piece.y) {
      load_contents(chunk + 1u, h, column, lid);
    }
    workgroupBarrier();

    // The new state.
    for (var i = 0u; i < STATE_EACH; i++) {  // unrolled
      acc[i] = MatrixSum();
    }
    for (var x = 0u; x < R / EDGE; x++) {
      let right = coopLoadT<MatrixRight>(&operand[x * EDGE * PITCH + tile_column], PITCH);
      for (var i = 0u; i < STATE_EACH; i++) {  // unrolled
        let tile = min(state_tile + i, KEY_TILES - 1u);
        let at = halves_at + (WRITES + (x * KEY_TILES + tile) * TILE) / 4u;
        acc[i] = coopMultiplyAdd(coopLoad<MatrixLeft>(&halves[at], EDGE / 4u), right, acc[i]);
      }
    }
    let back = down / unit;
    for (var i = 0u; i < STATE_EACH; i++) {  // unrolled
      // Tiles beyond K have rows of their own, which nothing reads.
      let at = (state_tile + i) * EDGE * QUADS + tile_column;
      let sum = coopLoadT<MatrixSum>(&s[at], QUADS) + back * acc[i];
      coopStoreT(sum, &s[at], QUADS);
    }
    workgroupBarrier();
  }

  for (var i = lid; i < K * QUADS; i += THREADS) {
    for (var q = 0u; q < 4u; q++) {  // unrolled
      let c = i % QUADS * 4u + q;
      if (column + c < V) {
        state[params.state_at + state_base + i / QUADS * V + c] = s[i][q];
      }
    }
  }
}
