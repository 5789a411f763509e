// A thread of decode has two value columns, LANES apart, and reads and writes them an element at a time: any V will do, and
// states that start anywhere. (columns_two.wgsl and columns_four.wgsl provide the same for columns side by side.)

const WIDTH = 2u;               // columns a thread
const MOST_CHANNELS = 64u;      // channels a thread, at most
alias Columns = vec2<f32>;      // something of each of a thread's columns
alias StoredColumns = vec2<StateElement>;

@group(0) @binding(11) var<storage, read_write> state: array<StateElement>;  // [slots, HV, K, V]

// The first column of a thread, counted from the workgroup's first.
fn first_column(lane: u32) -> u32 {
  return lane;
}

// Below, `column` is a thread's first column, and a row starts at element `row` of its operand. Columns that are not there
// are zero, and not written.
fn state_load(row: u32, column: u32) -> StoredColumns {
  var s = StoredColumns();
  if (is_column(column)) {
    s.x = state[row + column];
  }
  if (is_column(column + LANES)) {
    s.y = state[row + column + LANES];
  }
  return s;
}

fn state_store(row: u32, column: u32, s: StoredColumns) {
  if (is_column(column)) {
    state[row + column] = s.x;
  }
  if (is_column(column + LANES)) {
    state[row + column + LANES] = s.y;
  }
}

// Contents of sub-step `i`.
fn contents_at(token: u32, i: u32, h: u32, column: u32) -> Columns {
  var z = Columns();
  if (is_column(column)) {
    z.x = content_at(token, i, h, column);
  }
  if (is_column(column + LANES)) {
    z.y = content_at(token, i, h, column + LANES);
  }
  return z;
}

fn outputs_store(row: u32, column: u32, x: Columns) {
  if (is_column(column)) {
    o_store(row + column, x.x);
  }
  if (is_column(column + LANES)) {
    o_store(row + column + LANES, x.y);
  }
}
