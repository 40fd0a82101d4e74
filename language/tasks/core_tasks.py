"""nanochat's CORE benchmark from an evaluation bundle, asked as nanochat asks it. Imports no torch.

BUNDLE/core.yaml lists tasks: label, dataset_uri, num_fewshot, icl_task_type, continuation_delimiter.
BUNDLE/eval_data/URI has their JSON lines, BUNDLE/eval_meta_data.csv what guessing gives, in percent. Source: nanochat,
nanochat/core_eval.py and scripts/base_eval.py; the benchmark is that of Li et al. 2024 (DataComp-LM).
"""

import csv
import io
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml

from language.data.tokenizer import Tokenizer
from language.tasks.questions import Row, Task, fit
from language.tasks.task_files import read_records
from tpu_utils.base.errors import InputError
from tpu_utils.base.files import inside, read_regular

LARGEST_LIST = 1 << 16  # bytes; nanochat's core.yaml has 4 thousand
KINDS = ("multiple_choice", "schema", "language_modeling")
ORDER_SEED, SHOT_SEED = 1337, 1234


@dataclass(frozen=True)
class Item:
    """A line: queries and answers of which one list has one text. gold: which of the others is right."""

    queries: list[str]
    answers: list[str]
    gold: int
    where: str

    def prompts(self, delimiter: str) -> list[str]:
        return [query + delimiter + answer for query in self.queries for answer in self.answers]


@dataclass(frozen=True)
class Entry:
    """A task of core.yaml, and its items in nanochat's order. guessing: share of right answers of who guesses."""

    label: str
    path: Path
    kind: str
    num_shots: int
    delimiter: str
    guessing: float
    items: list[Item]


class NoAliases:
    """Part of a loader of YAML: a few aliases can stand for 2 ** 40 values."""

    def compose_node(self, parent, index):
        if self.check_event(yaml.AliasEvent):
            raise ValueError("it has an alias (*); expected what it stands for")
        return super().compose_node(parent, index)


class Loader(NoAliases, yaml.BaseLoader):
    """Makes texts, lists and mappings alone."""


