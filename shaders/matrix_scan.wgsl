// Matrix tier, pass 2 of 2, sequential over the chunks of a sequence, parallel over sequences, heads and blocks of
// VB value columns (columns of S are independent). Per chunk
//
//   (X; Y) = left S                          [R + C, VB]
//   (U; O) = lower (Z - X) + (0; Y)          [R + C, VB]
//   S = Diag(exp G_C) S + writes^T U         [K, VB]
//
// on matrix units: float16 operands, float32 sums, float32 state. Each column of S and Z is divided by a power of two
// that takes the largest of both to between 8 and 16, found anew for each chunk, so that contents or states of any size
// neither overflow nor vanish, whatever is in other columns (S over `below_one` of the writes' power, which X takes back and
// the outputs share); the residual Z - X and U are multiplied by their units where
// they could overflow. With the powers by which pass 1 has divided reads, writes and queries, all of this is exact and
// undone in float32.
//
// With TRANSITION it finds instead what segments of a sequence do to any state, S -> M S + N (see prefill_join.wgsl):
// the value columns start from zero and end as N; K columns more start from the identity, have no contents and end as M.

// Subgroups. Tiles of a product are dealt out to them in rounds; those without one repeat the last, since cooperative
// calls need the same control flow in all.
override GROUPS: u32 = 8u;
override COLUMN_TILES: u32 = VB / EDGE;
override TILES: u32 = ROW_TILES * COLUMN_TILES;              // of (X; Y) and (U; O)
override STATE_TILES: u32 = KEY_TILES * COLUMN_TILES;
override TILE_ROUNDS: u32 = (TILES + GROUPS - 1u) / GROUPS;
override STATE_TILE_ROUNDS: u32 = (STATE_TILES + GROUPS - 1u) / GROUPS;
// Between the products, OWN columns are those of a team of threads: where that is a subgroup, it finds their powers of
// two without a barrier.
override TEAM: u32 = 32u;
override TEAM_LEVELS: u32 = firstTrailingBit(TEAM);
override TEAM_IS_SUBGROUP: bool = true;
override OWN: u32 = VB / (THREADS / TEAM);
// Matrix units read storage buffers an element at a time, workgroup memory by the row: so `left`, `lower` and `writes`
// pass through workgroup memory in turn, the first and last in as many parts (columns of `left`, rows of `writes`) as it
// takes to fit. A part is asked for as soon as the one before it has left the registers, a chunk ahead where there is only
// one. Vectors a row of a part, then an odd number of pairs of them, to spread the banks, then all vectors of a part.
override LEFT_PARTS: u32 = 1u;
override WRITE_PARTS: u32 = 1u;
override PART_ACROSS: u32 = KEY_TILES / LEFT_PARTS;   // tiles
override PART_STEPS: u32 = LOWER_TILES / WRITE_PARTS;
override LEFT_QUADS: u32 = PART_ACROSS * EDGE / 4u;
override LOWER_QUADS: u32 = R / 4u;
override WRITE_QUADS: u32 = KP / 4u;
override LEFT_PITCH: u32 = 2u * ((LEFT_QUADS / 2u) | 1u);
override LOWER_PITCH: u32 = 2u * ((LOWER_QUADS / 2u) | 1u);
override WRITE_PITCH: u32 = 2u * ((WRITE_QUADS / 2u) | 1u);
override LEFT_VECTORS: u32 = (R + CHUNK) * LEFT_QUADS;
override LOWER_VECTORS: u32 = (R + CHUNK) * LOWER_QUADS;
override WRITE_VECTORS: u32 = PART_STEPS * EDGE * WRITE_QUADS;
override LEFT_ROUNDS: u32 = (LEFT_VECTORS + THREADS - 1u) / THREADS;
override LOWER_ROUNDS: u32 = (LOWER_VECTORS + THREADS - 1u) / THREADS;
override WRITE_ROUNDS: u32 = (WRITE_VECTORS + THREADS - 1u) / THREADS;
override PART_SIZE: u32 =
  max(max((R + CHUNK) * LEFT_PITCH, (R + CHUNK) * LOWER_PITCH), PART_STEPS * EDGE * WRITE_PITCH);
