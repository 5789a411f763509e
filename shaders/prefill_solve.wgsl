// Prefill, pass 2 of 4, parallel over chunks and heads: T = (I + L)^-1 in place of L, and A T in place of A; those
// of their columns that meet a content once more where the scan wants them.
//
// L is strictly lower triangular. Its 16x16 diagonal blocks are inverted by substitution, a thread a column; then
// neighbours merge, [T1 0; X T2] with X = -T2 (L21 T1), for blocks of 16, 32, … (A product of powers of L would
// need fewer steps but amplifies rounding when gates are near 1 and keys repeat.) The triangle lies in
// workgroup memory where it fits, else it stays in scratch memory; L21 T1 goes, transposed, to its upper half.

@group(0) @binding(12) var<storage, read_write> scratch: array<vec4<f32>>;

const THREADS = 64u;
const BLOCK = 16u;
override QUADS: u32 = R / 4u;
override IN_WORKGROUP: bool = true;    // R <= 64
override WORDS: u32 = R * QUADS;       // 1 where the triangle stays in scratch memory

// [R][QUADS], row r rotated by r, so that neighbouring rows of a quad lie in different banks.
var<workgroup> triangle: array<vec4<f32>, WORDS>;
var<private> inverse: u32;

fn place(row: u32, quad: u32) -> u32 {
  return row * QUADS + (quad + row) % QUADS;
}

// Columns 4 quad .. 4 quad + 3 of a row of the triangle.
fn fetch(row: u32, quad: u32) -> vec4<f32> {
  if (IN_WORKGROUP) {
    return triangle[place(row, quad)];
  }
  return scratch[inverse + quad * ROWS + row];
}

fn put(row: u32, quad: u32, x: vec4<f32>) {
  if (IN_WORKGROUP) {
    triangle[place(row, quad)] = x;
  } else {
    scratch[inverse + quad * ROWS + row] = x;
  }
}

fn put_one(row: u32, column: u32, x: f32) {
  if (IN_WORKGROUP) {
    triangle[place(row, column / 4u)][column % 4u] = x;
  } else {
    scratch[inverse + column / 4u * ROWS + row][column % 4u] = x;
  }
}

// What was put is seen, and what was got is no longer needed, by everybody.
fn barrier() {
  storageBarrier();
  workgroupBarrier();
}

// Four rows from `row` on, each times x.
fn rows_times(row: u32, quad: u32, x: vec4<f32>) -> vec4<f32> {
  return vec4<f32>(dot(fetch(row, quad), x), dot(fetch(row + 1u, quad), x), dot(fetch(row + 2u, quad), x), dot(fetch(row + 3u, quad), x));
}

// Substitution within rows row .. row + 3 and the same columns.
fn substituted(row: u32, right: vec4<f32>) -> vec4<f32> {
  var x = right;
  x.y -= fetch(row + 1u, row / 4u).x * x.x;
  x.z -= dot(fetch(row + 2u, row / 4u).xy, x.xy);
  x.w -= dot(fetch(row + 3u, row / 4u).xyz, x.xyz);
  return x;
}

fn unit(row: u32, column: u32) -> vec4<f32> {
  return select(vec4<f32>(), vec4<f32>(1.0), vec4<u32>(row, row + 1u, row + 2u, row + 3u) == vec4<u32>(column));
}

// Column `column` of the inverse of its diagonal block.
fn inverted(column: u32) -> mat4x4<f32> {
  let r = column / BLOCK * BLOCK;
  let q = r / 4u;
  let x0 = substituted(r, unit(r, column));
  let x1 = substituted(r + 4u, unit(r + 4u, column) - rows_times(r + 4u, q, x0));
  let x2 = substituted(r + 8u, unit(r + 8u, column) - rows_times(r + 8u, q, x0) - rows_times(r + 8u, q + 1u, x1));
  let x3 = substituted(r + 12u, unit(r + 12u, column) - rows_times(r + 12u, q, x0) - rows_times(r + 12u, q + 1u, x1)
    - rows_times(r + 12u, q + 2u, x2));
  return mat4x4<f32>(x0, x1, x2, x3);
}

