// Prefill, pass 2 of 4, parallel over chunks and heads: T = (I + L)^-1 in place of L, and A T in place of A; those
// of their columns that meet a content once more where the scan wants them.
//
// L is strictly lower triangular. Its 16x16 diagonal blocks are inverted by substitution, a thread a column; then
// neighbours merge, [T1 0; X T2] with X = -T2 (L21 T1), for blocks of 16, 32, … (A product of powers of L would
// need fewer steps but amplifies rounding when gates are near 1 and keys repeat.) The triangle lies in workgroup memory
// where it fits, else it stays in scratch memory. L21 T1 goes, transposed, where L21 was, or, in scratch memory, to the
// upper half: there a thread has several tiles of it, and L21 is needed by others until all are done.

@group(0) @binding(12) var<storage, read_write> scratch: array<vec4<f32>>;

const THREADS = 128u;
const BLOCK = 16u;
override QUADS: u32 = R / 4u;
override IN_WORKGROUP: bool = true;    // R <= 64
override A_IN_WORKGROUP: bool = true;  // where it fits as well

// Columns 4 quad .. 4 quad + 3 of L's rows 4 quad .. R - 1 and of A's rows A_SKIP quad .. C - 1, which are all that is not
// zero, and after them those of the next quad.
override A_ROWS: u32 = C;  // 0 where A is not there
override A_SKIP: u32 = 2u;
override WORDS: u32 = QUADS * (R + A_ROWS) - (4u + A_SKIP) / 2u * QUADS * (QUADS - 1u);
var<workgroup> triangle: array<vec4<f32>, WORDS>;
var<private> inverse: u32;

fn place(row: u32, quad: u32) -> u32 {
  let skip = select(4u, 4u + A_SKIP, row >= R);
  return quad * (R + A_ROWS) - (4u + A_SKIP) / 2u * quad * (quad - 1u) + row - skip * quad;
}

