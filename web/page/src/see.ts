// View 1: a small memory, sub-step by sub-step.
import { byId, digits, eachFrame, h, message, short } from "./dom";
import { call, onState } from "./engine";
import { Plot } from "./plot";
import { presets, type Preset, type Step } from "./presets";
import type { SubStep, Trace } from "./trace";

const SUB_STEPS = ["decay", "erase along e", "correct and write along k"] as const;
const PLAY_MS = 900;

type Vector = "e" | "k" | "v";

let preset: Preset;
let tokens: Step[];
let token = 0;
/** 0 is the state before the first token; then three sub-steps a token. */
let position = 0;
let result: Trace | undefined;
let timer: ReturnType<typeof setInterval> | undefined;
/** Answers to older questions are not shown. */
let asked = 0;

function unit(x: number[]): number[] {
  const size = Math.hypot(...x);
  return size > 1e-6 ? x.map((value) => value / size) : x.map((_, i) => (i === 0 ? 1 : 0));
}

const presetList = h("div", { class: "choices", role: "group", "aria-label": "Presets" });
const story = h("p", { class: "story" });
const strip = h("ol", { class: "tokens", "aria-label": "Tokens" });
const back = h("button", { type: "button", onclick: () => go(position - 1) }, "Back");
const forward = h("button", { type: "button", onclick: () => go(position + 1) }, "Next");
const play = h("button", { type: "button", "aria-pressed": "false", onclick: toggle }, "Play");
const where = h("input", {
  type: "range",
  id: "position",
  min: "0",
  step: "1",
  oninput: () => {
    stop();
    go(Number(where.value), true);
  },
});
const phase = h("p", { class: "phase", id: "phase", "aria-live": "polite" });
const status = h("p", { class: "status", role: "status" });
const equations = h("ol", { class: "equations", "aria-label": "What a token does to the memory" });
const memories = h("div", { class: "memories" });
const editor = h("div", { class: "editor" });
const staleLine = h("p");
const plot = new Plot({
  title: "How much of the old value the stale address still reads (1: all of it, 0: nothing)",
  x: { label: "tokens, three sub-steps each", increments: [3], values: (x) => String(x / 3) },
  y: { label: "share", range: (low, high) => [Math.min(0, low) - 0.05, Math.max(1, high) + 0.05] },
  lines: [
    { label: "EDA", color: "--eda", points: true },
    { label: "KDA (γ = 0)", color: "--kda", dash: [6, 4], points: true },
    { label: "now", color: "--ink-soft", dash: [2, 3], width: 1 },
  ],
});

export function see(): void {
  const view = byId("view-see");
  for (const each of presets) {
    presetList.append(h("button", { type: "button", onclick: () => choose(each) }, each.name));
  }
  view.append(
    h("h2", { id: "see-title" }, "See it"),
    presetList,
    story,
    strip,
    h(
      "div",
      { class: "transport", role: "group", "aria-label": "Steps" },
      h("button", { type: "button", onclick: () => go(0) }, "Start"),
      back,
      forward,
      play,
      h("label", { for: "position", class: "visually-hidden" }, "Position"),
      where,
    ),
    phase,
    equations,
    memories,
    status,
    editor,
    plot.element,
    staleLine,
  );
  choose(presets[0]!);
  onState((state) => {
    if (state && !(state instanceof Error)) compute();
  });
}

function choose(chosen: Preset): void {
  stop();
  preset = chosen;
  tokens = structuredClone(chosen.tokens);
  for (const button of presetList.children) {
    button.setAttribute("aria-pressed", String(button.textContent === chosen.name));
  }
  story.textContent = chosen.story;
  where.max = String(3 * tokens.length);
  token = 0;
  result = undefined;
  strip.replaceChildren(
    ...tokens.map((step, t) =>
      h("li", {}, h("button", { type: "button", onclick: () => { stop(); go(3 * t + 1); } }, step.label)),
    ),
  );
  memories.replaceChildren(memory("EDA", "eda"), memory("KDA (γ = 0)", "kda"));
  go(0);
  edit();
  compute();
}

function toggle(): void {
  if (timer !== undefined) {
    stop();
    return;
  }
  if (position === 3 * tokens.length) go(0);
  play.textContent = "Pause";
  play.setAttribute("aria-pressed", "true");
  timer = setInterval(() => {
    go(position + 1, true);
    if (position === 3 * tokens.length) stop();
  }, PLAY_MS);
}