// x plus the row l times four rows.
fn times(x: vec4<f32>, l: vec4<f32>, r: mat4x4<f32>) -> vec4<f32> {
  return fma(vec4<f32>(l.w), r[3], fma(vec4<f32>(l.z), r[2], fma(vec4<f32>(l.y), r[1], fma(vec4<f32>(l.x), r[0], x))));
}

fn four_rows(row: u32, quad: u32) -> mat4x4<f32> {
  return mat4x4<f32>(fetch(row, quad), fetch(row + 1u, quad), fetch(row + 2u, quad), fetch(row + 3u, quad));
}

// A row of A in columns 4 m .. 4 m + 3, of which it sees those before `seen`.
fn masked(at: u32, m: u32, seen: u32) -> vec4<f32> {
  let column = vec4<u32>(4u * m, 4u * m + 1u, 4u * m + 2u, 4u * m + 3u);
  return select(vec4<f32>(), scratch[at + m * ROWS], column < vec4<u32>(seen));
}

@compute @workgroup_size(64)
fn main(
  @builtin(workgroup_id) group: vec3<u32>,
  @builtin(num_workgroups) groups: vec3<u32>,
  @builtin(local_invocation_index) lid: u32,
) {
  let item = group_index(group, groups);
  if (item >= params.chunk_count * params.head_count) {
    return;
  }
  let base = scratch_base(item / params.head_count, item % params.head_count);
  inverse = base + INVERSE / 4u;
  let contents = base + (PRODUCT + KP * ROWS) / 4u;
  let n = substeps();

  if (IN_WORKGROUP) {
    for (var i = lid; i < R * QUADS; i += THREADS) {
      if (i / R * 4u <= i % R) {
        put(i % R, i / R, scratch[inverse + i / R * ROWS + i % R]);
      }
    }
    barrier();
  }

  // Every column has read its block of L before any of them is overwritten.
  for (var start = 0u; start < R; start += THREADS) {
    let column = start + lid;
    var x = mat4x4<f32>();
    if (column < R) {
      x = inverted(column);
    }
    barrier();
    if (column < R) {
      let r = column / BLOCK * BLOCK;
      for (var i = 0u; i < 4u; i++) {
        put_one(r + i, column, x[0][i]);
        put_one(r + 4u + i, column, x[1][i]);
        put_one(r + 8u + i, column, x[2][i]);
        put_one(r + 12u + i, column, x[3][i]);
      }
    }
  }
  barrier();

  // Blocks of `size` rows merge two by two; a tile is 4 x 4 elements of X.
  for (var size = BLOCK; size < R; size *= 2u) {
    let across = size / 4u;
    let tiles = (R + size) / (2u * size) * across * across;
    for (var tile = lid; tile < tiles; tile += THREADS) {
      let first = tile / (across * across) * 2u * size;
      let row = first + size + tile / across % across * 4u;
      let quad = first / 4u + tile % across;
      if (row < R) {
        // L21 T1: T1 is lower triangular.
        var p0 = vec4<f32>();
        var p1 = vec4<f32>();
        var p2 = vec4<f32>();
        var p3 = vec4<f32>();
        for (var m = quad; m < (first + size) / 4u; m++) {
          let r = four_rows(4u * m, quad);
          p0 = times(p0, fetch(row, m), r);
          p1 = times(p1, fetch(row + 1u, m), r);
          p2 = times(p2, fetch(row + 2u, m), r);
          p3 = times(p3, fetch(row + 3u, m), r);
        }
        let p = transpose(mat4x4<f32>(p0, p1, p2, p3));
        put(4u * quad, row / 4u, p[0]);
        put(4u * quad + 1u, row / 4u, p[1]);
        put(4u * quad + 2u, row / 4u, p[2]);
        put(4u * quad + 3u, row / 4u, p[3]);
      }
    }
    barrier();
    for (var tile = lid; tile < tiles; tile += THREADS) {
      let first = tile / (across * across) * 2u * size;
      let row = first + size + tile / across % across * 4u;
      let quad = first / 4u + tile % across;
      if (row < R) {
        // X = -T2 times that: T2 is lower triangular.
        var x0 = vec4<f32>();
        var x1 = vec4<f32>();
        var x2 = vec4<f32>();
        var x3 = vec4<f32>();
        for (var m = (first + size) / 4u; m <= row / 4u; m++) {
          let p0 = fetch(4u * quad, m);
          let p1 = fetch(4u * quad + 1u, m);
          let p2 = fetch(4u * quad + 2u, m);
          let p3 = fetch(4u * quad + 3u, m);
          let t0 = fetch(row, m);
          let t1 = fetch(row + 1u, m);
          let t2 = fetch(row + 2u, m);
          let t3 = fetch(row + 3u, m);
          x0 -= vec4<f32>(dot(t0, p0), dot(t0, p1), dot(t0, p2), dot(t0, p3));
          x1 -= vec4<f32>(dot(t1, p0), dot(t1, p1), dot(t1, p2), dot(t1, p3));
          x2 -= vec4<f32>(dot(t2, p0), dot(t2, p1), dot(t2, p2), dot(t2, p3));
          x3 -= vec4<f32>(dot(t3, p0), dot(t3, p1), dot(t3, p2), dot(t3, p3));
        }
        put(row, quad, x0);
        put(row + 1u, quad, x1);
        put(row + 2u, quad, x2);
        put(row + 3u, quad, x3);
      }
    }
    barrier();
  }

  // T without what has been left in its upper half, and those of its columns that meet a content.
  for (var i = lid; i < R * QUADS; i += THREADS) {
    let row = i % R;
    let quad = i / R;
    let column = vec4<u32>(4u * quad, 4u * quad + 1u, 4u * quad + 2u, 4u * quad + 3u);
    let x = select(vec4<f32>(), fetch(row, quad), column <= vec4<u32>(row));
    scratch[inverse + quad * ROWS + row] = x;
    store_contents(contents + row, quad, x);
  }
  barrier();

  // A T, 4 tokens by 8 columns a thread, as many tokens at a time as make whole rows.
  let across = R / 8u;
  let down = THREADS / across;
  for (var start = 0u; start < C; start += 4u * down) {
    let t = start + lid / across * 4u;
    let quad = lid % across * 2u;
    let at = inverse + R + t;
    let live = lid < across * down && t < C;
    var lo = mat4x4<f32>();
    var hi = mat4x4<f32>();
    if (live) {
      for (var m = quad; m < (t + 4u) * n / 4u; m++) {
        let r = four_rows(4u * m, quad);
        let r_next = four_rows(4u * m, quad + 1u);
        let a0 = masked(at, m, (t + 1u) * n);
        let a1 = masked(at + 1u, m, (t + 2u) * n);
        let a2 = masked(at + 2u, m, (t + 3u) * n);
        let a3 = masked(at + 3u, m, (t + 4u) * n);
        lo = mat4x4<f32>(times(lo[0], a0, r), times(lo[1], a1, r), times(lo[2], a2, r), times(lo[3], a3, r));
        hi = mat4x4<f32>(times(hi[0], a0, r_next), times(hi[1], a1, r_next), times(hi[2], a2, r_next), times(hi[3], a3, r_next));
      }
    }
    // These rows of A have been read.
    barrier();
    if (live) {
      for (var i = 0u; i < 4u; i++) {
        scratch[at + i + quad * ROWS] = lo[i];
        scratch[at + i + (quad + 1u) * ROWS] = hi[i];
        store_contents(contents + R + t + i, quad, lo[i]);
        store_contents(contents + R + t + i, quad + 1u, hi[i]);
      }
    }
  }
}

// Those of columns 4 quad .. 4 quad + 3 of a row that meet a content.
fn store_contents(row_at: u32, quad: u32, x: vec4<f32>) {
  if (CONTENT_STRIDE == 1u) {
    scratch[row_at + quad * ROWS] = x;
    return;
  }
  // Half of a vec4.
  let to = row_at + quad / 2u * ROWS;
  let first = quad % 2u * 2u;
  scratch[to][first] = x[CONTENT_OFFSET];
  scratch[to][first + 1u] = x[CONTENT_OFFSET + 2u];
}
