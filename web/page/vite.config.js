import { fileURLToPath } from "node:url";

// Addresses are relative: the site works in any folder of any server.
export default {
  root: fileURLToPath(new URL(".", import.meta.url)),
  base: "./",
  worker: { format: "es" },
  resolve: { alias: { "eda-wgpu": fileURLToPath(new URL("../dist/index.js", import.meta.url)) } },
  build: { outDir: "dist", emptyOutDir: true, assetsInlineLimit: 0, modulePreload: { polyfill: false } },
  server: { fs: { allow: [".."] } },
};
