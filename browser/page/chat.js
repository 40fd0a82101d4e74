// The view of a conversation: messages as text, what is typed, and what the keys do. Who answers is given to it.

const element = (id) => document.getElementById(id);

export class Chat {
  /** answer(messages, report): a promise of {text, ended} or, after stop(), of null; report({text}): all of it so far. */
  constructor({ answer, stop, say, complain }) {
    Object.assign(this, { answer, stop, say, complain, messages: [], isAnswering: false, isOn: false });
    element("chat-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    element("message").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return; // composing: it chooses a letter
      event.preventDefault();
      this.send();
    });
    element("chat-stop").addEventListener("click", () => this.stop());
    element("new-chat").addEventListener("click", () => {
      this.clear();
      this.say("A new chat");
      element("message").focus();
    });
  }

  /** Whether there is a model to talk to. */
  enable(isOn) {
    this.isOn = isOn;
    this.showButtons();
  }

  clear() {
    if (this.isAnswering) this.stop();
    this.messages = [];
    this.turn = null; // an answer that is still under way belongs to nothing any more
    element("messages").replaceChildren();
    element("chat-speed").textContent = "";
  }

  async send() {
    const content = element("message").value;
    if (!this.isOn || this.isAnswering || !content.trim()) return;
    const system = element("system").value, turn = (this.turn = {}), asked = { role: "user", content };
    const before = system.trim() ? [{ role: "system", content: system }] : [];
    element("message").value = "";
    const question = this.show("You", content), said = this.show("Model", ""), report = ({ text }) => this.put(said, (turn.text = text));
    this.setAnswering(true);
    let problem = "", done = null;
    try {
      done = await this.answer([...before, ...this.messages, asked], report);
      if (done) report(done);
    } catch (error) {
      problem = error.message;
    }
    this.setAnswering(false);
    if (this.turn !== turn) return;
    if (turn.text || (done && done.ended !== "stop")) {
      this.messages.push(asked, { role: "assistant", content: turn.text ?? "" });
      if (!turn.text) said.classList.add("empty");
    } else { // nothing was answered: the question goes back to where it can be changed
      for (const one of [question, said]) one.parentElement.remove();
      element("message").value ||= content;
    }
    const why = { stop: "Stopped", full: "The context is full: the answer ends here, start a new chat" }[done?.ended ?? "stop"] ?? "Answered";
    if (problem) this.complain(problem);
    else if (done?.ended === "full") this.complain(why);
    else this.say(`${why}: ${turn.text ?? ""}`);
  }

  /** A message of a role in the conversation; gives the element of its text. */
  show(role, content) {
    const item = document.createElement("div"), name = document.createElement("p"), text = document.createElement("div");
    item.className = role === "You" ? "message mine" : "message";
    name.className = "role";
    name.textContent = role;
    text.className = "said";
    item.append(name, text);
    element("messages").append(item);
    this.put(text, content);
    element("messages").scrollTop = element("messages").scrollHeight;
    return text;
  }

  put(place, text) {
    const all = element("messages"), atEnd = all.scrollTop + all.clientHeight >= all.scrollHeight - 24;
    place.textContent = text; // never as HTML
    if (atEnd) all.scrollTop = all.scrollHeight;
  }

  setAnswering(is) {
    const had = document.activeElement; // a button that is disabled loses the focus
    this.isAnswering = is;
    this.showButtons();
    if (is && had === element("send")) element("chat-stop").focus();
    if (!is && had === element("chat-stop")) element("message").focus();
  }

  showButtons() {
    element("message").disabled = element("new-chat").disabled = !this.isOn;
    element("send").disabled = !this.isOn || this.isAnswering;
    element("chat-stop").disabled = !this.isAnswering;
  }
}
