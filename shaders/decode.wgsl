// Decode: a few tokens of many sequences, each with its state in a slot of a pool; one dispatch, the state
// read once and written once.
//
// A workgroup holds K rows of COLUMNS columns of one state in registers, a thread KG rows of WIDTH columns, LANES
// apart. For each token, S^ = Diag(alpha) S, all the reads y_i = b_i^T S^ and z = q^T S^ are taken in one pass, the
// sub-steps follow by linearity,
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

@group(0) @binding(11) var<storage, read_write> state: array<StateElement>;  // [slots, HV, K, V]

override THREADS: u32 = 256u;
override COLUMNS: u32 = 64u;
override WIDTH: u32 = 2u;              // 1 or 2
override LANES: u32 = COLUMNS / WIDTH;
override GROUPS: u32 = THREADS / LANES;
override KG: u32 = 16u;                // channels of each group, a multiple of 4, at most 64
override KP4: u32 = GROUPS * KG / 4u;  // vec4s in a padded key vector

// Vectors of the token, as vec4s over channels.
var<workgroup> alpha: array<vec4<f32>, KP4>;
var<workgroup> query: array<vec4<f32>, KP4>;
var<workgroup> read_0: array<vec4<f32>, KP4>;
var<workgroup> read_1: array<vec4<f32>, KP4>;
var<workgroup> write_0: array<vec4<f32>, KP4>;
var<workgroup> write_1: array<vec4<f32>, KP4>;
// Partial sums of the thread groups: y_0, y_1, z and the three dot products.
override READ_COUNT: u32 = THREADS * WIDTH;
var<workgroup> partial_reads: array<vec3<f32>, READ_COUNT>;  // [WIDTH][GROUPS][LANES]
var<workgroup> partial_dots: array<vec3<f32>, GROUPS>;
override NORM_TOKENS: u32 = 1u;

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
  let column = item % column_blocks * COLUMNS + lane;
  let thread_group = lid / LANES;
  // (Known when the pipeline is built, as is K below, where the sizes fit.)
  let whole = V % COLUMNS == 0u;
  let live = whole || column < V;
  let live_next = WIDTH == 2u && (whole || column + LANES < V);

  if (slot < 0) {
    for (var t = params.first_token + thread_group; t < params.last_token; t += GROUPS) {
      let at = params.o_at + ((row * params.tokens + t) * params.value_heads + h) * V + column;
      if (live) {
        o[at] = Element(0.0);
      }
      if (live_next) {
        o[at + LANES] = Element(0.0);
      }
    }
    return;
  }
  let state_base =
    params.state_at + (u32(slot & (RESET - 1)) * params.value_heads + h) * K * V + column;
  let first_channel = thread_group * KG;

  // All loads are under way before anything waits for one.
  let every = GROUPS * KG == K;
  var s: array<vec4<f32>, 16>;
  var s_next: array<vec4<f32>, 16>;
  if (slot < RESET) {
    for (var j = 0u; j < KG / 4u; j++) {
      for (var i = 0u; i < 4u; i++) {
        let channel = first_channel + j * 4u + i;
        if (live && (every || channel < K)) {
          s[j][i] = f32(state[state_base + channel * V]);
        }
        if (live_next && (every || channel < K)) {
          s_next[j][i] = f32(state[state_base + channel * V + LANES]);
        }
      }
    }
  }

  for (var t = params.first_token; t < params.last_token; t++) {
    let token = row * params.tokens + t;
    if (NORMALIZE) {
      compute_norms(token, 1u, h, lid);
    }
    var out = vec2<f32>();
    for (var factor = 0u; factor < FACTORS; factor++) {
      let step = factor * PATTERN;
      let last = factor + 1u == FACTORS;
      // (Early, since what needs them waits for everybody.)
      var z0 = vec2<f32>();
      var z1 = vec2<f32>();
      if (live) {
        z0.x = content_at(token, step, h, column);
        if (PATTERN == 2u) {
          z1.x = content_at(token, step + 1u, h, column);
        }
      }
      if (live_next) {
        z0.y = content_at(token, step, h, column + LANES);
        if (PATTERN == 2u) {
          z1.y = content_at(token, step + 1u, h, column + LANES);
        }
      }
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

      // y_0, y_1 and z over this thread's channels.
      var reads = vec3<f32>();
      var reads_next = vec3<f32>();
      for (var j = 0u; j < KG / 4u; j++) {
        let at = thread_group * (KG / 4u) + j;
        let b0 = read_0[at];
        let b1 = read_1[at];
        let qs = query[at];
        let d = s[j] * alpha[at];
        reads += vec3<f32>(dot(b0, select(d, s[j], UNDECAYED)), dot(b1, d), dot(qs, d));
        s[j] = d;
        if (WIDTH == 2u) {
          let e = s_next[j] * alpha[at];
          reads_next += vec3<f32>(dot(b0, select(e, s_next[j], UNDECAYED)), dot(b1, e), dot(qs, e));
          s_next[j] = e;
        }
      }
      partial_reads[lid] = reads;
      if (WIDTH == 2u) {
        partial_reads[(THREADS + lid) % READ_COUNT] = reads_next;
      }
      // The dot products of the vectors are the same for all columns: a thread for each and each group's channels.
      if (lid < 3u * GROUPS) {
        let first = lid / 3u * (KG / 4u);
        var sum = 0.0;
        for (var j = first; j < first + KG / 4u; j++) {
          let left = select(query[j], read_1[j], lid % 3u == 0u);
          sum += dot(left, select(write_0[j], write_1[j], lid % 3u == 2u));
        }
        partial_dots[lid / 3u][lid % 3u] = sum;
      }
      workgroupBarrier();
      var y = partial_reads[lane];
      var y_next = partial_reads[(THREADS + lane) % READ_COUNT];
      var p = partial_dots[0];
      for (var i = 1u; i < GROUPS; i++) {
        y += partial_reads[lane + i * LANES];
        if (WIDTH == 2u) {
          y_next += partial_reads[(THREADS + lane + i * LANES) % READ_COUNT];
        }
        p += partial_dots[i];
      }
      let u0 = z0 - vec2<f32>(y.x, y_next.x);
      var u1 = vec2<f32>();
      if (PATTERN == 2u) {
        u1 = z1 - vec2<f32>(y.y, y_next.y) - p.x * u0;
      }
      out = params.scale * (vec2<f32>(y.z, y_next.z) + p.y * u0 + p.z * u1);
      for (var j = 0u; j < KG / 4u; j++) {
        let at = thread_group * (KG / 4u) + j;
        let a0 = write_0[at];
        let a1 = write_1[at];
        s[j] += a0 * u0.x + a1 * u1.x;
        if (WIDTH == 2u) {
          s_next[j] += a0 * u0.y + a1 * u1.y;
        }
      }
    }
    if (thread_group == 0u) {
      let at = params.o_at + (token * params.value_heads + h) * V + column;
      if (live) {
        o[at] = Element(out.x);
      }
      if (live_next) {
        o[at + LANES] = Element(out.y);
      }
    }
  }

  for (var j = 0u; j < KG / 4u; j++) {
    for (var i = 0u; i < 4u; i++) {
      let channel = first_channel + j * 4u + i;
      if (live && (every || channel < K)) {
        state[state_base + channel * V] = StateElement(s[j][i]);
      }
      if (live_next && (every || channel < K)) {
        state[state_base + channel * V + LANES] = StateElement(s_next[j][i]);
      }
    }
  }
}
