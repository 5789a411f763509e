/** Name of an update rule. */
export type Rule =
  | "linear" | "delta" | "gdn" | "kda" | "gdn2" | "eda" | "deltaproduct" | "comba" | "rwkv7";

/** float32 values, or float16 bits in a Uint16Array (or a Float16Array, where the browser has it). */
export type Values = Float32Array | Uint16Array;

/** What is to be computed. Value head `h` uses key head `h / (HV/H)`. */
export interface Problem {
  rule: Rule;
  /** Batch rows. */
  B: number;
  /** Tokens of each batch row; may be 0. */
  T: number;
  /** Query and key heads. */
  H: number;
  /** Value heads, a multiple of `H`. */
  HV: number;
  /** Key channels of a head, 1 to 256. */
  K: number;
  /** Value columns of a head, 1 to 256. */
  V: number;
  /** DeltaProduct's factors a token (`k`, `v` and `beta` have that many rows a token); 1 where absent. */
  householders?: number;
  /** Factor on the output; `K ** -0.5` where absent. */
  scale?: number;
  /** Packed sequences (`B` = 1): `N + 1` ascending offsets from 0 to `T`. Empty sequences are allowed. */
  cu_seqlens?: ArrayLike<number>;
  /** The decay is one number a head. Told by the length of `g` (or `a`) where absent. */
  decay_per_head?: boolean;
  /** How the layer's `a` becomes `g`; `safe` for eda, `sigmoid` for kda with a `lower_bound`, else `softplus`. */
  decay_gate?: "safe" | "sigmoid" | "softplus";
  /** Bound of the gates `safe` (−5 where absent) and `sigmoid`. */
  lower_bound?: number;
  /** Gates are 2·sigmoid of their logits, else sigmoid. */
  allow_neg_eigval?: boolean;
  /** q, k and e are divided by `sqrt(Σx² + 1e-6)`; true where a raw layer input is there. */
  raw?: boolean;
}

/**
 * Tensors by name, row-major; each rule takes those of its own and no others. `Eda.shapes(problem)` lists them.
 * The values are copied before the call returns, so that arrays may be used again at once.
 */
export interface Tensors {
  /** `[B, T, H, K]`, query. */
  q?: Values;
  /** `[B, n·T, H, K]`, write address, unit norm; n is 1 except for DeltaProduct. */
  k?: Values;
  /** `[B, n·T, HV, V]`, value. */
  v?: Values;
  /** `[B, T, H, K]`, erase address, unit norm (eda). */
  e?: Values;
  /** `[B, T, H, K]`, read address (comba). */
  p?: Values;
  /** `[B, T, H, K]` (rwkv7); else the layer's raw decay input in place of `g`, in its shape. */
  a?: Values;
  /** `[B, T, H, K]` (rwkv7) or `[B, T, HV, K]` (gdn2). */
  b?: Values;
  /** `[B, T, HV, V]` (gdn2). */
  w?: Values;
  /** `[B, T, HV, K]` or `[B, T, HV]`, natural log of the decay, at most 0; `-Infinity` is full decay. */
  g?: Values;
  /** `[HV]`, with `a`. */
  A_log?: Values;
  /** `[HV, K]` or `[HV]`, with `a`. */
  dt_bias?: Values;
  /** `[B, n·T, HV]`, write gate. */
  beta?: Values;
  /** `[B, T, HV]`, erase gate (eda). */
  gamma?: Values;
  /** In place of `beta`. */
  beta_logit?: Values;
  /** In place of `gamma`. */
  gamma_logit?: Values;
  /** `[N, HV, K, V]`; zero where absent. Not for decode, whose states are in the pool. */
  initial_state?: Values;
}

