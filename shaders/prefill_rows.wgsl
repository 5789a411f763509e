// Prefill, pass 1 of 5, parallel over chunks and heads: the decayed rows of each chunk.
//
// Decay factors are running products of alpha, never exp of a difference: each is at most 1, -inf (alpha = 0)
// needs no special case, and nothing cancels.

@group(0) @binding(12) var<storage, read_write> scratch: array<f32>;

const THREADS = 128u;
override NORM_COUNT: u32 = (2u + FACTORS) * C;
var<workgroup> norms: array<f32, NORM_COUNT>;
var<workgroup> sums: array<f32, 128>;

fn inverse_norm(number: u32, t: u32) -> f32 {
  return norms[number * C + t];
}

// 1 / sqrt(sum x^2 + 1e-6) for every row that is normalised, 16 threads a row.
fn compute_norms(first: u32, count: u32, h: u32, lid: u32, base: u32) {
  let lane = lid % 16u;
  for (var start = 0u; start < NORM_COUNT; start += THREADS / 16u) {
    let row = start + lid / 16u;
    let number = row / C;
    let t = row % C;
    let wanted = row < NORM_COUNT && t < count && (number != NORM_E || READ_0 == VECTOR_E);
    var sum = 0.0;
    if (wanted) {
      for (var d = lane; d < K; d += 16u) {
        let x = norm_operand(number, first + t, h, d);
        sum = fma(x, x, sum);
      }
    }
    sums[lid] = sum;
    workgroupBarrier();
    if (lane == 0u && row < NORM_COUNT) {
      var total = 0.0;
      for (var i = 0u; i < 16u; i++) {
        total += sums[lid + i];
      }
      let inverse = 1.0 / sqrt(total + NORM_EPSILON);
      norms[row] = inverse;
      scratch[base + NORMS + row] = inverse;
    }
    workgroupBarrier();
  }
}

@compute @workgroup_size(128)
fn main(
  @builtin(workgroup_id) group: vec3<u32>,
  @builtin(num_workgroups) groups: vec3<u32>,
  @builtin(local_invocation_index) lid: u32,
) {
  let item = group_index(group, groups);
  if (item >= params.chunk_count * params.head_count) {
    return;
  }
  let chunk = item / params.head_count;
  let head = item % params.head_count;
  let h = params.first_head + head;
  let first = table[chunk].x;
  let count = table[chunk].y;
  let base = scratch_base(chunk, head);
  let n = substeps();

  if (NORMALIZE) {
    compute_norms(first, count, h, lid, base);
  }

  for (var d = lid; d < KP; d += THREADS) {
    let channel = d < K;

    // Forward: decay from the start of the chunk to each token.
    var from_start = 1.0;
    for (var t = 0u; t < C; t++) {
      let live = channel && t < count;
      let token = first + t;
      let before = from_start;
      if (live) {
        from_start *= alpha_at(token, h, d);
      }
      for (var i = 0u; i < n; i++) {
        var b = 0.0;
        if (live) {
          b = read_at(token, t, i, h, d) * select(from_start, before, UNDECAYED && i == 0u);
        }
        scratch[base + READS + (t * n + i) * KP + d] = b;
      }
      var query = 0.0;
      if (live) {
        query = params.scale * query_at(token, t, h, d) * from_start;
      }
      scratch[base + QUERIES + t * KP + d] = query;
    }
    scratch[base + WHOLE_DECAY + d] = from_start;

    // Backward: decay from each token to the end of the chunk.
    var to_end = 1.0;
    for (var back = 0u; back < C; back++) {
      let t = C - 1u - back;
      let live = channel && t < count;
      let token = first + t;
      for (var i = 0u; i < n; i++) {
        var a = 0.0;
        if (live) {
          a = gate_at(token, i, h) * write_at(token, t, i, h, d) * to_end;
        }
        scratch[base + WRITES + (t * n + i) * KP + d] = a;
      }
      if (live) {
        to_end *= alpha_at(token, h, d);
      }
    }
  }
}
