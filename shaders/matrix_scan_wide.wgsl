// Matrix tier, pass 2 of 2, where workgroups are many: what matrix_scan.wgsl does (see there), cut by columns alone. A
// subgroup owns EDGE value columns and takes all rows of their products, so that it loads each tile of a right operand
// once and exchanges what lies between the products with nobody. Workgroups of 64 columns share each chunk's `left`, `lower`
// and `writes`.

// Subgroups of a workgroup, SHARE of which own a tile of columns and deal out its rows' tiles, and lanes of each.
override SHARE: u32 = 1u;
override GROUPS: u32 = VB / EDGE * SHARE;
override LANES: u32 = 32u;
// Between products a lane has four columns of EACH successive rows of every tile.
override QUADS: u32 = EDGE / 4u;
override EACH: u32 = EDGE * QUADS / LANES;
override LEVELS: u32 = firstTrailingBit(LANES / QUADS);
// Tiles of a subgroup: number i is number i SHARE + (its number among those that share) of all.
override OWN_KEYS: u32 = KEY_TILES / SHARE;
override OWN_LOWER: u32 = LOWER_TILES / SHARE;
override OWN_TOKENS: u32 = CHUNK / EDGE / SHARE;
override STATE_ITEMS: u32 = OWN_KEYS * EACH;
override STEP_ITEMS: u32 = OWN_LOWER * EACH;
// `lower`, `left` and `writes` pass through workgroup memory in turn, in PARTS parts a chunk: columns of the first two, rows of
// the last. (A, which is needed later than T, waits as tiles in registers.) Part s waits for its turn in registers, and part s + AHEAD is asked for as soon as it has left them: NVIDIA's
// compiler, driver 580, has one counter for all loads of a thread that are under way, so that waiting for one of them is
// waiting for all, and what was asked for last should be old by then. Vectors a row of a part, then an odd number of pairs of
// them, to spread the banks, then all vectors of a part.
override LEFT_PARTS: u32 = 1u;
override LOWER_PARTS: u32 = 1u;
override WRITE_PARTS: u32 = 1u;
override PARTS: u32 = LEFT_PARTS + LOWER_PARTS + WRITE_PARTS;
override AHEAD: u32 = select(1u, 2u, PARTS % 2u == 0u);
override LEFT_ACROSS: u32 = KEY_TILES / LEFT_PARTS;    // tiles
override LOWER_ACROSS: u32 = LOWER_TILES / LOWER_PARTS;
override WRITE_STEPS: u32 = LOWER_TILES / WRITE_PARTS;
override KEY_QUADS: u32 = KP / 4u;
override STEP_QUADS: u32 = R / 4u;
override LEFT_QUADS: u32 = LEFT_ACROSS * QUADS;
override LOWER_QUADS: u32 = LOWER_ACROSS * QUADS;
override LEFT_PITCH: u32 = 2u * ((LEFT_QUADS / 2u) | 1u);
override LOWER_PITCH: u32 = 2u * ((LOWER_QUADS / 2u) | 1u);
override WRITE_PITCH: u32 = 2u * ((KEY_QUADS / 2u) | 1u);
override LEFT_VECTORS: u32 = (R + CHUNK) * LEFT_QUADS;
override LOWER_VECTORS: u32 = (R + CHUNK) * LOWER_QUADS;
override WRITE_VECTORS: u32 = WRITE_STEPS * EDGE * KEY_QUADS;
override PART_ROUNDS: u32 = (max(max(LEFT_VECTORS, LOWER_VECTORS), WRITE_VECTORS) + THREADS - 1u) / THREADS;
override PART_SIZE: u32 =
  max(max((R + CHUNK) * LEFT_PITCH, (R + CHUNK) * LOWER_PITCH), WRITE_STEPS * EDGE * WRITE_PITCH);
