// Stands in for values.wgsl where V is a multiple of 4 and v starts at a multiple of 4 elements.

alias Four = vec4<Element>;
@group(0) @binding(8) var<storage, read> v: array<Four>;

fn v_stored(i: u32) -> Element {
  let at = params.v_at + i;
  return v[at / 4u][at % 4u];
}
fn v_stored_four(row: u32, c: u32) -> vec4<Element> {
  return v[(params.v_at + row + min(c, V - 4u)) / 4u];
}
fn v_load_four(row: u32, c: u32) -> vec4<f32> {
  return vec4<f32>(v_stored_four(row, c));
}
