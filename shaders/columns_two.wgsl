// Stands in for columns_two_apart.wgsl where V is a multiple of 2 and the states start at a multiple of 2 elements: a
// thread's two columns are side by side, one load and one store for both.

const WIDTH = 2u;
const MOST_CHANNELS = 64u;
alias Columns = vec2<f32>;
alias StoredColumns = vec2<StateElement>;

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
