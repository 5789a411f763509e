// The page's side of the engine's thread.
import type { Backend, Methods } from "./worker";

type Result<M extends keyof Methods> = Awaited<ReturnType<Methods[M]>>;
type Opened = Result<"open">;

export interface Following {
  onProgress?: (done: number, total: number, what: string) => void;
  signal?: AbortSignal;
}

interface Waiting extends Following {
  method: keyof Methods;
  argument: unknown;
  resolve: (value: never) => void;
  reject: (error: Error) => void;
}

/** A case on the CPU engine keeps its thread busy; one that does not end in this time is ended with its thread. */
const PATIENCE_MS = 1500;

let worker: Worker | undefined;
let waiting = new Map<number, Waiting>();
let next = 0;
let backend: Backend = "auto";
let opening: Promise<Opened> | undefined;
const listeners: ((state: Opened | Error | undefined) => void)[] = [];

export const canceled = (): Error => new DOMException("Canceled.", "AbortError");

function start(): Worker {
  if (worker) return worker;
  const started = new Worker(new URL("./worker.ts", import.meta.url), { type: "module" });
  started.onmessage = ({ data }) => {
    // What a thread that was ended has sent before.
    if (worker !== started) return;
    if ("lost" in data) {
      opening = undefined;
      tell(new Error(`The GPU was lost (${data.lost}). The next calculation opens it again.`));
      return;
    }
    const call = waiting.get(data.id);
    if (!call) return;
    if (data.progress) {
      call.onProgress?.(...(data.progress as [number, number, string]));
      return;
    }
    waiting.delete(data.id);
    if (data.error) {
      call.reject(data.error.name === "AbortError" ? canceled() : Object.assign(new Error(data.error.message), { code: data.error.code }));
    } else call.resolve(data.result as never);
  };
  started.onerror = (event) => {
    event.preventDefault();
    if (worker !== started) return;
    const error = new Error(`The engine ended: ${event.message || "its script could not be loaded"}.`);
    end();
    opening = undefined;
    const calls = waiting;
    waiting = new Map();
    for (const call of calls.values()) call.reject(error);
    tell(error);
  };
  worker = started;
  return started;
}

function end(): void {
  worker?.terminate();
  worker = undefined;
}

/**
 * Ends the thread that a canceled call keeps busy; the next one opens the same engine and is asked for all else that
 * waits. Listeners hear of it only once that is open: a notice that goes and comes back would move the buttons under
 * the pointer of a person who has canceled and runs again.
 */
function replace(): void {
  end();
  for (const [id, { signal, reject }] of waiting) {
    if (!signal?.aborted) continue;
    waiting.delete(id);
    reject(canceled());
  }
  const opens = (call: Waiting) => Number(call.method === "open");
  // Opening comes first: a thread that is asked for anything else opens an engine of its own choice.
  const asked = [...waiting].sort(([, a], [, b]) => opens(b) - opens(a));
  if (!asked.some(([, call]) => opens(call))) ask();
  for (const [id, { method, argument }] of asked) start().postMessage({ id, method, argument });
}

function tell(state: Opened | Error | undefined): void {
  for (const listener of listeners) listener(state);
}

function post<M extends keyof Methods>(
  method: M,
  argument: Parameters<Methods[M]>[0],
  following: Following = {},
): Promise<Result<M>> {
  const id = next++;
  const { signal } = following;
  return new Promise<Result<M>>((resolve, reject) => {
    if (signal?.aborted) {
      reject(canceled());
      return;
    }
    waiting.set(id, { ...following, method, argument, resolve: resolve as Waiting["resolve"], reject });
    start().postMessage({ id, method, argument });
    signal?.addEventListener("abort", () => {
      if (!waiting.has(id)) return;
      worker?.postMessage({ abort: id });
      setTimeout(() => {
        if (waiting.has(id)) replace();
      }, PATIENCE_MS);
    });
  });
}

/** Opens the chosen engine, once. */
export function open(choice: Backend = backend): Promise<Opened> {
  if (opening && choice === backend) return opening;
  backend = choice;
  tell(undefined);
  return ask();
}

/** Asks the thread to open it. */
function ask(): Promise<Opened> {
  const attempt = post("open", backend);
  opening = attempt;
  attempt.then(
    (state) => opening === attempt && tell(state),
    (error: Error) => {
      if (opening === attempt) {
        opening = undefined;
        tell(error);
      }
    },
  );
  return attempt;
}

export async function call<M extends Exclude<keyof Methods, "open">>(
  method: M,
  argument: Parameters<Methods[M]>[0],
  following?: Following,
): Promise<Result<M>> {
  await open();
  return post(method, argument, following);
}

/** Calls back when the engine opens (its description), fails, is lost, or is being opened (`undefined`). */
export function onState(listener: (state: Opened | Error | undefined) => void): void {
  listeners.push(listener);
}
