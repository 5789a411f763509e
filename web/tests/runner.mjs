// Runs a test binary of `cargo test --target wasm32-unknown-unknown` in a browser (EDA_WEB_BROWSER, chromium where
// absent): wasm-bindgen-test-runner serves it, and the browser opens it. Needs no WebDriver.
import { spawn } from "node:child_process";
import { createServer } from "node:net";
import { launch } from "./browsers.mjs";

const limit = Number(process.env.EDA_WEB_TEST_SECONDS ?? 1800);

const port = await new Promise((resolve) => {
  const server = createServer().listen(0, "127.0.0.1", () => {
    const { port } = server.address();
    server.close(() => resolve(port));
  });
});
const address = `127.0.0.1:${port}`;
const server = spawn("wasm-bindgen-test-runner", process.argv.slice(2), {
  env: { ...process.env, NO_HEADLESS: "1", WASM_BINDGEN_TEST_ADDRESS: address },
  stdio: ["ignore", "pipe", "inherit"],
});
let listening;
const ready = new Promise((resolve, reject) => {
  listening = resolve;
  server.on("exit", (code) => reject(new Error(`wasm-bindgen-test-runner ended with ${code}`)));
});
ready.catch(() => {});
server.stdout.on("data", (data) => String(data).includes(address) && listening());

let failed = true;
let browser;
try {
  await ready;
  browser = await launch(process.env.EDA_WEB_BROWSER ?? "chromium");
  console.log(`in ${browser.name} ${browser.version}`);
  await browser.page.goto(`http://${address}/`);
  let shown = "";
  for (let waited = 0; waited < limit; waited++) {
    const text = await browser.page.evaluate(() => document.querySelector("#output")?.textContent ?? "");
    if (text.startsWith(shown)) process.stdout.write(text.slice(shown.length));
    else process.stdout.write(`\n${text}`);
    shown = text;
    const result = text.match(/test result: (\w+)\./);
    if (result) {
      failed = result[1] !== "ok";
      process.stdout.write("\n");
      break;
    }
    if (waited === limit - 1) console.log(`\nno result after ${limit} s`);
    await new Promise((resolve) => setTimeout(resolve, 1000));
  }
} catch (error) {
  console.error(error);
}
await browser?.close();
server.removeAllListeners("exit");
server.kill();
process.exit(failed ? 1 : 0);
