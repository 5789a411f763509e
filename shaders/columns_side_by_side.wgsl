// With columns_two.wgsl or columns_four.wgsl: the states' columns WIDTH at a time.

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
