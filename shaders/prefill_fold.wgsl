// Prefill, pass 4 of 5, parallel over chunks, heads and blocks of FB key channels: what a chunk does to the state,
//
//   W = T B in place of B,    Q - A W = Q - (A T) B in place of Q
//
// so that the sequential pass needs neither the triangle nor U for its outputs. Channels are independent: a
// workgroup reads its channels of B once and writes the same channels.

@group(0) @binding(12) var<storage, read_write> scratch: array<vec4<f32>>;

override FB: u32 = 32u;         // channels of this workgroup, R FB <= 2048
override NTX: u32 = FB / 4u;
override NTY: u32 = 128u / NTX;
override ROW_TILES: u32 = (R + C + NTY - 1u) / NTY;  // at most 8
override RIGHT: u32 = R * NTX;
override CHANNEL_BLOCKS: u32 = (KP + FB - 1u) / FB;

var<workgroup> right: array<vec4<f32>, RIGHT>;  // [R][NTX]

@compute @workgroup_size(128)
fn main(
  @builtin(workgroup_id) group: vec3<u32>,
  @builtin(num_workgroups) groups: vec3<u32>,
  @builtin(local_invocation_index) lid: u32,
) {
  let item = group_index(group, groups);
  if (item >= params.chunk_count * params.head_count * CHANNEL_BLOCKS) {
    return;
  }
  let chunk = item / CHANNEL_BLOCKS / params.head_count;
  let head = item / CHANNEL_BLOCKS % params.head_count;
  let base = scratch_base(chunk, head) / 4u;
  let tx = lid % NTX;
  let ty = lid / NTX;
  let channel = item % CHANNEL_BLOCKS * FB + tx * 4u;
  let live = channel < KP;
  let column = base + min(channel, KP - 4u) / 4u;

  for (var row = ty; row < R; row += NTY) {
    right[row * NTX + tx] = scratch[column + (READS + row * KP) / 4u];
  }
  workgroupBarrier();

  // Rows of T, then of A T below it.
  var acc: array<vec4<f32>, 8>;
  var at: array<u32, 8>;
  for (var i = 0u; i < ROW_TILES; i++) {
    acc[i] = vec4<f32>();
    at[i] = base + INVERSE / 4u + min(ty + i * NTY, R + C - 1u) * (R / 4u);
  }
  add_product(&acc, &at, ROW_TILES, R / 4u, tx, R);

  for (var i = 0u; i < ROW_TILES; i++) {
    let row = ty + i * NTY;
    if (live && row < R + C) {
      let to = column + (READS + row * KP) / 4u;
      if (row < R) {
        scratch[to] = acc[i];
      } else {
        scratch[to] -= acc[i];
      }
    }
  }
}
