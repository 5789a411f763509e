// The key-side operands, an element at a time. x1 is the rule's own vector: e (EDA), p (Comba), b (GDN-2), a (RWKV-7).
//
// `.._load` takes an element's number. `.._load_four` takes the number of a row's first element and a channel d, and
// gives channels d .. d + 3 of that row; where a channel is not there, something else of the row stands in. `.._stored_four`
// gives them as they lie in memory: a conversion waits for the load. (keys_by_four.wgsl provides the same.)

alias Stored = vec4<Element>;

@group(0) @binding(2) var<storage, read> q: array<Element>;   // [tokens, H, K]
@group(0) @binding(3) var<storage, read> k: array<Element>;   // [tokens * FACTORS, H, K]
@group(0) @binding(4) var<storage, read> x1: array<Element>;  // [tokens, H, K] (GDN-2: [tokens, HV, K])
@group(0) @binding(6) var<storage, read> g: array<Element>;   // [tokens, HV, K] or [tokens, HV]

// Four neighbouring channels as places of elements of the row that starts at `row`.
fn four_places(row: u32, d: u32) -> vec4<u32> {
  return vec4<u32>(row) + min(vec4<u32>(d, d + 1u, d + 2u, d + 3u), vec4<u32>(K - 1u));
}

fn q_load(i: u32) -> f32 {
  return f32(q[params.q_at + i]);
}
fn q_stored_four(row: u32, d: u32) -> Stored {
  let at = four_places(params.q_at + row, d);
  return Stored(q[at.x], q[at.y], q[at.z], q[at.w]);
}
fn q_load_four(row: u32, d: u32) -> vec4<f32> {
  return vec4<f32>(q_stored_four(row, d));
}

fn k_load(i: u32) -> f32 {
  return f32(k[params.k_at + i]);
}
fn k_stored_four(row: u32, d: u32) -> Stored {
  let at = four_places(params.k_at + row, d);
  return Stored(k[at.x], k[at.y], k[at.z], k[at.w]);
}
fn k_load_four(row: u32, d: u32) -> vec4<f32> {
  return vec4<f32>(k_stored_four(row, d));
}

fn x1_load(i: u32) -> f32 {
  return f32(x1[params.x1_at + i]);
}
fn x1_stored_four(row: u32, d: u32) -> Stored {
  let at = four_places(params.x1_at + row, d);
  return Stored(x1[at.x], x1[at.y], x1[at.z], x1[at.w]);
}
fn x1_load_four(row: u32, d: u32) -> vec4<f32> {
  return vec4<f32>(x1_stored_four(row, d));
}

fn g_stored(i: u32) -> Element {
  return g[params.g_at + i];
}
fn g_load(i: u32) -> f32 {
  return f32(g_stored(i));
}
fn g_stored_four(row: u32, d: u32) -> Stored {
  let at = four_places(params.g_at + row, d);
  return Stored(g[at.x], g[at.y], g[at.z], g[at.w]);
}
fn g_load_four(row: u32, d: u32) -> vec4<f32> {
  return vec4<f32>(g_stored_four(row, d));
}
