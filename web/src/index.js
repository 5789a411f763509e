// The package's entry: the generated interface, with the WebAssembly module loaded when it is first needed.
import load, { Eda, StatePool } from "./eda_wgpu.js";

let loading;

/**
 * Loads the WebAssembly module: from beside this file, or from `source` (an address, a Response, bytes, a compiled
 * module). `Eda.open()` does it by itself; call it before the functions that need no engine, or to give a source.
 */
export function init(source) {
  loading ??= load(source === undefined ? undefined : { module_or_path: source }).then(
    () => {},
    (error) => {
      loading = undefined;
      throw error;
    },
  );
  return loading;
}

const open = Eda.open;
Eda.open = async (options) => {
  await init();
  return open(options);
};

export { Eda, StatePool };
