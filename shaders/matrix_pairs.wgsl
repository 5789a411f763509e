// Matrix tier, pass 1 of 3, parallel over chunks and heads: the decayed rows of a chunk and how each sub-step
// sees the ones before it,
//
//   L[r,s] = sum_d b_r[d] a_s[d] D[t(r), t(s)][d]           s < r
//   A[t,r] = sum_d q_t[d] a_r[d] D[t, t(r)][d]              t(r) <= t
//
// with D[t,s] the product of alpha over s+1 .. t. Tokens t > s part at the highest bit in which they differ: at
// that level t has a 1 and s a 0, and D is split at t's block there, D = (product over the block up to t)
// (product over s+1 .. its start), a factor of the row and one of the column, both at most 1 whatever the gate.
// So each level is one product of half of the tokens (rows: those with the bit set) by the other half (columns),
// of which the pairs in the same block of that level are kept. Two more products, one for each half of the tokens, hold
// the pairs within a block of BASE levels: none (a token alone) where decays are strong. Where over no half of such a block
// a channel decays below 2^-10, the factors of its rows and columns are taken from its middle on, up to 2^10 on one side of
// it and down to 2^-10 on the other, and the block's levels are not needed. How large these blocks are is found for each
// chunk and head.

@group(0) @binding(12) var<storage, read_write> floats: array<f32>;
@group(0) @binding(13) var<storage, read_write> halves: array<vec4<f16>>;

// A thread holds four channels of RUN successive tokens, at most 4.
override RUN: u32 = 4u;
override THREADS: u32 = 256u;
override SUBGROUPS: u32 = 8u;
override QUADS: u32 = KP / 4u;
override RUNS: u32 = CHUNK / RUN;
override LEVELS: u32 = firstTrailingBit(CHUNK);

override HALF: u32 = CHUNK / 2u;
// Rows (reads and the query of HALF tokens) and columns (their writes) of a product, in tiles.
override DOWN: u32 = ((N + 1u) * HALF + EDGE - 1u) / EDGE;
override ACROSS: u32 = (N * HALF + EDGE - 1u) / EDGE;
override ROUNDS: u32 = (DOWN * ACROSS + SUBGROUPS - 1u) / SUBGROUPS;
// vec4 a row; 8 halves more than it holds, to spread the banks.
override PITCH: u32 = KP / 4u + 2u;
override ROWS_SIZE: u32 = DOWN * EDGE * PITCH;
override COLUMNS_SIZE: u32 = ACROSS * EDGE * PITCH;
override PRODUCTS_SIZE: u32 = DOWN * ACROSS * TILE;
override TOTALS_SIZE: u32 = RUNS * QUADS;
override GATE_COUNT: u32 = N * CHUNK;
// Levels of a block of tokens that one product may hold, at most, and the least decay over half of it.
override BASE_MOST: u32 = min(4u, LEVELS - 1u);
const LEAST_DECAY = 0.0009765625;
// Largest exponent of a read (over its power) at which its rows stay within float16 all the same.
const MOST_READ = 4;
override NORM_TOKENS: u32 = CHUNK;

var<workgroup> rows: array<vec4<f16>, ROWS_SIZE>;
var<workgroup> columns: array<vec4<f16>, COLUMNS_SIZE>;
var<workgroup> products: array<f32, PRODUCTS_SIZE>;
var<workgroup> totals: array<vec4<f32>, TOTALS_SIZE>;  // decay over each run
var<workgroup> gate: array<f32, GATE_COUNT>;           // [token][sub-step]
// Bits of the largest read, write (without its gate) and query of the chunk; four words, to keep what follows aligned.
var<workgroup> largest: array<atomic<u32>, 4>;
// Bits of the least decay over half of a block of 1, 2, 3 and 4 levels.
var<workgroup> least: array<atomic<u32>, 4>;
var<workgroup> chosen: vec4<u32>;  // base levels

// The exponent of the largest element, within bounds that keep its inverse in float16's reach.
fn exponent_of(number: u32, least: i32) -> i32 {
  return clamp(i32(atomicLoad(&largest[number]) >> 23u) - 127, least, 60);
}

