// Decode: a few tokens of many sequences, each with its state in a slot of a pool; one dispatch, the state
// read once and written once.
//
// A workgroup holds K rows of COLUMNS columns of one state in registers, a thread one column of KG rows. For each token, S^ = Diag(alpha) S, all
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

@group(0) @binding(11) var<storage, read_write> state: array<f32>;  // [slots, HV, K, V]

override THREADS: u32 = 128u;
override COLUMNS: u32 = 32u;
override GROUPS: u32 = THREADS / COLUMNS;
override KG: u32 = 32u;                // channels of each group, a multiple of 4, at most 64
override KP4: u32 = GROUPS * KG / 4u;  // vec4s in a padded key vector

// Vectors of the token, as vec4s over channels.
var<workgroup> alpha: array<vec4<f32>, KP4>;
var<workgroup> query: array<vec4<f32>, KP4>;
var<workgroup> read_0: array<vec4<f32>, KP4>;
var<workgroup> read_1: array<vec4<f32>, KP4>;
var<workgroup> write_0: array<vec4<f32>, KP4>;
var<workgroup> write_1: array<vec4<f32>, KP4>;
// Partial sums of the thread groups: y_0, y_1, z and the three dot products.
var<workgroup> partial_reads: array<vec3<f32>, THREADS>;
var<workgroup> partial_dots: array<vec3<f32>, GROUPS>;
override NORM_COUNT: u32 = 2u + FACTORS;
var<workgroup> norms: array<f32, NORM_COUNT>;
var<workgroup> sums: array<f32, THREADS>;

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

@compute @workgroup_size(THREADS)
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
  let column = item % column_blocks * COLUMNS + lid % COLUMNS;
  let thread_group = lid / COLUMNS;
  let live = column < V;

  if (slot < 0) {
    for (var t = params.first_token + thread_group; t < params.last_token; t += GROUPS) {
      if (live) {
        o[params.o_at + ((row * params.tokens + t) * params.value_heads + h) * V + column] = Element(0.0);
      }
    }
    return;
  }
  let state_base =
    params.state_at + (u32(slot & (RESET - 1)) * params.value_heads + h) * K * V + column;
  let first_channel = thread_group * KG;

  var s: array<vec4<f32>, 16>;
  for (var j = 0u; j < KG / 4u; j++) {
    var x = vec4<f32>();
    if (live && slot < RESET) {
      for (var i = 0u; i < 4u; i++) {
        let channel = first_channel + j * 4u + i;
        if (channel < K) {
          x[i] = state[state_base + channel * V];
        }
      }
    }
    s[j] = x;
  }

  for (var t = params.first_token; t < params.last_token; t++) {
    let token = row * params.tokens + t;
    if (NORMALIZE) {
      compute_norms(token, h, lid);
    }
    var out = 0.0;
    for (var factor = 0u; factor < FACTORS; factor++) {
      let step = factor * PATTERN;
      let last = factor + 1u == FACTORS;
      workgroupBarrier();
      for (var d = lid; d < GROUPS * KG; d += THREADS) {
        var x = array<f32, 6>();
        x[0] = 1.0;
        if (d < K) {
          if (factor == 0u) {
            x[0] = alpha_at(token, h, d);
          }
          if (last) {
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
      workgroupBarrier();

      // y_0, y_1 and z over this thread's channels, and the dot products over this group's.
      var reads = vec3<f32>();
      var dots = vec3<f32>();
      for (var j = 0u; j < KG / 4u; j++) {
        let at = thread_group * (KG / 4u) + j;
        let b0 = read_0[at];
        let b1 = read_1[at];
        let qs = query[at];
        let a0 = write_0[at];
        let decayed = s[j] * alpha[at];
        reads += vec3<f32>(dot(b0, select(decayed, s[j], UNDECAYED)), dot(b1, decayed), dot(qs, decayed));
        dots += vec3<f32>(dot(b1, a0), dot(qs, a0), dot(qs, write_1[at]));
        s[j] = decayed;
      }
      partial_reads[lid] = reads;
      if (lid % COLUMNS == 0u) {
        partial_dots[thread_group] = dots;
      }
      workgroupBarrier();
      let c = lid % COLUMNS;
      var y = partial_reads[c];
      var p = partial_dots[0];
      for (var i = 1u; i < GROUPS; i++) {
        y += partial_reads[c + i * COLUMNS];
        p += partial_dots[i];
      }
      var u0 = -y.x;
      var u1 = 0.0;
      if (live) {
        u0 += content_at(token, step, h, column);
        if (PATTERN == 2u) {
          u1 = content_at(token, step + 1u, h, column) - y.y - p.x * u0;
        }
      }
      out = params.scale * (y.z + p.y * u0 + p.z * u1);
      for (var j = 0u; j < KG / 4u; j++) {
        let at = thread_group * (KG / 4u) + j;
        s[j] += write_0[at] * u0 + write_1[at] * u1;
      }
    }
    if (live && thread_group == 0u) {
      o[params.o_at + (token * params.value_heads + h) * V + column] = Element(out);
    }
  }

  for (var j = 0u; j < KG / 4u; j++) {
    for (var i = 0u; i < 4u; i++) {
      let channel = first_channel + j * 4u + i;
      if (live && channel < K) {
        state[state_base + channel * V] = s[j][i];
      }
    }
  }
}
