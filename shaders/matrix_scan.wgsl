// Matrix tier, pass 2 of 2, sequential over the chunks of a sequence, parallel over sequences, heads and blocks of
// VB value columns (columns of S are independent). Per chunk
//
//   U = T Z - W S                        [R, VB]
//   O = Q S + A U                        [C, VB]
//   S = Diag(exp G_C) S + writes^T U     [K, VB]
//
// on matrix units: float16 operands, float32 sums, float32 state. Each column of S and Z is divided by a power of two
// that takes the largest of both to between 8 and 16, found anew for each chunk, so that contents or states of any size
// neither overflow nor vanish, whatever is in other columns (S over `below_one` of the writes' power, which W takes back and
// the outputs share); U is multiplied by its unit where it could overflow. With the powers by which pass 1 has divided reads,
// writes and queries, all of this is exact and undone in float32.
//
// With TRANSITION it finds instead what segments of a sequence do to any state, S -> M S + N (see prefill_join.wgsl):
// the value columns start from zero and end as N; K columns more start from the identity, have no contents and end as M.

// Subgroups. Tiles of U are dealt out to them in rounds, SPLIT of them share one, by steps of the sums; those without one repeat the
// last, since cooperative calls need the same control flow in all. The first OUTPUT_GROUPS then make O, those from STATE_FROM on what
// is added to the state, at the same time where they are others.
override GROUPS: u32 = 8u;
override SPLIT: u32 = 1u;
override OUTPUT_GROUPS: u32 = 2u;
override STATE_FROM: u32 = 2u;
override STATE_GROUPS: u32 = GROUPS - STATE_FROM;
override COLUMN_TILES: u32 = VB / EDGE;
override U_TILES: u32 = LOWER_TILES * COLUMN_TILES;
override U_JOBS: u32 = U_TILES * SPLIT;
override OUTPUT_TILES: u32 = CHUNK / EDGE * COLUMN_TILES;
override STATE_TILES: u32 = KEY_TILES * COLUMN_TILES;
override U_TILE_ROUNDS: u32 = (U_JOBS + GROUPS - 1u) / GROUPS;
override OUTPUT_TILE_ROUNDS: u32 = (OUTPUT_TILES + OUTPUT_GROUPS - 1u) / OUTPUT_GROUPS;
override STATE_TILE_ROUNDS: u32 = (STATE_TILES + STATE_GROUPS - 1u) / STATE_GROUPS;
// Between the products, OWN columns are those of a team of threads: where that is a subgroup, it finds their powers of
// two without a barrier.
override TEAM: u32 = 32u;
override TEAM_LEVELS: u32 = firstTrailingBit(TEAM);
override TEAM_IS_SUBGROUP: bool = true;
override OWN: u32 = VB / (THREADS / TEAM);
// Matrix units read storage buffers an element at a time, workgroup memory by the row: so T and W, then Q, A and `writes` pass
// through workgroup memory: T with W and Q with A where there is room (TOGETHER 1), all three of the latter (2), else one after the
// other (0), W and Q by parts of their columns, `writes` of its rows. A part is asked for as soon as the one before it has left the
// registers, a chunk ahead where there is only one. Vectors a row, then an odd number of pairs of them, to spread the banks.
override TOGETHER: u32 = 2u;
override LEFT_PARTS: u32 = 1u;
override WRITE_PARTS: u32 = 1u;
override PART_ACROSS: u32 = KEY_TILES / LEFT_PARTS;   // tiles
override PART_STEPS: u32 = LOWER_TILES / WRITE_PARTS;
override SPLIT_ACROSS: u32 = PART_ACROSS / SPLIT;
override SPLIT_LOWER: u32 = LOWER_TILES / SPLIT;
override LEFT_QUADS: u32 = PART_ACROSS * EDGE / 4u;
override LOWER_QUADS: u32 = R / 4u;
override WRITE_QUADS: u32 = KP / 4u;
override LEFT_PITCH: u32 = 2u * ((LEFT_QUADS / 2u) | 1u);
override LOWER_PITCH: u32 = 2u * ((LOWER_QUADS / 2u) | 1u);
override WRITE_PITCH: u32 = 2u * ((WRITE_QUADS / 2u) | 1u);
override T_VECTORS: u32 = R * LOWER_QUADS;
override W_VECTORS: u32 = R * LEFT_QUADS;
override Q_VECTORS: u32 = CHUNK * LEFT_QUADS;
override A_VECTORS: u32 = CHUNK * LOWER_QUADS;
override WRITE_VECTORS: u32 = PART_STEPS * EDGE * WRITE_QUADS;
override T_ROUNDS: u32 = (T_VECTORS + THREADS - 1u) / THREADS;
override W_ROUNDS: u32 = (W_VECTORS + THREADS - 1u) / THREADS;
override Q_ROUNDS: u32 = (Q_VECTORS + THREADS - 1u) / THREADS;
override A_ROUNDS: u32 = (A_VECTORS + THREADS - 1u) / THREADS;
override WRITE_ROUNDS: u32 = (WRITE_VECTORS + THREADS - 1u) / THREADS;
// Where they lie in `part`: T, W; Q, A, `writes`.
override W_AT: u32 = select(0u, R * LOWER_PITCH, TOGETHER > 0u);
override A_AT: u32 = select(0u, CHUNK * LEFT_PITCH, TOGETHER > 0u);
override WRITES_AT: u32 = select(0u, A_AT + CHUNK * LOWER_PITCH, TOGETHER > 1u);
override PART_SIZE: u32 = max(max(W_AT + R * LEFT_PITCH, R * LOWER_PITCH),
  max(max(CHUNK * LEFT_PITCH, A_AT + CHUNK * LOWER_PITCH), WRITES_AT + PART_STEPS * EDGE * WRITE_PITCH));