// Whether columns 4 quad .. 4 quad + 3 of a row of L, or below it of A, hold anything.
fn is_there(row: u32, quad: u32) -> bool {
  return select((row + 1u - R) * substeps() > 4u * quad, row >= 4u * quad, row < R);
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

// Four rows of a column, of which those are kept that are not above the diagonal's quad.
fn put_four(row: u32, column: u32, x: vec4<f32>) {
  if (row / 4u >= column / 4u) {
    put_one(row, column, x.x);
    put_one(row + 1u, column, x.y);
    put_one(row + 2u, column, x.z);
    put_one(row + 3u, column, x.w);
  }
}

// L21 T1, transposed: columns 4 quad .. 4 quad + 3 of two rows, and of rows 4 m .. 4 m + 3.
fn put_product(row: u32, quad: u32, x: vec4<f32>, x_next: vec4<f32>) {
  for (var c = 0u; c < 4u; c++) {  // unrolled
    if (IN_WORKGROUP) {
      let to = place(row / 4u * 4u + c, quad);
      triangle[to][row % 4u] = x[c];
      triangle[to][row % 4u + 1u] = x_next[c];
    } else {
      let to = inverse + row / 4u * ROWS + 4u * quad + c;
      scratch[to][row % 4u] = x[c];
      scratch[to][row % 4u + 1u] = x_next[c];
    }
  }
}
fn fetch_product(m: u32, quad: u32) -> mat4x4<f32> {
  if (IN_WORKGROUP) {
    return four_rows(4u * m, quad);
  }
  return four_rows(4u * quad, m);
}

// What was put is seen, and what was got is no longer needed, by everybody.
fn barrier() {
  if (!IN_WORKGROUP || !A_IN_WORKGROUP) {
    storageBarrier();
  }
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

// Columns 4 m .. 4 m + 3 of a row of A (row R + t) in scratch memory, of which it sees those before (t + 1) n.
fn masked(row: u32, m: u32) -> vec4<f32> {
  let column = vec4<u32>(4u * m, 4u * m + 1u, 4u * m + 2u, 4u * m + 3u);
  return select(vec4<f32>(), scratch[inverse + m * ROWS + row], column < vec4<u32>((row + 1u - R) * substeps()));
}

fn fetch_a(row: u32, m: u32) -> vec4<f32> {
  if (A_IN_WORKGROUP) {
    return select(vec4<f32>(), fetch(row, m), is_there(row, m));
  }
  return masked(row, m);
}

// A row of T or A T in columns 8 pair .. 8 pair + 7, and those of them that meet a content.
fn store(contents: u32, row: u32, pair: u32, lo: vec4<f32>, hi: vec4<f32>) {
  let to = 2u * pair * ROWS + row;
  scratch[inverse + to] = lo;
  scratch[inverse + to + ROWS] = hi;
  if (CONTENT_STRIDE == 1u) {
    scratch[contents + to] = lo;
    scratch[contents + to + ROWS] = hi;
  } else {
    scratch[contents + pair * ROWS + row] =
      vec4<f32>(lo[CONTENT_OFFSET], lo[CONTENT_OFFSET + 2u], hi[CONTENT_OFFSET], hi[CONTENT_OFFSET + 2u]);
  }
}

// A row of A T where A was, or out at once.
fn put_outputs(contents: u32, row: u32, quad: u32, lo: vec4<f32>, hi: vec4<f32>) {
  if (!A_IN_WORKGROUP) {
    store(contents, row, quad / 2u, lo, hi);
    return;
  }
  if (is_there(row, quad)) { put(row, quad, lo); }
  if (is_there(row, quad + 1u)) { put(row, quad + 1u, hi); }
}

@compute @workgroup_size(128)
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
    // Several loads are under way before the first is waited for.
    let rows = R + A_ROWS;
    for (var start = lid; start < rows * QUADS; start += 8u * THREADS) {
      var x: array<vec4<f32>, 8>;
      for (var u = 0u; u < 8u; u++) {  // unrolled
        let i = start + u * THREADS;
        if (i < rows * QUADS && is_there(i % rows, i / rows)) {
          x[u] = scratch[inverse + i / rows * ROWS + i % rows];
        }
      }
      for (var u = 0u; u < 8u; u++) {  // unrolled
        let i = start + u * THREADS;
        if (i < rows * QUADS && is_there(i % rows, i / rows)) {
          let column = vec4<u32>(i / rows * 4u) + vec4<u32>(0u, 1u, 2u, 3u);
          let seen = select((i % rows + 1u - R) * n, R, i % rows < R);
          put(i % rows, i / rows, select(vec4<f32>(), x[u], column < vec4<u32>(seen)));
        }
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
      put_four(r, column, x[0]);
      put_four(r + 4u, column, x[1]);
      put_four(r + 8u, column, x[2]);
      put_four(r + 12u, column, x[3]);
    }
  }
  barrier();

  // Blocks of `size` rows merge two by two; a tile is 2 x 4 elements of X. (In workgroup memory a thread has one at most.)
  for (var size = BLOCK; size < R; size *= 2u) {
    let across = size / 4u;
    let down = size / 2u;
    let tiles = (R + size) / (2u * size) * down * across;
    var x = vec4<f32>();
    var x_next = vec4<f32>();
    for (var tile = lid; tile < tiles; tile += THREADS) {
      let first = tile / (down * across) * 2u * size;
      let row = first + size + tile / across % down * 2u;
      let quad = first / 4u + tile % across;
      if (row < R) {
        // L21 T1: T1 is lower triangular.
        x = vec4<f32>();
        x_next = vec4<f32>();
        for (var m = quad; m < (first + size) / 4u; m++) {
          let r = four_rows(4u * m, quad);
          x = times(x, fetch(row, m), r);
          x_next = times(x_next, fetch(row + 1u, m), r);
        }
        if (!IN_WORKGROUP) {
          put_product(row, quad, x, x_next);
        }
      }
    }
    let first = lid / (down * across) * 2u * size;
    let row = first + size + lid / across % down * 2u;
    let quad = first / 4u + lid % across;
    let live = IN_WORKGROUP && lid < tiles && row < R;
    barrier();
    if (IN_WORKGROUP) {
      if (live) {
        put_product(row, quad, x, x_next);
      }
      barrier();
    }
    for (var tile = lid; tile < tiles; tile += THREADS) {
      let first = tile / (down * across) * 2u * size;
      let row = first + size + tile / across % down * 2u;
      let quad = first / 4u + tile % across;
      if (row < R) {
        // X = -T2 times that: T2 is lower triangular.
        x = vec4<f32>();
        x_next = vec4<f32>();
        for (var m = (first + size) / 4u; m <= row / 4u; m++) {
          let p = fetch_product(m, quad);
          x -= fetch(row, m) * p;
          x_next -= fetch(row + 1u, m) * p;
        }
        if (!IN_WORKGROUP) {
          put(row, quad, x);
          put(row + 1u, quad, x_next);
        }
      }
    }
    barrier();
    if (IN_WORKGROUP) {
      if (live) {
        put(row, quad, x);
        put(row + 1u, quad, x_next);
      }
      barrier();
    }
  }

  if (!IN_WORKGROUP) {
    // T without what has been left in its upper half.
    for (var i = lid; i < R * QUADS / 2u; i += THREADS) {
      let row = i % R;
      let quad = i / R * 2u;
      let lo = select(vec4<f32>(), fetch(row, quad), is_there(row, quad));
      let hi = select(vec4<f32>(), fetch(row, quad + 1u), is_there(row, quad + 1u));
      store(contents, row, quad / 2u, lo, hi);
    }
    barrier();
  }
  // A T, 2 tokens by 8 columns a thread, as many tokens at a time as make whole rows.
  let across = R / 8u;
  let down = THREADS / across;
  for (var start = 0u; start < C; start += 2u * down) {
    let t = start + lid / across * 2u;
    let quad = lid % across * 2u;
    let live = lid < across * down && t < C;
    var lo = vec4<f32>();
    var hi = vec4<f32>();
    var lo_next = vec4<f32>();
    var hi_next = vec4<f32>();
    if (live) {
      let end = ((t + 2u) * n + 3u) / 4u;
      for (var m = quad; m < end; m++) {
        let a = fetch_a(R + t, m);
        let a_next = fetch_a(R + t + 1u, m);
        let r = four_rows(4u * m, quad);
        lo = times(lo, a, r);
        lo_next = times(lo_next, a_next, r);
        // (The upper four of the columns have nothing in the first rows.)
        if (m > quad) {
          let r_next = four_rows(4u * m, quad + 1u);
          hi = times(hi, a, r_next);
          hi_next = times(hi_next, a_next, r_next);
        }
      }
    }
    // These rows of A have been read.
    barrier();
    if (live) {
      put_outputs(contents, R + t, quad, lo, hi);
      put_outputs(contents, R + t + 1u, quad, lo_next, hi_next);
    }
  }

  // Out with what is in workgroup memory.
  if (IN_WORKGROUP) {
    barrier();
    let rows = R + A_ROWS;
    for (var i = lid; i < rows * QUADS / 2u; i += THREADS) {
      let row = i % rows;
      let quad = i / rows * 2u;
      var lo = vec4<f32>();
      var hi = vec4<f32>();
      if (is_there(row, quad)) { lo = fetch(row, quad); }
      if (is_there(row, quad + 1u)) { hi = fetch(row, quad + 1u); }
      store(contents, row, quad / 2u, lo, hi);
    }
  }
}
