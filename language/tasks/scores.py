"""Tasks that models are compared by, from local files, asked as lm-evaluation-harness 0.4 asks them. Imports no torch.

A file has JSON lines, or rows of parquet, with the fields of the data set on Hugging Face. PATH is one file; or a
folder with test.jsonl or validation.jsonl, and with train.jsonl (mmlu: dev.jsonl) if questions are to follow examples.
Instead of test.jsonl it may be test.parquet or, as on the hub, test-00000-of-00001.parquet; so for the others. core is
an evaluation bundle of nanochat: core_tasks.py. Text is text: a special token in it is none. In a run hellaswag may be
llm.c's file, whose questions are tokens.
"""

import os
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from language.data.llmc_files import HELLASWAG_MAGIC, read_hellaswag
from language.data.tokenizer import Tokenizer, check_lost, check_tokenizer, load_tokenizer
from language.data.tokenizer_files import tokenizer_of_run
from language.options.transformer_options import TransformerConfig
from language.tasks.core_tasks import check_bundle, read_bundle
from language.tasks.questions import SHORTEST, Answers, Question, Row, Task, answers, batched, core_of, fit
from language.tasks.task_files import member, read_records, text, texts, tidied
from tpu_utils.base.errors import InputError
from tpu_utils.base.files import open_regular
from tpu_utils.options.fields import nearest

CORE = "core"
SEED = 1234  # lm-evaluation-harness's --seed for the examples before a question


@dataclass(frozen=True)
class Example:
    """A line of a file as text. prompts: what stands before a choice, and the choice. shot: it, answered, in front of
    another question. lengths: of the choices in characters, where they are compared by them."""

    prompts: list[tuple[str, str]]
    answer: int
    shot: str
    lengths: tuple[int, ...] = ()


def multiple_choice(context: str, choices: list[str], answer: int, by_length: bool = True) -> Example:
    lengths = tuple(map(len, choices)) if by_length else ()
    return Example([(context, f" {c}") for c in choices], answer, f"{context} {choices[answer]}\n\n", lengths)


def hellaswag(record: dict) -> Example:
    context = f"{text(record, 'activity_label')}: {text(record, 'ctx_a')} {text(record, 'ctx_b').capitalize()}"
    endings = [tidied(ending) for ending in texts(record, "endings")]
    return multiple_choice(tidied(context), endings, member(record, "label", range(len(endings))))


def arc(record: dict) -> Example:
    choices = record.get("choices")
    choices = choices if isinstance(choices, dict) else {}
    found, labels = texts(choices, "text"), texts(choices, "label")
    if len(found) != len(labels):
        raise ValueError(f"{len(found)} choices with {len(labels)} labels; expected as many")
    return multiple_choice(f"Question: {text(record, 'question')}\nAnswer:", found, member(record, "answerKey", labels))


def piqa(record: dict) -> Example:
    choices = [text(record, "sol1"), text(record, "sol2")]
    return multiple_choice(f"Question: {text(record, 'goal')}\nAnswer:", choices, member(record, "label", range(2)))


def winogrande(record: dict) -> Example:
    """The text up to the gap differs, and what follows it is compared (Trinh and Le 2018, partial scoring)."""
    before, gap, after = text(record, "sentence").partition("_")
    if not gap:
        raise ValueError("sentence has no _, which stands for the option; expected one")
    contexts = [before + text(record, "option1"), before + text(record, "option2")]
    answer, after = member(record, "answer", (1, 2)), after.strip()
    return Example([(context, f" {after}") for context in contexts], answer, f"{contexts[answer]} {after}\n\n")


def lambada(record: dict) -> Example:
    context, _, last = text(record, "text").rpartition(" ")
    return Example([(context, f" {last}")], 0, "")


def mmlu(record: dict) -> Example:
    choices, _ = texts(record, "choices"), text(record, "subject")
    if len(choices) != 4:
        raise ValueError(f"{len(choices)} choices; expected 4")
    listed = "".join(f"\n{letter}. {choice}" for letter, choice in zip("ABCD", choices, strict=True))
    context = f"{text(record, 'question').strip()}{listed}\nAnswer:"
    return multiple_choice(context, list("ABCD"), member(record, "answer", range(4)), by_length=False)


