// The paper to draw on: pointer and keyboard. Ink is white on black, as in MNIST.

const WIDTH = 22; // width of a stroke, in a picture of 280: about 2 of MNIST's 28 pixels
const STEP = 14; // step of an arrow key; with Shift a quarter of it

export class Drawing {
  /** read(): called after each stroke. clear(): by the Delete key. say(text): for screen readers. */
  constructor(ink, pen, { read, clear, say }) {
    Object.assign(this, { ink, pen, read, say });
    this.context = ink.getContext("2d", { willReadFrequently: true });
    Object.assign(this.context, { lineWidth: WIDTH, lineCap: "round", lineJoin: "round", strokeStyle: "#fff", fillStyle: "#fff" });
    this.at = [ink.width / 2, ink.height / 4];
    this.isDown = false;
    pen.addEventListener("pointerdown", (event) => this.pointerDown(event));
    pen.addEventListener("pointermove", (event) => this.pointerMove(event));
    for (const kind of ["pointerup", "pointercancel"]) pen.addEventListener(kind, (event) => this.pointerUp(event));
    pen.addEventListener("keydown", (event) => this.key(event, clear));
    for (const kind of ["focus", "blur"]) pen.addEventListener(kind, () => this.showPen());
  }

  wipe() {
    this.context.clearRect(0, 0, this.ink.width, this.ink.height);
    this.isDown = false;
    this.showPen();
  }

  /** {grey, width, height}: 0 to 255, ink is bright. */
  grey() {
    const { width, height } = this.ink, { data } = this.context.getImageData(0, 0, width, height);
    // ink is white: where it lies thin it is transparent, or grey
    return { grey: Uint8Array.from({ length: width * height }, (_, i) => Math.round((data[4 * i] * data[4 * i + 3]) / 255)), width, height };
  }

  line(from, to) {
    this.context.beginPath();
    this.context.moveTo(...from);
    this.context.lineTo(...to);
    this.context.stroke();
    if (from[0] === to[0] && from[1] === to[1]) {
      this.context.beginPath();
      this.context.arc(...to, WIDTH / 2, 0, 2 * Math.PI);
      this.context.fill();
    }
  }

  place(event) {
    const box = this.ink.getBoundingClientRect();
    return [((event.clientX - box.left) * this.ink.width) / box.width, ((event.clientY - box.top) * this.ink.height) / box.height];
  }

  pointerDown(event) {
    if (event.button !== 0) return;
    this.pen.setPointerCapture(event.pointerId);
    this.pointer = event.pointerId;
    this.isDown = false;
    this.at = this.place(event);
    this.line(this.at, this.at);
    this.showPen();
  }

  pointerMove(event) {
    if (event.pointerId !== this.pointer) return;
    for (const one of event.getCoalescedEvents?.() ?? [event]) {
      const to = this.place(one);
      this.line(this.at, to);
      this.at = to;
    }
  }

  pointerUp(event) {
    if (event.pointerId !== this.pointer) return;
    this.pointer = null;
    this.read();
  }

  key(event, clear) {
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    if (event.key in moves) {
      const step = event.shiftKey ? STEP / 4 : STEP, inside = (value, most) => Math.min(most - WIDTH / 2, Math.max(WIDTH / 2, value));
      const [x, y] = moves[event.key], { width, height } = this.ink;
      const to = [inside(this.at[0] + x * step, width), inside(this.at[1] + y * step, height)];
      if (this.isDown) this.line(this.at, to);
      this.at = to;
    } else if (event.key === " ") {
      this.isDown = !this.isDown;
      if (this.isDown) this.line(this.at, this.at);
      else this.read();
      this.say(this.isDown ? "Pen down" : "Pen up");
    } else if (event.key === "Enter") this.read();
    else if (event.key === "Delete" || event.key === "Backspace") {
      clear();
      this.say("Cleared");
    } else return;
    event.preventDefault();
    this.showPen();
  }

  /** Where the keyboard's pen is: a ring, filled when it is down. */
  showPen() {
    const context = this.pen.getContext("2d");
    context.clearRect(0, 0, this.pen.width, this.pen.height);
    if (document.activeElement !== this.pen || this.pointer != null) return;
    context.beginPath();
    context.arc(...this.at, WIDTH / 2 + 2, 0, 2 * Math.PI);
    context.lineWidth = 3;
    context.strokeStyle = "#4da3ff";
    context.fillStyle = "#4da3ff";
    if (this.isDown) context.fill();
    context.stroke();
  }
}
