"""Questions to a language model as rows of tokens in batches of a few lengths, and its answers. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from language.options.shapes import START
from tpu_utils.base.errors import InputError

SHORTEST = 128  # tokens; other lengths are twice as long as one before, up to the model's own


@dataclass(frozen=True)
class Row:
    """tokens: int32, of a context and what follows it. num_targets: how many, at the end, count."""

    tokens: np.ndarray
    num_targets: int


@dataclass(frozen=True)
class Question:
    """A row for each choice. answer: the right one. lengths: of the choices in characters; (): they do not count."""

    rows: list[Row]
    answer: int
    lengths: tuple[int, ...] = ()


@dataclass(frozen=True)
class Task:
    """how a choice is made: likelihood, the largest of all targets together; per_token, the smallest mean loss;
    greedy: there is one row, and it is right where every target is the token that the model finds likeliest.

    guessing: share of right answers of who guesses. of: "core" for a part of that benchmark."""

    name: str
    how: Literal["likelihood", "per_token", "greedy"]
    questions: list[Question]
    guessing: float
    of: str = ""

    @property
    def rows(self) -> list[Row]:
        return [row for question in self.questions for row in question.rows]


@dataclass(frozen=True)
class Answers:
    """chosen: of each question, -1 where a greedy one is not right, and where there is no answer. accuracy_norm: by
    likelihood per character, as lm-evaluation-harness has it; None where that compares no lengths. perplexity: of a
    greedy question's targets together, but for CORE's."""

    task: Task
    chosen: list[int]
    chosen_norm: list[int]
    perplexity: float | None

    @property
    def accuracy(self) -> float:
        return share(self.chosen, self.task)

    @property
    def accuracy_norm(self) -> float | None:
        return share(self.chosen_norm, self.task) if self.chosen_norm else None

    @property
    def stderr(self) -> float | None:
        """Standard error of the accuracy, by the sample's standard deviation; None for one question."""
        p, n = self.accuracy, len(self.chosen)
        return (p * (1 - p) / (n - 1)) ** 0.5 if n > 1 else None

    @property
    def centered(self) -> float:
        """0 for guessing, 1 for all right."""
        return (self.accuracy - self.task.guessing) / (1 - self.task.guessing)


def share(chosen: list[int], task: Task) -> float:
    return sum(c == q.answer for c, q in zip(chosen, task.questions, strict=True)) / len(chosen)


def answers(task: Task, found: np.ndarray) -> Answers:
    """found: of each row of the task the summed loss, the number of targets, and how many of them were likeliest. A
    question with a loss that is no number has no answer."""
    chosen = []
    normed = []
    at = 0
    for question in task.questions:
        loss, count, likeliest = found[at : at + len(question.rows), :3].T
        at += len(question.rows)
        is_answered = bool(np.isfinite(loss).all())
        if task.how == "greedy":
            chosen.append(0 if is_answered and likeliest[0] == count[0] > 0 else -1)
            continue
        if task.how == "per_token":
            with np.errstate(invalid="ignore"):
                loss = loss / count  # nan for a choice without a target, which is chosen if it is the first
        chosen.append(min(range(len(loss)), key=loss.tolist().__getitem__) if is_answered else -1)
        if question.lengths:
            with np.errstate(divide="ignore", invalid="ignore"):
                normed.append(int(np.argmax(-loss / np.array(question.lengths, float))) if is_answered else -1)
    perplexity = float(np.exp(found[:at, 0].mean())) if task.how == "greedy" and not task.of else None
    return Answers(task, chosen, normed, perplexity)


def core_of(of_tasks: Sequence[Answers]) -> float | None:
    """The CORE metric: the mean of the centered accuracies of its tasks. None: none of these is one."""
    centered = [one.centered for one in of_tasks if one.task.of == "core"]
    return sum(centered) / len(centered) if centered else None


def fit(tokens: Sequence[int], num_targets: int, longest: int, where: str) -> Row:
    """The last `longest` tokens. Raises InputError where these are not all of the targets and one token before them."""
    if not 1 <= num_targets < longest:
        raise InputError(
            f"{where}: an answer of {num_targets} tokens; expected 1 to {longest - 1}, what the model reads; choose "
            "another task, or a model of longer sequences"
        )
    return Row(np.array(tokens[-longest:], np.int32), num_targets)


def lengths_of(T: int, unit: int = 1) -> list[int]:
    """The lengths that rows are padded to, shortest first: 128, 256, ... below T, if unit divides them, and T."""
    return [length for length in (SHORTEST << k for k in range(32)) if length < T and length % unit == 0] + [T]


def batched(
    rows: list[Row], T: int, tokens: int, multiple: int, unit: int = 1, packed: bool = False
) -> tuple[list[np.ndarray], np.ndarray]:
    """(batches, where the result of each row stands among those of all batches). A batch is int32 (B, length + 1) as in
    training, its length one of lengths_of(T, unit); B: a multiple, as many rows as `tokens` are. So there is one shape
    for each length that occurs. packed: the first token of a row is marked, as a model of rows of documents needs it.
    """
    lengths, start = lengths_of(T, unit), START if packed else 0
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
