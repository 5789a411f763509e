// Runs one scenario in a worker.
import * as lib from "../../dist/index.js";
import * as scenarios from "./scenarios.js";

onmessage = async ({ data: [name, ...options] }) => {
  try {
    postMessage({ line: await scenarios[name](lib, ...options) });
  } catch (error) {
    postMessage({ error: String(error?.stack ?? error) });
  }
};