fn power(exponent: i32) -> f32 {
  return bitcast<f32>(u32(exponent + 127) << 23u);
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
  if (item >= params.chunk_count * params.head_count) {
    return;
  }
  let chunk = item / params.head_count;
  let head = item % params.head_count;
  let h = params.first_head + head;
  let first = table[chunk].x;
  let count = table[chunk].y;
  let floats_at = floats_base(chunk, head);
  let halves_at = halves_base(chunk, head);

  if (lid < 4u) {
    atomicStore(&largest[lid], 0u);
    atomicStore(&least[lid], 0x3f800000u);
  }
  workgroupBarrier();
  if (NORMALIZE) {
    compute_norms(first, count, h, lid);
  }
  // This thread's channels d .. d + 3 of tokens run RUN .. run RUN + RUN - 1. What is not there is read from the last token
  // and dropped: loads without branches overlap.
  let quad = lid % QUADS;
  let run = lid / QUADS;
  let d = quad * 4u;
  let working = run < RUNS;
  var alpha: array<vec4<f32>, 4>;
  var total = vec4<f32>(1.0);
  var peak = vec3<f32>();
  for (var t = 0u; t < RUN; t++) {  // unrolled
    let at = min(run * RUN + t, count - 1u);
    let live = working && run * RUN + t < count;
    alpha[t] = select(vec4<f32>(1.0), alpha_four_at(first + at, h, d), live);
    total *= alpha[t];
    // (Dead tokens repeat the last, which changes no maximum.)
    peak.z = max(peak.z, largest_of(query_four_at(first + at, at, h, d)));
    for (var i = 0u; i < N; i++) {  // unrolled
      peak.x = max(peak.x, largest_of(read_four_at(first + at, at, i, h, d)));
      peak.y = max(peak.y, largest_of(write_four_at(first + at, at, i, h, d)));
    }
  }
  if (working) {
    totals[lid] = total;
  }
  // (After the rest has been asked for, since the first word that is stored waits for its load.)
  for (var i = lid; i < GATE_COUNT; i += THREADS) {
    var x = 0.0;
    if (i / N < count) {
      x = gate_at(first + i / N, i % N, h);
    }
    gate[i] = x;
  }
  for (var i = 0u; i < 3u; i++) {
    let most = subgroupMax(peak[i]);
    if (lane == 0u) {
      atomicMax(&largest[i], bitcast<u32>(most));
    }
  }
  workgroupBarrier();

  // T is divided by the reads' power as well, so that one stays near 1: reads of up to 2^11 and down to 2^-8 keep
  // float16's precision without. A grows with the writes.
  let most = exponent_of(0u, -8);
  let reads_exponent = select(min(most, 0), most - 10, most > 10);
  let writes_exponent = exponent_of(1u, -24);
  let query_exponent = exponent_of(2u, -24) + max(writes_exponent, 0);

  // How far a channel decays over half of a block of each size, at most.
  for (var b = 0u; b < 4u; b++) {  // unrolled
    let half_block = 1u << b;
    var smallest = 1.0;
    if (half_block <= RUN) {
      var product = vec4<f32>(1.0);
      for (var t = 0u; t < RUN; t++) {  // unrolled
        product *= alpha[t];
        if ((t + 1u) % half_block == 0u) {
          smallest = min(smallest, min(min(product.x, product.y), min(product.z, product.w)));
          product = vec4<f32>(1.0);
        }
      }
    } else if (working && run % max(half_block / RUN, 1u) == 0u) {
      var product = total;
      for (var i = 1u; i < half_block / RUN; i++) {
        product *= totals[(run + i) * QUADS + quad];
      }
      smallest = min(min(product.x, product.y), min(product.z, product.w));
    }
    smallest = subgroupMin(smallest);
    if (lane == 0u) {
      atomicMin(&least[b], bitcast<u32>(smallest));
    }
  }
  workgroupBarrier();
  if (lid == 0u) {
    var levels = 0u;
    for (var b = 1u; b <= BASE_MOST; b++) {
      if (bitcast<f32>(atomicLoad(&least[b - 1u])) >= LEAST_DECAY && most - reads_exponent <= MOST_READ) {
        levels = b;
      }
    }
    chosen = vec4<u32>(levels);
    floats[floats_at + POWERS] = power(reads_exponent);
    floats[floats_at + POWERS + 1u] = power(writes_exponent);
    floats[floats_at + POWERS + 2u] = power(query_exponent);
    // The scan takes the largest of S and Z to at most 16, and Z over the reads' power: so |Z - X| is below 2^bound.
    let bound = 1 + max(4 - reads_exponent, 5 + i32(firstLeadingBit(KP)) + 1 + max(most - reads_exponent, 0));
    floats[floats_at + RESIDUAL_UNIT] = power(min(15 - bound, 0));
    floats[floats_at + RESIDUAL_BOUND] = power(min(bound, 15));
  }
  let base = workgroupUniformLoad(&chosen).x;

  var query: array<vec4<f16>, 4>;
  var read: array<vec4<f16>, 16>;   // [N][RUN]
  var write: array<vec4<f16>, 16>;  // [N][RUN], without gates
  for (var t = 0u; t < RUN; t++) {  // unrolled
    let at = min(run * RUN + t, count - 1u);
    let there = select(0.0, 1.0, working && run * RUN + t < count);
    query[t] = vec4<f16>(query_four_at(first + at, at, h, d) * (there * power(-query_exponent)));
    for (var i = 0u; i < N; i++) {  // unrolled
      read[i * RUN + t] = vec4<f16>(read_four_at(first + at, at, i, h, d) * (there * power(-reads_exponent)));
      write[i * RUN + t] = vec4<f16>(write_four_at(first + at, at, i, h, d) * (there * power(-writes_exponent)));
    }
  }
  // What L and A were divided by on top of what stays.
  let triangle_power = power(reads_exponent + writes_exponent);
  let masked_power = power(writes_exponent);

  // Reads and queries decayed from the start of the chunk, writes to its end.
  if (working) {
    var from_start = vec4<f32>(1.0);
    for (var i = 0u; i < run; i++) {
      from_start *= totals[i * QUADS + quad];
    }
    var to_end = vec4<f32>(1.0);
    for (var i = run + 1u; i < RUNS; i++) {
      to_end *= totals[i * QUADS + quad];
    }
    if (run == 0u) {
      let whole = total * to_end;
      for (var c = 0u; c < 4u; c++) {  // unrolled
        floats[floats_at + WHOLE_DECAY + d + c] = whole[c];
      }
    }
    for (var t = 0u; t < RUN; t++) {  // unrolled
      let in_chunk = run * RUN + t;
      let before = from_start;
      from_start *= alpha[t];
      for (var i = 0u; i < N; i++) {  // unrolled
        let decay = select(from_start, before, UNDECAYED && i == 0u);
        let row = in_chunk * N + i;
        halves[halves_at + tiled(row, d, KEY_TILES) / 4u] = vec4<f16>(vec4<f32>(read[i * RUN + t]) * decay);
      }
      halves[halves_at + tiled(R + in_chunk, d, KEY_TILES) / 4u] = vec4<f16>(vec4<f32>(query[t]) * from_start);
    }
    for (var back = 0u; back < RUN; back++) {  // unrolled
      let t = RUN - 1u - back;
      let in_chunk = run * RUN + t;
      for (var i = 0u; i < N; i++) {  // unrolled
        let row = in_chunk * N + i;
        let x = vec4<f32>(write[i * RUN + t]) * (to_end * gate[row]);
        halves[halves_at + (WRITES + tiled(row, d, KEY_TILES)) / 4u] = vec4<f16>(x);
      }
      to_end *= alpha[t];
    }
  }

  for (var level = base; level < LEVELS + 2u; level++) {
    let within = level >= LEVELS;        // the pairs within a block of base levels, of either half of the tokens
    let second = level == LEVELS + 1u;
    let ones = (1u << level) - 1u;
    if (working && within) {
      if ((run * RUN >= HALF) == second) {
        // Decay from the start of a block, over that to its middle.
        let inside = (1u << base) - 1u;
        var from_start = vec4<f32>(1.0);
        var to_middle = vec4<f32>(1.0);
        let in_run = inside < RUN;  // or in several whole ones
        if (!in_run) {
          let block = run * RUN >> base << base;
          for (var i = block / RUN; i < run; i++) {
            from_start *= totals[i * QUADS + quad];
          }
          for (var i = block / RUN; (i + 1u) * RUN <= block + (inside + 1u) / 2u; i++) {
            to_middle *= totals[i * QUADS + quad];
          }
        }
        for (var t = 0u; t < RUN; t++) {  // unrolled
          let in_chunk = run * RUN + t;
          if ((in_chunk & inside) == 0u) {
            from_start = vec4<f32>(1.0);
          }
          if (in_run) {
            to_middle = vec4<f32>(1.0);
            for (var s = 0u; s < RUN; s++) {  // unrolled
              let before_middle = (s >> base) == (t >> base) && (s & inside) < (inside + 1u) / 2u;
              to_middle *= select(vec4<f32>(1.0), alpha[s], before_middle);
            }
          }
          let before = from_start / to_middle;
          from_start *= alpha[t];
          var factor = from_start / to_middle;
          var back = to_middle / from_start;
          if (base == 0u) {
            factor = vec4<f32>(1.0);
            back = vec4<f32>(1.0);
          }
          let at = in_chunk % HALF * PITCH + quad;
          for (var i = 0u; i < N; i++) {  // unrolled
            // A read before the token's own decay sees one factor less.
            let decay = select(factor, before, UNDECAYED && i == 0u);
            rows[i * HALF * PITCH + at] = vec4<f16>(vec4<f32>(read[i * RUN + t]) * decay);
            columns[i * HALF * PITCH + at] = vec4<f16>(vec4<f32>(write[i * RUN + t]) * back);
          }
          rows[N * HALF * PITCH + at] = vec4<f16>(vec4<f32>(query[t]) * factor);
        }
      }
    } else if (working) {
      // Blocks of this level may be longer than a run: what lies before and after this one in its block.
      let block = (run * RUN) >> level;
      var factor = vec4<f32>(1.0);
      for (var i = (block << level) / RUN; i < run; i++) {
        factor *= totals[i * QUADS + quad];
      }
      for (var t = 0u; t < RUN; t++) {  // unrolled
        let in_chunk = run * RUN + t;
        if ((in_chunk & ones) == 0u) {
          factor = vec4<f32>(1.0);
        }
        let before = factor;
        factor *= alpha[t];
        if (((in_chunk >> level) & 1u) == 1u) {
          let at = (((in_chunk >> (level + 1u)) << level) | (in_chunk & ones)) * PITCH + quad;
          for (var i = 0u; i < N; i++) {  // unrolled
            // A read before the token's own decay sees one factor less.
            let decay = select(factor, before, UNDECAYED && i == 0u);
            rows[i * HALF * PITCH + at] = vec4<f16>(vec4<f32>(read[i * RUN + t]) * decay);
          }
          rows[N * HALF * PITCH + at] = vec4<f16>(vec4<f32>(query[t]) * factor);
        }
      }
      factor = vec4<f32>(1.0);
      for (var i = run + 1u; i * RUN < (block + 1u) << level; i++) {
        factor *= totals[i * QUADS + quad];
      }
      for (var back = 0u; back < RUN; back++) {  // unrolled
        let t = RUN - 1u - back;
        let in_chunk = run * RUN + t;
        if (((in_chunk + 1u) & ones) == 0u) {
          factor = vec4<f32>(1.0);
        }
        if (((in_chunk >> level) & 1u) == 0u) {
          let at = (((in_chunk >> (level + 1u)) << level) | (in_chunk & ones)) * PITCH + quad;
          for (var i = 0u; i < N; i++) {  // unrolled
            columns[i * HALF * PITCH + at] = vec4<f16>(vec4<f32>(write[i * RUN + t]) * factor);
          }
        }
        factor *= alpha[t];
      }
    }
    workgroupBarrier();

    // Cooperative calls need the same control flow in all subgroups: those without a tile repeat the last one.
    for (var round = 0u; round < ROUNDS; round++) {
      let tile = min(round * SUBGROUPS + subgroup, DOWN * ACROSS - 1u);
      let rows_at = tile / ACROSS * EDGE * PITCH;
      let columns_at = tile % ACROSS * EDGE * PITCH;
      var sum = MatrixSum();
      for (var x = 0u; x < KEY_TILES; x++) {
        let left = coopLoadT<MatrixLeft>(&rows[rows_at + x * EDGE / 4u], PITCH);
        let right = coopLoad<MatrixRight>(&columns[columns_at + x * EDGE / 4u], PITCH);
        sum = coopMultiplyAdd(left, right, sum);
      }
      coopStoreT(sum, &products[tile * TILE], EDGE);
    }
    workgroupBarrier();

    // What is kept: for each step of each row token, the column tokens of its block and all their steps.
    let kept = select(level, base, within);
    for (var i = lid; i < (N + 1u) * N * HALF << kept; i += THREADS) {
      let column_step = i % N;
      let row_token = (i / N >> kept) % HALF;
      let column_token = (row_token >> kept << kept) | (i / N & ((1u << kept) - 1u));
      let step = (i / N >> kept) / HALF;
      var t: u32;
      var s: u32;
      if (within) {
        t = row_token + select(0u, HALF, second);
        s = column_token + select(0u, HALF, second);
      } else {
        t = (row_token >> level << (level + 1u)) | (1u << level) | (row_token & ones);
        s = (column_token >> level << (level + 1u)) | (column_token & ones);
      }
      let row = step * HALF + row_token;
      let column = column_step * HALF + column_token;
      let x = products[(row / EDGE * ACROSS + column / EDGE) * TILE + row % EDGE * EDGE + column % EDGE];
      if (step == N) {
        if (s <= t) {
          floats[floats_at + MASKED + t * R + s * N + column_step] = x * masked_power * gate[s * N + column_step];
        }
      } else if (s < t || (s == t && step > column_step)) {
        floats[floats_at + TRIANGLE + (t * N + step) * R + s * N + column_step] = x * triangle_power * gate[s * N + column_step];
      }
    }
  }
}