/** What an opened engine is. */
export interface Info {
  /** Version of this package. */
  version: string;
  /** Adapter, as far as the browser names it; for the CPU engine `wasm32 (1 thread)`. */
  adapter: string;
  /** What runs the work: `cpu` is the CPU engine, in this thread. */
  backend: "webgpu" | "cpu";
  /** Kernel family (`portable`), or `cpu`. */
  tier: string;
  /** `software` for a driver that runs on the processor, `other` for what the browser does not tell, or `cpu`. */
  kind: "software" | "other" | "cpu";
  /** Why the CPU engine runs although `auto` was asked for. */
  reason?: string;
  /** Storage types for inputs and outputs. */
  elements: ("f32" | "f16")[];
  /** Times are the device's own (which browsers may round to 0.1 ms), else wall time around the call. */
  timestamps: boolean;
  /** The adapter's WebGPU limits that matter here, by their names in WebGPU; empty for the CPU engine. */
  limits: Record<string, number>;
}

export interface OpenOptions {
  /**
   * `auto` (where absent): the browser's adapter unless it is a software one, else the CPU engine.
   * `webgpu`: the browser's adapter, whatever it is. `cpu`: the CPU engine.
   */
  backend?: "auto" | "webgpu" | "cpu";
  /** Which of several adapters the browser is asked for; `high-performance` where absent. */
  powerPreference?: "high-performance" | "low-power";
  /**
   * A `GPUDevice` of the page, in place of one of the engine's own. The page keeps it: `destroy()` frees what the
   * engine has allocated on it, not the device; errors outside of error scopes go to the page's own handlers. It is
   * used with the features and limits that it was requested with.
   */
  device?: unknown;
  /** Skips the small known case that is computed at opening. */
  skipSelfTest?: boolean;
}

/** How a long call is followed and ended. */
export interface Control {
  /** Called with what is done and what there is: tokens, cases or samples; `what` names the next one. */
  onProgress?: (done: number, total: number, what: string) => void;
  /** Ends the call between two pieces of work; it is then rejected with the signal's reason. */
  signal?: AbortSignal;
}

export interface PrefillOptions extends Control {
  /** Tokens a chunk; chosen by the engine where absent. */
  chunk?: 16 | 32 | 64;
  /** Segments that a long sequence is cut into on a GPU and that are computed at the same time; 1 for no cut; chosen by
   * the engine where absent. */
  segments?: number;
  /** How inputs and outputs are stored on the GPU; `f32` where absent. Arithmetic and states are float32. */
  dtype?: "f32" | "f16";
  /** Takes NaN and infinities as they are. What comes out is then not defined. */
  allowNonFinite?: boolean;
}

export interface PrefillResult {
  /** `[B, T, HV, V]`. */
  o: Float32Array;
  /** `[N, HV, K, V]`. */
  final_state: Float32Array;
  /** Time of the passes, milliseconds; see `Info.timestamps`. */
  computeMs: number;
}

/** A row of a decode batch: a slot (-1 is padding), or a slot that may start from a zero state. */
export type Row = number | { slot: number; reset?: boolean };

export interface DecodeOptions {
  /** As in `PrefillOptions`. */
  dtype?: "f32" | "f16";
  /** As in `PrefillOptions`. */
  allowNonFinite?: boolean;
}

export interface DecodeResult {
  /** `[B, T, HV, V]`; zero for padding. */
  o: Float32Array;
  /** Time of the pass, milliseconds; see `Info.timestamps`. */
  computeMs: number;
}

/** Result of one built-in case. */
export interface Verdict {
  case: string;
  /** Larger of the relative l2 errors of `o` and `final_state` against float64; null where nothing was computed. */
  error: number | null;
  /** Largest error that passes. */
  limit: number;
  outcome: "passed" | "failed" | "not-offered";
  /** Both errors, or what went wrong. */
  detail: string;
}

/** Random inputs; the defaults are strong and uneven, as in the tests. */
export interface Recipe {
  /** 0 where absent. */
  seed?: number;
  decays?: "mixed" | "none" | "weak" | "floor" | "cliff" | "full";
  gates?: "mixed" | "near-one";
  keys?: "clustered" | "repeated" | "same-address";
  /** Gives an `initial_state` as well. */
  initialState?: boolean;
}

export interface ReferenceResult {
  /** `[B, T, HV, V]`. */
  o: Float64Array;
  /** `[N, HV, K, V]`. */
  final_state: Float64Array;
}

