"""Text of an exported folder by onnxruntime, on the host, without PyTorch. web/ does the same in a browser.

Sampling is that of web/sampling.js, number by number: mulberry32 in 32-bit integers, softmax in float64.
"""

import sys
from pathlib import Path

import numpy as np

import chat_data
from onnx_files import needed, open_export, open_session
from tokenizer import Numbers, Tokenizer, load_tokenizer
from tpu_utils.errors import InputError

OUTPUTS = ["logits", "new_keys", "new_values"]


class Mulberry32:
    """Numbers from 0 to 1, one for each token. seed: its lowest 32 bits."""

    def __init__(self, seed: int):
        self.state = seed % 2**32

    def next(self) -> float:
        self.state = (self.state + 0x6D2B79F5) % 2**32
        t = (self.state ^ self.state >> 15) * (self.state | 1) % 2**32
        t ^= (t + (t ^ t >> 7) * (t | 61)) % 2**32
        return ((t ^ t >> 14) % 2**32) / 2**32


def choose(logits_V: np.ndarray, uniform: float, temperature: float, top_k: int, top_p: float) -> int:
    """The next token. top_k is taken before top_p, as in Hugging Face's generate; equal logits go by their index."""
    if temperature == 0:
        return int(logits_V.argmax())
    order = np.argsort(-logits_V.astype(np.float64), kind="stable")[: top_k or None]
    logits = logits_V[order].astype(np.float64)
    sums = np.exp((logits - logits[0]) / temperature).cumsum()
    if top_p < 1:
        sums = sums[: int(np.argmax(sums >= top_p * sums[-1])) + 1]
    return int(order[np.argmax(sums > uniform * sums[-1])])


class OnnxModel:
    """Both graphs of a folder, and a cache. Raises InputError for a folder that is damaged or not ours."""

    def __init__(self, folder: Path):
        self.facts = open_export(folder)
        if self.facts["kind"] != "language_model":
            raise InputError(f"{folder} is an {self.facts['kind'].replace('_', ' ')}; expected a language model")
        self.sessions = {name: open_session(folder / f"{name}.onnx") for name in ("prefill", "decode")}
        names = ("num_layers", "context", "num_cached_heads", "head_dim")
        layers, context, heads, head_dim = (self.facts[name] for name in names)
        self.cache = np.zeros((2, layers, 1, context, heads, head_dim), np.float32)
        self.position = 0

    def read(self, tokens: list[int]) -> np.ndarray:
        """Logits (V,) after these tokens, which stand behind those read before; a prompt, or one more token."""
        name, chunk = ("decode", 1) if len(tokens) == 1 else ("prefill", self.facts["chunk"])
        for start in range(0, len(tokens), chunk):
            part = tokens[start : start + chunk]
            padded = np.zeros((1, chunk), np.int32)
            padded[0, : len(part)] = part
            numbers = dict(position=np.array([self.position], np.int32), length=np.array([len(part)], np.int32))
            inputs = dict(tokens=padded, keys=self.cache[0], values=self.cache[1], **numbers)
            logits, *new = self.sessions[name].run(OUTPUTS, inputs)
            for kept, rows in zip(self.cache, new, strict=True):
                kept[:, :, self.position : self.position + len(part)] = rows[:, :, : len(part)]
            self.position += len(part)
        return logits[0]


def generate(model: OnnxModel, prompt: list[int], config, ends=lambda tokens: False) -> list[int]:
    """The tokens that follow: num_tokens, or up to the first after which ends(tokens) is true. config: a
    GenerateConfig. Raises InputError when they do not fit the context."""
    context, vocab_size = model.facts["context"], model.facts["vocab_size"]
    if not prompt:
        raise InputError("the prompt is empty; expected at least one token")
    if wrong := [token for token in prompt if not 0 <= token < vocab_size]:
        raise InputError(f"token {wrong[0]} of the prompt is outside the vocabulary of {vocab_size}")
    room = context + 1 - len(prompt)  # the last token needs no place in the context
    if room < (config.num_tokens or 1):
        raise InputError(
            f"the prompt has {len(prompt)} tokens and {config.num_tokens or 1} are to follow, but the context is "
            f"{context}; shorten the prompt, or ask for at most {max(0, room)} tokens"
        )
    model.position, found, random = 0, [], Mulberry32(config.seed)
    logits = model.read(prompt)
    while True:
        found.append(choose(logits, random.next(), config.temperature, config.top_k, config.top_p))
        if len(found) == (config.num_tokens or min(100, room)) or ends(found):
            return found
        logits = model.read(found[-1:])


def tokenizer_of(facts: dict, folder: Path) -> Tokenizer:
    if facts["tokenizer"] == "numbers":
        return Numbers(facts["vocab_size"])
    return load_tokenizer("bytes" if facts["tokenizer"] == "bytes" else str(folder / "tokenizer.json"))


def main(config) -> int:
    """config: a GenerateConfig with onnx. Prints what generate_tpu.py prints."""
    needed("onnx", "onnxruntime")
    folder = Path(config.onnx)
    model = OnnxModel(folder)
    tokenizer, start = tokenizer_of(model.facts, folder), model.facts["start"]
    stops, begin = set(model.facts["stops"]), [] if start is None else [start]
    texts = [tokenizer.encode(prompt) for prompt in config.prompt]
    prompts = [begin + text for text in texts]
    if config.chat:  # an answer is printed without its question
        format = chat_data.choose_format(config.chat_format, tokenizer)
        asked = [[{"role": "user", "content": question}] for question in config.chat]
        prompts = [chat_data.prompt_of_chat(messages, format, tokenizer) for messages in asked]
        texts, stops = [[] for _ in prompts], stops | chat_data.stop_tokens(format, tokenizer)

    def ends(tokens: list[int]) -> bool:
        return tokens[-1] in stops or any(stop in tokenizer.decode(tokens) for stop in config.stop)

    count = 0
    for number, (text, prompt) in enumerate(zip(texts, prompts, strict=True)):
        tokens = generate(model, prompt, config, ends)
        kept = tokens[:-1] if tokens[-1] in stops else tokens
        whole, begins = tokenizer.decode(text + kept), len(tokenizer.decode(text))
        ended = [at for stop in config.stop if (at := whole.find(stop, begins)) >= 0]
        print("---\n" * (number > 0) + whole[: min(ended, default=None)])
        count += len(tokens)
    print(f"{count} tokens by onnxruntime", file=sys.stderr)
    return 0
