// Prefill, pass 4 of 4, sequential over the chunks of a sequence, parallel over sequences, heads and blocks of
// VB value columns (columns of S are independent). Per chunk, with S in registers:
//
//   U = (I + L)^-1 (Z - (B * exp G) S)         [R, VB]
//   O = (Q * exp G) S + A U                    [C, VB]
//   S = Diag(exp G_C) S + writes^T U           [K, VB]
//
// Every thread holds 4 columns (tx) of some rows: rows ty, ty + NTY, … of U and O; of S the channels
// 4 ty .. 4 ty + 3, then 4 NTY further on, and so on.

@group(0) @binding(12) var<storage, read> scratch: array<vec4<f32>>;

override VB: u32 = 32u;         // value columns of this workgroup
override NTX: u32 = VB / 4u;    // threads across them
override NTY: u32 = 128u / NTX; // threads down
override KS: u32 = 16u;         // channels (or sub-steps) in a slab of the left operand
override RS: u32 = 8u;          // sub-steps in a slab of the state update
override ROW_TILES: u32 = (R + C + NTY - 1u) / NTY;            // at most 8
override U_TILES: u32 = (R + NTY - 1u) / NTY;                  // at most 4
override K_TILES: u32 = (KP + 4u * NTY - 1u) / (4u * NTY);     // at most 4

// 6 KiB + 8 KiB + 2 KiB: the 16 KiB that every WebGPU device grants.
var<workgroup> left: array<vec4<f32>, 384>;
var<workgroup> u_rows: array<vec4<f32>, 512>;  // [R][NTX]
var<workgroup> s_rows: array<vec4<f32>, 128>;  // [KS][NTX]

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
  let column = item % column_blocks * VB + lid % NTX * 4u;
  let head = item / column_blocks % params.head_count;
  let h = params.first_head + head;
  let piece = table[params.chunk_count + item / column_blocks / params.head_count];
  let n = substeps();
  let tx = lid % NTX;
  let ty = lid / NTX;
  let state_base = (piece.z * params.value_heads + h) * K * V;

  var s: array<vec4<f32>, 16>;
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
    }
  }

  for (var chunk = piece.x; chunk < piece.x + piece.y; chunk++) {
    let first = table[chunk].x;
    let count = table[chunk].y;
    let base = scratch_base(chunk, head) / 4u;

    // (B * exp G) S and (Q * exp G) S together: R + C rows.
    var rows: array<vec4<f32>, 8>;
    for (var i = 0u; i < ROW_TILES; i++) {
      rows[i] = vec4<f32>();
    }
    for (var slab = 0u; slab < KP / KS; slab++) {
      workgroupBarrier();
      for (var i = lid; i < (R + C) * KS / 4u; i += 128u) {
        left[i] = scratch[base + READS / 4u + i / (KS / 4u) * (KP / 4u) + slab * (KS / 4u) + i % (KS / 4u)];
      }
      for (var j = 0u; j < K_TILES; j++) {
        let channel = (j * NTY + ty) * 4u;
        if (channel / KS == slab) {
          for (var jj = 0u; jj < 4u; jj++) {
            s_rows[(channel % KS + jj) * NTX + tx] = s[j * 4u + jj];
          }
        }
      }
      workgroupBarrier();
      for (var x = 0u; x < KS / 4u; x++) {
        let s0 = s_rows[(x * 4u) * NTX + tx];
        let s1 = s_rows[(x * 4u + 1u) * NTX + tx];
        let s2 = s_rows[(x * 4u + 2u) * NTX + tx];
        let s3 = s_rows[(x * 4u + 3u) * NTX + tx];
        for (var i = 0u; i < ROW_TILES; i++) {
          let l = left[min(ty + i * NTY, R + C - 1u) * (KS / 4u) + x];
          rows[i] += l.x * s0 + l.y * s1 + l.z * s2 + l.w * s3;
        }
      }
    }

    // The right-hand side Z - (B * exp G) S.
    workgroupBarrier();
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

    // U = (I + L)^-1 times it.
    var u: array<vec4<f32>, 4>;
    for (var i = 0u; i < U_TILES; i++) {
      u[i] = vec4<f32>();
    }
    for (var slab = 0u; slab < R / KS; slab++) {
      workgroupBarrier();
      for (var i = lid; i < R * KS / 4u; i += 128u) {
        left[i] = scratch[base + INVERSE / 4u + i / (KS / 4u) * (R / 4u) + slab * (KS / 4u) + i % (KS / 4u)];
      }
      workgroupBarrier();
      for (var x = 0u; x < KS / 4u; x++) {
        let at = (slab * KS + x * 4u) * NTX + tx;
        let u0 = u_rows[at];
        let u1 = u_rows[at + NTX];
        let u2 = u_rows[at + 2u * NTX];
        let u3 = u_rows[at + 3u * NTX];
        for (var i = 0u; i < U_TILES; i++) {
          let l = left[min(ty + i * NTY, R - 1u) * (KS / 4u) + x];
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

    // O += A U.
    for (var slab = 0u; slab < R / KS; slab++) {
      workgroupBarrier();
      for (var i = lid; i < C * KS / 4u; i += 128u) {
        left[i] = scratch[base + MASKED / 4u + i / (KS / 4u) * (R / 4u) + slab * (KS / 4u) + i % (KS / 4u)];
      }
      workgroupBarrier();
      for (var x = 0u; x < KS / 4u; x++) {
        let at = (slab * KS + x * 4u) * NTX + tx;
        let u0 = u_rows[at];
        let u1 = u_rows[at + NTX];
        let u2 = u_rows[at + 2u * NTX];
        let u3 = u_rows[at + 3u * NTX];
        for (var i = 0u; i < ROW_TILES; i++) {
          let row = ty + i * NTY;
          if (row >= R && row < R + C) {
            let l = left[(row - R) * (KS / 4u) + x];
            rows[i] += l.x * u0 + l.y * u1 + l.z * u2 + l.w * u3;
          }
        }
      }
    }
    for (var i = 0u; i < ROW_TILES; i++) {
      let row = ty + i * NTY;
      if (row >= R && row - R < min(count, C)) {
        let at = params.o_at + ((first + row - R) * params.value_heads + h) * V + column;
        for (var c = 0u; c < 4u; c++) {
          if (column + c < V) {
            o[at + c] = Element(rows[i][c]);
          }
        }
      }
    }

    // S = Diag(exp G_C) S + writes^T U.
    for (var j = 0u; j < K_TILES; j++) {
      let channel = (j * NTY + ty) * 4u;
      if (channel < KP) {
        let decay = scratch[base + (WHOLE_DECAY + channel) / 4u];
        for (var jj = 0u; jj < 4u; jj++) {
          s[j * 4u + jj] *= decay[jj];
        }
      }
    }
    for (var slab = 0u; slab < R / RS; slab++) {
      workgroupBarrier();
      for (var i = lid; i < RS * KP / 4u; i += 128u) {
        left[i] = scratch[base + WRITES / 4u + slab * RS * (KP / 4u) + i];
      }
      workgroupBarrier();
      for (var x = 0u; x < RS; x++) {
        let ux = u_rows[(slab * RS + x) * NTX + tx];
        for (var j = 0u; j < K_TILES; j++) {
          let channel = (j * NTY + ty) * 4u;
          if (channel < KP) {
            let l = left[x * (KP / 4u) + channel / 4u];
            s[j * 4u] += l.x * ux;
            s[j * 4u + 1u] += l.y * ux;
            s[j * 4u + 2u] += l.z * ux;
            s[j * 4u + 3u] += l.w * ux;
          }
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
