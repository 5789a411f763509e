// The page's side of the engine's thread.
import type { Backend, Methods } from "./worker";

type Result<M extends keyof Methods> = Awaited<ReturnType<Methods[M]>>;
type Opened = Result<"open">;

export interface Following {
  onProgress?: (done: number, total: number, what: string) => void;
  signal?: AbortSignal;
}

interface Waiting extends Following {
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
    const error = new Error(`The engine ended: ${event.message || "its script could not be loaded"}.`);
    restart(error);
    tell(error);
  };
  worker = started;
  return started;
}

/** Ends the thread; what waits for it fails. */
function restart(error: Error): void {
  worker?.terminate();
  worker = undefined;
  opening = undefined;
  const calls = waiting;
  waiting = new Map();
  for (const call of calls.values()) call.reject(error);
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
    waiting.set(id, { ...following, resolve: resolve as Waiting["resolve"], reject });
    const target = start();
    target.postMessage({ id, method, argument });
    signal?.addEventListener("abort", () => {
      target.postMessage({ abort: id });
      setTimeout(() => {
        if (waiting.has(id)) {
          restart(canceled());
          void open();
        }
      }, PATIENCE_MS);
    });
  });
}

/** Opens the chosen engine, once. */
export function open(choice: Backend = backend): Promise<Opened> {
  if (opening && choice === backend) return opening;
  backend = choice;
  tell(undefined);
  const attempt = post("open", choice);
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
