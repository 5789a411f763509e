// Decode: a few tokens of many sequences, each with its state in a slot of a pool; one dispatch, the state
// read once and written once.
//
// A workgroup holds K rows of up to 128 columns of one state in registers. For each token, S^ = Diag(alpha) S, all
// the reads y_i = b_i^T S^ and z = q^T S^ are taken in one pass, the sub-steps follow by linearity,
//
//   u_0 = z_0 - y_0,   u_1 = z_1 - y_1 - (b_1 . a_0) u_0,
//   o = scale (z + (q . a_0) u_0 + (q . a_1) u_1),   S = S^ + a_0 u_0^T + a_1 u_1^T
//
// (for EDA: a_0 = gamma e, b_0 = e, z_0 = 0; a_1 = beta k, b_1 = k, z_1 = v). Rules with several factors a token
// (DeltaProduct) go through the registers once a factor.

// Two batch rows an entry, each as (row, slot of its state in the binding); plus RESET where the row starts
// from zero, negative for padding.
@group(0) @binding(1) var<uniform> slots: array<vec4<i32>, 1024>;
const RESET = 0x40000000;

const THREADS = 256u;
override LANES: u32 = 32u;             // threads across the columns, 4 each; 4 to 32
override GROUPS: u32 = 256u / LANES;   // threads down the channels
override KG: u32 = 16u;                // channels of each, at most 32
override PADDED: u32 = GROUPS * KG;
override COLUMNS: u32 = LANES * 4u;

// Vectors of the token, over channels.
var<workgroup> alpha: array<f32, PADDED>;
var<workgroup> query: array<f32, PADDED>;
var<workgroup> read_0: array<f32, PADDED>;
var<workgroup> read_1: array<f32, PADDED>;
var<workgroup> write_0: array<f32, PADDED>;
var<workgroup> write_1: array<f32, PADDED>;
// Partial sums: y_0, y_1, z for four columns, and the three dot products. The upper half of the groups hands
// its sums to the lower half, whose sums are then added up.
var<workgroup> partial_reads: array<vec4<f32>, 384>;  // [3][GROUPS / 2][LANES]
var<workgroup> partial_dots: array<vec4<f32>, GROUPS>;
var<workgroup> reads_sum: array<vec4<f32>, 96>;       // [3][LANES]
var<workgroup> dots_sum: vec4<f32>;
override NORM_COUNT: u32 = 2u + FACTORS;
var<workgroup> norms: array<f32, NORM_COUNT>;
var<workgroup> sums: array<f32, 256>;

fn inverse_norm(number: u32, t: u32) -> f32 {
  return norms[number];
}

fn compute_norms(token: u32, h: u32, lid: u32) {
  let lane = lid % 16u;
  for (var start = 0u; start < NORM_COUNT; start += THREADS / 16u) {
    let number = start + lid / 16u;
    var sum = 0.0;
    if (number < NORM_COUNT && (number != NORM_E || READ_0 == VECTOR_E)) {
      for (var d = lane; d < K; d += 16u) {
        let x = norm_operand(number, token, h, d);
        sum = fma(x, x, sum);
      }
    }
    sums[lid] = sum;
    workgroupBarrier();
    if (lane == 0u && number < NORM_COUNT) {
      var total = 0.0;
      for (var i = 0u; i < 16u; i++) {
        total += sums[lid + i];
      }
      norms[number] = 1.0 / sqrt(total + NORM_EPSILON);
    }
    workgroupBarrier();
  }
}

// Four columns of a sub-step's content.
fn content_columns(token: u32, i: u32, h: u32, column: u32, live: u32) -> vec4<f32> {
  var z = vec4<f32>();
  for (var c = 0u; c < 4u; c++) {
    if (c < live) {
      z[c] = content_at(token, i, h, column + c);
    }
  }
  return z;
}

