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

@group(0) @binding(12) var<storage, read_write> floats: array<vec4<f32>>;
@group(0) @binding(13) var<storage, read_write> halves: array<vec4<f16>>;

// The channels go through workgroup memory in slabs, so that a multiprocessor holds more workgroups. A thread holds four
// channels of RUN successive tokens, at most 4.
override SLABS: u32 = 1u;
override RUN: u32 = 4u;
override THREADS: u32 = 256u;
override SUBGROUPS: u32 = 8u;
override SLAB: u32 = KP / SLABS;
override QUADS: u32 = SLAB / 4u;
override RUNS: u32 = CHUNK / RUN;
override RUN_LEVEL: u32 = firstTrailingBit(RUN);
override LEVELS: u32 = firstTrailingBit(CHUNK);
override SLAB_TILES: u32 = SLAB / EDGE;
// Where there are more subgroups than tiles of a product, some share a tile: each sums over a part of the channels.
override SHARES: u32 = 1u;
override SHARE_TILES: u32 = SLAB_TILES / SHARES;

override HALF: u32 = CHUNK / 2u;
// Rows (reads and queries of HALF tokens) and columns (their writes) of a product, in tiles. Sub-steps lie in the order
// in which they happen, the queries behind all reads.
override DOWN: u32 = ((N + 1u) * HALF + EDGE - 1u) / EDGE;
override ACROSS: u32 = (N * HALF + EDGE - 1u) / EDGE;
override SUMS: u32 = DOWN * ACROSS * SHARES;
override PRODUCT_ROUNDS: u32 = (SUMS + SUBGROUPS - 1u) / SUBGROUPS;
// vec4 a row; 8 halves more than it holds, to spread the banks.
override PITCH: u32 = QUADS + 2u;
override ROWS_SIZE: u32 = DOWN * EDGE * PITCH;
override COLUMNS_SIZE: u32 = ACROSS * EDGE * PITCH;
override PRODUCTS_SIZE: u32 = SUMS * TILE / 4u;
override TOTALS_SIZE: u32 = RUNS * KP / 4u;
override GATE_COUNT: u32 = N * CHUNK;
// Levels of a block of tokens that one product may hold, at most, and the least decay over half of it.
override BASE_MOST: u32 = min(4u, LEVELS - 1u);
const LEAST_DECAY = 0.0009765625;
// Largest exponent of a read (over its power) at which its rows stay within float16 all the same.
const MOST_READ = 4;
override NORM_TOKENS: u32 = CHUNK;

var<workgroup> rows: array<vec4<f16>, ROWS_SIZE>;          // of a slab
var<workgroup> columns: array<vec4<f16>, COLUMNS_SIZE>;
var<workgroup> products: array<vec4<f32>, PRODUCTS_SIZE>;  // in tiles [tile][share]
var<workgroup> totals: array<vec4<f32>, TOTALS_SIZE>;      // decay over each run [slab][run][quad]
var<workgroup> gate: array<f32, GATE_COUNT>;               // [token][sub-step]
// Bits of the largest read, write (times its gate) and query of the chunk; four words, to keep what follows aligned.
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

fn least_of(x: vec4<f32>) -> f32 {
  let y = min(x.xy, x.zw);
  return min(y.x, y.y);
}

