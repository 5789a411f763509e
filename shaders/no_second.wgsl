// Stands in for second.wgsl where the rule has no second operand, to spare a binding.

fn x2_stored(i: u32) -> Element {
  return Element();
}
fn x2_load(i: u32) -> f32 {
  return 0.0;
}
fn x2_stored_four(row: u32, d: u32, size: u32) -> vec4<Element> {
  return vec4<Element>();
}
fn x2_load_four(row: u32, d: u32, size: u32) -> vec4<f32> {
  return vec4<f32>();
}
