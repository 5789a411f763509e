// What the passes write.

@group(0) @binding(9) var<storage, read_write> o: array<Element>;   // [tokens, HV, V]
@group(0) @binding(11) var<storage, read_write> state: array<f32>;  // [N or slots, HV, K, V]
