// Matrix tier, pass 2 of 3, parallel over chunks and heads: what a chunk does to the state,
//
//   T = (I + L)^-1,  A T           in float32: small differences of entries near one matter here
//   W = T B,  Q - A W = Q - (A T) B    on matrix units
//
// The 16x16 diagonal blocks of I + L are inverted by substitution, then pairs of blocks merged,
// X_21 = -X_22 (L_21 X_11), 16 -> 32 -> 64.

@group(0) @binding(12) var<storage, read_write> floats: array<f32>;
@group(0) @binding(13) var<storage, read_write> halves: array<vec2<f16>>;

const THREADS = 256u;
override SUBGROUPS: u32 = 8u;
const BLOCK = 16u;
override PITCH: u32 = R + 1u;
override A_PITCH: u32 = CHUNK + 1u;
override A_SIZE: u32 = R * A_PITCH;
// The triangle, later STAGE tiles a subgroup on their way from sums to halves.
override STAGE: u32 = 2u;
override WORK_SIZE: u32 = 4160u;
override MERGE_SIZE: u32 = 1024u;
// Rows of T, then of A T, in float16.
override HALF_PITCH: u32 = R + 8u;
override LOWER_SIZE: u32 = (R + CHUNK) * HALF_PITCH;
override TOKENS_EACH: u32 = (CHUNK * R + THREADS - 1u) / THREADS;  // at most 16
override COLUMN_ROUNDS: u32 = (KEY_TILES + SUBGROUPS - 1u) / SUBGROUPS;

