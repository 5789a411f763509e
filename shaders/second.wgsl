// The rule's second own operand: b (RWKV-7, [tokens, H, K]) or w (GDN-2, [tokens, HV, V]).

@group(0) @binding(5) var<storage, read> x2: array<Element>;

fn x2_load(i: u32) -> f32 {
  return f32(x2[params.x2_at + i]);
}
