// Choosing the next token: the same numbers as on the host, in doubles. Knows nothing of models.

/** mulberry32: one number from 0 up to 1 for each token, from a whole seed of 32 bits. */
export class Random {
  constructor(seed) {
    this.state = seed >>> 0;
  }

  next() {
    this.state = (this.state + 0x6d2b79f5) >>> 0;
    let t = Math.imul(this.state ^ (this.state >>> 15), this.state | 1);
    t = (t + Math.imul(t ^ (t >>> 7), t | 61)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 2 ** 32;
  }
}

/** Indices of a Float32Array, the largest value first, of equal ones the first first. At most 2^20 values. */
function sorted(logits) {
  const bits = new Uint32Array(1), value = new Float32Array(bits.buffer), keys = new Float64Array(logits.length);
  for (let index = 0; index < logits.length; index++) {
    value[0] = logits[index] + 0; // -0 is equal to 0
    const rising = bits[0] & 0x80000000 ? ~bits[0] >>> 0 : (bits[0] | 0x80000000) >>> 0;
    keys[index] = (0xffffffff - rising) * 2 ** 20 + index; // below 2^52: exact, and sorted without a callback
  }
  keys.sort();
  return Array.from(keys, (key) => key % 2 ** 20);
}

/** Raises Error unless all logits are finite: what follows from others is no answer. where: which logits they are. */
export function checkFinite(logits, where) {
  if (logits.every(Number.isFinite)) return;
  throw new Error(`${where} are infinite or not a number; expected numbers; export the model again`);
}

/** The next token. uniform: a number from 0 up to 1. */
export function choose(logits, { temperature, topK, topP }, uniform) {
  let best = 0;
  for (let index = 0; index < logits.length; index++) if (logits[index] > logits[best]) best = index;
  if (temperature === 0) return best;
  let candidates = sorted(logits);
  if (topK > 0) candidates = candidates.slice(0, topK);
  const weights = candidates.map((index) => Math.exp((logits[index] - logits[best]) / temperature));
  let kept = weights.length;
  if (topP < 1) kept = firstWhere(weights, topP * sum(weights), (running, limit) => running >= limit) + 1;
  const limit = uniform * sum(weights.slice(0, kept));
  return candidates[firstWhere(weights.slice(0, kept), limit, (running, limit) => running > limit)];
}

function sum(values) {
  let total = 0;
  for (const value of values) total += value;
  return total;
}

/** The first place whose running sum passes; the last place where rounding lets none pass. */
function firstWhere(values, limit, passes) {
  let running = 0;
  for (let place = 0; place < values.length; place++) {
    running += values[place];
    if (passes(running, limit)) return place;
  }
  return values.length - 1;
}