// Right operands and products lie in workgroup memory by columns, four rows a vector; vectors a column, those of float16
// two and of float32 one more than they hold, to spread the banks.
override KEY_QUADS: u32 = KP / 4u;
override STEP_QUADS: u32 = R / 4u;
override OPERAND_PITCH: u32 = KEY_QUADS + 2u;
override RESIDUAL_PITCH: u32 = STEP_QUADS + 2u;
override SUMS_PITCH: u32 = max(R + CHUNK, KP) / 4u + 1u;
override OPERAND_SIZE: u32 = VB * OPERAND_PITCH;
override RESIDUAL_SIZE: u32 = VB * RESIDUAL_PITCH;
override SUMS_SIZE: u32 = VB * SUMS_PITCH;
// How many vectors of each of its columns of S a thread has, of Z (and U), and four columns of O.
override STATE_ROUNDS: u32 = (KEY_QUADS + TEAM - 1u) / TEAM;
override U_ROUNDS: u32 = (STEP_QUADS * OWN + TEAM - 1u) / TEAM;
override OUTPUT_QUADS: u32 = VB / 4u;
override UNITS_SIZE: u32 = OUTPUT_QUADS + 1u;
override OUTPUT_ROUNDS: u32 = (CHUNK * OUTPUT_QUADS + THREADS - 1u) / THREADS;

var<workgroup> part: array<vec4<f16>, PART_SIZE>;         // of `left`, `lower` or `writes`
var<workgroup> sums: array<vec4<f32>, SUMS_SIZE>;         // a product [VB][R + C or K]
var<workgroup> operand: array<vec4<f16>, OPERAND_SIZE>;   // S [VB][K]
var<workgroup> residual: array<vec4<f16>, RESIDUAL_SIZE>; // Z - X, then U [VB][R]
var<workgroup> units: array<vec4<f32>, UNITS_SIZE>;       // what each column of S and Z is divided by
var<workgroup> largest: array<atomic<u32>, VB>;           // bits of the largest of S and Z, for each column

// Rows 4 quad .. 4 quad + 3 of column `c` of what the contents of a chunk with `count` tokens from `first` are made of, as it
// lies in memory. (It is converted a chunk later: a conversion waits for the load.)
fn stored_contents(first: u32, count: u32, h: u32, c: u32, quad: u32) -> array<StoredContent, 4> {
  var stored: array<StoredContent, 4>;
  for (var i = 0u; i < 4u; i++) {  // unrolled
    // (What is not there is read from the last token or column and dropped: loads without branches overlap. The step is
    // known here where N divides 4.)
    let step = select((quad * 4u + i) % N, i % N, 4u % N == 0u);
    let t = (quad * 4u + i) / N;
    stored[i] = stored_content_at(first + min(t, count - 1u), step, h, min(c, V - 1u));
  }
  return stored;
}

// The contents themselves.
fn contents_of(stored: array<StoredContent, 4>, count: u32, identity: bool, c: u32, quad: u32) -> vec4<f32> {
  var z: vec4<f32>;
  for (var i = 0u; i < 4u; i++) {  // unrolled
    let step = select((quad * 4u + i) % N, i % N, 4u % N == 0u);
    let t = (quad * 4u + i) / N;
    z[i] = select(0.0, content_of(stored[i], step), t < count && c < V && !identity);
  }
  return z;
}

// Vector number `i` of part `number` of `left`, of `lower` and of part `number` of `writes`, of the chunk whose halves start at
// `halves_at`. (What is not there is read from the last one and dropped.)
fn left_vector(halves_at: u32, number: u32, i: u32) -> vec4<f16> {
  var at = i;
  if (LEFT_VECTORS % THREADS != 0u) {
    at = min(i, LEFT_VECTORS - 1u);
  }
  if (LEFT_PARTS > 1u) {
    at = at / LEFT_QUADS * KEY_QUADS + number * LEFT_QUADS + at % LEFT_QUADS;
  }
  return halves[halves_at + at];
}

fn lower_vector(halves_at: u32, i: u32) -> vec4<f16> {
  var at = i;
  if (LOWER_VECTORS % THREADS != 0u) {
    at = min(i, LOWER_VECTORS - 1u);
  }
  return halves[halves_at + LOWER / 4u + at];
}

