// What the erase path of a trained layer does, token by token. Every number comes out of a run of the kernels: the
// gates and the decay too, which are read from states and outputs of runs made for that (closed gates, one value
// column), so that nothing of the layer is computed a second time here.
import { Eda, type Problem, type Tensors } from "eda-wgpu";
import type { Follow } from "./worker";

/** The directions along which the erase step is tried. */
export const directions = ["actual", "random", "shuffled", "same key"] as const;

export interface Layer {
  T: number;
  H: number;
  HV: number;
  K: number;
  /** `[T, HV]` each: mean of α over the channels, β, γ. */
  retention: Float32Array;
  beta: Float32Array;
  gamma: Float32Array;
  /** `[T, H]`, cosine of e and k. */
  cosine: Float32Array;
  /** The tokens at which the erase step was tried. */
  probed: number[];
  /** For each direction `[probed, HV]`, relative change of the read-out of the token's query. */
  change: Float32Array[];
  /** For each direction `[probed, HV]`, size of what the erase step takes out: γ ‖Ŝᵀu‖. */
  removed: Float32Array[];
  /** Relative l2 error of the outputs against the float64 ones of the file. */
  error: number;
  computeMs: number;
}

/** A logit whose sigmoid is 0, or 1, in float32. */
const [CLOSED, OPEN] = [-100, 30];
/** Every so many tokens the erase step is tried. */
const STRIDE = 8;

type Raw = Record<"q" | "k" | "v" | "e" | "a" | "A_log" | "dt_bias" | "beta_logit" | "gamma_logit", Float32Array>;

/** The same numbers everywhere (Mulberry32), then Box-Muller. */
function gaussians(seed: number): () => number {
  const uniform = () => {
    seed = (seed + 0x6d2b79f5) | 0;
    let x = Math.imul(seed ^ (seed >>> 15), 1 | seed);
    x = (x + Math.imul(x ^ (x >>> 7), 61 | x)) ^ x;
    return ((x ^ (x >>> 14)) >>> 0) / 2 ** 32;
  };
  return () => Math.sqrt(-2 * Math.log(1 - uniform())) * Math.cos(2 * Math.PI * uniform());
}

const filled = (length: number, value: number) => new Float32Array(length).fill(value);

function norm(x: ArrayLike<number>): number {
  let sum = 0;
  for (let i = 0; i < x.length; i++) sum += x[i]! ** 2;
  return Math.sqrt(sum);
}