/** What a safetensors file holds. */
export interface FileContent {
  problem: Problem;
  tensors: Tensors;
  /** What should come out, where the file says so. */
  expected: { o?: Float64Array; final_state?: Float64Array };
}

/** What a benchmark run measures. */
export interface BenchOptions extends Control {
  /** Small shapes and fewer samples: some seconds. */
  quick?: boolean;
  /** Both where absent. */
  operations?: ("prefill" | "decode")[];
  /** `["eda"]` where absent. */
  rules?: Rule[];
  /** `[B, T, H, HV, K, V]` each; a set that suits the engine where absent. */
  shapes?: number[][];
  /** As in `PrefillOptions`. */
  dtype?: "f32" | "f16";
}

/** Samples of one measurement. */
export interface ReportSamples {
  /** The device's clock, or the host's. */
  timing: "timestamps" | "wall";
  repetitions: number;
  samples_ms: number[];
}

/** One case of a report; its keys are in the README of the crate. */
export interface ReportCase {
  op: "prefill" | "decode";
  rule: string;
  factors: number;
  /** `[B, T, H, HV, K, V]`. */
  shape: [number, number, number, number, number, number];
  dtype: "f32" | "f16";
  /** Type of decode's states. Absent in reports of older versions, where it is float32. */
  state?: "f32" | "f16";
  chunk: number | null;
  /** The most segments of sequences computed at the same time; 0 where none is cut. Absent in reports of older versions. */
  segments?: number;
  /** Kernel family of a prefill on a GPU; null in decode. Absent in reports of older versions. */
  tier?: "portable" | "matrix" | null;
  steps: number;
  final_state_written: boolean;
  warm_up_ms: number;
  times: ReportSamples;
  median_ms: number;
  min_ms: number;
  max_ms: number;
  gflops: number;
  gbytes: number;
  tokens_per_s: number;
  gflop_per_s: number;
  gb_per_s: number;
  share_of_product: number;
  share_of_copy: number;
  long_run: { steps: number; block: number; block_ms: number[]; first_ms: number; last_ms: number } | null;
}

/** What a benchmark run leaves, the JSON of `eda bench --json`. */
export interface Report {
  format: "eda-bench/1";
  crate_version: string;
  commit: string | null;
  date: string;
  /** `browser` in one. */
  os: string;
  arch: string;
  quick: boolean;
  adapter: {
    name: string;
    backend: string;
    device_type: string;
    vendor_id: number;
    device_id: number;
    driver: string;
    /** In a browser, its user agent where the adapter says nothing. */
    driver_info: string;
  };
  tier: string;
  ceilings: {
    copy: { bytes: number; times: ReportSamples; median_ms: number; gb_per_s: number };
    product: { size: number; times: ReportSamples; median_ms: number; gflop_per_s: number };
  };
  /** Null in a browser, which builds pipelines when it likes. */
  pipelines: { count: number; first_ms: number; second_ms: number | null } | null;
  cases: ReportCase[];
  skipped: { case: string; reason: string }[];
}

/** Why an engine is gone. */
export interface LostInfo {
  /** `destroyed` after `destroy()` of the engine or of its device. */
  reason: "destroyed" | "unknown";
  message: string;
}

/**
 * What `code` of an error says:
 * `tensor`: an input does not fit the problem (`tensor` names it); `non-finite`: a NaN or an infinity in one;
 * `unsupported`: a size, option or combination that is not run; `out-of-memory`: nothing was computed, the engine is
 * usable; `device-lost`: the engine is gone, open another; `no-adapter`, `device`, `self-test`: the engine did not
 * open, or the device refused something; `file`: no safetensors file, or a bad one.
 */
export type ErrorCode =
  | "tensor" | "non-finite" | "unsupported" | "out-of-memory" | "device-lost"
  | "no-adapter" | "device" | "self-test" | "file";

/** What promises are rejected with, and what functions throw. */
export interface EdaError extends Error {
  name: "EdaError";
  code: ErrorCode;
  /** The tensor, for `tensor` and `non-finite`. */
  tensor?: string;
}
