// What pass 1 of the matrix tier makes of L and A: T = (I + L)^-1 over A, as `lower`.
//
// The 16x16 diagonal blocks of I + L are inverted by substitution in float32, then pairs of blocks merged, X_21 = -X_22 (L_21
// X_11), 16 -> 32 -> 64, on matrix units. Small differences of entries near one matter here: so both operands are the sum of two
// float16 numbers, and only the product of the two smaller ones is left out.

const BLOCK = 16u;
const BLOCK_QUADS = 4u;
override BLOCKS: u32 = R / BLOCK;
override MERGES: u32 = firstLeadingBit(2u * BLOCKS - 1u);  // log2 of BLOCKS, rounded up
// Rows of a block in vec4, one more than they hold, to spread the banks. Blocks above the diagonal are not kept.
const BLOCK_PITCH = 5u;
override WORK_SIZE: u32 = BLOCKS * (BLOCKS + 1u) / 2u * BLOCK * BLOCK_PITCH;
// The same for A, which lies behind it, or, where there is no room for both, comes before it.
override APART: bool = false;
override MASKED_AT: u32 = select(WORK_SIZE, 0u, APART);
override MASKED_PITCH: u32 = R / 4u + 1u;
override MASKED_SIZE: u32 = CHUNK * MASKED_PITCH;
override SOLVE_SIZE: u32 = max(WORK_SIZE, MASKED_AT + MASKED_SIZE);
// Of T as float16, and of what it lacks then.
override LOWER_PITCH: u32 = R / 4u + 2u;
override TRIANGLE_ROUNDS: u32 = (R * R / 4u + THREADS - 1u) / THREADS;
override MASKED_ROUNDS: u32 = (CHUNK * R / 4u + THREADS - 1u) / THREADS;
// The same for the threads behind the first R, of which there are as many at least.
override HELPERS: u32 = THREADS - R;
override TRIANGLE_HELPS: u32 = (R * R / 4u + HELPERS - 1u) / HELPERS;
override MASKED_HELPS: u32 = (CHUNK * R / 4u + HELPERS - 1u) / HELPERS;
// Tiles of a merge, at most.
override MERGE_TILES: u32 = R * R / (8u * EDGE * EDGE);
override MERGE_ROUNDS: u32 = (MERGE_TILES + SUBGROUPS - 1u) / SUBGROUPS;

// Elements c .. c + 3 of a row, of which those from `end` on are zeros.
fn up_to(end: u32, x: vec4<f32>, c: u32) -> vec4<f32> {
  return select(vec4<f32>(), x, vec4<u32>(c, c + 1u, c + 2u, c + 3u) < vec4<u32>(end));
}

// Where vec4 number `quad` of row r of L or T lies in `space`, on or below the diagonal's blocks.
fn lower_at(r: u32, quad: u32) -> u32 {
  let down = r / BLOCK;
  let across = quad / BLOCK_QUADS;
  return ((down * (down + 1u) / 2u + across) * BLOCK + r % BLOCK) * BLOCK_PITCH + quad % BLOCK_QUADS;
}

// Keeps four elements of L or T as two float16 numbers each.
fn keep(at: u32, x: vec4<f32>) {
  let high = vec4<f16>(x);
  rows[at] = high;
  columns[at] = vec4<f16>(x - vec4<f32>(high));
}

// L from scratch memory.
fn take_triangle(triangles_at: u32, lid: u32) {
  for (var y = 0u; y < TRIANGLE_ROUNDS; y++) {  // unrolled
    let r = (lid + y * THREADS) / (R / 4u);
    let c = (lid + y * THREADS) % (R / 4u);
    if (r < R && c * 4u <= r) {
      space[lower_at(r, c)] = floats[triangles_at + lid + y * THREADS];
    }
  }
}

// A from there.
fn take_masked(triangles_at: u32, lid: u32) {
  for (var y = 0u; y < MASKED_ROUNDS; y++) {  // unrolled
    let t = (lid + y * THREADS) / (R / 4u);
    let c = (lid + y * THREADS) % (R / 4u);
    if (t < CHUNK) {
      space[MASKED_AT + t * MASKED_PITCH + c] = floats[triangles_at + R * R / 4u + lid + y * THREADS];
    }
  }
}

