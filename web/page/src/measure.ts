// View 4: benchmarks of this browser, beside those of others. The files are those of `eda bench --json`.
import type { Report, ReportCase } from "eda-wgpu";
import { byId, download, h, message, short } from "./dom";
import { call } from "./engine";
import { Plot } from "./plot";

interface Entry {
  name: string;
  report: Report;
  mine: boolean;
  /** Came with the page. */
  shipped: boolean;
  shown: boolean;
}

const colors = ["--eda", "--kda", "--third", "--fourth", "--fifth", "--sixth"];
const entries: Entry[] = [];
let mine: Report | undefined;
let control: AbortController | undefined;
let plot: Plot | undefined;

const option = (name: string, label: string, checked: boolean) => {
  const input = h("input", { type: "checkbox", value: name, checked, onchange: () => draw() });
  return { input, element: h("label", {}, input, ` ${label}`) };
};
const prefill = option("prefill", "prefill", true);
const decode = option("decode", "decode", true);
const eda = option("eda", "EDA", true);
const kda = option("kda", "KDA", false);
const effort = h(
  "select",
  { id: "effort" },
  h("option", { value: "quick" }, "Quick: small shapes, some seconds"),
  h("option", { value: "full" }, "Full: shapes for this engine"),
);
const run = h("button", { type: "button", class: "main", onclick: () => void start() }, "Run the benchmark");
const cancel = h("button", { type: "button", disabled: true, onclick: () => control?.abort() }, "Cancel");
const save = h("button", { type: "button", disabled: true, onclick: () => saveMine() }, "Download as JSON");
const bar = h("progress", { value: 0, max: 1, "aria-label": "Progress of the benchmark", hidden: true });
const status = h("p", { class: "status", role: "status", id: "measure-status" });
const upload = h("input", { type: "file", id: "upload", accept: ".json,application/json", multiple: true, onchange: () => void add([...(upload.files ?? [])]) });
const uploadStatus = h("p", { role: "status", id: "upload-status" });
const drop = h(
  "div",
  { class: "drop" },
  h("label", { for: "upload" }, "Compare with results of "),
  h("code", {}, "eda bench --json"),
  " or of this page: choose files, or drop them here. They are read in the browser and go nowhere. ",
  h("p", {}, upload),
  uploadStatus,
);
const sources = h("fieldset", { class: "sources" }, h("legend", {}, "Shown"));
const results = h("div");

export function measure(): void {
  byId("view-measure").append(
    h("h2", { id: "measure-title" }, "Measure it"),
    h(
      "p",
      {},
      "Times whole prefills and decode steps on random inputs that lie on the device, and what the engine does at most: a copy in its memory and a float32 matrix product. The result is the JSON of ",
      h("code", {}, "eda bench"),
      ", with the browser’s name in it.",
    ),
    h(
      "div",
      { class: "options" },
      h("span", {}, h("label", { for: "effort" }, "Effort "), effort),
      prefill.element,
      decode.element,
      eda.element,
      kda.element,
    ),
    h("p", { class: "actions" }, run, cancel, save),
    bar,
    status,
    drop,
    sources,
    results,
  );
  for (const type of ["dragenter", "dragover"]) {
    drop.addEventListener(type, (event) => {
      event.preventDefault();
      drop.classList.add("over");
    });
  }
  drop.addEventListener("dragleave", () => drop.classList.remove("over"));
  drop.addEventListener("drop", (event) => {
    event.preventDefault();
    drop.classList.remove("over");
    void add([...(event.dataTransfer?.files ?? [])]);
  });
  void loadReferences();
}

async function loadReferences(): Promise<void> {
  try {
    const load = async (path: string) => {
      const response = await fetch(`results/${path}`);
      if (!response.ok) throw new Error(`${path}: ${response.status}`);
      return response.text();
    };
    const names = JSON.parse(await load("index.json")) as string[];
    for (const name of names) {
      try {
        const report = await call("readReport", await load(name));
        entries.push({ name: label(report), report, mine: false, shipped: true, shown: true });
      } catch (error) {
        uploadStatus.textContent += `${name}, which came with the page, was not read: ${message(error)} `;
      }
    }
  } catch (error) {
    status.textContent = `The shipped results could not be read: ${message(error)}`;
  }
  show();
}

