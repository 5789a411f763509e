// Prefill, where sequences are cut into segments that are scanned at the same time: between the scan's two runs, the
// states in which the segments start. Sequential over the segments of a piece of a sequence, parallel over pieces, heads
// and blocks of four value columns:
//
//   S_0 = what the piece continues,   S_(i+1) = M_i S_i + N_i
//
// The first run has found M and N of all segments but the last. N of a segment lies in the slot of the next, where the
// state takes its place; M in the same slot, transposed, so that neighbouring threads, which work on neighbouring rows,
// read neighbouring words.

@group(0) @binding(1) var<storage, read> table: array<vec4<u32>>;
@group(0) @binding(10) var<storage, read> initial: array<f32>;     // [N, HV, K, V]
@group(0) @binding(11) var<storage, read> state: array<f32>;       // [N, HV, K, V]
@group(0) @binding(12) var<storage, read_write> slots: array<f32>; // [slots, HV, K, V], behind it [slots, HV, K, K]

// A row each, at least K.
override THREADS: u32 = 128u;
// (What loops that are written out have as a number.) M is read so many columns at a time, those of the next time while these are used; the first, and N, before the state is known.
const AHEAD = 32u;
override SPAN: u32 = (K + AHEAD - 1u) / AHEAD * AHEAD;

var<workgroup> s: array<vec4<f32>, SPAN>;

// The table's entries: (first slot, segments, state, source).
const SOURCE_INITIAL = 1u;
const SOURCE_CARRIED = 2u;

@compute @workgroup_size(THREADS)
fn main(
  @builtin(workgroup_id) group: vec3<u32>,
  @builtin(num_workgroups) groups: vec3<u32>,
  @builtin(local_invocation_index) lid: u32,
) {
  let item = group_index(group, groups);
  let blocks = (V + 3u) / 4u;
  if (item >= params.piece_count * params.head_count * blocks) {
    return;
  }
  let column = item % blocks * 4u;
  let h = params.first_head + item / blocks % params.head_count;
  let entry = table[params.piece_at + item / blocks / params.head_count];
  let row = min(lid, K - 1u);

  var x = vec4<f32>();
  let origin = ((entry.z * params.value_heads + h) * K + row) * V + column;
  for (var c = 0u; c < 4u; c++) {
    if (column + c < V) {
      if (entry.w == SOURCE_INITIAL) {
        x[c] = initial[params.initial_at + origin + c];
      } else if (entry.w == SOURCE_CARRIED) {
        x[c] = state[params.state_at + origin + c];
      }
    }
  }
  for (var i = lid; i < SPAN; i += THREADS) {
    s[i] = vec4<f32>();
  }

  for (var segment = 0u; segment < entry.y; segment++) {
    let slot = (entry.x + segment) * params.value_heads + h;
    let at = params.scratch_at + (slot * K + row) * V + column;
    if (segment > 0u) {
      let transition = params.transition_at + slot * K * K + row;
      var m: array<f32, AHEAD>;
      for (var y = 0u; y < 32u; y++) {  // unrolled
        m[y] = slots[transition + min(y, K - 1u) * K];
      }
      var n: vec4<f32>;
      for (var c = 0u; c < 4u; c++) {  // unrolled
        n[c] = select(0.0, slots[at + min(c, V - 1u - column)], column + c < V);
      }
      workgroupBarrier();
      if (lid < K) {
        s[lid] = x;
      }
      workgroupBarrier();
      x = n;
      for (var j = 0u; j < SPAN; j += AHEAD) {
        var next: array<f32, AHEAD>;
        for (var y = 0u; y < 32u; y++) {  // unrolled
          next[y] = slots[transition + min(j + AHEAD + y, K - 1u) * K];
        }
        for (var y = 0u; y < 32u; y++) {  // unrolled
          x = fma(vec4<f32>(m[y]), s[j + y], x);
        }
        m = next;
      }
    }
    if (lid < K) {
      for (var c = 0u; c < 4u; c++) {
        if (column + c < V) {
          slots[at + c] = x[c];
        }
      }
    }
  }
}
