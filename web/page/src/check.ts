// View 3: the built-in cases on this browser's engine.
import type { Info, Verdict } from "eda-wgpu";
import { byId, h, message, short } from "./dom";
import { call, open } from "./engine";

const run = h("button", { type: "button", class: "main", onclick: () => void start() }, "Run the check");
const cancel = h("button", { type: "button", disabled: true, onclick: () => control?.abort() }, "Cancel");
const bar = h("progress", { value: 0, max: 1, "aria-label": "Progress of the check", hidden: true });
const status = h("p", { class: "status", role: "status", id: "check-status" });
const rows = h("tbody");
const table = h(
  "div",
  { class: "scroll", tabindex: "0", role: "region", "aria-label": "Results of the check", hidden: true },
  h(
    "table",
    { id: "check-table", class: "results" },
    h(
      "thead",
      {},
      h("tr", {}, ["Case", "Result", "Error", "Limit"].map((name) => h("th", { scope: "col" }, name))),
    ),
    rows,
  ),
);
const report = h("textarea", { readOnly: true, rows: 8, id: "check-report", spellcheck: false });
const copied = h("span", { role: "status" });
const share = h(
  "div",
  { class: "share", hidden: true },
  h("label", { for: "check-report" }, "Report"),
  report,
  h("p", {}, h("button", { type: "button", onclick: () => void copy() }, "Copy the report"), " ", copied),
);
let control: AbortController | undefined;

export function check(): void {
  byId("view-check").append(
    h("h2", { id: "check-title" }, "Check it"),
    h(
      "p",
      {},
      "Runs the built-in cases on this browser’s engine and compares every result with the recurrence in float64: uneven and unbounded decay, ragged and empty sequences, odd sizes, grouped heads, states carried between calls, slots of a pool, every rule of the family.",
    ),
    h("p", { class: "actions" }, run, cancel),
    bar,
    status,
    share,
    table,
  );
}

async function start(): Promise<void> {
  control = new AbortController();
  run.disabled = true;
  cancel.disabled = false;
  bar.hidden = false;
  bar.value = 0;
  table.hidden = share.hidden = true;
  status.textContent = "Opening the engine…";
  const begun = performance.now();
  try {
    const { info } = await open();
    const verdicts = await call("check", undefined, {
      signal: control.signal,
      onProgress: (done, total, what) => {
        bar.max = total;
        bar.value = done;
        status.textContent = what ? `${done} of ${total}: ${what}` : `${done} of ${total}`;
      },
    });
    show(info, verdicts, (performance.now() - begun) / 1000);
  } catch (error) {
    status.textContent = (error as Error).name === "AbortError" ? "Canceled." : `The check did not run: ${message(error)}`;
  } finally {
    bar.hidden = true;
    run.disabled = false;
    cancel.disabled = true;
  }
}

const words = { passed: "passed", failed: "FAILED", "not-offered": "not offered" };

function show(info: Info, verdicts: Verdict[], seconds: number): void {
  const count = (outcome: Verdict["outcome"]) => verdicts.filter((v) => v.outcome === outcome).length;
  const failed = count("failed");
  const missing = count("not-offered");
  const summary = `${count("passed")} passed, ${failed} failed${missing ? `, ${missing} not offered by this engine` : ""} in ${seconds.toFixed(1)} s.`;
  status.textContent = failed ? `This engine gets ${failed} of ${verdicts.length} cases wrong. ${summary}` : `Right: ${summary}`;
  rows.replaceChildren(
    ...verdicts.map((v) =>
      h(
        "tr",
        { class: v.outcome },
        h("th", { scope: "row" }, v.case),
        h("td", { title: v.detail }, words[v.outcome]),
        h("td", { class: "number" }, v.error === null ? "–" : v.error.toExponential(1)),
        h("td", { class: "number" }, v.limit.toExponential(0)),
      ),
    ),
  );
  table.hidden = share.hidden = false;
  copied.textContent = "";
  const worst = Math.max(...verdicts.map((v) => v.limit > 0 ? (v.error ?? 0) / v.limit : 0));
  report.value = [
    `eda-wgpu ${info.version} check`,
    `adapter: ${info.adapter} (${info.backend}, ${info.tier}, ${info.kind})`,
    `browser: ${navigator.userAgent}`,
    `date: ${new Date().toISOString()}`,
    `result: ${summary} Largest error over its limit: ${short(worst)}.`,
    "",
    ...verdicts.map((v) => `${words[v.outcome].padEnd(12)} ${(v.error?.toExponential(1) ?? "–").padStart(8)} ${v.case}${v.outcome === "failed" ? `: ${v.detail}` : ""}`),
    "",
  ].join("\n");
}

async function copy(): Promise<void> {
  try {
    await navigator.clipboard.writeText(report.value);
    copied.textContent = "Copied.";
  } catch {
    // Not allowed here: the person copies what is marked.
    report.focus();
    report.select();
    copied.textContent = "Press Ctrl+C (⌘C) to copy the marked report.";
  }
}
