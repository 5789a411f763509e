// beta, gamma, A_log and dt_bias, always float32, in one binding.

@group(0) @binding(7) var<storage, read> gates: array<f32>;

fn gates_load(i: u32) -> f32 {
  return gates[i];
}
