// A conversation as tokens, by the template of its format. chat_templates/ is language/data/chat_templates, and the marks
// are those of language/data/chat.py, which renders the same templates.

const SPACE = "[\\t-\\r\\x1c-\\x20\\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000]+"; // as Python strips
const ENDS = new RegExp(`^${SPACE}|${SPACE}$`, "g");
const [TYPED, BEGIN, END, ANSWER, ANSWERED] = [0, 1, 2, 3, 4].map((number) => String.fromCharCode(0xd800 + number));
const ALL_TYPED = /\ud800/gu; // by itself, not as half of a letter

/** chat: of a checked model.json. Raises Error. */
export async function openFormat(chat, tokenizer) {
  const { Template } = await import("./node_modules/@huggingface/jinja/dist/index.js").catch(() => {
    throw new Error("@huggingface/jinja is not beside the page: run  npm ci --ignore-scripts --prefix browser/page  and load the folder again");
  });
  const file = `chat_templates/${chat.format}.jinja`, response = await fetch(new URL(file, import.meta.url));
  if (!response.ok) throw new Error(`${file} is not beside the page: copy it from language/data, or export with another --chat_format`);
  const source = (await response.text())
    .replaceAll("{%- generation %}", "{{- answer }}")
    .replaceAll("{%- endgeneration %}", "{{- answered }}")
    .replaceAll("message['content'] | trim", "strip(message['content'])"); // JavaScript's trim takes other letters
  return new Format(new Template(source), chat, tokenizer);
}

class Format {
  constructor(template, chat, tokenizer) {
    const named = chat.words.map((token) => [tokenizer.names.get(token), token]).filter(([name]) => [...(name ?? "")].length > 1);
    Object.assign(this, { template, chat, tokenizer });
    this.first = new Set(named.map(([name]) => [...name][0])); // letters that could begin a special token
    this.tokens = new Map([...named, [BEGIN, chat.begin[0]], [END, chat.words[0]]]);
    const all = [...this.tokens.keys(), ANSWER, ANSWERED].map((name) => name.replace(/[\\^$.*+?()[\]{}|/]/g, "\\$&"));
    this.border = new RegExp(`(${all.join("|")})`, "u");
    this.lead = /\ud803([^]*?)x/u.exec(this.render([{ role: "user", content: "x" }, { role: "assistant", content: "x" }]))[1];
  }

  /** The tokens that an answer follows. messages: [{role, content}]. Raises Error for text that holds a token of the format. */
  prompt(messages) {
    const tokens = [];
    for (const part of this.render(messages, true).split(this.border)) {
      if (!part || part === ANSWER || part === ANSWERED) continue;
      for (const token of this.tokens.has(part) ? [this.tokens.get(part)] : this.encode(part.replace(ALL_TYPED, ""))) {
        tokens.push(token);
      }
    }
    return tokens;
  }

  render(messages, add_generation_prompt = false) {
    const items = { bos_token: this.chat.begin.length ? BEGIN : "", eos_token: END, answer: ANSWER, answered: ANSWERED };
    const strip = (text) => text.replace(ENDS, "");
    const typed = messages.map(({ role, content }) => ({ role, content: this.typed(content) }));
    return this.template.render({ ...items, strip, messages: typed, add_generation_prompt });
  }

  typed(text) {
    if (!text.isWellFormed()) throw new Error("a message holds half of a letter; expected text");
    for (const letter of this.first) text = text.replaceAll(letter, letter + TYPED);
    return text;
  }

  encode(text) {
    const found = this.tokenizer.encode(text), wrong = found.find((token) => this.chat.words.includes(token));
    if (wrong === undefined) return found;
    throw new Error(`a text holds ${this.tokenizer.decode([wrong])}, which is a token of the format; take it out of the text`);
  }
}
