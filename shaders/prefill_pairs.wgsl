// Prefill, pass 1 of 4, parallel over chunks and heads: the decayed rows of each chunk, and how each sub-step
// sees the ones before it,
//
//   L[r,s] = sum_d b_r[d] a_s[d] D[t(r), t(s)][d]           s < r, else not written
//   A[t,r] = scale sum_d q_t[d] a_r[d] D[t, t(r)][d]        t(r) <= t, else not written
//
// with D[t,s] the product of alpha over s+1 .. t. Decay factors are running products of alpha, never exp of a
// difference: each is at most 1, -inf (alpha = 0) needs no special case, and nothing cancels.
//
// Two tokens t > s differ first, from the top, in bit `level`; with m the multiple of 2^level between them,
// D = (product over m .. t) (product over s+1 .. m-1), a factor of t and a factor of s. So at each level a token
// is either a row or a column, and with its factor on it, it serves all its partners: L and A are products of
// such rows and columns, added over channels. Level 0 and t = s go apart, since they need no scaling.
//
// A thread first owns a channel of SLAB and the eight tokens of a run, with everything it needs of them in
// registers, four tokens a vec4; SUB channels at a time then pass through workgroup memory to threads that each own
// 2 x 2 tokens. (Arrays stay in registers if all indices are known when the shader is compiled, and compilers do not
// unroll loops as long as these: what is not a loop over channels or levels is spelled out.)
//
// With many sub-steps a token, a workgroup has at most 3 of the rows (reads, then the query) and 2 of the columns.

@group(0) @binding(12) var<storage, read_write> scratch: array<vec4<f32>>;

const THREADS = 128u;
const RUN = 8u;
override RUNS: u32 = C / RUN;
override SLAB: u32 = THREADS / RUNS;
override LEVELS: u32 = 4u;             // 1 .. LEVELS: 2^(LEVELS + 1) = C
override SUB: u32 = 8u;
override QUADS: u32 = SUB / 4u;
override RV: u32 = 3u;                 // rows of a token
override CV: u32 = 2u;                 // columns of a token
override ROW_GROUPS: u32 = 1u;
override COLUMN_GROUPS: u32 = 1u;

// Scaled tokens of a level: [C/2 pairs that differ in its bit][RV rows, CV columns][QUADS], some vec4 further on
// after every four pairs to spread the banks.
override PAIR_PITCH: u32 = (RV + CV) * QUADS;
override LEVEL_PITCH: u32 = C / 2u * PAIR_PITCH + C / 8u * QUADS;
// Unscaled tokens: [RV rows, CV columns, alpha][DIAGONAL_QUADS][C].
override DIAGONAL_QUADS: u32 = 4u;
override DIAGONAL_PITCH: u32 = C + RUNS;
override AREA: u32 = 864u;
var<workgroup> area: array<vec4<f32>, AREA>;

override NORM_TOKENS: u32 = C;
// After the norms, `partial` holds each run's decay, [RUNS][SLAB].
override GATE_COUNT: u32 = CV * C;
var<workgroup> gate_of: array<f32, GATE_COUNT>;  // [CV][C]

// 2 x 2 tokens: pairs of tokens i > j of C/2. At most 4 a thread.
override TILE_COUNT: u32 = C / 2u * (C / 2u - 1u) / 2u;
override TILES: u32 = (TILE_COUNT + THREADS - 1u) / THREADS;

// Where this thread looks: tokens and channels that are not there are read from where something is, then
// dropped, which keeps the loads together.
var<private> first_token: u32;
var<private> tokens: u32;
var<private> value_head: u32;
var<private> channel: u32;

// Row `step` of token t: the read of a sub-step, after the last one the query.
fn row_at(t: u32, step: u32) -> f32 {
  let tok = min(t, tokens - 1u);
  let d = min(channel, K - 1u);
  var x = 0.0;
  if (step == substeps()) {
    x = params.scale * query_at(first_token + tok, tok, value_head, d);
  } else if (step < substeps()) {
    x = read_at(first_token + tok, tok, step, value_head, d);
  }
  return select(0.0, x, t < tokens && channel < K);
}

fn column_at(t: u32, step: u32) -> f32 {
  let tok = min(t, tokens - 1u);
  var x = 0.0;
  if (step < substeps()) {
    x = write_at(first_token + tok, tok, step, value_head, min(channel, K - 1u));
  }
  return select(0.0, x, t < tokens && channel < K);
}

