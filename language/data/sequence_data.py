"""What every source of data gives: batches of sequences of tokens. Imports no torch.

A source answers batch(step) with int32 (rows, T + 1): inputs [:-1] and targets [1:] of each row. A token that is an
input but no target is stored as ~token, a negative number; padding is ~0. That replaces PyTorch's ignore index, and one
array is uploaded instead of two. Where documents share a row (chat.py), the first token of each is ~(START + token),
and padding ~START. A batch is a pure function of the step, so resuming needs no other position.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from language.options.transformer_options import TransformerConfig


class Host(NamedTuple):
    """Which of the processes that share a global batch this is."""

    index: int = 0
    count: int = 1

    def part(self, rows: int) -> slice:
        """The rows of a global batch that are this process's, which has so many."""
        return slice(self.index * rows, (self.index + 1) * rows)


ALONE = Host()


@dataclass(frozen=True)
class MicroBatches:
    """Each batch of a source in `parts` batches, one after another."""

    source: Any
    parts: int

    def batch(self, step: int) -> np.ndarray:
        number, part = divmod(step, self.parts)
        return np.split(self.source.batch(number), self.parts)[part]


@dataclass(frozen=True)
class SequenceData:
    """What a language model trains and is validated on. Both sources answer batch(step) for this host."""

    config: TransformerConfig
    train: Any
    validation: Any
    validation_batches: int
    description: str
    crc32: int  # identifies the data, to validate on above that to train on: a run is resumed on what it began with
    loss_floor: float | None = None  # lowest possible expected loss in nats, in closed form; None where nobody knows it

    unit = "tokens"

    @property
    def num_steps(self) -> int:
        return self.config.num_steps

    def fingerprint(self) -> int:
        return self.crc32

    def batch(self, index: int) -> np.ndarray:
        return self.train.batch(index)

    def count(self, batch: Sequence) -> int:
        """Tokens that a step trains on; its batch: (B, T + 1) on the device."""
        return self.config.global_batch_size * (batch[0].shape[1] - 1)
