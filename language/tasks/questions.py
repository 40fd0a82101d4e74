"""Questions to a language model as rows of tokens in batches of a few lengths, and its answers. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from language.data.tokenizer import Tokenizer
from language.options.shapes import START
from tpu_utils.base.errors import InputError

SHORTEST = 128  # tokens; other lengths are twice as long as one before, up to the model's own


@dataclass(frozen=True)
class Row:
    """tokens: int32, of a context and what follows it. num_targets: how many, at the end, count."""

    tokens: np.ndarray
    num_targets: int


class Task(NamedTuple):
    """Questions that are tokens: CORE's, and llm.c's HellaSwag, each as its rows and which of them is right. how that
    is chosen: per_token, the smallest mean loss; greedy: there is one row, and it is right where every target is the
    token that the model finds likeliest. guessing: share of right answers of who guesses."""

    name: str
    how: Literal["per_token", "greedy"]
    questions: list[tuple[list[Row], int]]
    guessing: float


def encode_pair(tokenizer: Tokenizer, context: str, continuation: str) -> tuple[list[int], int]:
    """(tokens, how many of them are the continuation's), as TemplateLM._encode_pair() of lm_eval: white space at the
    end of a context goes to the continuation, and both are encoded together. A special token in a text is text."""
    kept = context.rstrip()
    whole, start = (tokenizer.encode_around(text) for text in (context + continuation, kept))
    if not kept or not start:  # no text before it: a begin token, or the first token where that is it
        found = tokenizer.encode(context + continuation)
        whole, start = [tokenizer.prefix] * (found[:1] != [tokenizer.prefix]) + found, [tokenizer.prefix]
    return [*start, *whole[len(start) :]], len(whole) - len(start)  # as there, also where the two begin differently


def fit(tokens: Sequence[int], num_targets: int, longest: int, where: str) -> Row:
    """The last `longest` tokens. Raises InputError where these are not all of the targets and one token before them."""
    if not 1 <= num_targets < longest:
        raise InputError(
            f"{where}: an answer of {num_targets} tokens; expected 1 to {longest - 1}, what the model reads; choose "
            "another task, or a model of longer sequences"
        )
    return Row(np.array(tokens[-longest:], np.int32), num_targets)


def windows(tokens: Sequence[int], T: int) -> list[Row]:
    """Rows in which each token but the first is a target once, behind as many tokens as fit."""
    tokens = np.array(tokens, np.int32)
    ends = [*range(T + 1, len(tokens), T), len(tokens)]
    return [Row(tokens[max(0, end - T - 1) : end], end - start) for start, end in zip([1, *ends], ends, strict=False)]


def batched(
    rows: list[Row], T: int, tokens: int, multiple: int, unit: int = 1, packed: bool = False
) -> tuple[list[np.ndarray], np.ndarray]:
    """(batches, where the result of each row stands among those of all batches). A batch is int32 (B, length + 1) as in
    training, its length T, or one of 128, 256, ... below T that unit divides; B: a multiple, as many rows as `tokens`
    are. So there is one shape for each length that occurs. packed: the first token of a row is marked, as a model of
    rows of documents needs it."""
    lengths = [length for length in (SHORTEST << k for k in range(32)) if length < T and length % unit == 0] + [T]
    start = START if packed else 0
    bucket = np.searchsorted(lengths, [len(row.tokens) - 1 for row in rows])
    batches = []
    places = np.zeros(len(rows), int)
    first = 0
    for number, length in enumerate(lengths):
        B = max(multiple, tokens // length // multiple * multiple)
        members = np.flatnonzero(bucket == number)
        places[members] = first + np.arange(len(members))
        for at in range(0, len(members), B):
            batch = np.full((B, length + 1), ~start, np.int32)
            for out, row in zip(batch, (rows[member] for member in members[at : at + B]), strict=False):
                size, context = len(row.tokens), len(row.tokens) - row.num_targets
                out[:context], out[context:size] = ~row.tokens[:context], row.tokens[context:]
                out[0] = ~(start + row.tokens[0])
            batches.append(batch)
            first += B
    return batches, places