READERS: dict[str, Callable[[dict], Example]] = {
    **{"hellaswag": hellaswag, "arc_easy": arc, "arc_challenge": arc, "piqa": piqa},
    **{"winogrande": winogrande, "lambada": lambada, "mmlu": mmlu},
}
DRAWS_ONE_MORE = ("hellaswag", "piqa", "winogrande")
"""The harness has no test split of these: it draws an example more, and drops the question itself or the last one."""

# ---------------------------------------------------------------------------------------------------------- from files


def parse_tasks(given: Sequence[str], folder: Path = Path()) -> dict[str, Path]:
    """{name: path} of words NAME=PATH. Raises InputError for an unknown name, one that is given twice, no path."""
    found: dict[str, Path] = {}
    for word in given:
        name, _, path = word.partition("=")
        if name not in (*READERS, CORE) or not path:
            known = ", ".join((*READERS, CORE))
            raise InputError(
                f"tasks has {word!r:.60}; expected NAME=PATH with one of {known}{nearest(name, (*READERS, CORE))}"
            )
        if name in found:
            raise InputError(f"tasks names {name} twice; expected each once")
        found[name] = folder / path
    return found


def files_of(name: str, path: Path, num_shots: int) -> tuple[Path, Path | None]:
    """(the file with the questions, that with examples). Raises InputError for what is missing."""
    if name == "lambada" and num_shots:
        raise InputError(f"num_fewshot is {num_shots}, but lambada has no training set; leave lambada out, or use 0")
    if not path.is_dir():
        if num_shots:
            raise InputError(
                f"{name} is one file, {path}; num_fewshot {num_shots} needs a folder with train.jsonl too, or .parquet"
            )
        return path, None
    tested = [file for split in ("test", "validation") if (file := file_of(path, split)).exists()]
    if not tested:
        raise InputError(
            f"{path} has no test.jsonl and no validation.jsonl, nor .parquet; expected one, with the questions"
        )
    return tested[0], file_of(path, "dev" if name == "mmlu" else "train") if num_shots else None


def file_of(folder: Path, split: str) -> Path:
    """The file of a split, whether it is there or not. Raises InputError for more than one."""
    named = [file for file in (folder / f"{split}.jsonl", folder / f"{split}.parquet") if file.exists()]
    found = [*named, *sorted(folder.glob(f"{split}-*.parquet"))]
    if len(found) > 1:
        raise InputError(
            f"{folder} has {found[0].name} and {found[1].name}; expected one file of {split}; move one away"
        )
    return found[0] if found else folder / f"{split}.jsonl"


def read_examples(name: str, path: Path) -> list[tuple[str, dict, Example]]:
    """(file and line, the record, the example) of each line. Raises InputError for one that is none."""
    found = []
    for where, record in read_records(path, f"{name}'s questions"):
        try:
            found.append((where, record, READERS[name](record)))
        except ValueError as error:
            raise InputError(f"{where}: no question of {name}: {error}") from error
    return found


def with_examples(name: str, path: Path, num_shots: int = 0, limit: int = 0) -> list[tuple[str, Example, str]]:
    """(file and line, the question, what stands before it) of the first `limit` questions; 0: of all."""
    tested, trained = files_of(name, path, num_shots)
    found = read_examples(name, tested)[: limit or None]
    pool = read_examples(name, trained) if trained else []
    draw = random.Random(SEED)  # one after another, so the examples of a question depend on its place in the file
    by_subject: dict[str, list] = {}  # mmlu's examples are of the question's own
    for example in pool:
        by_subject.setdefault(example[1]["subject"] if name == "mmlu" else "", []).append(example)
    return [
        (where, one, few_shot_prefix(name, record, where, by_subject, num_shots, draw)) for where, record, one in found
    ]


