// Stands in for gates.wgsl where the rule has no gates, to spare a binding.

fn gates_load(i: u32) -> f32 {
  return 1.0;
}
