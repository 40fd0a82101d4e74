"""Score a language model on tasks that others report: those of lm_eval, CORE.

Run:     python -m tools.evaluate RUN --tasks hellaswag=hellaswag.jsonl
             the newest checkpoint of a run of transformer_tpu.py, or the best
             one: --checkpoint best
         python -m tools.evaluate --hf Qwen3-0.6B/ --tasks mmlu=mmlu/ \\
             --num_fewshot 5
             a folder of Hugging Face; mmlu/ has test.jsonl and dev.jsonl
         python -m tools.evaluate RUN --tasks my_task.yaml=questions.jsonl
             a task of one's own, as lm_eval describes them
         python -m tools.evaluate RUN --tasks core=eval_bundle/ --limit 500
             nanochat's CORE
         python -m tools.evaluate RUN --text book.txt
             bits per byte of a text, which models of any tokenizer share

Expect:  the answers of lm_eval (pip install -r requirements-evaluate.txt) and
         nanochat, and a graph for each length of a row: docs/evaluation.md
"""

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro

from language.data.llmc_files import other_vocabulary
from language.data.text import TEXT, read_documents
from language.data.tokenizer import check_lost
from language.tasks.questions import Row, batched, windows
from language.tasks.scores import check_tasks, parse_tasks, read_tasks
from tpu_utils.base.errors import InputError, NonFiniteError, run_script
from tpu_utils.base.files import open_regular
from tpu_utils.base.writing import write_atomically
from tpu_utils.options.environment import choose_device, command_line
from tpu_utils.options.fields import Range
from tpu_utils.options.tool_arguments import parse_options
from tpu_utils.options.train_config import TrainConfig


@dataclass(frozen=True)
class EvaluateConfig:
    """Which model, and what it is asked."""

    run_dir: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")] = ""
    """A run of transformer_tpu.py."""
    checkpoint: Literal["newest", "best"] = "newest"
    """Checkpoint of the run. best: that of its best evaluation, which a run with --keep_best keeps."""
    hf: str = ""
    """A folder of Hugging Face instead: config.json, safetensors, tokenizer.json."""
    llmc: str = ""
    """llm.c's weights instead."""
    tasks: tuple[str, ...] = ()
    """NAME=PATH. NAME: a task or group of lm_eval, its YAML file, or core, nanochat's bundle. PATH: its questions as
    JSON lines or .parquet, or a folder with test.jsonl, validation.jsonl, train.jsonl, as the task names its splits."""
    num_fewshot: Annotated[int | None, Range("[0, inf)")] = None
    """Answered examples before each question. None: as many as the task says. core has its own numbers."""
    chat: bool = False
    """Ask as conversations, each example a question and an answer, in the format of the run's chats, or else the one
    whose special tokens the tokenizer has."""
    limit: Annotated[int, Range("[0, inf)")] = 0
    """Score only the first N questions of each task, and of each task of a group; 0 scores all."""
    text: str = ""
    """A UTF-8 text file: bits per byte of it."""
    json: str = ""
    """Write results, and what was said of each question, to this file too."""
    tokenizer: str = ""
    """bytes, gpt2, a tokenizer.json or its folder. Empty: that of the run or folder."""
    sequence_length: Annotated[int, Range("[0, inf)")] = 0
    """Tokens that the model reads at once; longer questions lose their beginning. 0: those of its config.json, or of
    its run."""
    tokens_per_step: Annotated[int, Range("[1, inf)")] = 16384
    """Tokens that are scored at a time."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Data type of weights and computation. auto: that of the run, or of the files."""
    int8: bool = False
    """Matrices in int8 with a scale for each output column."""
    device: Literal["auto", "tpu", "gpu", "cpu"] = "auto"
    """auto uses a TPU if one is attached, else the XLA CPU backend."""
    devices: Literal["one", "rows", "weights"] = "one"
    """rows: each device of this host has all weights, and scores some rows. weights: all share heads, MLP and
    vocabulary, and score the same rows. On the CPU CPU_NUM_DEVICES says how many there are."""

    def __post_init__(self):
        if bool(self.run_dir) + bool(self.llmc) + bool(self.hf) != 1:
            raise InputError("give one of RUN, --hf and --llmc")
        if not self.run_dir and self.checkpoint != "newest":
            raise InputError("checkpoint is best, but only a run has checkpoints; leave it out")
        if not self.tasks and not self.text:
            raise InputError("nothing is asked; give --tasks NAME=PATH or --text FILE")
        if self.chat and (not self.tasks or "core" in parse_tasks(self.tasks)):
            raise InputError(
                "found --chat without a task of lm_eval, or with core, whose questions are no conversations"
            )


def check_files(config: EvaluateConfig) -> None:
    """Raises InputError for files that cannot be read, DeviceError when there is no such device."""
    choose_device(TrainConfig(device=config.device))
    check_tasks(parse_tasks(config.tasks), config.num_fewshot, config.limit)
    if config.text:
        open_regular(Path(config.text), TEXT).close()
    if config.json and not Path(config.json).absolute().parent.is_dir():
        raise InputError(f"json is {config.json}, in a folder that does not exist; make it first")


if __name__ == "__main__":  # a wrong option or file is answered before the seconds that the next imports take
    config = command_line(EvaluateConfig, __doc__, check_files, parse_options)

