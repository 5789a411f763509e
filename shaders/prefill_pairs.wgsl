// Prefill, pass 2 of 5, parallel over chunks, heads and 16x16 token blocks: how each sub-step sees the ones
// before it,
//
//   L[r,s] = sum_d b_r[d] a_s[d] D[t(r), t(s)][d]           s < r, else 0
//   A[t,r] = scale sum_d q_t[d] a_r[d] D[t, t(r)][d]        t(r) <= t, else 0
//
// with D[t,s] the product of alpha over s+1 .. t. Split at m, the start of t's block at the first power of
// two that parts t from s: D = (product over m .. t) (product over s+1 .. m-1), a factor of the row and a
// factor of the column, both at most 1 whatever the gate. Within a 16-token block there are four such levels;
// between blocks the split is at the row's block.

@group(0) @binding(12) var<storage, read_write> scratch: array<f32>;

const THREADS = 256u;
const BLOCK = 16u;
// Channels at a time, as 4 vec4; rows are 5 vec4 apart to spread the banks.
const SLAB = 16u;
const PITCH = 5u;
// Sub-steps at a time: 3 rows (reads and the query) by 2 columns (writes).
const ROWS = 3u;
const COLUMNS = 2u;

override BLOCKS: u32 = C / 16u;
override ALPHAS: u32 = C * 16u;

var<workgroup> alpha: array<f32, ALPHAS>;           // [C][SLAB]
var<workgroup> rows: array<vec4<f32>, 240>;         // [ROWS][BLOCK][PITCH]
var<workgroup> columns: array<vec4<f32>, 160>;      // [COLUMNS][BLOCK][PITCH]
// [level][token][PITCH]: in the diagonal block, for tokens with that bit set the row factor, else the column
// factor; between blocks, level 0 holds row factors and level 1 column factors.
var<workgroup> factors: array<vec4<f32>, 320>;

fn inverse_norm(number: u32, t: u32) -> f32 {
  return scratch[norms_base + number * C + t];
}
var<private> norms_base: u32;

// Product of alpha over tokens from .. to (exclusive) in slab channel d.
fn span(from_token: u32, to_token: u32, d: u32) -> f32 {
  var p = 1.0;
  for (var t = from_token; t < to_token; t++) {
    p *= alpha[t * SLAB + d];
  }
  return p;
}