// Right operands and products lie in workgroup memory by columns, four rows a vector; vectors a column, those of float16
// two and of float32 one more than they hold, to spread the banks. Products are U's, SPLIT times, then that of the state, above O.
override KEY_QUADS: u32 = KP / 4u;
override STEP_QUADS: u32 = R / 4u;
override OPERAND_PITCH: u32 = KEY_QUADS + 2u;
override STEP_PITCH: u32 = STEP_QUADS + 2u;
override SUMS_PITCH: u32 = max(SPLIT * R, KP + CHUNK) / 4u + 1u;
override OPERAND_SIZE: u32 = VB * OPERAND_PITCH;
override STEPS_SIZE: u32 = VB * STEP_PITCH;
override SUMS_SIZE: u32 = VB * SUMS_PITCH;
// How many vectors of each of its columns of S a thread has, of Z (and U), and four columns of O.
override STATE_ROUNDS: u32 = (KEY_QUADS + TEAM - 1u) / TEAM;
override U_ROUNDS: u32 = (STEP_QUADS * OWN + TEAM - 1u) / TEAM;
override OUTPUT_QUADS: u32 = VB / 4u;
override UNITS_SIZE: u32 = OUTPUT_QUADS + 1u;
override ALL_UNITS: u32 = 2u * UNITS_SIZE;
override OUTPUT_ROUNDS: u32 = (CHUNK * OUTPUT_QUADS + THREADS - 1u) / THREADS;

var<workgroup> part: array<vec4<f16>, PART_SIZE>;         // of T, W, Q, A or `writes`
var<workgroup> sums: array<vec4<f32>, SUMS_SIZE>;         // products [VB][SPLIT R], [VB][K + C]
var<workgroup> operand: array<vec4<f16>, OPERAND_SIZE>;   // S [VB][K]
var<workgroup> steps: array<vec4<f16>, STEPS_SIZE>;       // Z, then U [VB][R]
var<workgroup> units: array<vec4<f32>, ALL_UNITS>;        // what each column of S and Z is divided by, in even and in odd chunks
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

