// View 2: what the erase path of a trained layer does on real text.
import { byId, digits, h, message, short } from "./dom";
import { call } from "./engine";
import { directions, type Layer } from "./layer-analysis";
import { Plot } from "./plot";

const LAYERS = 3;
/** Tokens that a point over time is the mean of, so that lines can be followed. */
const SMOOTH = 16;
const BINS = 10;

let data: Layer | undefined;
let text = "";
let cursor = 0;
let control: AbortController | undefined;

const layerChoice = h(
  "select",
  { id: "layer-choice", onchange: () => void load() },
  Array.from({ length: LAYERS }, (_, i) => h("option", { value: String(i) }, `Layer ${i}`)),
);
const headChoice = h("select", { id: "head", disabled: true, onchange: () => show() }, h("option", { value: "" }, "All heads"));
const bar = h("progress", { value: 0, max: 100, "aria-label": "Progress of the analysis", hidden: true });
const status = h("p", { class: "status", role: "status", id: "layer-status" });
const again = h("button", { type: "button", hidden: true, onclick: () => void load() }, "Try again");
const place = h("input", { type: "range", id: "token", min: "0", value: "0", step: "1", disabled: true, oninput: () => point(Number(place.value)) });
const here = h("p", { id: "here", class: "here" });
const passage = h("div", { class: "text", id: "passage", tabindex: "0", role: "region", "aria-label": "The text" });
const mark = h("mark");

const shareLines = [
  { label: "q_D, decay", color: "--third" },
  { label: "q_Δ, write", color: "--kda", dash: [8, 3] },
  { label: "q_E, erase", color: "--eda" },
];
const unitRange = (_: number, high: number): [number, number] => [0, Math.max(high, 0.1) * 1.05];
const overTime = new Plot({
  title: `Gate shares over the text (means of ${SMOOTH} tokens)`,
  x: { label: "token" },
  y: { label: "share", range: unitRange },
  lines: shareLines,
  onCursor: (i) => point(i),
});
const byRetention = new Plot({
  title: "Gate shares by mean retention (tenths of all tokens and heads, from strong to weak decay)",
  x: { label: "mean retention ᾱ" },
  y: { label: "share", range: unitRange },
  lines: shareLines.map((line) => ({ ...line, points: true })),
});
const cosines = new Plot({
  title: "|cos(e, k)|: the layer’s addresses, and random directions",
  x: { label: "|cos(e, k)|", range: [0, 1] },
  y: { label: "density", range: unitRange },
  lines: [
    { label: "this layer", color: "--eda", steps: true },
    { label: "random unit vectors, exact", color: "--kda", dash: [6, 4] },
  ],
});
const directionLines = [
  { label: directions[0], color: "--eda" },
  { label: directions[1], color: "--kda", dash: [6, 4] },
  { label: directions[2], color: "--third", dash: [2, 3] },
  { label: directions[3], color: "--fourth", dash: [10, 3, 2, 3] },
];
const changes = new Plot({
  title: "Change of the read-out by the erase step, over the text",
  x: { label: "token" },
  y: { label: "relative change", range: unitRange },
  lines: directionLines,
  onCursor: (i) => data && point(data.probed[i]!),
});
const changeRows = h("tbody");

