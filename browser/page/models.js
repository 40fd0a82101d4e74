// The models that a worker runs: a language model with its cache of keys and values, and a classifier of images.

import { openFormat } from "./format.js";
import { checkFinite, choose, Random } from "./sampling.js";
import { makeTokenizer } from "./tokenizer.js";

/** An onnxruntime session. expected: {inputs: {name: [type, shape]}, outputs: ...}. Raises Error when it is another graph. */
async function openSession(ort, name, graph, weights, expected) {
  const externalData = weights ? [{ path: "weights.bin", data: weights }] : [];
  let session;
  try {
    session = await ort.InferenceSession.create(graph, { executionProviders: ["wasm"], externalData });
  } catch (error) {
    throw new Error(`${name} cannot be loaded: ${error?.message ?? error}; export the folder again`);
  }
  for (const side of ["input", "output"]) {
    const have = describe(Object.fromEntries(session[`${side}Metadata`].map((one) => [one.name, [one.type, one.shape]])));
    const want = describe(expected[`${side}s`]);
    if (have !== want) {
      throw new Error(`${name}: ${side}s are ${have}; expected ${want}, as model.json says: files of two models are mixed`);
    }
  }
  return session;
}

function describe(values) {
  return Object.keys(values).sort().map((name) => `${name} ${values[name][0]} [${values[name][1]}]`).join(", ");
}

export class LanguageModel {
  constructor(model) {
    this.model = model;
    const { num_layers: layers, context, num_cached_heads: heads, head_dim } = model;
    this.shape = [layers, 1, context, heads, head_dim];
    this.row = heads * head_dim; // values of one token in one layer
  }

  async load(ort, files) {
    this.ort = ort;
    const graphOf = (tokens) => {
      const rows = [this.shape[0], 1, tokens, this.shape[3], this.shape[4]], cache = ["float32", this.shape];
      return {
        inputs: { tokens: ["int32", [1, tokens]], position: ["int32", [1]], length: ["int32", [1]], keys: cache, values: cache },
        outputs: { logits: ["float32", [1, this.model.vocab_size]], new_keys: ["float32", rows], new_values: ["float32", rows] },
      };
    };
    const open = (name, tokens) => openSession(ort, name, files[name], files["weights.bin"], graphOf(tokens));
    this.tokenizer = await makeTokenizer(this.model, files["tokenizer.json"]);
    this.format = this.model.chat && (await openFormat(this.model.chat, this.tokenizer));
    this.prefill = await open("prefill.onnx", this.model.chunk);
    this.decode = await open("decode.onnx", 1);
    const size = this.shape.reduce((product, length) => product * length, 1);
    this.keys = new Float32Array(size);
    this.values = new Float32Array(size);
    this.cached = []; // the tokens whose keys and values these are
    for (const session of [this.prefill, this.decode]) await this.run(session, [0], 0); // what fails, fails here
  }

  /** Logits after tokens that stand at position; the cache gets their keys and values. */
  async run(session, tokens, position) {
    const { Tensor } = this.ort, chunk = session === this.decode ? 1 : this.model.chunk;
    const padded = new Int32Array(chunk);
    padded.set(tokens);
    const outputs = await session.run({
      tokens: new Tensor("int32", padded, [1, chunk]),
      position: new Tensor("int32", Int32Array.of(position), [1]),
      length: new Tensor("int32", Int32Array.of(tokens.length), [1]),
      keys: new Tensor("float32", this.keys, this.shape),
      values: new Tensor("float32", this.values, this.shape),
    });
    for (const [cache, fresh] of [[this.keys, outputs.new_keys.data], [this.values, outputs.new_values.data]]) {
      for (let layer = 0; layer < this.shape[0]; layer++) {
        const from = layer * chunk * this.row, to = (layer * this.model.context + position) * this.row;
        cache.set(fresh.subarray(from, from + tokens.length * this.row), to);
      }
    }
    this.cached = this.cached.slice(0, position).concat(tokens);
    return outputs.logits.data;
  }

