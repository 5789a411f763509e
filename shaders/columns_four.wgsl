// Stands in for columns_two_apart.wgsl where V is a multiple of 4 and the states start at a multiple of 4 elements: a
// thread's four columns are side by side, one load and one store for all.

const WIDTH = 4u;
const MOST_CHANNELS = 32u;
alias Columns = vec4<f32>;
alias StoredColumns = vec4<StateElement>;

@group(0) @binding(11) var<storage, read_write> state: array<StoredColumns>;

fn first_column(lane: u32) -> u32 {
  return WIDTH * lane;
}

fn state_load(row: u32, column: u32) -> StoredColumns {
  var s = StoredColumns();
  if (is_column(column)) {
    s = state[(row + column) / WIDTH];
  }
  return s;
}

fn state_store(row: u32, column: u32, s: StoredColumns) {
  if (is_column(column)) {
    state[(row + column) / WIDTH] = s;
  }
}

fn contents_at(token: u32, i: u32, h: u32, column: u32) -> Columns {
  return content_four_at(token, i, h, column);
}

fn outputs_store(row: u32, column: u32, x: Columns) {
  o_store_four(row, column, x);
}
