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
// A thread owns a token and four channels of a slab. Half of the threads at a time scale theirs for all levels and put
// them into workgroup memory (the others write the rows that later passes need meanwhile), then all multiply: each has
// 2 x 2 tokens. (Arrays stay in registers if all indices are known when the shader is compiled, and compilers do not
// unroll loops as long as these: what is not a loop over channels is spelled out.)
//
// With many sub-steps a token, a workgroup has at most 3 of the rows (reads, then the query) and 2 of the columns.

@group(0) @binding(12) var<storage, read_write> scratch: array<vec4<f32>>;

const THREADS = 128u;
const OWNERS = 64u;                    // threads whose channels pass through workgroup memory together
const TURNS = THREADS / OWNERS;
override QUADS: u32 = OWNERS / C;      // vec4s of channels that do
override SLAB: u32 = 4u * TURNS * QUADS;  // channels of a slab
override LEVELS: u32 = 4u;             // 1 .. LEVELS: 2^(LEVELS + 1) = C
override RV: u32 = 3u;                 // rows of a token
override CV: u32 = 2u;                 // columns of a token
override ROW_GROUPS: u32 = 1u;
override COLUMN_GROUPS: u32 = 1u;

// Scaled tokens of a level: [C/2 pairs that differ in its bit][RV rows, CV columns][QUADS]. A vec4 is left out after
// every eight of a row or column, so that the tokens of neighbouring threads, which are two pairs apart, lie in
// different banks.
override PAIR_PITCH: u32 = (RV + CV) * QUADS;
override LEVEL_PITCH: u32 = C / 2u * PAIR_PITCH + C / 2u * QUADS / 8u;
// (At the end it holds the sums of a token with itself and its partner.)
override AREA: u32 = max(LEVELS * LEVEL_PITCH, RV * CV * THREADS / 2u);
var<workgroup> area: array<vec4<f32>, AREA>;

// alpha of a slab, by thread; and products of alpha over four tokens.
var<workgroup> decays: array<vec4<f32>, THREADS>;
var<workgroup> fours: array<vec4<f32>, 32>;

override NORM_TOKENS: u32 = C;
override GATE_COUNT: u32 = CV * C;
var<workgroup> gate_of: array<f32, GATE_COUNT>;  // [CV][C]

// 2 x 2 tokens: pairs of tokens i > j of C/2. At most 4 a thread.
override TILE_COUNT: u32 = C / 2u * (C / 2u - 1u) / 2u;
override TILES: u32 = (TILE_COUNT + THREADS - 1u) / THREADS;

// What this thread owns. Tokens that are not there are read from where something is, then dropped, which keeps the
// loads together.
var<private> own_thread: u32;
var<private> own_token: u32;
var<private> own_quad: u32;
var<private> channel: u32;
var<private> first_token: u32;
var<private> tokens: u32;
var<private> value_head: u32;

// Row `step` of this thread's token: the read of a sub-step, after the last one the query.
fn own_row(step: u32) -> vec4<f32> {
  let tok = min(own_token, tokens - 1u);
  var x = vec4<f32>();
  if (step == substeps()) {
    x = params.scale * query_four_at(first_token + tok, tok, value_head, channel);
  } else if (step < substeps()) {
    x = read_four_at(first_token + tok, tok, step, value_head, channel);
  }
  return select(vec4<f32>(), x, own_token < tokens);
}

// Column `step` of token t.
fn column_at(t: u32, step: u32) -> vec4<f32> {
  let tok = min(t, tokens - 1u);
  var x = vec4<f32>();
  if (step < substeps()) {
    x = write_four_at(first_token + tok, tok, step, value_head, channel);
  }
  return select(vec4<f32>(), x, t < tokens);
}

fn own_decay() -> vec4<f32> {
  let x = alpha_four_at(first_token + min(own_token, tokens - 1u), value_head, channel);
  return select(vec4<f32>(1.0), x, own_token < tokens);
}

// Products of alpha within a span of 2^level tokens: over those before this thread's token, and over those after it.
struct Span {
  before: vec4<f32>,
  after: vec4<f32>,
}

// The product of alpha over the neighbouring span of the same length, 2^level.
fn neighbour(level: u32) -> vec4<f32> {
  if (level == 0u) {
    return decays[own_thread ^ QUADS];
  }
  if (level == 1u) {
    return decays[own_thread ^ (2u * QUADS)] * decays[own_thread ^ (3u * QUADS)];
  }
  let spans = 1u << (level - 2u);
  let first = four_of(own_thread) ^ (spans * QUADS);
  var x = fours[first];
  for (var i = 1u; i < spans; i++) {
    x *= fours[first ^ (i * QUADS)];
  }
  return x;
}

