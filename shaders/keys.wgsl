// The key-side operands. x1 is the rule's own vector: e (EDA), p (Comba), b (GDN-2), a (RWKV-7).

@group(0) @binding(2) var<storage, read> q: array<Element>;   // [tokens, H, K]
@group(0) @binding(3) var<storage, read> k: array<Element>;   // [tokens * FACTORS, H, K]
@group(0) @binding(4) var<storage, read> x1: array<Element>;  // [tokens, H, K] (GDN-2: [tokens, HV, K])
@group(0) @binding(6) var<storage, read> g: array<Element>;   // [tokens, HV, K] or [tokens, HV]
