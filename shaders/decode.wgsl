// Decode: a few tokens of many sequences, each with its state in a slot of a pool; one dispatch, the state
// read once and written once.
//
// A workgroup takes BLOCKS blocks of COLUMNS columns of one state, one after the other. It holds the K rows of a block in
// registers, a thread KG rows of WIDTH columns. For each token, S^ = Diag(alpha) S, all the reads y_i = b_i^T S^ and
// z = q^T S^ are taken in one pass, the sub-steps follow by linearity,
//
//   u_0 = z_0 - y_0,   u_1 = z_1 - y_1 - (b_1 . a_0) u_0,
//   o = scale (z + (q . a_0) u_0 + (q . a_1) u_1),   S = S^ + a_0 u_0^T + a_1 u_1^T
//
// (for EDA: a_0 = gamma e, b_0 = e, z_0 = 0; a_1 = beta k, b_1 = k, z_1 = v). Rules with several factors a token
// (DeltaProduct) go through the registers once a factor.
//
// columns_*.wgsl say which columns are a thread's, vectors.wgsl or vectors_by_four.wgsl how vectors are loaded.

// Two batch rows an entry, each as (row, slot of its state in the binding); plus RESET where the row starts
// from zero, negative for padding.
@group(0) @binding(1) var<uniform> slots: array<vec4<i32>, 1024>;
const RESET = 0x40000000;

override THREADS: u32 = 128u;
override COLUMNS: u32 = 64u;
// More than one where ONCE alone. The next block's loads are under way while a block is finished, and the vectors are
// loaded once for all of them.
override BLOCKS: u32 = 1u;
// The dispatch has one token, of one factor. S stays as it was loaded, in half the registers where that is float16, and
// S^ is found once more for the update.
override ONCE: bool = false;
override LANES: u32 = COLUMNS / WIDTH;
override GROUPS: u32 = THREADS / LANES;
override KG: u32 = 32u;                // channels of each group, a multiple of 4, at most MOST_CHANNELS
override KG4: u32 = KG / 4u;
override KP4: u32 = GROUPS * KG4;      // vec4s in a padded key vector
override SPAN: u32 = COLUMNS * BLOCKS;

// Vectors of the token, as vec4s over channels.
var<workgroup> alpha: array<vec4<f32>, KP4>;
var<workgroup> query: array<vec4<f32>, KP4>;
var<workgroup> read_0: array<vec4<f32>, KP4>;
var<workgroup> read_1: array<vec4<f32>, KP4>;
var<workgroup> write_0: array<vec4<f32>, KP4>;
var<workgroup> write_1: array<vec4<f32>, KP4>;
// Partial sums of the thread groups, y_0, y_1 and z; those of a block are read while those of the next are written.
override PARTIALS: u32 = THREADS * min(BLOCKS, 2u);
var<workgroup> partial_0: array<Columns, PARTIALS>;  // [2][GROUPS][LANES]
var<workgroup> partial_1: array<Columns, PARTIALS>;
var<workgroup> partial_z: array<Columns, PARTIALS>;
// The vectors' three dot products, each in DOT_PARTS parts.
const DOT_PARTS = 4u;
var<workgroup> partial_dots: array<vec3<f32>, DOT_PARTS>;
override NORM_TOKENS: u32 = 1u;

// (Known when the pipeline is built where the sizes fit.)
fn is_column(c: u32) -> bool {
  return V % SPAN == 0u || c < V;
}

fn is_row(channel: u32) -> bool {
  return GROUPS * KG == K || channel < K;
}