fn decay_at(t: u32) -> f32 {
  let x = alpha_at(first_token + min(t, tokens - 1u), value_head, min(channel, K - 1u));
  return select(1.0, x, t < tokens && channel < K);
}

// The same for tokens t .. t + 3. (Loops, so that compilers that copy every call in full have a quarter of the text.)
fn rows_at(t: u32, step: u32) -> vec4<f32> {
  var x: vec4<f32>;
  for (var i = 0u; i < 4u; i++) {  // unrolled
    x[i] = row_at(t + i, step);
  }
  return x;
}
fn columns_at(t: u32, step: u32) -> vec4<f32> {
  var x: vec4<f32>;
  for (var i = 0u; i < 4u; i++) {  // unrolled
    x[i] = column_at(t + i, step);
  }
  return x;
}
fn decays_at(t: u32) -> vec4<f32> {
  var x: vec4<f32>;
  for (var i = 0u; i < 4u; i++) {  // unrolled
    x[i] = decay_at(t + i);
  }
  return x;
}
fn gates_at(t: u32, column: u32) -> vec4<f32> {
  let at = column * C + t;
  return vec4<f32>(gate_of[at], gate_of[at + 1u], gate_of[at + 2u], gate_of[at + 3u]);
}

// Products of a up to and with each, and of what comes after each.
fn prefix(a: vec4<f32>) -> vec4<f32> {
  let xy = a.x * a.y;
  let xyz = xy * a.z;
  return vec4<f32>(a.x, xy, xyz, xyz * a.w);
}
fn suffix(a: vec4<f32>) -> vec4<f32> {
  let zw = a.z * a.w;
  return vec4<f32>(a.y * zw, zw, a.w, 1.0);
}

fn level_at(level: u32, pair: u32) -> u32 {
  return (level - 1u) * LEVEL_PITCH + pair * PAIR_PITCH + pair / 4u * QUADS;
}

// Number of a token among the pairs of a level: its number without that bit.
fn pair_of(level: u32, t: u32) -> u32 {
  return ((t >> (level + 1u)) << level) | (t & ((1u << level) - 1u));
}

fn diagonal_at(slot: u32, quad: u32, t: u32) -> u32 {
  return (slot * DIAGONAL_QUADS + quad) * DIAGONAL_PITCH + t + t / RUN;
}

// One element of L (row t n + step) or, below it, of A (row R + t).
fn put(base: u32, row: u32, column: u32, x: f32) {
  scratch[base + INVERSE / 4u + column / 4u * ROWS + row][column % 4u] = x;
}

// Where row `step` of token t lies below each other, in L and A as in B and Q.
fn row_number(t: u32, step: u32) -> u32 {
  return select(t * substeps() + step, R + t, step == substeps());
}

// Tokens t .. t + 3 of a row, decayed from the start of the chunk, in B and Q.
fn put_rows(base: u32, t: u32, step: u32, x: vec4<f32>) {
  if (step > substeps()) {
    return;
  }
  let start = channel / FB * FB;
  let width = min(FB, KP - start) / 4u;
  let down = select(substeps(), 1u, step == substeps()) * width;
  let at = base + (PRODUCT + start * ROWS) / 4u + row_number(t, step) * width + (channel - start) / 4u;
  scratch[at][channel % 4u] = x.x;
  scratch[at + down][channel % 4u] = x.y;
  scratch[at + 2u * down][channel % 4u] = x.z;
  scratch[at + 3u * down][channel % 4u] = x.w;
}

// The same of a column, decayed to the end of the chunk; `to` is the channel's place in the writes.
fn put_writes(to: u32, t: u32, column: u32, x: vec4<f32>) {
  for (var i = 0u; i < 4u; i++) {
    let at = (t + i) * substeps() + column;
    scratch[to + at / 4u * KP][at % 4u] = x[i];
  }
}

// Four tokens side by side at a level, or eight on the diagonal, in the channel of quad_of and part_of.
var<private> quad_of: u32;
var<private> part_of: u32;
fn put_level(at: u32, slot: u32, x: vec4<f32>) {
  let to = at + slot * QUADS + quad_of;
  area[to][part_of] = x.x;
  area[to + PAIR_PITCH][part_of] = x.y;
  area[to + 2u * PAIR_PITCH][part_of] = x.z;
  area[to + 3u * PAIR_PITCH][part_of] = x.w;
}
fn put_diagonal(slot: u32, t: u32, a: vec4<f32>, b: vec4<f32>) {
  let to = diagonal_at(slot, quad_of, t);
  area[to][part_of] = a.x;
  area[to + 1u][part_of] = a.y;
  area[to + 2u][part_of] = a.z;
  area[to + 3u][part_of] = a.w;
  area[to + 4u][part_of] = b.x;
  area[to + 5u][part_of] = b.y;
  area[to + 6u][part_of] = b.z;
  area[to + 7u][part_of] = b.w;
}

