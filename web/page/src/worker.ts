// The engine's thread. The page asks by messages; a long call tells its progress and can be ended.
import { Eda, init, type Info } from "eda-wgpu";
import { layer } from "./layer-analysis";
import { trace, type TraceInput } from "./trace";

export type Backend = "auto" | "webgpu" | "cpu";

interface Request {
  id: number;
  method: keyof typeof methods;
  argument: never;
}

export interface Follow {
  onProgress: (done: number, total: number, what: string) => void;
  signal: AbortSignal;
}

let backend: Backend = "auto";
let opened: Promise<Eda> | undefined;
const running = new Map<number, AbortController>();

function engine(): Promise<Eda> {
  opened ??= Eda.open({ backend }).then(
    (eda) => {
      // A device that is gone is replaced by the next call.
      void eda.lost.then(({ reason, message }) => {
        if (reason === "destroyed") return;
        opened = undefined;
        postMessage({ lost: message || "the browser gave no reason" });
      });
      return eda;
    },
    (error: unknown) => {
      opened = undefined;
      throw error;
    },
  );
  return opened;
}

const methods = {
  async open(choice: Backend): Promise<{ info: Info; webgpu: boolean }> {
    const before = opened;
    opened = undefined;
    backend = choice;
    try {
      (await before)?.destroy();
    } catch {
      // It did not open, so there is nothing to free.
    }
    const { info } = await engine();
    return { info, webgpu: "gpu" in navigator };
  },
  async trace(input: TraceInput) {
    return trace(await engine(), input);
  },
  async layer(url: string, follow: Follow) {
    return layer(await engine(), url, follow);
  },
  async check(_: undefined, follow: Follow) {
    return (await engine()).check({ ...follow });
  },
  async bench(options: object, follow: Follow) {
    return (await engine()).bench({ ...options, ...follow });
  },
  async readReport(text: string) {
    await init();
    return Eda.readReport(text);
  },
};

export type Methods = typeof methods;

onmessage = async ({ data }: MessageEvent<Request | { abort: number }>) => {
  if ("abort" in data) {
    running.get(data.abort)?.abort();
    return;
  }
  const { id, method, argument } = data;
  const control = new AbortController();
  running.set(id, control);
  const follow: Follow = {
    onProgress: (...progress) => postMessage({ id, progress }),
    signal: control.signal,
  };
  try {
    postMessage({ id, result: await methods[method](argument, follow) });
  } catch (error) {
    const { message, name, code } = error as Error & { code?: string };
    postMessage({ id, error: { message: message ?? String(error), name, code } });
  } finally {
    running.delete(id);
  }
};
