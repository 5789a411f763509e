// The system's browsers, headless, with WebGPU on a software driver: SwiftShader in Chromium, lavapipe in Firefox.
import { existsSync } from "node:fs";

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

/** Opens a browser with one page; what the page logs and throws goes to `log`. */
export async function launch(name, log = console.log) {
  let browser;
  if (name === "chromium") {
    const { chromium } = await import("playwright-core");
    browser = await chromium.launch({
      executablePath: executable(name),
      args: [
        "--headless=new",
        "--no-sandbox",
        "--enable-unsafe-webgpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
      ],
    });
  } else {
    const puppeteer = await import("puppeteer-core");
    browser = await puppeteer.launch({
      browser: "firefox",
      executablePath: executable(name),
      headless: true,
      // Compiling shaders on the processor takes its time.
      protocolTimeout: 1_800_000,
      extraPrefsFirefox: { "dom.webgpu.enabled": true, "gfx.webgpu.ignore-blocklist": true },
    });
  }
  const page = await browser.newPage();
  const errors = [];
  page.on("console", (message) => log(`[${name}] ${message.text()}`));
  page.on("pageerror", (error) => {
    errors.push(String(error?.message ?? error));
    log(`[${name}] uncaught: ${error?.stack ?? error}`);
  });
  const version = String(await browser.version());
  return { name, page, errors, version, close: () => browser.close() };
}
