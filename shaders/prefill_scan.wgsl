// Prefill, pass 4 of 4, sequential over the chunks of a sequence, parallel over sequences, heads and blocks of
// VB value columns (columns of S are independent). Per chunk, with S in registers:
//
//   U = (I + L)^-1 (Z - (B * exp G) S)         [R, VB]
//   O = (Q * exp G) S + A U                    [C, VB]
//   S = Diag(exp G_C) S + writes^T U           [K, VB]
//
// Every thread holds 4 columns (tx) of some rows: rows ty, ty + NTY, … of U and O; of S the channels
// 4 ty .. 4 ty + 3, then 4 NTY further on. The right operands (S, then the right-hand side, then U) go through
// workgroup memory; each left operand is read by one row of threads alone and comes straight from scratch
// memory, a group of loads ahead of the arithmetic.

@group(0) @binding(12) var<storage, read> scratch: array<vec4<f32>>;
@group(0) @binding(11) var<storage, read_write> state: array<f32>;  // [N, HV, K, V]

override VB: u32 = 16u;         // value columns of this workgroup, (KP + R) VB <= 4096
override NTX: u32 = VB / 4u;    // threads across them
override NTY: u32 = 128u / NTX; // threads down
override ROW_TILES: u32 = (R + C + NTY - 1u) / NTY;         // at most 8
override U_TILES: u32 = (R + NTY - 1u) / NTY;               // at most 8
override K_TILES: u32 = (KP + 4u * NTY - 1u) / (4u * NTY);  // at most 2
override S_SIZE: u32 = KP * NTX;
override U_SIZE: u32 = R * NTX;

var<workgroup> s_rows: array<vec4<f32>, S_SIZE>;  // [KP][NTX]
var<workgroup> u_rows: array<vec4<f32>, U_SIZE>;  // [R][NTX]

// Pieces follow the chunks in the table: (first chunk, chunks, state, source).
const SOURCE_ZERO = 0u;
const SOURCE_INITIAL = 1u;
const SOURCE_CARRIED = 2u;

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
  let n = substeps();
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
        s_rows[channel * NTX + tx] = x;
      }
    }
  }

  for (var chunk = piece.x; chunk < piece.x + piece.y; chunk++) {
    let first = table[chunk].x;
    let count = table[chunk].y;
    let base = scratch_base(chunk, head) / 4u;
    workgroupBarrier();

    // (B * exp G) S and (Q * exp G) S together: R + C rows, 8 channels at a time.
    var rows: array<vec4<f32>, 8>;
    var at: array<u32, 8>;
    var left: array<vec4<f32>, 16>;
    for (var i = 0u; i < ROW_TILES; i++) {
      rows[i] = vec4<f32>();
      at[i] = base + READS / 4u + min(ty + i * NTY, R + C - 1u) * (KP / 4u);
      left[2u * i] = scratch[at[i]];
      left[2u * i + 1u] = scratch[at[i] + 1u];
    }
    for (var x = 0u; x < KP / 8u; x++) {
      let ahead = min(x + 1u, KP / 8u - 1u) * 2u;
      var next: array<vec4<f32>, 16>;
      for (var i = 0u; i < ROW_TILES; i++) {
        next[2u * i] = scratch[at[i] + ahead];
        next[2u * i + 1u] = scratch[at[i] + ahead + 1u];
      }
      for (var half = 0u; half < 2u; half++) {
        let top = (x * 8u + half * 4u) * NTX + tx;
        let s0 = s_rows[top];
        let s1 = s_rows[top + NTX];
        let s2 = s_rows[top + 2u * NTX];
        let s3 = s_rows[top + 3u * NTX];
        for (var i = 0u; i < ROW_TILES; i++) {
          let l = left[2u * i + half];
          rows[i] += l.x * s0 + l.y * s1 + l.z * s2 + l.w * s3;
        }
      }
      for (var i = 0u; i < 2u * ROW_TILES; i++) {
        left[i] = next[i];
      }
    }

    // The right-hand side Z - (B * exp G) S.
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
        u_rows[row * NTX + tx] = z - rows[i];
      }
    }
    workgroupBarrier();

    // U = (I + L)^-1 times it; the columns right of a row's own are zero.
    var u: array<vec4<f32>, 8>;
    for (var i = 0u; i < U_TILES; i++) {
      u[i] = vec4<f32>();
      at[i] = base + INVERSE / 4u + min(ty + i * NTY, R - 1u) * (R / 4u);
    }
    for (var x = 0u; x < R / 4u; x++) {
      let top = x * 4u * NTX + tx;
      let u0 = u_rows[top];
      let u1 = u_rows[top + NTX];
      let u2 = u_rows[top + 2u * NTX];
      let u3 = u_rows[top + 3u * NTX];
      for (var i = 0u; i < U_TILES; i++) {
        if (x * 4u < (i + 1u) * NTY) {
          let l = scratch[at[i] + x];
          u[i] += l.x * u0 + l.y * u1 + l.z * u2 + l.w * u3;
        }
      }
    }
    workgroupBarrier();
    for (var i = 0u; i < U_TILES; i++) {
      if (ty + i * NTY < R) {
        u_rows[(ty + i * NTY) * NTX + tx] = u[i];
      }
    }
    workgroupBarrier();

    // O += A U.
    for (var i = 0u; i < ROW_TILES; i++) {
      let row = ty + i * NTY;
      if (row >= R && row < R + C) {
        let masked = base + MASKED / 4u + (row - R) * (R / 4u);
        for (var x = 0u; x < R / 4u; x++) {
          let top = x * 4u * NTX + tx;
          let l = scratch[masked + x];
          rows[i] += l.x * u_rows[top] + l.y * u_rows[top + NTX];
          rows[i] += l.z * u_rows[top + 2u * NTX] + l.w * u_rows[top + 3u * NTX];
        }
        if (row - R < count) {
          let out = params.o_at + ((first + row - R) * params.value_heads + h) * V + column;
          for (var c = 0u; c < 4u; c++) {
            if (column + c < V) {
              o[out + c] = Element(rows[i][c]);
            }
          }
        }
      }
    }

    // S = Diag(exp G_C) S + writes^T U.
    for (var j = 0u; j < K_TILES; j++) {
      let channel = (j * NTY + ty) * 4u;
      if (channel < KP) {
        let decay = scratch[base + (WHOLE_DECAY + channel) / 4u];
        s[j * 4u] *= decay.x;
        s[j * 4u + 1u] *= decay.y;
        s[j * 4u + 2u] *= decay.z;
        s[j * 4u + 3u] *= decay.w;
        let writes = base + (WRITES + channel) / 4u;
        for (var row = 0u; row < R; row++) {
          let l = scratch[writes + row * (KP / 4u)];
          let ux = u_rows[row * NTX + tx];
          s[j * 4u] += l.x * ux;
          s[j * 4u + 1u] += l.y * ux;
          s[j * 4u + 2u] += l.z * ux;
          s[j * 4u + 3u] += l.w * ux;
        }
        for (var jj = 0u; jj < 4u; jj++) {
          s_rows[(channel + jj) * NTX + tx] = s[j * 4u + jj];
        }
      }
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