@compute @workgroup_size(256)
fn main(
  @builtin(workgroup_id) group: vec3<u32>,
  @builtin(num_workgroups) groups: vec3<u32>,
  @builtin(local_invocation_index) lid: u32,
) {
  let item = group_index(group, groups);
  let column_blocks = (V + COLUMNS - 1u) / COLUMNS;
  if (item >= params.row_count * params.head_count * column_blocks) {
    return;
  }
  let h = params.first_head + item / column_blocks % params.head_count;
  let entry = item / column_blocks / params.head_count;
  let row = u32(slots[entry / 2u][entry % 2u * 2u]);
  let slot = slots[entry / 2u][entry % 2u * 2u + 1u];
  let lane = lid % LANES;
  let channels = lid / LANES;
  let column = item % column_blocks * COLUMNS + lane * 4u;
  let live = min(max(V, column) - column, 4u);

  if (slot < 0) {
    for (var t = params.first_token + channels; t < params.last_token; t += GROUPS) {
      for (var c = 0u; c < live; c++) {
        o[params.o_at + ((row * params.tokens + t) * params.value_heads + h) * V + column + c] = Element(0.0);
      }
    }
    return;
  }
  let state_base =
    params.state_at + (u32(slot & (RESET - 1)) * params.value_heads + h) * K * V + column;
  let first = channels * KG;

  // Every load is issued before the first is needed.
  var s: array<vec4<f32>, 32>;
  for (var j = 0u; j < KG; j++) {
    s[j] = vec4<f32>();
    if (live > 0u && first + j < K && slot < RESET) {
      s[j] = state_load(state_base + (first + j) * V, live);
    }
  }

  for (var t = params.first_token; t < params.last_token; t++) {
    let token = row * params.tokens + t;
    if (NORMALIZE) {
      compute_norms(token, h, lid);
    }
    for (var factor = 0u; factor < FACTORS; factor++) {
      let step = factor * PATTERN;
      let last = factor + 1u == FACTORS;
      for (var d = lid; d < PADDED; d += THREADS) {
        let exists = d < K;
        var decay = 1.0;
        if (exists && factor == 0u) {
          decay = alpha_at(token, h, d);
        }
        alpha[d] = decay;
        var x = 0.0;
        if (exists && last) {
          x = query_at(token, t, h, d);
        }
        query[d] = x;
        x = 0.0;
        var a = 0.0;
        if (exists) {
          x = read_at(token, t, step, h, d);
          a = gate_at(token, step, h) * write_at(token, t, step, h, d);
        }
        read_0[d] = x;
        write_0[d] = a;
        if (PATTERN == 2u) {
          x = 0.0;
          a = 0.0;
          if (exists) {
            x = read_at(token, t, step + 1u, h, d);
            a = gate_at(token, step + 1u, h) * write_at(token, t, step + 1u, h, d);
          }
          read_1[d] = x;
          write_1[d] = a;
        }
      }
      let z_0 = content_columns(token, step, h, column, live);
      var z_1 = vec4<f32>();
      if (PATTERN == 2u) {
        z_1 = content_columns(token, step + 1u, h, column, live);
      }
      workgroupBarrier();

      // y_0, y_1 and z over this thread's channels, and the dot products over them.
      var y_0 = vec4<f32>();
      var y_1 = vec4<f32>();
      var y_q = vec4<f32>();
      var dots = vec4<f32>();
      for (var j = 0u; j < KG; j++) {
        let d = first + j;
        let decayed = s[j] * alpha[d];
        let q_d = query[d];
        let a_0 = write_0[d];
        y_0 += read_0[d] * select(decayed, s[j], UNDECAYED);
        y_q += q_d * decayed;
        dots.y += q_d * a_0;
        if (PATTERN == 2u) {
          let b_1 = read_1[d];
          y_1 += b_1 * decayed;
          dots.x += b_1 * a_0;
          dots.z += q_d * write_1[d];
        }
        s[j] = decayed;
      }
      if (lane == 0u) {
        partial_dots[channels] = dots;
      }
      if (lid >= 128u) {
        partial_reads[lid - 128u] = y_0;
        partial_reads[lid] = y_1;
        partial_reads[lid + 128u] = y_q;
      }
      workgroupBarrier();
      if (lid < 128u) {
        partial_reads[lid] += y_0;
        partial_reads[128u + lid] += y_1;
        partial_reads[256u + lid] += y_q;
      }
      workgroupBarrier();
      if (lid < 3u * LANES) {
        let at = lid / LANES * 128u + lane;
        var sum = partial_reads[at];
        for (var i = 1u; i < GROUPS / 2u; i++) {
          sum += partial_reads[at + i * LANES];
        }
        reads_sum[lid] = sum;
      } else if (lid == THREADS - 1u) {
        var sum = partial_dots[0];
        for (var i = 1u; i < GROUPS; i++) {
          sum += partial_dots[i];
        }
        dots_sum = sum;
      }
      workgroupBarrier();
      let p = dots_sum;
      let u_0 = z_0 - reads_sum[lane];
      var u_1 = vec4<f32>();
      if (PATTERN == 2u) {
        u_1 = z_1 - reads_sum[LANES + lane] - p.x * u_0;
      }
      for (var j = 0u; j < KG; j++) {
        s[j] += write_0[first + j] * u_0;
        if (PATTERN == 2u) {
          s[j] += write_1[first + j] * u_1;
        }
      }
      if (last && channels == 0u) {
        let out = params.scale * (reads_sum[2u * LANES + lane] + p.y * u_0 + p.z * u_1);
        for (var c = 0u; c < live; c++) {
          o[params.o_at + (token * params.value_heads + h) * V + column + c] = Element(out[c]);
        }
      }
      if (!last || t + 1u < params.last_token) {
        workgroupBarrier();
      }
    }
  }

  for (var j = 0u; j < KG; j++) {
    if (live > 0u && first + j < K) {
      state_store(state_base + (first + j) * V, live, s[j]);
    }
  }
}
