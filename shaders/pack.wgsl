// Gathers beta, gamma, A_log or dt_bias into scratch memory, where they do not already lie in one buffer and
// would need more bindings than every device grants: `tokens` values from q_at to scratch_at.

@group(0) @binding(2) var<storage, read> source: array<f32>;
@group(0) @binding(12) var<storage, read_write> scratch: array<f32>;

@compute @workgroup_size(256)
fn main(
  @builtin(workgroup_id) group: vec3<u32>,
  @builtin(num_workgroups) groups: vec3<u32>,
  @builtin(local_invocation_index) lid: u32,
) {
  let i = group_index(group, groups) * 256u + lid;
  if (i < params.tokens) {
    scratch[params.scratch_at + i] = source[params.q_at + i];
  }
}
