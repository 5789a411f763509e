// What the tests of the package and those of the page share: a server of files, and a report of what passed.
import { readFile } from "node:fs/promises";
import { createServer } from "node:http";
import { extname, join, normalize } from "node:path";

const types = {
  ".css": "text/css",
  ".html": "text/html",
  ".js": "text/javascript",
  ".json": "application/json",
  ".txt": "text/plain",
  ".wasm": "application/wasm",
};

/** Serves a folder at `at`, but not what `refuse` matches. From localhost: a secure context, as WebGPU asks for. */
export async function serve(folder, at = "/") {
  const served = { refuse: undefined };
  const server = createServer(async (request, response) => {
    const path = normalize(decodeURIComponent(new URL(request.url, "http://localhost").pathname));
    try {
      if (!path.startsWith(at) || served.refuse?.test(path)) throw new Error("not of the site");
      const name = path.slice(at.length) || "index.html";
      const data = await readFile(join(folder, name));
      response.writeHead(200, { "content-type": types[extname(name)] ?? "application/octet-stream" });
      response.end(data);
    } catch {
      response.writeHead(404);
      response.end();
    }
  });
  await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
  return Object.assign(served, { origin: `http://localhost:${server.address().port}`, close: () => server.close() });
}

/** EDA_WEB_ONLY: a part of the names of the tests that are run. */
const only = process.env.EDA_WEB_ONLY;
const counts = { ok: 0, FAIL: 0, "not run": 0 };

function tell(outcome, what, line) {
  counts[outcome]++;
  console.log(`  ${outcome.padEnd(5)} ${what}${line}`);
}

/** Runs a test, which returns a line for the report and throws where something is wrong. */
export async function test(what, work) {
  if (only && !what.includes(only)) return;
  const start = performance.now();
  const seconds = () => `${((performance.now() - start) / 1000).toFixed(1)} s`;
  try {
    const line = await work();
    tell("ok", what, ` (${seconds()}): ${line}`);
  } catch (error) {
    tell("FAIL", what, ` (${seconds()}): ${error?.stack ?? error}`);
  }
}

/** Says that a test is left out, and why. */
export function skip(what, why) {
  if (!only || what.includes(only)) tell("not run", what, `: ${why}`);
}

/** Ends the process: 0 where at least one test was run and all were right. */
export function finish() {
  const { ok, FAIL: failed, "not run": left } = counts;
  console.log(`\n${ok} passed, ${failed} failed${left ? `, ${left} not run` : ""}`);
  process.exit(ok > 0 && failed === 0 ? 0 : 1);
}