override DECAY_ROUNDS: u32 = (KEY_QUADS + THREADS - 1u) / THREADS;
// A right operand lies by rows, and so does a tile of sums on its way to the lanes that own it: with rows of three times 16
// bytes and of 96, no two lanes of an access meet in a bank. (Where subgroups share columns, there is no room for the former.)
override OPERAND_PITCH: u32 = QUADS + select(2u, 0u, SHARE > 1u);
override SUMS_PITCH: u32 = QUADS + 2u;
override OPERAND_SIZE: u32 = max(KP, R) * OPERAND_PITCH;
override SUMS_SIZE: u32 = EDGE * SUMS_PITCH;
override ALL_OPERANDS: u32 = VB / EDGE * OPERAND_SIZE;
override ALL_SUMS: u32 = GROUPS * SUMS_SIZE;
override ALL_PEAKS: u32 = GROUPS * QUADS;

var<workgroup> part: array<vec4<f16>, PART_SIZE>;       // of `left`, `lower` or `writes`
var<workgroup> operand: array<vec4<f16>, ALL_OPERANDS>; // Z, then S, then U [R or K][EDGE], of each tile
var<workgroup> sums: array<vec4<f32>, ALL_SUMS>;        // a tile of each subgroup
var<workgroup> peaks: array<vec4<f32>, ALL_PEAKS>;      // the largest of each subgroup's S and Z, by columns
var<workgroup> decays: array<vec4<f32>, KEY_QUADS>;     // of the whole chunk

// How part `s` of a chunk lies: vectors a row, their distance in scratch memory and in workgroup memory, all vectors, and where
// they start in the chunk's.
struct Part {
  quads: u32,
  from_pitch: u32,
  to_pitch: u32,
  vectors: u32,
  start: u32,
}

fn part_of(s: u32) -> Part {
  if (s < LOWER_PARTS) {
    return Part(LOWER_QUADS, STEP_QUADS, LOWER_PITCH, LOWER_VECTORS, LOWER / 4u + s * LOWER_QUADS);
  }
  if (s < LOWER_PARTS + LEFT_PARTS) {
    return Part(LEFT_QUADS, KEY_QUADS, LEFT_PITCH, LEFT_VECTORS, (s - LOWER_PARTS) * LEFT_QUADS);
  }
  let number = s - LEFT_PARTS - LOWER_PARTS;
  return Part(KEY_QUADS, KEY_QUADS, WRITE_PITCH, WRITE_VECTORS, WRITES / 4u + number * WRITE_VECTORS);
}

// Vector lid + y THREADS of part `s` of the chunk whose halves start at `halves_at`. (What is not there is read from the
// last one and dropped.)
fn part_vector(halves_at: u32, s: u32, lid: u32, y: u32) -> vec4<f16> {
  let p = part_of(s);
  if (y * THREADS >= p.vectors) {
    return vec4<f16>();
  }
  var at = placed(lid, y, p.quads, p.from_pitch);
  if ((y + 1u) * THREADS > p.vectors) {
    let i = min(lid + y * THREADS, p.vectors - 1u);
    at = i / p.quads * p.from_pitch + i % p.quads;
  }
  return halves[halves_at + p.start + at];
}

fn store_part(s: u32, lid: u32, y: u32, x: vec4<f16>) {
  let p = part_of(s);
  if ((y + 1u) * THREADS <= p.vectors || lid + y * THREADS < p.vectors) {
    part[placed(lid, y, p.quads, p.to_pitch)] = x;
  }
}

