// uPlot in the page's colours: redrawn when the colour scheme or the width changes, with a table of its values for
// those who do not see it.
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import { h, short } from "./dom";

export interface Line {
  label: string;
  /** A custom property with its colour. */
  color: string;
  dash?: number[];
  points?: boolean;
  /** Points without lines between them. */
  scatter?: boolean;
  width?: number;
  steps?: boolean;
}

export interface PlotOptions {
  title: string;
  height?: number;
  x: { label: string; values?: (value: number) => string; range?: [number, number]; ticks?: number[]; increments?: number[] };
  y: { label: string; range?: (low: number, high: number) => [number, number]; log?: boolean };
  lines: Line[];
  /** Told of the index under the cursor. */
  onCursor?: (index: number) => void;
}

const all = new Set<Plot>();

function color(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const plot of all) plot.draw();
});

export class Plot {
  readonly element: HTMLElement;
  private readonly canvas = h("div", { class: "canvas", role: "img" });
  private readonly text = h("p", { class: "summary" });
  private readonly observer = new ResizeObserver(() => this.resize());
  private plot?: uPlot;
  private data?: uPlot.AlignedData;

  constructor(private readonly options: PlotOptions) {
    this.element = h(
      "figure",
      { class: "plot" },
      h("figcaption", {}, options.title),
      this.canvas,
      h(
        "ul",
        { class: "legend" },
        options.lines.map((line) =>
          h("li", {}, swatch(line), line.label),
        ),
      ),
      this.text,
    );
    this.canvas.setAttribute("aria-label", options.title);
    all.add(this);
    this.observer.observe(this.canvas);
  }

  /** Ends what listens for a plot that another one replaces. */
  destroy(): void {
    all.delete(this);
    this.observer.disconnect();
    this.plot?.destroy();
  }

  /** `summary` says in words what is to be seen. */
  set(data: (number | null)[][], summary = ""): void {
    this.data = data as uPlot.AlignedData;
    this.text.textContent = summary;
    this.canvas.setAttribute("aria-label", `${this.options.title}. ${summary}`);
    this.draw();
  }

  cursor(index: number): void {
    const { plot } = this;
    if (!plot) return;
    const x = plot.data[0][index];
    if (x === undefined) return;
    plot.setCursor({ left: plot.valToPos(x, "x"), top: -10 }, false);
  }

  draw(): void {
    this.plot?.destroy();
    this.plot = undefined;
    const width = this.canvas.clientWidth;
    if (!this.data || width === 0) return;
    const { x, y, lines, height = 220, onCursor } = this.options;
    const ink = color("--ink-soft");
    const grid = color("--line");
    const font = "12px system-ui, sans-serif";
    const axis = { stroke: ink, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1 }, font, labelFont: font };
    this.plot = new uPlot(
      {
        width,
        height,
        legend: { show: false },
        cursor: { y: false, drag: { x: false, y: false }, points: { show: true } },
        scales: {
          x: { time: false, ...(x.range && { range: x.range }) },
          y: {
            ...(y.log && { distr: 3 as const, log: 10 as const }),
            ...(y.range && { range: (_: uPlot, low: number, high: number) => y.range!(low, high) }),
          },
        },
        axes: [
          {
            ...axis,
            label: x.label,
            labelSize: 16,
            size: 30,
            ...(x.increments && { incrs: x.increments }),
            ...(x.ticks && { splits: () => x.ticks! }),
            ...(x.values && { values: (_: uPlot, splits: number[]) => splits.map(x.values!) }),
          },
          {
            ...axis,
            label: y.label,
            labelSize: 18,
            size: 46,
            ...(y.log && { splits: (_: uPlot, __: number, low: number, high: number) => decades(low, high) }),
            values: (_: uPlot, splits: number[]) => splits.map(short),
          },
        ],
        series: [
          {},
          ...lines.map((line): uPlot.Series => ({
            label: line.label,
            stroke: color(line.color),
            width: line.scatter ? 0 : (line.width ?? 2),
            ...(line.dash && { dash: line.dash }),
            ...(line.scatter && { paths: () => null }),
            ...(line.steps && { paths: uPlot.paths.stepped!({ align: 1 }) }),
            points: {
              show: line.points === true || line.scatter === true,
              size: line.scatter ? 9 : 6,
              stroke: color(line.color),
              fill: color(line.color),
            },
          })),
        ],
        hooks: {
          setCursor: [
            (plot) => {
              const { idx, event } = plot.cursor as uPlot.Cursor & { idx?: number | null };
              // Only where a person moves it.
              if (event && idx !== null && idx !== undefined) onCursor?.(idx);
            },
          ],
        },
      },
      this.data,
      this.canvas,
    );
  }

  private resize(): void {
    const width = this.canvas.clientWidth;
    if (width === 0 || !this.data) return;
    if (this.plot) {
      if (Math.abs(this.plot.width - width) > 1) this.plot.setSize({ width, height: this.plot.height });
    } else this.draw();
  }
}

/** Powers of ten. */
function decades(low: number, high: number): number[] {
  const first = Math.ceil(Math.log10(low) - 1e-9);
  const last = Math.floor(Math.log10(high) + 1e-9);
  return Array.from({ length: last - first + 1 }, (_, i) => 10 ** (first + i));
}

function swatch(line: Line): HTMLElement {
  const mark = h("span", { class: line.scatter ? "swatch dot" : line.dash ? "swatch dashed" : "swatch" });
  mark.style.setProperty("--swatch", `var(${line.color})`);
  mark.setAttribute("aria-hidden", "true");
  return mark;
}
