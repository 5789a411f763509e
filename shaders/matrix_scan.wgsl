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
@group(0) @binding(13) var<storage, read> halves: array<vec2<f16>>;

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
override STATE_SIZE: u32 = STATE_EACH * GROUPS * EDGE * VB;
override SUMS_SIZE: u32 = STEP_GROUPS * (R + CHUNK) * VB;
override CONTENTS_SIZE: u32 = CF * VB;
override PITCH: u32 = VB + 8u;
override OPERAND_SIZE: u32 = max(KP + CF, R) * PITCH;

var<workgroup> s: array<f32, STATE_SIZE>;           // [K][VB]
var<workgroup> sums: array<f32, SUMS_SIZE>;         // [STEP_GROUPS][R + C][VB]
var<workgroup> contents: array<f32, CONTENTS_SIZE>; // [CF][VB]
var<workgroup> operand: array<f16, OPERAND_SIZE>;   // (S; Z), then U
var<workgroup> largest: atomic<u32>;

// Pieces follow the chunks in the table: (first chunk, chunks, state, source).
const SOURCE_INITIAL = 1u;
const SOURCE_CARRIED = 2u;

fn load_contents(chunk: u32, h: u32, column: u32, lid: u32) {
  let first = table[chunk].x;
  let count = table[chunk].y;
  for (var i = lid; i < CONTENTS_SIZE; i += THREADS) {
    let row = i / VB;
    let c = column + i % VB;
    let t = row / FACTORS;
    var z = 0.0;
    if (t < count && c < V) {
      z = content_at(first + t, row % FACTORS * PATTERN + PATTERN - 1u, h, c);
    }
    contents[i] = z;
  }
}

@compute @workgroup_size(THREADS)
fn main(
  @builtin(workgroup_id) group: vec3<u32>,
  @builtin(num_workgroups) groups: vec3<u32>,
  @builtin(local_invocation_index) lid: u32,
  @builtin(subgroup_id) subgroup: u32,
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
  let tile_column = subgroup / GROUPS * EDGE;
  let row_tile = subgroup % ROW_GROUPS * ROWS_EACH;
  let step_group = subgroup % GROUPS / ROW_GROUPS;
  let state_tile = subgroup % GROUPS * STATE_EACH;

  for (var i = lid; i < STATE_SIZE; i += THREADS) {
    let d = i / VB;
    var x = 0.0;
    if (d < K && column + i % VB < V) {
      let at = state_base + d * V + i % VB;
      if (piece.w == SOURCE_INITIAL) {
        x = initial[params.initial_at + at];
      } else if (piece.w == SOURCE_CARRIED) {
        x = state[params.state_at + at];
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
    for (var i = lid; i < KP * VB; i += THREADS) {
      peak = max(peak, abs(s[i]));
    }
    for (var i = lid; i < CONTENTS_SIZE; i += THREADS) {
      peak = max(peak, abs(contents[i]));
    }
    atomicMax(&largest, bitcast<u32>(peak));
    workgroupBarrier();
    let exponent = clamp(atomicLoad(&largest) >> 23u, 4u, 253u);
    let up = bitcast<f32>((257u - exponent) << 23u);
    let down = bitcast<f32>((exponent - 3u) << 23u);
    for (var i = lid; i < KP * VB; i += THREADS) {
      let x = s[i];
      operand[i / VB * PITCH + i % VB] = f16(x * up);
      s[i] = x * floats[floats_at + WHOLE_DECAY + i / VB];
    }
    for (var i = lid; i < CONTENTS_SIZE; i += THREADS) {
      operand[(KP + i / VB) * PITCH + i % VB] = f16(contents[i] * up);
    }
    workgroupBarrier();

    // (U; O).
    var acc: array<MatrixSum, 16>;
    for (var i = 0u; i < ROWS_EACH; i++) {
      acc[i] = MatrixSum();
    }
    for (var x = 0u; x < STEPS_EACH; x++) {
      let step = step_group * STEPS_EACH + x;
      let right = coopLoadT<MatrixRight>(&operand[step * EDGE * PITCH + tile_column], PITCH);
      for (var i = 0u; i < ROWS_EACH; i++) {
        let at = halves_at + ((row_tile + i) * LEFT_TILES + step) * (TILE / 2u);
        acc[i] = coopMultiplyAdd(coopLoadT<MatrixLeft>(&halves[at], EDGE / 2u), right, acc[i]);
      }
    }
    for (var i = 0u; i < ROWS_EACH; i++) {
      let row = step_group * (R + CHUNK) + (row_tile + i) * EDGE;
      coopStoreT(acc[i], &sums[row * VB + tile_column], VB);
    }
    workgroupBarrier();

    let first = table[chunk].x;
    let count = table[chunk].y;
    let unit = floats[floats_at + UNIT];
    for (var i = lid; i < R * VB; i += THREADS) {
      var x = sums[i];
      for (var g = 1u; g < STEP_GROUPS; g++) {
        x += sums[g * (R + CHUNK) * VB + i];
      }
      operand[i / VB * PITCH + i % VB] = f16(x * unit);
    }
    for (var i = lid; i < CHUNK * VB; i += THREADS) {
      var x = sums[R * VB + i];
      for (var g = 1u; g < STEP_GROUPS; g++) {
        x += sums[(g * (R + CHUNK) + R) * VB + i];
      }
      let t = i / VB;
      let c = column + i % VB;
      if (t < count && c < V) {
        o[params.o_at + ((first + t) * params.value_heads + h) * V + c] = Element(x * down);
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
    for (var i = 0u; i < STATE_EACH; i++) {
      acc[i] = MatrixSum();
    }
    for (var x = 0u; x < R / EDGE; x++) {
      let right = coopLoadT<MatrixRight>(&operand[x * EDGE * PITCH + tile_column], PITCH);
      for (var i = 0u; i < STATE_EACH; i++) {
        let tile = min(state_tile + i, KEY_TILES - 1u);
        let at = halves_at + (WRITES + (x * KEY_TILES + tile) * TILE) / 2u;
        acc[i] = coopMultiplyAdd(coopLoad<MatrixLeft>(&halves[at], EDGE / 2u), right, acc[i]);
      }
    }
    let back = down / unit;
    for (var i = 0u; i < STATE_EACH; i++) {
      // Tiles beyond K have rows of their own, which nothing reads.
      let at = (state_tile + i) * EDGE * VB + tile_column;
      let sum = coopLoadT<MatrixSum>(&s[at], VB) + back * acc[i];
      coopStoreT(sum, &s[at], VB);
    }
    workgroupBarrier();
  }

  for (var i = lid; i < K * VB; i += THREADS) {
    if (column + i % VB < V) {
      state[params.state_at + state_base + i / VB * V + i % VB] = s[i];
    }
  }
}