// The step that row `row` of the contents is of its token: known here where that depends on the `j`th row of a lane alone.
fn step_of(row: u32, j: u32) -> u32 {
  return select(row % N, j % N, EACH % N == 0u);
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
  let head = item / blocks % params.head_count;
  let h = params.first_head + head;
  let piece = table[params.piece_at + item / blocks / params.head_count];
  let state_source = select(piece.w % 4u, SOURCE_IDENTITY, identity);
  let origin = piece.w / 4u * params.value_heads + h;
  let target_state = piece.z * params.value_heads + h;
  let quad = lane % QUADS;
  let own = subgroup % SHARE;
  let my_row = own * EDGE + lane / QUADS * EACH;  // in the first of the subgroup's tiles
  let c = select(block, block - VALUE_BLOCKS, identity) * VB + subgroup / SHARE * EDGE + quad * 4u;  // the first of the lane's columns
  let operand_at = subgroup / SHARE * OPERAND_SIZE;
  let sums_at = subgroup * SUMS_SIZE;
  let my_operand = operand_at + my_row * OPERAND_PITCH + quad;
  let my_sums = sums_at + lane / QUADS * EACH * SUMS_PITCH + quad;

  var kept: array<vec4<f32>, 32>;        // S [OWN_KEYS][EACH]
  if (state_source == SOURCE_INITIAL) {
    for (var y = 0u; y < STATE_ITEMS; y++) {  // unrolled
      let d = y / EACH * SHARE * EDGE + my_row + y % EACH;
      for (var i = 0u; i < 4u; i++) {  // unrolled
        kept[y][i] = initial_at(origin, d, c + i);
      }
    }
  } else if (state_source == SOURCE_CARRIED) {
    for (var y = 0u; y < STATE_ITEMS; y++) {  // unrolled
      let d = y / EACH * SHARE * EDGE + my_row + y % EACH;
      for (var i = 0u; i < 4u; i++) {  // unrolled
        kept[y][i] = carried_at(origin, d, c + i);
      }
    }
  } else if (state_source == SOURCE_IDENTITY) {
    for (var y = 0u; y < STATE_ITEMS; y++) {  // unrolled
      let d = y / EACH * SHARE * EDGE + my_row + y % EACH;
      for (var i = 0u; i < 4u; i++) {  // unrolled
        kept[y][i] = identity_at(d, c + i);
      }
    }
  }

  // What the next parts and the next chunk need is asked for while others are computed with.
  var coming: array<vec4<f16>, 64>;      // [AHEAD][PART_ROUNDS]
  var stored: array<StoredFour, 16>;     // [OWN_LOWER][EACH]
  var decay: array<vec4<f32>, 4>;        // [DECAY_ROUNDS]
  var acc: array<MatrixSum, 32>;         // of U or S [OWN_LOWER or OWN_KEYS]
  var seen: array<MatrixSum, 16>;        // of O [OWN_TOKENS]
  var masked: array<MatrixLeft, 32>;     // A [OWN_TOKENS][LOWER_TILES]
  let last = max(piece.x + piece.y, 1u) - 1u;
  var halves_at = halves_base(piece.x, head);
  var rows = table[piece.x].xy;          // first token and tokens of this chunk, and of the next
  var next_rows = table[min(piece.x + 1u, last)].xy;
  var powers = vec4<f32>(1.0);           // unit, then those of reads, writes and queries
  var w_unit = 1.0;
  if (piece.y > 0u) {
    let floats_at = floats_base(piece.x, head) / 4u;
    for (var i = 0u; i < AHEAD; i++) {  // unrolled
      for (var y = 0u; y < PART_ROUNDS; y++) {  // unrolled
        coming[i * PART_ROUNDS + y] = part_vector(halves_at, i, lid, y);
      }
    }
    for (var y = 0u; y < STEP_ITEMS; y++) {  // unrolled
      let row = y / EACH * SHARE * EDGE + my_row + y % EACH;
      stored[y] = stored_four_at(rows.x + min(row / N, rows.y - 1u), step_of(row, y % EACH), h, c);
    }
    for (var y = 0u; y < DECAY_ROUNDS; y++) {  // unrolled
      decay[y] = floats[floats_at + WHOLE_DECAY / 4u + min(lid + y * THREADS, KEY_QUADS - 1u)];
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

    // (What all write and all read is separated by the barriers of what comes between, where none stands beside it: a tile of
    // sums goes to its lanes between two.)
    // Contents, the powers of two of the columns, and S as float16 over them.
    let small = below_one(powers.z);
    let grown = inverse_power(small);
    var z: array<vec4<f32>, 16>;         // [OWN_LOWER][EACH]
    var peak = vec4<f32>();
    for (var y = 0u; y < STATE_ITEMS; y++) {  // unrolled
      peak = max(peak, abs(kept[y]));
    }
    peak *= grown;
    for (var y = 0u; y < STEP_ITEMS; y++) {  // unrolled
      let row = y / EACH * SHARE * EDGE + my_row + y % EACH;
      let there = vec4<bool>(row / N < count && !identity) & (vec4<u32>(c, c + 1u, c + 2u, c + 3u) < vec4<u32>(V));
      z[y] = select(vec4<f32>(), four_of(stored[y], step_of(row, y % EACH)), there);
      peak = max(peak, abs(z[y]));
    }
    for (var i = 0u; i < LEVELS; i++) {  // unrolled
      peak = max(peak, subgroupShuffleXor(peak, QUADS << i));
    }
    if (SHARE > 1u) {
      if (lane < QUADS) {
        peaks[subgroup * QUADS + quad] = peak;
      }
      workgroupBarrier();
      for (var i = 0u; i < SHARE; i++) {  // unrolled
        peak = max(peak, peaks[(subgroup / SHARE * SHARE + i) * QUADS + quad]);
      }
    }
    let unit = vec4<f32>(unit_from(peak.x), unit_from(peak.y), unit_from(peak.z), unit_from(peak.w));
    let up = vec4<f32>(inverse_power(unit.x), inverse_power(unit.y), inverse_power(unit.z), inverse_power(unit.w));
    // (W is over the reads' power and its unit.)
    let z_unit = w_unit * inverse_power(powers.y);
    for (var y = 0u; y < STEP_ITEMS; y++) {  // unrolled
      operand[my_operand + (y / EACH * SHARE * EDGE + y % EACH) * OPERAND_PITCH] = vec4<f16>(z[y] * up * z_unit);
    }

    // T Z. T is lower triangular, and a token sees no sub-steps after its own.
    for (var r = 0u; r < OWN_LOWER; r++) {  // unrolled
      acc[r] = MatrixSum();
    }
    for (var number = 0u; number < LOWER_PARTS; number++) {  // unrolled
      if (number > 0u) {
        workgroupBarrier();
      }
      for (var y = 0u; y < PART_ROUNDS; y++) {  // unrolled
        store_part(number, lid, y, coming[number % AHEAD * PART_ROUNDS + y]);
      }
      for (var y = 0u; y < PART_ROUNDS; y++) {  // unrolled
        let s = number + AHEAD;
        coming[s % AHEAD * PART_ROUNDS + y] = part_vector(select(halves_at, next_halves, s >= PARTS), s % PARTS, lid, y);
      }
      if (number == 0u) {
        for (var y = 0u; y < DECAY_ROUNDS; y++) {  // unrolled
          if (lid + y * THREADS < KEY_QUADS) {
            decays[lid + y * THREADS] = decay[y];
          }
          decay[y] = floats[next_floats + WHOLE_DECAY / 4u + min(lid + y * THREADS, KEY_QUADS - 1u)];
        }
        for (var y = 0u; y < STEP_ITEMS; y++) {  // unrolled
          let row = y / EACH * SHARE * EDGE + my_row + y % EACH;
          stored[y] = stored_four_at(next_rows.x + min(row / N, next_rows.y - 1u), step_of(row, y % EACH), h, c);
        }
      }
      workgroupBarrier();
      for (var x = 0u; x < LOWER_ACROSS; x++) {  // unrolled
        let k = number * LOWER_ACROSS + x;
        let b = coopLoadT<MatrixRight>(&operand[operand_at + k * EDGE * OPERAND_PITCH], OPERAND_PITCH);
        for (var r = 0u; r < OWN_LOWER; r++) {  // unrolled
          // (naga takes no matrix load under a condition in which a variable stands, but in a loop.)
          for (var once = 0u; once < u32(k < (r + 1u) * SHARE); once++) {  // if
            let a = coopLoadT<MatrixLeft>(&part[(r * SHARE + own) * EDGE * LOWER_PITCH + x * QUADS], LOWER_PITCH);
            acc[r] = coopMultiplyAdd(a, b, acc[r]);
          }
        }
        for (var t = 0u; t < OWN_TOKENS; t++) {  // unrolled
          masked[t * LOWER_TILES + k] = coopLoadT<MatrixLeft>(&part[(LOWER_TILES + t * SHARE + own) * EDGE * LOWER_PITCH + x * QUADS], LOWER_PITCH);
        }
      }
    }

    // U and Q S.
    for (var t = 0u; t < OWN_TOKENS; t++) {  // unrolled
      seen[t] = MatrixSum();
    }
    for (var number = 0u; number < LEFT_PARTS; number++) {  // unrolled
      workgroupBarrier();
      if (number == 0u) {
        for (var y = 0u; y < STATE_ITEMS; y++) {  // unrolled
          operand[my_operand + (y / EACH * SHARE * EDGE + y % EACH) * OPERAND_PITCH] = vec4<f16>(kept[y] * (up * grown));
        }
      }
      for (var y = 0u; y < PART_ROUNDS; y++) {  // unrolled
        let s = LOWER_PARTS + number;
        store_part(s, lid, y, coming[s % AHEAD * PART_ROUNDS + y]);
      }
      for (var y = 0u; y < PART_ROUNDS; y++) {  // unrolled
        let s = LOWER_PARTS + number + AHEAD;
        coming[s % AHEAD * PART_ROUNDS + y] = part_vector(select(halves_at, next_halves, s >= PARTS), s % PARTS, lid, y);
      }
      workgroupBarrier();
      for (var x = 0u; x < LEFT_ACROSS; x++) {  // unrolled
        let k = number * LEFT_ACROSS + x;
        let b = coopLoadT<MatrixRight>(&operand[operand_at + k * EDGE * OPERAND_PITCH], OPERAND_PITCH);
        for (var r = 0u; r < OWN_LOWER; r++) {  // unrolled
          let a = coopLoadT<MatrixLeft>(&part[(r * SHARE + own) * EDGE * LEFT_PITCH + x * QUADS], LEFT_PITCH);
          acc[r] = coopMultiplyAdd(a, b, acc[r]);
        }
        for (var t = 0u; t < OWN_TOKENS; t++) {  // unrolled
          let a = coopLoadT<MatrixLeft>(&part[(LOWER_TILES + t * SHARE + own) * EDGE * LEFT_PITCH + x * QUADS], LEFT_PITCH);
          seen[t] = coopMultiplyAdd(a, b, seen[t]);
        }
      }
    }
    let next_powers = floats[next_floats + UNIT / 4u];
    let next_w_unit = floats[next_floats + W_UNIT / 4u].x;
    rows = next_rows;
    next_rows = table[min(chunk + 2u, last)].xy;

    var passed: array<vec4<f32>, 32>;
    for (var r = 0u; r < OWN_LOWER; r++) {  // unrolled
      coopStoreT(acc[r], &sums[sums_at], SUMS_PITCH);
      workgroupBarrier();
      for (var j = 0u; j < EACH; j++) {  // unrolled
        passed[r * EACH + j] = sums[my_sums + j * SUMS_PITCH];
      }
      workgroupBarrier();
    }
    for (var y = 0u; y < STEP_ITEMS; y++) {  // unrolled
      operand[my_operand + (y / EACH * SHARE * EDGE + y % EACH) * OPERAND_PITCH] = vec4<f16>(passed[y] * powers.x);
    }
    // Q S in the units of A U.
    for (var t = 0u; t < OWN_TOKENS; t++) {  // unrolled
      seen[t] = powers.x * w_unit * inverse_power(powers.y) * seen[t];
    }

    // O, and what the chunk adds to the state.
    for (var r = 0u; r < OWN_KEYS; r++) {  // unrolled
      acc[r] = MatrixSum();
    }
    for (var number = 0u; number < WRITE_PARTS; number++) {  // unrolled
      if (number > 0u) {
        workgroupBarrier();
      }
      for (var y = 0u; y < PART_ROUNDS; y++) {  // unrolled
        let s = LEFT_PARTS + LOWER_PARTS + number;
        store_part(s, lid, y, coming[s % AHEAD * PART_ROUNDS + y]);
      }
      for (var y = 0u; y < PART_ROUNDS; y++) {  // unrolled
        let s = LEFT_PARTS + LOWER_PARTS + number + AHEAD;
        coming[s % AHEAD * PART_ROUNDS + y] = part_vector(select(halves_at, next_halves, s >= PARTS), s % PARTS, lid, y);
      }
      workgroupBarrier();
      for (var x = 0u; x < WRITE_STEPS; x++) {  // unrolled
        let k = number * WRITE_STEPS + x;
        let b = coopLoadT<MatrixRight>(&operand[operand_at + k * EDGE * OPERAND_PITCH], OPERAND_PITCH);
        for (var r = 0u; r < OWN_KEYS; r++) {  // unrolled
          let a = coopLoad<MatrixLeft>(&part[x * EDGE * WRITE_PITCH + (r * SHARE + own) * QUADS], WRITE_PITCH);
          acc[r] = coopMultiplyAdd(a, b, acc[r]);
        }
        for (var t = 0u; t < OWN_TOKENS; t++) {  // unrolled
          for (var once = 0u; once < u32(k < N * SHARE * (t + 1u)); once++) {  // if
            seen[t] = coopMultiplyAdd(masked[t * LOWER_TILES + k], b, seen[t]);
          }
        }
      }
    }
    let whole = powers.y * inverse_power(powers.x) * inverse_power(w_unit) * unit;
    if (!TRANSITION) {
      let o_unit = params.scale * powers.w * small;
      for (var r = 0u; r < OWN_TOKENS; r++) {  // unrolled
        coopStoreT(seen[r], &sums[sums_at], SUMS_PITCH);
        workgroupBarrier();
        for (var j = 0u; j < EACH; j++) {  // unrolled
          let t = r * SHARE * EDGE + my_row + j;
          let x = sums[my_sums + j * SUMS_PITCH];
          if (t < count) {
            o_store_four(((first + t) * params.value_heads + h) * V, c, x * whole * o_unit);
          }
        }
        workgroupBarrier();
      }
    }
    let back = whole * powers.z;
    for (var r = 0u; r < OWN_KEYS; r++) {  // unrolled
      coopStoreT(acc[r], &sums[sums_at], SUMS_PITCH);
      workgroupBarrier();
      for (var j = 0u; j < EACH; j++) {  // unrolled
        let d = r * SHARE * EDGE + my_row + j;
        kept[r * EACH + j] = kept[r * EACH + j] * decays[d / 4u][d % 4u] + sums[my_sums + j * SUMS_PITCH] * back;
      }
      workgroupBarrier();
    }
    powers = next_powers;
    w_unit = next_w_unit;
    halves_at = next_halves;
  }

  if (piece.z == NOWHERE) {
    return;
  }
  for (var y = 0u; y < STATE_ITEMS; y++) {  // unrolled
    let d = y / EACH * SHARE * EDGE + my_row + y % EACH;
    for (var i = 0u; i < 4u; i++) {  // unrolled
      keep_state(state_source, target_state, d, c + i, kept[y][i]);
    }
  }
}
