// Matrix tier, pass 3 of 3, sequential over the chunks of a sequence, parallel over sequences, heads and blocks of
// VB value columns (columns of S are independent). Per chunk
//
//   (X; Y) = left S                          [R + C, VB]
//   (U; O) = lower (Z - X) + (0; Y)          [R + C, VB]
//   S = Diag(exp G_C) S + writes^T U         [K, VB]
//
// on matrix units: float16 operands, float32 sums, float32 state. Each column of S and Z is divided by a power of two
// that takes the largest of both to between 8 and 16, found anew for each chunk, so that contents or states of any size
// neither overflow nor vanish, whatever is in other columns; the residual Z - X and U are multiplied by their units where
// they could overflow. With the powers by which pass 1 has divided reads, writes and queries, all of this is exact and
// undone in float32.
//
// With TRANSITION it finds instead what segments of a sequence do to any state, S -> M S + N (see prefill_join.wgsl):
// the value columns start from zero and end as N; K columns more start from the identity, have no contents and end as M.

@group(0) @binding(10) var<storage, read> initial: array<f32>;           // [N, HV, K, V]
@group(0) @binding(11) var<storage, read_write> state: array<f32>;       // [N, HV, K, V]
@group(0) @binding(12) var<storage, read> floats: array<f32>;
@group(0) @binding(13) var<storage, read> halves: array<vec4<f16>>;

override VB: u32 = 16u;
override THREADS: u32 = 256u;
// Subgroups. Tiles of a product are dealt out to them in rounds; those without one repeat the last, since cooperative
// calls need the same control flow in all.
override GROUPS: u32 = 8u;
override COLUMN_TILES: u32 = VB / EDGE;
override TILES: u32 = ROW_TILES * COLUMN_TILES;              // of (X; Y) and (U; O)
override STATE_TILES: u32 = KEY_TILES * COLUMN_TILES;
override TILE_ROUNDS: u32 = (TILES + GROUPS - 1u) / GROUPS;
override STATE_TILE_ROUNDS: u32 = (STATE_TILES + GROUPS - 1u) / GROUPS;
// Matrix units read storage buffers an element at a time, workgroup memory by the row: so `left`, `lower` and `writes`
// pass through workgroup memory in turn, the first and last in as many parts (tile columns of `left`, tile rows of
// `writes`) as it takes to fit. A part is asked for as soon as the one before it has left the registers, a chunk ahead
// where there is only one.
override LEFT_PARTS: u32 = 1u;
override WRITE_PARTS: u32 = 1u;
override PART_ACROSS: u32 = KEY_TILES / LEFT_PARTS;
override PART_STEPS: u32 = LOWER_TILES / WRITE_PARTS;
override LEFT_VECTORS: u32 = ROW_TILES * PART_ACROSS * TILE / 4u;
override LOWER_VECTORS: u32 = ROW_TILES * LOWER_TILES * TILE / 4u;
override WRITE_VECTORS: u32 = PART_STEPS * KEY_TILES * TILE / 4u;
override LEFT_ROUNDS: u32 = (LEFT_VECTORS + THREADS - 1u) / THREADS;
override LOWER_ROUNDS: u32 = (LOWER_VECTORS + THREADS - 1u) / THREADS;
override WRITE_ROUNDS: u32 = (WRITE_VECTORS + THREADS - 1u) / THREADS;
override PART_SIZE: u32 = max(max(LEFT_VECTORS, LOWER_VECTORS), WRITE_VECTORS);
// Matrices in workgroup memory are rows of VB / 4 vec4; those of float16 have two more, to spread the banks.
override QUADS: u32 = VB / 4u;
override PITCH: u32 = QUADS + 2u;
override SUMS_SIZE: u32 = max(R + CHUNK, KP) * QUADS;
// How many vec4 of S, of Z (and U) and of O a thread has to do with.
override STATE_ROUNDS: u32 = (KP * QUADS + THREADS - 1u) / THREADS;
override U_ROUNDS: u32 = (R * QUADS + THREADS - 1u) / THREADS;
override OUTPUT_ROUNDS: u32 = (CHUNK * QUADS + THREADS - 1u) / THREADS;
override OPERAND_SIZE: u32 = KP * PITCH;
override RESIDUAL_SIZE: u32 = R * PITCH;