def few_shot_prefix(name: str, record: dict, where: str, by_subject: dict, num_shots: int, draw: random.Random) -> str:
    """What the harness puts in front of a question: mmlu's description, and the examples."""
    description = ""
    more = name in DRAWS_ONE_MORE
    pool = by_subject.get("", [])
    if name == "mmlu":
        subject = record["subject"]
        about = subject.replace("_", " ")
        description = f"The following are multiple choice questions (with answers) about {about}.\n\n"
        pool = by_subject.get(subject, [])
    if not num_shots:
        return description
    if name == "mmlu":
        shots = enough(pool, num_shots, where)[:num_shots]
    else:
        shots = draw.sample(enough(pool, num_shots + more, where), num_shots + more)
    if more:
        shots = [one for one in shots if one[1] != record][:num_shots]
    if len(shots) < num_shots:  # the question was drawn more than once
        others = [one for one in pool if one[1] != record]
        shots = draw.sample(enough(others, num_shots, where), num_shots)
    return description + "".join(example.shot for _, _, example in shots)


def enough(pool: list, count: int, where: str) -> list:
    """Raises InputError for fewer examples than are to be drawn."""
    if len(pool) < count:
        raise InputError(f"{where}: {len(pool)} examples to draw {count} from; choose a smaller num_fewshot")
    return pool


def encode_pair(tokenizer: Tokenizer, context: str, continuation: str) -> tuple[list[int], int]:
    """(tokens, how many of them are the continuation's), as TemplateLM._encode_pair() of the harness: white space at
    the end of a context goes to the continuation, and both are encoded together."""
    kept = context.rstrip()
    whole, start = (tokenizer.encode_around(text) for text in (context + continuation, kept))
    if not kept or not start:  # no text before it: a begin token, or the first token where that is it
        found = tokenizer.encode(context + continuation)
        whole, start = [tokenizer.prefix] * (found[:1] != [tokenizer.prefix]) + found, [tokenizer.prefix]
    return [*start, *whole[len(start) :]], len(whole) - len(start)  # as there, also where the two begin differently


def read_task(name: str, path: Path, tokenizer: Tokenizer, T: int, num_shots: int = 0, limit: int = 0) -> Task:
    """One of READERS for a model that reads T tokens. Raises InputError: which line, and what is wrong."""
    questions = []
    lost = Counter()
    size = 0
    for where, example, shots in with_examples(name, path, num_shots, limit):
        pairs = [encode_pair(tokenizer, shots + context, after) for context, after in example.prompts]
        asked = shots + "".join(example.prompts[0])
        lost += tokenizer.lost(asked, pairs[0][0])
        size += len(asked)
        rows = [fit(tokens, num_targets, T + 1, where) for tokens, num_targets in pairs]
        questions.append(Question(rows, example.answer, example.lengths))
    check_lost(lost, size, str(path))
    guessing = float(np.mean([1 / len(q.rows) for q in questions])) if name != "lambada" else 0.0
    return Task(name, "greedy" if name == "lambada" else "likelihood", questions, guessing)


def check_file(name: str, path: Path, num_shots: int = 0) -> None:
    """Raises InputError for a task that cannot be read. Encodes nothing."""
    if name == CORE:
        check_bundle(path)
    else:
        with_examples(name, path, num_shots)


def read_tasks(name: str, path: Path, tokenizer: Tokenizer, T: int, num_shots: int = 0, limit: int = 0) -> list[Task]:
    """One task, or those of a bundle. What a tokenizer puts around a text stands around every question."""
    if name == CORE:
        return read_bundle(path, tokenizer, T, limit)
    return [read_task(name, path, tokenizer, T, num_shots, limit)]


# ------------------------------------------------------------------------------------------------------------- in a run