// Vector number `i` of what has `vectors` in all, `quads` a row, rows `pitch` apart from `start` of scratch memory on. (What is not
// there is read from the last one and dropped.)
fn part_vector(start: u32, vectors: u32, quads: u32, pitch: u32, i: u32) -> vec4<f16> {
  var at = i;
  if (vectors % THREADS != 0u) {
    at = min(i, vectors - 1u);
  }
  if (quads != pitch) {
    at = at / quads * pitch + at % quads;
  }
  return halves[start + at];
}

fn t_vector(halves_at: u32, i: u32) -> vec4<f16> {
  return part_vector(halves_at + LOWER / 4u, T_VECTORS, LOWER_QUADS, LOWER_QUADS, i);
}

fn w_vector(halves_at: u32, number: u32, i: u32) -> vec4<f16> {
  return part_vector(halves_at + number * LEFT_QUADS, W_VECTORS, LEFT_QUADS, KEY_QUADS, i);
}

fn q_vector(halves_at: u32, number: u32, i: u32) -> vec4<f16> {
  return part_vector(halves_at + R * KEY_QUADS + number * LEFT_QUADS, Q_VECTORS, LEFT_QUADS, KEY_QUADS, i);
}

fn a_vector(halves_at: u32, i: u32) -> vec4<f16> {
  return part_vector(halves_at + (LOWER + R * R) / 4u, A_VECTORS, LOWER_QUADS, LOWER_QUADS, i);
}

fn write_vector(halves_at: u32, number: u32, i: u32) -> vec4<f16> {
  return part_vector(halves_at + WRITES / 4u + number * WRITE_VECTORS, WRITE_VECTORS, WRITE_QUADS, WRITE_QUADS, i);
}

// Vector lid + y THREADS of what has so many goes to its place in `part`.
fn store_part(start: u32, vectors: u32, quads: u32, pitch: u32, lid: u32, y: u32, x: vec4<f16>) {
  if ((y + 1u) * THREADS <= vectors || lid + y * THREADS < vectors) {
    part[start + placed(lid, y, quads, pitch)] = x;
  }
}

