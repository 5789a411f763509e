// A product of rows of scratch memory with a matrix in workgroup memory, four columns a thread:
//
//   acc[i] += left[row i] right          left rows at `at[i]`, `steps` vec4 long (a multiple of 4)
//
// A left row is used by one row of threads alone, so it comes straight from memory, a group of 4 vec4 (16
// columns) ahead of the arithmetic; the right operand is `right[right_at ..]`, rows NTX vec4 apart. Tiles of NTY
// rows that lie below `lower_rows` are lower triangular: what is right of a tile's last row is skipped.


fn product_load(
  at: ptr<function, array<u32, 8>>,
  tiles: u32,
  x: u32,
  out: ptr<function, array<vec4<f32>, 32>>,
) {
  for (var i = 0u; i < tiles; i++) {
    for (var y = 0u; y < 4u; y++) {
      (*out)[i * 4u + y] = scratch[(*at)[i] + x + y];
    }
  }
}

fn product_step(
  acc: ptr<function, array<vec4<f32>, 8>>,
  left: ptr<function, array<vec4<f32>, 32>>,
  tiles: u32,
  x: u32,
  right_at: u32,
  lower_rows: u32,
) {
  for (var y = 0u; y < 4u; y++) {
    let top = right_at + (x + y) * 4u * NTX;
    let r0 = right[top];
    let r1 = right[top + NTX];
    let r2 = right[top + 2u * NTX];
    let r3 = right[top + 3u * NTX];
    for (var i = 0u; i < tiles; i++) {
      if (x * 4u < (i + 1u) * NTY || (i + 1u) * NTY > lower_rows) {
        let l = (*left)[i * 4u + y];
        (*acc)[i] = fma(vec4<f32>(l.w), r3, fma(vec4<f32>(l.z), r2, fma(vec4<f32>(l.y), r1, fma(vec4<f32>(l.x), r0, (*acc)[i]))));
      }
    }
  }
}

fn add_product(
  acc: ptr<function, array<vec4<f32>, 8>>,
  at: ptr<function, array<u32, 8>>,
  tiles: u32,
  steps: u32,
  right_at: u32,
  lower_rows: u32,
) {
  var now: array<vec4<f32>, 32>;
  var next: array<vec4<f32>, 32>;
  product_load(at, tiles, 0u, &now);
  for (var x = 0u; x < steps; x += 8u) {
    product_load(at, tiles, min(x + 4u, steps - 4u), &next);
    product_step(acc, &now, tiles, x, right_at, lower_rows);
    if (x + 4u < steps) {
      product_load(at, tiles, min(x + 8u, steps - 4u), &now);
      product_step(acc, &next, tiles, x + 4u, right_at, lower_rows);
    }
  }
}