  /**
   * prompt: a text, or the messages of a conversation, of which only what the cache has not is read.
   * report({text, count, seconds}): all text so far, the seconds since the first token was known.
   * Gives {text, tokens, count, seconds, read, ended, end}. read: tokens of the prompt that were not in the cache.
   * ended: "stop" of the user, "end" token, "length", or "full" context.
   */
  async generate(prompt, options, report, isStopped) {
    const { context, chunk, vocab_size, start, chat } = this.model, isChat = Array.isArray(prompt);
    const words = isChat ? [] : this.tokenizer.encode(prompt), { stops } = isChat ? chat : this.model;
    const given = isChat ? this.format.prompt(prompt) : (start === null ? [] : [start]).concat(words);
    const room = context + 1 - given.length; // the last token needs no place in the context
    if (isChat && room < 1) {
      throw new Error(`the context is full: the conversation has ${given.length} tokens, the model reads ${context}; start a new chat`);
    }
    const most = isChat ? Math.min(options.numTokens, room) : options.numTokens;
    check(given, most, context, vocab_size);
    const known = isChat ? inCommon(this.cached, given.slice(0, -1)) : 0;
    const random = new Random(options.seed), tokens = [], before = this.tokenizer.decode(words);
    let logits, first = 0, ended = "length", end = null; // the token that ended it
    const told = () => {
      const whole = this.tokenizer.decode(words.concat(tokens));
      const start = isChat ? this.format.lead : before, text = whole.startsWith(start) ? whole.slice(start.length) : whole;
      const seconds = tokens.length ? (performance.now() - first) / 1000 : 0;
      return { text, count: tokens.length, seconds, read: given.length - known };
    };
    for (let at = known; at < given.length; at += chunk) {
      await messagesRead();
      if (isStopped()) return { ...told(), tokens, ended: "stop" };
      logits = await this.run(this.prefill, given.slice(at, at + chunk), at);
    }
    while (true) {
      checkFinite(logits, `the logits behind ${given.length + tokens.length} tokens`);
      const token = choose(logits, options, options.temperature === 0 ? 0 : random.next());
      first ||= performance.now();
      if (stops.includes(token)) {
        ended = "end";
        end = token;
        break;
      }
      tokens.push(token);
      report(told());
      await messagesRead();
      if (isStopped()) ended = "stop";
      if (tokens.length === most && most < options.numTokens && ended !== "stop") ended = "full";
      if (tokens.length === most || ended === "stop") break;
      logits = await this.run(this.decode, [token], given.length + tokens.length - 1);
    }
    return { ...told(), tokens, ended, end };
  }
}

/** How many tokens at the beginning are the same. */
function inCommon(some, others) {
  const place = others.findIndex((token, index) => token !== some[index]);
  return place < 0 ? others.length : place;
}

function check(given, numTokens, context, vocabSize) {
  if (!given.length) throw new Error("the prompt is empty; expected at least one token");
  const wrong = given.find((token) => token >= vocabSize);
  if (wrong !== undefined) throw new Error(`token ${wrong} of the prompt is outside the vocabulary of ${vocabSize}`);
  const room = Math.max(0, context + 1 - given.length); // the last token needs no place in the context
  if (room < numTokens) {
    throw new Error(
      `the prompt has ${given.length} tokens and ${numTokens} are to follow, but the context is ${context}; ` +
        `shorten the prompt, or ask for at most ${room} tokens`,
    );
  }
}

/** Lets a message that waits, such as stop, be read; a timer would wait 4 ms. */
const channel = new MessageChannel();
function messagesRead() {
  return new Promise((resolve) => {
    channel.port1.onmessage = resolve;
    channel.port2.postMessage(0);
  });
}

export class Classifier {
  constructor(model) {
    this.model = model;
    this.shape = [1, 1, ...model.image_size];
  }

  async load(ort, files) {
    this.ort = ort;
    this.session = await openSession(ort, "classifier.onnx", files["classifier.onnx"], null, {
      inputs: { image: ["float32", this.shape] },
      outputs: { logits: ["float32", [1, this.model.classes.length]] },
    });
    await this.classify(new Float32Array(this.shape.reduce((product, length) => product * length, 1)));
  }

  /** The probability of each class for an image of values from 0 to 1. */
  async classify(image) {
    const { logits } = await this.session.run({ image: new this.ort.Tensor("float32", image, this.shape) });
    checkFinite(logits.data, "the logits of the image");
    const largest = Math.max(...logits.data);
    const weights = Array.from(logits.data, (logit) => Math.exp(logit - largest));
    const total = weights.reduce((sum, weight) => sum + weight, 0);
    return weights.map((weight) => weight / total);
  }
}
