// Prefill, pass 4 of 4, sequential over the chunks of a sequence, parallel over sequences, heads and blocks of
// VB value columns (columns of S are independent). Per chunk, with S in registers:
//
//   U = T Z - W S,   O = (A T) Z + (Q - A W) S       one product with [S; Z], [R + C, VB]
//   S = Diag(exp G_C) S + writes^T U                 [K, VB]
//
// A thread sums 4 columns of some rows. Four parts of the threads each take their part of [S; Z] in the first
// product, two parts their part of U in the second, so that a thread has enough rows to make good use of what it
// loads; what they have summed is then exchanged. S, Z and U pass between threads through workgroup memory. What is
// read from scratch memory does not depend on the state and is under way before each barrier.
//
// With TRANSITION it finds instead what segments of a sequence do to any state, S -> M S + N (see prefill_join.wgsl):
// the value columns start from zero and end as N; K columns more start from the identity, have no contents and end as M.

@group(0) @binding(10) var<storage, read> initial: array<f32>;  // [N, HV, K, V]
@group(0) @binding(12) var<storage, read> scratch: array<vec4<f32>>;
@group(0) @binding(11) var<storage, read_write> state: array<f32>;  // [N, HV, K, V]

const THREADS = 256u;
override VB: u32 = 16u;         // value columns of this workgroup
override QUADS: u32 = VB / 4u;  // threads across
// Threads down in each part, and rows of each (at most 8): of U and O in four parts, of S in two.
override NTY: u32 = THREADS / 4u / QUADS;
override ROW_TILES: u32 = (ROWS + NTY - 1u) / NTY;
override STATE_NTY: u32 = THREADS / 2u / QUADS;
override STATE_TILES: u32 = (KP + STATE_NTY - 1u) / STATE_NTY;
// Contents of each thread, at most 4.
override CONTENT_TILES: u32 = (CZ * QUADS + THREADS - 1u) / THREADS;

// [S; Z], KP + CZ rows of QUADS vec4, between its uses the sums that are exchanged; then U, R rows.
override SHARED: u32 = 192u;
override U_AT: u32 = SHARED * QUADS;
override RIGHT: u32 = U_AT + R * QUADS;
var<workgroup> right: array<vec4<f32>, RIGHT>;

override TRANSITION: bool = false;
override VALUE_BLOCKS: u32 = (V + VB - 1u) / VB;
override KEY_BLOCKS: u32 = (K + VB - 1u) / VB;

// Pieces follow the chunks in the table: (first chunk, chunks, state or NOWHERE, source + 4 x its state).
const SOURCE_INITIAL = 1u;
const SOURCE_CARRIED = 2u;
const SOURCE_IDENTITY = 3u;
const NOWHERE = 0xffffffffu;

// No left operand has zeros to skip.
fn tile_end(i: u32) -> u32 {
  return KP + CZ + R;
}

// This thread's contents of a chunk (its entry in the table), four value columns each.
fn load_contents(
  chunk: vec4<u32>,
  identity: bool,
  h: u32,
  first_column: u32,
  lid: u32,
  out: ptr<function, array<vec4<f32>, 4>>,
) {
  let first = chunk.x;
  let count = select(chunk.y, 0u, identity);
  let n = substeps();
  for (var i = 0u; i < CONTENT_TILES; i++) {
    let at = i * THREADS + lid;
    let step = at / QUADS * CONTENT_STRIDE + CONTENT_OFFSET;
    let column = first_column + at % QUADS * 4u;
    // (Rows that are not there are read from one that is, then dropped: that keeps the loads together.)
    let token = first + min(step / n, chunk.y - 1u);
    let z = content_four_at(token, step % n, h, column);
    let there = vec4<u32>(column, column + 1u, column + 2u, column + 3u) < vec4<u32>(V);
    (*out)[i] = select(vec4<f32>(), z, there & vec4<bool>(step / n < count));
  }
}

fn store_contents(lid: u32, contents: ptr<function, array<vec4<f32>, 4>>) {
  for (var i = 0u; i < CONTENT_TILES; i++) {
    let at = i * THREADS + lid;
    if (at < CZ * QUADS) {
      right[KP * QUADS + at] = (*contents)[i];
    }
  }
}

// Writes four rows of the outputs' columns, or of U.
fn finish(row: u32, quad: u32, x: vec4<f32>, first: u32, count: u32, h: u32, first_column: u32) {
  if (row < R) {
    right[U_AT + row * QUADS + quad] = x;
  } else if (!TRANSITION && row - R < min(count, C)) {
    o_store_four(((first + row - R) * params.value_heads + h) * V, first_column + quad * 4u, x);
  }
}

fn decay_at(base: u32, channel: u32) -> f32 {
  let at = min(channel, KP - 1u);
  return scratch[base + (WHOLE_DECAY + at) / 4u][at % 4u];
}

