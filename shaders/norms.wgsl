// 1 / sqrt(sum x^2 + 1e-6) of the rows of q, e and k that are normalised, for the NORM_TOKENS tokens of a workgroup
// of THREADS threads (which the pass names), 16 threads a row.

override NORM_COUNT: u32 = (2u + FACTORS) * NORM_TOKENS;
override NORM_PARTS: u32 = THREADS;
// (Where nothing is normalised, both may be of length 1.)
var<workgroup> norms: array<f32, NORM_COUNT>;
var<workgroup> partial: array<f32, NORM_PARTS>;

fn inverse_norm(number: u32, t: u32) -> f32 {
  return norms[number * NORM_TOKENS + t % NORM_TOKENS];
}

// For `count` tokens from row `first` of the bindings. Ends with a barrier.
fn compute_norms(first: u32, count: u32, h: u32, lid: u32) {
  let lane = lid % 16u;
  for (var start = 0u; start < NORM_COUNT; start += THREADS / 16u) {
    let row = start + lid / 16u;
    let number = row / NORM_TOKENS;
    let t = row % NORM_TOKENS;
    var sum = 0.0;
    if (row < NORM_COUNT && t < count && (number != NORM_E || READ_0 == VECTOR_E)) {
      for (var d = lane; d < K; d += 16u) {
        let x = norm_operand(number, first + t, h, d);
        sum = fma(x, x, sum);
      }
    }
    partial[lid] = sum;
    workgroupBarrier();
    if (lane == 0u && row < NORM_COUNT) {
      var total = 0.0;
      for (var i = 0u; i < 16u; i++) {
        total += partial[lid + i];
      }
      norms[row] = 1.0 / sqrt(total + NORM_EPSILON);
    }
    workgroupBarrier();
  }
}