// A as float16. A token sees the sub-steps of the tokens up to it.
fn keep_masked_quad(halves_at: u32, i: u32) {
  let t = i / (R / 4u);
  let c = i % (R / 4u);
  if (t < CHUNK) {
    let a = up_to((t + 1u) * N, space[MASKED_AT + t * MASKED_PITCH + c], c * 4u);
    halves[halves_at + (LOWER + R * R) / 4u + i] = vec4<f16>(a);
  }
}

fn keep_masked(halves_at: u32, lid: u32) {
  for (var y = 0u; y < MASKED_ROUNDS; y++) {  // unrolled
    keep_masked_quad(halves_at, lid + y * THREADS);
  }
}

// What is done while the first R threads invert the diagonal blocks: A as float16 (unless it is written already), and L below these
// blocks as two float16 numbers, with zeros above.
fn split_off_diagonal(halves_at: u32, helper: u32) {
  if (!APART) {
    for (var y = 0u; y < MASKED_HELPS; y++) {  // unrolled
      keep_masked_quad(halves_at, helper + y * HELPERS);
    }
  }
  for (var y = 0u; y < TRIANGLE_HELPS; y++) {  // unrolled
    let r = (helper + y * HELPERS) / (R / 4u);
    let c = (helper + y * HELPERS) % (R / 4u);
    if (r < R && c / BLOCK_QUADS != r / BLOCK) {
      var l = vec4<f32>();
      if (c / BLOCK_QUADS < r / BLOCK) {
        l = space[lower_at(r, c)];
      }
      keep(r * LOWER_PITCH + c, l);
    }
  }
}

