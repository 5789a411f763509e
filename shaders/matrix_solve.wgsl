// Matrix tier, pass 2 of 3, parallel over chunks and heads: T = (I + L)^-1 over A T, as `lower`, and the unit of U.
//
// In float32, since small differences of entries near one matter here. The 16x16 diagonal blocks of I + L are inverted by
// substitution, then pairs of blocks merged, X_21 = -X_22 (L_21 X_11), 16 -> 32 -> 64.

@group(0) @binding(12) var<storage, read_write> floats: array<vec4<f32>>;
@group(0) @binding(13) var<storage, read_write> halves: array<vec4<f16>>;

const THREADS = 256u;
const BLOCK = 16u;
override BLOCKS: u32 = R / BLOCK;
override MERGES: u32 = firstLeadingBit(2u * BLOCKS - 1u);  // log2 of BLOCKS, rounded up
// Rows of a block in vec4, one more than they hold, to spread the banks. Blocks above the diagonal are not kept.
const PITCH = 5u;
override WORK_SIZE: u32 = BLOCKS * (BLOCKS + 1u) / 2u * BLOCK * PITCH;
// The same for A and A T.
override MASKED_PITCH: u32 = R / 4u + 1u;
override MASKED_SIZE: u32 = max(CHUNK * MASKED_PITCH, 256u);
override TOKEN_GROUPS: u32 = THREADS / R;
override TOKENS_EACH: u32 = (CHUNK + TOKEN_GROUPS - 1u) / TOKEN_GROUPS;  // at most 16
override TRIANGLE_ROUNDS: u32 = (R * R / 4u + THREADS - 1u) / THREADS;
override MASKED_ROUNDS: u32 = (CHUNK * R / 4u + THREADS - 1u) / THREADS;

var<workgroup> work: array<vec4<f32>, WORK_SIZE>;      // L, then T
var<workgroup> masked: array<vec4<f32>, MASKED_SIZE>;  // L_21 X_11, then A, then A T
var<workgroup> largest: atomic<u32>;                   // bits of max |T|

// Elements c .. c + 3 of a row, of which those from `end` on are zeros.
fn up_to(end: u32, x: vec4<f32>, c: u32) -> vec4<f32> {
  return select(vec4<f32>(), x, vec4<u32>(c, c + 1u, c + 2u, c + 3u) < vec4<u32>(end));
}

// Where vec4 number `quad` of row r lies in `work`, on or below the diagonal's blocks.
fn lower_at(r: u32, quad: u32) -> u32 {
  let down = r / BLOCK;
  let across = quad / (BLOCK / 4u);
  return ((down * (down + 1u) / 2u + across) * BLOCK + r % BLOCK) * PITCH + quad % (BLOCK / 4u);
}

