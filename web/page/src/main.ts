import { byId, h } from "./dom";
import { onState, open } from "./engine";
import { check } from "./check";
import { layerView } from "./layer";
import { measure } from "./measure";
import { see } from "./see";
import type { Backend } from "./worker";

const views = { see, layer: layerView, check, measure };
type View = keyof typeof views;
const made = new Set<View>();

/** A view is made when it is first looked at. */
function show(): void {
  const asked = location.hash.slice(1);
  const view: View = asked in views ? (asked as View) : "see";
  for (const name of Object.keys(views) as View[]) {
    byId(`view-${name}`).hidden = name !== view;
    const link = document.querySelector(`nav a[href="#${name}"]`)!;
    if (name === view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (!made.has(view)) {
    made.add(view);
    views[view]();
  }
}

const status = byId("engine");
const notice = byId("notice");
const backend = byId<HTMLSelectElement>("backend");

const remedies = h(
  "ul",
  {},
  h("li", {}, "Open the page over https or from localhost: browsers offer WebGPU nowhere else."),
  h("li", {}, "Take a current version of Chrome, Edge, Safari or Firefox."),
  h("li", {}, "It may be switched off, on Linux above all, or for an older GPU: see chrome://gpu, or dom.webgpu.enabled in about:config."),
);

onState((state) => {
  notice.hidden = true;
  if (state === undefined) {
    status.textContent = "Opening…";
    return;
  }
  if (state instanceof Error) {
    status.textContent = "Not open.";
    notice.hidden = false;
    notice.replaceChildren(h("p", {}, state.message), ...(backend.value === "webgpu" ? [remedies] : []));
    return;
  }
  const { info, webgpu } = state;
  // Firefox does not name it.
  const name = info.adapter.replace(/^WebGPU /, "");
  status.textContent = info.backend === "cpu" ? `CPU engine in WebAssembly, one thread` : `WebGPU: ${name}`;
  if (!info.reason) return;
  notice.hidden = false;
  if (webgpu && info.reason.includes("software")) {
    notice.replaceChildren(
      h("p", {}, `The CPU engine runs: ${info.reason.replace("; backend `webgpu` takes it all the same", "")}. Choose “WebGPU” above to use it all the same; it is slow.`),
    );
    return;
  }
  notice.replaceChildren(
    h("p", {}, h("strong", {}, "No WebGPU here"), `: ${info.reason}. The page works on the CPU engine instead, more slowly. To use a GPU:`),
    remedies,
  );
});

backend.addEventListener("change", () => {
  void open(backend.value as Backend).catch(() => {
    // The notice says it.
  });
});
addEventListener("hashchange", () => {
  show();
  byId("main").focus({ preventScroll: true });
  scrollTo(0, 0);
});
show();
void open("auto").catch(() => {
  // The notice says it.
});
