// The value-side operands and the states.

@group(0) @binding(8) var<storage, read> v: array<Element>;         // [tokens * FACTORS, HV, V]
@group(0) @binding(10) var<storage, read> initial: array<f32>;      // [N, HV, K, V]
