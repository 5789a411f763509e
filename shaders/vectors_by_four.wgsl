// Stands in for vectors.wgsl where keys_by_four.wgsl stands in for keys.wgsl: four channels a thread, so that a quarter of
// the threads do with one load for each vector and write whole vec4s.

var<workgroup> dot_terms: array<vec3<f32>, KP4>;

fn stage_vectors(token: u32, t: u32, factor: u32, h: u32, lid: u32) {
  let step = factor * PATTERN;
  for (var j = lid; j < KP4; j += THREADS) {
    let d = 4u * j;
    let b0 = read_four_at(token, t, step, h, d);
    let a0 = gate_at(token, step, h) * write_four_at(token, t, step, h, d);
    var b1 = vec4<f32>();
    var a1 = vec4<f32>();
    if (PATTERN == 2u) {
      b1 = read_four_at(token, t, step + 1u, h, d);
      a1 = gate_at(token, step + 1u, h) * write_four_at(token, t, step + 1u, h, d);
    }
    var qs = vec4<f32>();
    if (factor + 1u == FACTORS) {
      qs = query_four_at(token, t, h, d);
    }
    var decay = vec4<f32>(1.0);
    if (factor == 0u) {
      decay = alpha_four_at(token, h, d);
    }
    alpha[j] = decay;
    query[j] = qs;
    read_0[j] = b0;
    read_1[j] = b1;
    write_0[j] = a0;
    write_1[j] = a1;
    // (All six are at hand here; later they would have to be read again.)
    dot_terms[j] = vec3<f32>(dot(b1, a0), dot(qs, a0), dot(qs, a1));
  }
}

fn dot_term(which: u32, j: u32) -> f32 {
  return dot_terms[j][which];
}
