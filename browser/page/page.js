// The page: what is loaded, what is asked for, what is shown. A model's words reach it by textContent alone.

import { Chat } from "./chat.js";
import { centred } from "./digits.js";
import { Drawing } from "./drawing.js";
import { Engine, mostThreads } from "./engine.js";
import { chosenFolder, droppedFolder, megabytes, readFolder, servedFolder } from "./folder.js";

const element = (id) => document.getElementById(id);
const engines = { language_model: null, image_classifier: null };
let loading = null, isGenerating = false;

function tell(name, text) {
  element(`${name}-status`).textContent = text;
  element(`${name}-problem`).hidden = true;
}

function complain(name, text) {
  element(`${name}-status`).textContent = "";
  element(`${name}-problem`).textContent = text;
  element(`${name}-problem`).hidden = false;
}

// ------------------------------------------------------------------------------------------------------------- loading

/** Reads, checks and starts the model of a folder, in place of the one of its kind. */
async function load(getSource) {
  loading?.abort(new DOMException("", "AbortError"));
  const mine = (loading = new AbortController());
  let engine = null;
  mine.signal.addEventListener("abort", () => engine?.end("cancelled"));
  element("loading").hidden = element("cancel").hidden = false;
  showProgress(null, "Reading");
  tell("loader", "Reading the folder");
  try {
    const source = await getSource();
    const folder = await readFolder(source, (done, total) => mine === loading && showProgress(done / total, `Reading ${source.name}: ${megabytes(done)} of ${megabytes(total)}`), mine.signal);
    mine.signal.throwIfAborted();
    showProgress(null, `Starting ${source.name}`);
    tell("loader", "The files are whole. Starting the model");
    engine = new Engine();
    await engine.load(folder);
    mine.signal.throwIfAborted();
    use(engine, source.name, Object.values(folder.model.files).reduce((sum, file) => sum + file.bytes, 0));
  } catch (error) {
    engine?.end("not loaded");
    if (mine !== loading) return;
    if (mine.signal.aborted) tell("loader", "Loading was cancelled.");
    else complain("loader", error.message);
  } finally {
    if (mine === loading) {
      loading = null;
      element("loading").hidden = element("cancel").hidden = true;
    }
  }
}

function showProgress(share, text) {
  element("progress-label").textContent = text;
  if (share === null) element("progress").removeAttribute("value");
  else element("progress").value = share;
}

function use(engine, name, bytes) {
  const { model } = engine, { kind } = model, isText = kind === "language_model";
  engines[kind]?.end("another model was loaded");
  engines[kind] = engine;
  const panel = isText ? "text" : "digits";
  const what = isText ? `${model.family}, ${model.weights}, context ${model.context}` : `${model.classes.length} classes, ${model.image_size.join(" x ")} pixels`;
  element(`${panel}-model`).textContent = `${name}: ${what}, ${megabytes(bytes)}, ${threads(engine.threads)}.${model.source ? ` From ${model.source}.` : ""}`;
  tell("loader", `${name} is ready: ${isText ? "a language model" : "a model that reads digits"}.`);
  tell(panel, "");
  if (isText) showView(model);
  enable(panel, true);
  if (!isText) showClasses(model, null);
  else if (element("num-tokens").valueAsNumber > model.context) element("num-tokens").value = Math.ceil(model.context / 2);
  engine.onend = (reason) => {
    if (engines[kind] !== engine) return;
    engines[kind] = null;
    element(`${panel}-model`).textContent = isText ? "No language model is loaded." : "No model of digits is loaded.";
    enable(panel, false);
    complain(panel, reason);
  };
}

function enable(panel, isOn) {
  if (panel === "digits") element("read").disabled = !isOn;
  else {
    element("text-fields").disabled = !isOn;
    chat.enable(isOn);
    element("generate").disabled = !isOn || isGenerating;
  }
}

