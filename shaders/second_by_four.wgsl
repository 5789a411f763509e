// Stands in for second.wgsl where keys_by_four.wgsl or values_by_four.wgsl stands in for the other text of that side.

@group(0) @binding(5) var<storage, read> x2: array<Four>;

fn x2_stored(i: u32) -> Element {
  let at = params.x2_at + i;
  return x2[at / 4u][at % 4u];
}
fn x2_load(i: u32) -> f32 {
  return f32(x2_stored(i));
}
fn x2_stored_four(row: u32, d: u32, size: u32) -> vec4<Element> {
  return x2[(params.x2_at + row + min(d, size - 4u)) / 4u];
}
fn x2_load_four(row: u32, d: u32, size: u32) -> vec4<f32> {
  return vec4<f32>(x2_stored_four(row, d, size));
}
