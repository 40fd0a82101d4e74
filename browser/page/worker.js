// Runs the model, so that the page never freezes; one worker holds one model. Messages in: load, generate, stop, classify.
// Messages out: ready, text, done, probabilities, error. Every message of a request carries its id.

import { Classifier, LanguageModel } from "./models.js";

let model = null;
let wanted = 0; // the request whose text is wanted; one before it ends at its next token
let before = Promise.resolve(); // two at a time would write into one cache

onmessage = async ({ data }) => {
  if (data.kind === "stop") {
    wanted = 0;
    return;
  }
  const answer = (kind, values = {}) => postMessage({ id: data.id, kind, ...values });
  try {
    if (data.kind === "load") {
      const ort = await loadRuntime(data.wasm, data.threads);
      model = data.model.kind === "language_model" ? new LanguageModel(data.model) : new Classifier(data.model);
      await model.load(ort, data.files);
      answer("ready", { threads: ort.env.wasm.numThreads });
    } else if (data.kind === "generate") {
      wanted = data.id;
      const report = (values) => answer("text", values), isStopped = () => wanted !== data.id;
      const mine = before.then(() => model.generate(data.prompt, data.options, report, isStopped));
      before = mine.catch(() => {});
      answer("done", await mine);
    } else {
      answer("probabilities", { probabilities: await model.classify(data.image) });
    }
  } catch (error) {
    answer("error", { message: messageOf(error) });
  }
};

/** onnxruntime-web, its WebAssembly given as bytes. */
async function loadRuntime(wasm, threads) {
  const ort = await import("./node_modules/onnxruntime-web/dist/ort.wasm.min.mjs");
  ort.env.wasm.wasmBinary = wasm;
  ort.env.wasm.numThreads = threads;
  ort.env.logLevel = "fatal"; // what fails is told by its error
  return ort;
}

/** One line: onnxruntime-web also throws numbers, which are addresses in its memory. */
function messageOf(error) {
  if (typeof error === "number") return `onnxruntime stopped (${error}); most often its 4 GB of memory do not suffice`;
  const text = String(error?.message ?? error).replace(/\s+/g, " ");
  return text.length > 400 ? `${text.slice(0, 400)}...` : text;
}
