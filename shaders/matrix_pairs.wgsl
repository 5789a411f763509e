// Matrix tier, pass 1 of 2, parallel over chunks and heads: all of a chunk that does not need the state. First its decayed
// rows and how each sub-step sees the ones before it,
//
//   L[r,s] = sum_d b_r[d] a_s[d] D[t(r), t(s)][d]           s < r
//   A[t,r] = sum_d q_t[d] a_r[d] D[t, t(r)][d]              t(r) <= t
//
// with D[t,s] the product of alpha over s+1 .. t; then T, which matrix_solve.wgsl makes of L, and W = T B.
//
// Tokens t > s part at the highest bit in which they differ: at that level t has a 1 and s a 0, and D is split at t's block
// there, D = (product over the block up to t) (product over s+1 .. its start), a factor of the row and one of the column, both
// at most 1 whatever the gate. Where over no half of a block of 2^base tokens a channel decays below about 2^-13, the pairs
// within it take one product: the factors of rows and columns are then taken from the block's middle on, up to 2^13 on one
// side of it and down to 2^-13 on the other. How large these blocks are is found for each chunk and head.
//
// Blocks of at least a tile's tokens (nearly always) are whole tiles of L and A: each tile is a product of one phase, of the
// pairs within blocks or of one level, and stays in registers until all are there. Smaller ones take, for each level, the
// product of half of the tokens (rows: those with the bit set) by the other half (columns), of which the pairs in the same
// block are kept; and two more, one for each half of the tokens, for the pairs within blocks of base levels, of which there are
// none (a token alone) where decays are strong.

// (The inputs are only read, but bound as if they were written: NVIDIA's compiler moves loads of what nobody writes down to
// where they are used, so that nothing is asked for ahead.)
@group(0) @binding(12) var<storage, read_write> floats: array<vec4<f32>>;
@group(0) @binding(13) var<storage, read_write> halves: array<vec4<f16>>;

// The channels go through workgroup memory in slabs, as few as it takes to fit. A thread holds four channels of RUN successive
// tokens, at most 4, in each of OWN_SLABS of them: all, so that every thread helps to fill each, or one.
override SLABS: u32 = 1u;
override OWN_SLABS: u32 = 1u;
override RUN: u32 = 4u;
override THREADS: u32 = 256u;
override SUBGROUPS: u32 = 8u;
override LANE_LEVELS: u32 = firstTrailingBit(THREADS / SUBGROUPS);
override QUAD_LEVELS: u32 = LANE_LEVELS - 2u;
override SLAB: u32 = KP / SLABS;
override QUADS: u32 = SLAB / 4u;
override RUNS: u32 = CHUNK / RUN;
override SLAB_GROUPS: u32 = SLABS / OWN_SLABS;
override PLACES: u32 = QUADS * RUNS * SLAB_GROUPS;
override RUN_LEVEL: u32 = firstTrailingBit(RUN);
override LEVELS: u32 = firstTrailingBit(CHUNK);
override SLAB_TILES: u32 = SLAB / EDGE;

// Tiles of L and A with something below the diagonal, row after row, dealt out to the subgroups. Sub-steps lie in the order in
// which they happen, the queries behind all reads.
override QUERY_TILES: u32 = CHUNK / EDGE;
override PAIR_TILES: u32 = (LOWER_TILES * (LOWER_TILES + 1u) + N * QUERY_TILES * (QUERY_TILES + 1u)) / 2u;
override PAIR_ROUNDS: u32 = (PAIR_TILES + SUBGROUPS - 1u) / SUBGROUPS;
// From so many levels on a block is whole tiles, and no decay within the chunk below 2^-104.
const TILE_LEVEL = 4u;
override TILE_BLOCKS: u32 = LEVELS + 1u - TILE_LEVEL;  // sizes of such blocks
override TILE_BITS: u32 = (2u << LEVELS) - (1u << TILE_LEVEL);

// With smaller blocks, rows (reads and queries of HALF tokens) and columns (their writes) of a product, in tiles.
override HALF: u32 = CHUNK / 2u;
override DOWN: u32 = ((N + 1u) * HALF + EDGE - 1u) / EDGE;
override ACROSS: u32 = (N * HALF + EDGE - 1u) / EDGE;
override SUMS: u32 = DOWN * ACROSS;
override PRODUCT_ROUNDS: u32 = (SUMS + SUBGROUPS - 1u) / SUBGROUPS;
// vec4 a row; 8 halves more than it holds, to spread the banks.
override PITCH: u32 = QUADS + 2u;
override ROWS_SIZE: u32 = max((R + CHUNK) * PITCH, R * LOWER_PITCH);
override COLUMNS_SIZE: u32 = R * max(PITCH, LOWER_PITCH);
override TOTALS_SIZE: u32 = RUNS * KP / 4u;
override PRODUCTS_SIZE: u32 = SUMS * TILE / 4u;
override STARTS_SIZE: u32 = (RUNS + 1u) * KP / 4u;
// (Over the decays from the start, which are not read any more when there are products.)
override PRODUCTS_AT: u32 = TOTALS_SIZE;
override SPACE_SIZE: u32 = max(TOTALS_SIZE + max(STARTS_SIZE, PRODUCTS_SIZE), max(SOLVE_SIZE, W_AT + R * W_PITCH));
// W, a slab of it, behind the totals of the next chunk where there is room for both (else W_OVER), rows one vec4 longer than
// what they hold.
override W_OVER: bool = false;
override W_AT: u32 = select(TOTALS_SIZE, 0u, W_OVER);
override W_PITCH: u32 = QUADS + 1u;
// A subgroup makes a column of its tiles, or each W_SPLIT-th tile of it.
override W_SPLIT: u32 = 1u;
override W_ROWS: u32 = LOWER_TILES / W_SPLIT;
override W_JOBS: u32 = SLAB_TILES * W_SPLIT;
override W_JOB_ROUNDS: u32 = (W_JOBS + SUBGROUPS - 1u) / SUBGROUPS;
override W_VECTOR_ROUNDS: u32 = (R * QUADS + THREADS - 1u) / THREADS;
override GATE_COUNT: u32 = N * CHUNK;
override NORM_TOKENS: u32 = CHUNK;

