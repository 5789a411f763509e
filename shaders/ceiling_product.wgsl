// The float32 product ceiling, within WebGPU's default limits: c = aᵀ b of square matrices, row-major, `size` a
// multiple of 128. A workgroup of 256 makes a 128×128 tile of c from tiles of 16 rows in workgroup memory
// (16 KiB), an invocation 8×8 values of it in registers. Both operands are read along their rows; that the
// left one is transposed changes nothing about the work.

struct Size {
    size: u32,
}

@group(0) @binding(0) var<uniform> params: Size;
@group(0) @binding(1) var<storage, read> a: array<vec4<f32>>; // [size, size / 4]
@group(0) @binding(2) var<storage, read> b: array<vec4<f32>>; // [size, size / 4]
@group(0) @binding(3) var<storage, read_write> c: array<vec4<f32>>; // [size, size / 4]

var<workgroup> tile_a: array<vec4<f32>, 512>; // [16, 128 / 4]
var<workgroup> tile_b: array<vec4<f32>, 512>; // [16, 128 / 4]

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let stride = params.size / 4u;
    // Rows and columns of c: four from here, four 64 further on, so that neighbours read neighbouring words.
    let down = lane / 16u;
    let along = lane % 16u;
    // What this invocation loads of each tile: one vec4 in row `lane / 32`, one 8 rows below.
    let from_a = (lane / 32u) * stride + group.y * 32u + lane % 32u;
    let from_b = (lane / 32u) * stride + group.x * 32u + lane % 32u;
    var next_a0 = a[from_a];
    var next_a1 = a[from_a + 8u * stride];
    var next_b0 = b[from_b];
    var next_b1 = b[from_b + 8u * stride];
    var left0 = vec4<f32>();
    var right0 = vec4<f32>();
    var left1 = vec4<f32>();
    var right1 = vec4<f32>();
    var left2 = vec4<f32>();
    var right2 = vec4<f32>();
    var left3 = vec4<f32>();
    var right3 = vec4<f32>();
    var left4 = vec4<f32>();
    var right4 = vec4<f32>();
    var left5 = vec4<f32>();
    var right5 = vec4<f32>();
    var left6 = vec4<f32>();
    var right6 = vec4<f32>();
    var left7 = vec4<f32>();
    var right7 = vec4<f32>();
    for (var row = 16u; row <= params.size; row += 16u) {
        workgroupBarrier();
        tile_a[lane] = next_a0;
        tile_a[lane + 256u] = next_a1;
        tile_b[lane] = next_b0;
        tile_b[lane + 256u] = next_b1;
        workgroupBarrier();
        if (row < params.size) {
            next_a0 = a[from_a + row * stride];
            next_a1 = a[from_a + (row + 8u) * stride];
            next_b0 = b[from_b + row * stride];
            next_b1 = b[from_b + (row + 8u) * stride];
        }
        for (var k = 0u; k < 16u; k += 1u) {
            let a0 = tile_a[k * 32u + down];
            let a1 = tile_a[k * 32u + 16u + down];
            let b0 = tile_b[k * 32u + along];
            let b1 = tile_b[k * 32u + 16u + along];
            left0 += a0.x * b0;
            right0 += a0.x * b1;
            left1 += a0.y * b0;
            right1 += a0.y * b1;
            left2 += a0.z * b0;
            right2 += a0.z * b1;
            left3 += a0.w * b0;
            right3 += a0.w * b1;
            left4 += a1.x * b0;
            right4 += a1.x * b1;
            left5 += a1.y * b0;
            right5 += a1.y * b1;
            left6 += a1.z * b0;
            right6 += a1.z * b1;
            left7 += a1.w * b0;
            right7 += a1.w * b1;
        }
    }
    let to = (group.y * 128u + down * 4u) * stride + group.x * 32u + along;
    c[to] = left0;
    c[to + 16u] = right0;
    c[to + 1u * stride] = left1;
    c[to + 1u * stride + 16u] = right1;
    c[to + 2u * stride] = left2;
    c[to + 2u * stride + 16u] = right2;
    c[to + 3u * stride] = left3;
    c[to + 3u * stride + 16u] = right3;
    c[to + 64u * stride] = left4;
    c[to + 64u * stride + 16u] = right4;
    c[to + 65u * stride] = left5;
    c[to + 65u * stride + 16u] = right5;
    c[to + 66u * stride] = left6;
    c[to + 66u * stride + 16u] = right6;
    c[to + 67u * stride] = left7;
    c[to + 67u * stride + 16u] = right7;
}