function label(report: Report): string {
  const { name, backend } = report.adapter;
  // A driver's version after its name is for the file.
  const short = name.replace(/ \(.*\)$/, "");
  const half = report.cases.every((c) => c.dtype === "f16") ? ", float16" : "";
  const states = report.cases.some((c) => c.state === "f16") ? ", float16 states" : "";
  const engine = backend === "cpu" ? `${short}, CPU engine` : short;
  return (report.os === "browser" ? `${short || "GPU"} in a browser` : engine) + half + states;
}

async function start(): Promise<void> {
  const operations = [prefill, decode].filter((o) => o.input.checked).map((o) => o.input.value);
  const rules = [eda, kda].filter((o) => o.input.checked).map((o) => o.input.value);
  if (operations.length === 0 || rules.length === 0) {
    status.textContent = "Choose an operation and a rule.";
    return;
  }
  control = new AbortController();
  run.disabled = true;
  cancel.disabled = false;
  bar.hidden = false;
  bar.removeAttribute("value");
  status.textContent = "Opening the engine…";
  try {
    const report = await call(
      "bench",
      { quick: effort.value === "quick", operations, rules },
      {
        signal: control.signal,
        onProgress: (done, total, what) => {
          bar.max = total;
          bar.value = done;
          status.textContent = what ? `${done} of ${total} done; now ${what}` : "Done.";
        },
      },
    );
    mine = report;
    const at = entries.findIndex((entry) => entry.mine);
    if (at >= 0) entries.splice(at, 1);
    entries.unshift({ name: `This browser, ${report.adapter.backend === "cpu" ? "CPU engine" : report.adapter.name}`, report, mine: true, shipped: false, shown: true });
    save.disabled = false;
    const { copy, product } = report.ceilings;
    status.textContent = `Done. At most: copy ${short(copy.gb_per_s)} GB/s, float32 product ${short(product.gflop_per_s)} GFLOP/s.${report.skipped.length ? ` Not run: ${report.skipped.map((s) => `${s.case} (${s.reason})`).join("; ")}.` : ""}`;
    show();
  } catch (error) {
    status.textContent = (error as Error).name === "AbortError" ? "Canceled." : `Not measured: ${message(error)}`;
  } finally {
    bar.hidden = true;
    run.disabled = false;
    cancel.disabled = true;
  }
}

function saveMine(): void {
  if (mine) download(`eda-bench-${mine.date.slice(0, 10)}.json`, `${JSON.stringify(mine, null, 2)}\n`);
}

/** Larger files are not reports. */
const LARGEST = 20e6;

async function add(files: File[]): Promise<void> {
  const lines: string[] = [];
  let bad = false;
  for (const file of files) {
    try {
      if (file.size > LARGEST) throw new Error(`${short(file.size / 1e6)} MB are too much for a report`);
      const report = await call("readReport", await file.text());
      entries.push({ name: `${label(report)} (${file.name})`, report, mine: false, shipped: false, shown: true });
      lines.push(`${file.name}: ${report.cases.length} cases of ${report.adapter.name}.`);
    } catch (error) {
      bad = true;
      lines.push(`${file.name} was not read: ${message(error).replace(/^the report: /, "")}.`);
    }
  }
  uploadStatus.textContent = lines.join(" ");
  uploadStatus.className = bad ? "error" : "";
  // The same file may be chosen again.
  upload.value = "";
  show();
}

/** From the samples, which the reader has checked; the other numbers of a file follow from them. */
function median(c: ReportCase): number {
  const sorted = [...c.times.samples_ms].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle]! : (sorted[middle - 1]! + sorted[middle]!) / 2;
}

const key = (c: ReportCase) =>
  `${c.op} ${c.rule}${c.factors > 1 ? ` n=${c.factors}` : ""} ${c.shape.join(",")} ${c.dtype}${c.state === "f16" ? " states f16" : ""}`;

