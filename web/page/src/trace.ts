// The sub-steps of a few tokens, from one prefill: each state asked for is the end of a packed sequence of its own,
// whose last token has its gates closed for the sub-steps that are still to come.
import type { Eda } from "eda-wgpu";

export interface Token {
  /** `[K]`, decay of each channel. */
  alpha: number[];
  beta: number;
  gamma: number;
  /** `[K]`, unit norm. */
  e: number[];
  /** `[K]`, unit norm. */
  k: number[];
  /** `[V]`. */
  v: number[];
}

export interface TraceInput {
  K: number;
  V: number;
  /** `[K, V]`. */
  initial: number[];
  tokens: Token[];
  /** `[K]`, the address that is read after each sub-step. */
  address: number[];
}

export interface SubStep {
  /** `[K, V]`. */
  state: Float32Array;
  /** `[V]`, what the address reads. */
  read: Float32Array;
}

/** For each token: after the decay, after the erase, after the write. */
export type Steps = [SubStep, SubStep, SubStep][];

export interface Trace {
  eda: Steps;
  /** γ = 0. */
  kda: Steps;
  computeMs: number;
}

export async function trace(eda: Eda, input: TraceInput): Promise<Trace> {
  const { K, V, tokens, address, initial } = input;
  // What the last token still does; the tokens before it are whole.
  const ends = [
    { erases: true, last: { gamma: 0, beta: 0 } },
    { erases: true, last: { gamma: 1, beta: 0 } },
    { erases: true, last: { gamma: 1, beta: 1 } },
    { erases: false, last: { gamma: 0, beta: 0 } },
    { erases: false, last: { gamma: 0, beta: 1 } },
  ];
  const all: (Token & { last: boolean })[] = [];
  const offsets = [0];
  for (let t = 0; t < tokens.length; t++) {
    for (const { erases, last } of ends) {
      for (let s = 0; s <= t; s++) {
        const token = tokens[s]!;
        const open = s < t ? { gamma: 1, beta: 1 } : last;
        all.push({
          ...token,
          gamma: erases ? token.gamma * open.gamma : 0,
          beta: token.beta * open.beta,
          last: s === t,
        });
      }
      offsets.push(all.length);
    }
  }
  const T = all.length;
  const N = offsets.length - 1;
  const flat = (each: (token: Token) => number[]) => new Float32Array(all.flatMap(each));
  const result = await eda.prefill(
    { rule: "eda", B: 1, T, H: 1, HV: 1, K, V, scale: 1, cu_seqlens: offsets },
    {
      q: flat(() => address),
      k: flat((t) => t.k),
      e: flat((t) => t.e),
      v: flat((t) => t.v),
      g: flat((t) => t.alpha.map(Math.log)),
      beta: flat((t) => [t.beta]),
      gamma: flat((t) => [t.gamma]),
      initial_state: new Float32Array(Array.from({ length: N }, () => initial).flat()),
    },
  );
  const subStep = (n: number): SubStep => {
    const last = offsets[n + 1]! - 1;
    return {
      state: result.final_state.slice(n * K * V, (n + 1) * K * V),
      read: result.o.slice(last * V, (last + 1) * V),
    };
  };
  const steps = (of: [number, number, number]): Steps =>
    tokens.map((_, t) => of.map((i) => subStep(t * ends.length + i)) as Steps[number]);
  return { eda: steps([0, 1, 2]), kda: steps([3, 3, 4]), computeMs: result.computeMs };
}