var<workgroup> rows: array<vec4<f16>, ROWS_SIZE>;     // of a slab; later T
var<workgroup> columns: array<vec4<f16>, COLUMNS_SIZE>;  // of a slab; later what T as float16 lacks, then B, a slab at a time
// Decay over each run [slab][run][quad] and from the start of the chunk to each run [slab][run][quad], its end included,
// and products, in tiles; later L, then T, and behind it A; then W, a slab at a time.
var<workgroup> space: array<vec4<f32>, SPACE_SIZE>;
var<workgroup> gate: array<f32, GATE_COUNT>;          // [token][sub-step]
// Bits of the largest read, write, query and gate of a chunk and of its T, eight words each for this chunk and the next.
var<workgroup> largest: array<atomic<u32>, 16>;
// Bit b: decays over half of a block of b levels are above the bound; of blocks of whole tiles, and of smaller ones (and two words
// that keep what follows aligned).
var<workgroup> fitting: array<atomic<u32>, 4>;

// Row and column of tile number `number` of L over A.
fn tile_at(number: u32) -> vec2<u32> {
  var row = 0u;
  var before = 0u;
  for (var r = 1u; r < ROW_TILES; r++) {
    // Tiles of the rows above r.
    let above = select(r, LOWER_TILES, r > LOWER_TILES);
    let queries = r - above;
    let tiles = (above * (above + 1u) + N * queries * (queries + 1u)) / 2u;
    if (tiles <= number) {
      row = r;
      before = tiles;
    }
  }
  return vec2<u32>(row, number - before);
}

// The exponent of the largest element, within bounds that keep its inverse in float16's reach.
fn exponent_of(largest_bits: u32, least: i32) -> i32 {
  return clamp(i32(largest_bits >> 23u) - 127, least, 60);
}

fn power(exponent: i32) -> f32 {
  return bitcast<f32>(u32(exponent + 127) << 23u);
}

// The power of two that takes `most` below 2^15, 1 where it is.
fn power_within(most: f32) -> f32 {
  let exponent = bitcast<u32>(most) >> 23u;
  return select(1.0, bitcast<f32>((127u + 127u + 14u - min(exponent, 254u)) << 23u), exponent > 127u + 14u);
}

// (NVIDIA's compiler, driver 580, calls a function for subgroupMax and subgroupMin in a loop and skips the reduction there where a
// predicate of its caller happens to be set: hence shuffles.)

// Component `lane` of the largest of all lanes of a subgroup, of at least four.
fn largest_of_lanes(x: vec4<u32>, lane: u32) -> u32 {
  // Half of the components for half of the lanes each.
  let high = (lane & 2u) != 0u;
  let pair = max(select(x.xy, x.zw, high), subgroupShuffleXor(select(x.zw, x.xy, high), 2u));
  let odd = (lane & 1u) != 0u;
  var y = max(select(pair.x, pair.y, odd), subgroupShuffleXor(select(pair.y, pair.x, odd), 1u));
  for (var i = 0u; i < QUAD_LEVELS; i++) {  // unrolled
    y = max(y, subgroupShuffleXor(y, 4u << i));
  }
  return y;
}

// The bits that all lanes have.
fn bits_of_lanes(x: u32) -> u32 {
  var y = x;
  for (var i = 0u; i < LANE_LEVELS; i++) {  // unrolled
    y &= subgroupShuffleXor(y, 1u << i);
  }
  return y;
}

fn least_of(x: vec4<f32>) -> f32 {
  let y = min(x.xy, x.zw);
  return min(y.x, y.y);
}

// What a token's decay and vectors are made of, four channels of each operand as they lie in memory.
struct StoredToken {
  q: Stored,
  g: Stored,
  x1: Stored,
  x2: Stored,
  k: array<Stored, 4>,  // [FACTORS]
}

fn stored_token_at(token: u32, h: u32, d: u32) -> StoredToken {
  var stored: StoredToken;
  stored.q = q_stored_four(key_row(token, h), d);
  if (DECAY == 1u) {
    stored.g = Stored(g_stored(token * params.value_heads + h));
  }
  if (DECAY == 2u) {
    stored.g = g_stored_four(value_row(token, h), d);
  }
  if (needs_k(READ_0) || needs_k(READ_1) || needs_k(WRITE_0) || needs_k(WRITE_1)) {
    for (var i = 0u; i < FACTORS; i++) {  // unrolled
      stored.k[i] = k_stored_four(key_row(token * FACTORS + i, h), d);
    }
  }
  if (needs_x1(READ_0) || needs_x1(READ_1) || needs_x1(WRITE_0) || needs_x1(WRITE_1)) {
    stored.x1 = x1_stored_four(x1_row(READ_0, token, h), d);
  }
  if (READ_0 == VECTOR_B || READ_1 == VECTOR_B || WRITE_0 == VECTOR_B || WRITE_1 == VECTOR_B) {
    stored.x2 = x2_stored_four(key_row(token, h), d, K);
  }
  return stored;
}

