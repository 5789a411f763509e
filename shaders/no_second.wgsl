// Stands in for second.wgsl where the rule has no second operand, to spare a binding.

fn x2_load(i: u32) -> f32 {
  return 0.0;
}
