// The package in the browsers named on the command line (both where none is): node tests/run.mjs [chromium] [firefox]
import { fileURLToPath } from "node:url";
import { launch, names } from "./browsers.mjs";
import { finish, serve, skip, test } from "./common.mjs";

const { origin, close } = await serve(fileURLToPath(new URL("../..", import.meta.url)));
const asked = process.argv.slice(2);
for (const name of asked.length > 0 ? asked : names) {
  const browser = await launch(name);
  const { page } = browser;
  console.log(`\n${name} ${browser.version}`);
  const open = async (path, ready) => {
    await page.goto(`${origin}/${path}`);
    await page.waitForFunction(`typeof window.${ready} === "function"`);
  };
  const run = (...call) => page.evaluate((call) => window.run(...call), call);

  await open("web/tests/pages/plain.html", "cycle");
  await test("plain script", () => run("example"));
  await test("plain script, CPU engine", () => run("example", "cpu"));
  await test("worker", () => page.evaluate(() => window.inWorker("example")));
  await test("worker, CPU engine", () => page.evaluate(() => window.inWorker("example", "cpu")));
  for (const backend of ["webgpu", "cpu"]) {
    await test(`pools, ${backend}`, () => run("pools", backend));
    await test(`bad arrays, ${backend}`, () => run("badArrays", backend));
    await test(`benchmark, ${backend}`, () => run("bench", backend));
    const file = "/tests/data/golden/eda_basic.safetensors";
    await test(`a file, ${backend}`, () => run("files", backend, file));
  }
  await test("progress and abort", () => run("control"));
  await test("built-in checks, cpu", () => run("check", "cpu"));
  // Minutes: software drivers take a second or so to compile a shader.
  if (process.env.EDA_WEB_LONG) await test("built-in checks, webgpu", () => run("check", "webgpu"));
  else skip("built-in checks, webgpu", "set EDA_WEB_LONG=1");
  await test("a lost device", () => run("lost"));
  await test("a device of the page", () => run("pageDevice"));
  await test("fifty times", async () => {
    const allocated = [];
    const memory = [];
    for (let i = 0; i < 50; i++) {
      // Shaders take a second each to compile here: decode has one, prefill four.
      const chunked = i % 10 === 0;
      allocated.push(await page.evaluate((chunked) => window.cycle(chunked), chunked));
      memory.push(browser.resident());
    }
    const mib = (bytes) => Math.round(bytes / 2 ** 20);
    if (allocated.at(-1) !== 0) throw new Error(`${allocated.at(-1)} bytes are still allocated`);
    // Every run allocates 64 MiB. Firefox keeps 4 MB of any device that was opened and destroyed, and what belongs to
    // its pipelines, until its collector runs.
    const smallest = (from, to) => Math.min(...memory.slice(from, to));
    const [early, late] = [smallest(10, 20), smallest(40, 50)];
    const line = `all GPU buffers freed; the browser's memory ${mib(early)} MiB in runs 11 to 20, ${mib(late)} MiB in runs 41 to 50`;
    if ((late - early) / 30 > 16 * 2 ** 20) throw new Error(line);
    return line;
  });

  await open("web/tests/vite/dist/index.html", "inWorker");
  await test("Vite build", () => page.evaluate(() => window.run()));
  await test("Vite build, worker", () => page.evaluate(() => window.inWorker()));
  await test("Vite build, a shader's text", async () => {
    const text = await page.evaluate(() => window.shader());
    if (!text.includes("fn main")) throw new Error(`found ${text.slice(0, 100)}`);
    return `${text.length} characters`;
  });
  await test("nothing went uncaught", async () => {
    if (browser.errors.length > 0) throw new Error(browser.errors.join("\n"));
    return "no error outside of a call";
  });
  await browser.close();
}
close();
finish();
