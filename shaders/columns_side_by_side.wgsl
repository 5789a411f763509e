// Stands in for columns_apart.wgsl where V is even and the states start at an even element: a thread's two columns are one
// load and one store.

@group(0) @binding(11) var<storage, read_write> state: array<vec2<StateElement>>;

const APART = 1u;

fn first_column(lane: u32) -> u32 {
  return 2u * lane;
}

fn state_load(row: u32, c: u32) -> vec2<f32> {
  var s = vec2<f32>();
  if (is_column(c)) {
    s = vec2<f32>(state[(row + c) / 2u]);
  }
  return s;
}

fn state_store(row: u32, c: u32, s: vec2<f32>) {
  if (is_column(c)) {
    state[(row + c) / 2u] = vec2<StateElement>(s);
  }
}