// Four channels of a row with those of a column of two tokens.
fn with_columns(x: vec2<f32>, a: vec4<f32>, b: vec4<f32>, b_next: vec4<f32>) -> vec2<f32> {
  let y = fma(vec2<f32>(a.x), vec2<f32>(b.x, b_next.x), x);
  let z = fma(vec2<f32>(a.y), vec2<f32>(b.y, b_next.y), y);
  let w = fma(vec2<f32>(a.z), vec2<f32>(b.z, b_next.z), z);
  return fma(vec2<f32>(a.w), vec2<f32>(b.w, b_next.w), w);
}

// Four channels of tile u: rows and columns of two tokens each.
fn add_tile(u: u32, row: u32, column: u32, sums: ptr<function, array<vec2<f32>, 48>>) {
  let b0 = area[column];
  let b1 = area[column + PAIR_PITCH];
  var c0 = b0;
  var c1 = b1;
  if (CV == 2u) {
    c0 = area[column + QUADS];
    c1 = area[column + PAIR_PITCH + QUADS];
  }
  add_row(u, 0u, row, b0, b1, c0, c1, sums);
  add_row(u, 1u, row, b0, b1, c0, c1, sums);
  add_row(u, 2u, row, b0, b1, c0, c1, sums);
  add_row(u, 3u, row, b0, b1, c0, c1, sums);
  add_row(u, 4u, row, b0, b1, c0, c1, sums);
  add_row(u, 5u, row, b0, b1, c0, c1, sums);
}

fn add_row(
  u: u32,
  i: u32,
  first: u32,
  b0: vec4<f32>,
  b1: vec4<f32>,
  c0: vec4<f32>,
  c1: vec4<f32>,
  sums: ptr<function, array<vec2<f32>, 48>>,
) {
  if (i < 2u * RV) {
    let row = area[first + i / RV * PAIR_PITCH + i % RV * QUADS];
    let at = (u * 2u * RV + i) * CV % 48u;
    (*sums)[at] = with_columns((*sums)[at], row, b0, b1);
    if (CV == 2u) {
      (*sums)[at + 1u] = with_columns((*sums)[at + 1u], row, c0, c1);
    }
  }
}

