// Text to tokens and back: bytes, numbers, or a tokenizer.json. Runs in the worker: a pattern of a tokenizer.json may be slow.

class Bytes {
  names = new Map(); // of special tokens

  encode(text) {
    return Array.from(new TextEncoder().encode(text));
  }

  decode(tokens) {
    const bytes = Uint8Array.from(tokens.filter((token) => token < 256));
    return new TextDecoder("utf-8", { ignoreBOM: true }).decode(bytes);
  }
}

class Numbers {
  names = new Map();

  encode(text) {
    const words = text.split(/\s+/).filter(Boolean);
    const wrong = words.find((word) => !/^\d{1,9}$/.test(word));
    if (wrong) throw new Error(`found ${wrong.slice(0, 60)}; expected token numbers such as 3 17 5`);
    return words.map(Number);
  }

  decode(tokens) {
    return tokens.join(" ");
  }
}

/** A tokenizer.json, as the tokenizers library reads it with encode_special_tokens: special tokens in a text are text. */
class FromFile {
  constructor(Tokenizer, content) {
    const json = JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(content));
    const added = Array.isArray(json.added_tokens) ? json.added_tokens : [];
    const make = (tokens) => new Tokenizer({ ...json, added_tokens: tokens }, { clean_up_tokenization_spaces: false });
    this.encoder = make(added.filter((token) => !token.special));
    this.decoder = make(added);
    this.names = new Map(added.map((token) => [token.id, token.content]));
    for (const part of this.decoder.decoder?.decoders ?? [this.decoder.decoder]) {
      if (part?.text_decoder && part.config?.type === "ByteFallback") part.text_decoder = { decode: fallback };
    }
    this.decode(this.encode("a"));
  }

  encode(text) {
    const tokens = this.encoder.encode(text, { add_special_tokens: false }).ids;
    const wrong = tokens.findIndex((token) => !Number.isSafeInteger(token) || token < 0);
    if (wrong >= 0) throw new Error("tokenizer.json has no token for a part of the text");
    return tokens;
  }

  decode(tokens) {
    return tokens.length ? this.decoder.decode(tokens, { skip_special_tokens: false }) : "";
  }
}

/** Bytes that are no text are one sign of replacement each, as on the host. */
function fallback(bytes) {
  try {
    return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes);
  } catch {
    return "\ufffd".repeat(bytes.length);
  }
}

/** model: a checked model.json. content: of tokenizer.json, where the model has one. */
export async function makeTokenizer(model, content) {
  if (model.tokenizer === "bytes") return new Bytes();
  if (model.tokenizer === "numbers") return new Numbers();
  const { Tokenizer } = await import("./node_modules/@huggingface/tokenizers/dist/tokenizers.min.mjs");
  try {
    return new FromFile(Tokenizer, content);
  } catch (error) {
    throw new Error(`tokenizer.json cannot be read: ${String(error.message).slice(0, 200)}; copy it again, or export again`);
  }
}
