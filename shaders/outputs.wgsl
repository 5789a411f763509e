// The outputs.

@group(0) @binding(9) var<storage, read_write> o: array<Element>;  // [tokens, HV, V]