var<workgroup> work: array<f32, WORK_SIZE>;
var<workgroup> a: array<f32, A_SIZE>;          // [R][C], A transposed
var<workgroup> merge: array<f32, MERGE_SIZE>;
var<workgroup> lower: array<f16, LOWER_SIZE>;
var<workgroup> largest: array<atomic<u32>, 2>; // bits of max |T| and max |W|

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
  if (item >= params.chunk_count * params.head_count) {
    return;
  }
  let floats_at = floats_base(item / params.head_count, item % params.head_count);
  let halves_at = halves_base(item / params.head_count, item % params.head_count);

  for (var i = lid; i < R * R; i += THREADS) {
    let r = i / R;
    let c = i % R;
    var x = 0.0;
    if (r > c) {
      x = floats[floats_at + TRIANGLE + i];
    }
    work[r * PITCH + c] = x;
  }
  for (var i = lid; i < CHUNK * R; i += THREADS) {
    let t = i / R;
    let c = i % R;
    var x = 0.0;
    if (t >= c / N) {
      x = floats[floats_at + MASKED + i];
    }
    a[c * A_PITCH + t] = x;
  }
  if (lid < 2u) {
    atomicStore(&largest[lid], 0u);
  }
  workgroupBarrier();

  // One thread a column of a diagonal block.
  let corner = lid / BLOCK * BLOCK * (PITCH + 1u);
  let j = lid % BLOCK;
  var x: array<f32, 16>;
  if (lid < R) {
    for (var r = 0u; r < BLOCK; r++) {
      var sum = select(0.0, 1.0, r == j);
      for (var m = 0u; m < r; m++) {
        sum = fma(-work[corner + r * PITCH + m], x[m], sum);
      }
      x[r] = sum;
    }
  }
  workgroupBarrier();
  if (lid < R) {
    for (var r = 0u; r < BLOCK; r++) {
      work[corner + r * PITCH + j] = x[r];
    }
  }
  workgroupBarrier();
  for (var size = BLOCK; size < R; size *= 2u) {
    let outputs = (R + 2u * size - 1u) / (2u * size) * size * size;
    for (var i = lid; i < outputs; i += THREADS) {
      let start = i / (size * size) * 2u * size;
      let row = start + size + i / size % size;
      let column = start + i % size;
      var sum = 0.0;
      if (row < R) {
        for (var m = 0u; m < size; m++) {
          sum = fma(work[row * PITCH + start + m], work[(start + m) * PITCH + column], sum);
        }
      }
      merge[i] = sum;
    }
    workgroupBarrier();
    for (var i = lid; i < outputs; i += THREADS) {
      let start = i / (size * size) * 2u * size;
      let row = start + size + i / size % size;
      let column = start + i % size;
      var sum = 0.0;
      if (row < R) {
        for (var m = 0u; m < min(size, R - start - size); m++) {
          sum = fma(-work[row * PITCH + start + size + m], merge[i / (size * size) * size * size + m * size + i % size], sum);
        }
        work[row * PITCH + column] = sum;
      }
    }
    // (A row of X_22 is only read by the outputs of the same row, in other columns.)
    workgroupBarrier();
  }

  // A T: a thread has one column and TOKENS_EACH tokens.
  let column = lid % R;
  let token = lid / R * TOKENS_EACH;
  var sums: array<f32, 16>;
  for (var t = 0u; t < TOKENS_EACH; t++) {
    sums[t] = 0.0;
  }
  if (token < CHUNK) {
    for (var m = column / BLOCK * BLOCK; m < min((token + TOKENS_EACH) * N, R); m++) {
      let x = work[m * PITCH + column];
      for (var t = 0u; t < TOKENS_EACH; t++) {
        sums[t] = fma(a[m * A_PITCH + min(token + t, CHUNK - 1u)], x, sums[t]);
      }
    }
  }
  var peak = 0.0;
  for (var i = lid; i < R * R; i += THREADS) {
    let x = work[i / R * PITCH + i % R];
    peak = max(peak, abs(x));
    lower[i / R * HALF_PITCH + i % R] = f16(x);
  }
  if (token < CHUNK) {
    for (var t = 0u; t < min(TOKENS_EACH, CHUNK - token); t++) {
      peak = max(peak, abs(sums[t]));
      lower[(R + token + t) * HALF_PITCH + column] = f16(sums[t]);
    }
  }
  atomicMax(&largest[0], bitcast<u32>(peak));
  workgroupBarrier();

  // The columns that meet contents.
  for (var i = lid; i < (R + CHUNK) * CF / 2u; i += THREADS) {
    let row = i / (CF / 2u);
    let content = i % (CF / 2u) * 2u;
    let c0 = content / FACTORS * N + content % FACTORS * PATTERN + PATTERN - 1u;
    let c1 = (content + 1u) / FACTORS * N + (content + 1u) % FACTORS * PATTERN + PATTERN - 1u;
    let x = vec2<f16>(lower[row * HALF_PITCH + c0], lower[row * HALF_PITCH + c1]);
    halves[halves_at + tiled(row, KP + content, LEFT_TILES) / 2u] = x;
  }

  peak = 0.0;
  for (var round = 0u; round < COLUMN_ROUNDS; round++) {
    // A column of tiles each; subgroups without one repeat the last and keep nothing.
    let tile_column = min(round * SUBGROUPS + subgroup, KEY_TILES - 1u);
    var acc: array<MatrixSum, 16>;
    for (var i = 0u; i < ROW_TILES; i++) {
      acc[i] = MatrixSum();
    }
    for (var m = 0u; m < R / EDGE; m++) {
      let right = coopLoadT<MatrixRight>(&halves[halves_at + (m * LEFT_TILES + tile_column) * (TILE / 2u)], EDGE / 2u);
      for (var i = 0u; i < ROW_TILES; i++) {
        let left = coopLoadT<MatrixLeft>(&lower[i * EDGE * HALF_PITCH + m * EDGE], HALF_PITCH);
        acc[i] = coopMultiplyAdd(left, right, acc[i]);
      }
    }
    for (var start = 0u; start < ROW_TILES; start += STAGE) {
      workgroupBarrier();
      for (var y = 0u; y < STAGE; y++) {
        coopStoreT(acc[min(start + y, ROW_TILES - 1u)], &work[(subgroup * STAGE + y) * TILE], EDGE);
      }
      workgroupBarrier();
      if (round * SUBGROUPS + subgroup < KEY_TILES) {
        for (var i = lane; i < STAGE * TILE / 2u; i += lanes) {
          let tile_row = start + i / (TILE / 2u);
          if (tile_row < ROW_TILES) {
            let source = (subgroup * STAGE) * TILE + i * 2u;
            let x = vec2<f32>(work[source], work[source + 1u]);
            let to = halves_at + (tile_row * LEFT_TILES + tile_column) * (TILE / 2u) + i % (TILE / 2u);
            if (tile_row * EDGE < R) {
              peak = max(peak, max(abs(x.x), abs(x.y)));
              halves[to] = vec2<f16>(-x);
            } else {
              let y = vec2<f32>(halves[to]) - x;
              peak = max(peak, max(abs(y.x), abs(y.y)));
              halves[to] = vec2<f16>(y);
            }
          }
        }
      }
    }
  }
  atomicMax(&largest[1], bitcast<u32>(peak));
  workgroupBarrier();
  // |U| and |O| are at most 16 (KP max |W| + CF max |T|) where the scan scales |S| and |Z| to at most 16. The power
  // of two that takes this below 2^15, where it is not already.
  if (lid == 0u) {
    let bound = f32(KP) * bitcast<f32>(atomicLoad(&largest[1])) + f32(CF) * bitcast<f32>(atomicLoad(&largest[0]));
    let exponent = bitcast<u32>(bound) >> 23u;
    var unit = 1.0;
    if (exponent > 127u + 9u) {
      unit = bitcast<f32>((127u + 127u + 9u - min(exponent, 254u)) << 23u);
    }
    floats[floats_at + UNIT] = unit;
  }
}
