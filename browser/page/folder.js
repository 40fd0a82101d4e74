// An exported folder is data from anywhere: every field, size and SHA-256 is checked before anything else sees it.

export class FolderError extends Error {}

const FORMAT = "tpu-examples-onnx-1";
const LARGEST_JSON = 2 ** 20, LARGEST_GRAPH = 2 ** 30, LARGEST_TOKENIZER = 2 ** 26;
const LARGEST_WEIGHTS = 2 ** 31 - 1; // Chromium's SHA-256 takes no more at once
const LARGEST_VOCABULARY = 2 ** 20; // sampling.js sorts so many
const LARGEST_CACHE = 2 ** 30; // bytes of keys and values

const NEVER_READ = ["tokenizer_config.json", "generation_config.json", "config.json"]; // may be named; never read here

const isWhole = (low, high) => (value) => Number.isSafeInteger(value) && value >= low && value <= high;
const isOneOf = (...values) => (value) => values.includes(value);
const isText = (value) => typeof value === "string" && value.length <= 1000;
const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
const isListOf = (check, low, high) => (value) =>
  Array.isArray(value) && value.length >= low && value.length <= high && value.every(check);

const COMMON = {
  opset: [isWhole(7, 99), "a whole number from 7"],
  versions: [isObject, "names and versions"],
  files: [isObject, "names with bytes and sha256"],
};
const FIELDS = {
  language_model: {
    family: [isText, "a text"],
    weights: [isOneOf("float32", "float16", "int8"), "float32, float16 or int8"],
    context: [isWhole(1, 2 ** 24), "1 to 2^24"],
    chunk: [isWhole(1, 2 ** 24), "1 to 2^24"],
    vocab_size: [isWhole(1, LARGEST_VOCABULARY), "1 to 2^20"],
    num_layers: [isWhole(1, 1000), "1 to 1000"],
    num_cached_heads: [isWhole(1, 1000), "1 to 1000"],
    head_dim: [isWhole(1, 2 ** 16), "1 to 2^16"],
    start: [(value) => value === null || isWhole(0, LARGEST_VOCABULARY - 1)(value), "a token or null"],
    stops: [isListOf(isWhole(0, LARGEST_VOCABULARY - 1), 0, 1000), "a list of tokens"],
    tokenizer: [isOneOf("bytes", "numbers", "tokenizer.json"), "bytes, numbers or tokenizer.json"],
    source: [isText, "a text"],
    chat: [(value) => value === undefined || value === null || isObject(value), "an object, or null"],
  },
  image_classifier: {
    image_size: [(value) => isListOf(isWhole(1, 1024), 2, 2)(value) && value[0] === value[1], "two equal sides"],
    channels: [isOneOf(1), "1: a drawing has no colours"],
    classes: [isListOf(isText, 1, 1000), "1 to 1000 names"],
    mean: [isListOf(isOneOf(0), 1, 1), "[0]: the graph normalises its image"],
    std: [isListOf(isOneOf(1), 1, 1), "[1]: the graph normalises its image"],
    layout: [isOneOf("NCHW"), "NCHW"],
  },
};

const found = (value) => (value === undefined ? "nothing" : JSON.stringify(value).slice(0, 60));
export const megabytes = (bytes) => (bytes / 1e6).toLocaleString("en", { maximumFractionDigits: bytes < 1e7 ? 2 : 0 }) + " MB";

/** Raises FolderError for a field that is missing or wrong. prefix: what is in front of its name in the message. */
function checkFields(object, fields, prefix = "") {
  for (const [name, [isRight, expected]] of Object.entries(fields)) {
    const value = Object.hasOwn(object, name) ? object[name] : undefined;
    if (!isRight(value)) throw new FolderError(`model.json: ${prefix}${name} is ${found(value)}; expected ${expected}`);
  }
}