// Four columns of a channel of the state that a piece continues, state number `origin`.
fn load_state(state_source: u32, origin: u32, channel: u32, column: u32) -> vec4<f32> {
  var x = vec4<f32>();
  for (var c = 0u; c < 4u; c++) {
    if (state_source == SOURCE_IDENTITY) {
      x[c] = select(0.0, 1.0, channel == column + c);
    } else if (channel < K && column + c < V) {
      let at = (origin * K + channel) * V + column + c;
      if (state_source == SOURCE_INITIAL) {
        x[c] = initial[params.initial_at + at];
      } else if (state_source == SOURCE_CARRIED) {
        x[c] = state[params.state_at + at];
      }
    }
  }
  if (channel < KP) {
    right[channel * QUADS + (column % VB) / 4u] = x;
  }
  return x;
}

// The same, written as state number `target_state`; M transposed, as the join reads it.
fn store_state(state_source: u32, target_state: u32, channel: u32, column: u32, x: vec4<f32>) {
  for (var c = 0u; c < 4u; c++) {
    if (state_source == SOURCE_IDENTITY) {
      if (channel < K && column + c < K) {
        state[params.transition_at + (target_state * K + column + c) * K + channel] = x[c];
      }
    } else if (channel < K && column + c < V) {
      state[params.state_at + (target_state * K + channel) * V + column + c] = x[c];
    }
  }
}

fn share_state(channel: u32, quad: u32, x: vec4<f32>) {
  if (channel < KP) {
    right[channel * QUADS + quad] = x;
  }
}

