import * as lib from "eda-wgpu";
import decode from "eda-wgpu/shaders/decode.wgsl?raw";
import { example } from "../pages/scenarios.js";

window.run = () => example(lib);
window.shader = () => decode;
window.inWorker = () =>
  new Promise((resolve, reject) => {
    const worker = new Worker(new URL("worker.js", import.meta.url), { type: "module" });
    worker.onmessage = ({ data }) => (data.error ? reject(new Error(data.error)) : resolve(data.line));
    worker.onerror = (event) => reject(new Error(event.message));
  });