@dataclass(frozen=True)
class Evaluation:
    """batches: of this host, (rows, T + 1) int32 as in training, of a few lengths. places: of each row of the tasks
    among the results of all batches."""

    tasks: list[Task]
    batches: list[np.ndarray]
    places: np.ndarray

    def fields(self, result: np.ndarray) -> dict[str, Any]:
        """Fields of an eval line. result: what the evaluation step gives for all rows, (rows, 3 or more)."""
        found = result[self.places]
        at = 0
        fields = {}
        scored: list[Answers] = []
        for task in self.tasks:
            scored.append(answers(task, found[at : at + len(task.rows)]))
            at += len(task.rows)
        for one in (one for one in scored if not one.task.of):
            fields[f"{one.task.name}_accuracy"] = one.accuracy
            fields |= {} if one.accuracy_norm is None else {f"{one.task.name}_accuracy_norm": one.accuracy_norm}
            fields |= {} if one.perplexity is None else {f"{one.task.name}_perplexity": one.perplexity}
        if (core := core_of(scored)) is not None:
            fields |= dict(core=core, core_centered=[one.centered for one in scored if one.task.of == CORE])
        return fields


def check_tasks(config: TransformerConfig) -> None:
    """Raises InputError for what load_tasks() could not read. Texts are encoded later."""
    named = parse_tasks(config.tasks, Path(config.data_dir))
    of_text = {name: path for name, path in named.items() if not is_llmc(name, path)}
    for path in (path for name, path in named.items() if name not in of_text):
        read_hellaswag(path, config.shape.vocab_size)
    for name, path in of_text.items():
        check_file(name, path)
    if of_text:
        tokenizer_for(config)


def tokenizer_for(config: TransformerConfig) -> Tokenizer:
    """That of the data of a run. Raises InputError where nobody knows it."""
    name = tokenizer_of_run(Path(config.run_dir or os.devnull), config)
    if name in ("", "numbers"):
        raise InputError(
            f"tasks are text, but the tokenizer of a vocabulary of {config.shape.vocab_size} is unknown; name it with "
            "--tokenizer"
        )
    tokenizer = load_tokenizer(name)
    check_tokenizer(tokenizer, config.shape.vocab_size)
    return tokenizer


def load_tasks(config: TransformerConfig, part: int = 0, num_parts: int = 1) -> Evaluation:
    """What the option tasks names, for the evaluations of a run; part: of num_parts hosts. Raises InputError for a
    damaged file."""
    T, limit = config.shape.sequence_length, config.task_questions
    tasks = []
    tokenizer = None
    named = parse_tasks(config.tasks, Path(config.data_dir))
    for name, path in named.items() if not config.compile_for else ():
        if is_llmc(name, path):
            tasks.append(read_llmc(path, config.shape.vocab_size, T, limit))
        else:
            tokenizer = tokenizer or tokenizer_for(config)
            tasks += read_tasks(name, path, tokenizer, T, limit=limit)
    rows, size = [row for task in tasks for row in task.rows], config.global_batch_size
    size //= config.gradient_accumulation_steps  # no more at a time than in training
    sizes = [int(number) for number in config.mesh.split("x")] if config.mesh != "auto" else []
    shared = sizes[3] if len(sizes) > 3 else 1  # devices that share a sequence, each of two pieces
    unit = (2 * shared if shared > 1 else 1) * (SHORTEST if config.attention == "flash" else 1)
    batches, places = batched(rows, T, size * T, size, unit, config.dataset == "chat")
    return Evaluation(tasks, [batch.reshape(num_parts, -1, batch.shape[1])[part] for batch in batches], places)


def is_llmc(name: str, path: Path) -> bool:
    """Whether it is llm.c's HellaSwag file, by its first bytes."""
    if name != "hellaswag" or path.is_dir():
        return False
    with open_regular(path, "hellaswag's questions") as file:
        return file.read(4) == HELLASWAG_MAGIC.to_bytes(4, "little")


def read_llmc(path: Path, vocab_size: int, T: int, limit: int = 0) -> Task:
    """llm.c's HellaSwag file: an ending is chosen by its loss per token."""
    questions = []
    for number, found in enumerate(read_hellaswag(path, vocab_size)[: limit or None]):
        pairs = [(np.concatenate([found.context, ending]), len(ending)) for ending in found.endings]
        rows: list[Row] = [fit(tokens, count, T + 1, f"{path}: example {number}") for tokens, count in pairs]
        questions.append(Question(rows, found.label))
    return Task("hellaswag", "per_token", questions, 0.25)
