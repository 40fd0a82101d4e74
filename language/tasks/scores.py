"""Tasks that models are compared by, from local files: those of lm_eval by name or YAML, CORE, and llm.c's HellaSwag.
Imports no torch, and lm_eval only when there is a task.

A file has JSON lines, or rows of parquet, with the fields of the data set on Hugging Face. core is an evaluation bundle
of nanochat: core_tasks.py. In a run hellaswag may be llm.c's file, whose questions are tokens.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from language.data.llmc_files import HELLASWAG_MAGIC, read_hellaswag
from language.data.tokenizer import Tokenizer, check_tokenizer, load_tokenizer
from language.data.tokenizer_files import tokenizer_of_run
from language.options.transformer_options import TransformerConfig
from language.tasks.core_tasks import read_bundle, read_entries
from language.tasks.questions import SHORTEST, Row, Task, batched, fit
from tpu_utils.base.errors import InputError
from tpu_utils.base.files import open_regular

CORE = "core"


def parse_tasks(given: Sequence[str], folder: Path = Path()) -> dict[str, Path]:
    """{name: path} of words NAME=PATH, in the folder, as a YAML file is. Raises InputError for a name twice."""
    found: dict[str, Path] = {}
    for word in given:
        name, _, path = word.partition("=")
        if not name or not path:
            raise InputError(f"tasks has {word!r:.60}; expected NAME=PATH, a task of lm_eval or core and its file")
        name = str(folder / name) if name.endswith(".yaml") else name
        if name in found:
            raise InputError(f"tasks names {name} twice; expected each once")
        found[name] = folder / path
    return found


def import_harness() -> Any:
    """lm_eval takes seconds to import, and is not in requirements.txt."""
    try:
        from language.tasks import harness
    except ModuleNotFoundError as error:
        raise InputError(
            f"tasks need lm_eval, but {error.name} is not installed; run pip install -r requirements-evaluate.txt"
        ) from error
    return harness


def check_tasks(named: dict[str, Path], shots: int | None = None, limit: int = 0) -> None:
    """Raises InputError for tasks that cannot be asked. Encodes nothing."""
    if named:
        import_harness().load_all({name: path for name, path in named.items() if name != CORE}, shots, limit)
    if CORE in named:
        read_entries(named[CORE])


def read_tasks(named: dict[str, Path], tokenizer: Tokenizer, T: int, shots=None, limit: int = 0, own=(), chat=""):
    """A Harness for a model that reads T tokens. limit: the first questions of each task; 0: all. own: tasks more, of
    tokens. chat: a format of conversations to ask in. Raises InputError: which file and question, and what is wrong."""
    harness, texts = import_harness(), {name: path for name, path in named.items() if name != CORE}
    tasks = harness.load_all(texts, shots, limit, chat := harness.Conversations(tokenizer, chat) if chat else None)
    own = [*(read_bundle(named[CORE], tokenizer, T, limit) if CORE in named else ()), *own]
    tasks["tasks"] |= {task.name: harness.TokenTask(task) for task in own}
    return harness.Harness(tasks, tokenizer, T, limit, chat)


# ------------------------------------------------------------------------------------------------------------- in a run


def split_tasks(config: TransformerConfig) -> tuple[dict[str, Path], Path | None]:
    """(tasks that are text, llm.c's HellaSwag)."""
    named = parse_tasks(config.tasks, Path(config.data_dir))
    llmc = named.pop("hellaswag") if is_llmc(named.get("hellaswag")) else None
    return named, llmc


def check_tasks_of_run(config: TransformerConfig) -> None:
    """Raises InputError for what load_tasks() could not read. Texts are encoded later."""
    named, llmc = split_tasks(config)
    if llmc:
        read_hellaswag(llmc, config.shape.vocab_size)
    check_tasks(named, limit=config.task_questions)
    if named:
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


def load_tasks(config: TransformerConfig, part: int = 0, num_parts: int = 1):
    """A Harness of what the option tasks names, with its batches for the evaluations of a run; part: of num_parts
    hosts. Raises InputError for a damaged file."""
    T, limit = config.shape.sequence_length, config.task_questions
    named, llmc = split_tasks(config)
    own = [read_llmc(llmc, config.shape.vocab_size, T, limit)] if llmc else []
    harness = read_tasks(named, tokenizer_for(config) if named else None, T, limit=limit, own=own)
    if harness.prompts:
        raise InputError("tasks ask for texts, which no run writes; ask them of a checkpoint, with tools.evaluate")
    size = config.global_batch_size // config.gradient_accumulation_steps  # no more at a time than in training
    sizes = [int(number) for number in config.mesh.split("x")] if config.mesh != "auto" else []
    shared = sizes[3] if len(sizes) > 3 else 1  # devices that share a sequence, each of two pieces
    unit = (2 * shared if shared > 1 else 1) * (SHORTEST if config.attention == "flash" else 1)
    batches, harness.result_of_row = batched(harness.rows, T, size * T, size, unit, config.dataset == "chat")
    harness.batches = [batch.reshape(num_parts, -1, batch.shape[1])[part] for batch in batches]
    return harness


def is_llmc(path: Path | None) -> bool:
    """Whether it is llm.c's HellaSwag file, by its first bytes."""
    if path is None or path.is_dir():
        return False
    with open_regular(path, "hellaswag's questions") as file:
        return file.read(4) == HELLASWAG_MAGIC.to_bytes(4, "little")


def read_llmc(path: Path, vocab_size: int, T: int, limit: int = 0) -> Task:
    """llm.c's HellaSwag file: an ending is chosen by its loss per token."""
    questions = []
    for number, found in enumerate(read_hellaswag(path, vocab_size)[: limit or None]):
        pairs = [(np.concatenate([found.context, ending]), len(ending)) for ending in found.endings]
        rows: list[Row] = [fit(tokens, count, T + 1, f"{path}: example {number}") for tokens, count in pairs]
        questions.append((rows, found.label))
    return Task("hellaswag", "per_token", questions, 0.25)
