import type { InitInput } from "./eda_wgpu.js";

export type * from "./eda_wgpu.js";
export { Eda, StatePool } from "./eda_wgpu.js";

/**
 * Loads the WebAssembly module: from beside this file, or from `source` (an address, a Response, bytes, a compiled
 * module). `Eda.open()` does it by itself; call it before the functions that need no engine (`Eda.shapes`,
 * `Eda.generate`, `Eda.reference`, `Eda.read`), or to give a source.
 */
export function init(source?: InitInput | Promise<InitInput>): Promise<void>;
