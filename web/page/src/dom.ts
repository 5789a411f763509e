type Child = Node | string | number | null | undefined;
type Props = Record<string, unknown>;

/** An element: `on…` properties are listeners, those that an element has are set, the others are attributes. */
export function h<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  props: Props = {},
  ...children: (Child | Child[])[]
): HTMLElementTagNameMap[K] {
  const element = document.createElement(tag);
  for (const [key, value] of Object.entries(props)) {
    if (value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value as EventListener);
    else if (key === "class") element.className = String(value);
    else if (key.includes("-") || key === "role" || key === "for") element.setAttribute(key, String(value));
    else if (key in element) (element as unknown as Props)[key] = value;
    else element.setAttribute(key, String(value));
  }
  for (const child of children.flat()) {
    if (child !== null && child !== undefined) element.append(child instanceof Node ? child : String(child));
  }
  return element;
}

export function byId<T extends HTMLElement = HTMLElement>(id: string): T {
  return document.getElementById(id) as T;
}

/** A number for people: few digits, no negative zero. */
export function digits(x: number, places = 2): string {
  const text = x.toFixed(places);
  return Number(text) === 0 ? (0).toFixed(places) : text.replace("-", "−");
}

/** Three significant digits. */
export function short(x: number): string {
  if (!Number.isFinite(x)) return "–";
  if (x === 0) return "0";
  const size = Math.abs(x);
  if (size >= 1e6 || size < 1e-3) return x.toExponential(1).replace("-", "−").replace("e+", "e");
  return Number(x.toPrecision(3)).toLocaleString("en", { maximumFractionDigits: 6 });
}

export function message(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}

export function download(name: string, text: string): void {
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  const link = h("a", { href: url, download: name });
  link.click();
  // Browsers start the download before the next task.
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

/** Calls a function once for any number of requests until the next frame. */
export function eachFrame(work: () => void): () => void {
  let asked = false;
  return () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      work();
    });
  };
}
