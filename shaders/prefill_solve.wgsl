// Prefill, pass 3 of 5, parallel over chunks and heads: T = (I + L)^-1 in place of L, and A T in place of A.
//
// L is strictly lower triangular. The 16x16 diagonal blocks are inverted by substitution; below them, column
// block by column block, X_ij = -X_ii sum_{j <= m < i} L_im X_mj. (A product of powers of L would need fewer
// steps but amplifies rounding when gates are near 1 and keys repeat.)

@group(0) @binding(12) var<storage, read_write> scratch: array<f32>;

const BLOCK = 16u;
override BLOCKS: u32 = R / 16u;
override TOKEN_BLOCKS: u32 = C / 16u;

var<workgroup> left: array<f32, 256>;
var<workgroup> right: array<f32, 256>;
var<workgroup> inverse_columns: array<f32, 2048>; // [row 16][block 8, column 16]

@compute @workgroup_size(256)
fn main(
  @builtin(workgroup_id) group: vec3<u32>,
  @builtin(num_workgroups) groups: vec3<u32>,
  @builtin(local_invocation_index) lid: u32,
) {
  let item = group_index(group, groups);
  if (item >= params.chunk_count * params.head_count) {
    return;
  }
  let base = scratch_base(item / params.head_count, item % params.head_count) + INVERSE;
  let masked = base - INVERSE + MASKED;
  let ty = lid / BLOCK;
  let tx = lid % BLOCK;

  // The diagonal blocks, eight at a time: one thread solves for one column.
  for (var start = 0u; start < BLOCKS; start += 8u) {
    let block = start + lid / BLOCK;
    let live = lid < 128u && block < BLOCKS;
    let corner = base + block * BLOCK * (R + 1u);
    if (live) {
      for (var r = 0u; r < BLOCK; r++) {
        var x = select(0.0, 1.0, r == tx);
        for (var m = tx; m < r; m++) {
          x = fma(-scratch[corner + r * R + m], inverse_columns[m * 128u + lid], x);
        }
        inverse_columns[r * 128u + lid] = x;
      }
    }
    // Every column has read its block of L before any of them is overwritten.
    storageBarrier();
    workgroupBarrier();
    if (live) {
      for (var r = 0u; r < BLOCK; r++) {
        scratch[corner + r * R + tx] = select(0.0, inverse_columns[r * 128u + lid], r >= tx);
      }
    }
  }
  storageBarrier();
  workgroupBarrier();

  for (var j = 0u; j < BLOCKS; j++) {
    for (var i = j + 1u; i < BLOCKS; i++) {
      var sum = 0.0;
      for (var m = j; m < i; m++) {
        left[lid] = scratch[base + (i * BLOCK + ty) * R + m * BLOCK + tx];
        right[lid] = scratch[base + (m * BLOCK + ty) * R + j * BLOCK + tx];
        workgroupBarrier();
        for (var x = 0u; x < BLOCK; x++) {
          sum = fma(left[ty * BLOCK + x], right[x * BLOCK + tx], sum);
        }
        workgroupBarrier();
      }
      left[lid] = scratch[base + (i * BLOCK + ty) * R + i * BLOCK + tx];
      right[lid] = sum;
      workgroupBarrier();
      var x_ij = 0.0;
      for (var x = 0u; x <= ty; x++) {
        x_ij = fma(-left[ty * BLOCK + x], right[x * BLOCK + tx], x_ij);
      }
      scratch[base + (i * BLOCK + ty) * R + j * BLOCK + tx] = x_ij;
      storageBarrier();
      workgroupBarrier();
    }
  }

  // A T, 16 tokens by 16 sub-steps at a time. A row of A sees the sub-steps of its own token block and of those
  // before; column blocks go left to right, so that what is overwritten is not needed any more.
  for (var i = 0u; i < TOKEN_BLOCKS; i++) {
    let seen = (i + 1u) * substeps();
    for (var j = 0u; j < seen; j++) {
      var sum = 0.0;
      for (var m = j; m < seen; m++) {
        left[lid] = scratch[masked + (i * BLOCK + ty) * R + m * BLOCK + tx];
        right[lid] = scratch[base + (m * BLOCK + ty) * R + j * BLOCK + tx];
        workgroupBarrier();
        for (var x = 0u; x < BLOCK; x++) {
          sum = fma(left[ty * BLOCK + x], right[x * BLOCK + tx], sum);
        }
        workgroupBarrier();
      }
      scratch[masked + (i * BLOCK + ty) * R + j * BLOCK + tx] = sum;
    }
  }
}
