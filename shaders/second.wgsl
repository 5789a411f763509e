// The rule's second own operand: b (RWKV-7, [tokens, H, K]) or w (GDN-2, [tokens, HV, V]).

@group(0) @binding(5) var<storage, read> x2: array<Element>;

fn x2_stored(i: u32) -> Element {
  return x2[params.x2_at + i];
}
fn x2_load(i: u32) -> f32 {
  return f32(x2_stored(i));
}
// Elements d .. d + 3 of the row of `size` elements that starts at `row`; something else of the row for those beyond it.
fn x2_stored_four(row: u32, d: u32, size: u32) -> vec4<Element> {
  let at = vec4<u32>(params.x2_at + row) + min(vec4<u32>(d, d + 1u, d + 2u, d + 3u), vec4<u32>(size - 1u));
  return vec4<Element>(x2[at.x], x2[at.y], x2[at.z], x2[at.w]);
}
fn x2_load_four(row: u32, d: u32, size: u32) -> vec4<f32> {
  return vec4<f32>(x2_stored_four(row, d, size));
}
