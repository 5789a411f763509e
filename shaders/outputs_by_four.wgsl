// Stands in for outputs.wgsl where values_by_four.wgsl stands in for values.wgsl; o too starts at a multiple of 4 elements.

@group(0) @binding(9) var<storage, read_write> o: array<Four>;

fn o_store_four(row: u32, c: u32, x: vec4<f32>) {
  if (c < V) {
    o[(params.o_at + row + c) / 4u] = Four(x);
  }
}