var<workgroup> part: array<vec4<f16>, PART_SIZE>;         // tiles of `left`, `lower` or `writes`
var<workgroup> sums: array<vec4<f32>, SUMS_SIZE>;         // a product [R + C or K][VB]
var<workgroup> operand: array<vec4<f16>, OPERAND_SIZE>;   // S
var<workgroup> residual: array<vec4<f16>, RESIDUAL_SIZE>; // Z - X, then U
var<workgroup> largest: array<atomic<u32>, VB>;           // bits of the largest of S and Z, for each column

override TRANSITION: bool = false;
override VALUE_BLOCKS: u32 = (V + VB - 1u) / VB;
override KEY_BLOCKS: u32 = (K + VB - 1u) / VB;

// Pieces follow the chunks in the table: (first chunk, chunks, state or NOWHERE, source + 4 x its state).
const SOURCE_INITIAL = 1u;
const SOURCE_CARRIED = 2u;
const SOURCE_IDENTITY = 3u;
const NOWHERE = 0xffffffffu;

// vec4 number `i` of the contents [R][VB] of a chunk with `count` tokens from `first`; sub-steps without one have zeros.
fn contents_at(first: u32, count: u32, identity: bool, h: u32, column: u32, i: u32) -> vec4<f32> {
  let row = min(i / QUADS, R - 1u);
  let t = min(row / N, count - 1u);
  // What is not there is read from the last row or column and dropped: loads without branches overlap.
  let c = column + i % QUADS * 4u;
  let z = content_four_at(first + t, row % N, h, c);
  let there = vec4<u32>(c, c + 1u, c + 2u, c + 3u) < vec4<u32>(V);
  return select(vec4<f32>(), z, there & vec4<bool>(row / N < count && !identity));
}

// vec4 number `i` of part `number` of `left`, of `lower` and of part `number` of `writes`, of the chunk whose halves start at
// `halves_at`. (What is not there is read from the last one and dropped.)
fn left_vector(halves_at: u32, number: u32, i: u32) -> vec4<f16> {
  var at = min(i, LEFT_VECTORS - 1u);
  if (LEFT_PARTS > 1u) {
    let tile = at / (TILE / 4u);
    at = (tile / PART_ACROSS * KEY_TILES + number * PART_ACROSS + tile % PART_ACROSS) * (TILE / 4u) + at % (TILE / 4u);
  }
  return halves[halves_at + at];
}

fn lower_vector(halves_at: u32, i: u32) -> vec4<f16> {
  return halves[halves_at + LOWER / 4u + min(i, LOWER_VECTORS - 1u)];
}

