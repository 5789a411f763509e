// What the package has to do, as functions that run in a page or in a worker. Each gets the package and returns a line
// for the report; it throws where something is wrong.

function assert(right, message) {
  if (!right) throw new Error(message);
}

/** The error that a promise is rejected with (or a function throws), checked for code and message. */
export async function fails(work, code, ...parts) {
  let error;
  try {
    await work();
  } catch (thrown) {
    error = thrown;
  }
  assert(error, `expected an error with code ${code}, found none`);
  assert(error instanceof Error, `expected an Error, found ${error}`);
  assert(error.code === code, `expected code ${code}, found ${error.code}: ${error.stack}`);
  for (const part of parts) {
    assert(error.message.includes(part), `expected "${part}" in the message, found: ${error.message}`);
  }
  return error;
}

/** Relative l2 error. */
export function error(x, right) {
  assert(x.length === right.length, `expected ${right.length} values, found ${x.length}`);
  let difference = 0;
  let norm = 0;
  for (let i = 0; i < x.length; i++) {
    difference += (x[i] - right[i]) ** 2;
    norm += right[i] ** 2;
  }
  const result = Math.sqrt(difference / (norm || 1));
  assert(result <= 1e-5, `expected a relative error of at most 1e-5, found ${result}`);
  return result;
}

const equal = (found, expected, what) =>
  assert(
    found.length === expected.length && expected.every((x, i) => found[i] === x),
    `${what}: expected ${expected}, found ${Array.from(found)}`,
  );

const f32 = (...values) => new Float32Array(values);

/** (3, 5) → (0, 5) → (0, 7). */
const worked = {
  problem: { rule: "eda", B: 1, T: 1, H: 1, HV: 1, K: 2, V: 1, scale: 1 },
  tensors: () => ({
    q: f32(1, 1),
    k: f32(0, 1),
    v: f32(7),
    e: f32(1, 0),
    g: f32(0, 0),
    beta: f32(1),
    gamma: f32(1),
  }),
};

/** Opens the browser's adapter (or the CPU engine) and runs the worked example both ways. */
export async function example({ Eda }, backend = "webgpu") {
  const eda = await Eda.open({ backend, skipSelfTest: true });
  assert(eda.info.backend === backend, `expected ${backend}, found ${eda.info.backend}`);
  const { problem } = worked;
  const tensors = worked.tensors();
  const run = await eda.prefill(problem, { ...tensors, initial_state: f32(3, 5) });
  equal(run.final_state, [0, 7], "prefill's state");
  equal(run.o, [7], "prefill's output");
  const pool = await eda.pool(problem, 2);
  await pool.write(1, f32(3, 5));
  const step = await eda.decode(pool, problem, tensors, [1]);
  equal(step.o, [7], "decode's output");
  equal(await pool.read(1), [0, 7], "decode's state");
  equal(await pool.read(0), [0, 0], "the other slot");
  pool.destroy();
  eda.destroy();
  const lost = await eda.lost;
  assert(lost.reason === "destroyed", `expected destroyed, found ${lost.reason}`);
  await fails(() => eda.prefill(problem, tensors), "device-lost", "destroy()");
  await fails(() => pool.read(0), "device-lost");
  return `${eda.info.adapter}, ${eda.info.backend}, ${eda.info.tier}, ${eda.info.elements.join(" and ")}`;
}