fn write_vector(halves_at: u32, number: u32, i: u32) -> vec4<f16> {
  var at = i;
  if (WRITE_VECTORS % THREADS != 0u) {
    at = min(i, WRITE_VECTORS - 1u);
  }
  return halves[halves_at + WRITES / 4u + number * WRITE_VECTORS + at];
}

// Where vector `i` of a team's columns of the residual lies, those that are not there in padding.
fn residual_at(own: u32, i: u32) -> u32 {
  return select(own * RESIDUAL_PITCH + STEP_QUADS, (own + i / STEP_QUADS) * RESIDUAL_PITCH + i % STEP_QUADS, i < STEP_QUADS * OWN);
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
  let member = select(lid % TEAM, lane, TEAM_IS_SUBGROUP);
  let own = select(lid / TEAM, subgroup, TEAM_IS_SUBGROUP) * OWN;  // the first of the team's columns

  var kept: array<vec4<f32>, 16>;        // S [STATE_ROUNDS][OWN], four channels of a column each
  for (var y = 0u; y < STATE_ROUNDS; y++) {  // unrolled
    for (var x = 0u; x < OWN; x++) {  // unrolled
      let c = column + own + x;
      for (var i = 0u; i < 4u; i++) {  // unrolled
        let d = (member + y * TEAM) * 4u + i;
        var s = 0.0;
        if (state_source == SOURCE_IDENTITY) {
          s = select(0.0, 1.0, d == c && d < K);
        } else if (d < K && c < V) {
          let at = (origin * K + d) * V + c;
          if (state_source == SOURCE_INITIAL) {
            s = initial[params.initial_at + at];
          } else if (state_source == SOURCE_CARRIED) {
            s = state[params.state_at + at];
          }
        }
        kept[y * OWN + x][i] = s;
      }
    }
  }
  if (!TEAM_IS_SUBGROUP) {
    for (var i = lid; i < VB; i += THREADS) {
      atomicStore(&largest[i], 0u);
    }
    workgroupBarrier();
  }

  // What the next chunk needs of scratch memory and contents is asked for while this one computes.
  var left_part: array<vec4<f16>, 32>;   // [LEFT_ROUNDS]
  var lower_part: array<vec4<f16>, 32>;  // [LOWER_ROUNDS]
  var write_part: array<vec4<f16>, 32>;  // [WRITE_ROUNDS]
  var stored: array<array<StoredContent, 4>, 16>;  // [U_ROUNDS]
  var decay: array<vec4<f32>, 16>;       // [STATE_ROUNDS]
  var acc: array<MatrixSum, 32>;         // [TILE_ROUNDS or STATE_TILE_ROUNDS][2]
  let last = max(piece.x + piece.y, 1u) - 1u;
  var halves_at = halves_base(piece.x, head);
  var rows = table[piece.x].xy;          // first token and tokens of this chunk, and of the next
  var next_rows = table[min(piece.x + 1u, last)].xy;
  var powers = vec4<f32>(1.0);           // unit, then those of reads, writes and queries
  var residual_unit = 1.0;
  if (piece.y > 0u) {
    let floats_at = floats_base(piece.x, head) / 4u;
    for (var y = 0u; y < LEFT_ROUNDS; y++) {  // unrolled
      left_part[y] = left_vector(halves_at, 0u, lid + y * THREADS);
    }
    for (var y = 0u; y < U_ROUNDS; y++) {  // unrolled
      let i = min(member + y * TEAM, STEP_QUADS * OWN - 1u);
      stored[y] = stored_contents(rows.x, rows.y, h, column + own + i / STEP_QUADS, i % STEP_QUADS);
    }
    for (var y = 0u; y < LOWER_ROUNDS; y++) {  // unrolled
      lower_part[y] = lower_vector(halves_at, lid + y * THREADS);
    }
    for (var y = 0u; y < WRITE_ROUNDS; y++) {  // unrolled
      write_part[y] = write_vector(halves_at, 0u, lid + y * THREADS);
    }
    for (var y = 0u; y < STATE_ROUNDS; y++) {  // unrolled
      decay[y] = floats[floats_at + WHOLE_DECAY / 4u + min(member + y * TEAM, KEY_QUADS - 1u)];
    }
    powers = floats[floats_at + UNIT / 4u];
    residual_unit = floats[floats_at + RESIDUAL_UNIT / 4u].x;
  }

  for (var chunk = piece.x; chunk < piece.x + piece.y; chunk++) {
    let first = rows.x;
    let count = rows.y;
    let next = min(chunk + 1u, last);
    let next_halves = halves_base(next, head);
    let next_floats = floats_base(next, head) / 4u;

    var z: array<vec4<f32>, 16>;         // [U_ROUNDS]
    for (var y = 0u; y < U_ROUNDS; y++) {  // unrolled
      let i = min(member + y * TEAM, STEP_QUADS * OWN - 1u);
      z[y] = contents_of(stored[y], count, identity, column + own + i / STEP_QUADS, i % STEP_QUADS);
    }
    // The powers of two of the columns, and S as float16 over them.
    let small = below_one(powers.z);
    let grown = inverse_power(small);
    var peak: array<f32, 16>;            // [OWN]
    for (var x = 0u; x < OWN; x++) {  // unrolled
      peak[x] = 0.0;
      for (var y = 0u; y < STATE_ROUNDS; y++) {  // unrolled
        peak[x] = max(peak[x], largest_of(kept[y * OWN + x]));
      }
      peak[x] *= grown;
      for (var y = 0u; y < U_ROUNDS; y++) {  // unrolled
        let mine = (member + y * TEAM) / STEP_QUADS == x;
        peak[x] = max(peak[x], select(0.0, largest_of(z[y]), mine));
      }
    }
    var unit: array<u32, 16>;            // [OWN], bits
    if (TEAM_IS_SUBGROUP) {
      // (NVIDIA's compiler, driver 580, calls a function for subgroupMax in a loop and skips the reduction there where a
      // predicate of its caller happens to be set.)
      for (var i = 0u; i < TEAM_LEVELS; i++) {  // unrolled
        for (var x = 0u; x < OWN; x++) {  // unrolled
          peak[x] = max(peak[x], subgroupShuffleXor(peak[x], 1u << i));
        }
      }
      for (var x = 0u; x < OWN; x++) {  // unrolled
        unit[x] = unit_of(bitcast<u32>(peak[x]));
      }
    } else {
      for (var x = 0u; x < OWN; x++) {  // unrolled
        atomicMax(&largest[own + x], bitcast<u32>(peak[x]));
      }
      workgroupBarrier();
      for (var x = 0u; x < OWN; x++) {  // unrolled
        unit[x] = unit_of(atomicLoad(&largest[own + x]));
      }
    }
    // (What is beyond a column goes to its padding, without a branch.)
    var my_unit = unit[0];
    for (var x = 0u; x < OWN; x++) {  // unrolled
      for (var y = 0u; y < STATE_ROUNDS; y++) {  // unrolled
        let r = min(member + y * TEAM, KEY_QUADS);
        operand[(own + x) * OPERAND_PITCH + r] = vec4<f16>(kept[y * OWN + x] * (inverse_of(unit[x]) * grown));
      }
      my_unit = select(my_unit, unit[x], member == x);
    }
    let my_column = select(VB, own + member, member < OWN);
    units[my_column / 4u][my_column % 4u] = bitcast<f32>(my_unit);

    // (X; Y). Sums over even and over odd tiles run side by side.
    for (var i = 0u; i < TILE_ROUNDS; i++) {  // unrolled
      acc[2u * i] = MatrixSum();
      acc[2u * i + 1u] = MatrixSum();
    }
    for (var number = 0u; number < LEFT_PARTS; number++) {  // unrolled
      for (var y = 0u; y < LEFT_ROUNDS; y++) {  // unrolled
        let i = lid + y * THREADS;
        if ((y + 1u) * THREADS <= LEFT_VECTORS || i < LEFT_VECTORS) {
          part[placed(lid, y, LEFT_QUADS, LEFT_PITCH)] = left_part[y];
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
          let at = tile % COLUMN_TILES * EDGE * OPERAND_PITCH + (number * PART_ACROSS + x) * EDGE / 4u;
          let a = coopLoadT<MatrixLeft>(&part[tile / COLUMN_TILES * EDGE * LEFT_PITCH + x * EDGE / 4u], LEFT_PITCH);
          let b = coopLoad<MatrixRight>(&operand[at], OPERAND_PITCH);
          acc[2u * i + x % 2u] = coopMultiplyAdd(a, b, acc[2u * i + x % 2u]);
        }
      }
      if (number + 1u < LEFT_PARTS) {
        workgroupBarrier();
      }
    }
    for (var i = 0u; i < TILE_ROUNDS; i++) {  // unrolled
      let tile = min(i * GROUPS + subgroup, TILES - 1u);
      let at = tile % COLUMN_TILES * EDGE * SUMS_PITCH + tile / COLUMN_TILES * EDGE / 4u;
      acc[2u * i] = acc[2u * i] + acc[2u * i + 1u];
      coopStore(acc[2u * i], &sums[at], SUMS_PITCH);
      // What stays of it: Y in the units of (A T) (Z - X), and nothing of X.
      let y_unit = select(0.0, residual_unit * inverse_power(powers.y), tile / COLUMN_TILES * EDGE >= R);
      acc[2u * i] = y_unit * acc[2u * i];
      acc[2u * i + 1u] = MatrixSum();
    }
    workgroupBarrier();

    // Z - X; Z is over the reads' power, as B is.
    let z_unit = inverse_power(powers.y);
    for (var y = 0u; y < U_ROUNDS; y++) {  // unrolled
      let i = min(member + y * TEAM, STEP_QUADS * OWN - 1u);
      let c = own + i / STEP_QUADS;
      let up = inverse_of(bitcast<u32>(units[c / 4u][c % 4u]));
      let x = sums[c * SUMS_PITCH + i % STEP_QUADS];
      residual[residual_at(own, member + y * TEAM)] = vec4<f16>((z[y] * up * z_unit - x * small) * residual_unit);
    }
    for (var y = 0u; y < LOWER_ROUNDS; y++) {  // unrolled
      let i = lid + y * THREADS;
      if ((y + 1u) * THREADS <= LOWER_VECTORS || i < LOWER_VECTORS) {
        part[placed(lid, y, LOWER_QUADS, LOWER_PITCH)] = lower_part[y];
      }
    }
    if (!TEAM_IS_SUBGROUP) {
      for (var i = lid; i < VB; i += THREADS) {
        atomicStore(&largest[i], 0u);
      }
    }
    workgroupBarrier();
    for (var y = 0u; y < LOWER_ROUNDS; y++) {  // unrolled
      lower_part[y] = lower_vector(next_halves, lid + y * THREADS);
    }
    for (var y = 0u; y < U_ROUNDS; y++) {  // unrolled
      let i = min(member + y * TEAM, STEP_QUADS * OWN - 1u);
      stored[y] = stored_contents(next_rows.x, next_rows.y, h, column + own + i / STEP_QUADS, i % STEP_QUADS);
    }
    rows = next_rows;
    next_rows = table[min(chunk + 2u, last)].xy;

    // (U; O).
    for (var i = 0u; i < TILE_ROUNDS; i++) {  // unrolled
      let tile = min(i * GROUPS + subgroup, TILES - 1u);
      for (var x = 0u; x < LOWER_TILES; x++) {  // unrolled
        let at = tile % COLUMN_TILES * EDGE * RESIDUAL_PITCH + x * EDGE / 4u;
        let a = coopLoadT<MatrixLeft>(&part[tile / COLUMN_TILES * EDGE * LOWER_PITCH + x * EDGE / 4u], LOWER_PITCH);
        let b = coopLoad<MatrixRight>(&residual[at], RESIDUAL_PITCH);
        acc[2u * i + x % 2u] = coopMultiplyAdd(a, b, acc[2u * i + x % 2u]);
      }
      let at = tile % COLUMN_TILES * EDGE * SUMS_PITCH + tile / COLUMN_TILES * EDGE / 4u;
      coopStore(acc[2u * i] + acc[2u * i + 1u], &sums[at], SUMS_PITCH);
    }
    let next_powers = floats[next_floats + UNIT / 4u];
    let next_residual_unit = floats[next_floats + RESIDUAL_UNIT / 4u].x;
    workgroupBarrier();

    for (var y = 0u; y < U_ROUNDS; y++) {  // unrolled
      let i = min(member + y * TEAM, STEP_QUADS * OWN - 1u);
      let u = sums[(own + i / STEP_QUADS) * SUMS_PITCH + i % STEP_QUADS];
      residual[residual_at(own, member + y * TEAM)] = vec4<f16>(u * powers.x);
    }
    // What the chunk adds to the state.
    for (var i = 0u; i < STATE_TILE_ROUNDS; i++) {  // unrolled
      acc[2u * i] = MatrixSum();
      acc[2u * i + 1u] = MatrixSum();
    }
    for (var number = 0u; number < WRITE_PARTS; number++) {  // unrolled
      for (var y = 0u; y < WRITE_ROUNDS; y++) {  // unrolled
        let i = lid + y * THREADS;
        if ((y + 1u) * THREADS <= WRITE_VECTORS || i < WRITE_VECTORS) {
          part[placed(lid, y, WRITE_QUADS, WRITE_PITCH)] = write_part[y];
        }
      }
      if (number == 0u) {
        let o_unit = params.scale * powers.w * small * powers.y * inverse_power(residual_unit);
        for (var y = 0u; y < OUTPUT_ROUNDS; y++) {  // unrolled
          let t = (lid + y * THREADS) / OUTPUT_QUADS;
          let quad = (lid + y * THREADS) % OUTPUT_QUADS;
          if (!TRANSITION && t < min(count, CHUNK)) {
            var x: vec4<f32>;
            for (var i = 0u; i < 4u; i++) {  // unrolled
              x[i] = sums[(quad * 4u + i) * SUMS_PITCH + (R + t) / 4u][t % 4u];
            }
            o_store_four(((first + t) * params.value_heads + h) * V, column + quad * 4u, x * units[quad] * o_unit);
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
          let at = tile % COLUMN_TILES * EDGE * RESIDUAL_PITCH + (number * PART_STEPS + x) * EDGE / 4u;
          let a = coopLoad<MatrixLeft>(&part[x * EDGE * WRITE_PITCH + tile / COLUMN_TILES * EDGE / 4u], WRITE_PITCH);
          let b = coopLoad<MatrixRight>(&residual[at], RESIDUAL_PITCH);
          acc[2u * i + x % 2u] = coopMultiplyAdd(a, b, acc[2u * i + x % 2u]);
        }
      }
      if (number + 1u < WRITE_PARTS) {
        workgroupBarrier();
      }
    }
    for (var i = 0u; i < STATE_TILE_ROUNDS; i++) {  // unrolled
      let tile = min(i * GROUPS + subgroup, STATE_TILES - 1u);
      let at = tile % COLUMN_TILES * EDGE * SUMS_PITCH + tile / COLUMN_TILES * EDGE / 4u;
      coopStore(acc[2u * i] + acc[2u * i + 1u], &sums[at], SUMS_PITCH);
    }
    workgroupBarrier();
    let back = powers.y * inverse_power(powers.x) * inverse_power(residual_unit) * powers.z;
    powers = next_powers;
    residual_unit = next_residual_unit;
    halves_at = next_halves;
    for (var y = 0u; y < STATE_ROUNDS; y++) {  // unrolled
      let r = min(member + y * TEAM, KEY_QUADS - 1u);
      for (var x = 0u; x < OWN; x++) {  // unrolled
        let added = sums[(own + x) * SUMS_PITCH + r] * back * bitcast<f32>(unit[x]);
        kept[y * OWN + x] = kept[y * OWN + x] * decay[y] + added;
      }
      decay[y] = floats[next_floats + WHOLE_DECAY / 4u + r];
    }
  }

  if (piece.z == NOWHERE) {
    return;
  }
  for (var y = 0u; y < STATE_ROUNDS; y++) {  // unrolled
    for (var x = 0u; x < OWN; x++) {  // unrolled
      let c = column + own + x;
      for (var i = 0u; i < 4u; i++) {  // unrolled
        let d = (member + y * TEAM) * 4u + i;
        let s = kept[y * OWN + x][i];
        if (state_source == SOURCE_IDENTITY) {
          if (c < K && d < K) {
            // Transposed, as the join reads it.
            state[params.transition_at + (target_state * K + c) * K + d] = s;
          }
        } else if (c < V && d < K) {
          state[params.state_at + (target_state * K + d) * V + c] = s;
        }
      }
    }
  }
}