export function layerView(): void {
  byId("view-layer").append(
    h("h2", { id: "layer-title" }, "See a real layer"),
    h(
      "p",
      {},
      "1,024 bytes of the King James Bible, as they reach the memories of a small trained language model (three EDA layers, two key heads, four value heads, 64 × 64 each). Every number below comes from runs of the kernels on these inputs.",
    ),
    h(
      "p",
      { class: "options" },
      h("span", {}, h("label", { for: "layer-choice" }, "Input "), layerChoice),
      h("span", {}, h("label", { for: "head" }, "Heads "), headChoice),
    ),
    bar,
    status,
    again,
    h("h3", {}, "The text under the cursor"),
    h("div", { class: "transport" }, h("label", { for: "token" }, "Token"), place),
    here,
    passage,
    h("div", { class: "plots" }, overTime.element, byRetention.element, cosines.element, changes.element),
    h("h3", {}, "Change of the read-out by the erase step"),
    h(
      "div",
      { class: "scroll", tabindex: "0", role: "region", "aria-label": "Change of the read-out by direction" },
      h(
        "table",
        { class: "results", id: "change-table" },
        h("thead", {}, h("tr", {}, ["Direction", "Change, mean", "", "Median", "Against random", "Removed, mean", "Against random"].map((name) => h(name ? "th" : "td", name ? { scope: "col" } : {}, name)))),
        changeRows,
      ),
    ),
    definitions(),
  );
  passage.addEventListener("pointermove", (event) => pick(event));
  passage.addEventListener("pointerdown", (event) => pick(event));
  void load();
}

function definitions(): HTMLElement {
  const term = (name: string, ...meaning: (string | Node)[]) => [h("dt", {}, name), h("dd", {}, ...meaning)];
  return h(
    "details",
    { open: true, class: "definitions" },
    h("summary", {}, "What is plotted"),
    h(
      "dl",
      {},
      term(
        "Gate shares",
        "For a token and a value head, the three ways to forget are u_D = 1 − ᾱ (ᾱ is the mean of α over the 64 channels), u_Δ = β and u_E = γ; q_D, q_Δ and q_E are their parts of u_D + u_Δ + u_E. Where all heads are shown, the mean over heads.",
      ),
      term(
        "|cos(e, k)|",
        "e and k as the kernel normalises them, one value for each token and key head. For independent random directions in n = 64 dimensions its density is proportional to (1 − x²)^((n − 3)/2), with mean ",
        h("span", { id: "random-mean" }, "0.100"),
        ".",
      ),
      term(
        "Change of the read-out",
        "At every eighth token, with the state Ŝ after the decay and the token’s own query q: ‖γ (q·u) Ŝᵀu‖ / ‖Ŝᵀq‖, the change of the read-out Ŝᵀq by an erase step along u, before anything is written. Removed is γ ‖Ŝᵀu‖, the size of what the step takes out of the memory. u is the layer’s own e; a random direction; e of the token half of the text away (same head); or the write address k.",
      ),
      term("How", "α is what a memory of ones keeps under closed gates; β, γ and cos(e, k) are what an empty memory reads after one write; read-outs are single decode steps on copies of the state."),
      term("The paper", "It makes the same comparisons in its update analysis and memory probes (Eqs. 23-24, Fig. 2). The formulas above are those of this page, and may differ from the paper’s in detail; so may a layer of a model this small from the paper’s."),
    ),
  );
}

async function load(): Promise<void> {
  control?.abort();
  const own = new AbortController();
  control = own;
  const name = layerChoice.value;
  again.hidden = true;
  bar.hidden = false;
  bar.value = 0;
  try {
    const [found, words] = await Promise.all([
      call("layer", new URL(`data/kjv_layer${name}.safetensors`, document.baseURI).href, {
        signal: own.signal,
        onProgress: (done, _, what) => {
          bar.value = done;
          if (what) status.textContent = `${Math.round(done)} %: ${what}`;
        },
      }),
      text || fetch("kjv.txt").then((r) => (r.ok ? r.text() : "")),
    ]);
    if (control !== own) return;
    data = found;
    text = words;
    setUp();
  } catch (error) {
    if (control !== own) return;
    status.textContent = `The layer was not read: ${message(error)}`;
    again.hidden = false;
  }
  bar.hidden = true;
}

function setUp(): void {
  const { T, HV, error, computeMs } = data!;
  if (headChoice.options.length === 1) {
    for (let head = 0; head < HV; head++) headChoice.append(h("option", { value: String(head) }, `Value head ${head}`));
  }
  headChoice.disabled = place.disabled = false;
  place.max = String(T - 1);
  status.textContent = `The layer’s ${T} tokens took ${short(computeMs)} ms; its outputs agree with the file’s float64 ones to ${error.toExponential(1)}.`;
  // A byte is a token here.
  passage.replaceChildren(text.length === T ? text : "The text of this input is not known; the cursor shows the number of the token.");
  show();
  point(cursor);
}