/** What model.json says, checked. Raises FolderError. */
export function checkModel(text) {
  let model;
  try {
    model = JSON.parse(text);
  } catch {
    throw new FolderError("model.json is no JSON; the file is damaged: copy or export the folder again");
  }
  if (!isObject(model) || model.format !== FORMAT) {
    throw new FolderError(
      `model.json: format is ${found(model?.format)}; expected "${FORMAT}": a folder that browser.export wrote`,
    );
  }
  if (!Object.hasOwn(FIELDS, model.kind)) {
    throw new FolderError(`model.json: kind is ${found(model.kind)}; expected ${Object.keys(FIELDS).join(" or ")}`);
  }
  checkFields(model, { ...COMMON, ...FIELDS[model.kind] });
  if (model.kind === "language_model") checkLanguageModel(model);
  for (const name of expectedFiles(model)) {
    checkFields(model.files, { [name]: [isObject, "bytes and sha256"] }, "files: ");
    const most = largest(name), isHash = (value) => isText(value) && /^[0-9a-f]{64}$/.test(value);
    const fields = { bytes: [isWhole(1, most), `1 to ${most}`], sha256: [isHash, "64 hexadecimal digits"] };
    checkFields(model.files[name], fields, `${name}: `);
  }
  const known = [...expectedFiles(model), ...NEVER_READ];
  const foreign = Object.keys(model.files).find((name) => !known.includes(name));
  if (foreign !== undefined) {
    throw new FolderError(`model.json names a file ${found(foreign)}; expected ${expectedFiles(model).join(", ")}`);
  }
  return model;
}

function checkLanguageModel(model) {
  if (model.chunk > model.context) {
    throw new FolderError(`model.json: chunk is ${model.chunk}; expected at most the context, ${model.context}`);
  }
  const outside = [model.start, ...model.stops].find((token) => token !== null && token >= model.vocab_size);
  if (outside !== undefined) {
    throw new FolderError(`model.json: token ${outside} is outside the vocabulary of ${model.vocab_size}`);
  }
  model.chat ??= null;
  if (model.chat) checkChat(model.chat, model.vocab_size);
  const cache = 8 * model.num_layers * model.context * model.num_cached_heads * model.head_dim;
  if (cache > LARGEST_CACHE) {
    throw new FolderError(
      `model.json: the cache of keys and values needs ${megabytes(cache)}; expected at most ${megabytes(LARGEST_CACHE)}: ` +
        "export with a smaller --context",
    );
  }
}

/** As browser/export.py has it. */
function checkChat(chat, vocabulary) {
  const tokens = (low, high) => [isListOf(isWhole(0, vocabulary - 1), low, high), `${low} to ${high} tokens of the vocabulary`];
  const isName = (value) => isText(value) && /^[a-z0-9]+$/.test(value);
  const fields = { format: [isName, "the name of a format"], begin: tokens(0, 1), stops: tokens(1, 1000), words: tokens(1, 1000) };
  checkFields(chat, fields, "chat.");
}

function expectedFiles(model) {
  if (model.kind === "image_classifier") return ["classifier.onnx"];
  const files = ["prefill.onnx", "decode.onnx", "weights.bin"];
  return model.tokenizer === "tokenizer.json" ? [...files, "tokenizer.json"] : files;
}

function largest(name) {
  return name === "weights.bin" ? LARGEST_WEIGHTS : name === "tokenizer.json" ? LARGEST_TOKENIZER : LARGEST_GRAPH;
}

/**
 * {model, files: {name: Uint8Array}} of a source, all checked. report(done, total): bytes read.
 * Raises FolderError; AbortError when the signal says so.
 */
export async function readFolder(source, report, signal) {
  if (!globalThis.crypto?.subtle) {
    throw new FolderError("this page cannot check files: open it by http://127.0.0.1 or https, not by another address");
  }
  const content = await readAll(await source.open("model.json", signal), "model.json", null, () => {}, signal);
  const model = checkModel(new TextDecoder().decode(content));
  const names = expectedFiles(model), files = {};
  const total = names.reduce((sum, name) => sum + model.files[name].bytes, 0);
  let done = 0;
  for (const name of names) {
    const opened = await source.open(name, signal), before = done;
    files[name] = await readAll(opened, name, model.files[name].bytes, (bytes) => report(before + bytes, total), signal);
    const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", files[name]));
    signal.throwIfAborted();
    const hex = Array.from(digest, (byte) => byte.toString(16).padStart(2, "0")).join("");
    if (hex !== model.files[name].sha256) {
      throw new FolderError(
        `${name} has SHA-256 ${hex.slice(0, 12)}...; model.json says ${model.files[name].sha256.slice(0, 12)}...: ` +
          "the file is damaged or of another model; copy or export the folder again",
      );
    }
    done += model.files[name].bytes;
  }
  return { model, files };
}