@compute @workgroup_size(256)
fn main(
  @builtin(workgroup_id) group: vec3<u32>,
  @builtin(num_workgroups) groups: vec3<u32>,
  @builtin(local_invocation_index) lid: u32,
) {
  let item = group_index(group, groups);
  let pairs = BLOCKS * BLOCKS;
  if (item >= params.chunk_count * params.head_count * pairs) {
    return;
  }
  let row_block = (item % pairs) / BLOCKS;
  let column_block = item % BLOCKS;
  let chunk = item / pairs / params.head_count;
  let head = item / pairs % params.head_count;
  let h = params.first_head + head;
  let first = table[chunk].x;
  let count = table[chunk].y;
  let base = scratch_base(chunk, head);
  norms_base = base + NORMS;
  let n = substeps();
  let upper = column_block > row_block;
  let diagonal = column_block == row_block;

  // This thread's pair of tokens, and where their factors lie.
  let ty = lid / BLOCK;
  let tx = lid % BLOCK;
  let t = row_block * BLOCK + ty;
  let s = column_block * BLOCK + tx;
  let same = t == s;
  var row_level = 0u;
  var column_level = 1u;
  var block_start = 0u;
  if (diagonal) {
    row_level = select(firstLeadingBit(ty ^ tx), 0u, same);
    column_level = row_level;
    block_start = (ty >> row_level) << row_level;
  }

  for (var row_group = 0u; row_group < n + 1u; row_group += ROWS) {
    for (var column_group = 0u; column_group < n; column_group += COLUMNS) {
      var sum_0 = vec3<f32>();
      var sum_1 = vec3<f32>();

      if (!upper) {
        for (var d0 = 0u; d0 < KP; d0 += SLAB) {
          workgroupBarrier();
          for (var i = lid; i < ALPHAS; i += THREADS) {
            let token = i / SLAB;
            let d = d0 + i % SLAB;
            var x = 1.0;
            if (token < count && d < K) {
              x = alpha_at(first + token, h, d);
            }
            alpha[i] = x;
          }
          for (var i = lid; i < ROWS * BLOCK * SLAB; i += THREADS) {
            let step = row_group + i / (BLOCK * SLAB);
            let tok = row_block * BLOCK + i / SLAB % BLOCK;
            let d = d0 + i % SLAB;
            var x = 0.0;
            if (tok < count && d < K && step <= n) {
              if (step == n) {
                x = params.scale * query_at(first + tok, tok, h, d);
              } else {
                x = read_at(first + tok, tok, step, h, d);
              }
            }
            rows[i / SLAB * PITCH + i % SLAB / 4u][i % 4u] = x;
          }
          for (var i = lid; i < COLUMNS * BLOCK * SLAB; i += THREADS) {
            let step = column_group + i / (BLOCK * SLAB);
            let tok = column_block * BLOCK + i / SLAB % BLOCK;
            let d = d0 + i % SLAB;
            var x = 0.0;
            if (tok < count && d < K && step < n) {
              x = gate_at(first + tok, step, h) * write_at(first + tok, tok, step, h, d);
            }
            columns[i / SLAB * PITCH + i % SLAB / 4u][i % 4u] = x;
          }
          workgroupBarrier();
          // One thread a token (ty) and channel (tx).
          let at = ty * PITCH + tx / 4u;
          if (diagonal) {
            let tok = row_block * BLOCK + ty;
            for (var level = 0u; level < 4u; level++) {
              let start = (tok >> level) << level;
              var f: f32;
              if (((ty >> level) & 1u) == 1u) {
                f = span(start, tok + 1u, tx);
              } else {
                f = span(tok + 1u, start + (1u << level), tx);
              }
              factors[level * BLOCK * PITCH + at][tx % 4u] = f;
            }
          } else {
            let start = row_block * BLOCK;
            factors[at][tx % 4u] = span(start, start + ty + 1u, tx);
            factors[BLOCK * PITCH + at][tx % 4u] = span(column_block * BLOCK + ty + 1u, start, tx);
          }
          workgroupBarrier();
          let row_factor = (row_level * BLOCK + ty) * PITCH;
          let column_factor = (column_level * BLOCK + tx) * PITCH;
          for (var i = 0u; i < SLAB / 4u; i++) {
            var column_decay = vec4<f32>(1.0);
            var decay = column_decay;
            if (!same) {
              column_decay = factors[column_factor + i];
              decay = factors[row_factor + i] * column_decay;
            }
            // A read before the decay sees one factor less: the row factor of the token before.
            var decay_0 = decay;
            if (UNDECAYED && row_group == 0u && !same) {
              decay_0 = column_decay;
              if (ty > block_start) {
                decay_0 *= factors[row_factor - PITCH + i];
              }
            }
            let r0 = rows[ty * PITCH + i] * decay_0;
            let r1 = rows[(BLOCK + ty) * PITCH + i] * decay;
            let r2 = rows[(2u * BLOCK + ty) * PITCH + i] * decay;
            let c0 = columns[tx * PITCH + i];
            let c1 = columns[(BLOCK + tx) * PITCH + i];
            sum_0 += vec3<f32>(dot(r0, c0), dot(r1, c0), dot(r2, c0));
            sum_1 += vec3<f32>(dot(r0, c1), dot(r1, c1), dot(r2, c1));
          }
        }
      }

      for (var i = 0u; i < ROWS; i++) {
        let row_step = row_group + i;
        for (var j = 0u; j < COLUMNS; j++) {
          let column_step = column_group + j;
          if (column_step < n) {
            let x = select(sum_0[i], sum_1[i], j == 1u);
            if (row_step < n) {
              let below = t > s || (same && row_step > column_step);
              scratch[base + INVERSE + (t * n + row_step) * R + s * n + column_step] = select(0.0, x, below);
            } else if (row_step == n) {
              scratch[base + MASKED + t * R + s * n + column_step] = select(0.0, x, t >= s);
            }
          }
        }
      }
    }
  }
}
