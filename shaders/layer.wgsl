// What a layer does to its projections before the recurrence (gates and decays), and the exponential they
// rest on. WGSL's own exp may be off by several ulp in one direction, which a product over thousands of
// tokens would add up; these are good to about one ulp everywhere and need neither inf nor NaN.

const LEAST_EXPONENT = 0xC2AE0000u;  // the bits of -87

// exp(x) for |x| <= 87, by x = n ln 2 + r and a polynomial on |r| <= ln(2)/2.
fn exp_bounded(x: f32) -> f32 {
  let n = round(x * 1.44269504);
  // ln 2 in two parts, the first with enough trailing zeros that n times it is exact.
  let r = fma(n, -1.42860677e-6, fma(n, -0.693145752, x));
  var p = fma(r, 1.9841270e-4, 1.3888889e-3);
  p = fma(r, p, 8.3333333e-3);
  p = fma(r, p, 4.1666667e-2);
  p = fma(r, p, 1.6666667e-1);
  p = fma(r, p, 0.5);
  p = fma(r * r, p, r) + 1.0;
  return p * bitcast<f32>(u32(i32(n) + 127) << 23u);
}

// alpha = exp(g) for g <= 0, -inf included. The bits of negative floats grow with their magnitude, so one
// comparison of bits takes everything from -87 to -inf to 0 without touching an infinity. (No branch, so that several
// overlap.)
fn exp_decay(g: f32) -> f32 {
  let bits = bitcast<u32>(g);
  return select(exp_bounded(bitcast<f32>(min(bits, LEAST_EXPONENT))), 0.0, bits >= LEAST_EXPONENT);
}

// exp(-u) - 1 for u >= 0, with no cancellation for small u.
fn expm1_negative(u: f32) -> f32 {
  if (u > 0.35) {
    return exp_decay(-u) - 1.0;
  }
  let x = -u;
  var p = fma(x, 1.9841270e-4, 1.3888889e-3);
  p = fma(x, p, 8.3333333e-3);
  p = fma(x, p, 4.1666667e-2);
  p = fma(x, p, 1.6666667e-1);
  p = fma(x, p, 0.5);
  return fma(x * x, p, x);
}

// ln(1 + y) for 0 <= y <= 1, as 2 artanh(s), s = y / (2 + y) <= 1/3.
fn log1p_unit(y: f32) -> f32 {
  let s = y / (2.0 + y);
  let z = s * s;
  var p = fma(z, 0.0769230769, 0.0909090909);
  p = fma(z, p, 0.111111111);
  p = fma(z, p, 0.142857143);
  p = fma(z, p, 0.2);
  p = fma(z, p, 0.333333333);
  p = fma(z, p, 1.0);
  return 2.0 * s * p;
}

fn softplus(x: f32) -> f32 {
  return max(x, 0.0) + log1p_unit(exp_decay(-abs(x)));
}

fn sigmoid(x: f32) -> f32 {
  let e = exp_decay(-abs(x));
  let small = e / (1.0 + e);
  return select(small, 1.0 - small, x >= 0.0);
}

// How beta and gamma come: GATE_VALUE as they are, GATE_SIGMOID and GATE_TWICE_SIGMOID as logits.
const GATE_VALUE = 0u;
const GATE_SIGMOID = 1u;
const GATE_TWICE_SIGMOID = 2u;

fn gate_from(form: u32, x: f32) -> f32 {
  if (form == GATE_VALUE) {
    return x;
  }
  let s = sigmoid(x);
  return select(s, s + s, form == GATE_TWICE_SIGMOID);
}

// How the decay comes: DECAY_LOG as g, the others as the layer's a (with x = a + dt_bias, A = exp(A_log),
// l = lower_bound < 0).
const DECAY_LOG = 0u;
const DECAY_SAFE = 1u;     // EDA, Eqs. (14)-(15): g = l + (-l) exp(-(A/|l|) softplus(x))
const DECAY_SIGMOID = 2u;  // KDA: g = l sigmoid(A x)
const DECAY_SOFTPLUS = 3u; // g = -A softplus(x)

fn log_decay_from(form: u32, x: f32, a_log: f32, lower_bound: f32) -> f32 {
  let a = exp_bounded(clamp(a_log, -87.0, 87.0));
  if (form == DECAY_SAFE) {
    return -lower_bound * expm1_negative(a / abs(lower_bound) * softplus(x));
  }
  if (form == DECAY_SIGMOID) {
    return lower_bound * sigmoid(a * x);
  }
  return -(a * softplus(x));
}
