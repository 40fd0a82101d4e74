"""Tokens of a chat format whose rows a model never trained, as tools leave them that add tokens to a base model."""

from collections.abc import Callable

import torch

from language.data.chat import choose_format, special_tokens
from language.data.tokenizer import tokenizer_of
from language.options.transformer_options import TransformerConfig

TABLES = ("token_embedding", "head_weight")
ZERO, AT_MEAN = 1e-3, 1e-2
"""A row counts as 0 below this share of the usual norm, and as the mean of all within this share of the usual distance
from it: Hugging Face's resize_token_embeddings draws new ones closely around it."""
CHUNK = 8192  # rows that are widened to float32 at a time


def untrained_rows(table_VD, tokens: list[int]) -> dict[int, str]:
    """Which of these tokens have rows that are 0 or the mean of all."""
    is_zero = zeros_in(table_VD)
    mean = mean_of(table_VD, ~is_zero)
    distance = torch.cat([(rows.float() - mean).norm(dim=1) for rows in table_VD.split(CHUNK)])
    is_mean = distance <= AT_MEAN * distance.median()
    return {t: "0" if is_zero[t] else "the mean of all rows" for t in tokens if is_zero[t] or is_mean[t]}


def zeros_in(table_VD):
    """(V,) bool."""
    size = torch.cat([rows.float().norm(dim=1) for rows in table_VD.split(CHUNK)])
    return size <= ZERO * size.median()


def mean_of(table_VD, taken_V):
    """(D,) float32: the mean of some rows."""
    chunks = zip(table_VD.split(CHUNK), taken_V.split(CHUNK), strict=True)
    total = sum(taken.float() @ rows.float() for rows, taken in chunks)
    return total / max(1, int(taken_V.sum()))


def started_at_the_mean(read: Callable, tokens: list[int], vocab_size: int) -> Callable:
    """read, with the rows of these tokens at the mean of all others that are not 0."""

    def changed(name: str) -> torch.Tensor:
        value = read(name)
        if name in TABLES:
            taken = ~zeros_in(value[:vocab_size])
            taken[tokens] = False
            value[tokens] = mean_of(value[:vocab_size], taken).to(value.dtype)
        return value

    return changed


def with_new_tokens(config: TransformerConfig, names: list[str], read: Callable, say: Callable) -> Callable:
    """read, after a line about tokens of the conversations' format that were never trained; with initialise_new_tokens
    their rows are others. names: of the parameters. read: one of them by its name."""
    tokenizer = tokenizer_of(config)
    format = choose_format(config.chat_format, tokenizer)
    tokens = sorted({*special_tokens(format, tokenizer).values(), tokenizer.end})
    untrained: dict[int, str] = {}
    for name in [name for name in TABLES if name in names]:
        for token, what in untrained_rows(read(name)[: config.shape.vocab_size], tokens).items():
            untrained.setdefault(token, f"{what} in {name}")
    if not untrained:
        return read
    named = ", ".join(tokenizer.decode([token]) or str(token) for token in untrained)
    kinds = " or ".join(sorted(set(untrained.values())))
    what = f"untrained  {named}: rows are {kinds}"
    if config.initialise_new_tokens == "mean":
        say(f"{what}; they start at the mean of the trained ones")
        return started_at_the_mean(read, list(untrained), config.shape.vocab_size)
    if config.lora_rank:
        why = "adapters leave them so: the model may never end an answer; train all weights, or --chat_format plain"
    elif "0 in" in kinds:
        why = "gradients through 0 are so large that clipping leaves nothing of a step; --initialise_new_tokens mean"
    else:
        why = "these conversations alone teach them; see that answers end before you believe the run"
    say(f"{what}; {why}")
    return read