// Where a thread's product over four tokens lies.
fn four_of(lid: u32) -> u32 {
  return lid / (4u * QUADS) * QUADS + lid % QUADS;
}

// The span of 2^(level + 1) tokens.
fn widened(span: Span, level: u32) -> Span {
  let x = neighbour(level);
  let upper = ((own_token >> level) & 1u) == 1u;
  return Span(span.before * select(vec4<f32>(1.0), x, upper), span.after * select(x, vec4<f32>(1.0), upper));
}

fn level_at(level: u32, pair: u32) -> u32 {
  return (level - 1u) * LEVEL_PITCH + pair * PAIR_PITCH + pair * QUADS / 8u;
}

// Number of a token among the pairs of a level: its number without that bit.
fn pair_of(level: u32, t: u32) -> u32 {
  return ((t >> (level + 1u)) << level) | (t & ((1u << level) - 1u));
}

// One element of L (row t n + step) or, below it, of A (row R + t).
fn put(base: u32, row: u32, column: u32, x: f32) {
  scratch[base + INVERSE / 4u + column / 4u * ROWS + row][column % 4u] = x;
}

// Where row `step` of token t lies below each other, in L and A as in B and Q.
fn row_number(t: u32, step: u32) -> u32 {
  return select(t * substeps() + step, R + t, step == substeps());
}

// This thread's part of a row, decayed from the start of the chunk, in B and Q.
fn put_row(base: u32, step: u32, x: vec4<f32>) {
  if (step > substeps()) {
    return;
  }
  let start = channel / FB * FB;
  let width = min(FB, KP - start) / 4u;
  scratch[base + (PRODUCT + start * ROWS) / 4u + row_number(own_token, step) * width + (channel - start) / 4u] = x;
}

// The same of a column, decayed to the end of the chunk.
fn put_write(base: u32, column: u32, x: vec4<f32>) {
  let at = own_token * substeps() + column;
  let to = base + WRITES / 4u + channel + at / 4u * KP;
  scratch[to][at % 4u] = x.x;
  scratch[to + 1u][at % 4u] = x.y;
  scratch[to + 2u][at % 4u] = x.z;
  scratch[to + 3u][at % 4u] = x.w;
}