def read_entries(bundle: Path) -> list[Entry]:
    """Raises InputError for a bundle that is none."""
    content = read_regular(bundle / "core.yaml", "core.yaml of an evaluation bundle of nanochat", LARGEST_LIST)
    csv_path = bundle / "eval_meta_data.csv"
    guessed = read_regular(csv_path, "eval_meta_data.csv of an evaluation bundle of nanochat", 1 << 20)
    try:
        rows = csv.DictReader(io.StringIO(guessed.decode()))
        guessing = {row["Eval Task"]: 0.01 * float(row["Random baseline"]) for row in rows}
    except (csv.Error, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{csv_path}: {error!s:.200}; expected columns 'Eval Task' and 'Random baseline'") from error
    try:
        return [read_entry(bundle, one, guessing) for one in yaml.load(content.decode(), Loader)["icl_tasks"]]
    except InputError:
        raise
    except (yaml.YAMLError, AttributeError, LookupError, ValueError, TypeError, RecursionError) as error:
        said = " ".join(str(error).split())
        raise InputError(
            f"{bundle / 'core.yaml'}: {said:.300}; expected icl_tasks, as nanochat's evaluation bundle has it"
        ) from error


def read_entry(bundle: Path, task: dict[str, str], guessing: dict[str, float]) -> Entry:
    label, kind, shots = task["label"], task["icl_task_type"], task["num_fewshot"][0]
    if not 0 <= guessing.get(label, -1) < 1:
        raise ValueError(f"{label!r:.60} has no random baseline of 0 to 99 in eval_meta_data.csv")
    if kind not in KINDS:
        raise ValueError(f"icl_task_type is {kind!r:.60}; expected {' or '.join(KINDS)}")
    if not shots.isdecimal() or int(shots) > 1000:
        raise ValueError(f"num_fewshot of {label!r:.60} is {shots!r:.60}; expected 0 to 1000")
    path, items = inside(bundle / "eval_data", task["dataset_uri"]), []
    for where, record in read_records(path, f"questions of {label}"):
        try:
            items.append(read_item(record, kind, where))
        except (KeyError, ValueError) as error:
            raise InputError(f"{where}: no {kind} question: {error}") from error
    random.Random(ORDER_SEED).shuffle(items)
    delimiter = text(task.get("continuation_delimiter", " "))
    return Entry(label, path, kind, int(shots), delimiter, guessing[label], items)


def read_item(record: dict, kind: str, where: str) -> Item:
    if kind == "multiple_choice":
        queries, answers = [text(record["query"])], texts(record["choices"])
    elif kind == "schema":
        queries, answers = texts(record["context_options"]), [text(record["continuation"])]
    else:
        return Item([text(record["context"]).strip()], [text(record["continuation"])], 0, where)
    golds = [str(number) for number in range(max(len(queries), len(answers)))]
    if (gold := text(record["gold"])) not in golds:
        raise ValueError(f"gold is {gold!r:.60}; expected {' or '.join(golds)}")
    return Item(queries, answers, int(gold), where)


def text(value) -> str:
    """A text; a number as nanochat's templates write it. Raises ValueError for anything else."""
    if type(value) not in (str, int, float):
        raise ValueError(f"expected a text, found {value!r:.60}")
    str(value).encode()  # raises for a lone surrogate, a ValueError too
    return str(value)


def texts(values) -> list[str]:
    if not isinstance(values, list) or not 1 <= len(values) <= 64:
        raise ValueError(f"expected a list of 1 to 64 texts, found {values!r:.60}")
    return [text(value) for value in values]


def read_bundle(bundle: Path, tokenizer: Tokenizer, T: int, limit: int = 0) -> list[Task]:
    """The tasks for a model that reads T tokens, of each the first `limit` questions; 0: all. Raises InputError."""
    tasks = []
    for entry in read_entries(bundle):
        items = entry.items[: limit or None]
        if len(items) <= entry.num_shots:
            raise InputError(
                f"{entry.path}: {len(items)} questions, each after {entry.num_shots} others; expected "
                f"{entry.num_shots + 1} or more"
            )
        questions = [(rows_of(entry, items, n, tokenizer, T), item.gold) for n, item in enumerate(items)]
        how = "greedy" if entry.kind == "language_modeling" else "per_token"
        tasks.append(Task(f"core/{entry.label}", how, questions, entry.guessing))
    return tasks


def rows_of(entry: Entry, items: list[Item], number: int, tokenizer: Tokenizer, T: int) -> list[Row]:
    """Rows of one question, after examples that its number draws. The beginning that the choices share is no target; in
    a schema only the end that they share is one."""
    item = items[number]
    others = range(len(items) - 1)  # a list would cost each question as much as there are items
    drawn = random.Random(SHOT_SEED + number).sample(others, entry.num_shots) if entry.num_shots else []
    drawn = [n + (n >= number) for n in drawn]
    shots = "".join(items[n].prompts(entry.delimiter)[items[n].gold] + "\n\n" for n in drawn)
    prompts = [shots + prompt for prompt in item.prompts(entry.delimiter)]
    first = tokenizer.prefix
    rows = [np.array([first, *tokenizer.encode(prompt)], np.int32) for prompt in prompts]
    if entry.kind == "schema":
        shared = common([row[::-1] for row in rows])
        starts = [len(row) - shared for row in rows]
    else:
        without = []
        if entry.kind == "language_modeling":
            without = [np.array([first, *tokenizer.encode((shots + item.queries[0] + entry.delimiter).rstrip())])]
        starts = [common(rows + without)] * len(rows)
    return [
        fit(row, len(row) - start, T, item.where) if 0 < start < len(row) else Row(row[-T:], 0)  # no targets: no answer
        for row, start in zip(rows, starts, strict=True)
    ]


def common(rows: list[np.ndarray]) -> int:
    """How many tokens all rows begin with."""
    size = min(map(len, rows))
    differ = np.flatnonzero((np.stack([row[:size] for row in rows]) != rows[0][:size]).any(0))
    return int(differ[0]) if len(differ) else size
