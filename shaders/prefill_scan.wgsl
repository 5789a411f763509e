// Prefill, pass 5 of 5, sequential over the chunks of a sequence, parallel over sequences, heads and blocks of
// VB value columns (columns of S are independent). Per chunk, with S in registers:
//
//   U = T Z - W S,   O = (A T) Z + (Q - A W) S       [R + C, VB]
//   S = Diag(exp G_C) S + writes^T U                 [K, VB]
//
// Every thread holds 4 columns (tx) of some rows: rows ty, ty + NTY, … of U and O; of S the channels
// 4 ty .. 4 ty + 3, then 4 NTY further on. S, Z and U pass between threads through workgroup memory, with two
// barriers a chunk.

@group(0) @binding(10) var<storage, read> initial: array<f32>;  // [N, HV, K, V]
@group(0) @binding(12) var<storage, read> scratch: array<vec4<f32>>;
@group(0) @binding(11) var<storage, read_write> state: array<f32>;  // [N, HV, K, V]

override VB: u32 = 16u;         // value columns of this workgroup, (KP + 2 R) VB <= 4096
override NTX: u32 = VB / 4u;    // threads across them
override NTY: u32 = 128u / NTX; // threads down
override ROW_TILES: u32 = (R + C + NTY - 1u) / NTY;         // at most 8
override U_TILES: u32 = (R + NTY - 1u) / NTY;
override K_TILES: u32 = (KP + 4u * NTY - 1u) / (4u * NTY);  // at most 2
// S [KP], then Z [R], then U [R], NTX vec4 a row.
override Z_AT: u32 = KP * NTX;
override U_AT: u32 = (KP + R) * NTX;
override RIGHT: u32 = (KP + 2u * R) * NTX;

var<workgroup> right: array<vec4<f32>, RIGHT>;

// Pieces follow the chunks in the table: (first chunk, chunks, state, source).
const SOURCE_ZERO = 0u;
const SOURCE_INITIAL = 1u;
const SOURCE_CARRIED = 2u;

// The contents of a chunk's sub-steps, columns `column` .. `column` + 3.
fn write_contents(chunk: u32, h: u32, column: u32, ty: u32, tx: u32) {
  let n = substeps();
  let first = table[chunk].x;
  let count = table[chunk].y;
  for (var i = 0u; i < U_TILES; i++) {
    let row = ty + i * NTY;
    if (row < R) {
      var z = vec4<f32>();
      if (row / n < count) {
        for (var c = 0u; c < 4u; c++) {
          if (column + c < V) {
            z[c] = content_at(first + row / n, row % n, h, column + c);
          }
        }
      }
      right[Z_AT + row * NTX + tx] = z;
    }
  }
}

