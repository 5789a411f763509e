// Short stories for the memory. Addresses are given as directions; they are brought to unit norm when they are used.
import type { Token } from "./trace";

export interface Step extends Omit<Token, "alpha"> {
  label: string;
  /** One decay for all channels. */
  alpha: number;
}

export interface Preset {
  name: string;
  story: string;
  K: number;
  V: number;
  initial: number[];
  /** The address whose read-out is followed, and what was stored there. */
  stale: { label: string; address: number[]; value: number[] };
  tokens: Step[];
}

/** Basis vector `i` of eight, with some of another. */
function axis(i: number, other?: number, part = 0): number[] {
  const x = Array<number>(8).fill(0);
  x[i] = Math.sqrt(1 - part * part);
  if (other !== undefined) x[other] = part;
  return x;
}

// Eight values that look different: rows of a Hadamard matrix.
const values = Array.from({ length: 8 }, (_, row) =>
  Array.from({ length: 8 }, (_, column) => {
    let ones = 0;
    for (let bits = row & column; bits; bits >>= 1) ones += bits & 1;
    return ones % 2 ? -1 : 1;
  }),
);

const write = (label: string, k: number[], v: number[], more: Partial<Step> = {}): Step => ({
  label,
  alpha: 0.98,
  beta: 0.9,
  gamma: 0,
  k,
  e: k,
  v,
  ...more,
});

const empty = { K: 8, V: 8, initial: Array<number>(64).fill(0) };

const red = axis(0);
const place = axis(0, 1, 0.25);
const topic = (i: number) => axis(i, 7, 0.6);

export const presets: Preset[] = [
  {
    name: "Worked example",
    story:
      "Two keys, one value: the memory holds 3 at the first key and 5 at the second. One token erases at the first and writes 7 at the second: (3, 5) → (0, 5) → (0, 7). A delta rule alone cannot touch the 3, because it corrects only where it writes.",
    K: 2,
    V: 1,
    initial: [3, 5],
    stale: { label: "first key", address: [1, 0], value: [3] },
    tokens: [{ label: "write 7, erase the 3", alpha: 1, beta: 1, gamma: 1, e: [1, 0], k: [0, 1], v: [7] }],
  },
  {
    name: "Reassign a variable",
    story:
      "x = red is stored under the address of its first mention. Later x = blue arrives under an address of its own (another place in the program, cosine 0.25). The erase step cleans the old address in the same token; without it red stays readable there.",
    ...empty,
    stale: { label: "x, first mention", address: red, value: values[1]! },
    tokens: [
      write("x = red", red, values[1]!),
      write("y = 4", axis(2), values[2]!),
      write("print y", axis(3), values[3]!, { beta: 0.4 }),
      write("x = blue", place, values[5]!, { e: red, gamma: 0.95 }),
      write("z = 9", axis(4), values[4]!),
      write("print x", axis(5), values[6]!, { beta: 0.4 }),
    ],
  },
  {
    name: "Fact correction",
    story:
      "A fact is stated twice in different words, so it lies at two addresses. The correction is written at a third, and erases along what the first two share. The delta rule corrects only the share of the old fact that lies along the new address.",
    ...empty,
    stale: { label: "the first wording", address: axis(1), value: values[3]! },
    tokens: [
      write("the capital is Sydney", axis(1), values[3]!),
      write("Sydney, the seat", axis(2), values[3]!),
      write("a harbour", axis(4), values[6]!, { beta: 0.6 }),
      write("no: Canberra", axis(3, 1, 0.4), values[5]!, { e: axis(1, 2, 0.7), gamma: 0.9 }),
      write("on a lake", axis(5), values[2]!, { beta: 0.6 }),
      write("inland", axis(6), values[7]!, { beta: 0.6 }),
    ],
  },
  {
    name: "Context shift",
    story:
      "Three facts of one topic share a direction of their addresses. When the topic changes, the tokens of the new one write elsewhere, and each erases some of one old fact. Decay alone is slow (α = 0.98), as it has to be for the new facts to last.",
    ...empty,
    stale: { label: "the first old fact", address: topic(0), value: values[1]! },
    tokens: [
      write("old fact 1", topic(0), values[1]!),
      write("old fact 2", topic(1), values[2]!),
      write("old fact 3", topic(2), values[3]!),
      write("new topic", axis(3), values[4]!, { e: axis(7), gamma: 0.8 }),
      write("new fact 1", axis(4), values[5]!, { e: topic(0), gamma: 0.8 }),
      write("new fact 2", axis(5), values[6]!, { e: topic(1), gamma: 0.8 }),
      write("new fact 3", axis(6), values[7]!, { e: topic(2), gamma: 0.8 }),
    ],
  },
];