/** Slots, reset, padding, copies; prefill and then decode against float64. */
export async function pools({ Eda }, backend) {
  const eda = await Eda.open({ backend, skipSelfTest: true });
  const problem = { rule: "eda", B: 3, T: 1, H: 1, HV: 2, K: 20, V: 12 };
  const tensors = Eda.generate(problem, { seed: 3 });
  const exact = Eda.reference(problem, tensors);
  const pool = await eda.pool(problem, 4);
  assert(pool.slots === 4 && pool.shape.join() === "2,20,12", `found ${pool.slots} slots, ${pool.shape}`);
  const states = 2 * 20 * 12;
  const old = new Float32Array(states).fill(3);
  for (let slot = 0; slot < 4; slot++) await pool.write(slot, old);
  const rows = [{ slot: 2, reset: true }, -1, { slot: 0, reset: true }];
  const { o, computeMs } = await eda.decode(pool, problem, tensors, rows);
  assert(computeMs >= 0, `a time of ${computeMs}`);
  error(o.subarray(0, 24), exact.o.subarray(0, 24));
  equal(o.subarray(24, 48), Array(24).fill(0), "padding");
  error(o.subarray(48), exact.o.subarray(48));
  error(await pool.read(2), exact.final_state.subarray(0, states));
  equal(await pool.read(1), Array.from(old), "a slot that no row names");
  await pool.copy(2, 3);
  equal(await pool.read(3), Array.from(await pool.read(2)), "a copy");
  // Two calls at once on one pool run one after the other.
  const two = { ...problem, B: 1, T: 2 };
  const long = Eda.generate(two, { seed: 5 });
  const right = Eda.reference(two, long);
  const [first, second] = [0, 1].map((t) => {
    const part = {};
    for (const [name, values] of Object.entries(long)) {
      part[name] = values.slice((values.length / 2) * t, (values.length / 2) * (t + 1));
    }
    return eda.decode(pool, { ...two, T: 1 }, part, [{ slot: 1, reset: t === 0 }]);
  });
  error((await first).o, right.o.subarray(0, 24));
  error((await second).o, right.o.subarray(24));
  error(await pool.read(1), right.final_state);
  await fails(() => eda.decode(pool, problem, tensors, [0, 0, 1]), "tensor", "slots", "slot 0 in rows 0 and 1");
  await fails(() => eda.decode(pool, problem, tensors, [0, 1, 4]), "tensor", "slots");
  await fails(() => eda.decode(pool, problem, tensors, [0, 1]), "tensor", "slots");
  await fails(() => pool.read(4), "tensor", "slot");
  await fails(() => pool.read(-1), "tensor", "slot");
  await fails(() => pool.write(0, f32(1)), "tensor", "state");
  pool.destroy();
  await fails(() => pool.read(0), "tensor", "freed");
  await fails(() => eda.decode(pool, problem, tensors, rows), "tensor", "freed");
  // What is under way, or waits for that, ends with the engine.
  const last = await eda.pool(problem, 3);
  const under = [eda.prefill(problem, tensors), eda.decode(last, problem, tensors, [0, 1, 2]), last.read(0)];
  eda.destroy();
  await Promise.all(under.map((call) => fails(() => call, "device-lost", "destroy()")));
  return "slots, reset, padding, copies";
}

