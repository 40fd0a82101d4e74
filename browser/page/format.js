// A conversation as tokens, by the pieces of its format in model.json: the same as browser/chat_pieces.py makes of them.

const SPACE = "[\\t-\\r\\x1c-\\x20\\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000]+"; // as Python strips
const ENDS = new RegExp(`^${SPACE}|${SPACE}$`, "g");

/**
 * The tokens that an answer follows. messages: [{role, content}], one of the system or none, then user and assistant in turn.
 * Raises Error for text in which the tokenizer sees a token of the format.
 */
export function promptOf(chat, messages, tokenizer) {
  const merged = chat.place !== "own" && messages[0].role === "system";
  const system = merged ? [...chat.system.before, messages[0].content, ...chat.system.after] : [];
  const rest = messages.slice(merged ? 1 : 0), isUser = ({ role }) => role === "user";
  const at = chat.place === "first" ? rest.findIndex(isUser) : rest.findLastIndex(isUser);
  const tokens = [];
  let text = "";
  const encode = (words) => {
    const found = tokenizer.encode(words), wrong = found.find((token) => chat.words.includes(token));
    if (wrong !== undefined) {
      throw new Error(`a text holds ${tokenizer.decode([wrong])}, which is a token of the format; take it out of the text`);
    }
    for (const token of found) tokens.push(token);
  };
  const flush = () => {
    if (text) encode(text);
    text = "";
  };
  const put = (pieces) => {
    for (const piece of pieces) {
      if (typeof piece === "string") text += piece; // texts that follow each other are encoded as one
      else flush(), tokens.push(piece);
    }
  };
  put(chat.begin);
  rest.forEach(({ role, content }, number) => {
    put(chat[role].before);
    if (number === at) put(system);
    const words = chat.strip.includes(role) ? content.replace(ENDS, "") : content;
    if (role === "assistant") flush(), encode(chat.lead + words); // as the model wrote it: by itself
    else put([words]);
    put(chat[role].after);
  });
  put(chat.answer);
  flush();
  return tokens;
}
