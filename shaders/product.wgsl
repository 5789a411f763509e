// A product of rows of scratch memory with a matrix in workgroup memory, four columns a thread:
//
//   acc[i] += left[row i] right
//
// The left operand lies as [steps][pitch] vec4. It comes straight from memory, AHEAD steps before the arithmetic:
// staging it through workgroup memory would cost barriers, and neighbouring threads read neighbouring words
// anyway. The right operand is `right[..]`, rows QUADS vec4 apart, four of them a step.
//
// What bounds such a product is how many words go into registers: a thread with m rows and n columns loads m + n
// words for m n multiply-adds, and a multiprocessor takes a word for every four multiply-adds. So a thread has up
// to 8 rows. Loops over steps and rows are short enough that compilers unroll them, which keeps the arrays in registers.

struct Left {
  at: u32,     // this thread's first row in the first step
  pitch: u32,  // from step to step
  down: u32,   // from row to row of a thread
  tiles: u32,  // rows of a thread
}

const AHEAD = 2u;

fn product_load(left: Left, x: u32, out: ptr<function, array<vec4<f32>, 16>>) {
  for (var y = 0u; y < AHEAD; y++) {
    for (var i = 0u; i < left.tiles; i++) {
      (*out)[y * left.tiles + i] = scratch[left.at + (x + y) * left.pitch + i * left.down];
    }
  }
}

fn product_step(
  acc: ptr<function, array<vec4<f32>, 8>>,
  loaded: ptr<function, array<vec4<f32>, 16>>,
  left: Left,
  x: u32,
  steps: u32,
  right_at: u32,
) {
  for (var y = 0u; y < AHEAD; y++) {
    // (Known when the shader is compiled where the steps are even.)
    if (steps % AHEAD != 0u && x + y >= steps) {
      return;
    }
    let top = right_at + (x + y) * 4u * QUADS;
    let r0 = right[top];
    let r1 = right[top + QUADS];
    let r2 = right[top + 2u * QUADS];
    let r3 = right[top + 3u * QUADS];
    for (var i = 0u; i < left.tiles; i++) {
      if (x * 4u < tile_end(i)) {
        let l = (*loaded)[y * left.tiles + i];
        (*acc)[i] = fma(vec4<f32>(l.w), r3, fma(vec4<f32>(l.z), r2, fma(vec4<f32>(l.y), r1, fma(vec4<f32>(l.x), r0, (*acc)[i]))));
      }
    }
  }
}

// Steps 0 .. `steps`; `now` holds the first AHEAD. (What the last load reads past them is not used.)
fn add_product(
  acc: ptr<function, array<vec4<f32>, 8>>,
  now: ptr<function, array<vec4<f32>, 16>>,
  left: Left,
  steps: u32,
  right_at: u32,
) {
  var next: array<vec4<f32>, 16>;
  for (var x = 0u; x < steps; x += 2u * AHEAD) {
    let more = x + AHEAD < steps;
    if (more) {
      product_load(left, x + AHEAD, &next);
    }
    product_step(acc, now, left, x, steps, right_at);
    if (more) {
      if (x + 2u * AHEAD < steps) {
        product_load(left, x + 2u * AHEAD, now);
      }
      product_step(acc, &next, left, x + AHEAD, steps, right_at);
    }
  }
}

// Asks for a word of every 32 bytes of `count` vec4s from `at` on, of which this is share `share` of `shares`, up to twelve
// words a thread, so that they are in the cache when their turn comes: a product waits for memory at every other step
// otherwise. The words have to be stored somewhere, or nothing would be read.
fn touch(at: u32, count: u32, lid: u32, share: u32, shares: u32) -> array<f32, 12> {
  var out: array<f32, 12>;
  let mine = 2u * (share * THREADS + lid);
  let each = 2u * shares * THREADS;
  let last = count - 1u;
  out[0] = scratch[at + min(mine, last)].x;
  if (count > each) { out[1] = scratch[at + min(mine + each, last)].x; }
  if (count > 2u * each) { out[2] = scratch[at + min(mine + 2u * each, last)].x; }
  if (count > 3u * each) { out[3] = scratch[at + min(mine + 3u * each, last)].x; }
  if (count > 4u * each) { out[4] = scratch[at + min(mine + 4u * each, last)].x; }
  if (count > 5u * each) { out[5] = scratch[at + min(mine + 5u * each, last)].x; }
  if (count > 6u * each) { out[6] = scratch[at + min(mine + 6u * each, last)].x; }
  if (count > 7u * each) { out[7] = scratch[at + min(mine + 7u * each, last)].x; }
  if (count > 8u * each) { out[8] = scratch[at + min(mine + 8u * each, last)].x; }
  if (count > 9u * each) { out[9] = scratch[at + min(mine + 9u * each, last)].x; }
  if (count > 10u * each) { out[10] = scratch[at + min(mine + 10u * each, last)].x; }
  if (count > 11u * each) { out[11] = scratch[at + min(mine + 11u * each, last)].x; }
  return out;
}

fn touched(x: array<f32, 12>) -> vec4<f32> {
  return vec4<f32>(x[0] + x[1] + x[2], x[3] + x[4] + x[5], x[6] + x[7] + x[8], x[9] + x[10] + x[11]);
}
