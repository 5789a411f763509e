// Compiled, not run: the types hold for ordinary use.
import { Eda, type EdaError, init, type Problem, type Report, type StatePool, type Tensors, type Verdict } from "eda-wgpu";

export async function use(tensors: Tensors): Promise<Float32Array> {
  await init(new URL("https://example.org/eda_wgpu_bg.wasm"));
  const eda: Eda = await Eda.open({ backend: "auto" });
  const problem: Problem = { rule: "eda", B: 1, T: 4, H: 1, HV: 2, K: 8, V: 8, cu_seqlens: [0, 1, 4] };
  const { o, final_state } = await eda.prefill(problem, tensors, {
    chunk: 16,
    onProgress: (done, total) => console.log(done / total),
    signal: AbortSignal.timeout(1000),
  });
  const pool: StatePool = await eda.pool(problem, 4);
  await pool.write(0, final_state);
  try {
    await eda.decode(pool, { ...problem, T: 1 }, { q: o, k: new Uint16Array(8) }, [{ slot: 0, reset: true }, -1]);
  } catch (error) {
    if ((error as EdaError).code === "non-finite") console.log((error as EdaError).tensor);
  }
  const verdicts: Verdict[] = await eda.check();
  console.log(verdicts.map((v) => v.outcome === "passed"), eda.info.limits.maxBufferSize, Eda.version);
  const report: Report = await eda.bench({ quick: true, shapes: [[1, 64, 1, 1, 16, 16]], rules: ["eda"] });
  console.log(Eda.readReport(JSON.stringify(report)).cases[0]?.median_ms);
  void eda.lost.then(({ reason }) => reason === "destroyed");
  eda.destroy();
  // @ts-expect-error: no such rule
  await eda.prefill({ ...problem, rule: "edda" }, tensors);
  // @ts-expect-error: not a typed array
  await eda.prefill(problem, { q: [1, 2, 3] });
  return o;
}