/** Arrays that do not fit get typed errors, and the engine goes on. */
export async function badArrays({ Eda }, backend) {
  const eda = await Eda.open({ backend, skipSelfTest: true });
  const { problem } = worked;
  const bad = (change, code, ...parts) =>
    fails(() => eda.prefill(problem, { ...worked.tensors(), ...change }), code, ...parts);
  let error = await bad({ v: f32(1, 2) }, "tensor", "`v`", "expected 1 values, shape [1, 1, 1, 1]", "found 2 values");
  assert(error.name === "EdaError" && error.tensor === "v", `found ${error.name}, ${error.tensor}`);
  const detached = f32(7);
  structuredClone(detached, { transfer: [detached.buffer] });
  await bad({ v: detached }, "tensor", "`v`", "detached");
  await bad({ q: f32(1, NaN) }, "non-finite", "`q`", "NaN at index [0, 0, 0, 1]");
  await bad({ k: f32(Infinity, 0) }, "non-finite", "`k`", "inf");
  await bad({ g: f32(0, 1) }, "tensor", "`g`", "at most 0");
  await bad({ v: undefined }, "tensor", "`v`", "no such tensor");
  await bad({ v: [7] }, "tensor", "`v`", "Float32Array");
  await bad({ v: new Float64Array([7]) }, "tensor", "`v`", "Float64Array");
  await bad({ v: 7 }, "tensor", "`v`");
  await bad({ v: "seven" }, "tensor", "`v`");
  await bad({ w: f32(7) }, "tensor", "`w`");
  await bad({ gama: f32(1) }, "tensor", "`gama`");
  const wrong = (change, ...parts) =>
    fails(() => eda.prefill({ ...problem, ...change }, worked.tensors()), "unsupported", ...parts);
  await wrong({ rule: "edda" }, "rule", "`edda`");
  await wrong({ rule: undefined }, "rule");
  await wrong({ K: 257 }, "key_dim", "257");
  await wrong({ K: 1.5 }, "K", "1.5");
  await wrong({ T: -1 }, "T", "-1");
  await wrong({ T: "1" }, "T");
  await wrong({ HV: undefined }, "HV", "absent");
  await wrong({ scale: Infinity }, "scale");
  await fails(() => eda.prefill({ ...problem, T: 2 ** 31, B: 2 }, worked.tensors()), "unsupported", "tokens");
  await fails(() => eda.prefill({ ...problem, cu_seqlens: [0, 2] }, worked.tensors()), "tensor", "cu_seqlens");
  await fails(() => eda.prefill({ ...problem, cu_seqlens: [0, -1, 1] }, worked.tensors()), "tensor", "cu_seqlens");
  await fails(() => eda.prefill(), "unsupported", "problem");
  await fails(() => eda.prefill(problem), "tensor", "tensors");
  await fails(() => eda.prefill(problem, worked.tensors(), { chunk: 17 }), "unsupported", "chunk", "17");
  await fails(() => eda.prefill(problem, worked.tensors(), { dtype: "f64" }), "unsupported", "dtype");
  await fails(() => eda.pool({ ...problem, K: 0 }, 1), "unsupported", "key_dim");
  await fails(() => eda.pool(problem, -1), "unsupported", "slots");
  // More states than any browser has room for: nothing was computed, and the engine is usable.
  const large = { ...problem, HV: 256, H: 256, K: 256, V: 256 };
  const memory = await fails(() => eda.pool(large, 100_000), backend === "cpu" ? "out-of-memory" : "unsupported");
  const run = await eda.prefill(problem, { ...worked.tensors(), initial_state: f32(3, 5) });
  equal(run.final_state, [0, 7], "the state after all those errors");
  // float16 bits are taken as they are.
  const half = new Uint16Array([0x4700]);
  equal((await eda.prefill(problem, { ...worked.tensors(), v: half })).o, [7], "v as float16");
  eda.destroy();
  return memory.message;
}

/** Progress, an abort and a callback that throws. */
export async function control({ Eda }) {
  const eda = await Eda.open({ backend: "cpu" });
  const problem = { rule: "kda", B: 1, T: 3000, H: 2, HV: 2, K: 64, V: 64 };
  const tensors = Eda.generate(problem, { decays: "weak" });
  const seen = [];
  const whole = await eda.prefill(problem, tensors, { onProgress: (done, total) => seen.push([done, total]) });
  assert(seen.length > 2, `progress was told ${seen.length} times`);
  equal(seen.at(-1), [3000, 3000], "the last progress");
  assert(
    seen.every(([done], i) => i === 0 || done > seen[i - 1][0]),
    `progress went back: ${seen}`,
  );
  error(whole.o, Eda.reference(problem, tensors).o);

  const controller = new AbortController();
  const reason = new Error("enough");
  const aborted = eda.prefill(problem, tensors, {
    onProgress: () => controller.abort(reason),
    signal: controller.signal,
  });
  assert((await aborted.catch((e) => e)) === reason, "expected the signal's reason");
  const thrown = eda.check({
    onProgress: () => {
      throw reason;
    },
  });
  assert((await thrown.catch((e) => e)) === reason, "expected what the callback threw");
  eda.destroy();
  return `progress told ${seen.length} times`;
}