function heads(): number[] {
  const { HV } = data!;
  return headChoice.value === "" ? Array.from({ length: HV }, (_, i) => i) : [Number(headChoice.value)];
}

/** Shares of a token and head: q_D, q_Δ, q_E. */
function shares(t: number, head: number): [number, number, number] {
  const { HV, retention, beta, gamma } = data!;
  const i = t * HV + head;
  const u = [1 - retention[i]!, beta[i]!, gamma[i]!] as const;
  const sum = u[0] + u[1] + u[2];
  return [u[0] / sum, u[1] / sum, u[2] / sum];
}

const mean = (x: ArrayLike<number>) => Array.from(x).reduce((sum, value) => sum + value, 0) / x.length;

function tokenShares(t: number): [number, number, number] {
  const all = heads().map((head) => shares(t, head));
  return [0, 1, 2].map((i) => mean(all.map((q) => q[i]!))) as [number, number, number];
}

function show(): void {
  if (!data) return;
  const { T, H, HV, K, retention, cosine, probed, change, removed } = data;
  const chosen = heads();
  const times = Array.from({ length: T }, (_, t) => t);
  const tokens = times.map(tokenShares);
  const smooth = (i: number) =>
    times.map((t) => mean(tokens.slice(Math.max(0, t - SMOOTH / 2), t + SMOOTH / 2).map((q) => q[i]!)));
  const averages = [0, 1, 2].map((i) => mean(tokens.map((q) => q[i]!)));
  overTime.set(
    [times, smooth(0), smooth(1), smooth(2)],
    `Means: decay ${digits(averages[0]!)}, write ${digits(averages[1]!)}, erase ${digits(averages[2]!)}.`,
  );

  const points = times
    .flatMap((t) => chosen.map((head) => ({ x: retention[t * HV + head]!, q: shares(t, head) })))
    .sort((a, b) => a.x - b.x);
  const bins = Array.from({ length: BINS }, (_, i) =>
    points.slice(Math.floor((i * points.length) / BINS), Math.floor(((i + 1) * points.length) / BINS)),
  );
  const bin = (i: number) => bins.map((part) => mean(part.map((p) => p.q[i]!)));
  const [first, last] = [bin(2)[0]!, bin(2).at(-1)!];
  byRetention.set(
    [bins.map((part) => mean(part.map((p) => p.x))), bin(0), bin(1), bin(2)],
    `Erase has a share of ${digits(first)} where decay is strongest and ${digits(last)} where it is weakest.`,
  );

  // A key head serves HV/H value heads.
  const keyHeads = [...new Set(chosen.map((head) => Math.floor(head / (HV / H))))];
  const found = times.flatMap((t) => keyHeads.map((head) => Math.abs(cosine[t * H + head]!)));
  const width = 0.02;
  const edges = Array.from({ length: 1 / width + 1 }, (_, i) => i * width);
  const counts = edges.map(() => 0);
  for (const x of found) counts[Math.min(Math.floor(x / width), edges.length - 2)]!++;
  const raw = (x: number) => (1 - x * x) ** ((K - 3) / 2);
  let area = 0;
  for (let i = 0; i < 10000; i++) area += raw((i + 0.5) / 10000) / 10000;
  let expected = 0;
  for (let i = 0; i < 10000; i++) expected += (((i + 0.5) / 10000) * raw((i + 0.5) / 10000)) / 10000 / area;
  cosines.set(
    [edges, counts.map((n) => n / found.length / width), edges.map((x) => raw(x) / area)],
    `Mean ${digits(mean(found), 3)}; of random directions ${digits(expected, 3)}.`,
  );
  byId("random-mean").textContent = digits(expected, 3);

  const over = change.map((x) => probed.map((_, p) => mean(chosen.map((head) => x[p * HV + head]!))));
  const means = over.map(mean);
  changes.set(
    [probed, ...over],
    `Means: ${directions.map((name, i) => `${name} ${short(means[i]!)}`).join(", ")}.`,
  );
  const most = Math.max(...means);
  const taken = removed.map((x) => mean(probed.flatMap((_, p) => chosen.map((head) => x[p * HV + head]!))));
  changeRows.replaceChildren(
    ...directions.map((name, i) => {
      const all = probed.flatMap((_, p) => chosen.map((head) => change[i]![p * HV + head]!)).sort((a, b) => a - b);
      const drawn = h("div", { class: "bar" });
      drawn.style.width = `${(means[i]! / most) * 100}%`;
      drawn.style.setProperty("--swatch", `var(${directionLines[i]!.color})`);
      return h(
        "tr",
        {},
        h("th", { scope: "row" }, name),
        h("td", { class: "number" }, short(means[i]!)),
        h("td", { class: "bars-cell" }, drawn),
        h("td", { class: "number" }, short(all[Math.floor(all.length / 2)]!)),
        h("td", { class: "number" }, `× ${short(means[i]! / means[1]!)}`),
        h("td", { class: "number" }, short(taken[i]!)),
        h("td", { class: "number" }, `× ${short(taken[i]! / taken[1]!)}`),
      );
    }),
  );
  point(cursor);
}

