// The two columns of a state that a thread of decode has, an element at a time: for any V and states that start anywhere.
// They lie LANES apart, so that threads side by side reach elements side by side. (columns_side_by_side.wgsl provides the same.)

@group(0) @binding(11) var<storage, read_write> state: array<StateElement>;  // [slots, HV, K, V]

override APART: u32 = LANES;

// Counted from the workgroup's first.
fn first_column(lane: u32) -> u32 {
  return lane;
}

// Columns c and c + APART of the row that starts at element `row`. Those that are not there are zero, and not written.
fn state_load(row: u32, c: u32) -> vec2<f32> {
  var s = vec2<f32>();
  if (is_column(c)) {
    s.x = f32(state[row + c]);
  }
  if (is_column(c + APART)) {
    s.y = f32(state[row + c + APART]);
  }
  return s;
}

fn state_store(row: u32, c: u32, s: vec2<f32>) {
  if (is_column(c)) {
    state[row + c] = StateElement(s.x);
  }
  if (is_column(c + APART)) {
    state[row + c + APART] = StateElement(s.y);
  }
}
