// Prefill, pass 3 of 4, parallel over chunks, heads and slabs of FB key channels: what a chunk does to the state,
//
//   -T B in place of B,    Q - (A T) B in place of Q
//
// so that the sequential pass needs neither the triangle nor U for its outputs. Channels are independent: a
// workgroup reads its slab of B and Q once and writes the same words.

@group(0) @binding(12) var<storage, read_write> scratch: array<vec4<f32>>;

override QUADS: u32 = FB / 4u;
const NTY = 16u;                // threads down
override THREADS: u32 = QUADS * NTY;
override ROW_TILES: u32 = ROWS / NTY;
// Tiles at a time: at most 8.
override PASSES: u32 = (ROW_TILES + 7u) / 8u;
override TILES: u32 = (ROW_TILES + PASSES - 1u) / PASSES;
override RIGHT: u32 = R * QUADS;
override SLABS: u32 = (KP + FB - 1u) / FB;

var<workgroup> right: array<vec4<f32>, RIGHT>;  // B, [R][QUADS]

// T is lower triangular, and a token of A T sees no sub-step of a later one: columns where tile i ends.
var<private> first_tile: u32;
fn tile_end(i: u32) -> u32 {
  let tile = first_tile + i;
  return select((tile - R / NTY + 1u) * NTY * substeps(), (tile + 1u) * NTY, tile < R / NTY);
}

@compute @workgroup_size(THREADS)
fn main(
  @builtin(workgroup_id) group: vec3<u32>,
  @builtin(num_workgroups) groups: vec3<u32>,
  @builtin(local_invocation_index) lid: u32,
) {
  let item = group_index(group, groups);
  if (item >= params.chunk_count * params.head_count * SLABS) {
    return;
  }
  let base = scratch_base(item / SLABS / params.head_count, item / SLABS % params.head_count);
  let quad = lid % QUADS;
  let ty = lid / QUADS;
  let slab = item % SLABS * FB;
  // The last slab may be narrower. (Else its width is known when the shader is compiled.)
  var width = QUADS;
  if (KP % FB != 0u) {
    width = min(FB, KP - slab) / 4u;
  }
  let live = quad < width;
  let region = base + (PRODUCT + slab * ROWS) / 4u;

  var left = Left(base + INVERSE / 4u + ty, ROWS, NTY, TILES);
  var loaded: array<vec4<f32>, 16>;
  product_load(left, 0u, &loaded);
  for (var i = lid; i < R * width; i += THREADS) {
    right[i / width * QUADS + i % width] = scratch[region + i];
  }
  var q: array<vec4<f32>, 4>;
  if (live) {
    for (var i = 0u; i < C / NTY; i++) {
      q[i] = scratch[region + (R + i * NTY + ty) * width + quad];
    }
  }
  // Everything that is overwritten below has been read.
  storageBarrier();
  workgroupBarrier();

  first_tile = 0u;
  for (var part = 0u; part < PASSES; part++) {
    if (part > 0u) {
      first_tile = part * TILES;
      left.at = base + INVERSE / 4u + first_tile * NTY + ty;
      product_load(left, 0u, &loaded);
    }
    var acc = array<vec4<f32>, 8>();
    add_product(&acc, &loaded, left, R / 4u, quad);
    for (var i = 0u; i < TILES; i++) {
      let tile = first_tile + i;
      if (live && tile < ROW_TILES) {
        var out = -acc[i];
        if (tile >= R / NTY) {
          out += q[tile - R / NTY];
        }
        scratch[region + quad * ROWS + tile * NTY + ty] = out;
      }
    }
  }
}