// Decay over runs `begin` to `end` - 1 of the four channels at `at`.
fn decay_over(begin: u32, end: u32, at: u32) -> vec4<f32> {
  var product = vec4<f32>(1.0);
  for (var i = begin; i < end; i++) {
    product *= totals[at + i * QUADS];
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
  let item = group.y * groups.x + group.x;
  if (item >= params.chunk_count * params.head_count) {
    return;
  }
  let chunk = item / params.head_count;
  let head = item % params.head_count;
  let h = params.first_head + head;
  let first = table[chunk].x;
  let count = table[chunk].y;
  let floats_at = floats_base(chunk, head) / 4u;
  let halves_at = halves_base(chunk, head);
  if (NORMALIZE) {
    compute_norms(first, count, h, lid);
  }

  // This thread's channels d .. d + 3 of tokens run RUN .. run RUN + RUN - 1. What is not there is read from the last token
  // and dropped: loads without branches overlap.
  let working = lid < TOTALS_SIZE;
  let quad = lid % QUADS;
  let run = lid / QUADS % RUNS;
  let slab = lid / (QUADS * RUNS);
  let d = min(slab, SLABS - 1u) * SLAB + quad * 4u;
  let totals_at = slab * RUNS * QUADS + quad;
  // (Gates, of which there are no more than threads, go before what waits for the other loads.)
  let own_gate = gate_at(first + min(min(lid, GATE_COUNT - 1u) / N, count - 1u), lid % N, h);
  var alpha: array<vec4<f32>, 4>;
  var query: array<vec4<f32>, 4>;
  var read: array<vec4<f32>, 16>;   // [RUN][N]
  var write: array<vec4<f32>, 16>;  // [RUN][N]
  for (var t = 0u; t < RUN; t++) {  // unrolled
    let at = min(run * RUN + t, count - 1u);
    query[t] = query_four_at(first + at, at, h, d);
    for (var i = 0u; i < N; i++) {  // unrolled
      read[t * N + i] = read_four_at(first + at, at, i, h, d);
      write[t * N + i] = write_four_at(first + at, at, i, h, d);
    }
  }
  for (var t = 0u; t < RUN; t++) {  // unrolled
    alpha[t] = alpha_four_at(first + min(run * RUN + t, count - 1u), h, d);
  }
  if (lid < GATE_COUNT) {
    gate[lid] = select(0.0, own_gate, lid / N < count);
  }
  if (lid < 4u) {
    atomicStore(&largest[lid], 0u);
    atomicStore(&least[lid], 0x3f800000u);
  }
  var total = vec4<f32>(1.0);
  for (var t = 0u; t < RUN; t++) {  // unrolled
    alpha[t] = select(vec4<f32>(1.0), alpha[t], working && run * RUN + t < count);
    total *= alpha[t];
  }
  if (working) {
    totals[lid] = total;
  }
  workgroupBarrier();

  // How far a channel decays over half of a block of each size, at most, and the largest of everything. (Numbers that are
  // not negative are in the order of their bits.)
  for (var b = 0u; b < 4u; b++) {  // unrolled
    let half_block = 1u << b;
    var smallest = 1.0;
    if (half_block < RUN) {
      var product = vec4<f32>(1.0);
      for (var t = 0u; t < RUN; t++) {  // unrolled
        product *= alpha[t];
        if ((t + 1u) % half_block == 0u) {
          smallest = min(smallest, least_of(product));
          product = vec4<f32>(1.0);
        }
      }
    } else if (half_block == RUN) {
      smallest = least_of(total);
    } else if (working && run % max(half_block / RUN, 1u) == 0u && run + half_block / RUN <= RUNS) {
      smallest = least_of(total * decay_over(run + 1u, run + half_block / RUN, totals_at));
    }
    let bits = subgroupMin(bitcast<u32>(smallest));
    if (lane == 0u) {
      atomicMin(&least[b], bits);
    }
  }
  // (Dead tokens repeat the last with a gate of zero, which changes no maximum.)
  var peak = vec3<f32>();
  for (var t = 0u; t < RUN; t++) {  // unrolled
    peak.z = max(peak.z, largest_of(query[t]));
    for (var i = 0u; i < N; i++) {  // unrolled
      peak.x = max(peak.x, largest_of(read[t * N + i]));
      peak.y = max(peak.y, abs(gate[(run * RUN + t) * N + i]) * largest_of(write[t * N + i]));
    }
  }
  for (var i = 0u; i < 3u; i++) {  // unrolled
    let bits = subgroupMax(bitcast<u32>(peak[i]));
    if (lane == 0u) {
      atomicMax(&largest[i], bits);
    }
  }
  workgroupBarrier();

  // T is divided by the reads' power as well, so that one stays near 1: reads of up to 2^11 and down to 2^-8 keep
  // float16's precision without. A grows with the writes.
  let most = exponent_of(0u, -8);
  let reads_exponent = select(min(most, 0), most - 10, most > 10);
  let writes_exponent = exponent_of(1u, -24);
  let query_exponent = exponent_of(2u, -24) + max(writes_exponent, 0);
  if (lid == 0u) {
    var levels = 0u;
    for (var b = 1u; b <= BASE_MOST; b++) {
      if (bitcast<f32>(atomicLoad(&least[b - 1u])) >= LEAST_DECAY && most - reads_exponent <= MOST_READ) {
        levels = b;
      }
    }
    chosen = vec4<u32>(levels);
    // The scan takes the largest of S and Z to at most 16, and Z over the reads' power: so |Z - X| is below 2^bound.
    let bound = 1 + max(4 - reads_exponent, 5 + i32(firstLeadingBit(KP)) + 1 + max(most - reads_exponent, 0));
    // (The unit is the solve pass's.)
    floats[floats_at + UNIT / 4u] = vec4<f32>(1.0, power(reads_exponent), power(writes_exponent), power(query_exponent));
    floats[floats_at + RESIDUAL_UNIT / 4u] = vec4<f32>(power(min(15 - bound, 0)), power(min(bound, 15)), 0.0, 0.0);
  }

  // As float16, which they may be over their powers, and are multiplied by decays as float16 too: half the registers and
  // instructions, for one rounding more. [RUN] or [RUN][N], like above.
  var q: array<vec4<f16>, 4>;
  var b: array<vec4<f16>, 16>;
  var a: array<vec4<f16>, 16>;
  for (var t = 0u; t < RUN; t++) {  // unrolled
    let there = select(0.0, 1.0, working && run * RUN + t < count);
    q[t] = vec4<f16>(query[t] * (there * power(-query_exponent)));
    for (var i = 0u; i < N; i++) {  // unrolled
      b[t * N + i] = vec4<f16>(read[t * N + i] * (there * power(-reads_exponent)));
      a[t * N + i] = vec4<f16>(write[t * N + i] * (gate[(run * RUN + t) * N + i] * power(-writes_exponent)));
    }
  }

  // Reads and queries decayed from the start of the chunk, writes to its end.
  if (working) {
    var from_start = decay_over(0u, run, totals_at);
    var to_end = decay_over(run + 1u, RUNS, totals_at);
    let left_at = halves_at + (run * RUN * N * KP + d) / 4u;
    let query_at = halves_at + ((R + run * RUN) * KP + d) / 4u;
    if (run == 0u) {
      floats[floats_at + (WHOLE_DECAY + d) / 4u] = total * to_end;
    }
    for (var t = 0u; t < RUN; t++) {  // unrolled
      let before = from_start;
      from_start *= alpha[t];
      for (var i = 0u; i < N; i++) {  // unrolled
        let decay = select(from_start, before, UNDECAYED && i == 0u);
        halves[left_at + (t * N + i) * KP / 4u] = b[t * N + i] * vec4<f16>(decay);
      }
      halves[query_at + t * KP / 4u] = q[t] * vec4<f16>(from_start);
    }
    for (var back = 0u; back < RUN; back++) {  // unrolled
      let t = RUN - 1u - back;
      for (var i = 0u; i < N; i++) {  // unrolled
        halves[left_at + (WRITES + (t * N + i) * KP) / 4u] = a[t * N + i] * vec4<f16>(to_end);
      }
      to_end *= alpha[t];
    }
  }
  let base = workgroupUniformLoad(&chosen).x;
  // What L and A were divided by on top of what stays.
  let triangle_power = power(reads_exponent + writes_exponent);
  let masked_power = power(writes_exponent);

  for (var level = base; level < LEVELS + 2u; level++) {
    let within = level >= LEVELS;        // the pairs within a block of base levels, of either half of the tokens
    let second = level == LEVELS + 1u;
    let ones = (1u << level) - 1u;
    var acc: array<MatrixSum, 32>;
    for (var i = 0u; i < PRODUCT_ROUNDS; i++) {  // unrolled
      acc[i] = MatrixSum();
    }
    for (var current = 0u; current < SLABS; current++) {
      if (working && slab == current) {
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
                  after *= alpha[t];
                }
              }
              after = 1.0 / after;
            }
            let at = run * RUN % HALF;
            for (var t = 0u; t < RUN; t++) {  // unrolled
              var before = after;
              if (base < RUN_LEVEL) {
                // Blocks of two tokens or one.
                before = select(vec4<f32>(1.0), 1.0 / alpha[t], base == 1u && t % 2u == 0u);
              }
              after = select(before * alpha[t], vec4<f32>(1.0), base == 0u);
              let inverse = 1.0 / after;
              for (var i = 0u; i < N; i++) {  // unrolled
                // A read before the token's own decay sees one factor less.
                let decay = select(after, before, UNDECAYED && i == 0u);
                rows[at * N * PITCH + quad + (t * N + i) * PITCH] = b[t * N + i] * vec4<f16>(decay);
                columns[at * N * PITCH + quad + (t * N + i) * PITCH] = a[t * N + i] * vec4<f16>(inverse);
              }
              rows[(N * HALF + at) * PITCH + quad + t * PITCH] = q[t] * vec4<f16>(after);
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
              factor *= alpha[t];
              for (var i = 0u; i < N; i++) {  // unrolled
                let decay = select(factor, before, UNDECAYED && i == 0u);
                rows[at * N * PITCH + quad + (t * N + i) * PITCH] = b[t * N + i] * vec4<f16>(decay);
              }
              rows[(N * HALF + at) * PITCH + quad + t * PITCH] = q[t] * vec4<f16>(factor);
            }
          } else {
            var factor = decay_over(run + 1u, start + runs, totals_at);
            for (var back = 0u; back < RUN; back++) {  // unrolled
              let t = RUN - 1u - back;
              for (var i = 0u; i < N; i++) {  // unrolled
                columns[at * N * PITCH + quad + (t * N + i) * PITCH] = a[t * N + i] * vec4<f16>(factor);
              }
              factor *= alpha[t];
            }
          }
        } else {
          // Several blocks a run.
          var before = vec4<f32>(1.0);
          for (var t = 0u; t < RUN; t++) {  // unrolled
            if ((t & ones) == 0u) {
              before = vec4<f32>(1.0);
            }
            let factor = before * alpha[t];
            if (((t >> level) & 1u) == 1u) {
              let at = (run * RUN + t) >> (level + 1u) << level | (t & ones);
              for (var i = 0u; i < N; i++) {  // unrolled
                let decay = select(factor, before, UNDECAYED && i == 0u);
                rows[(at * N + i) * PITCH + quad] = b[t * N + i] * vec4<f16>(decay);
              }
              rows[(N * HALF + at) * PITCH + quad] = q[t] * vec4<f16>(factor);
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
                columns[(at * N + i) * PITCH + quad] = a[t * N + i] * vec4<f16>(factor);
              }
            }
            factor *= alpha[t];
          }
        }
      }
      workgroupBarrier();

      // Cooperative calls need the same control flow in all subgroups: those without a tile repeat the last one.
      for (var i = 0u; i < PRODUCT_ROUNDS; i++) {  // unrolled
        let sum = min(i * SUBGROUPS + subgroup, SUMS - 1u);
        let channels_at = sum % SHARES * SHARE_TILES * EDGE / 4u;
        let rows_at = sum / SHARES / ACROSS * EDGE * PITCH + channels_at;
        let columns_at = sum / SHARES % ACROSS * EDGE * PITCH + channels_at;
        for (var x = 0u; x < SHARE_TILES; x++) {  // unrolled
          let left = coopLoadT<MatrixLeft>(&rows[rows_at + x * EDGE / 4u], PITCH);
          let right = coopLoad<MatrixRight>(&columns[columns_at + x * EDGE / 4u], PITCH);
          acc[i] = coopMultiplyAdd(left, right, acc[i]);
        }
      }
      if (current + 1u < SLABS) {
        workgroupBarrier();
      }
    }
    for (var i = 0u; i < PRODUCT_ROUNDS; i++) {  // unrolled
      let sum = min(i * SUBGROUPS + subgroup, SUMS - 1u);
      coopStoreT(acc[i], &products[sum * TILE / 4u], EDGE / 4u);
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
      var x = vec4<f32>();
      for (var share = 0u; share < SHARES; share++) {  // unrolled
        x += products[((tile * SHARES + share) * TILE + row % EDGE * EDGE + column % EDGE) / 4u];
      }
      let at = select(TRIANGLE + (t * N + row % N) * R, MASKED + t * R, is_query) + to;
      let y = x * select(triangle_power, masked_power, is_query);
      if (each == 4u) {
        floats[floats_at + at / 4u] = y;
      } else {
        floats[floats_at + at / 4u][at % 4u] = y[column % 4u];
      }
    }
  }
}
