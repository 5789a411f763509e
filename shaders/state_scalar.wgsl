// The pool of states, whatever V and its alignment.

@group(0) @binding(11) var<storage, read_write> state: array<f32>;  // [slots, HV, K, V]

// Four columns from element `i` on, of which `live` exist.
fn state_load(i: u32, live: u32) -> vec4<f32> {
  var x = vec4<f32>();
  for (var c = 0u; c < 4u; c++) {
    if (c < live) {
      x[c] = state[i + c];
    }
  }
  return x;
}

fn state_store(i: u32, live: u32, x: vec4<f32>) {
  for (var c = 0u; c < 4u; c++) {
    if (c < live) {
      state[i + c] = x[c];
    }
  }
}