@compute @workgroup_size(256)
fn main(
  @builtin(workgroup_id) group: vec3<u32>,
  @builtin(num_workgroups) groups: vec3<u32>,
  @builtin(local_invocation_index) lid: u32,
) {
  let item = group_index(group, groups);
  let blocks = VALUE_BLOCKS + select(0u, KEY_BLOCKS, TRANSITION);
  if (item >= params.piece_count * params.head_count * blocks) {
    return;
  }
  let block = item % blocks;
  let identity = TRANSITION && block >= VALUE_BLOCKS;
  let first_column = select(block, block - VALUE_BLOCKS, identity) * VB;
  let head = item / blocks % params.head_count;
  let h = params.first_head + head;
  let piece = table[params.piece_at + item / blocks / params.head_count];
  let state_source = select(piece.w % 4u, SOURCE_IDENTITY, identity);
  let origin = piece.w / 4u * params.value_heads + h;
  let target_state = piece.z * params.value_heads + h;

  let quad = lid % QUADS;
  let column = first_column + quad * 4u;
  let part = lid / (THREADS / 4u);
  let upper = part >= 2u;
  let odd = part % 2u == 1u;
  let ty = lid % (THREADS / 4u) / QUADS;
  let steps = (KP + CZ) / 16u;
  let rows_at = PRODUCT / 4u + part * steps * ROWS + ty;
  let rows_right = part * steps * 4u * QUADS + quad;

  // Of S a thread keeps tiles 0, 2, … in the first half of the threads, 1, 3, … in the second.
  let half = lid / (THREADS / 2u);
  let state_ty = lid % (THREADS / 2u) / QUADS;
  let channel = half * STATE_NTY + state_ty;
  let state_steps = R / 8u;
  let writes_at = WRITES / 4u + half * state_steps * KP + state_ty;
  let writes_right = U_AT + half * state_steps * 4u * QUADS + quad;

  var s0 = load_state(state_source, origin, channel, column);
  var s1 = vec4<f32>();
  var s2 = vec4<f32>();
  var s3 = vec4<f32>();
  if (STATE_TILES > 2u) { s1 = load_state(state_source, origin, channel + 2u * STATE_NTY, column); }
  if (STATE_TILES > 4u) { s2 = load_state(state_source, origin, channel + 4u * STATE_NTY, column); }
  if (STATE_TILES > 6u) { s3 = load_state(state_source, origin, channel + 6u * STATE_NTY, column); }

  var contents: array<vec4<f32>, 4>;
  var loaded: array<vec4<f32>, 16>;
  if (piece.y > 0u) {
    load_contents(table[piece.x], identity, h, first_column, lid, &contents);
    store_contents(lid, &contents);
    product_load(Left(scratch_base(piece.x, head) + rows_at, ROWS, NTY, ROW_TILES), 0u, &loaded);
  }

  var next_entry = table[piece.x];
  for (var chunk = piece.x; chunk < piece.x + piece.y; chunk++) {
    let base = scratch_base(chunk, head);
    let next_chunk = min(chunk + 1u, piece.x + piece.y - 1u);
    let entry = next_entry;
    let first = entry.x;
    let count = entry.y;
    next_entry = table[next_chunk];
    workgroupBarrier();

    // (The workgroups of a head go through the same chunks at about the same time: each asks for its share.)
    let next_at = scratch_base(next_chunk, head) + PRODUCT / 4u;
    let next_words = touch(next_at, ((KP + CZ) * ROWS + R * KP) / 4u, lid, block, blocks);
    var rows = array<vec4<f32>, 8>();
    add_product(&rows, &loaded, Left(base + rows_at, ROWS, NTY, ROW_TILES), steps, rows_right);
    // (To where U will be.)
    right[U_AT + lid % (R * QUADS)] = touched(next_words);

    let writes = Left(base + writes_at, KP, STATE_NTY, STATE_TILES);
    product_load(writes, 0u, &loaded);
    load_contents(next_entry, identity, h, first_column, lid, &contents);
    let d0 = decay_at(base, channel);
    let d1 = decay_at(base, channel + 2u * STATE_NTY);
    let d2 = decay_at(base, channel + 4u * STATE_NTY);
    let d3 = decay_at(base, channel + 6u * STATE_NTY);

    // Parts that are two apart exchange every second row, then neighbours every second row of what they have. (What a
    // thread has read it may replace: nobody else reads it. That spares a barrier.)
    workgroupBarrier();
    right[lid] = select(rows[1], rows[0], upper);
    if (ROW_TILES > 2u) { right[THREADS + lid] = select(rows[3], rows[2], upper); }
    if (ROW_TILES > 4u) { right[2u * THREADS + lid] = select(rows[5], rows[4], upper); }
    if (ROW_TILES > 6u) { right[3u * THREADS + lid] = select(rows[7], rows[6], upper); }
    workgroupBarrier();
    let partner = lid ^ (THREADS / 2u);
    let k0 = select(rows[0], rows[1], upper) + right[partner];
    var k1 = vec4<f32>();
    var k2 = vec4<f32>();
    var k3 = vec4<f32>();
    if (ROW_TILES > 2u) { k1 = select(rows[2], rows[3], upper) + right[THREADS + partner]; }
    if (ROW_TILES > 4u) { k2 = select(rows[4], rows[5], upper) + right[2u * THREADS + partner]; }
    if (ROW_TILES > 6u) { k3 = select(rows[6], rows[7], upper) + right[3u * THREADS + partner]; }
    right[partner] = select(k1, k0, odd);
    if (ROW_TILES > 4u) { right[THREADS + partner] = select(k3, k2, odd); }
    workgroupBarrier();
    let neighbour = partner ^ (THREADS / 4u);
    let row = (select(0u, 1u, upper) + select(0u, 2u, odd)) * NTY + ty;
    finish(row, quad, select(k0, k1, odd) + right[neighbour], first, count, h, first_column);
    if (ROW_TILES > 4u) {
      let x = select(k2, k3, odd) + right[THREADS + neighbour];
      finish(row + 4u * NTY, quad, x, first, count, h, first_column);
    }
    workgroupBarrier();

    var sums = array<vec4<f32>, 8>();
    add_product(&sums, &loaded, writes, state_steps, writes_right);
    product_load(Left(scratch_base(next_chunk, head) + rows_at, ROWS, NTY, ROW_TILES), 0u, &loaded);

    // (Nobody reads what was exchanged before, nor [S; Z], since the last barrier. What a thread reads lies where its
    // tiles of S will be.)
    let second = half == 1u;
    right[partner] = select(sums[1], sums[0], second);
    if (STATE_TILES > 2u) { right[THREADS + partner] = select(sums[3], sums[2], second); }
    if (STATE_TILES > 4u) { right[2u * THREADS + partner] = select(sums[5], sums[4], second); }
    if (STATE_TILES > 6u) { right[3u * THREADS + partner] = select(sums[7], sums[6], second); }
    workgroupBarrier();
    s0 = fma(vec4<f32>(d0), s0, select(sums[0], sums[1], second) + right[lid]);
    if (STATE_TILES > 2u) { s1 = fma(vec4<f32>(d1), s1, select(sums[2], sums[3], second) + right[THREADS + lid]); }
    if (STATE_TILES > 4u) { s2 = fma(vec4<f32>(d2), s2, select(sums[4], sums[5], second) + right[2u * THREADS + lid]); }
    if (STATE_TILES > 6u) { s3 = fma(vec4<f32>(d3), s3, select(sums[6], sums[7], second) + right[3u * THREADS + lid]); }
    // (A last tile that is only partly there may have lain where the contents will be.)
    if ((STATE_TILES + 1u) / 2u * THREADS > KP * QUADS) {
      workgroupBarrier();
    }
    share_state(channel, quad, s0);
    if (STATE_TILES > 2u) { share_state(channel + 2u * STATE_NTY, quad, s1); }
    if (STATE_TILES > 4u) { share_state(channel + 4u * STATE_NTY, quad, s2); }
    if (STATE_TILES > 6u) { share_state(channel + 6u * STATE_NTY, quad, s3); }
    store_contents(lid, &contents);
  }

  if (piece.z == NOWHERE) {
    return;
  }
  store_state(state_source, target_state, channel, column, s0);
  if (STATE_TILES > 2u) { store_state(state_source, target_state, channel + 2u * STATE_NTY, column, s1); }
  if (STATE_TILES > 4u) { store_state(state_source, target_state, channel + 4u * STATE_NTY, column, s2); }
  if (STATE_TILES > 6u) { store_state(state_source, target_state, channel + 6u * STATE_NTY, column, s3); }
}