/** All bytes of a stream. size: what model.json says; null: of model.json itself. */
async function readAll({ stream, size: told }, name, size, report, signal) {
  const wrong = (bytes) =>
    new FolderError(
      size === null
        ? `model.json has more than ${LARGEST_JSON} bytes; it is not a model.json of browser.export`
        : `${name} has ${bytes} bytes; model.json says ${size}: the file is damaged or of another model`,
    );
  if (told !== null && (size === null ? told > LARGEST_JSON : told !== size)) throw wrong(told);
  const content = new Uint8Array(size ?? LARGEST_JSON), reader = stream.getReader();
  let done = 0;
  try {
    for (let part = await reader.read(); !part.done; part = await reader.read()) {
      signal.throwIfAborted();
      if (done + part.value.length > content.length) throw wrong(`more than ${content.length}`);
      content.set(part.value, done);
      done += part.value.length;
      report(done);
    }
  } catch (error) {
    if (error instanceof FolderError || error.name === "AbortError") throw error;
    throw new FolderError(`${name} cannot be read to its end (${done} bytes): ${error.message}; load it again`);
  } finally {
    reader.cancel().catch(() => {});
  }
  if (size !== null && done !== size) throw wrong(done);
  return size === null ? content.subarray(0, done) : content;
}

/** A folder that the user chose or dropped: File objects of one folder. */
export function chosenFolder(list) {
  const files = new Map();
  for (const file of list) {
    if (file.webkitRelativePath.split("/").length <= 2) files.set(file.name, file); // not of folders below
  }
  return {
    name: list[0]?.webkitRelativePath.split("/")[0] || "the folder",
    async open(name) {
      const file = files.get(name);
      if (!file) {
        const others = [...files.keys()].sort().slice(0, 5).join(", ") || "no file";
        throw new FolderError(
          `the folder has no ${name} (found ${others}); expected a folder that browser.export wrote to its end`,
        );
      }
      return { stream: file.stream(), size: file.size };
    },
  };
}

/** The files of a folder that was dropped on the page. */
export async function droppedFolder(transfer) {
  const entry = transfer.items[0]?.webkitGetAsEntry?.();
  if (!entry?.isDirectory) throw new FolderError("found no folder in what was dropped; expected one exported folder");
  const reader = entry.createReader(), files = [];
  const some = () => new Promise((resolve, reject) => reader.readEntries(resolve, reject));
  for (let part = await some(); part.length && files.length < 1000; part = await some()) {
    for (const inner of part.filter((inner) => inner.isFile)) {
      files.push(await new Promise((resolve, reject) => inner.file(resolve, reject)));
    }
  }
  return { ...chosenFolder(files), name: entry.name };
}

/** A folder served beside the page: models/NAME. Raises FolderError for any other address. */
export function servedFolder(path) {
  if (!/^models\/[A-Za-z0-9][A-Za-z0-9._-]{0,99}$/.test(path)) {
    throw new FolderError(`model is ${found(path)}; expected models/NAME, a folder beside this page`);
  }
  const base = new URL(`${path}/`, import.meta.url);
  return {
    name: path.slice("models/".length),
    async open(name, signal) {
      let response;
      try {
        response = await fetch(new URL(name, base), { signal, redirect: "error", cache: "no-cache", credentials: "omit" });
      } catch (error) {
        if (error.name === "AbortError") throw error;
        throw new FolderError(`${path}/${name} cannot be fetched: ${error.message}; does the server still run?`);
      }
      if (response.status !== 200) {
        throw new FolderError(
          `${path}/${name}: the server answered ${response.status}; expected a folder that browser.export wrote to its end`,
        );
      }
      const encoded = response.headers.has("content-encoding"), length = response.headers.get("content-length");
      return { stream: response.body, size: encoded || length === null ? null : Number(length) };
    },
  };
}