@compute @workgroup_size(THREADS)
fn main(
  @builtin(workgroup_id) group: vec3<u32>,
  @builtin(num_workgroups) groups: vec3<u32>,
  @builtin(local_invocation_index) lid: u32,
  @builtin(subgroup_invocation_id) lane: u32,
) {
  let item = group.y * groups.x + group.x;
  if (item >= params.chunk_count * params.head_count) {
    return;
  }
  let floats_at = floats_base(item / params.head_count, item % params.head_count) / 4u;
  let halves_at = halves_base(item / params.head_count, item % params.head_count) + LOWER / 4u;

  // Everything that is read from scratch memory is asked for before any of it is used.
  var triangle: array<vec4<f32>, 16>;  // [TRIANGLE_ROUNDS]
  var rows: array<vec4<f32>, 16>;      // [MASKED_ROUNDS], of A
  for (var y = 0u; y < TRIANGLE_ROUNDS; y++) {  // unrolled
    triangle[y] = floats[floats_at + TRIANGLE / 4u + min(lid + y * THREADS, R * R / 4u - 1u)];
  }
  for (var y = 0u; y < MASKED_ROUNDS; y++) {  // unrolled
    rows[y] = floats[floats_at + MASKED / 4u + min(lid + y * THREADS, CHUNK * R / 4u - 1u)];
  }
  let residual = floats[floats_at + RESIDUAL_BOUND / 4u][RESIDUAL_BOUND % 4u];
  for (var y = 0u; y < TRIANGLE_ROUNDS; y++) {  // unrolled
    let r = (lid + y * THREADS) / (R / 4u);
    let c = (lid + y * THREADS) % (R / 4u);
    if (r < R && c * 4u < (r / BLOCK + 1u) * BLOCK) {
      work[lower_at(r, c)] = up_to(r, triangle[y], c * 4u);
    }
  }
  if (lid == 0u) {
    atomicStore(&largest, 0u);
  }
  workgroupBarrier();

  // One thread a column of a diagonal block.
  let corner = lower_at(lid / BLOCK * BLOCK, lid / BLOCK * (BLOCK / 4u));
  let j = lid % BLOCK;
  var x: array<f32, 16>;
  if (lid < R) {
    for (var r = 0u; r < BLOCK; r++) {  // unrolled
      x[r] = select(0.0, 1.0, r == j);
    }
    for (var r = 0u; r < BLOCK; r++) {  // unrolled
      var sum = vec4<f32>(x[r], 0.0, 0.0, 0.0);
      for (var m = 0u; m < 4u; m++) {  // unrolled
        if (m * 4u < r) {
          // (L is zero from the diagonal on, so that what x has there does not count.)
          sum = fma(-work[corner + r * PITCH + m], vec4<f32>(x[m * 4u], x[m * 4u + 1u], x[m * 4u + 2u], x[m * 4u + 3u]), sum);
        }
      }
      x[r] = (sum.x + sum.y) + (sum.z + sum.w);
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
  for (var merge = 0u; merge < MERGES; merge++) {  // unrolled
    let size = BLOCK << merge;
    let across = size / 4u;
    let outputs = (R + 2u * size - 1u) / (2u * size) * size * across;
    for (var i = lid; i < outputs; i += THREADS) {
      let start = i / (size * across) * 2u * size;
      let row = start + size + i / across % size;
      let column = i % across;
      var sum = vec4<f32>();
      if (row < R) {
        for (var m = column; m < across; m++) {
          let l = work[lower_at(row, start / 4u + m)];
          let at = lower_at(start + m * 4u, start / 4u + column);
          sum = fma(vec4<f32>(l.x), work[at], sum);
          sum = fma(vec4<f32>(l.y), work[at + PITCH], sum);
          sum = fma(vec4<f32>(l.z), work[at + 2u * PITCH], sum);
          sum = fma(vec4<f32>(l.w), work[at + 3u * PITCH], sum);
        }
      }
      masked[i] = sum;
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
          let l = work[lower_at(row, (start + size) / 4u + m)];
          let at = first + m * 4u * across + column;
          sum = fma(vec4<f32>(-l.x), masked[at], sum);
          sum = fma(vec4<f32>(-l.y), masked[at + across], sum);
          sum = fma(vec4<f32>(-l.z), masked[at + 2u * across], sum);
          sum = fma(vec4<f32>(-l.w), masked[at + 3u * across], sum);
        }
        // (A row of X_22 is only read by the outputs of the same row, in other columns.)
        work[lower_at(row, start / 4u + column)] = sum;
      }
    }
    workgroupBarrier();
  }

  // A token sees the sub-steps of the tokens up to it.
  for (var y = 0u; y < MASKED_ROUNDS; y++) {  // unrolled
    let t = (lid + y * THREADS) / (R / 4u);
    let c = (lid + y * THREADS) % (R / 4u);
    if (t < CHUNK) {
      masked[t * MASKED_PITCH + c] = up_to((t + 1u) * N, rows[y], c * 4u);
    }
  }
  // T in float16; its elements above the diagonal are zeros.
  var peak = 0.0;
  for (var y = 0u; y < TRIANGLE_ROUNDS; y++) {  // unrolled
    let r = (lid + y * THREADS) / (R / 4u);
    let c = (lid + y * THREADS) % (R / 4u);
    if (r < R) {
      var t = vec4<f32>();
      if (c * 4u <= r) {
        t = work[lower_at(r, c)];
      }
      peak = max(peak, largest_of(t));
      halves[halves_at + r * R / 4u + c] = vec4<f16>(t);
    }
  }
  peak = subgroupMax(peak);
  if (lane == 0u) {
    atomicMax(&largest, bitcast<u32>(peak));
  }
  workgroupBarrier();

  // A T: a thread has one column and TOKENS_EACH tokens.
  let column = lid % R;
  let token = lid / R * TOKENS_EACH;
  let working = token < CHUNK && lid / R < TOKEN_GROUPS;
  var seen: array<f32, 16>;
  for (var t = 0u; t < TOKENS_EACH; t++) {  // unrolled
    seen[t] = 0.0;
  }
  if (working) {
    for (var block = 0u; block < BLOCKS; block++) {  // unrolled
      if (block >= column / BLOCK && block * BLOCK < (token + TOKENS_EACH) * N) {
        let corner = lower_at(block * BLOCK, column / 4u);
        for (var m = 0u; m < 4u; m++) {  // unrolled
          let at = corner + m * 4u * PITCH;
          let y = vec4<f32>(
            work[at][column % 4u],
            work[at + PITCH][column % 4u],
            work[at + 2u * PITCH][column % 4u],
            work[at + 3u * PITCH][column % 4u],
          );
          for (var t = 0u; t < TOKENS_EACH; t++) {  // unrolled
            let from_token = select(min(token + t, CHUNK - 1u), token + t, CHUNK % TOKENS_EACH == 0u);
            let row = masked[from_token * MASKED_PITCH + block * (BLOCK / 4u) + m];
            seen[t] = fma(row.w, y.w, fma(row.z, y.z, fma(row.y, y.y, fma(row.x, y.x, seen[t]))));
          }
        }
      }
    }
  }
  workgroupBarrier();
  if (working) {
    for (var t = 0u; t < TOKENS_EACH; t++) {  // unrolled
      if (token + t < CHUNK) {
        masked[(token + t) * MASKED_PITCH + column / 4u][column % 4u] = seen[t];
      }
    }
  }
  // |U| is at most R max |T| times the largest residual, which its own unit keeps below 2^15. The power of two that takes
  // this below 2^15, where it is not already.
  if (lid == 0u) {
    let bound = f32(R) * bitcast<f32>(atomicLoad(&largest)) * residual;
    let exponent = bitcast<u32>(bound) >> 23u;
    var unit = 1.0;
    if (exponent > 127u + 14u) {
      unit = bitcast<f32>((127u + 127u + 14u - min(exponent, 254u)) << 23u);
    }
    floats[floats_at + UNIT / 4u].x = unit;
  }
  workgroupBarrier();
  for (var y = 0u; y < MASKED_ROUNDS; y++) {  // unrolled
    let t = (lid + y * THREADS) / (R / 4u);
    let c = (lid + y * THREADS) % (R / 4u);
    if (t < CHUNK) {
      halves[halves_at + (R + t) * R / 4u + c] = vec4<f16>(masked[t * MASKED_PITCH + c]);
    }
  }
}
