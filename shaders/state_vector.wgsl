// The pool of states, where V is a multiple of 4 and its slice is aligned: four columns a load.

@group(0) @binding(11) var<storage, read_write> state: array<vec4<f32>>;  // [slots, HV, K, V / 4]

// Four columns of element `i` (a multiple of 4); `live` of them exist.
fn state_load(i: u32, live: u32) -> vec4<f32> {
  return state[i / 4u];
}

fn state_store(i: u32, live: u32, x: vec4<f32>) {
  state[i / 4u] = x;
}
