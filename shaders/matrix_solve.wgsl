// Matrix tier, pass 2 of 3, parallel over chunks and heads: what a chunk does to the state,
//
//   T = (I + L)^-1,  A T               in float32: small differences of entries near one matter here
//   W = T B,  Q - A W = Q - (A T) B    on matrix units
//
// The 16x16 diagonal blocks of I + L are inverted by substitution, then pairs of blocks merged,
// X_21 = -X_22 (L_21 X_11), 16 -> 32 -> 64.

@group(0) @binding(12) var<storage, read_write> floats: array<vec4<f32>>;
@group(0) @binding(13) var<storage, read_write> halves: array<vec4<f16>>;

const THREADS = 256u;
override SUBGROUPS: u32 = 8u;
const BLOCK = 16u;
// Rows of T in vec4, one more than they hold, to spread the banks; the same for A transposed.
override PITCH: u32 = R / 4u + 1u;
override A_PITCH: u32 = CHUNK / 4u + 1u;
override TOKEN_GROUPS: u32 = THREADS / R;
override TOKENS_EACH: u32 = (CHUNK / 4u + TOKEN_GROUPS - 1u) / TOKEN_GROUPS;  // in fours, at most 4
override SIDE_SIZE: u32 = 576u;
override WORK_SIZE: u32 = 1088u;
override COLUMN_ROUNDS: u32 = (KEY_TILES + SUBGROUPS - 1u) / SUBGROUPS;
override LOWER_TILES: u32 = R / EDGE;
override LOWER_PITCH: u32 = R / 4u + 2u;
override LOWER_SIZE: u32 = (R + CHUNK) * LOWER_PITCH;

var<workgroup> work: array<vec4<f32>, WORK_SIZE>;  // L, then T, then two tiles a subgroup
var<workgroup> lower: array<vec4<f16>, LOWER_SIZE>; // T over A T
var<workgroup> side: array<vec4<f32>, SIDE_SIZE>;  // L_21 X_11, then A transposed [R][C], then A T [C][R]
// Bits of max |T| and max |W|; with 16 bytes, whatever follows stays aligned as matrix loads need it.
var<workgroup> largest: array<atomic<u32>, 4>;

