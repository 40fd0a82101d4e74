"""What --sample_prompts asks of a model while it trains. Imports no torch."""

import zlib
from pathlib import Path

from language.data.tokenizer import Numbers, Tokenizer, load_tokenizer, tokenizer_of
from language.data.tokenizer_files import tokenizer_of_run
from language.generation.sampling import Asked, SamplingOptions, ask
from language.options.transformer_options import TransformerConfig
from tpu_utils.base.errors import InputError

MOST_TOKENS = 64
"""Tokens of a sample, at most."""


def sampling_options(config: TransformerConfig, step: int) -> SamplingOptions:
    """The same prompts draw other numbers at each step, and the same ones in a run that is resumed before it."""
    asked = {"chat" if config.dataset == "chat" else "prompt": config.sample_prompts}
    seed = zlib.crc32(f"{config.seed} {step}".encode())
    return SamplingOptions(**asked, num_tokens=MOST_TOKENS, seed=seed)


def ask_of_run(config: TransformerConfig) -> tuple[Tokenizer, Asked]:
    """Raises InputError for prompts that the model cannot read, or a tokenizer that nobody knows."""
    if not config.sample_prompts:
        raise InputError("sample_prompts is empty; expected a text or more; leave it out for one that is empty")
    if config.dataset == "chat":
        tokenizer = tokenizer_of(config)
    else:
        name = tokenizer_of_run(Path(config.run_dir), config)
        tokenizer = Numbers(config.shape.vocab_size) if name in ("", "numbers") else load_tokenizer(name)
    start = tokenizer.end if tokenizer.begin is None else tokenizer.begin
    asked = ask(sampling_options(config, 0), tokenizer, start, config.chat_format, set(tokenizer.stops))
    most = config.shape.sequence_length + 1 - MOST_TOKENS
    for prompt, tokens in zip(config.sample_prompts, asked.prompts, strict=True):
        if not 1 <= len(tokens) <= most:
            raise InputError(
                f"sample_prompts: {prompt!r:.60} has {len(tokens)} tokens; expected 1 to {most}: the model reads "
                f"{config.shape.sequence_length}, and {MOST_TOKENS} are to follow"
            )
        if wrong := [token for token in tokens if not 0 <= token < config.shape.vocab_size]:
            raise InputError(
                f"sample_prompts: token {wrong[0]} of {prompt!r:.60} is outside the vocabulary of "
                f"{config.shape.vocab_size}"
            )
    return tokenizer, asked