// Where vector `i` of a team's columns of Z or U lies, those that are not there in padding.
fn step_at(own: u32, i: u32) -> u32 {
  return select(own * STEP_PITCH + STEP_QUADS, (own + i / STEP_QUADS) * STEP_PITCH + i % STEP_QUADS, i < STEP_QUADS * OWN);
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
  if (state_source == SOURCE_INITIAL) {
    for (var y = 0u; y < STATE_ROUNDS; y++) {  // unrolled
      for (var x = 0u; x < OWN; x++) {  // unrolled
        for (var i = 0u; i < 4u; i++) {  // unrolled
          kept[y * OWN + x][i] = initial_at(origin, (member + y * TEAM) * 4u + i, column + own + x);
        }
      }
    }
  } else if (state_source == SOURCE_CARRIED) {
    for (var y = 0u; y < STATE_ROUNDS; y++) {  // unrolled
      for (var x = 0u; x < OWN; x++) {  // unrolled
        for (var i = 0u; i < 4u; i++) {  // unrolled
          kept[y * OWN + x][i] = carried_at(origin, (member + y * TEAM) * 4u + i, column + own + x);
        }
      }
    }
  } else if (state_source == SOURCE_IDENTITY) {
    for (var y = 0u; y < STATE_ROUNDS; y++) {  // unrolled
      for (var x = 0u; x < OWN; x++) {  // unrolled
        for (var i = 0u; i < 4u; i++) {  // unrolled
          kept[y * OWN + x][i] = identity_at((member + y * TEAM) * 4u + i, column + own + x);
        }
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
  var t_part: array<vec4<f16>, 32>;      // [T_ROUNDS]
  var w_part: array<vec4<f16>, 32>;      // [W_ROUNDS]
  var q_part: array<vec4<f16>, 32>;      // [Q_ROUNDS]
  var a_part: array<vec4<f16>, 32>;      // [A_ROUNDS]
  var write_part: array<vec4<f16>, 32>;  // [WRITE_ROUNDS]
  var stored: array<array<StoredContent, 4>, 16>;  // [U_ROUNDS]
  var decay: array<vec4<f32>, 16>;       // [STATE_ROUNDS]
  var acc: array<MatrixSum, 32>;         // [U_TILE_ROUNDS or STATE_TILE_ROUNDS][2]
  var seen: array<MatrixSum, 16>;        // [OUTPUT_TILE_ROUNDS][2]
  let last = max(piece.x + piece.y, 1u) - 1u;
  var halves_at = halves_base(piece.x, head);
  var rows = table[piece.x].xy;          // first token and tokens of this chunk, and of the next
  var next_rows = table[min(piece.x + 1u, last)].xy;
  var powers = vec4<f32>(1.0);           // unit, then those of reads, writes and queries
  var w_unit = 1.0;
  if (piece.y > 0u) {
    let floats_at = floats_base(piece.x, head) / 4u;
    for (var y = 0u; y < U_ROUNDS; y++) {  // unrolled
      let i = min(member + y * TEAM, STEP_QUADS * OWN - 1u);
      stored[y] = stored_contents(rows.x, rows.y, h, column + own + i / STEP_QUADS, i % STEP_QUADS);
    }
    for (var y = 0u; y < T_ROUNDS; y++) {  // unrolled
      t_part[y] = t_vector(halves_at, lid + y * THREADS);
    }
    for (var y = 0u; y < W_ROUNDS; y++) {  // unrolled
      w_part[y] = w_vector(halves_at, 0u, lid + y * THREADS);
    }
    for (var y = 0u; y < Q_ROUNDS; y++) {  // unrolled
      q_part[y] = q_vector(halves_at, 0u, lid + y * THREADS);
    }
    for (var y = 0u; y < A_ROUNDS; y++) {  // unrolled
      a_part[y] = a_vector(halves_at, lid + y * THREADS);
    }
    for (var y = 0u; y < WRITE_ROUNDS; y++) {  // unrolled
      write_part[y] = write_vector(halves_at, 0u, lid + y * THREADS);
    }
    for (var y = 0u; y < STATE_ROUNDS; y++) {  // unrolled
      decay[y] = floats[floats_at + WHOLE_DECAY / 4u + min(member + y * TEAM, KEY_QUADS - 1u)];
    }
    powers = floats[floats_at + UNIT / 4u];
    w_unit = floats[floats_at + W_UNIT / 4u].x;
  }

  for (var chunk = piece.x; chunk < piece.x + piece.y; chunk++) {
    let first = rows.x;
    let count = rows.y;
    let next = min(chunk + 1u, last);
    let next_halves = halves_base(next, head);
    let next_floats = floats_base(next, head) / 4u;

    // (What does not wait for sums goes before what does.)
    for (var y = 0u; y < T_ROUNDS; y++) {  // unrolled
      store_part(0u, T_VECTORS, LOWER_QUADS, LOWER_PITCH, lid, y, t_part[y]);
    }
    if (TOGETHER > 0u) {
      for (var y = 0u; y < W_ROUNDS; y++) {  // unrolled
        store_part(W_AT, W_VECTORS, LEFT_QUADS, LEFT_PITCH, lid, y, w_part[y]);
      }
    }
    var z: array<vec4<f32>, 16>;         // [U_ROUNDS]
    for (var y = 0u; y < U_ROUNDS; y++) {  // unrolled
      let i = min(member + y * TEAM, STEP_QUADS * OWN - 1u);
      z[y] = contents_of(stored[y], count, identity, column + own + i / STEP_QUADS, i % STEP_QUADS);
    }
    // The powers of two of the columns, and S and Z as float16 over them.
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
    let units_at = chunk % 2u * UNITS_SIZE;
    units[units_at + my_column / 4u][my_column % 4u] = bitcast<f32>(my_unit);
    // (W is over the reads' power and its unit.)
    let z_unit = w_unit * inverse_power(powers.y);
    for (var y = 0u; y < U_ROUNDS; y++) {  // unrolled
      var its_unit = unit[0];
      for (var x = 0u; x < OWN; x++) {  // unrolled
        its_unit = select(its_unit, unit[x], (member + y * TEAM) / STEP_QUADS == x);
      }
      steps[step_at(own, member + y * TEAM)] = vec4<f16>(z[y] * inverse_of(its_unit) * z_unit);
    }

    // U. Sums over even and over odd tiles run side by side.
    for (var i = 0u; i < U_TILE_ROUNDS; i++) {  // unrolled
      acc[2u * i] = MatrixSum();
      acc[2u * i + 1u] = MatrixSum();
    }
    workgroupBarrier();
    for (var y = 0u; y < T_ROUNDS; y++) {  // unrolled
      t_part[y] = t_vector(next_halves, lid + y * THREADS);
    }
    for (var i = 0u; i < U_TILE_ROUNDS; i++) {  // unrolled
      let job = min(i * GROUPS + subgroup, U_JOBS - 1u);
      let left = job % U_TILES / COLUMN_TILES * EDGE * LOWER_PITCH + job / U_TILES * EDGE / 4u;
      let right = job % COLUMN_TILES * EDGE * STEP_PITCH + job / U_TILES * EDGE / 4u;
      for (var y = 0u; y < SPLIT_LOWER; y++) {  // unrolled
        let a = coopLoadT<MatrixLeft>(&part[left + y * SPLIT * EDGE / 4u], LOWER_PITCH);
        let b = coopLoad<MatrixRight>(&steps[right + y * SPLIT * EDGE / 4u], STEP_PITCH);
        acc[2u * i + y % 2u] = coopMultiplyAdd(a, b, acc[2u * i + y % 2u]);
      }
    }
    for (var number = 0u; number < LEFT_PARTS; number++) {  // unrolled
      if (TOGETHER == 0u) {
        workgroupBarrier();
        for (var y = 0u; y < W_ROUNDS; y++) {  // unrolled
          store_part(W_AT, W_VECTORS, LEFT_QUADS, LEFT_PITCH, lid, y, w_part[y]);
        }
        workgroupBarrier();
      }
      for (var y = 0u; y < W_ROUNDS; y++) {  // unrolled
        let more = number + 1u < LEFT_PARTS;
        w_part[y] = w_vector(select(next_halves, halves_at, more), select(0u, number + 1u, more), lid + y * THREADS);
      }
      for (var i = 0u; i < U_TILE_ROUNDS; i++) {  // unrolled
        let job = min(i * GROUPS + subgroup, U_JOBS - 1u);
        let left = W_AT + job % U_TILES / COLUMN_TILES * EDGE * LEFT_PITCH + job / U_TILES * EDGE / 4u;
        let right = job % COLUMN_TILES * EDGE * OPERAND_PITCH + (number * PART_ACROSS + job / U_TILES) * EDGE / 4u;
        for (var y = 0u; y < SPLIT_ACROSS; y++) {  // unrolled
          let a = coopLoadT<MatrixLeft>(&part[left + y * SPLIT * EDGE / 4u], LEFT_PITCH);
          let b = coopLoad<MatrixRight>(&operand[right + y * SPLIT * EDGE / 4u], OPERAND_PITCH);
          acc[2u * i + y % 2u] = coopMultiplyAdd(a, b, acc[2u * i + y % 2u]);
        }
      }
    }
    for (var i = 0u; i < U_TILE_ROUNDS; i++) {  // unrolled
      let job = min(i * GROUPS + subgroup, U_JOBS - 1u);
      let row = (job / U_TILES * LOWER_TILES + job % U_TILES / COLUMN_TILES) * EDGE;
      let at = job % COLUMN_TILES * EDGE * SUMS_PITCH + row / 4u;
      coopStore(acc[2u * i] + acc[2u * i + 1u], &sums[at], SUMS_PITCH);
    }
    workgroupBarrier();

    var u_sum: array<vec4<f32>, 16>;     // [U_ROUNDS]
    for (var y = 0u; y < U_ROUNDS; y++) {  // unrolled
      let i = min(member + y * TEAM, STEP_QUADS * OWN - 1u);
      var u = vec4<f32>();
      for (var x = 0u; x < SPLIT; x++) {  // unrolled
        u += sums[(own + i / STEP_QUADS) * SUMS_PITCH + x * STEP_QUADS + i % STEP_QUADS];
      }
      u_sum[y] = u;
    }
    for (var y = 0u; y < Q_ROUNDS; y++) {  // unrolled
      store_part(0u, Q_VECTORS, LEFT_QUADS, LEFT_PITCH, lid, y, q_part[y]);
    }
    if (TOGETHER > 0u) {
      for (var y = 0u; y < A_ROUNDS; y++) {  // unrolled
        store_part(A_AT, A_VECTORS, LOWER_QUADS, LOWER_PITCH, lid, y, a_part[y]);
      }
    }
    if (TOGETHER > 1u) {
      for (var y = 0u; y < WRITE_ROUNDS; y++) {  // unrolled
        store_part(WRITES_AT, WRITE_VECTORS, WRITE_QUADS, WRITE_PITCH, lid, y, write_part[y]);
      }
    }
    for (var y = 0u; y < U_ROUNDS; y++) {  // unrolled
      steps[step_at(own, member + y * TEAM)] = vec4<f16>(u_sum[y] * powers.x);
    }
    if (!TEAM_IS_SUBGROUP) {
      for (var i = lid; i < VB; i += THREADS) {
        atomicStore(&largest[i], 0u);
      }
    }
    workgroupBarrier();
    for (var y = 0u; y < U_ROUNDS; y++) {  // unrolled
      let i = min(member + y * TEAM, STEP_QUADS * OWN - 1u);
      stored[y] = stored_contents(next_rows.x, next_rows.y, h, column + own + i / STEP_QUADS, i % STEP_QUADS);
    }
    rows = next_rows;
    next_rows = table[min(chunk + 2u, last)].xy;
    let next_powers = floats[next_floats + UNIT / 4u];
    let next_w_unit = floats[next_floats + W_UNIT / 4u].x;
    // (With the others: to wait for one of them is to wait for all, so none is asked for where the next wait is near.)
    var next_decay: array<vec4<f32>, 16>;  // [STATE_ROUNDS]
    for (var y = 0u; y < STATE_ROUNDS; y++) {  // unrolled
      next_decay[y] = floats[next_floats + WHOLE_DECAY / 4u + min(member + y * TEAM, KEY_QUADS - 1u)];
    }

    // O: Q S, in the units of A U, and A U. (naga takes no cooperative call under a condition that differs among subgroups, but in
    // a loop.)
    let makes_output = subgroup < OUTPUT_GROUPS && !TRANSITION;
    for (var i = 0u; i < OUTPUT_TILE_ROUNDS; i++) {  // unrolled
      seen[2u * i] = MatrixSum();
      seen[2u * i + 1u] = MatrixSum();
    }
    for (var number = 0u; number < LEFT_PARTS; number++) {  // unrolled
      if (number > 0u) {
        workgroupBarrier();
        for (var y = 0u; y < Q_ROUNDS; y++) {  // unrolled
          store_part(0u, Q_VECTORS, LEFT_QUADS, LEFT_PITCH, lid, y, q_part[y]);
        }
        workgroupBarrier();
      }
      for (var y = 0u; y < Q_ROUNDS; y++) {  // unrolled
        let more = number + 1u < LEFT_PARTS;
        q_part[y] = q_vector(select(next_halves, halves_at, more), select(0u, number + 1u, more), lid + y * THREADS);
      }
      for (var i = 0u; i < OUTPUT_TILE_ROUNDS; i++) {  // unrolled
        let tile = i * OUTPUT_GROUPS + subgroup;
        for (var once = 0u; once < u32(makes_output && tile < OUTPUT_TILES); once++) {
          let left = tile / COLUMN_TILES * EDGE * LEFT_PITCH;
          let right = tile % COLUMN_TILES * EDGE * OPERAND_PITCH + number * PART_ACROSS * EDGE / 4u;
          for (var x = 0u; x < PART_ACROSS; x++) {  // unrolled
            let a = coopLoadT<MatrixLeft>(&part[left + x * EDGE / 4u], LEFT_PITCH);
            let b = coopLoad<MatrixRight>(&operand[right + x * EDGE / 4u], OPERAND_PITCH);
            seen[2u * i + x % 2u] = coopMultiplyAdd(a, b, seen[2u * i + x % 2u]);
          }
        }
      }
    }
    let y_unit = powers.x * w_unit * inverse_power(powers.y);
    for (var i = 0u; i < OUTPUT_TILE_ROUNDS; i++) {  // unrolled
      seen[2u * i] = y_unit * (seen[2u * i] + seen[2u * i + 1u]);
      seen[2u * i + 1u] = MatrixSum();
    }
    if (TOGETHER == 0u) {
      workgroupBarrier();
      for (var y = 0u; y < A_ROUNDS; y++) {  // unrolled
        store_part(A_AT, A_VECTORS, LOWER_QUADS, LOWER_PITCH, lid, y, a_part[y]);
      }
      workgroupBarrier();
    }
    for (var y = 0u; y < A_ROUNDS; y++) {  // unrolled
      a_part[y] = a_vector(next_halves, lid + y * THREADS);
    }
    for (var i = 0u; i < OUTPUT_TILE_ROUNDS; i++) {  // unrolled
      let tile = i * OUTPUT_GROUPS + subgroup;
      for (var once = 0u; once < u32(makes_output && tile < OUTPUT_TILES); once++) {
        let left = A_AT + tile / COLUMN_TILES * EDGE * LOWER_PITCH;
        let right = tile % COLUMN_TILES * EDGE * STEP_PITCH;
        for (var x = 0u; x < LOWER_TILES; x++) {  // unrolled
          let a = coopLoadT<MatrixLeft>(&part[left + x * EDGE / 4u], LOWER_PITCH);
          let b = coopLoad<MatrixRight>(&steps[right + x * EDGE / 4u], STEP_PITCH);
          seen[2u * i + x % 2u] = coopMultiplyAdd(a, b, seen[2u * i + x % 2u]);
        }
        let to = tile % COLUMN_TILES * EDGE * SUMS_PITCH + (KP + tile / COLUMN_TILES * EDGE) / 4u;
        coopStore(seen[2u * i] + seen[2u * i + 1u], &sums[to], SUMS_PITCH);
      }
    }
    if (TOGETHER < 2u) {
      workgroupBarrier();
    }

    // What the chunk adds to the state.
    for (var i = 0u; i < STATE_TILE_ROUNDS; i++) {  // unrolled
      acc[2u * i] = MatrixSum();
      acc[2u * i + 1u] = MatrixSum();
    }
    for (var number = 0u; number < WRITE_PARTS; number++) {  // unrolled
      if (TOGETHER < 2u) {
        for (var y = 0u; y < WRITE_ROUNDS; y++) {  // unrolled
          store_part(WRITES_AT, WRITE_VECTORS, WRITE_QUADS, WRITE_PITCH, lid, y, write_part[y]);
        }
        workgroupBarrier();
      }
      for (var y = 0u; y < WRITE_ROUNDS; y++) {  // unrolled
        let more = number + 1u < WRITE_PARTS;
        write_part[y] = write_vector(select(next_halves, halves_at, more), select(0u, number + 1u, more), lid + y * THREADS);
      }
      for (var i = 0u; i < STATE_TILE_ROUNDS; i++) {  // unrolled
        let tile = i * STATE_GROUPS + subgroup - STATE_FROM;
        for (var once = 0u; once < u32(subgroup >= STATE_FROM && tile < STATE_TILES); once++) {
          let left = WRITES_AT + tile / COLUMN_TILES * EDGE / 4u;
          let right = tile % COLUMN_TILES * EDGE * STEP_PITCH + number * PART_STEPS * EDGE / 4u;
          for (var x = 0u; x < PART_STEPS; x++) {  // unrolled
            let a = coopLoad<MatrixLeft>(&part[left + x * EDGE * WRITE_PITCH], WRITE_PITCH);
            let b = coopLoad<MatrixRight>(&steps[right + x * EDGE / 4u], STEP_PITCH);
            acc[2u * i + x % 2u] = coopMultiplyAdd(a, b, acc[2u * i + x % 2u]);
          }
        }
      }
      if (number + 1u < WRITE_PARTS) {
        workgroupBarrier();
      }
    }
    for (var i = 0u; i < STATE_TILE_ROUNDS; i++) {  // unrolled
      let tile = i * STATE_GROUPS + subgroup - STATE_FROM;
      for (var once = 0u; once < u32(subgroup >= STATE_FROM && tile < STATE_TILES); once++) {
        let at = tile % COLUMN_TILES * EDGE * SUMS_PITCH + tile / COLUMN_TILES * EDGE / 4u;
        coopStore(acc[2u * i] + acc[2u * i + 1u], &sums[at], SUMS_PITCH);
      }
    }
    workgroupBarrier();

    let whole = powers.y * inverse_power(powers.x) * inverse_power(w_unit);
    for (var y = 0u; y < STATE_ROUNDS; y++) {  // unrolled
      let r = min(member + y * TEAM, KEY_QUADS - 1u);
      for (var x = 0u; x < OWN; x++) {  // unrolled
        let added = sums[(own + x) * SUMS_PITCH + r] * (whole * powers.z) * bitcast<f32>(unit[x]);
        kept[y * OWN + x] = kept[y * OWN + x] * decay[y] + added;
      }
      decay[y] = next_decay[y];
    }
    let o_unit = params.scale * powers.w * small * whole;
    for (var y = 0u; y < OUTPUT_ROUNDS; y++) {  // unrolled
      let t = (lid + y * THREADS) / OUTPUT_QUADS;
      let quad = (lid + y * THREADS) % OUTPUT_QUADS;
      if (!TRANSITION && t < min(count, CHUNK)) {
        var x: vec4<f32>;
        for (var i = 0u; i < 4u; i++) {  // unrolled
          x[i] = sums[(quad * 4u + i) * SUMS_PITCH + (KP + t) / 4u][t % 4u];
        }
        o_store_four(((first + t) * params.value_heads + h) * V, column + quad * 4u, x * units[units_at + quad] * o_unit);
      }
    }
    powers = next_powers;
    w_unit = next_w_unit;
    halves_at = next_halves;
  }

  if (piece.z == NOWHERE) {
    return;
  }
  for (var y = 0u; y < STATE_ROUNDS; y++) {  // unrolled
    for (var x = 0u; x < OWN; x++) {  // unrolled
      let c = column + own + x;
      for (var i = 0u; i < 4u; i++) {  // unrolled
        keep_state(state_source, target_state, (member + y * TEAM) * 4u + i, c, kept[y * OWN + x][i]);
      }
    }
  }
}