// Writes `lower`, and the largest of T where the chunk's words of `largest` start at `words`; T as float16 stays in `rows`. L and A
// are in `space` (A is written already where they are kept apart); what L has on and above its diagonal, and A of what a token does
// not see, is dropped here.
fn solve(halves_at: u32, words: u32, lid: u32, lane: u32, subgroup: u32) {
  // One thread a column of a diagonal block.
  let corner = lower_at(lid / BLOCK * BLOCK, lid / BLOCK * BLOCK_QUADS);
  let j = lid % BLOCK;
  var x: array<f32, BLOCK>;
  if (lid < R) {
    for (var r = 0u; r < BLOCK; r++) {  // unrolled
      x[r] = select(0.0, 1.0, r == j);
    }
    for (var r = 0u; r < BLOCK; r++) {  // unrolled
      var sum = vec4<f32>(x[r], 0.0, 0.0, 0.0);
      for (var m = 0u; m < BLOCK_QUADS; m++) {  // unrolled
        if (m * 4u < r) {
          let l = up_to(r, space[corner + r * BLOCK_PITCH + m], m * 4u);
          sum = fma(-l, vec4<f32>(x[m * 4u], x[m * 4u + 1u], x[m * 4u + 2u], x[m * 4u + 3u]), sum);
        }
      }
      x[r] = (sum.x + sum.y) + (sum.z + sum.w);
    }
    for (var r = 0u; r < BLOCK; r++) {  // unrolled
      let at = (lid / BLOCK * BLOCK + r) * LOWER_PITCH + lid / 4u;
      let high = f16(x[r]);
      rows[at][j % 4u] = high;
      columns[at][j % 4u] = f16(x[r] - f32(high));
    }
  } else {
    split_off_diagonal(halves_at, lid - R);
  }
  workgroupBarrier();

  for (var merge = 0u; merge < MERGES; merge++) {  // unrolled
    // Pairs of blocks of this size, of which the second of the last may have fewer rows.
    let size = BLOCK << merge;
    let pairs = (R + size - 1u) / (2u * size);
    let second = min(size, R - size);
    let across = size / EDGE;
    let down = second / EDGE;
    // L_21 X_11, as [column][row] within tiles, in the place of L_21.
    for (var i = 0u; i < MERGE_ROUNDS; i++) {  // unrolled
      let tile = min(i * SUBGROUPS + subgroup, pairs * down * across - 1u);
      let start = tile / (down * across) * 2u * size;
      let row = start + size + tile / across % down * EDGE;
      let column = start + tile % across * EDGE;
      var high = MatrixSum();
      var low = MatrixSum();
      for (var x = start; x < start + size; x += EDGE) {
        let left = coopLoadT<MatrixLeft>(&rows[row * LOWER_PITCH + x / 4u], LOWER_PITCH);
        let right = coopLoadT<MatrixRight>(&rows[x * LOWER_PITCH + column / 4u], LOWER_PITCH);
        high = coopMultiplyAdd(left, right, high);
        low = coopMultiplyAdd(left, coopLoadT<MatrixRight>(&columns[x * LOWER_PITCH + column / 4u], LOWER_PITCH), low);
        low = coopMultiplyAdd(coopLoadT<MatrixLeft>(&columns[row * LOWER_PITCH + x / 4u], LOWER_PITCH), right, low);
      }
      coopStore(high + low, &space[lower_at(row, column / 4u)], BLOCK_PITCH);
    }
    workgroupBarrier();
    // The same as two float16 numbers, above the diagonal.
    for (var i = lid; i < pairs * size * second / 4u; i += THREADS) {
      let start = i / (size * second / 4u) * 2u * size;
      let column = start + i / (second / 4u) % size;
      let row = start + size + i % (second / 4u) * 4u;
      let at = lower_at(row / EDGE * EDGE, column / EDGE * EDGE / 4u) + column % EDGE * BLOCK_PITCH + row % EDGE / 4u;
      keep(column * LOWER_PITCH + row / 4u, space[at]);
    }
    workgroupBarrier();
    // X_21 in the place of L_21.
    for (var i = 0u; i < MERGE_ROUNDS; i++) {  // unrolled
      let tile = min(i * SUBGROUPS + subgroup, pairs * down * across - 1u);
      let start = tile / (down * across) * 2u * size;
      let row = start + size + tile / across % down * EDGE;
      let column = start + tile % across * EDGE;
      var high = MatrixSum();
      var low = MatrixSum();
      for (var x = start + size; x < start + size + second; x += EDGE) {
        let left = coopLoadT<MatrixLeft>(&rows[row * LOWER_PITCH + x / 4u], LOWER_PITCH);
        let right = coopLoad<MatrixRight>(&rows[column * LOWER_PITCH + x / 4u], LOWER_PITCH);
        high = coopMultiplyAdd(left, right, high);
        low = coopMultiplyAdd(left, coopLoad<MatrixRight>(&columns[column * LOWER_PITCH + x / 4u], LOWER_PITCH), low);
        low = coopMultiplyAdd(coopLoadT<MatrixLeft>(&columns[row * LOWER_PITCH + x / 4u], LOWER_PITCH), right, low);
      }
      coopStoreT(-1.0 * (high + low), &space[lower_at(row, column / 4u)], BLOCK_PITCH);
    }
    workgroupBarrier();
    for (var i = lid; i < pairs * size * second / 4u; i += THREADS) {
      let start = i / (size * second / 4u) * 2u * size;
      let row = start + size + i / (size / 4u) % second;
      let c = start / 4u + i % (size / 4u);
      keep(row * LOWER_PITCH + c, space[lower_at(row, c)]);
      let above = start + i / (second / 4u) % size;
      keep(above * LOWER_PITCH + (start + size) / 4u + i % (second / 4u), vec4<f32>());
    }
    workgroupBarrier();
  }

  // T.
  let lower_start = halves_at + LOWER / 4u;
  var peak = 0.0;
  for (var y = 0u; y < TRIANGLE_ROUNDS; y++) {  // unrolled
    let r = (lid + y * THREADS) / (R / 4u);
    let c = (lid + y * THREADS) % (R / 4u);
    if (r < R) {
      let t = rows[r * LOWER_PITCH + c];
      peak = max(peak, largest_of(vec4<f32>(t)));
      halves[lower_start + r * R / 4u + c] = t;
    }
  }
  for (var i = 0u; i < LANE_LEVELS; i++) {  // unrolled
    peak = max(peak, subgroupShuffleXor(peak, 1u << i));
  }
  if (lane == 0u) {
    atomicMax(&largest[words + 4u], bitcast<u32>(peak));
  }
}
