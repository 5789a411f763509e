// Matrix tier, pass 3 of 3, sequential over the chunks of a sequence, parallel over sequences, heads and blocks of
// VB value columns (columns of S are independent). Per chunk
//
//   (U; O) = left (S; Z)                    [R + C, VB]
//   S = Diag(exp G_C) S + writes^T U        [K, VB]
//
// on matrix units: float16 operands, float32 sums, float32 state. Each column of (S; Z) is divided by a power of two
// that takes the largest of it to between 8 and 16, found anew for each chunk, so that contents or states of any size
// neither overflow nor vanish, whatever is in other columns; U is multiplied by `unit` where it could overflow. With the
// powers by which pass 1 has divided reads, writes and queries, all of this is exact and undone in float32.
//
// With TRANSITION it finds instead what segments of a sequence do to any state, S -> M S + N (see prefill_join.wgsl):
// the value columns start from zero and end as N; K columns more start from the identity, have no contents and end as M.

@group(0) @binding(10) var<storage, read> initial: array<f32>;           // [N, HV, K, V]
@group(0) @binding(11) var<storage, read_write> state: array<f32>;       // [N, HV, K, V]
@group(0) @binding(12) var<storage, read> floats: array<f32>;
@group(0) @binding(13) var<storage, read> halves: array<vec4<f16>>;

override VB: u32 = 16u;
override THREADS: u32 = 64u;
// Subgroups. Each has a share of the rows of (U; O) and of those of S, for all columns, so that a tile of `left` or
// `writes` is read once.
override GROUPS: u32 = 2u;
override ROWS_EACH: u32 = ROW_TILES / GROUPS;
override COLUMN_TILES: u32 = VB / EDGE;
override WRITE_STEPS: u32 = R / EDGE;
override STATE_EACH: u32 = (KEY_TILES + GROUPS - 1u) / GROUPS;
// Matrices in workgroup memory are rows of VB / 4 vec4; those of float16 have two more, to spread the banks.
override QUADS: u32 = VB / 4u;
override PITCH: u32 = QUADS + 2u;
override STATE_SIZE: u32 = STATE_EACH * GROUPS * EDGE * QUADS;
override SUMS_SIZE: u32 = (R + CHUNK) * QUADS;
// How many vec4 of S, of Z and of O a thread has to do with, and of U.
override STATE_ROUNDS: u32 = (KP * QUADS + THREADS - 1u) / THREADS;
override CONTENT_ROUNDS: u32 = (CF * QUADS + THREADS - 1u) / THREADS;
override OUTPUT_ROUNDS: u32 = (CHUNK * QUADS + THREADS - 1u) / THREADS;
override U_ROUNDS: u32 = (R * QUADS + THREADS - 1u) / THREADS;
override OPERAND_SIZE: u32 = max(KP + CF, R) * PITCH;

var<workgroup> s: array<vec4<f32>, STATE_SIZE>;           // [K][VB]
var<workgroup> sums: array<vec4<f32>, SUMS_SIZE>;         // (U; O) [R + C][VB]
var<workgroup> operand: array<vec4<f16>, OPERAND_SIZE>;   // (S; Z), then U
var<workgroup> largest: array<atomic<u32>, VB>;           // bits of the largest of (S; Z), for each column

override TRANSITION: bool = false;
override VALUE_BLOCKS: u32 = (V + VB - 1u) / VB;
override KEY_BLOCKS: u32 = (K + VB - 1u) / VB;

// Pieces follow the chunks in the table: (first chunk, chunks, state or NOWHERE, source + 4 x its state).
const SOURCE_INITIAL = 1u;
const SOURCE_CARRIED = 2u;
const SOURCE_IDENTITY = 3u;
const NOWHERE = 0xffffffffu;

// vec4 number `i` of the contents [CF][VB] of a chunk with `count` tokens from `first`.
fn contents_at(first: u32, count: u32, identity: bool, h: u32, column: u32, i: u32) -> vec4<f32> {
  let row = min(i / QUADS, CF - 1u);
  let t = min(row / FACTORS, count - 1u);
  var z = vec4<f32>();
  for (var q = 0u; q < 4u; q++) {  // unrolled
    // What is not there is read from the last row or column and dropped: loads without branches overlap.
    let c = column + i % QUADS * 4u + q;
    let x = content_at(first + t, row % FACTORS * PATTERN + PATTERN - 1u, h, min(c, V - 1u));
    z[q] = select(0.0, x, row / FACTORS < count && c < V && !identity);
  }
  return z;
}