function stop(): void {
  clearInterval(timer);
  timer = undefined;
  play.textContent = "Play";
  play.setAttribute("aria-pressed", "false");
}

function go(to: number, playing = false): void {
  if (!playing) stop();
  position = Math.max(0, Math.min(3 * tokens.length, to));
  const before = token;
  token = Math.max(0, Math.ceil(position / 3) - 1);
  if (token !== before) edit();
  show();
}

const compute = eachFrame(() => {
  const id = ++asked;
  const { K, V, initial, stale } = preset;
  const input = {
    K,
    V,
    initial,
    address: unit(stale.address),
    tokens: tokens.map((t) => ({
      alpha: Array<number>(K).fill(t.alpha),
      beta: t.beta,
      gamma: t.gamma,
      e: unit(t.e),
      k: unit(t.k),
      v: t.v,
    })),
  };
  call("trace", input).then(
    (trace) => {
      if (id !== asked) return;
      result = trace;
      status.textContent = `Computed by the engine in ${trace.computeMs < 0.1 ? "less than 0.1" : short(trace.computeMs)} ms: all sub-steps of all tokens, both rules.`;
      show();
      drawStale();
    },
    (error: unknown) => {
      if (id === asked) status.textContent = `Not computed: ${message(error)}`;
    },
  );
});

function at(which: "eda" | "kda", position: number): SubStep | undefined {
  if (position === 0) return undefined;
  return result?.[which][Math.ceil(position / 3) - 1]?.[(position - 1) % 3];
}

/** The table of a memory; its cells are filled by `show`. */
function memory(name: string, which: "eda" | "kda"): HTMLElement {
  const { K, V } = preset;
  const rows = Array.from({ length: K }, (_, key) =>
    h(
      "tr",
      {},
      h("th", { scope: "row" }, `key ${key + 1}`),
      Array.from({ length: V }, () => h("td")),
    ),
  );
  const head = h("tr", {}, h("td"), Array.from({ length: V }, (_, v) => h("th", { scope: "col" }, V === 1 ? "value" : String(v + 1))));
  return h(
    "figure",
    { class: `memory ${which}` },
    h("figcaption", {}, name),
    h("div", { class: "scroll" }, h("table", { id: `memory-${which}`, class: K > 2 ? "heat" : "heat large" }, h("caption", { class: "visually-hidden" }, `Memory of ${name}`), h("thead", {}, head), h("tbody", {}, rows))),
    h("p", { class: "read", id: `read-${which}` }),
  );
}

function show(): void {
  where.value = String(position);
  back.disabled = position === 0;
  forward.disabled = position === 3 * tokens.length;
  const sub = (position - 1) % 3;
  const label = position === 0 ? "Before the first token" : `Token ${token + 1} of ${tokens.length}, “${tokens[token]!.label}”: ${SUB_STEPS[sub]}`;
  if (phase.textContent !== label) phase.textContent = label;
  where.setAttribute("aria-valuetext", label);
  [...strip.children].forEach((item, t) => {
    const button = item.firstElementChild!;
    if (position > 0 && t === token) button.setAttribute("aria-current", "step");
    else button.removeAttribute("aria-current");
  });
  const { alpha, beta, gamma } = tokens[token]!;
  equations.replaceChildren(
    ...[
      ["Decay", "S ← Diag(α) S", `α = ${digits(alpha)}`],
      ["Erase along e", "S ← S − γ e (eᵀ S)", `γ = ${digits(gamma)}`],
      ["Correct and write along k", "S ← S + β k (v − kᵀ S)ᵀ", `β = ${digits(beta)}`],
    ].map(([name, equation, value], i) =>
      h(
        "li",
        { class: position > 0 && sub === i ? "now" : "", ...(position > 0 && sub === i && { "aria-current": "step" }) },
        h("span", { class: "name" }, name),
        h("span", { class: "equation" }, equation),
        h("span", { class: "value" }, value),
      ),
    ),
  );
  for (const which of ["eda", "kda"] as const) fill(which);
  drawStale();
}