/** The built-in cases. */
export async function check({ Eda }, backend) {
  const eda = await Eda.open({ backend, skipSelfTest: true });
  let told = 0;
  const verdicts = await eda.check({ onProgress: () => told++ });
  assert(told === verdicts.length + 1, `told ${told} times of ${verdicts.length} cases`);
  const failed = verdicts.filter((v) => v.outcome === "failed");
  assert(failed.length === 0, failed.map((v) => `${v.case}: ${v.detail}`).join("\n"));
  const worst = Math.max(...verdicts.filter((v) => v.limit <= 1e-5).map((v) => v.error ?? 0));
  eda.destroy();
  return `${verdicts.length} cases, largest error ${worst.toExponential(1)}`;
}

/** A benchmark has what was asked for, and is read back as it was; what is not to be had is an error. */
export async function bench({ Eda }, backend) {
  const eda = await Eda.open({ backend, skipSelfTest: true });
  const report = await eda.bench({ quick: true, shapes: [[1, 256, 1, 2, 32, 32]] });
  const cases = report.cases.map(({ op, rule, shape }) => `${op} ${rule} ${shape}`);
  equal(cases, ["prefill eda 1,256,1,2,32,32", "decode eda 1,256,1,2,32,32"], "cases");
  assert(report.adapter.backend === backend && report.os === "browser", "expected what ran");
  for (const { op, times, median_ms } of report.cases) {
    assert(times.samples_ms.length >= 5 && median_ms > 0, `${op}: ${times.samples_ms}`);
  }
  equal([JSON.stringify(Eda.readReport(JSON.stringify(report)))], [JSON.stringify(report)], "read back");
  await fails(() => eda.bench({ operations: ["train"] }), "unsupported", "operations", "`train`");
  await fails(() => eda.bench({ shapes: [[1, 0, 1, 1, 1, 1]] }), "unsupported", "shapes");
  await fails(() => eda.bench({ quick: true, shapes: [[1, 1, 1, 1, 257, 1]] }), "unsupported", "257");
  await fails(() => Eda.readReport("{}"), "file", "eda-bench/1");
  const controller = new AbortController();
  const aborted = eda.bench({ quick: true, onProgress: () => controller.abort("enough"), signal: controller.signal });
  assert((await aborted.catch((e) => e)) === "enough", "expected the signal's reason");
  eda.destroy();
  return report.cases.map((c) => `${c.op} ${Math.round(c.tokens_per_s)} tokens/s (${c.times.timing})`).join(", ");
}

/** A safetensors file: read, run, compared with what it expects. */
export async function files({ Eda }, backend, address) {
  const bytes = await (await fetch(address)).arrayBuffer();
  const { problem, tensors, expected } = Eda.read(bytes, "a file");
  const eda = await Eda.open({ backend, skipSelfTest: true });
  const run = await eda.prefill(problem, tensors);
  const worst = Math.max(error(run.o, expected.o), error(run.final_state, expected.final_state));
  await fails(() => Eda.read(bytes.slice(0, 100), "a file"), "file", "a file");
  await fails(() => Eda.read(new Uint8Array(3)), "file");
  await fails(() => Eda.read("text"), "tensor", "bytes");
  eda.destroy();
  return `relative error ${worst.toExponential(1)}`;
}

/** Devices that the package opens, as the page does not see them. */
function watchDevices() {
  const devices = [];
  const real = GPUAdapter.prototype.requestDevice;
  GPUAdapter.prototype.requestDevice = async function (...options) {
    const device = await real.apply(this, options);
    devices.push(device);
    return device;
  };
  return { devices, stop: () => (GPUAdapter.prototype.requestDevice = real) };
}

