// Compiles assembled shaders with Tint, the WGSL compiler of Chromium, on Dawn's null backend: no GPU and
// no driver is needed, so a shader that naga takes and a browser refuses shows up in every CI run.
//
//   node check.mjs DIRECTORY
//
// DIRECTORY holds WGSL files and `manifest.json`, one entry a pipeline:
//   [{ "file": "scan.wgsl", "entryPoint": "main", "constants": { "K": 64 }, "storageBuffers": 6 }]
// Exits 1 if a file has an error, 2 if there is nothing to check.

import { readFile } from "node:fs/promises";
import { join } from "node:path";
import process from "node:process";
import { create, globals } from "webgpu";

const directory = process.argv[2];
if (directory === undefined) {
  console.error("usage: node check.mjs DIRECTORY");
  process.exit(2);
}
const pipelines = JSON.parse(await readFile(join(directory, "manifest.json"), "utf8"));
if (!Array.isArray(pipelines) || pipelines.length === 0) {
  console.error(`${directory}/manifest.json names no pipeline`);
  process.exit(2);
}

// Dawn is freed, and crashes the process, when these are collected: they stay reachable to the end.
Object.assign(globalThis, globals);
globalThis.dawn = create(["backend=null"]);
globalThis.adapter = await globalThis.dawn.requestAdapter();
if (globalThis.adapter === null) {
  console.error("Dawn offers no null adapter");
  process.exit(2);
}
// Everything the null adapter has by way of shader language; limits stay at the WebGPU defaults, so that a
// shader that needs more than a browser grants is an error too.
const wanted = ["shader-f16", "subgroups"];
const requiredFeatures = wanted.filter((feature) => globalThis.adapter.features.has(feature));
globalThis.device = await globalThis.adapter.requestDevice({ requiredFeatures });
const device = globalThis.device;
// The one known exception: a ninth storage buffer, which tests/shaders.rs allows for decode of two rules alone. The
// null adapter has 8, so of these only the text is compiled; any other pipeline with more than 8 is an error.
const EXCEPTION = { prefix: "decode-", storageBuffers: 9 };
let textsAlone = 0;

/** The errors and warnings of one pipeline, as lines. */
async function check({ file, entryPoint, constants, storageBuffers }) {
  const lines = [];
  let failed = false;
  device.pushErrorScope("validation");
  const module = device.createShaderModule({
    label: file,
    code: await readFile(join(directory, file), "utf8"),
  });
  const { messages } = await module.getCompilationInfo();
  for (const { type, lineNum, linePos, message } of messages) {
    failed ||= type === "error";
    lines.push(`${file}:${lineNum}:${linePos}: ${type}: ${message}`);
  }
  const textAlone =
    file.startsWith(EXCEPTION.prefix) && storageBuffers === EXCEPTION.storageBuffers;
  textsAlone += textAlone ? 1 : 0;
  // A module with errors makes an invalid pipeline, whose error would only repeat them.
  if (!failed && !textAlone) {
    device.createComputePipeline({
      label: file,
      layout: "auto",
      compute: { module, entryPoint, constants: constants ?? {} },
    });
  }
  const error = await device.popErrorScope();
  if (error !== null && !failed) {
    failed = true;
    lines.push(`${file} (${JSON.stringify(constants ?? {})}): ${error.message}`);
  }
  return { failed, lines };
}

let failures = 0;
for (const pipeline of pipelines) {
  const { failed, lines } = await check(pipeline);
  for (const line of lines) {
    console.log(line);
  }
  failures += failed ? 1 : 0;
}
console.log(
  `Tint: ${pipelines.length - failures} of ${pipelines.length} compile, ` +
    `${textsAlone} of them as text alone (they need 9 storage buffers)`,
);
// The process would wait for the device's lost promise otherwise.
process.exit(failures > 0 ? 1 : 0);