function fill(which: "eda" | "kda"): void {
  const table = byId<HTMLTableElement>(`memory-${which}`);
  if (!table) return;
  const { K, V } = preset;
  const known = position === 0 || result !== undefined;
  const state: ArrayLike<number> = at(which, position)?.state ?? preset.initial;
  const before: ArrayLike<number> = at(which, position - 1)?.state ?? preset.initial;
  const most = Math.max(1, ...Array.from(preset.initial, Math.abs), ...tokens.flatMap((t) => t.v.map(Math.abs)));
  table.setAttribute("aria-busy", String(!known));
  const rows = table.tBodies[0]!.rows;
  for (let key = 0; key < K; key++) {
    for (let v = 0; v < V; v++) {
      const cell = rows[key]!.cells[v + 1]!;
      const value = state[key * V + v] ?? 0;
      cell.textContent = known ? digits(value, V === 1 ? 2 : 1) : "…";
      cell.style.setProperty("--share", `${Math.round(Math.min(1, Math.abs(value) / most) * 62)}%`);
      cell.className = `${value < -5e-4 ? "negative" : "positive"}${known && position > 0 && Math.abs(value - (before[key * V + v] ?? 0)) > 5e-4 ? " changed" : ""}`;
    }
  }
  const unchanged = which === "kda" && position > 0 && (position - 1) % 3 === 1;
  byId(`read-${which}`).textContent = !known
    ? ""
    : unchanged
      ? `No erase step here. The stale address reads ${digits(share(which, position))} of the old value.`
      : `The stale address reads ${digits(share(which, position))} of the old value.`;
}

/** The part of the old value in what the stale address reads. */
function share(which: "eda" | "kda", position: number): number {
  const { value, address } = preset.stale;
  const read = at(which, position)?.read;
  const dot = (x: ArrayLike<number>) => value.reduce((sum, v, i) => sum + v * (x[i] ?? 0), 0);
  const size = dot(value);
  if (read) return dot(read) / size;
  // Before the first token nothing has run; the memory is the one that is given.
  const { V, initial } = preset;
  const key = unit(address);
  return dot(value.map((_, v) => key.reduce((sum, k, i) => sum + k * initial[i * V + v]!, 0))) / size;
}

function drawStale(): void {
  if (!result) return;
  const steps = Array.from({ length: 3 * tokens.length + 1 }, (_, i) => i);
  const line = (which: "eda" | "kda") => steps.map((i) => share(which, i));
  const [eda, kda] = [line("eda"), line("kda")];
  const now = steps.map((i) => (i === position ? Math.max(1, ...eda, ...kda) : null));
  // A stem at the position, made of two points with the same place.
  const xs = [...steps];
  const at = position + 1;
  xs.splice(at, 0, position);
  const twice = <T>(values: T[]): T[] => [...values.slice(0, at), values[at - 1]!, ...values.slice(at)];
  const stem = twice(now);
  stem[at] = 0;
  plot.set(
    [xs, twice(eda), twice(kda), stem],
    `Stale address: ${preset.stale.label}. At the end it reads ${digits(eda.at(-1)!)} of the old value with EDA, ${digits(kda.at(-1)!)} with KDA.`,
  );
}

function edit(): void {
  const step = tokens[token]!;
  const gate = (name: "alpha" | "gamma" | "beta", symbol: string, what: string) => {
    const output = h("output", { for: `gate-${name}` }, digits(step[name]));
    const input = h("input", {
      type: "range",
      id: `gate-${name}`,
      min: "0",
      max: "1",
      step: "0.01",
      value: String(step[name]),
      oninput: () => {
        step[name] = Number(input.value);
        output.textContent = digits(step[name]);
        compute();
      },
    });
    return h("div", { class: "gate" }, h("label", { for: input.id }, `${symbol}, ${what}`), input, output);
  };
  // What shows a vector is brought up to date when another control changes it.
  const shows: (() => void)[] = [];
  const changed = () => {
    for (const show of shows) show();
    compute();
  };
  const vector = (name: Vector, what: string) => {
    const values = step[name];
    const range = name === "v" ? Math.max(...values.map(Math.abs), 1) * 1.5 : 1;
    const shown = h("p", { class: "numbers", id: `vector-${name}` });
    const tell = () => {
      shown.textContent = `(${(name === "v" ? values : unit(values)).map((x) => digits(x)).join(", ")})`;
    };
    tell();
    shows.push(tell);
    return h(
      "fieldset",
      { class: `vector ${name}` },
      h("legend", {}, `${name}, ${what}`),
      h(
        "div",
        { class: "bars" },
        values.map((value, i) => {
          const input = h("input", {
            type: "range",
            min: String(-range),
            max: String(range),
            step: String(range / 50),
            value: String(value),
            "aria-label": `${name}, component ${i + 1}`,
            "aria-orientation": "vertical",
            oninput: () => {
              values[i] = Number(input.value);
              changed();
            },
          });
          shows.push(() => {
            // Not while it is being moved: it would be set to a step of its own.
            if (Number(input.value) !== values[i]) input.value = String(values[i]);
          });
          return input;
        }),
      ),
      shown,
    );
  };
  editor.replaceChildren(
    h("h3", {}, `Change token ${token + 1}, “${step.label}”`),
    h(
      "div",
      { class: "gates" },
      gate("alpha", "α", "what decay leaves"),
      gate("gamma", "γ", "erase gate"),
      gate("beta", "β", "write gate"),
    ),
    h("div", { class: "vectors" }, vector("e", "erase address"), vector("k", "write address"), vector("v", "value")),
    preset.K === 2 ? plane(step, shows, changed) : "",
    h(
      "p",
      { class: "hint" },
      "Drag a component up or down, or use the arrow keys. Addresses are brought to unit length. ",
      h("button", { type: "button", onclick: () => choose(preset) }, "Reset"),
    ),
  );
}

