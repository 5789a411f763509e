// The vectors of a token in decode, a channel a thread.

// Those of the sub-steps from `step` on, into workgroup memory: the decay for the token's first factor, the query
// for its last.
fn stage_vectors(token: u32, t: u32, factor: u32, h: u32, lid: u32) {
  let step = factor * PATTERN;
  for (var d = lid; d < 4u * KP4; d += THREADS) {
    var x = array<f32, 6>();
    x[0] = 1.0;
    if (d < K) {
      if (factor == 0u) {
        x[0] = alpha_at(token, h, d);
      }
      if (factor + 1u == FACTORS) {
        x[1] = query_at(token, t, h, d);
      }
      x[2] = read_at(token, t, step, h, d);
      x[4] = gate_at(token, step, h) * write_at(token, t, step, h, d);
      if (PATTERN == 2u) {
        x[3] = read_at(token, t, step + 1u, h, d);
        x[5] = gate_at(token, step + 1u, h) * write_at(token, t, step + 1u, h, d);
      }
    }
    alpha[d / 4u][d % 4u] = x[0];
    query[d / 4u][d % 4u] = x[1];
    read_0[d / 4u][d % 4u] = x[2];
    read_1[d / 4u][d % 4u] = x[3];
    write_0[d / 4u][d % 4u] = x[4];
    write_1[d / 4u][d % 4u] = x[5];
  }
}

// What channels 4j .. 4j + 3 add to b_1 . a_0, q . a_0 and q . a_1 (`which` in this order).
fn dot_term(which: u32, j: u32) -> f32 {
  let left = select(query[j], read_1[j], which == 0u);
  return dot(left, select(write_0[j], write_1[j], which == 2u));
}
