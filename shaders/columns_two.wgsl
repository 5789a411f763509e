// Stands in for columns_two_apart.wgsl where V is a multiple of 2 and the states start at a multiple of 2 elements: a
// thread's two columns are side by side, one load and one store for both.

const WIDTH = 2u;
const MOST_CHANNELS = 64u;
alias Columns = vec2<f32>;
alias StoredColumns = vec2<StateElement>;

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
  var z = Columns();
  if (is_column(column)) {
    z = Columns(content_at(token, i, h, column), content_at(token, i, h, column + 1u));
  }
  return z;
}

fn outputs_store(row: u32, column: u32, x: Columns) {
  if (is_column(column)) {
    o_store(row + column, x.x);
    o_store(row + column + 1u, x.y);
  }
}
