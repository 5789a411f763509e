// Stands in for columns_two_apart.wgsl where V is a multiple of 4 and the states start at a multiple of 4 elements: a
// thread's four columns are side by side, one load and one store for all.

const WIDTH = 4u;
const MOST_CHANNELS = 32u;
alias Columns = vec4<f32>;
alias StoredColumns = vec4<StateElement>;

fn contents_at(token: u32, i: u32, h: u32, column: u32) -> Columns {
  return content_four_at(token, i, h, column);
}

fn outputs_store(row: u32, column: u32, x: Columns) {
  o_store_four(row, column, x);
}
