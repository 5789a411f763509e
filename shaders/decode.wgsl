// Decode: a few tokens of many sequences, each with its state in a slot of a pool; one dispatch, the state
// read once and written once.
//
// A workgroup holds K rows of COLUMNS columns of one state in registers, a thread KG rows of two columns
// (columns_apart.wgsl or columns_side_by_side.wgsl). For each token, S^ = Diag(alpha) S, all the reads y_i = b_i^T S^ and
// z = q^T S^ are taken in one pass, the sub-steps follow by linearity,
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

override THREADS: u32 = 128u;
override COLUMNS: u32 = 64u;
override LANES: u32 = COLUMNS / 2u;
override GROUPS: u32 = THREADS / LANES;
override KG: u32 = 32u;                // channels of each group, a multiple of 4, at most 64
override KP4: u32 = GROUPS * KG / 4u;  // vec4s in a padded key vector

// Vectors of the token, as vec4s over channels.
var<workgroup> alpha: array<vec4<f32>, KP4>;
var<workgroup> query: array<vec4<f32>, KP4>;
var<workgroup> read_0: array<vec4<f32>, KP4>;
var<workgroup> read_1: array<vec4<f32>, KP4>;
var<workgroup> write_0: array<vec4<f32>, KP4>;
var<workgroup> write_1: array<vec4<f32>, KP4>;
// What each four channels add to b_1 . a_0, q . a_0 and q . a_1.
var<workgroup> dots: array<vec3<f32>, KP4>;
// Partial sums of the thread groups: y_0, y_1, z and those dot products.
var<workgroup> partial_0: array<vec2<f32>, THREADS>;  // [GROUPS][LANES]
var<workgroup> partial_1: array<vec2<f32>, THREADS>;
var<workgroup> partial_z: array<vec2<f32>, THREADS>;
var<workgroup> partial_dots: array<vec3<f32>, GROUPS>;
override NORM_TOKENS: u32 = 1u;

// (Known when the pipeline is built, as is the next, where the sizes fit.)
fn is_column(c: u32) -> bool {
  return V % COLUMNS == 0u || c < V;
}

fn is_row(channel: u32) -> bool {
  return GROUPS * KG == K || channel < K;
}

// Contents of a thread's columns in sub-step `i`; `c` is the first of them.
fn contents_at(token: u32, i: u32, h: u32, c: u32) -> vec2<f32> {
  var z = vec2<f32>();
  if (is_column(c)) {
    z.x = content_at(token, i, h, c);
  }
  if (is_column(c + APART)) {
    z.y = content_at(token, i, h, c + APART);
  }
  return z;
}

fn outputs_store(token: u32, h: u32, c: u32, x: vec2<f32>) {
  let at = params.o_at + (token * params.value_heads + h) * V + c;
  if (is_column(c)) {
    o[at] = Element(x.x);
  }
  if (is_column(c + APART)) {
    o[at + APART] = Element(x.y);
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
  let lane = lid % LANES;
  let column = item % column_blocks * COLUMNS + first_column(lane);
  let thread_group = lid / LANES;

  if (slot < 0) {
    for (var t = params.first_token + thread_group; t < params.last_token; t += GROUPS) {
      outputs_store(row * params.tokens + t, h, column, vec2<f32>());
    }
    return;
  }
  let state_base = params.state_at + (u32(slot & (RESET - 1)) * params.value_heads + h) * K * V;
  let first_channel = thread_group * KG;

  // All loads are under way before anything waits for one.
  var s: array<vec2<f32>, 64>;
  if (slot < RESET) {
    for (var j = 0u; j < KG / 4u; j++) {
      for (var i = 0u; i < 4u; i++) {
        let channel = first_channel + j * 4u + i;
        if (is_row(channel)) {
          s[j * 4u + i] = state_load(state_base + channel * V, column);
        }
      }
    }
  }

  for (var t = params.first_token; t < params.last_token; t++) {
    let token = row * params.tokens + t;
    if (NORMALIZE) {
      compute_norms(token, 1u, h, lid);
    }
    for (var factor = 0u; factor < FACTORS; factor++) {
      let step = factor * PATTERN;
      let last = factor + 1u == FACTORS;
      // (Early, since what needs them waits for everybody.)
      let z0 = contents_at(token, step, h, column);
      var z1 = vec2<f32>();
      if (PATTERN == 2u) {
        z1 = contents_at(token, step + 1u, h, column);
      }
      if (t > params.first_token || factor > 0u) {
        // Nobody still reads the vectors before.
        workgroupBarrier();
      }
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
        if (last) {
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
        dots[j] = vec3<f32>(dot(b1, a0), dot(qs, a0), dot(qs, a1));
      }
      workgroupBarrier();

      // y_0, y_1 and z over this thread's channels.
      var y0 = vec2<f32>();
      var y1 = vec2<f32>();
      var z = vec2<f32>();
      for (var j = 0u; j < KG / 4u; j++) {
        let at = thread_group * (KG / 4u) + j;
        let decay = alpha[at];
        let b0 = read_0[at];
        let b1 = read_1[at];
        let qs = query[at];
        for (var i = 0u; i < 4u; i++) {
          let before = s[j * 4u + i];
          let d = decay[i] * before;
          y0 += b0[i] * select(d, before, UNDECAYED);
          if (PATTERN == 2u) {
            y1 += b1[i] * d;
          }
          z += qs[i] * d;
          s[j * 4u + i] = d;
        }
      }
      partial_0[lid] = y0;
      partial_1[lid] = y1;
      partial_z[lid] = z;
      // The dot products of the vectors are the same for all columns: a thread for each and each part of the channels.
      if (lid < 3u * GROUPS) {
        var sum = 0.0;
        for (var j = lid / 3u; j < KP4; j += GROUPS) {
          sum += dots[j][lid % 3u];
        }
        partial_dots[lid / 3u][lid % 3u] = sum;
      }
      workgroupBarrier();
      y0 = partial_0[lane];
      y1 = partial_1[lane];
      z = partial_z[lane];
      var p = partial_dots[0];
      for (var i = 1u; i < GROUPS; i++) {
        y0 += partial_0[lane + i * LANES];
        if (PATTERN == 2u) {
          y1 += partial_1[lane + i * LANES];
        }
        z += partial_z[lane + i * LANES];
        p += partial_dots[i];
      }
      let u0 = z0 - y0;
      var u1 = vec2<f32>();
      if (PATTERN == 2u) {
        u1 = z1 - y1 - p.x * u0;
      }
      if (thread_group == 0u && last) {
        outputs_store(token, h, column, params.scale * (z + p.y * u0 + p.z * u1));
      }
      for (var j = 0u; j < KG / 4u; j++) {
        let at = thread_group * (KG / 4u) + j;
        let a0 = write_0[at];
        let a1 = write_1[at];
        for (var i = 0u; i < 4u; i++) {
          s[j * 4u + i] += a0[i] * u0 + a1[i] * u1;
        }
      }
    }
  }

  for (var j = 0u; j < KG / 4u; j++) {
    for (var i = 0u; i < 4u; i++) {
      let channel = first_channel + j * 4u + i;
      if (is_row(channel)) {
        state_store(state_base + channel * V, column, s[j * 4u + i]);
      }
    }
  }
}