@compute @workgroup_size(THREADS)
fn main(
  @builtin(workgroup_id) group: vec3<u32>,
  @builtin(num_workgroups) groups: vec3<u32>,
  @builtin(local_invocation_index) lid: u32,
) {
  let item = group_index(group, groups);
  let column_spans = (V + SPAN - 1u) / SPAN;
  if (item >= params.row_count * params.head_count * column_spans) {
    return;
  }
  let h = params.first_head + item / column_spans % params.head_count;
  let entry = item / column_spans / params.head_count;
  let row = u32(slots[entry / 2u][entry % 2u * 2u]);
  let slot = slots[entry / 2u][entry % 2u * 2u + 1u];
  let lane = lid % LANES;
  let thread_group = lid / LANES;
  var column = item % column_spans * SPAN + first_column(lane);

  if (slot < 0) {
    for (var t = params.first_token + thread_group; t < params.last_token; t += GROUPS) {
      for (var block = 0u; block < BLOCKS; block++) {
        outputs_store(((row * params.tokens + t) * params.value_heads + h) * V, column + block * COLUMNS, Columns());
      }
    }
    return;
  }
  let state_base = params.state_at + (u32(slot & (RESET - 1)) * params.value_heads + h) * K * V;
  let first_channel = thread_group * KG;

  // All loads are under way before anything waits for one.
  var stored: array<StoredColumns, MOST_CHANNELS>;
  var stored_next: array<StoredColumns, MOST_CHANNELS>;
  var s: array<Columns, MOST_CHANNELS>;
  if (slot < RESET) {
    for (var j = 0u; j < KG4; j++) {  // unrolled
      for (var i = 0u; i < 4u; i++) {  // unrolled
        let channel = first_channel + j * 4u + i;
        if (is_row(channel)) {
          if (ONCE) {
            stored[j * 4u + i] = state_load(state_base + channel * V, column);
          } else {
            s[j * 4u + i] = Columns(state_load(state_base + channel * V, column));
          }
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
      // (Early, since what needs them waits for everybody.)
      var z0 = contents_at(token, step, h, column);
      var z1 = Columns();
      if (PATTERN == 2u) {
        z1 = contents_at(token, step + 1u, h, column);
      }
      if (t > params.first_token || factor > 0u) {
        // Nobody still reads the vectors before.
        workgroupBarrier();
      }
      stage_vectors(token, t, factor, h, lid);
      workgroupBarrier();

      for (var block = 0u; block < BLOCKS; block++) {
        // y_0, y_1 and z over this thread's channels.
        var y0 = Columns();
        var y1 = Columns();
        var z = Columns();
        for (var j = 0u; j < KG4; j++) {  // unrolled
          let at = thread_group * KG4 + j;
          let decay = alpha[at];
          let b0 = read_0[at];
          let b1 = read_1[at];
          let qs = query[at];
          for (var i = 0u; i < 4u; i++) {  // unrolled
            var before: Columns;
            if (ONCE) {
              before = Columns(stored[j * 4u + i]);
            } else {
              before = s[j * 4u + i];
            }
            let d = decay[i] * before;
            y0 += b0[i] * select(d, before, UNDECAYED);
            if (PATTERN == 2u) {
              y1 += b1[i] * d;
            }
            z += qs[i] * d;
            if (!ONCE) {
              s[j * 4u + i] = d;
            }
          }
        }
        let half = block % 2u * THREADS;
        partial_0[half + lid] = y0;
        partial_1[half + lid] = y1;
        partial_z[half + lid] = z;
        // The dot products of the vectors are the same for all columns: a thread for each and each part.
        if (block == 0u && lid < 3u * DOT_PARTS) {
          var sum = 0.0;
          for (var j = lid / 3u; j < KP4; j += DOT_PARTS) {
            sum += dot_term(lid % 3u, j);
          }
          partial_dots[lid / 3u][lid % 3u] = sum;
        }
        var z0_next = Columns();
        var z1_next = Columns();
        if (block + 1u < BLOCKS) {
          z0_next = contents_at(token, step, h, column + COLUMNS);
          if (PATTERN == 2u) {
            z1_next = contents_at(token, step + 1u, h, column + COLUMNS);
          }
          if (slot < RESET) {
            for (var j = 0u; j < KG4; j++) {  // unrolled
              for (var i = 0u; i < 4u; i++) {  // unrolled
                let channel = first_channel + j * 4u + i;
                if (is_row(channel)) {
                  stored_next[j * 4u + i] = state_load(state_base + channel * V, column + COLUMNS);
                }
              }
            }
          }
        }
        workgroupBarrier();
        y0 = partial_0[half + lane];
        y1 = partial_1[half + lane];
        z = partial_z[half + lane];
        for (var i = 1u; i < GROUPS; i++) {
          let at = half + lane + i * LANES;
          y0 += partial_0[at];
          if (PATTERN == 2u) {
            y1 += partial_1[at];
          }
          z += partial_z[at];
        }
        var p = partial_dots[0];
        for (var i = 1u; i < DOT_PARTS; i++) {
          p += partial_dots[i];
        }
        let u0 = z0 - y0;
        var u1 = Columns();
        if (PATTERN == 2u) {
          u1 = z1 - y1 - p.x * u0;
        }
        if (thread_group == 0u && factor + 1u == FACTORS) {
          let out = params.scale * (z + p.y * u0 + p.z * u1);
          outputs_store((token * params.value_heads + h) * V, column, out);
        }
        for (var j = 0u; j < KG4; j++) {  // unrolled
          let at = thread_group * KG4 + j;
          let decay = alpha[at];
          let a0 = write_0[at];
          let a1 = write_1[at];
          for (var i = 0u; i < 4u; i++) {  // unrolled
            let change = a0[i] * u0 + a1[i] * u1;
            if (ONCE) {
              let channel = first_channel + j * 4u + i;
              if (is_row(channel)) {
                let d = decay[i] * Columns(stored[j * 4u + i]);
                state_store(state_base + channel * V, column, StoredColumns(d + change));
              }
            } else {
              s[j * 4u + i] += change;
            }
          }
        }
        if (block + 1u < BLOCKS) {
          column += COLUMNS;
          z0 = z0_next;
          z1 = z1_next;
          for (var j = 0u; j < KG4; j++) {  // unrolled
            for (var i = 0u; i < 4u; i++) {  // unrolled
              stored[j * 4u + i] = stored_next[j * 4u + i];
            }
          }
        }
      }
    }
  }

  if (!ONCE) {
    for (var j = 0u; j < KG4; j++) {  // unrolled
      for (var i = 0u; i < 4u; i++) {  // unrolled
        let channel = first_channel + j * 4u + i;
        if (is_row(channel)) {
          state_store(state_base + channel * V, column, StoredColumns(s[j * 4u + i]));
        }
      }
    }
  }
}
