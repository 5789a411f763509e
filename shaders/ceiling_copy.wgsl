// The copy ceiling: what this adapter's memory gives to a kernel that does nothing else. Each invocation has
// four loads on their way before it stores; a workgroup moves 16 KiB.

@group(0) @binding(0) var<storage, read> input: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read_write> output: array<vec4<f32>>;

@compute @workgroup_size(256)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let at = (group.y * groups.x + group.x) * 1024u + lane;
    let a = input[at];
    let b = input[at + 256u];
    let c = input[at + 512u];
    let d = input[at + 768u];
    output[at] = a;
    output[at + 256u] = b;
    output[at + 512u] = c;
    output[at + 768u] = d;
}