fn lower_triangle(x: vec4<f32>, r: u32, c: u32) -> vec4<f32> {
  return select(vec4<f32>(), x, vec4<u32>(c, c + 1u, c + 2u, c + 3u) < vec4<u32>(r));
}

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
  let floats_at = floats_base(item / params.head_count, item % params.head_count) / 4u;
  let halves_at = halves_base(item / params.head_count, item % params.head_count);

  for (var i = lid; i < R * R / 4u; i += THREADS) {
    let r = i / (R / 4u);
    let c = i % (R / 4u);
    work[r * PITCH + c] = lower_triangle(floats[floats_at + TRIANGLE / 4u + i], r, c * 4u);
  }
  if (lid < 2u) {
    atomicStore(&largest[lid], 0u);
  }
  workgroupBarrier();

  // One thread a column of a diagonal block.
  let corner = lid / BLOCK * (BLOCK * PITCH + BLOCK / 4u);
  let j = lid % BLOCK;
  var x: array<f32, 16>;
  if (lid < R) {
    for (var r = 0u; r < BLOCK; r++) {  // unrolled
      var sum = select(0.0, 1.0, r == j);
      for (var m = 0u; m < BLOCK; m++) {  // unrolled
        if (m < r) {
          sum = fma(-work[corner + r * PITCH + m / 4u][m % 4u], x[m], sum);
        }
      }
      x[r] = sum;
    }
  }
  workgroupBarrier();
  if (lid < R) {
    for (var r = 0u; r < BLOCK; r++) {  // unrolled
      work[corner + r * PITCH + j / 4u][j % 4u] = x[r];
    }
  }
  workgroupBarrier();
  // A thread has four columns of a row of the merged block.
  for (var size = BLOCK; size < R; size *= 2u) {
    let across = size / 4u;
    let outputs = (R + 2u * size - 1u) / (2u * size) * size * across;
    for (var i = lid; i < outputs; i += THREADS) {
      let start = i / (size * across) * 2u * size;
      let row = start + size + i / across % size;
      let column = i % across;
      var sum = vec4<f32>();
      if (row < R) {
        for (var m = column; m < across; m++) {
          let l = work[row * PITCH + start / 4u + m];
          let at = (start + m * 4u) * PITCH + start / 4u + column;
          sum = fma(vec4<f32>(l.x), work[at], sum);
          sum = fma(vec4<f32>(l.y), work[at + PITCH], sum);
          sum = fma(vec4<f32>(l.z), work[at + 2u * PITCH], sum);
          sum = fma(vec4<f32>(l.w), work[at + 3u * PITCH], sum);
        }
      }
      side[i] = sum;
    }
    workgroupBarrier();
    for (var i = lid; i < outputs; i += THREADS) {
      let first = i / (size * across) * size * across;
      let start = i / (size * across) * 2u * size;
      let row = start + size + i / across % size;
      let column = i % across;
      if (row < R) {
        var sum = vec4<f32>();
        for (var m = 0u; m * 4u + start + size <= row; m++) {
          let l = work[row * PITCH + (start + size) / 4u + m];
          let at = first + m * 4u * across + column;
          sum = fma(vec4<f32>(-l.x), side[at], sum);
          sum = fma(vec4<f32>(-l.y), side[at + across], sum);
          sum = fma(vec4<f32>(-l.z), side[at + 2u * across], sum);
          sum = fma(vec4<f32>(-l.w), side[at + 3u * across], sum);
        }
        // (A row of X_22 is only read by the outputs of the same row, in other columns.)
        work[row * PITCH + start / 4u + column] = sum;
      }
    }
    workgroupBarrier();
  }

  // A transposed: a token sees the sub-steps of the tokens up to it.
  for (var i = lid; i < CHUNK * R / 4u; i += THREADS) {
    let t = i / (R / 4u);
    let c = i % (R / 4u) * 4u;
    let row = lower_triangle(floats[floats_at + MASKED / 4u + i], (t + 1u) * N, c);
    for (var y = 0u; y < 4u; y++) {  // unrolled
      side[(c + y) * A_PITCH + t / 4u][t % 4u] = row[y];
    }
  }
  workgroupBarrier();
  // A T: a thread has one column and 4 TOKENS_EACH tokens.
  let column = lid % R;
  let token = lid / R * TOKENS_EACH;
  var sums: array<vec4<f32>, 4>;
  for (var t = 0u; t < TOKENS_EACH; t++) {  // unrolled
    sums[t] = vec4<f32>();
  }
  if (token * 4u < CHUNK && lid / R < TOKEN_GROUPS) {
    for (var m = column / BLOCK * BLOCK; m < min((token + TOKENS_EACH) * 4u * N, R); m++) {
      let y = work[m * PITCH + column / 4u][column % 4u];
      for (var t = 0u; t < TOKENS_EACH; t++) {  // unrolled
        sums[t] = fma(side[m * A_PITCH + min(token + t, CHUNK / 4u - 1u)], vec4<f32>(y), sums[t]);
      }
    }
  }
  workgroupBarrier();
  if (lid / R < TOKEN_GROUPS) {
    for (var t = 0u; t < TOKENS_EACH; t++) {  // unrolled
      if (token + t < CHUNK / 4u) {
        for (var y = 0u; y < 4u; y++) {  // unrolled
          side[((token + t) * 4u + y) * (R / 4u) + column / 4u][column % 4u] = sums[t][y];
        }
      }
    }
  }
  workgroupBarrier();

  // T over A T in float16; once more those of their columns that meet contents, there T over the reads' power, as W
  // is, since U is their sum.
  let reads_power = floats[floats_at + POWERS / 4u][POWERS % 4u];
  var peak = 0.0;
  for (var i = lid; i < (R + CHUNK) * R / 4u; i += THREADS) {
    let r = i / (R / 4u);
    let c = i % (R / 4u);
    var y: vec4<f32>;
    if (r < R) {
      y = work[r * PITCH + c];
    } else {
      y = side[i - R * R / 4u];
    }
    lower[r * LOWER_PITCH + c] = vec4<f16>(y);
  }
  for (var i = lid; i < (R + CHUNK) * CF / 4u; i += THREADS) {
    let r = i / (CF / 4u);
    let content = i % (CF / 4u) * 4u;
    var y: vec4<f32>;
    for (var q = 0u; q < 4u; q++) {  // unrolled
      let c = (content + q) / FACTORS * N + (content + q) % FACTORS * PATTERN + PATTERN - 1u;
      if (r < R) {
        y[q] = work[r * PITCH + c / 4u][c % 4u];
      } else {
        y[q] = side[(r - R) * (R / 4u) + c / 4u][c % 4u];
      }
    }
    if (r < R) {
      y /= reads_power;
    }
    peak = max(peak, largest_of(y));
    halves[halves_at + tiled(r, KP + content, LEFT_TILES) / 4u] = vec4<f16>(y);
  }
  peak = subgroupMax(peak);
  if (lane == 0u) {
    atomicMax(&largest[0], bitcast<u32>(peak));
  }
  workgroupBarrier();

  peak = 0.0;
  for (var round = 0u; round < COLUMN_ROUNDS; round++) {
    // A column of tiles each; subgroups without one repeat the last and keep nothing.
    let tile_column = min(round * SUBGROUPS + subgroup, KEY_TILES - 1u);
    var acc: array<MatrixSum, 16>;
    for (var i = 0u; i < ROW_TILES; i++) {  // unrolled
      acc[i] = MatrixSum();
    }
    for (var m = 0u; m < LOWER_TILES; m++) {  // unrolled
      let right = coopLoadT<MatrixRight>(&halves[halves_at + (m * LEFT_TILES + tile_column) * (TILE / 4u)], EDGE / 4u);
      for (var i = 0u; i < ROW_TILES; i++) {  // unrolled
        // Right of the diagonal of T, and of the last sub-step that a token of A T sees, there are zeros. (Cooperative
        // calls may not stand under an `if` like this; a loop of one turn or none may.)
        let end = select((i + 1u) * EDGE, (max((i + 1u) * EDGE, R) - R) * N, i * EDGE >= R);
        for (var y = m * EDGE; y < end; y += R) {
          let left = coopLoadT<MatrixLeft>(&lower[i * EDGE * LOWER_PITCH + m * EDGE / 4u], LOWER_PITCH);
          acc[i] = coopMultiplyAdd(left, right, acc[i]);
        }
      }
    }
    // Sums become halves by way of workgroup memory, two tiles a subgroup in turn.
    let own = round * SUBGROUPS + subgroup < KEY_TILES;
    for (var i = 0u; i < ROW_TILES; i++) {  // unrolled
      let stage = ((i & 1u) * SUBGROUPS + subgroup) * (TILE / 4u);
      coopStoreT(acc[i], &work[stage], EDGE / 4u);
      workgroupBarrier();
      if (own) {
        for (var y = lane; y < TILE / 4u; y += lanes) {
          let to = halves_at + (i * LEFT_TILES + tile_column) * (TILE / 4u) + y;
          var z = -work[stage + y];
          if (i * EDGE >= R) {
            z = vec4<f32>(halves[to]) + z * reads_power;
          }
          peak = max(peak, largest_of(z));
          halves[to] = vec4<f16>(z);
        }
      }
    }
    workgroupBarrier();
  }
  peak = subgroupMax(peak);
  if (lane == 0u) {
    atomicMax(&largest[1], bitcast<u32>(peak));
  }
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
    floats[floats_at + UNIT / 4u].x = unit;
  }
}
