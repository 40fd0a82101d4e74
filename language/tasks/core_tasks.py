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
from language.tasks.questions import Question, Row, Task
from language.tasks.task_files import member, read_records, text, texts
from tpu_utils.base.errors import InputError
from tpu_utils.base.files import inside, read_regular

LARGEST_LIST = 1 << 16  # bytes; nanochat's core.yaml has 4 thousand
KINDS = ("multiple_choice", "schema", "language_modeling")
ORDER_SEED, SHOT_SEED = 1337, 1234


@dataclass(frozen=True)
class Entry:
    """A task of core.yaml."""

    label: str
    path: Path
    kind: str
    num_shots: int
    delimiter: str
    guessing: float


@dataclass(frozen=True)
class Item:
    """A line: queries and answers of which one list has one text. gold: which of the others is right."""

    queries: list[str]
    answers: list[str]
    gold: int
    where: str

    def prompts(self, delimiter: str) -> list[str]:
        return [query + delimiter + answer for query in self.queries for answer in self.answers]


class Loader(yaml.BaseLoader):
    """Makes texts, lists and mappings alone. An alias is refused: a few lines of them are a list without end."""

    def compose_node(self, parent, index):
        if self.check_event(yaml.AliasEvent):
            raise ValueError("it has an alias (*); expected what it stands for")
        return super().compose_node(parent, index)


def read_entries(bundle: Path) -> list[Entry]:
    """Raises InputError for a bundle that is none."""
    path = bundle / "core.yaml"
    content = read_regular(path, "core.yaml of an evaluation bundle of nanochat", LARGEST_LIST)
    try:
        found = yaml.load(content.decode(), Loader)
        listed = found["icl_tasks"]
        if not isinstance(listed, list) or not listed:
            raise ValueError("icl_tasks is no list of tasks")
        guessing = read_guessing(bundle / "eval_meta_data.csv")
        return [entry_of(bundle, one, guessing) for one in listed]
    except InputError:
        raise
    except (yaml.YAMLError, ValueError, KeyError, TypeError, RecursionError) as error:
        said = " ".join(str(error).split())
        raise InputError(f"{path}: {said:.300}; expected icl_tasks, as nanochat's evaluation bundle has it") from error


def entry_of(bundle: Path, task: dict, guessing: dict[str, float]) -> Entry:
    if not isinstance(task, dict):
        raise ValueError("a task is no mapping")
    label, shots = text(task, "label"), texts(task, "num_fewshot")[0]
    if label not in guessing:
        raise ValueError(f"task {label!r:.60} has no line in eval_meta_data.csv")
    if not shots.isdecimal() or int(shots) > 1000:
        raise ValueError(f"num_fewshot of {label!r:.60} is {shots!r:.60}; expected 0 to 1000")
    kind = KINDS[member(task, "icl_task_type", KINDS)]
    path = inside(bundle / "eval_data", text(task, "dataset_uri"))
    delimiter = text({"continuation_delimiter": " "} | task, "continuation_delimiter")
    return Entry(label, path, kind, int(shots), delimiter, guessing[label])


def read_guessing(path: Path) -> dict[str, float]:
    """{task: share of right answers of who guesses}."""
    content = read_regular(path, "eval_meta_data.csv of an evaluation bundle of nanochat", 1 << 20)
    found = {}
    try:
        for row in csv.DictReader(io.StringIO(content.decode())):
            found[row["Eval Task"]] = 0.01 * float(row["Random baseline"])
    except (csv.Error, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path}: {error!s:.200}; expected columns 'Eval Task' and 'Random baseline'") from error
    if bad := [name for name, share in found.items() if not 0 <= share < 1]:
        raise InputError(f"{path}: the random baseline of {bad[0]!r:.60} is {100 * found[bad[0]]}; expected 0 to 99")
    return found


def read_items(entry: Entry) -> list[Item]:
    """In nanochat's order. Raises InputError for a line that is no question."""
    items = []
    for where, record in read_records(entry.path, f"questions of {entry.label}"):
        record = {name: written(value) for name, value in record.items()}
        try:
            if entry.kind == "multiple_choice":
                queries, found = [text(record, "query")], texts(record, "choices")
            elif entry.kind == "schema":
                queries, found = texts(record, "context_options"), [text(record, "continuation")]
            else:
                queries, found = [text(record, "context").strip()], [text(record, "continuation")]
            choices = range(max(len(queries), len(found)))
            gold = 0 if entry.kind == "language_modeling" else member(record, "gold", choices)
        except ValueError as error:
            raise InputError(f"{where}: no {entry.kind} question: {error}") from error
        items.append(Item(queries, found, gold, where))
    random.Random(ORDER_SEED).shuffle(items)
    return items


def written(value):
    """A number, or those of a list, as text: nanochat's templates write them so."""
    if isinstance(value, list):
        return [written(one) if type(one) in (int, float) else one for one in value]
    return str(value) if type(value) in (int, float) else value


def check_bundle(bundle: Path) -> None:
    """Raises InputError for a bundle that cannot be read."""
    for entry in read_entries(bundle):
        read_items(entry)


def read_bundle(bundle: Path, tokenizer: Tokenizer, T: int, limit: int = 0) -> list[Task]:
    """The tasks for a model that reads T tokens, of each the first `limit` questions of nanochat's order; 0: all.
    Raises InputError."""
    tasks = []
    for entry in read_entries(bundle):
        items = read_items(entry)[: limit or None]
        if len(items) <= entry.num_shots:
            raise InputError(
                f"{entry.path}: {len(items)} questions, each after {entry.num_shots} others; expected "
                f"{entry.num_shots + 1} or more"
            )
        questions = [Question(rows_of(entry, items, n, tokenizer, T), items[n].gold) for n in range(len(items))]
        how = "greedy" if entry.kind == "language_modeling" else "per_token"
        tasks.append(Task(entry.label, how, questions, entry.guessing, "core"))
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
    return [cropped(row, start, T, item.where) for row, start in zip(rows, starts, strict=True)]


def common(rows: list[np.ndarray]) -> int:
    """How many tokens all rows begin with."""
    size = min(map(len, rows))
    differ = np.flatnonzero((np.stack([row[:size] for row in rows]) != rows[0][:size]).any(0))
    return int(differ[0]) if len(differ) else size


def cropped(row: np.ndarray, start: int, T: int, where: str) -> Row:
    """The last T tokens, those from start on being targets. Raises InputError where these are more."""
    if start - max(0, len(row) - T) < 1 and start:
        raise InputError(
            f"{where}: an answer of {len(row) - start} tokens; expected at most {T - 1}, what the model reads; leave "
            "core out, or choose a model of longer sequences"
        )
    return Row(row[-T:], len(row) - start if start else 0)