@compute @workgroup_size(128)
fn main(
  @builtin(workgroup_id) group: vec3<u32>,
  @builtin(num_workgroups) groups: vec3<u32>,
  @builtin(local_invocation_index) lid: u32,
) {
  let item = group_index(group, groups);
  let column_blocks = (V + VB - 1u) / VB;
  if (item >= params.piece_count * params.head_count * column_blocks) {
    return;
  }
  let tx = lid % NTX;
  let ty = lid / NTX;
  let column = item % column_blocks * VB + tx * 4u;
  let head = item / column_blocks % params.head_count;
  let h = params.first_head + head;
  let piece = table[params.chunk_count + item / column_blocks / params.head_count];
  let state_base = (piece.z * params.value_heads + h) * K * V;

  var s: array<vec4<f32>, 8>;
  for (var j = 0u; j < K_TILES; j++) {
    for (var jj = 0u; jj < 4u; jj++) {
      let channel = (j * NTY + ty) * 4u + jj;
      var x = vec4<f32>();
      for (var c = 0u; c < 4u; c++) {
        if (channel < K && column + c < V) {
          let at = state_base + channel * V + column + c;
          if (piece.w == SOURCE_INITIAL) {
            x[c] = initial[params.initial_at + at];
          } else if (piece.w == SOURCE_CARRIED) {
            x[c] = state[params.state_at + at];
          }
        }
      }
      s[j * 4u + jj] = x;
      if (channel < KP) {
        right[channel * NTX + tx] = x;
      }
    }
  }
  if (piece.y > 0u) {
    write_contents(piece.x, h, column, ty, tx);
  }

  for (var chunk = piece.x; chunk < piece.x + piece.y; chunk++) {
    let base = scratch_base(chunk, head) / 4u;
    workgroupBarrier();

    // W S and (Q - A W) S, R + C rows; then T Z and (A T) Z.
    var rows: array<vec4<f32>, 8>;
    var at: array<u32, 8>;
    for (var i = 0u; i < ROW_TILES; i++) {
      rows[i] = vec4<f32>();
      at[i] = base + READS / 4u + min(ty + i * NTY, R + C - 1u) * (KP / 4u);
    }
    add_product(&rows, &at, ROW_TILES, KP / 4u, tx, 0u);
    for (var i = 0u; i < ROW_TILES; i++) {
      let row = ty + i * NTY;
      rows[i] = select(rows[i], -rows[i], row < R);
      at[i] = base + INVERSE / 4u + min(row, R + C - 1u) * (R / 4u);
    }
    add_product(&rows, &at, ROW_TILES, R / 4u, Z_AT + tx, R);

    let first = table[chunk].x;
    let count = table[chunk].y;
    for (var i = 0u; i < ROW_TILES; i++) {
      let row = ty + i * NTY;
      if (row < R) {
        right[U_AT + row * NTX + tx] = rows[i];
      } else if (row - R < min(count, C)) {
        let out = params.o_at + ((first + row - R) * params.value_heads + h) * V + column;
        for (var c = 0u; c < 4u; c++) {
          if (column + c < V) {
            o[out + c] = Element(rows[i][c]);
          }
        }
      }
    }
    workgroupBarrier();

    // S = Diag(exp G_C) S + writes^T U, four rows of writes ahead of the arithmetic.
    for (var j = 0u; j < K_TILES; j++) {
      let channel = (j * NTY + ty) * 4u;
      if (channel < KP) {
        let decay = scratch[base + (WHOLE_DECAY + channel) / 4u];
        var s0 = s[j * 4u] * decay.x;
        var s1 = s[j * 4u + 1u] * decay.y;
        var s2 = s[j * 4u + 2u] * decay.z;
        var s3 = s[j * 4u + 3u] * decay.w;
        let writes = base + (WRITES + channel) / 4u;
        var now: array<vec4<f32>, 8>;
        for (var y = 0u; y < 8u; y++) {
          now[y] = scratch[writes + y * (KP / 4u)];
        }
        for (var row = 0u; row < R; row += 8u) {
          let ahead = min(row + 8u, R - 8u);
          var next: array<vec4<f32>, 8>;
          for (var y = 0u; y < 8u; y++) {
            next[y] = scratch[writes + (ahead + y) * (KP / 4u)];
          }
          for (var y = 0u; y < 8u; y++) {
            let u = right[U_AT + (row + y) * NTX + tx];
            s0 = fma(vec4<f32>(now[y].x), u, s0);
            s1 = fma(vec4<f32>(now[y].y), u, s1);
            s2 = fma(vec4<f32>(now[y].z), u, s2);
            s3 = fma(vec4<f32>(now[y].w), u, s3);
          }
          for (var y = 0u; y < 8u; y++) {
            now[y] = next[y];
          }
        }
        s[j * 4u] = s0;
        s[j * 4u + 1u] = s1;
        s[j * 4u + 2u] = s2;
        s[j * 4u + 3u] = s3;
        let to = channel * NTX + tx;
        right[to] = s0;
        right[to + NTX] = s1;
        right[to + 2u * NTX] = s2;
        right[to + 3u * NTX] = s3;
      }
    }
    if (chunk + 1u < piece.x + piece.y) {
      write_contents(chunk + 1u, h, column, ty, tx);
    }
  }

  for (var j = 0u; j < K_TILES; j++) {
    for (var jj = 0u; jj < 4u; jj++) {
      let channel = (j * NTY + ty) * 4u + jj;
      for (var c = 0u; c < 4u; c++) {
        if (channel < K && column + c < V) {
          state[params.state_at + state_base + channel * V + column + c] = s[j * 4u + jj][c];
        }
      }
    }
  }
}