fn write_vector(halves_at: u32, number: u32, i: u32) -> vec4<f16> {
  return halves[halves_at + WRITES / 4u + number * WRITE_VECTORS + min(i, WRITE_VECTORS - 1u)];
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

  // This thread's share of S: four columns, the same in all that it does, of some rows.
  let quad = lid % QUADS;
  var kept: array<vec4<f32>, 16>;        // [STATE_ROUNDS]
  for (var y = 0u; y < STATE_ROUNDS; y++) {  // unrolled
    let d = (lid + y * THREADS) / QUADS;
    var x = vec4<f32>();
    for (var q = 0u; q < 4u; q++) {  // unrolled
      let c = column + quad * 4u + q;
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
    kept[y] = x;
  }
  for (var i = lid; i < VB; i += THREADS) {
    atomicStore(&largest[i], 0u);
  }
  workgroupBarrier();

  // What the next chunk needs of scratch memory and contents is asked for while this one computes.
  var left_part: array<vec4<f16>, 32>;   // [LEFT_ROUNDS]
  var lower_part: array<vec4<f16>, 32>;  // [LOWER_ROUNDS]
  var write_part: array<vec4<f16>, 32>;  // [WRITE_ROUNDS]
  var z: array<vec4<f32>, 16>;           // [U_ROUNDS]
  var decay: array<f32, 16>;             // [STATE_ROUNDS]
  let last = max(piece.x + piece.y, 1u) - 1u;
  var halves_at = halves_base(piece.x, head);
  var rows = table[piece.x].xy;          // first token and tokens of this chunk, and of the next
  var next_rows = table[min(piece.x + 1u, last)].xy;
  var powers = vec4<f32>(1.0);           // unit, then those of reads, writes and queries
  var residual_unit = 1.0;
  if (piece.y > 0u) {
    let floats_at = floats_base(piece.x, head);
    for (var y = 0u; y < LEFT_ROUNDS; y++) {  // unrolled
      left_part[y] = left_vector(halves_at, 0u, lid + y * THREADS);
    }
    for (var y = 0u; y < U_ROUNDS; y++) {  // unrolled
      z[y] = contents_at(rows.x, rows.y, identity, h, column, lid + y * THREADS);
    }
    for (var y = 0u; y < LOWER_ROUNDS; y++) {  // unrolled
      lower_part[y] = lower_vector(halves_at, lid + y * THREADS);
    }
    for (var y = 0u; y < WRITE_ROUNDS; y++) {  // unrolled
      write_part[y] = write_vector(halves_at, 0u, lid + y * THREADS);
    }
    for (var y = 0u; y < STATE_ROUNDS; y++) {  // unrolled
      decay[y] = floats[floats_at + WHOLE_DECAY + min((lid + y * THREADS) / QUADS, KP - 1u)];
    }
    powers = powers_at(floats_at);
    residual_unit = floats[floats_at + RESIDUAL_UNIT];
  }

  for (var chunk = piece.x; chunk < piece.x + piece.y; chunk++) {
    let first = rows.x;
    let count = rows.y;
    let next = min(chunk + 1u, last);
    let next_halves = halves_base(next, head);
    let next_floats = floats_base(next, head);

    // The powers of two of the columns, and S as float16 over them.
    var peak = vec4<f32>();
    for (var y = 0u; y < STATE_ROUNDS; y++) {  // unrolled
      peak = max(peak, abs(kept[y]));
    }
    for (var y = 0u; y < U_ROUNDS; y++) {  // unrolled
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
    var down: vec4<f32>;
    for (var q = 0u; q < 4u; q++) {  // unrolled
      let exponent = clamp(atomicLoad(&largest[quad * 4u + q]) >> 23u, 4u, 253u);
      up[q] = bitcast<f32>((257u - exponent) << 23u);
      down[q] = bitcast<f32>((exponent - 3u) << 23u);
    }
    for (var y = 0u; y < STATE_ROUNDS; y++) {  // unrolled
      let i = lid + y * THREADS;
      if (i < KP * QUADS) {
        operand[i / QUADS * PITCH + quad] = vec4<f16>(kept[y] * up);
      }
    }

    // (X; Y). Sums over even and over odd tiles run side by side.
    var acc: array<MatrixSum, 32>;       // [TILE_ROUNDS][2]
    var a: array<MatrixLeft, 16>;
    var b: array<MatrixRight, 16>;
    for (var i = 0u; i < TILE_ROUNDS; i++) {  // unrolled
      acc[2u * i] = MatrixSum();
      acc[2u * i + 1u] = MatrixSum();
    }
    for (var number = 0u; number < LEFT_PARTS; number++) {  // unrolled
      for (var y = 0u; y < LEFT_ROUNDS; y++) {  // unrolled
        let i = lid + y * THREADS;
        if (i < LEFT_VECTORS) {
          part[i] = left_part[y];
        }
      }
      workgroupBarrier();
      for (var y = 0u; y < LEFT_ROUNDS; y++) {  // unrolled
        let more = number + 1u < LEFT_PARTS;
        left_part[y] = left_vector(select(next_halves, halves_at, more), select(0u, number + 1u, more), lid + y * THREADS);
      }
      for (var i = 0u; i < TILE_ROUNDS; i++) {  // unrolled
        let tile = min(i * GROUPS + subgroup, TILES - 1u);
        for (var x = 0u; x < PART_ACROSS; x++) {  // unrolled
          let at = (number * PART_ACROSS + x) * EDGE * PITCH + tile % COLUMN_TILES * EDGE / 4u;
          a[x] = coopLoadT<MatrixLeft>(&part[(tile / COLUMN_TILES * PART_ACROSS + x) * (TILE / 4u)], EDGE / 4u);
          b[x] = coopLoadT<MatrixRight>(&operand[at], PITCH);
        }
        for (var x = 0u; x < PART_ACROSS; x++) {  // unrolled
          acc[2u * i + x % 2u] = coopMultiplyAdd(a[x], b[x], acc[2u * i + x % 2u]);
        }
      }
      if (number + 1u < LEFT_PARTS) {
        workgroupBarrier();
      }
    }
    for (var i = 0u; i < TILE_ROUNDS; i++) {  // unrolled
      let tile = min(i * GROUPS + subgroup, TILES - 1u);
      let at = tile / COLUMN_TILES * EDGE * QUADS + tile % COLUMN_TILES * EDGE / 4u;
      acc[2u * i] = acc[2u * i] + acc[2u * i + 1u];
      coopStoreT(acc[2u * i], &sums[at], QUADS);
      // What stays of it: Y in the units of (A T) (Z - X), and nothing of X.
      let y_unit = select(0.0, residual_unit / powers.y, tile / COLUMN_TILES * EDGE >= R);
      acc[2u * i] = y_unit * acc[2u * i];
      acc[2u * i + 1u] = MatrixSum();
    }
    workgroupBarrier();

    // Z - X; Z is over the reads' power, as B is.
    let z_unit = 1.0 / powers.y;
    for (var y = 0u; y < U_ROUNDS; y++) {  // unrolled
      let i = lid + y * THREADS;
      if (i < R * QUADS) {
        residual[i / QUADS * PITCH + quad] = vec4<f16>((z[y] * up * z_unit - sums[i]) * residual_unit);
      }
    }
    for (var y = 0u; y < LOWER_ROUNDS; y++) {  // unrolled
      let i = lid + y * THREADS;
      if (i < LOWER_VECTORS) {
        part[i] = lower_part[y];
      }
    }
    for (var i = lid; i < VB; i += THREADS) {
      atomicStore(&largest[i], 0u);
    }
    workgroupBarrier();
    for (var y = 0u; y < LOWER_ROUNDS; y++) {  // unrolled
      lower_part[y] = lower_vector(next_halves, lid + y * THREADS);
    }
    for (var y = 0u; y < U_ROUNDS; y++) {  // unrolled
      z[y] = contents_at(next_rows.x, next_rows.y, identity, h, column, lid + y * THREADS);
    }
    rows = next_rows;
    next_rows = table[min(chunk + 2u, last)].xy;

    // (U; O).
    for (var i = 0u; i < TILE_ROUNDS; i++) {  // unrolled
      let tile = min(i * GROUPS + subgroup, TILES - 1u);
      for (var x = 0u; x < LOWER_TILES; x++) {  // unrolled
        let at = x * EDGE * PITCH + tile % COLUMN_TILES * EDGE / 4u;
        a[x] = coopLoadT<MatrixLeft>(&part[(tile / COLUMN_TILES * LOWER_TILES + x) * (TILE / 4u)], EDGE / 4u);
        b[x] = coopLoadT<MatrixRight>(&residual[at], PITCH);
      }
      for (var x = 0u; x < LOWER_TILES; x++) {  // unrolled
        acc[2u * i + x % 2u] = coopMultiplyAdd(a[x], b[x], acc[2u * i + x % 2u]);
      }
      let at = tile / COLUMN_TILES * EDGE * QUADS + tile % COLUMN_TILES * EDGE / 4u;
      coopStoreT(acc[2u * i] + acc[2u * i + 1u], &sums[at], QUADS);
    }
    let next_powers = powers_at(next_floats);
    let next_residual_unit = floats[next_floats + RESIDUAL_UNIT];
    workgroupBarrier();

    for (var y = 0u; y < U_ROUNDS; y++) {  // unrolled
      let i = lid + y * THREADS;
      if (i < R * QUADS) {
        residual[i / QUADS * PITCH + quad] = vec4<f16>(sums[i] * powers.x);
      }
    }
    // What the chunk adds to the state.
    var add: array<MatrixSum, 32>;       // [STATE_TILE_ROUNDS][2]
    for (var i = 0u; i < STATE_TILE_ROUNDS; i++) {  // unrolled
      add[2u * i] = MatrixSum();
      add[2u * i + 1u] = MatrixSum();
    }
    for (var number = 0u; number < WRITE_PARTS; number++) {  // unrolled
      for (var y = 0u; y < WRITE_ROUNDS; y++) {  // unrolled
        let i = lid + y * THREADS;
        if (i < WRITE_VECTORS) {
          part[i] = write_part[y];
        }
      }
      if (number == 0u) {
        let unit = params.scale * powers.w * powers.y / residual_unit;
        for (var y = 0u; y < OUTPUT_ROUNDS; y++) {  // unrolled
          let i = lid + y * THREADS;
          let t = i / QUADS;
          if (!TRANSITION && t < min(count, CHUNK)) {
            let x = sums[R * QUADS + i] * down * unit;
            o_store_four(((first + t) * params.value_heads + h) * V, column + quad * 4u, x);
          }
        }
      }
      workgroupBarrier();
      for (var y = 0u; y < WRITE_ROUNDS; y++) {  // unrolled
        let more = number + 1u < WRITE_PARTS;
        write_part[y] = write_vector(select(next_halves, halves_at, more), select(0u, number + 1u, more), lid + y * THREADS);
      }
      for (var i = 0u; i < STATE_TILE_ROUNDS; i++) {  // unrolled
        let tile = min(i * GROUPS + subgroup, STATE_TILES - 1u);
        for (var x = 0u; x < PART_STEPS; x++) {  // unrolled
          let at = (number * PART_STEPS + x) * EDGE * PITCH + tile % COLUMN_TILES * EDGE / 4u;
          a[x] = coopLoad<MatrixLeft>(&part[(x * KEY_TILES + tile / COLUMN_TILES) * (TILE / 4u)], EDGE / 4u);
          b[x] = coopLoadT<MatrixRight>(&residual[at], PITCH);
        }
        for (var x = 0u; x < PART_STEPS; x++) {  // unrolled
          add[2u * i + x % 2u] = coopMultiplyAdd(a[x], b[x], add[2u * i + x % 2u]);
        }
      }
      if (number + 1u < WRITE_PARTS) {
        workgroupBarrier();
      }
    }
    for (var i = 0u; i < STATE_TILE_ROUNDS; i++) {  // unrolled
      let tile = min(i * GROUPS + subgroup, STATE_TILES - 1u);
      let at = tile / COLUMN_TILES * EDGE * QUADS + tile % COLUMN_TILES * EDGE / 4u;
      coopStoreT(add[2u * i] + add[2u * i + 1u], &sums[at], QUADS);
    }
    workgroupBarrier();
    let back = powers.y / powers.x / residual_unit * powers.z;
    powers = next_powers;
    residual_unit = next_residual_unit;
    halves_at = next_halves;
    for (var y = 0u; y < STATE_ROUNDS; y++) {  // unrolled
      let i = min(lid + y * THREADS, (KP - 1u) * QUADS + quad);
      kept[y] = kept[y] * decay[y] + sums[i] * back * down;
      decay[y] = floats[next_floats + WHOLE_DECAY + i / QUADS];
    }
  }

  if (piece.z == NOWHERE) {
    return;
  }
  for (var y = 0u; y < STATE_ROUNDS; y++) {  // unrolled
    let d = (lid + y * THREADS) / QUADS;
    for (var q = 0u; q < 4u; q++) {  // unrolled
      let c = column + quad * 4u + q;
      let x = kept[y][q];
      if (state_source == SOURCE_IDENTITY) {
        if (c < K && d < K) {
          // Transposed, as the join reads it.
          state[params.transition_at + (target_state * K + c) * K + d] = x;
        }
      } else if (c < V && d < K) {
        state[params.state_at + (target_state * K + d) * V + c] = x;
      }
    }
  }
}