import torch
from tqdm import tqdm

from language.models.operations import is_likeliest, losses
from language.tasks.texts import write_texts
from language.weights.sources import Source, load, open_source, sampling_mesh
from language.xla.loops import BATCH
from language.xla.shards import inputs_and_targets
from tpu_utils.device import BatchSharding, Mesh, graphs_compiled, mark_sharding, send, start_device
from tpu_utils.step.graphs import one_graph


@one_graph(each_shape=True)
def score_step(model, tokens_BS):
    """For each row: the summed loss, the number of targets, and how many of them the model finds likeliest, (B, 3)."""
    with torch.no_grad():
        inputs, targets = inputs_and_targets(model, tokens_BS)
        logits, vocab_size = model(inputs).logits, model.shape.vocab_size
        sums = losses(logits, targets, vocab_size), (targets >= 0).float(), is_likeliest(logits, targets, vocab_size)
        result = torch.stack([x.sum(1) for x in sums], 1)
        if model.mesh is not None:
            mark_sharding(result, model.mesh, (None, None))
        return result


def score(model, rows: list[Row], T: int, tokens: int, device, name: str = "") -> np.ndarray:
    """What score_step gives of each row, (rows, 3) float64. name: on a terminal a bar shows how far it is."""
    most, vocab_size = max((int(row.tokens.max()) for row in rows), default=0), model.shape.vocab_size
    if most >= vocab_size:
        raise InputError(
            f"{name or 'the questions'}: token {most}, but the model has a vocabulary of {vocab_size}; expected the "
            f"tokenizer of the model; {other_vocabulary(most + 1, vocab_size)}"
        )
    sharding = BatchSharding(model.mesh, BATCH) if model.mesh else None
    multiple = 1 if model.mesh is None else math.prod(model.mesh.shape()[axis] for axis in BATCH)
    batches, places = batched(rows, T, tokens, multiple)
    found = [score_step.compiled(model, *send(batch, device, sharding)) for batch in batches]
    bar = tqdm(found, name, leave=False, disable=None if name else True)
    scored = np.concatenate([np.zeros((0, 3)), *(result.cpu().numpy() for result in bar)])[places]
    if wrong := int((~np.isfinite(scored)).any(1).sum()):
        raise NonFiniteError(
            f"{name or 'the questions'}: of {wrong:,} of {len(rows):,} rows the loss is infinite or not a number; "
            "expected numbers; try --precision float32, or an earlier checkpoint"
        )
    return scored


def start_mesh(devices: str, source: Source) -> Mesh | None:
    """None for one device. Call it before the first tensor."""
    if devices == "one":
        return None
    return sampling_mesh(source.shape, "tensor" if devices == "weights" else "data")


def rows_of_text(path: Path, source: Source, T: int) -> tuple[list[Row], int]:
    """(rows in which each token of the text is a target once, the bytes of the text). A row has as many tokens before
    its first target as fit; before the first stands what stands before a document."""
    (content,) = read_documents(path)
    text = content.decode()
    tokens = source.tokenizer.encode(text)
    check_lost(source.tokenizer.lost(text, tokens), len(text), str(path))
    return windows([source.tokenizer.prefix if source.start is None else source.start, *tokens], T), len(content)


def main(config: EvaluateConfig) -> int:
    named = ("run_dir", "hf", "llmc", "checkpoint", "tokenizer", "precision")
    source = open_source(**{name: getattr(config, name) for name in named})
    longest = max(source.longest, source.shape.sequence_length)
    T = config.sequence_length or longest
    if longest < T:
        raise InputError(f"sequence_length is {T}, but the model reads {longest} tokens; choose {longest} or less")
    named = parse_tasks(config.tasks)
    chat = source.chat_format if config.chat else ""
    harness = read_tasks(named, source.tokenizer, T, config.num_fewshot, config.limit, chat=chat) if named else None
    rows, num_bytes = rows_of_text(Path(config.text), source, T) if config.text else ([], 0)
    device, mesh = start_device(TrainConfig(device=config.device), lambda: start_mesh(config.devices, source))
    model = load(source, device, config.int8, mesh)
    before = graphs_compiled()
    record: dict[str, Any] = dict(model=config.run_dir or config.hf or config.llmc, chat=config.chat)
    if harness:
        found = score(model, harness.rows, T, config.tokens_per_step, device, "tasks")
        texts = write_texts(model, source.tokenizer, harness.prompts, T, config.tokens_per_step, device, harness.stops)
        results = harness.results(found, texts, with_samples=True)
        print(results.pop("table"))
        record |= results
        if "core" in results["fields"]:
            print(f"core, mean of (accuracy - guessing) / (1 - guessing): {results['fields']['core']:.4f}")
    if rows:
        loss = score(model, rows, T, config.tokens_per_step, device, config.text)[:, 0].sum()
        record["bits_per_byte"] = float(loss / num_bytes / math.log(2))
        print(f"{config.text}: {record['bits_per_byte']:.4f} bits per byte of {num_bytes:,}")
    record["graphs"] = graphs_compiled() - before
    print(f"{record['graphs']} graphs", file=sys.stderr)
    if config.json:
        write_atomically(Path(config.json), json.dumps(record, indent=1, default=str).encode())
    return 0


if __name__ == "__main__":
    sys.exit(run_script(lambda: main(config), answers=True))