const SVG = "http://www.w3.org/2000/svg";

function svg<K extends keyof SVGElementTagNameMap>(tag: K, attributes: Record<string, string>): SVGElementTagNameMap[K] {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

/** Two addresses of two components as arrows in their plane, to be turned by a pointer or by the arrow keys. */
function plane(step: Step, shows: (() => void)[], changed: () => void): HTMLElement {
  const drawing = svg("svg", { viewBox: "-1.35 -1.35 2.7 2.7", class: "plane" });
  drawing.append(
    svg("circle", { r: "1", class: "round" }),
    svg("path", { d: "M -1.25 0 H 1.25 M 0 1.25 V -1.25", class: "axes" }),
  );
  const arrow = (name: "e" | "k", what: string) => {
    const group = svg("g", { class: `arrow ${name}`, tabindex: "0", role: "slider", "aria-label": `${name}, ${what}, direction`, "aria-valuemin": "-180", "aria-valuemax": "180" });
    const line = svg("path", { class: "shaft" });
    const tip = svg("circle", { r: "0.11", class: "tip" });
    const letter = svg("text", { "aria-hidden": "true" });
    letter.textContent = name;
    group.append(line, tip, letter);
    const degrees = () => Math.round((Math.atan2(step[name][1]!, step[name][0]!) * 180) / Math.PI);
    const turn = (to: number) => {
      const angle = (to * Math.PI) / 180;
      step[name][0] = Math.cos(angle);
      step[name][1] = Math.sin(angle);
      changed();
    };
    const show = () => {
      const [x, y] = unit(step[name]) as [number, number];
      line.setAttribute("d", `M 0 0 L ${x} ${-y}`);
      tip.setAttribute("cx", String(x));
      tip.setAttribute("cy", String(-y));
      letter.setAttribute("x", String(1.2 * x));
      letter.setAttribute("y", String(-1.2 * y));
      group.setAttribute("aria-valuenow", String(degrees()));
      group.setAttribute("aria-valuetext", `${degrees()} degrees`);
    };
    show();
    shows.push(show);
    group.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: 5, ArrowUp: 5, ArrowRight: -5, ArrowDown: -5 }[event.key];
      if (by === undefined) return;
      event.preventDefault();
      turn(degrees() + by);
    });
    group.addEventListener("pointerdown", (event) => {
      event.preventDefault();
      group.focus();
      group.setPointerCapture(event.pointerId);
    });
    group.addEventListener("pointermove", (event) => {
      if (!group.hasPointerCapture(event.pointerId)) return;
      const box = drawing.getBoundingClientRect();
      const x = event.clientX - box.left - box.width / 2;
      const y = box.top + box.height / 2 - event.clientY;
      // By whole steps of five degrees, so that right angles are easily met.
      if (Math.hypot(x, y) > 4) turn(Math.round((Math.atan2(y, x) * 180) / Math.PI / 5) * 5);
    });
    return group;
  };
  drawing.append(arrow("k", "write address"), arrow("e", "erase address"));
  return h("figure", {}, h("figcaption", {}, "Both addresses: turn them"), drawing);
}