element("folder").addEventListener("change", ({ target }) => {
  const files = [...target.files];
  target.value = ""; // the same folder may be chosen again
  if (files.length) load(() => chosenFolder(files));
});
element("cancel").addEventListener("click", () => loading?.abort());
for (const kind of ["dragenter", "dragover", "dragleave", "drop"]) {
  addEventListener(kind, (event) => {
    if (!event.dataTransfer?.types.includes("Files")) return;
    event.preventDefault();
    element("loader").classList.toggle("dropping", kind === "dragenter" || kind === "dragover");
    if (kind === "drop") {
      const source = droppedFolder(event.dataTransfer); // now: the transfer is empty later
      load(() => source);
    }
  });
}

// ---------------------------------------------------------------------------------------------------------------- text

/** What was typed into the form. Raises Error: found, expected. */
function optionsOf() {
  const number = (id, name, isRight, expected) => {
    const value = element(id).valueAsNumber;
    if (!isRight(value)) throw new Error(`${name} is ${element(id).value || "empty or no number"}; expected ${expected}`);
    return value;
  };
  const isWhole = (low, high) => (value) => Number.isSafeInteger(value) && value >= low && value <= high;
  return {
    numTokens: number("num-tokens", "Tokens", isWhole(1, 2 ** 24), "a whole number from 1"),
    temperature: number("temperature", "Temperature", (value) => Number.isFinite(value) && value >= 0, "a number, 0 or more"),
    topK: number("top-k", "Top-k", isWhole(0, 2 ** 32), "a whole number, 0 or more"),
    topP: number("top-p", "Top-p", (value) => value > 0 && value <= 1, "above 0, at most 1"),
    seed: number("seed", "Seed", isWhole(0, 2 ** 32 - 1), "a whole number from 0 to 4294967295"),
  };
}

/** A conversation where the model has a format for one, else a text and what follows it. */
function showView({ chat: format }) {
  chat.clear();
  element("text-title").textContent = format ? "Chat" : "Text";
  element("chat").hidden = element("of-chat").hidden = !format;
  for (const one of document.querySelectorAll(".of-text")) one.hidden = Boolean(format);
}

const chat = new Chat({
  async answer(messages, report) {
    const engine = engines.language_model, options = optionsOf();
    tell("text", "Answering");
    const paint = painter((values) => {
      report(values);
      showSpeed(values);
    });
    const showSpeed = (values) => (element("chat-speed").textContent = speedOf(values, engine));
    try {
      const done = (await engine.generate(messages, options, paint)) ?? (paint.latest && { ...paint.latest, ended: "stop" });
      if (done) showSpeed(done);
      return done;
    } finally {
      paint.end();
    }
  },
  stop: () => engines.language_model?.stop(),
  say: (text) => tell("text", text),
  complain: (text) => complain("text", text),
});

/** Shows the latest values once a frame, until end(). */
function painter(show) {
  let waits = false, ended = false;
  const paint = (values) => {
    paint.latest = values;
    if (!waits) requestAnimationFrame(() => ((waits = false), ended || show(paint.latest)));
    waits = true;
  };
  paint.end = () => (ended = true);
  return paint;
}

async function generate() {
  const engine = engines.language_model;
  let options;
  try {
    options = optionsOf();
    if (!element("prompt").value.isWellFormed()) throw new Error("the prompt holds half a character; expected text");
  } catch (error) {
    return complain("text", error.message);
  }
  const prompt = element("prompt").value, paint = painter((values) => showText(values, engine));
  element("given").textContent = prompt;
  element("generated").textContent = element("speed").textContent = "";
  tell("text", "Generating");
  setGenerating(true);
  try {
    const done = await engine.generate(prompt, options, paint), latest = done ?? paint.latest;
    if (latest) showText(latest, engine);
    const why = { end: ": the model ended its text", length: "" }[done?.ended] ?? ": stopped";
    tell("text", `Done, ${latest?.count ?? 0} tokens${why}.`);
  } catch (error) {
    complain("text", error.message);
  }
  paint.end();
  setGenerating(false);
}