@compute @workgroup_size(128)
fn main(
  @builtin(workgroup_id) group: vec3<u32>,
  @builtin(num_workgroups) groups: vec3<u32>,
  @builtin(local_invocation_index) lid: u32,
) {
  let item = group_index(group, groups);
  if (item >= params.chunk_count * params.head_count * ROW_GROUPS * COLUMN_GROUPS) {
    return;
  }
  let chunk_head = item / (ROW_GROUPS * COLUMN_GROUPS);
  let chunk = chunk_head / params.head_count;
  let head = chunk_head % params.head_count;
  let h = params.first_head + head;
  let first = table[chunk].x;
  let count = table[chunk].y;
  let base = scratch_base(chunk, head);
  let n = substeps();
  // First row and first column of each token that are this workgroup's.
  let first_row = item / COLUMN_GROUPS % ROW_GROUPS * 3u;
  let first_column = item % COLUMN_GROUPS * 2u;

  if (NORMALIZE) {
    compute_norms(first, count, h, lid);
  }
  for (var i = lid; i < CV * C; i += THREADS) {
    let step = first_column + i / C;
    var x = 0.0;
    if (i % C < count && step < n) {
      x = gate_at(first + i % C, step, h);
    }
    gate_of[i] = x;
  }

  // This thread's tiles: level, and where their first row and first column lie. The highest level comes first.
  var row_at_level: array<u32, 4>;
  var column_at_level: array<u32, 4>;
  var row_pair: array<u32, 4>;
  var column_pair: array<u32, 4>;
  for (var u = 0u; u < TILES; u++) {
    var tile = min(lid + u * THREADS, TILE_COUNT - 1u);
    // A level has `blocks` squares of `size` by `size` tiles.
    var size = C / 4u;
    var blocks = 1u;
    var level = LEVELS;
    while (tile >= blocks * size * size) {
      tile -= blocks * size * size;
      size /= 2u;
      blocks *= 2u;
      level -= 1u;
    }
    let block = tile / (size * size);
    let i = tile / size % size;
    let j = tile % size;
    row_pair[u] = (2u * block + 1u) * size + i;
    column_pair[u] = 2u * block * size + j;
    row_at_level[u] = level_at(level, 2u * (block * size + i));
    column_at_level[u] = level_at(level, 2u * (block * size + j)) + RV * QUADS;
  }

  // Sums of the tiles: [tile][2 tokens, RV rows][CV columns], over two column tokens.
  var sums = array<vec2<f32>, 48>();
  // Sums for a token with itself, and with the one before it.
  var same = array<f32, 6>();
  var near = array<f32, 6>();
  let own_token = lid % C;
  let own_quad = lid / C;

  // As the owner of a channel and a run.
  let own_channel = lid % SUB + lid / (SUB * RUNS) * SUB;
  let run = lid / SUB % RUNS;
  let t0 = run * RUN;
  let t4 = t0 + 4u;
  first_token = first;
  tokens = count;
  value_head = h;

  for (var slab = 0u; slab < KP; slab += SLAB) {
    channel = slab + own_channel;
    // Rows, columns and decay of tokens t0 .. t0 + 3 and t4 .. t4 + 3.
    var r: array<vec4<f32>, 6>;
    var c: array<vec4<f32>, 4>;
    r[0] = rows_at(t0, first_row);
    r[1] = rows_at(t4, first_row);
    r[2] = rows_at(t0, first_row + 1u);
    r[3] = rows_at(t4, first_row + 1u);
    if (RV == 3u) {
      r[4] = rows_at(t0, first_row + 2u);
      r[5] = rows_at(t4, first_row + 2u);
    }
    c[0] = columns_at(t0, first_column);
    c[1] = columns_at(t4, first_column);
    if (CV == 2u) {
      c[2] = columns_at(t0, first_column + 1u);
      c[3] = columns_at(t4, first_column + 1u);
    }
    let a = decays_at(t0);
    let b = decays_at(t4);
    // Decay up to and with each token, up to it, and after it, in the run.
    let upto_a = prefix(a);
    let upto_b = prefix(b) * upto_a.w;
    let till_a = vec4<f32>(1.0, upto_a.xyz);
    let till_b = vec4<f32>(upto_a.w, upto_b.xyz);
    let after_b = suffix(b);
    let after_a = suffix(a) * (after_b.x * b.x);

    workgroupBarrier();
    partial[run * SLAB + own_channel] = upto_b.w;
    workgroupBarrier();
    var before = 1.0;
    var behind = 1.0;
    for (var i = 0u; i < RUNS; i++) {
      let x = partial[i * SLAB + own_channel];
      before *= select(1.0, x, i < run);
      behind *= select(1.0, x, i > run);
    }

    // The rows that the later passes need.
    if (channel < KP) {
      if (first_row == 0u && first_column == 0u && run == 0u) {
        scratch[base + (WHOLE_DECAY + channel) / 4u][channel % 4u] = upto_b.w * behind;
      }
      if (first_column == 0u) {
        let undecayed = UNDECAYED && first_row == 0u;
        put_rows(base, t0, first_row, r[0] * select(upto_a, till_a, undecayed) * before);
        put_rows(base, t4, first_row, r[1] * select(upto_b, till_b, undecayed) * before);
        put_rows(base, t0, first_row + 1u, r[2] * upto_a * before);
        put_rows(base, t4, first_row + 1u, r[3] * upto_b * before);
        if (RV == 3u) {
          put_rows(base, t0, first_row + 2u, r[4] * upto_a * before);
          put_rows(base, t4, first_row + 2u, r[5] * upto_b * before);
        }
      }
      if (first_row == 0u) {
        let w0 = c[0] * after_a * behind * gates_at(t0, 0u);
        let w1 = c[1] * after_b * behind * gates_at(t4, 0u);
        var w2 = vec4<f32>();
        var w3 = vec4<f32>();
        if (CV == 2u) {
          w2 = c[2] * after_a * behind * gates_at(t0, CV - 1u);
          w3 = c[3] * after_b * behind * gates_at(t4, CV - 1u);
        }
        let to = base + WRITES / 4u + channel;
        if (n == 1u) {
          scratch[to + t0 / 4u * KP] = w0;
          scratch[to + t4 / 4u * KP] = w1;
        } else if (n == 2u) {
          scratch[to + t0 / 2u * KP] = vec4<f32>(w0.x, w2.x, w0.y, w2.y);
          scratch[to + (t0 / 2u + 1u) * KP] = vec4<f32>(w0.z, w2.z, w0.w, w2.w);
          scratch[to + t4 / 2u * KP] = vec4<f32>(w1.x, w3.x, w1.y, w3.y);
          scratch[to + (t4 / 2u + 1u) * KP] = vec4<f32>(w1.z, w3.z, w1.w, w3.w);
        } else {
          put_writes(to, t0, first_column, w0);
          put_writes(to, t4, first_column, w1);
          if (first_column + 1u < n) {
            put_writes(to, t0, first_column + 1u, w2);
            put_writes(to, t4, first_column + 1u, w3);
          }
        }
      }
    }

    // Levels from 1 up, SUB channels at a time: scaled by their owners, then multiplied.
    for (var sub = 0u; sub < min(SLAB, KP - slab); sub += SUB) {
      workgroupBarrier();
      if (own_channel / SUB * SUB == sub) {
        quad_of = own_channel / 4u % QUADS;
        part_of = own_channel % 4u;
        let u = UNDECAYED && first_row == 0u;
        // Level 1: tokens 0, 1 | 2, 3 and 4, 5 | 6, 7 of the run.
        let pair = run * 4u;
        let up_1 = vec4<f32>(a.z, a.z * a.w, b.z, b.z * b.w);
        let till_1 = vec4<f32>(1.0, a.z, 1.0, b.z);
        let down_1 = vec4<f32>(a.y, 1.0, b.y, 1.0);
        let at_1 = level_at(1u, pair);
        put_level(at_1, 0u, vec4<f32>(r[0].zw, r[1].zw) * select(up_1, till_1, u));
        put_level(at_1, 1u, vec4<f32>(r[2].zw, r[3].zw) * up_1);
        if (RV == 3u) {
          put_level(at_1, 2u, vec4<f32>(r[4].zw, r[5].zw) * up_1);
        }
        put_level(at_1, RV, vec4<f32>(c[0].xy, c[1].xy) * down_1);
        if (CV == 2u) {
          put_level(at_1, RV + 1u, vec4<f32>(c[2].xy, c[3].xy) * down_1);
        }
        // Level 2: its two halves.
        let up_2 = prefix(b);
        let till_2 = vec4<f32>(1.0, up_2.xyz);
        let down_2 = suffix(a);
        let at_2 = level_at(2u, pair);
        put_level(at_2, 0u, r[1] * select(up_2, till_2, u));
        put_level(at_2, 1u, r[3] * up_2);
        if (RV == 3u) {
          put_level(at_2, 2u, r[5] * up_2);
        }
        put_level(at_2, RV, c[0] * down_2);
        if (CV == 2u) {
          put_level(at_2, RV + 1u, c[2] * down_2);
        }
        // Higher levels: the run as a whole is rows or columns, with the decay of the runs between.
        for (var level = 3u; level <= LEVELS; level++) {
          let runs = 1u << (level - 3u);
          let is_row = (run & runs) != 0u;
          let start = run / runs * runs;
          var f = 1.0;
          for (var i = start; i < start + runs; i++) {
            f *= select(1.0, partial[i * SLAB + own_channel], select(i > run, i < run, is_row));
          }
          let at = level_at(level, pair_of(level, t0));
          let at_next = level_at(level, pair_of(level, t4));
          if (is_row) {
            put_level(at, 0u, r[0] * select(upto_a, till_a, u) * f);
            put_level(at_next, 0u, r[1] * select(upto_b, till_b, u) * f);
            put_level(at, 1u, r[2] * upto_a * f);
            put_level(at_next, 1u, r[3] * upto_b * f);
            if (RV == 3u) {
              put_level(at, 2u, r[4] * upto_a * f);
              put_level(at_next, 2u, r[5] * upto_b * f);
            }
          } else {
            put_level(at, RV, c[0] * after_a * f);
            put_level(at_next, RV, c[1] * after_b * f);
            if (CV == 2u) {
              put_level(at, RV + 1u, c[2] * after_a * f);
              put_level(at_next, RV + 1u, c[3] * after_b * f);
            }
          }
        }
      }
      workgroupBarrier();
      for (var quad = 0u; quad < QUADS; quad++) {
        add_tile(0u, row_at_level[0] + quad, column_at_level[0] + quad, &sums);
        if (TILES > 1u) {
          add_tile(1u, row_at_level[1] + quad, column_at_level[1] + quad, &sums);
        }
        if (TILES > 2u) {
          add_tile(2u, row_at_level[2] + quad, column_at_level[2] + quad, &sums);
        }
        if (TILES > 3u) {
          add_tile(3u, row_at_level[3] + quad, column_at_level[3] + quad, &sums);
        }
      }
    }

    // Level 0 and t = s.
    for (var sub = 0u; sub < min(SLAB, KP - slab); sub += DIAGONAL_QUADS * 4u) {
      workgroupBarrier();
      if (own_channel / (DIAGONAL_QUADS * 4u) * (DIAGONAL_QUADS * 4u) == sub) {
        quad_of = own_channel / 4u % DIAGONAL_QUADS;
        part_of = own_channel % 4u;
        put_diagonal(0u, t0, r[0], r[1]);
        put_diagonal(1u, t0, r[2], r[3]);
        if (RV == 3u) {
          put_diagonal(2u, t0, r[4], r[5]);
        }
        put_diagonal(RV, t0, c[0], c[1]);
        if (CV == 2u) {
          put_diagonal(RV + 1u, t0, c[2], c[3]);
        }
        put_diagonal(RV + CV, t0, a, b);
      }
      workgroupBarrier();
      if (own_quad < DIAGONAL_QUADS) {
        let t_before = max(own_token, 1u) - 1u;
        let decay = area[diagonal_at(RV + CV, own_quad, own_token)];
        for (var j = 0u; j < CV; j++) {
          let x = area[diagonal_at(RV + j, own_quad, own_token)];
          let x_before = area[diagonal_at(RV + j, own_quad, t_before)];
          for (var i = 0u; i < RV; i++) {
            let row = area[diagonal_at(i, own_quad, own_token)];
            same[i * CV + j] += dot(row, x);
            near[i * CV + j] += dot(select(row * decay, row, UNDECAYED && first_row + i == 0u), x_before);
          }
        }
      }
    }
  }

  // Out with the sums; the gate of a write multiplies its column.
  for (var u = 0u; u < TILES; u++) {
    if (lid + u * THREADS < TILE_COUNT) {
      let s = column_pair[u] * 2u;
      for (var i = 0u; i < 2u * RV; i++) {
        let step = first_row + i % RV;
        let row = row_number(row_pair[u] * 2u + i / RV, step);
        let sum_at = (u * 2u * RV + i) * CV;
        if (step <= n) {
          if (n == 2u) {
            let x = vec4<f32>(sums[sum_at].x, sums[sum_at + CV - 1u].x, sums[sum_at].y, sums[sum_at + CV - 1u].y);
            let g = vec4<f32>(gate_of[s], gate_of[(CV - 1u) * C + s], gate_of[s + 1u], gate_of[(CV - 1u) * C + s + 1u]);
            scratch[base + INVERSE / 4u + column_pair[u] * ROWS + row] = x * g;
          } else {
            for (var j = 0u; j < CV; j++) {
              if (first_column + j < n) {
                let x = sums[sum_at + j];
                put(base, row, s * n + first_column + j, x.x * gate_of[j * C + s]);
                put(base, row, (s + 1u) * n + first_column + j, x.y * gate_of[j * C + s + 1u]);
              }
            }
          }
        }
      }
    }
  }
  // Those of a token have to be added over the threads that had its channels.
  workgroupBarrier();
  for (var i = 0u; i < RV * CV; i++) {
    area[(i * THREADS + lid) / 4u][lid % 4u] = same[i];
    area[((RV * CV + i) * THREADS + lid) / 4u][lid % 4u] = near[i];
  }
  workgroupBarrier();
  for (var i = lid; i < 2u * RV * CV * C; i += THREADS) {
    let t = i % C;
    let number = i / C;
    let is_near = number >= RV * CV;
    let step = first_row + number / CV % RV;
    let column_step = first_column + number % CV;
    var x = 0.0;
    for (var quad = 0u; quad < DIAGONAL_QUADS; quad++) {
      let sum_at = number * THREADS + quad * C + t;
      x += area[sum_at / 4u][sum_at % 4u];
    }
    // Level 0 is an odd token with the even one before it; at t = s a read sees the sub-steps before its own.
    let wanted = select(step == n || step > column_step, t % 2u == 1u, is_near);
    if (wanted && step <= n && column_step < n) {
      let s = t - select(0u, 1u, is_near);
      put(base, row_number(t, step), s * n + column_step, x * gate_of[number % CV * C + s]);
    }
  }
}
