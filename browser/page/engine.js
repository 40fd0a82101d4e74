// The page's side of a worker: requests and answers. A worker that does not answer can always be ended.

const RUNTIME = new URL("node_modules/onnxruntime-web/dist/ort-wasm-simd-threaded.wasm", import.meta.url);
const STOP_SECONDS = 5; // a step of the model that takes longer is ended with its worker

/** As many threads as WebAssembly may have here: 1 unless the server isolates the page (browser/serve.py does). */
export const mostThreads = () => (globalThis.crossOriginIsolated ? Math.min(navigator.hardwareConcurrency || 1, 8) : 1);

export class Engine {
  constructor() {
    this.requests = new Map();
    this.lastId = 0;
    this.ended = null; // why
    this.worker = new Worker(new URL("worker.js", import.meta.url), { type: "module" });
    this.worker.onmessage = ({ data }) => this.answered(data);
    this.worker.onerror = (event) => this.end(`the worker failed: ${event.message || "its script cannot be loaded"}`);
    this.worker.onmessageerror = () => this.end("the worker sent what cannot be read");
  }

  /** The model of a checked folder; its files are handed over. Raises Error. */
  async load({ model, files }, threads = mostThreads()) {
    const response = await fetch(RUNTIME, { credentials: "omit" });
    if (!response.ok) {
      throw new Error(
        "onnxruntime-web is not beside the page: run  npm ci --ignore-scripts --prefix browser/page  and load the folder again",
      );
    }
    const wasm = await response.arrayBuffer();
    const buffers = Object.values(files).map((file) => file.buffer);
    const { threads: used } = await this.ask({ kind: "load", model, files, wasm, threads }, [wasm, ...buffers]);
    this.threads = used;
    this.model = model;
  }

  /** As LanguageModel.generate, of a text or of messages; report gets the text as it grows, and nothing any more after stop(). */
  generate(prompt, options, report) {
    return this.ask({ kind: "generate", prompt, options }, [], report);
  }

  /** What was asked for ends at once for the page: its promise gives null. */
  stop() {
    this.worker.postMessage({ kind: "stop" });
    for (const request of this.requests.values()) {
      request.report = () => {};
      request.resolve(null);
      request.timer ??= setTimeout(
        () => this.end(`the model did not stop within ${STOP_SECONDS} seconds and was ended; load it again`),
        1000 * STOP_SECONDS,
      );
    }
  }

  async classify(image) {
    return (await this.ask({ kind: "classify", image }, [])).probabilities;
  }

  ask(message, transfer, report = () => {}) {
    if (this.ended) return Promise.reject(new Error(this.ended));
    return new Promise((resolve, reject) => {
      const id = ++this.lastId;
      this.requests.set(id, { resolve, reject, report });
      this.worker.postMessage({ ...message, id }, transfer);
    });
  }

  answered({ id, kind, message, ...values }) {
    const request = this.requests.get(id);
    if (!request) return;
    if (kind === "text") return request.report(values);
    clearTimeout(request.timer);
    this.requests.delete(id);
    if (kind === "error") request.reject(new Error(message));
    else request.resolve(values);
  }

  /** Ends the worker and all that waits for it. */
  end(reason) {
    if (this.ended) return;
    this.ended = reason;
    this.worker.terminate();
    for (const request of this.requests.values()) {
      clearTimeout(request.timer);
      request.reject(new Error(reason));
    }
    this.requests.clear();
    this.onend?.(reason);
  }
}
