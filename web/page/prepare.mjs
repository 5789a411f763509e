// Puts beside the page what it loads: the real inputs from the tests' data, and benchmark results to compare with (those
// in benches/results of the repository, and those in results/ here).
import { copyFile, mkdir, readdir, readFile, rm, writeFile } from "node:fs/promises";
import { fileURLToPath } from "node:url";

const here = (path) => fileURLToPath(new URL(path, import.meta.url));
const list = async (folder) => {
  try {
    return (await readdir(folder)).sort();
  } catch (error) {
    if (error.code === "ENOENT") return [];
    throw error;
  }
};

await rm(here("public/data"), { recursive: true, force: true });
await rm(here("public/results"), { recursive: true, force: true });
await mkdir(here("public/data"), { recursive: true });
await mkdir(here("public/results"), { recursive: true });

const layers = here("../../tests/data/real/");
for (const name of await list(layers)) {
  if (/^kjv_layer\d+\.safetensors$/.test(name)) await copyFile(layers + name, here(`public/data/${name}`));
}

const names = new Set();
for (const folder of [here("../../benches/results/"), here("results/")]) {
  for (const name of await list(folder)) {
    if (!name.endsWith(".json") || names.has(name)) continue;
    const { format } = JSON.parse(await readFile(folder + name, "utf8"));
    if (format !== "eda-bench/1") continue;
    await copyFile(folder + name, here(`public/results/${name}`));
    names.add(name);
  }
}
await writeFile(here("public/results/index.json"), JSON.stringify([...names]));
