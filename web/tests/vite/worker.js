import * as lib from "eda-wgpu";
import { example } from "../pages/scenarios.js";

example(lib).then(
  (line) => postMessage({ line }),
  (error) => postMessage({ error: String(error?.stack ?? error) }),
);
