// The system's browsers, headless, with WebGPU on a software driver: SwiftShader in Chromium, lavapipe in Firefox.
import { existsSync, readFileSync, readdirSync } from "node:fs";

const paths = {
  chromium: ["/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome"],
  firefox: ["/usr/bin/firefox-esr", "/usr/bin/firefox"],
};

export const names = Object.keys(paths);

function executable(name) {
  const path = process.env[`EDA_${name.toUpperCase()}`] ?? paths[name].find(existsSync);
  if (!path) throw new Error(`no ${name}: looked at ${paths[name].join(", ")}; EDA_${name.toUpperCase()} names another`);
  return path;
}

/**
 * Opens a browser with one page; what the page logs and throws goes to `log`. With `webgpu: false` it is one that has
 * none.
 */
export async function launch(name, log = console.log, { webgpu = true } = {}) {
  let browser;
  let pid;
  let close = () => browser.close();
  if (name === "chromium") {
    const { chromium } = await import("playwright-core");
    const server = await chromium.launchServer({
      executablePath: executable(name),
      args: [
        "--headless=new",
        "--no-sandbox",
        webgpu ? "--enable-unsafe-webgpu" : "--disable-features=WebGPU,WebGPUService",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
      ],
    });
    browser = await chromium.connect(server.wsEndpoint());
    pid = server.process().pid;
    close = () => server.close();
  } else {
    const puppeteer = await import("puppeteer-core");
    browser = await puppeteer.launch({
      browser: "firefox",
      executablePath: executable(name),
      headless: true,
      // Compiling shaders on the processor takes its time.
      protocolTimeout: 1_800_000,
      extraPrefsFirefox: { "dom.webgpu.enabled": webgpu, "gfx.webgpu.ignore-blocklist": true },
    });
    pid = browser.process().pid;
  }
  const page = await browser.newPage();
  const errors = [];
  const consoleErrors = [];
  page.on("console", (message) => {
    if (message.type() === "error") consoleErrors.push(message.text());
    log(`[${name}] ${message.text()}`);
  });
  page.on("pageerror", (error) => {
    errors.push(String(error?.message ?? error));
    log(`[${name}] uncaught: ${error?.stack ?? error}`);
  });
  const version = String(await browser.version());
  return { name, page, errors, consoleErrors, version, close, resident: () => resident(pid) };
}

/** Memory of a process and all that it has started, bytes. */
function resident(root) {
  const children = new Map();
  const pages = new Map();
  for (const pid of readdirSync("/proc").filter((name) => /^\d+$/.test(name))) {
    try {
      const status = readFileSync(`/proc/${pid}/status`, "utf8");
      const number = (key) => Number(status.match(new RegExp(`^${key}:\\s+(\\d+)`, "m"))?.[1] ?? 0);
      const parent = number("PPid");
      children.set(parent, [...(children.get(parent) ?? []), Number(pid)]);
      pages.set(Number(pid), number("RssAnon") + number("RssShmem"));
    } catch {
      // It has ended.
    }
  }
  const sum = (pid) => (pages.get(pid) ?? 0) + (children.get(pid) ?? []).reduce((n, child) => n + sum(child), 0);
  return sum(root) * 1024;
}
