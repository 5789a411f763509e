// The value-side operand.

@group(0) @binding(8) var<storage, read> v: array<Element>;  // [tokens * FACTORS, HV, V]
