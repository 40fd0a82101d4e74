"""Text of an exported folder by onnxruntime, on the host, without PyTorch.

Run:     python -m browser.onnx_generate --onnx OUT --prompt "ROMEO:"
             OUT: a folder that browser.export wrote
         python -m browser.onnx_generate --onnx OUT --chat "Who are you?"
             in the format that OUT was exported with, as the page does

Expect:  the text that the page in a browser gives: sampling is that of
         page/sampling.js, mulberry32 in 32-bit integers, softmax in float64.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from browser.onnx_files import needed, open_export, open_session, run_session
from language.data.tokenizer import Numbers, load_tokenizer
from language.generation.sampling import SamplingOptions, ask, print_continuations
from tpu_utils.base.errors import InputError, NonFiniteError, run_script
from tpu_utils.options.environment import command_line
from tpu_utils.options.tool_arguments import parse_options

OUTPUTS = ["logits", "new_keys", "new_values"]


@dataclass(frozen=True)
class OnnxConfig(SamplingOptions):
    """What to sample from, and how."""

    onnx: str = ""
    """A folder that browser.export wrote."""

    def __post_init__(self):
        if not self.onnx:
            raise InputError("--onnx is missing; expected a folder that browser.export wrote")
        super().__post_init__()


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
            logits, *new = run_session(self.sessions[name], OUTPUTS, inputs)
            for kept, rows in zip(self.cache, new, strict=True):
                kept[:, :, self.position : self.position + len(part)] = rows[:, :, : len(part)]
            self.position += len(part)
        return logits[0]


def generate(model: OnnxModel, prompt: list[int], config: SamplingOptions, ends=lambda tokens: False) -> list[int]:
    """The tokens that follow: num_tokens, or up to the first after which ends(tokens) is true.

    Raises InputError when they do not fit the context.
    """
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
    model.position = 0
    found = []
    random = Mulberry32(config.seed)
    logits = model.read(prompt)
    while True:
        if not np.isfinite(logits).all():
            raise NonFiniteError(
                f"the logits behind {len(prompt) + len(found)} tokens are infinite or not a number; "
                "expected numbers; export the model again"
            )
        found.append(choose(logits, random.next(), config.temperature, config.top_k, config.top_p))
        if len(found) == (config.num_tokens or min(100, room)) or ends(found):
            return found
        logits = model.read(found[-1:])


def main(config: OnnxConfig) -> int:
    model = OnnxModel(Path(config.onnx))
    facts = model.facts
    if facts["tokenizer"] == "numbers":
        tokenizer = Numbers(facts["vocab_size"])
    else:
        tokenizer = load_tokenizer("bytes" if facts["tokenizer"] == "bytes" else f"{config.onnx}/tokenizer.json")
    format = config.chat_format
    stops = facts["stops"]
    chat = facts.get("chat")
    if config.chat and chat and format == "auto":  # the format of the export
        format, stops = chat["format"], chat["stops"]
    asked = ask(config, tokenizer, facts["start"], format, set(stops))
    found = [generate(model, prompt, config, asked.ends) for prompt in asked.prompts]
    print_continuations(config, asked, found, tokenizer)
    print(f"{sum(map(len, found))} tokens by onnxruntime", file=sys.stderr)
    return 0


if __name__ == "__main__":
    config = command_line(OnnxConfig, __doc__, lambda config: needed("onnx", "onnxruntime"), parse_options)
    sys.exit(run_script(lambda: main(config), answers=True))