/** What is chosen for a run: of what came with the page, more would hide it. */
const chosen = (c: ReportCase) =>
  [prefill, decode].some((o) => o.input.checked && o.input.value === c.op) &&
  [eda, kda].some((o) => o.input.checked && o.input.value === c.rule);

function show(): void {
  sources.replaceChildren(
    h("legend", {}, "Shown"),
    ...entries.map((entry) => {
      const input = h("input", {
        type: "checkbox",
        checked: entry.shown,
        onchange: () => {
          entry.shown = input.checked;
          draw();
        },
      });
      const { adapter, date, crate_version } = entry.report;
      return h("label", { title: `${adapter.name}; ${adapter.driver} ${adapter.driver_info}; version ${crate_version}; ${date}` }, input, ` ${entry.name}`);
    }),
  );
  sources.hidden = entries.length === 0;
  draw();
}

function draw(): void {
  plot?.destroy();
  plot = undefined;
  const shown = entries.filter((entry) => entry.shown);
  const tables = shown.map((entry) => new Map(entry.report.cases.map((c) => [key(c), c])));
  // What was measured here, else all that others brought, and of what came with the page the same operations and rules as would
  // be run.
  const own = entries.find((entry) => entry.mine && entry.shown);
  const keys = own ? own.report.cases.map(key) : [...new Set(shown.flatMap((entry) => entry.report.cases.filter((c) => !entry.shipped || chosen(c)).map(key)))];
  if (keys.length === 0) {
    results.replaceChildren();
    return;
  }
  const marks = keys.map((_, i) => String.fromCharCode(65 + (i % 26)) + (i >= 26 ? String(Math.floor(i / 26)) : ""));
  plot = new Plot({
    title: "Median time of a call, milliseconds (lower is faster, the axis is logarithmic)",
    height: 300,
    x: { label: "case, as in the table", range: [-0.5, keys.length - 0.5], ticks: keys.map((_, i) => i), values: (i) => marks[i] ?? "" },
    y: {
      label: "ms",
      log: true,
      range: (low, high) => [10 ** Math.floor(Math.log10(low || 0.1)), 10 ** Math.ceil(Math.log10(high || 1) + 1e-9)],
    },
    lines: shown.map((entry, i) => ({ label: entry.name, color: colors[i % colors.length]!, scatter: true })),
  });
  const times = (table: Map<string, ReportCase>) =>
    keys.map((k) => {
      const found = table.get(k);
      return found ? median(found) : null;
    });
  results.replaceChildren(
    plot.element,
    h(
      "div",
      { class: "scroll", tabindex: "0", role: "region", "aria-label": "Median times" },
      h(
        "table",
        { class: "results", id: "bench-table" },
        h("caption", {}, `Median times${own && shown.length > 1 ? "; in brackets, times as long as in this browser" : ""}. Shapes are B, T, H, HV, K, V.`),
        h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Case"), shown.map((entry) => h("th", { scope: "col" }, entry.name)))),
        h(
          "tbody",
          {},
          keys.map((k, row) =>
            h(
              "tr",
              {},
              h("th", { scope: "row" }, `${marks[row]}: ${k}`),
              shown.map((entry, i) => {
                const found = tables[i]!.get(k);
                const base = own?.report.cases.find((c) => key(c) === k);
                if (!found) return h("td", { class: "number" }, "–");
                const ratio = base && entry !== own ? ` (× ${short(median(found) / median(base))})` : "";
                return h("td", { class: "number", title: `${short(found.tokens_per_s)} tokens/s, ${short(found.gflop_per_s)} GFLOP/s, ${short(found.gb_per_s)} GB/s` }, `${short(median(found))} ms${ratio}`);
              }),
            ),
          ),
        ),
      ),
    ),
  );
  plot.set([keys.map((_, i) => i), ...tables.map(times)], `${shown.length} results, ${keys.length} cases; the table has the numbers.`);
}
