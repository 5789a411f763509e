// The value-side operand, an element at a time. v_load_four takes the number of a row's first element and a column c, and gives
// columns c .. c + 3 of that row; where a column is not there, something else of the row stands in.

@group(0) @binding(8) var<storage, read> v: array<Element>;  // [tokens * FACTORS, HV, V]

fn v_stored(i: u32) -> Element {
  return v[params.v_at + i];
}
fn v_stored_four(row: u32, c: u32) -> vec4<Element> {
  let at = vec4<u32>(params.v_at + row) + min(vec4<u32>(c, c + 1u, c + 2u, c + 3u), vec4<u32>(V - 1u));
  return vec4<Element>(v[at.x], v[at.y], v[at.z], v[at.w]);
}
fn v_load_four(row: u32, c: u32) -> vec4<f32> {
  return vec4<f32>(v_stored_four(row, c));
}