/** A lost device is told, and another engine takes its place. */
export async function lost({ Eda }) {
  const { problem } = worked;
  const run = async (eda) =>
    equal((await eda.prefill(problem, { ...worked.tensors(), initial_state: f32(3, 5) })).o, [7], "output");
  const watch = watchDevices();
  const eda = await Eda.open({ backend: "webgpu", skipSelfTest: true });
  watch.stop();
  await run(eda);
  const pool = await eda.pool(problem, 1);
  // A call that is under way ends with the device.
  const under = eda.prefill({ ...problem, T: 64 }, Eda.generate({ ...problem, T: 64 })).catch((e) => e);
  watch.devices[0].destroy();
  const info = await eda.lost;
  assert(info.reason === "destroyed" && typeof info.message === "string", JSON.stringify(info));
  const error = await under;
  assert(error.code === "device-lost", `expected device-lost, found ${error.code ?? "a result"}: ${error.message}`);
  await fails(() => run(eda), "device-lost");
  await fails(() => pool.read(0), "device-lost");
  await fails(() => eda.pool(problem, 1), "device-lost");
  const again = await eda.reopen();
  await run(again);
  again.destroy();
  return `${error.message}; reopened`;
}

/** A device of the page: it stays when the engine goes. */
export async function pageDevice({ Eda }) {
  const { problem } = worked;
  const adapter = await navigator.gpu.requestAdapter();
  const device = await adapter.requestDevice();
  const requestAdapter = navigator.gpu.requestAdapter;
  const eda = await Eda.open({ device, skipSelfTest: true });
  assert(navigator.gpu.requestAdapter === requestAdapter, "navigator.gpu is not as it was");
  assert(!Object.hasOwn(navigator.gpu, "requestAdapter"), "navigator.gpu has a property of its own");
  const run = await eda.prefill(problem, { ...worked.tensors(), initial_state: f32(3, 5) });
  equal(run.o, [7], "output");
  await fails(() => eda.reopen(), "unsupported", "device");
  eda.destroy();
  assert((await eda.lost).reason === "destroyed", "expected destroyed");
  // The device is still there.
  const buffer = device.createBuffer({ size: 16, usage: GPUBufferUsage.MAP_READ | GPUBufferUsage.COPY_DST });
  await buffer.mapAsync(GPUMapMode.READ);
  const other = await Eda.open({ device, skipSelfTest: true });
  device.destroy();
  await other.lost;
  await fails(() => other.prefill(problem, worked.tensors()), "device-lost");
  await fails(() => Eda.open({ device: {} }), "unsupported", "device");
  return "opened on it, left it as it was";
}

/** GPU memory that was allocated and not freed, bytes, counted at WebGPU's own functions. */
export function countMemory() {
  const live = new Map();
  const wrap = (prototype, name, after) => {
    const real = prototype[name];
    prototype[name] = function (...args) {
      const result = real.apply(this, args);
      after(this, result, args);
      return result;
    };
  };
  wrap(GPUDevice.prototype, "createBuffer", (device, buffer, [{ size }]) => live.set(buffer, { device, size }));
  wrap(GPUBuffer.prototype, "destroy", (buffer) => live.delete(buffer));
  wrap(GPUDevice.prototype, "destroy", (device) => {
    for (const [buffer, owner] of live) if (owner.device === device) live.delete(buffer);
  });
  return () => [...live.values()].reduce((n, { size }) => n + size, 0);
}

/** Opens, runs and destroys once, with a pool of 64 MiB; `chunked` has a prefill as well. */
export async function cycle({ Eda }, chunked, allocated) {
  const eda = await Eda.open({ backend: "webgpu", skipSelfTest: true });
  const problem = { rule: "delta", B: 1, T: 1, H: 1, HV: 4, K: 64, V: 64 };
  const tensors = Eda.generate(problem);
  const before = allocated();
  const pool = await eda.pool(problem, 1024);
  await eda.decode(pool, problem, tensors, [1023]);
  if (chunked) await eda.prefill(problem, tensors);
  const used = allocated() - before;
  assert(used >= 64 << 20, `a pool of ${used} bytes`);
  // Of what a call allocates only the pool, and small tables that wait for the collector, are left.
  assert(used < 65 << 20, `${used} bytes after the calls`);
  pool.destroy();
  assert(allocated() - before < 1 << 20, `${allocated() - before} bytes after the pool was freed`);
  eda.destroy();
  eda.free();
  return allocated();
}
