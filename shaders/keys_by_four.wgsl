// Stands in for keys.wgsl where K is a multiple of 4 and each of these operands starts at a multiple of 4 elements:
// four neighbouring channels are then one load instead of four.

alias Four = vec4<Element>;
alias Stored = vec4<Element>;
@group(0) @binding(2) var<storage, read> q: array<Four>;
@group(0) @binding(3) var<storage, read> k: array<Four>;
@group(0) @binding(4) var<storage, read> x1: array<Four>;
@group(0) @binding(6) var<storage, read> g: array<Four>;

fn existing(d: u32) -> u32 {
  if (ALL_CHANNELS) {
    return d;
  }
  return min(d, K - 4u);
}

fn q_load(i: u32) -> f32 {
  let at = params.q_at + i;
  return f32(q[at / 4u][at % 4u]);
}
fn q_stored_four(row: u32, d: u32) -> Stored {
  return q[(params.q_at + row + existing(d)) / 4u];
}
fn q_load_four(row: u32, d: u32) -> vec4<f32> {
  return vec4<f32>(q_stored_four(row, d));
}

fn k_load(i: u32) -> f32 {
  let at = params.k_at + i;
  return f32(k[at / 4u][at % 4u]);
}
fn k_stored_four(row: u32, d: u32) -> Stored {
  return k[(params.k_at + row + existing(d)) / 4u];
}
fn k_load_four(row: u32, d: u32) -> vec4<f32> {
  return vec4<f32>(k_stored_four(row, d));
}

fn x1_load(i: u32) -> f32 {
  let at = params.x1_at + i;
  return f32(x1[at / 4u][at % 4u]);
}
fn x1_stored_four(row: u32, d: u32) -> Stored {
  return x1[(params.x1_at + row + existing(d)) / 4u];
}
fn x1_load_four(row: u32, d: u32) -> vec4<f32> {
  return vec4<f32>(x1_stored_four(row, d));
}

fn g_stored(i: u32) -> Element {
  let at = params.g_at + i;
  return g[at / 4u][at % 4u];
}
fn g_load(i: u32) -> f32 {
  return f32(g_stored(i));
}
fn g_stored_four(row: u32, d: u32) -> Stored {
  return g[(params.g_at + row + existing(d)) / 4u];
}
fn g_load_four(row: u32, d: u32) -> vec4<f32> {
  return vec4<f32>(g_stored_four(row, d));
}
