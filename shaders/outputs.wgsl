// The outputs.

@group(0) @binding(9) var<storage, read_write> o: array<Element>;  // [tokens, HV, V]

// Those of columns c .. c + 3 that are there, of the row that starts at element `row`.
fn o_store_four(row: u32, c: u32, x: vec4<f32>) {
  let to = params.o_at + row + c;
  if (c < V) { o[to] = Element(x.x); }
  if (c + 1u < V) { o[to + 1u] = Element(x.y); }
  if (c + 2u < V) { o[to + 2u] = Element(x.z); }
  if (c + 3u < V) { o[to + 3u] = Element(x.w); }
}
