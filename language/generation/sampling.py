"""What is asked of a model that writes, and how its answer is printed, whoever runs the model. Imports no torch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from language.data import chat as chat_data
from language.data.tokenizer import Tokenizer, check_texts
from language.options.transformer_options import ChatFormat
from tpu_utils.base.errors import InputError
from tpu_utils.options.fields import Range
from tpu_utils.options.tool_arguments import check_bounds


@dataclass(frozen=True)
class SamplingOptions:
    """What to continue, and how."""

    prompt: tuple[str, ...] = ("",)
    """One text or several, which are continued together."""
    chat: tuple[str, ...] = ()
    """Questions instead, each a conversation of its own; the answers are printed."""
    chat_format: ChatFormat = "auto"
    """How a question becomes text. auto: as the run was trained, else by the special tokens of the tokenizer."""
    num_tokens: Annotated[int | None, Range("[1, inf)")] = None
    """At most so many tokens follow. None: 100, or as many as the context has room for."""
    temperature: Annotated[float, Range("[0, inf)")] = 0.8
    """0 always takes the likeliest token."""
    top_k: Annotated[int, Range("[0, inf)")] = 0
    """Sample among the k likeliest tokens only. 0: among all."""
    top_p: Annotated[float, Range("(0, 1]")] = 1.0
    """Sample among the fewest likeliest tokens whose probabilities add up to this. 1: among all."""
    stop: tuple[str, ...] = ()
    """Texts that end a continuation, beside the end tokens of the tokenizer or of the chat format."""
    seed: int = 0
    """Seeds the sampling, of each prompt by itself."""

    def __post_init__(self):
        check_bounds(self)
        if self.chat and self.prompt not in ((), ("",)):
            raise InputError("found both --prompt and --chat; expected one of them")
        if not all(self.stop):
            raise InputError("a text of --stop is empty; expected at least one character")


@dataclass(frozen=True)
class Asked:
    """What is to be continued: texts, as tokens, are printed before it; prompts are what the model reads."""

    texts: list[list[int]]
    prompts: list[list[int]]
    ends: Callable[[list[int]], bool]
    """Whether a continuation is over after these tokens."""
    stops: set[int]


def ask(
    config: SamplingOptions,
    tokenizer: Tokenizer,
    start: int | None,
    chat_format: str,
    stops: set[int],
    after: int | None = None,
) -> Asked:
    """start, after: what stands before a text and behind it; None: nothing. stops: tokens that end a continuation."""
    check_texts(tokenizer, config.chat or config.prompt, "the prompt")
    if config.chat:
        format = chat_data.choose_format(chat_format, tokenizer)
        asked = [[{"role": "user", "content": question}] for question in config.chat]
        prompts = [chat_data.prompt_of_chat(messages, format, tokenizer) for messages in asked]
        texts = [[] for _ in prompts]  # an answer is printed without its question
        stops = stops | chat_data.stop_tokens(format, tokenizer)
    else:
        texts = [tokenizer.encode(prompt) for prompt in config.prompt]
        begins, ends_with = ([] if token is None else [token] for token in (start, after))
        prompts = [begins + text + ends_with for text in texts]

    def ends(tokens: list[int]) -> bool:
        return tokens[-1] in stops or any(stop in tokenizer.decode(tokens) for stop in config.stop)

    return Asked(texts, prompts, ends, stops)


def print_continuations(config: SamplingOptions, asked: Asked, found: list[list[int]], tokenizer: Tokenizer) -> None:
    """Each text with what follows it, up to a text of --stop, with a line between two. An answer is printed
    without the space that some formats put before it."""
    for number, (text, tokens) in enumerate(zip(asked.texts, found, strict=True)):
        kept = tokens[:-1] if tokens[-1] in asked.stops else tokens
        whole, begins = tokenizer.decode(text + kept), len(tokenizer.decode(text))
        ended = [at for stop in config.stop if (at := whole.find(stop, begins)) >= 0]
        shown = whole[: min(ended, default=None)]
        print("---\n" * (number > 0) + (shown.removeprefix(" ") if config.chat else shown))