function pick(event: PointerEvent): void {
  if (!data || text.length !== data.T) return;
  const { clientX: x, clientY: y } = event;
  // Two names for the same: Firefox's and the others'.
  const from = document as Document & { caretPositionFromPoint?(x: number, y: number): { offsetNode: Node; offset: number } | null };
  let node: Node | undefined;
  let offset = 0;
  if (from.caretPositionFromPoint) {
    const caret = from.caretPositionFromPoint(x, y);
    if (caret) ({ offsetNode: node, offset } = caret);
  } else {
    const caret = document.caretRangeFromPoint?.(x, y);
    if (caret) {
      node = caret.startContainer;
      offset = caret.startOffset;
    }
  }
  if (!node || !passage.contains(node)) return;
  let before = 0;
  for (const child of passage.childNodes) {
    if (child === node || child.contains(node)) break;
    before += child.textContent!.length;
  }
  point(Math.min(before + offset, data.T - 1));
}

function point(t: number): void {
  if (!data) return;
  cursor = Math.max(0, Math.min(t, data.T - 1));
  place.value = String(cursor);
  const q = tokenShares(cursor);
  const known = text.length === data.T;
  const name = (c: string) => (c === "\n" ? "line break" : c === " " ? "space" : `“${c}”`);
  const retention = mean(heads().map((head) => data!.retention[cursor * data!.HV + head]!));
  const words = known ? `token ${cursor}, ${name(text[cursor]!)}` : `token ${cursor}`;
  here.textContent = `${words[0]!.toUpperCase()}${words.slice(1)}: decay ${digits(q[0])}, write ${digits(q[1])}, erase ${digits(q[2])}; mean retention ${digits(retention, 3)}`;
  place.setAttribute("aria-valuetext", here.textContent);
  if (known) {
    mark.textContent = text[cursor] === "\n" ? "↵\n" : text[cursor]!;
    passage.replaceChildren(text.slice(0, cursor), mark, text.slice(cursor + 1));
    // Within its own box, so that the page does not move.
    const top = mark.offsetTop - passage.offsetTop;
    if (top < passage.scrollTop || top > passage.scrollTop + passage.clientHeight - 24) passage.scrollTop = top - passage.clientHeight / 2;
  }
  overTime.cursor(cursor);
  const nearest = Math.max(0, Math.min(data.probed.length - 1, Math.round(cursor / data.probed[0]!) - 1));
  changes.cursor(nearest);
}
