"""Multiple choice: HellaSwag as rows of tokens, and which ending a model finds the likeliest. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from language.llmc_files import read_hellaswag
from language.transformer_options import TransformerConfig


@dataclass(frozen=True)
class Questions:
    """batches: rows (B, T + 1) int32 as in training, 4 to a question, of one shape. labels: the right answers."""

    batches: list[np.ndarray]
    labels: np.ndarray

    def accuracy(self, result: np.ndarray) -> float:
        """Share of questions whose right ending has the lowest loss per token. result: summed loss and number of
        targets of each row, (4 x questions + padding, 2 or more)."""
        loss, count = result[: 4 * len(self.labels), :2].reshape(-1, 4, 2).transpose(2, 0, 1)
        return float(((loss / count).argmin(1) == self.labels).mean())


def load_questions(config: TransformerConfig) -> Questions:
    """The questions that the config names, none where it names none. Raises InputError for a damaged file."""
    if not config.hellaswag or config.compile_for:
        return Questions([], np.empty(0, int))
    questions = read_hellaswag(Path(config.data_dir) / config.hellaswag, config.shape.vocab_size)
    longest = max(len(q.context) + max(map(len, q.endings)) for q in questions) - 1
    T = min(config.shape.sequence_length, -(-longest // 128) * 128)
    rows = np.concatenate([question.rows(T) for question in questions])
    size = config.global_batch_size // config.gradient_accumulation_steps
    rows = np.concatenate([rows, np.full((-len(rows) % size, T + 1), -1, np.int32)])
    return Questions(list(rows.reshape(-1, size, T + 1)), np.array([question.label for question in questions]))