// The vector with this code of sub-step i.
fn vector_of_stored(code: u32, stored: StoredToken, t: u32, i: u32, d: u32) -> vec4<f32> {
  let k4 = vec4<f32>(stored.k[i / PATTERN]);
  return vector_of(code, k4, vec4<f32>(stored.x1), vec4<f32>(stored.x2), t, i, d);
}

// The first channel that a thread has in slab number `e` of its own, of which they are SLAB_GROUPS apart. (Where there are more
// threads than places, those beyond read the last slab.)
fn channel(first_slab: u32, e: u32, quad: u32) -> u32 {
  return min(first_slab + e * SLAB_GROUPS, SLABS - 1u) * SLAB + quad * 4u;
}

// From the start of the chunk to run `run`.
fn start_at(slab: u32, run: u32, quad: u32) -> u32 {
  return TOTALS_SIZE + (slab * (RUNS + 1u) + run) * QUADS + quad;
}

// Decay over runs `begin` to `end` - 1 of the four channels at `at`.
fn decay_over(begin: u32, end: u32, at: u32) -> vec4<f32> {
  var product = vec4<f32>(1.0);
  for (var i = begin; i < end; i++) {
    product *= space[at + i * QUADS];
  }
  return product;
}

@compute @workgroup_size(THREADS)
fn main(
  @builtin(workgroup_id) group: vec3<u32>,
  @builtin(num_workgroups) groups: vec3<u32>,
  @builtin(local_invocation_index) lid: u32,
  @builtin(subgroup_id) subgroup: u32,
  @builtin(subgroup_invocation_id) lane: u32,
) {
  let items = params.chunk_count * params.head_count;
  // A workgroup takes several chunks and heads in turn, and asks for the inputs of the next while it computes.
  let begin = group.y * groups.x + group.x;
  let step = groups.x * groups.y;
  if (begin >= items) {
    return;
  }

  // This thread's channels d .. d + 3 of tokens run RUN .. run RUN + RUN - 1. What is not there is read from the last token
  // and dropped: loads without branches overlap.
  let working = THREADS == PLACES || lid < PLACES;
  let quad = lid % QUADS;
  let run = lid / QUADS % RUNS;
  let first_slab = lid / (QUADS * RUNS);
  let triangles_at = (params.scratch_at + items * FLOATS) / 4u + begin * ((R + CHUNK) * R / 4u);
  let gate_number = min(lid, GATE_COUNT - 1u);
  var stored: array<StoredToken, 8>;  // [OWN_SLABS][RUN]
  var own_gate = 0.0;
  var tokens = table[begin / params.head_count].xy;  // first, and how many
  {
    let h = params.first_head + begin % params.head_count;
    // (Gates, of which there are no more than threads, go before what waits for the other loads.)
    own_gate = gate_at(tokens.x + min(gate_number / N, tokens.y - 1u), gate_number % N, h);
    for (var e = 0u; e < OWN_SLABS; e++) {  // unrolled
      let o = e * RUN;
      for (var t = 0u; t < RUN; t++) {  // unrolled
        stored[o + t] = stored_token_at(tokens.x + min(run * RUN + t, tokens.y - 1u), h, channel(first_slab, e, quad));
      }
    }
  }

  if (lid < 16u) {
    atomicStore(&largest[lid], 0u);
  }
  if (lid < 4u) {
    atomicStore(&fitting[lid], 0xffffffffu);
  }
  workgroupBarrier();
  var words = 0u;  // this chunk's words of `largest`

  for (var item = begin; item < items; item += step) {
    let chunk = item / params.head_count;
    let head = item % params.head_count;
    let h = params.first_head + head;
    let first = tokens.x;
    let count = tokens.y;
    let floats_at = floats_base(chunk, head) / 4u;
    let halves_at = halves_base(chunk, head);
    if (NORMALIZE) {
      compute_norms(first, count, h, lid);
    }
    let next = select(item, item + step, item + step < items);
    tokens = table[next / params.head_count].xy;

    var alpha: array<vec4<f32>, 8>;   // [OWN_SLABS][RUN]
    var query: array<vec4<f32>, 8>;
    var read: array<vec4<f32>, 16>;   // [OWN_SLABS][RUN][N]
    var write: array<vec4<f32>, 16>;
    for (var e = 0u; e < OWN_SLABS; e++) {  // unrolled
      let o = e * RUN;
      let d = channel(first_slab, e, quad);
      for (var t = 0u; t < RUN; t++) {  // unrolled
        let at = min(run * RUN + t, count - 1u);
        query[o + t] = query_of(vec4<f32>(stored[o + t].q), at, d);
        for (var i = 0u; i < N; i++) {  // unrolled
          read[(o + t) * N + i] = vector_of_stored(read_code(i), stored[o + t], at, i, d);
          write[(o + t) * N + i] = vector_of_stored(write_code(i), stored[o + t], at, i, d);
        }
        alpha[o + t] = alpha_of(vec4<f32>(stored[o + t].g), h, d);
      }
    }
    // The largest of everything. (Numbers that are not negative are in the order of their bits. Dead tokens repeat the last.)
    var peak = vec4<f32>();
    for (var e = 0u; e < OWN_SLABS; e++) {  // unrolled
      let o = e * RUN;
      for (var t = 0u; t < RUN; t++) {  // unrolled
        peak.z = max(peak.z, largest_of(query[o + t]));
        for (var i = 0u; i < N; i++) {  // unrolled
          peak.x = max(peak.x, largest_of(read[(o + t) * N + i]));
          peak.y = max(peak.y, largest_of(write[(o + t) * N + i]));
        }
      }
    }
    let live_gate = select(0.0, own_gate, lid < GATE_COUNT && lid / N < count);
    peak.w = abs(live_gate);
    if (lid < GATE_COUNT) {
      gate[lid] = live_gate;
    }
    let peaks = largest_of_lanes(bitcast<vec4<u32>>(peak), lane);
    if (lane < 4u) {
      atomicMax(&largest[words + lane], peaks);
    }
    for (var e = 0u; e < OWN_SLABS; e++) {  // unrolled
      let o = e * RUN;
      var total = vec4<f32>(1.0);
      for (var t = 0u; t < RUN; t++) {  // unrolled
        alpha[o + t] = select(vec4<f32>(1.0), alpha[o + t], working && run * RUN + t < count);
        total *= alpha[o + t];
      }
      if (working) {
        space[lid + e * PLACES] = total;
      }
    }
    workgroupBarrier();

    // A thread a channel: decay from the start of the chunk, and the least over half of a block, for blocks of whole tiles.
    var smallest: array<f32, 4>;  // [TILE_BLOCKS]
    for (var b = 0u; b < TILE_BLOCKS; b++) {  // unrolled
      smallest[b] = 1.0;
    }
    for (var c = lid; c < KP; c += THREADS) {
      var product: array<f32, 4>;
      for (var b = 0u; b < TILE_BLOCKS; b++) {  // unrolled
        product[b] = 1.0;
      }
      var from_start = 1.0;
      for (var r = 0u; r < RUNS; r++) {  // unrolled
        let over = space[(c / SLAB * RUNS + r) * QUADS + c % SLAB / 4u][c % 4u];
        space[start_at(c / SLAB, r, c % SLAB / 4u)][c % 4u] = from_start;
        from_start *= over;
        for (var b = 0u; b < TILE_BLOCKS; b++) {  // unrolled
          product[b] *= over;
          if ((r + 1u) * RUN % (8u << b) == 0u) {
            smallest[b] = min(smallest[b], product[b]);
            product[b] = 1.0;
          }
        }
      }
      space[start_at(c / SLAB, RUNS, c % SLAB / 4u)][c % 4u] = from_start;
    }
    // T is divided by the reads' power as well, so that one stays near 1: reads of up to 2^11 and down to 2^-8 keep
    // float16's precision without. A grows with the writes.
    let most = exponent_of(atomicLoad(&largest[words]), -8);
    let reads_exponent = select(min(most, 0), most - 10, most > 10);
    let most_write = bitcast<f32>(atomicLoad(&largest[words + 1u])) * bitcast<f32>(atomicLoad(&largest[words + 3u]));
    let writes_exponent = exponent_of(bitcast<u32>(most_write), -24);
    let query_exponent = exponent_of(atomicLoad(&largest[words + 2u]), -24) + max(writes_exponent, 0);
    // Reads over their power are below 2^(most + 1), writes and queries below 2.
    let allowed = power(max(most - reads_exponent, 1) - 14);
    var fits = TILE_BITS;
    for (var b = 0u; b < TILE_BLOCKS; b++) {  // unrolled
      fits = select(fits & ~(1u << (TILE_LEVEL + b)), fits, smallest[b] >= allowed);
    }
    fits = bits_of_lanes(fits);
    if (lane == 0u) {
      atomicAnd(&fitting[0], fits);
    }
    // The scan takes the largest of S and Z to at most 16, and Z over the reads' power: so |Z - X| is below 2^bound.
    let bound = 1 + max(4 - reads_exponent, 5 + i32(firstLeadingBit(KP)) + 1 + max(most - reads_exponent, 0));
    // As float16, which they may be over their powers, and are multiplied by decays as float16 too: half the registers and
    // instructions, for one rounding more. [OWN_SLABS][RUN] or [OWN_SLABS][RUN][N], like above.
    var q: array<vec4<f16>, 8>;
    var b: array<vec4<f16>, 16>;
    var a: array<vec4<f16>, 16>;
    for (var e = 0u; e < OWN_SLABS; e++) {  // unrolled
      let o = e * RUN;
      for (var t = 0u; t < RUN; t++) {  // unrolled
        let there = select(0.0, 1.0, working && run * RUN + t < count);
        q[o + t] = vec4<f16>(query[o + t] * (there * power(-query_exponent)));
        for (var i = 0u; i < N; i++) {  // unrolled
          b[(o + t) * N + i] = vec4<f16>(read[(o + t) * N + i] * (there * power(-reads_exponent)));
          a[(o + t) * N + i] = vec4<f16>(write[(o + t) * N + i] * (gate[(run * RUN + t) * N + i] * power(-writes_exponent)));
        }
      }
    }

    if (lid < 8u) {
      atomicStore(&largest[(words ^ 8u) + lid], 0u);
    }

    // (Some of this may be the time until all know which blocks fit.)
    {
      let h = params.first_head + next % params.head_count;
      own_gate = gate_at(tokens.x + min(gate_number / N, tokens.y - 1u), gate_number % N, h);
      for (var e = 0u; e < OWN_SLABS; e++) {  // unrolled
        let o = e * RUN;
        for (var t = 0u; t < RUN; t++) {  // unrolled
          stored[o + t] = stored_token_at(tokens.x + min(run * RUN + t, tokens.y - 1u), h, channel(first_slab, e, quad));
        }
      }
    }
    let tile_bits = workgroupUniformLoad(&fitting[0]);
    let tile_base = select(firstLeadingBit(tile_bits), 0u, tile_bits == 0u);

    // Reads and queries decayed from the start of the chunk, writes to its end.
    var decayed: array<vec4<f16>, 16>;  // [OWN_SLABS][RUN][N]
    if (working) {
      for (var e = 0u; e < OWN_SLABS; e++) {  // unrolled
        let o = e * RUN;
        let slab = first_slab + e * SLAB_GROUPS;
        let d = channel(first_slab, e, quad);
        let totals_at = slab * RUNS * QUADS + quad;
        var from_start = space[start_at(slab, run, quad)];
        let whole = space[start_at(slab, RUNS, quad)];
        var to_end = whole / space[start_at(slab, run + 1u, quad)];
        if (tile_base < TILE_LEVEL) {
          to_end = decay_over(run + 1u, RUNS, totals_at);
        }
        let writes_at = halves_at + (WRITES + run * RUN * N * KP + d) / 4u;
        let query_at = halves_at + ((R + run * RUN) * KP + d) / 4u;
        if (run == 0u) {
          floats[floats_at + (WHOLE_DECAY + d) / 4u] = whole;
        }
        for (var t = 0u; t < RUN; t++) {  // unrolled
          let before = from_start;
          from_start *= alpha[o + t];
          for (var i = 0u; i < N; i++) {  // unrolled
            let decay = select(from_start, before, UNDECAYED && i == 0u);
            decayed[(o + t) * N + i] = b[(o + t) * N + i] * vec4<f16>(decay);
          }
          halves[query_at + t * KP / 4u] = q[o + t] * vec4<f16>(from_start);
        }
        for (var back = 0u; back < RUN; back++) {  // unrolled
          let t = RUN - 1u - back;
          for (var i = 0u; i < N; i++) {  // unrolled
            halves[writes_at + (t * N + i) * KP / 4u] = a[(o + t) * N + i] * vec4<f16>(to_end);
          }
          to_end *= alpha[o + t];
        }
      }
    }
    // What L and A were divided by on top of what stays.
    let triangle_power = power(reads_exponent + writes_exponent);
    let masked_power = power(writes_exponent) / below_one(power(writes_exponent));

    var acc: array<MatrixSum, 32>;
    if (tile_base >= TILE_LEVEL) {
      var tiles: array<vec2<u32>, 32>;
      for (var i = 0u; i < PAIR_ROUNDS; i++) {  // unrolled
        tiles[i] = tile_at(min(i * SUBGROUPS + subgroup, PAIR_TILES - 1u));
        acc[i] = MatrixSum();
      }
      // First the pairs within blocks, since these fill all of rows and columns with numbers.
      for (var phase = tile_base; phase <= LEVELS; phase++) {
        let level = phase - 1u;
        for (var outer = 0u; outer < SLAB_GROUPS; outer++) {
          for (var e = 0u; e < OWN_SLABS; e++) {  // unrolled
            let o = e * RUN;
            let slab = outer + e * SLAB_GROUPS;
            let totals_at = slab * RUNS * QUADS + quad;
            if (phase > tile_base || outer + e > 0u) {
              workgroupBarrier();
            }
            if (working && first_slab == outer) {
              let row_at = run * RUN * N * PITCH + quad;
              let query_at = (R + run * RUN) * PITCH + quad;
              if (phase == tile_base) {
                // Decay from the middle of a block on, and its inverse before that.
                let block = (run * RUN) >> tile_base << tile_base;
                let middle = (block + (1u << tile_base) / 2u) / RUN;
                var after = space[start_at(slab, run, quad)] / space[start_at(slab, middle, quad)];
                for (var t = 0u; t < RUN; t++) {  // unrolled
                  let before = after;
                  after *= alpha[o + t];
                  let inverse = 1.0 / after;
                  for (var i = 0u; i < N; i++) {  // unrolled
                    // A read before the token's own decay sees one factor less.
                    let decay = select(after, before, UNDECAYED && i == 0u);
                    rows[row_at + (t * N + i) * PITCH] = b[(o + t) * N + i] * vec4<f16>(decay);
                    columns[row_at + (t * N + i) * PITCH] = a[(o + t) * N + i] * vec4<f16>(inverse);
                  }
                  rows[query_at + t * PITCH] = q[o + t] * vec4<f16>(after);
                }
              } else {
                let runs = (1u << level) / RUN;
                let start = run / runs * runs;
                if ((run / runs & 1u) == 1u) {
                  var factor = space[start_at(slab, run, quad)] / space[start_at(slab, start, quad)];
                  for (var t = 0u; t < RUN; t++) {  // unrolled
                    let before = factor;
                    factor *= alpha[o + t];
                    for (var i = 0u; i < N; i++) {  // unrolled
                      let decay = select(factor, before, UNDECAYED && i == 0u);
                      rows[row_at + (t * N + i) * PITCH] = b[(o + t) * N + i] * vec4<f16>(decay);
                    }
                    rows[query_at + t * PITCH] = q[o + t] * vec4<f16>(factor);
                  }
                } else {
                  var factor = space[start_at(slab, start + runs, quad)] / space[start_at(slab, run + 1u, quad)];
                  for (var back = 0u; back < RUN; back++) {  // unrolled
                    let t = RUN - 1u - back;
                    for (var i = 0u; i < N; i++) {  // unrolled
                      columns[row_at + (t * N + i) * PITCH] = a[(o + t) * N + i] * vec4<f16>(factor);
                    }
                    factor *= alpha[o + t];
                  }
                }
              }
            }
            workgroupBarrier();

            // Cooperative calls need the same control flow in all subgroups: those without a tile repeat the last one, and all make
            // the products of each phase, whose tile may be another's.
            for (var i = 0u; i < PAIR_ROUNDS; i++) {  // unrolled
              let tile = tiles[i];
              var sum = MatrixSum();
              for (var x = 0u; x < SLAB_TILES; x++) {  // unrolled
                let left = coopLoadT<MatrixLeft>(&rows[tile.x * EDGE * PITCH + x * EDGE / 4u], PITCH);
                let right = coopLoad<MatrixRight>(&columns[tile.y * EDGE * PITCH + x * EDGE / 4u], PITCH);
                sum = coopMultiplyAdd(left, right, sum);
              }
              let row_token = select(tile.x * EDGE / N, (tile.x - LOWER_TILES) * EDGE, tile.x >= LOWER_TILES);
              let column_token = tile.y * EDGE / N;
              let within = row_token >> tile_base == column_token >> tile_base;
              let parted = firstLeadingBit(row_token ^ column_token) == level;
              acc[i] = acc[i] + select(0.0, 1.0, select(parted, within, phase == tile_base)) * sum;
            }
          }
        }
      }
      for (var i = 0u; i < PAIR_ROUNDS; i++) {  // unrolled
        acc[i] = select(triangle_power, masked_power, tiles[i].x >= LOWER_TILES) * acc[i];
        // (naga takes no cooperative call under a condition that differs among subgroups, but in a loop.)
        for (var once = 0u; once < u32(tiles[i].x >= LOWER_TILES); once++) {
          let at = MASKED_AT + (tiles[i].x - LOWER_TILES) * EDGE * MASKED_PITCH + tiles[i].y * EDGE / 4u;
          coopStoreT(acc[i], &space[at], MASKED_PITCH);
        }
      }
      if (APART) {
        workgroupBarrier();
        keep_masked(halves_at, lid);
        workgroupBarrier();
      }
      for (var i = 0u; i < PAIR_ROUNDS; i++) {  // unrolled
        for (var once = 0u; once < u32(tiles[i].x < LOWER_TILES); once++) {
          coopStoreT(acc[i], &space[lower_at(tiles[i].x * EDGE, tiles[i].y * EDGE / 4u)], BLOCK_PITCH);
        }
      }
    } else {
      // Decays over half of a smaller block.
      var small_fits = (1u << TILE_LEVEL) - 2u;
      for (var b = 0u; b < 3u; b++) {  // unrolled
        let half_block = 1u << b;
        var over = 1.0;
        for (var e = 0u; e < OWN_SLABS; e++) {  // unrolled
          let o = e * RUN;
          if (half_block < RUN) {
            var product = vec4<f32>(1.0);
            for (var t = 0u; t < RUN; t++) {  // unrolled
              product *= alpha[o + t];
              if ((t + 1u) % half_block == 0u) {
                over = min(over, least_of(product));
                product = vec4<f32>(1.0);
              }
            }
          } else if (working && run % max(half_block / RUN, 1u) == 0u) {
            let totals_at = (first_slab + e * SLAB_GROUPS) * RUNS * QUADS + quad;
            over = min(over, least_of(decay_over(run, run + half_block / RUN, totals_at)));
          }
        }
        small_fits = select(small_fits & ~(2u << b), small_fits, over >= allowed);
      }
      small_fits = bits_of_lanes(small_fits);
      if (lane == 0u) {
        atomicAnd(&fitting[1], small_fits);
      }
      let small_bits = workgroupUniformLoad(&fitting[1]);
      let base = select(firstLeadingBit(small_bits), 0u, small_bits == 0u);

      for (var level = base; level < LEVELS + 2u; level++) {
        let within = level >= LEVELS;        // the pairs within a block of base levels, of either half of the tokens
        let second = level == LEVELS + 1u;
        let ones = (1u << level) - 1u;
        for (var i = 0u; i < PRODUCT_ROUNDS; i++) {  // unrolled
          acc[i] = MatrixSum();
        }
        for (var outer = 0u; outer < SLAB_GROUPS; outer++) {
          for (var e = 0u; e < OWN_SLABS; e++) {  // unrolled
            let o = e * RUN;
            let slab = outer + e * SLAB_GROUPS;
            let totals_at = slab * RUNS * QUADS + quad;
            if (working && first_slab == outer) {
              if (within) {
                if ((run * RUN >= HALF) == second) {
                  // Decay from the middle of a block on, and its inverse before that.
                  let block = (run * RUN) >> base << base;
                  let middle = (block + (1u << base) / 2u) / RUN;
                  var after = vec4<f32>(1.0);
                  if (base > RUN_LEVEL) {
                    after = decay_over(min(run, middle), max(run, middle), totals_at);
                    if (run < middle) {
                      after = 1.0 / after;
                    }
                  } else if (base == RUN_LEVEL) {
                    for (var t = 0u; t < RUN; t++) {  // unrolled
                      if (t < RUN / 2u) {
                        after *= alpha[o + t];
                      }
                    }
                    after = 1.0 / after;
                  }
                  let at = run * RUN % HALF;
                  for (var t = 0u; t < RUN; t++) {  // unrolled
                    var before = after;
                    if (base < RUN_LEVEL) {
                      // Blocks of two tokens or one.
                      before = select(vec4<f32>(1.0), 1.0 / alpha[o + t], base == 1u && t % 2u == 0u);
                    }
                    after = select(before * alpha[o + t], vec4<f32>(1.0), base == 0u);
                    let inverse = 1.0 / after;
                    for (var i = 0u; i < N; i++) {  // unrolled
                      // A read before the token's own decay sees one factor less.
                      let decay = select(after, before, UNDECAYED && i == 0u);
                      rows[at * N * PITCH + quad + (t * N + i) * PITCH] = b[(o + t) * N + i] * vec4<f16>(decay);
                      columns[at * N * PITCH + quad + (t * N + i) * PITCH] = a[(o + t) * N + i] * vec4<f16>(inverse);
                    }
                    rows[(N * HALF + at) * PITCH + quad + t * PITCH] = q[o + t] * vec4<f16>(after);
                  }
                }
              } else if (level >= RUN_LEVEL) {
                // A block is one run or several: all tokens are rows or all are columns.
                let runs = (1u << level) / RUN;
                let start = run / runs * runs;
                let at = (run * RUN) >> (level + 1u) << level | (run * RUN & ones);
                if ((run / runs & 1u) == 1u) {
                  var factor = decay_over(start, run, totals_at);
                  for (var t = 0u; t < RUN; t++) {  // unrolled
                    let before = factor;
                    factor *= alpha[o + t];
                    for (var i = 0u; i < N; i++) {  // unrolled
                      let decay = select(factor, before, UNDECAYED && i == 0u);
                      rows[at * N * PITCH + quad + (t * N + i) * PITCH] = b[(o + t) * N + i] * vec4<f16>(decay);
                    }
                    rows[(N * HALF + at) * PITCH + quad + t * PITCH] = q[o + t] * vec4<f16>(factor);
                  }
                } else {
                  var factor = decay_over(run + 1u, start + runs, totals_at);
                  for (var back = 0u; back < RUN; back++) {  // unrolled
                    let t = RUN - 1u - back;
                    for (var i = 0u; i < N; i++) {  // unrolled
                      columns[at * N * PITCH + quad + (t * N + i) * PITCH] = a[(o + t) * N + i] * vec4<f16>(factor);
                    }
                    factor *= alpha[o + t];
                  }
                }
              } else {
                // Several blocks a run.
                var before = vec4<f32>(1.0);
                for (var t = 0u; t < RUN; t++) {  // unrolled
                  if ((t & ones) == 0u) {
                    before = vec4<f32>(1.0);
                  }
                  let factor = before * alpha[o + t];
                  if (((t >> level) & 1u) == 1u) {
                    let at = (run * RUN + t) >> (level + 1u) << level | (t & ones);
                    for (var i = 0u; i < N; i++) {  // unrolled
                      let decay = select(factor, before, UNDECAYED && i == 0u);
                      rows[(at * N + i) * PITCH + quad] = b[(o + t) * N + i] * vec4<f16>(decay);
                    }
                    rows[(N * HALF + at) * PITCH + quad] = q[o + t] * vec4<f16>(factor);
                  }
                  before = factor;
                }
                var factor = vec4<f32>(1.0);
                for (var back = 0u; back < RUN; back++) {  // unrolled
                  let t = RUN - 1u - back;
                  if (((t + 1u) & ones) == 0u) {
                    factor = vec4<f32>(1.0);
                  }
                  if (((t >> level) & 1u) == 0u) {
                    let at = (run * RUN + t) >> (level + 1u) << level | (t & ones);
                    for (var i = 0u; i < N; i++) {  // unrolled
                      columns[(at * N + i) * PITCH + quad] = a[(o + t) * N + i] * vec4<f16>(factor);
                    }
                  }
                  factor *= alpha[o + t];
                }
              }
            }
            workgroupBarrier();

            // Cooperative calls need the same control flow in all subgroups: those without a tile repeat the last one.
            for (var i = 0u; i < PRODUCT_ROUNDS; i++) {  // unrolled
              let sum = min(i * SUBGROUPS + subgroup, SUMS - 1u);
              for (var x = 0u; x < SLAB_TILES; x++) {  // unrolled
                let left = coopLoadT<MatrixLeft>(&rows[sum / ACROSS * EDGE * PITCH + x * EDGE / 4u], PITCH);
                let right = coopLoad<MatrixRight>(&columns[sum % ACROSS * EDGE * PITCH + x * EDGE / 4u], PITCH);
                acc[i] = coopMultiplyAdd(left, right, acc[i]);
              }
            }
            if (slab + 1u < SLABS) {
              workgroupBarrier();
            }
          }
        }
        for (var i = 0u; i < PRODUCT_ROUNDS; i++) {  // unrolled
          let sum = min(i * SUBGROUPS + subgroup, SUMS - 1u);
          coopStoreT(acc[i], &space[PRODUCTS_AT + sum * TILE / 4u], EDGE / 4u);
        }
        workgroupBarrier();

        // What is kept of it: for each row, the columns of its block, four at a time where they are successive tokens'. (What L
        // then has on and above its diagonal, and A of what a token does not see, the solve pass drops.)
        let kept = select(level, base, within);
        let each = select(1u, 4u, (N << kept) % 4u == 0u);
        let across = (N << kept) / each;
        for (var i = lid; i < (N + 1u) * HALF * across; i += THREADS) {
          let row = i / across;
          let is_query = row >= N * HALF;
          let token = select(row / N, row - N * HALF, is_query);
          let first_column = token >> kept << kept;
          var t = token + select(0u, HALF, second);
          var s = first_column + select(0u, HALF, second);
          if (!within) {
            t = token >> level << (level + 1u) | (1u << level) | (token & ones);
            s = first_column << 1u;
          }
          let column = first_column * N + i % across * each;
          let to = s * N + i % across * each;
          let tile = row / EDGE * ACROSS + column / EDGE;
          let x = space[PRODUCTS_AT + (tile * TILE + row % EDGE * EDGE + column % EDGE) / 4u];
          let at = select(t * N + row % N, R + t, is_query) * R + to;
          let y = x * select(triangle_power, masked_power, is_query);
          if (each == 4u) {
            floats[triangles_at + at / 4u] = y;
          } else {
            floats[triangles_at + at / 4u][at % 4u] = y[column % 4u];
          }
        }
      }
      storageBarrier();
      workgroupBarrier();
      take_masked(triangles_at, lid);
      if (APART) {
        workgroupBarrier();
        keep_masked(halves_at, lid);
        workgroupBarrier();
      }
      take_triangle(triangles_at, lid);
    }
    workgroupBarrier();
    solve(halves_at, words, lid, lane, subgroup);

    // W = T B, a slab at a time.
    let small = below_one(power(writes_exponent));
    var w_unit = 1.0;
    for (var outer = 0u; outer < SLAB_GROUPS; outer++) {
      for (var e = 0u; e < OWN_SLABS; e++) {  // unrolled
        let o = e * RUN;
        let current = outer + e * SLAB_GROUPS;
        if (working && first_slab == outer) {
          for (var t = 0u; t < RUN; t++) {  // unrolled
            for (var i = 0u; i < N; i++) {  // unrolled
              columns[((run * RUN + t) * N + i) * PITCH + quad] = decayed[(o + t) * N + i];
            }
          }
        }
        workgroupBarrier();
        if (current == 0u) {
          // |W| is at most R max |T| times the largest read, and |U| times the largest residual: powers of two that take these
          // below 2^15, where they are not already.
          let most_t = f32(R) * bitcast<f32>(atomicLoad(&largest[words + 4u]));
          w_unit = power_within(most_t * power(most - reads_exponent + 1));
          let unit = power_within(most_t * w_unit * power(bound));
          if (lid == 0u) {
            floats[floats_at + UNIT / 4u] = vec4<f32>(unit, power(reads_exponent), power(writes_exponent), power(query_exponent));
            floats[floats_at + W_UNIT / 4u] = vec4<f32>(w_unit, 0.0, 0.0, 0.0);
          }
        }
        for (var i = 0u; i < W_JOB_ROUNDS; i++) {  // unrolled
          let job = min(i * SUBGROUPS + subgroup, W_JOBS - 1u);
          let column = job % SLAB_TILES * EDGE / 4u;
          for (var y = 0u; y < W_ROWS; y++) {  // unrolled
            acc[y] = MatrixSum();
          }
          for (var x = 0u; x < LOWER_TILES; x++) {  // unrolled
            let right = coopLoadT<MatrixRight>(&columns[x * EDGE * PITCH + column], PITCH);
            for (var y = 0u; y < W_ROWS; y++) {  // unrolled
              for (var once = 0u; once < u32(x < (y + 1u) * W_SPLIT); once++) {  // if
                let row = (y * W_SPLIT + job / SLAB_TILES) * EDGE;
                let left = coopLoadT<MatrixLeft>(&rows[row * LOWER_PITCH + x * EDGE / 4u], LOWER_PITCH);
                acc[y] = coopMultiplyAdd(left, right, acc[y]);
              }
            }
          }
          for (var y = 0u; y < W_ROWS; y++) {  // unrolled
            let row = (y * W_SPLIT + job / SLAB_TILES) * EDGE;
            coopStoreT(acc[y], &space[W_AT + row * W_PITCH + column], W_PITCH);
          }
        }
        workgroupBarrier();
        for (var y = 0u; y < W_VECTOR_ROUNDS; y++) {  // unrolled
          let i = lid + y * THREADS;
          if ((y + 1u) * THREADS <= R * QUADS || i < R * QUADS) {
            let w = space[W_AT + i / QUADS * W_PITCH + i % QUADS];
            halves[halves_at + i / QUADS * KP / 4u + current * QUADS + i % QUADS] = vec4<f16>(w * (-w_unit * small));
          }
        }
      }
    }
    if (lid < 4u) {
      atomicStore(&fitting[lid], 0xffffffffu);
    }
    words ^= 8u;
    if (W_OVER) {
      // (Totals of the next chunk take the place of W.)
      workgroupBarrier();
    }
  }
}
