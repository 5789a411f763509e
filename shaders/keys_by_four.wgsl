// Stands in for keys.wgsl where K is a multiple of 4 and each of these operands starts at a multiple of 4 elements:
// four neighbouring channels are then one load instead of four.

alias Four = vec4<Element>;
@group(0) @binding(2) var<storage, read> q: array<Four>;
@group(0) @binding(3) var<storage, read> k: array<Four>;
@group(0) @binding(4) var<storage, read> x1: array<Four>;
@group(0) @binding(6) var<storage, read> g: array<Four>;

fn q_load(i: u32) -> f32 {
  let at = params.q_at + i;
  return f32(q[at / 4u][at % 4u]);
}
fn q_load_four(row: u32, d: u32) -> vec4<f32> {
  return vec4<f32>(q[(params.q_at + row + min(d, K - 4u)) / 4u]);
}

fn k_load(i: u32) -> f32 {
  let at = params.k_at + i;
  return f32(k[at / 4u][at % 4u]);
}
fn k_load_four(row: u32, d: u32) -> vec4<f32> {
  return vec4<f32>(k[(params.k_at + row + min(d, K - 4u)) / 4u]);
}

fn x1_load(i: u32) -> f32 {
  let at = params.x1_at + i;
  return f32(x1[at / 4u][at % 4u]);
}
fn x1_load_four(row: u32, d: u32) -> vec4<f32> {
  return vec4<f32>(x1[(params.x1_at + row + min(d, K - 4u)) / 4u]);
}

fn g_load(i: u32) -> f32 {
  let at = params.g_at + i;
  return f32(g[at / 4u][at % 4u]);
}
fn g_load_four(row: u32, d: u32) -> vec4<f32> {
  return vec4<f32>(g[(params.g_at + row + min(d, K - 4u)) / 4u]);
}