fn powers_at(floats_at: u32) -> vec4<f32> {
  let at = floats_at + UNIT;
  return vec4<f32>(floats[at], floats[at + 1u], floats[at + 2u], floats[at + 3u]);
}

@compute @workgroup_size(THREADS)
fn main(
  @builtin(workgroup_id) group: vec3<u32>,
  @builtin(num_workgroups) groups: vec3<u32>,
  @builtin(local_invocation_index) lid: u32,
  @builtin(subgroup_id) subgroup: u32,
  @builtin(subgroup_invocation_id) lane: u32,
  @builtin(subgroup_size) lanes: u32,
) {
  let item = group.y * groups.x + group.x;
  let blocks = VALUE_BLOCKS + select(0u, KEY_BLOCKS, TRANSITION);
  if (item >= params.piece_count * params.head_count * blocks) {
    return;
  }
  let block = item % blocks;
  let identity = TRANSITION && block >= VALUE_BLOCKS;
  let column = select(block, block - VALUE_BLOCKS, identity) * VB;
  let head = item / blocks % params.head_count;
  let h = params.first_head + head;
  let piece = table[params.piece_at + item / blocks / params.head_count];
  let state_source = select(piece.w % 4u, SOURCE_IDENTITY, identity);
  let origin = piece.w / 4u * params.value_heads + h;
  let target_state = piece.z * params.value_heads + h;
  let row_tile = subgroup * ROWS_EACH;
  let state_tile = subgroup * STATE_EACH;

  for (var i = lid; i < STATE_SIZE; i += THREADS) {
    let d = i / QUADS;
    var x = vec4<f32>();
    for (var q = 0u; q < 4u; q++) {  // unrolled
      let c = column + i % QUADS * 4u + q;
      if (state_source == SOURCE_IDENTITY) {
        x[q] = select(0.0, 1.0, d == c && d < K);
      } else if (d < K && c < V) {
        let at = (origin * K + d) * V + c;
        if (state_source == SOURCE_INITIAL) {
          x[q] = initial[params.initial_at + at];
        } else if (state_source == SOURCE_CARRIED) {
          x[q] = state[params.state_at + at];
        }
      }
    }
    s[i] = x;
  }
  for (var i = lid; i < VB; i += THREADS) {
    atomicStore(&largest[i], 0u);
  }
  workgroupBarrier();

  // Column c of `s` holds S over a power of two of its own; these are the powers of this thread's four columns, which
  // are the same in all that it does.
  let quad = lid % QUADS;
  var down = vec4<f32>(1.0);

  // What the next chunk needs of scratch memory and contents is asked for while this one computes.
  var left: array<MatrixLeft, 128>;      // [ROWS_EACH][LEFT_TILES]
  var write: array<MatrixLeft, 128>;     // [STATE_EACH][R / EDGE]
  var z: array<vec4<f32>, 32>;           // [CONTENT_ROUNDS]
  var decay: array<f32, 64>;             // [STATE_ROUNDS]
  let last = max(piece.x + piece.y, 1u) - 1u;
  var halves_at = halves_base(piece.x, head);
  var rows = table[piece.x].xy;          // first token and tokens of this chunk, and of the next
  var next_rows = table[min(piece.x + 1u, last)].xy;
  var powers = vec4<f32>(1.0);           // unit, then those of reads, writes and queries
  if (piece.y > 0u) {
    let floats_at = floats_base(piece.x, head);
    powers = powers_at(floats_at);
    for (var i = 0u; i < ROWS_EACH; i++) {  // unrolled
      for (var x = 0u; x < LEFT_TILES; x++) {  // unrolled
        let at = halves_at + ((row_tile + i) * LEFT_TILES + x) * (TILE / 4u);
        left[i * LEFT_TILES + x] = coopLoadT<MatrixLeft>(&halves[at], EDGE / 4u);
      }
    }
    for (var y = 0u; y < CONTENT_ROUNDS; y++) {  // unrolled
      z[y] = contents_at(rows.x, rows.y, identity, h, column, lid + y * THREADS);
    }
    for (var y = 0u; y < STATE_ROUNDS; y++) {  // unrolled
      decay[y] = floats[floats_at + WHOLE_DECAY + min((lid + y * THREADS) / QUADS, KP - 1u)];
    }
  }

  for (var chunk = piece.x; chunk < piece.x + piece.y; chunk++) {
    let first = rows.x;
    let count = rows.y;
    let next = min(chunk + 1u, last);

    // (S; Z) as float16 over 2^e, an e for each column, and what S keeps.
    var old: array<vec4<f32>, 64>;       // [STATE_ROUNDS]
    var peak = vec4<f32>();
    for (var y = 0u; y < STATE_ROUNDS; y++) {  // unrolled
      old[y] = s[min(lid + y * THREADS, (KP - 1u) * QUADS + quad)] * down;
      peak = max(peak, abs(old[y]));
    }
    for (var y = 0u; y < CONTENT_ROUNDS; y++) {  // unrolled
      peak = max(peak, abs(z[y]));
    }
    for (var other = QUADS; other < lanes; other *= 2u) {
      peak = max(peak, subgroupShuffleXor(peak, other));
    }
    if (lane < QUADS) {
      for (var q = 0u; q < 4u; q++) {  // unrolled
        atomicMax(&largest[quad * 4u + q], bitcast<u32>(peak[q]));
      }
    }
    workgroupBarrier();
    var up: vec4<f32>;
    for (var q = 0u; q < 4u; q++) {  // unrolled
      let exponent = clamp(atomicLoad(&largest[quad * 4u + q]) >> 23u, 4u, 253u);
      up[q] = bitcast<f32>((257u - exponent) << 23u);
      down[q] = bitcast<f32>((exponent - 3u) << 23u);
    }
    for (var y = 0u; y < STATE_ROUNDS; y++) {  // unrolled
      let i = lid + y * THREADS;
      if (i < KP * QUADS) {
        let x = old[y] * up;
        operand[i / QUADS * PITCH + quad] = vec4<f16>(x);
        s[i] = x * decay[y];
      }
    }
    for (var y = 0u; y < CONTENT_ROUNDS; y++) {  // unrolled
      let i = lid + y * THREADS;
      if (i < CF * QUADS) {
        operand[(KP + i / QUADS) * PITCH + quad] = vec4<f16>(z[y] * up);
      }
    }
    workgroupBarrier();

    for (var i = 0u; i < STATE_EACH; i++) {  // unrolled
      for (var x = 0u; x < WRITE_STEPS; x++) {  // unrolled
        let at = halves_at + (WRITES + (x * KEY_TILES + min(state_tile + i, KEY_TILES - 1u)) * TILE) / 4u;
        write[i * WRITE_STEPS + x] = coopLoad<MatrixLeft>(&halves[at], EDGE / 4u);
      }
    }
    for (var y = 0u; y < CONTENT_ROUNDS; y++) {  // unrolled
      z[y] = contents_at(next_rows.x, next_rows.y, identity, h, column, lid + y * THREADS);
    }
    rows = next_rows;
    next_rows = table[min(chunk + 2u, last)].xy;
    let next_floats = floats_base(next, head);
    let next_powers = powers_at(next_floats);
    for (var y = 0u; y < STATE_ROUNDS; y++) {  // unrolled
      decay[y] = floats[next_floats + WHOLE_DECAY + min((lid + y * THREADS) / QUADS, KP - 1u)];
    }

    // (U; O).
    var acc: array<MatrixSum, 64>;       // [rows][COLUMN_TILES]
    for (var i = 0u; i < ROWS_EACH; i++) {  // unrolled
      for (var j = 0u; j < COLUMN_TILES; j++) {  // unrolled
        acc[i * COLUMN_TILES + j] = MatrixSum();
      }
    }
    for (var x = 0u; x < LEFT_TILES; x++) {  // unrolled
      for (var j = 0u; j < COLUMN_TILES; j++) {  // unrolled
        let at = x * EDGE * PITCH + j * EDGE / 4u;
        let right = coopLoadT<MatrixRight>(&operand[at], PITCH);
        for (var i = 0u; i < ROWS_EACH; i++) {  // unrolled
          acc[i * COLUMN_TILES + j] = coopMultiplyAdd(left[i * LEFT_TILES + x], right, acc[i * COLUMN_TILES + j]);
        }
      }
    }
    for (var i = 0u; i < ROWS_EACH; i++) {  // unrolled
      for (var j = 0u; j < COLUMN_TILES; j++) {  // unrolled
        coopStoreT(acc[i * COLUMN_TILES + j], &sums[(row_tile + i) * EDGE * QUADS + j * EDGE / 4u], QUADS);
      }
    }
    workgroupBarrier();

    for (var y = 0u; y < U_ROUNDS; y++) {  // unrolled
      let i = lid + y * THREADS;
      if (i < R * QUADS) {
        operand[i / QUADS * PITCH + quad] = vec4<f16>(sums[i] * powers.x);
      }
    }
    for (var y = 0u; y < OUTPUT_ROUNDS; y++) {  // unrolled
      let i = lid + y * THREADS;
      let t = i / QUADS;
      if (!TRANSITION && t < min(count, CHUNK)) {
        let x = sums[R * QUADS + i] * down * (params.scale * powers.w);
        let to = params.o_at + ((first + t) * params.value_heads + h) * V + column + i % QUADS * 4u;
        for (var q = 0u; q < 4u; q++) {  // unrolled
          if (column + i % QUADS * 4u + q < V) {
            o[to + q] = Element(x[q]);
          }
        }
      }
    }
    for (var i = lid; i < VB; i += THREADS) {
      atomicStore(&largest[i], 0u);
    }
    workgroupBarrier();

    halves_at = halves_base(next, head);
    for (var i = 0u; i < ROWS_EACH; i++) {  // unrolled
      for (var x = 0u; x < LEFT_TILES; x++) {  // unrolled
        let at = halves_at + ((row_tile + i) * LEFT_TILES + x) * (TILE / 4u);
        left[i * LEFT_TILES + x] = coopLoadT<MatrixLeft>(&halves[at], EDGE / 4u);
      }
    }

    // The new state.
    for (var i = 0u; i < STATE_EACH; i++) {  // unrolled
      for (var j = 0u; j < COLUMN_TILES; j++) {  // unrolled
        acc[i * COLUMN_TILES + j] = MatrixSum();
      }
    }
    for (var x = 0u; x < WRITE_STEPS; x++) {  // unrolled
      for (var j = 0u; j < COLUMN_TILES; j++) {  // unrolled
        let right = coopLoadT<MatrixRight>(&operand[x * EDGE * PITCH + j * EDGE / 4u], PITCH);
        for (var i = 0u; i < STATE_EACH; i++) {  // unrolled
          acc[i * COLUMN_TILES + j] = coopMultiplyAdd(write[i * WRITE_STEPS + x], right, acc[i * COLUMN_TILES + j]);
        }
      }
    }
    let back = powers.y / powers.x * powers.z;
    powers = next_powers;
    for (var i = 0u; i < STATE_EACH; i++) {  // unrolled
      for (var j = 0u; j < COLUMN_TILES; j++) {  // unrolled
        // Tiles beyond K have rows of their own, which nothing reads.
        let at = (state_tile + i) * EDGE * QUADS + j * EDGE / 4u;
        let sum = coopLoadT<MatrixSum>(&s[at], QUADS) + back * acc[i * COLUMN_TILES + j];
        coopStoreT(sum, &s[at], QUADS);
      }
    }
    workgroupBarrier();
  }

  if (piece.z == NOWHERE) {
    return;
  }
  for (var i = lid; i < K * QUADS; i += THREADS) {
    let d = i / QUADS;
    for (var q = 0u; q < 4u; q++) {  // unrolled
      let c = column + i % QUADS * 4u + q;
      let x = s[i][q] * down[q];
      if (state_source == SOURCE_IDENTITY) {
        if (c < K) {
          // Transposed, as the join reads it.
          state[params.transition_at + (target_state * K + c) * K + d] = x;
        }
      } else if (c < V) {
        state[params.state_at + (target_state * K + d) * V + c] = x;
      }
    }
  }
}