const threads = (count) => `${count} thread${count > 1 ? "s" : ""}`;

function speedOf({ count, seconds }, engine) {
  const speed = count > 1 && seconds > 0 ? `${((count - 1) / seconds).toFixed(1)} tokens/s, ` : "";
  return `${speed}${count} token${count === 1 ? "" : "s"}, ${threads(engine.threads)}`;
}

function showText(values, engine) {
  const output = element("output"), atEnd = output.scrollTop + output.clientHeight >= output.scrollHeight - 8;
  element("generated").textContent = values.text;
  element("speed").textContent = speedOf(values, engine);
  if (atEnd) output.scrollTop = output.scrollHeight;
}

function setGenerating(is) {
  const had = document.activeElement; // a button that is disabled loses the focus: it goes to the other one
  isGenerating = is;
  element("stop").disabled = !is;
  element("generate").disabled = is || !engines.language_model;
  if (is && had === element("generate")) element("stop").focus();
  if (!is && had === element("stop")) element("generate").focus();
}

element("text-form").noValidate = true; // our messages say what was found
element("text-form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (engines.language_model && !engines.language_model.model.chat && !isGenerating) generate();
});
element("stop").addEventListener("click", () => engines.language_model?.stop());
element("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) element("text-form").requestSubmit();
});

// -------------------------------------------------------------------------------------------------------------- digits

async function readDigit() {
  const engine = engines.image_classifier;
  if (!engine) return tell("digits", "Load a model of digits to have this drawing read.");
  const { model } = engine, [side] = model.image_size;
  const { grey, width, height } = drawing.grey(), image = centred(grey, width, height, side);
  if (!image) return tell("digits", "There is nothing drawn yet.");
  showSeen(image, side);
  try {
    const probabilities = await engine.classify(Float32Array.from(image, (value) => value / 255));
    const best = probabilities.indexOf(Math.max(...probabilities));
    showClasses(model, probabilities, best);
    tell("digits", `The model reads ${model.classes[best]}, with ${(100 * probabilities[best]).toFixed(1)} %.`);
  } catch (error) {
    complain("digits", error.message);
  }
}

function showClasses(model, probabilities, best = -1) {
  element("classes").replaceChildren(
    ...model.classes.map((name, index) => {
      const item = document.createElement("li"), bar = document.createElement("div");
      bar.className = "bar";
      bar.style.width = `${100 * (probabilities?.[index] ?? 0)}%`;
      const words = [String(name), probabilities ? `${(100 * probabilities[index]).toFixed(1)} %` : "-"].map((text) => {
        const span = document.createElement("span");
        span.textContent = text;
        return span;
      });
      item.classList.toggle("best", index === best);
      item.append(bar, ...words);
      return item;
    }),
  );
}

function showSeen(image, side) {
  const canvas = element("seen");
  canvas.width = canvas.height = side;
  const pixels = new ImageData(side, side);
  image.forEach((value, index) => pixels.data.set([value, value, value, 255], 4 * index));
  canvas.getContext("2d").putImageData(pixels, 0, 0);
}

function clearDigit() {
  drawing.wipe();
  element("seen").getContext("2d").clearRect(0, 0, element("seen").width, element("seen").height);
  showClasses(engines.image_classifier?.model ?? { classes: [..."0123456789"] }, null);
  tell("digits", "");
}

const drawing = new Drawing(element("ink"), element("pen"), { read: readDigit, clear: clearDigit, say: (text) => tell("digits", text) });
element("read").addEventListener("click", readDigit);
element("clear").addEventListener("click", clearDigit);
clearDigit();

// --------------------------------------------------------------------------------------------------------------- start

element("speed").textContent = threads(mostThreads());
for (const path of new URLSearchParams(location.search).getAll("model")) {
  await load(() => servedFolder(path)); // one of each kind may be named
}