// This thread's rows or columns as they are at a level, where its token is of the upper or lower half of a span.
fn put_level(level: u32, span: Span, first_row: u32, alpha: vec4<f32>, r: array<vec4<f32>, 3>, c: array<vec4<f32>, 2>) {
  let is_row = ((own_token >> level) & 1u) == 1u;
  let at = level_at(level, pair_of(level, own_token)) + select(RV * QUADS, 0u, is_row) + own_quad % QUADS;
  let f = select(span.after, span.before * alpha, is_row);
  let undecayed = UNDECAYED && is_row && first_row == 0u;
  area[at] = select(c[0], r[0], is_row) * select(f, span.before, undecayed);
  if (CV == 2u || is_row) {
    area[at + QUADS] = select(c[1], r[1], is_row) * f;
  }
  if (RV == 3u && is_row) {
    area[at + 2u * QUADS] = r[2] * f;
  }
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
  let first_column = item % COLUMN_GROUPS * CV;

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

  own_thread = lid;
  own_token = lid / QUADS % C;
  own_quad = lid / OWNERS * QUADS + lid % QUADS;
  first_token = first;
  tokens = count;
  value_head = h;
  let partner = own_token ^ 1u;
  let is_odd = own_token % 2u == 1u;

  for (var slab = 0u; slab < KP; slab += SLAB) {
    channel = slab + own_quad * 4u;
    var r: array<vec4<f32>, 3>;
    var c: array<vec4<f32>, 2>;
    var c_partner: array<vec4<f32>, 2>;
    let alpha = own_decay();
    r[0] = own_row(first_row);
    r[1] = own_row(first_row + 1u);
    if (RV == 3u) {
      r[2] = own_row(first_row + 2u);
    }
    c[0] = column_at(own_token, first_column);
    c_partner[0] = column_at(partner, first_column);
    if (CV == 2u) {
      c[1] = column_at(own_token, first_column + 1u);
      c_partner[1] = column_at(partner, first_column + 1u);
    }

    // (What was in `decays` and `fours` has been read before the last barrier.)
    decays[lid] = alpha;
    workgroupBarrier();
    if (own_token % 4u == 0u) {
      fours[four_of(lid)] = alpha * neighbour(0u) * neighbour(1u);
    }
    // Level 0 (of an odd token) and t = s.
    for (var i = 0u; i < 3u; i++) {  // unrolled
      if (i < RV) {
        let undecayed = UNDECAYED && first_row + i == 0u;
        let row = r[i] * select(alpha, vec4<f32>(1.0), undecayed);
        same[i * CV] += dot(r[i], c[0]);
        near[i * CV] += dot(row, c_partner[0]);
        if (CV == 2u) {
          same[i * CV + CV - 1u] += dot(r[i], c[1]);
          near[i * CV + CV - 1u] += dot(row, c_partner[1]);
        }
      }
    }
    workgroupBarrier();

    for (var turn = 0u; turn < TURNS; turn++) {
      if (lid / OWNERS == turn) {
        // Levels from 1 up.
        var span = widened(Span(vec4<f32>(1.0), vec4<f32>(1.0)), 0u);
        put_level(1u, span, first_row, alpha, r, c);
        span = widened(span, 1u);
        put_level(2u, span, first_row, alpha, r, c);
        span = widened(span, 2u);
        put_level(3u, span, first_row, alpha, r, c);
        if (LEVELS >= 4u) {
          span = widened(span, 3u);
          put_level(4u, span, first_row, alpha, r, c);
        }
        if (LEVELS >= 5u) {
          span = widened(span, 4u);
          put_level(5u, span, first_row, alpha, r, c);
        }
      } else if ((lid / OWNERS + 1u) % TURNS == turn && channel < KP) {
        // The rows that the later passes need. First what comes before and after this token and its partner.
        var span = widened(Span(vec4<f32>(1.0), vec4<f32>(1.0)), 1u);
        span = widened(span, 2u);
        span = widened(span, 3u);
        if (LEVELS >= 4u) {
          span = widened(span, 4u);
        }
        if (LEVELS >= 5u) {
          span = widened(span, 5u);
        }
        let own = widened(span, 0u);
        let upto = own.before * alpha;
        if (first_row == 0u && first_column == 0u && own_token == 0u) {
          scratch[base + (WHOLE_DECAY + channel) / 4u] = upto * own.after;
        }
        if (first_column == 0u) {
          put_row(base, first_row, r[0] * select(upto, own.before, UNDECAYED && first_row == 0u));
          put_row(base, first_row + 1u, r[1] * upto);
          if (RV == 3u) {
            put_row(base, first_row + 2u, r[2] * upto);
          }
        }
        if (first_row == 0u) {
          let w0 = c[0] * own.after * gate_of[own_token];
          if (n == 2u && CV == 2u) {
            // Four sub-steps are those of this token and its partner; each of the two has every second channel.
            let after = span.after * select(vec4<f32>(1.0), alpha, is_odd);
            let w1 = c[1] * own.after * gate_of[C + own_token];
            let v0 = c_partner[0] * after * gate_of[partner];
            let v1 = c_partner[1] * after * gate_of[C + partner];
            let t0 = select(w0, v0, is_odd);
            let t1 = select(w1, v1, is_odd);
            let u0 = select(v0, w0, is_odd);
            let u1 = select(v1, w1, is_odd);
            let to = base + WRITES / 4u + channel + own_token / 2u * KP + own_token % 2u;
            scratch[to] = select(vec4<f32>(t0.x, t1.x, u0.x, u1.x), vec4<f32>(t0.y, t1.y, u0.y, u1.y), is_odd);
            scratch[to + 2u] = select(vec4<f32>(t0.z, t1.z, u0.z, u1.z), vec4<f32>(t0.w, t1.w, u0.w, u1.w), is_odd);
          } else {
            put_write(base, first_column, w0);
            if (CV == 2u && first_column + 1u < n) {
              put_write(base, first_column + 1u, c[1] * own.after * gate_of[(CV - 1u) * C + own_token]);
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
      if (turn + 1u < TURNS) {
        workgroupBarrier();
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
          if (n == 2u && CV == 2u) {
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
    for (var quad = 0u; quad < TURNS * QUADS; quad++) {
      let sum_at = number * THREADS + quad / QUADS * OWNERS + t * QUADS + quad % QUADS;
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