export async function layer(eda: Eda, url: string, follow: Follow): Promise<Layer> {
  const tell = (part: number, what: string) => follow.onProgress(part, 100, what);
  tell(0, "loading");
  const response = await fetch(url, { signal: follow.signal });
  if (!response.ok) throw new Error(`${url} could not be loaded: ${response.status} ${response.statusText}`);
  const { problem, tensors, expected } = Eda.read(await response.arrayBuffer(), url);
  const raw = tensors as Raw;
  const { T, H, HV, K, V } = problem;

  tell(20, "the layer");
  const { o, computeMs } = await eda.prefill(problem, tensors, { signal: follow.signal });
  const right = expected.o;
  if (!right) throw new Error(`${url} holds no outputs to compare with.`);
  const error = norm(o.map((x, i) => x - right[i]!)) / norm(right);

  tell(35, "gates");
  // Each token alone (packed sequences of one), its gates closed, on a state of ones with one value column: what is
  // left of it is α.
  const alone: Problem = { ...problem, V: 1, cu_seqlens: Array.from({ length: T + 1 }, (_, t) => t), scale: 1 };
  const closed = filled(T * HV, CLOSED);
  const decays = await eda.prefill(alone, {
    ...raw,
    v: filled(T * HV, 0),
    beta_logit: closed,
    gamma_logit: closed,
    initial_state: filled(T * HV * K, 1),
  });
  const retention = filled(T * HV, 0);
  decays.final_state.forEach((alpha, i) => (retention[Math.floor(i / K)]! += alpha / K));
  // An empty memory is written 1 at k and read at k: the output is the write gate.
  const gate = async (logit: Float32Array, query: Float32Array) => {
    const written = { ...raw, q: query, v: filled(T * HV, 1), beta_logit: logit, gamma_logit: closed };
    return (await eda.prefill(alone, written)).o;
  };
  const beta = await gate(raw.beta_logit, raw.k);
  const gamma = await gate(raw.gamma_logit, raw.k);
  // Written in full at k and read at e: the output is their cosine.
  const open = await gate(filled(T * HV, OPEN), raw.e);
  const cosine = filled(T * H, 0).map((_, i) => open[Math.floor(i / H) * HV + (i % H) * (HV / H)]!);

  tell(55, "erase directions");
  const names = ["q", "k", "v", "e", "a", "beta_logit", "gamma_logit"] as const;
  const sizes = { q: H * K, k: H * K, v: HV * V, e: H * K, a: raw.a.length / T, beta_logit: HV, gamma_logit: HV };
  const at = (name: (typeof names)[number], t: number, count = 1) =>
    raw[name].subarray(t * sizes[name], (t + count) * sizes[name]);
  const gaussian = gaussians(1);
  const probed: number[] = [];
  const change: number[][] = directions.map(() => []);
  const removed: number[][] = directions.map(() => []);
  // No erase; the erase along each direction; no erase, read at each direction.
  const tries = directions.length;
  const rows = 1 + 2 * tries;
  const pool = await eda.pool(problem, rows + 1);
  const { A_log, dt_bias } = raw;
  try {
    for (let t = STRIDE; t + STRIDE <= T; t += STRIDE) {
      // Slot 0 holds the state before token t.
      await eda.decode(pool, { ...problem, B: 1, T: STRIDE }, slice(t - STRIDE, STRIDE), [0]);
      for (let row = 0; row < rows; row++) await pool.copy(0, 1 + row);
      const random = filled(H * K, 0).map(() => gaussian());
      // Half of the text away: another token's direction, of the same head.
      const shuffled = at("e", (t + T / 2) % T);
      const tried = [at("e", t), random, shuffled, at("k", t)];
      const join = (each: (row: number) => Float32Array) => {
        const parts = Array.from({ length: rows }, (_, row) => each(row));
        const out = new Float32Array(parts[0]!.length * rows);
        parts.forEach((part, row) => out.set(part, row * part.length));
        return out;
      };
      const probe: Tensors = {
        q: join((row) => (row > tries ? tried[row - 1 - tries]! : at("q", t))),
        k: join(() => at("k", t)),
        v: join(() => at("v", t)),
        a: join(() => at("a", t)),
        e: join((row) => tried[(row + tries - 1) % tries]!),
        beta_logit: filled(rows * HV, CLOSED),
        gamma_logit: join((row) => (row === 0 || row > tries ? filled(HV, CLOSED) : at("gamma_logit", t))),
        A_log,
        dt_bias,
      };
      const slots = Array.from({ length: rows }, (_, row) => 1 + row);
      const read = (await eda.decode(pool, { ...problem, B: rows, T: 1, scale: 1 }, probe, slots)).o;
      probed.push(t);
      for (let head = 0; head < HV; head++) {
        const of = (row: number) => read.subarray((row * HV + head) * V, (row * HV + head + 1) * V);
        const before = of(0);
        directions.forEach((_, i) => {
          change[i]!.push(norm(of(i + 1).map((x, j) => x - before[j]!)) / Math.max(norm(before), 1e-12));
          removed[i]!.push(gamma[t * HV + head]! * norm(of(1 + tries + i)));
        });
      }
      follow.signal.throwIfAborted();
      tell(55 + (45 * t) / T, "erase directions");
    }
  } finally {
    pool.destroy();
  }
  tell(100, "");
  return {
    T,
    H,
    HV,
    K,
    retention,
    beta,
    gamma,
    cosine,
    probed,
    change: change.map((x) => Float32Array.from(x)),
    removed: removed.map((x) => Float32Array.from(x)),
    error,
    computeMs,
  };

  function slice(from: number, count: number): Tensors {
    const out: Tensors = { A_log, dt_bias };
    for (const name of names) out[name] = at(name, from, count);
    return out;
  }
}
