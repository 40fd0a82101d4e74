"""From a text to a model that answers, with one dial: the depth.

Run:     python -m tools.speedrun --depth 2 --text corpus.txt --run_dir runs/d2
             tokenizer, shards, pre-training with Muon, fine-tuning on
             conversations, answers, an export, a report; with --tasks
             core=DIR also evaluations
         python -m tools.speedrun --depth 12 --text corpus/ \\
             --run_dir runs/d12 --slice v6e-8 --price 2.70 --cost_only
             what the TPU compiler says of hours and dollars, and no more

Stages:  each is a command of the scripts, which is printed. Killed anywhere,
         the same command goes on where it was. The end is
         RUN_DIR/report.md.
"""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from language.data.chat import read_chats
from language.data.text import read_documents, split_documents
from language.data.tokenizer import LARGEST_VOCAB_SIZE
from language.tasks.scores import check_tasks, parse_tasks
from tools.make_chats import chats_of_parts
from tools.speedrunning.dial import Plan, bytes_of, make_plan
from tools.speedrunning.one_page import write_report
from tools.speedrunning.price import TRAININGS, ask_compiler, lines_of_price, options_of_slice, with_changes
from tools.speedrunning.stages import questions_of, results_of, run_stages, stages_of
from tools.train_tokenizer import SMALLEST, train_tokenizer
from tpu_utils.base.errors import InputError, run_script
from tpu_utils.base.files import read_json
from tpu_utils.base.writing import write_atomically
from tpu_utils.options.fields import Range
from tpu_utils.options.tool_arguments import parse_options

CHAT_BYTES = 400_000  # size of what tools.make_chats makes, at most


@dataclass(frozen=True)
class SpeedrunConfig:
    """What to train, and on what."""

    depth: Annotated[int, Range("[1, 64]")]
    """Layers. Width, heads, context, tokens, batch and learning rates follow from it."""
    text: Path
    """A UTF-8 text file, or a folder of them. Its last tenth is held out."""
    run_dir: Path
    """Output folder. A speedrun that was begun there with the same options is continued."""
    chats: Path | None = None
    """Conversations in JSON lines. None: made of the text by tools.make_chats."""
    tasks: tuple[str, ...] = ()
    """NAME=PATH of tools.evaluate, such as core=eval_bundle/: both trained models are scored on them."""
    optimizer: Literal["muon", "adamw"] = "muon"
    """Optimizer of both trainings."""
    seed: Annotated[int, Range("[0, 4294967295]")] = 0
    """Seed of both trainings."""
    vocab_size: int = 0
    """Tokens of the tokenizer. 0: as many as the text's size asks for."""
    most_steps: Annotated[int, Range("[0, inf)")] = 0
    """Most steps of each training, for a rehearsal. 0: as many as follow from the depth."""
    slice: str = ""
    """A TPU slice such as v6e-8: its compiler is asked for hours and dollars before anything runs."""
    price: Annotated[float, Range("[0, inf)")] = 0.0
    """Price of the slice in dollars per chip and hour."""
    search_minutes: Annotated[float, Range("[0, inf)")] = 30.0
    """Minutes to search once for mesh and micro-batches on the slice. 0: take the first mesh that fits, one compile."""
    cost_only: bool = False
    """Ask the compiler of the slice, and end there."""


def check(config: SpeedrunConfig) -> None:
    """Raises InputError."""
    if config.vocab_size and not SMALLEST <= config.vocab_size <= LARGEST_VOCAB_SIZE:
        raise InputError(f"vocab_size is {config.vocab_size}; expected {SMALLEST} to {LARGEST_VOCAB_SIZE}, or 0")
    if (config.price or config.cost_only) and not config.slice:
        raise InputError("price and cost_only have no effect without --slice; name one, such as --slice v6e-8")
    check_tasks(parse_tasks(config.tasks))
    if not os.path.lexists(config.text):
        raise InputError(f"text is {config.text}: no such file or folder")
    if not bytes_of(config.text):
        raise InputError(f"text is {config.text}: found nothing in it; expected UTF-8 text")
    if config.run_dir.exists() and not config.run_dir.is_dir():
        raise InputError(f"run_dir is {config.run_dir}, a file; expected a folder, or a new name")


def check_text(text: Path, plan: Plan, chats: Path | None) -> None:
    """Raises InputError for a text that a stage would refuse as too short. Only where that may be it is tokenized."""
    needed = plan.rows * plan.sequence_length + 1
    if bytes_of(text) > 100 * needed:  # a tenth is held out; no tokenizer has ten bytes in a token
        return
    documents = read_documents(text)
    training, held_out = split_documents(documents)
    tokenizer = train_tokenizer((part.decode() for part in training), plan.vocab_size)
    for name, parts in (("training", training), ("held-out", held_out)):
        tokens = sum(1 + len(tokenizer.encode(part.decode(), add_special_tokens=False).ids) for part in parts)
        if tokens < needed:
            raise InputError(
                f"text is {text}: its {name} part has {tokens:,} tokens, expected {needed:,} or more, one batch of "
                f"{plan.rows} x {plan.sequence_length}; give a longer text, or a smaller --depth"
            )
    if not chats:
        chats_of_parts(text, documents, 1, 0)


def absolute(tasks: tuple[str, ...]) -> list[str]:
    return [f"{name}={path}" for name, path in parse_tasks(tasks, Path.cwd()).items()]


def keep_settings(config: SpeedrunConfig, folder: Path, plan: Plan) -> None:
    """Raises InputError for a folder that was begun with others."""
    own = dict(depth=config.depth, text=str(config.text.resolve()), optimizer=config.optimizer, seed=config.seed)
    own |= dict(chats=config.chats and str(config.chats.resolve()), most_steps=config.most_steps, slice=config.slice)
    own |= dict(tasks=absolute(config.tasks), vocab_size=plan.vocab_size, search_minutes=config.search_minutes)
    own |= dict(tokens=plan.tokens)  # another text would be other tokens
    path = folder / "speedrun.json"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "config.json", json.dumps(plan.model, indent=1).encode())
        write_atomically(path, json.dumps(own, indent=1).encode())
        return
    found = read_json(path, "the settings of a speedrun")
    changed = [f"{name} {found.get(name)!r}, now {value!r}" for name, value in own.items() if found.get(name) != value]
    if changed:
        raise InputError(f"{folder} was begun with {'; '.join(changed)}; give the same, or another --run_dir")


def print_plan(plan: Plan) -> None:
    width, heads = plan.model["hidden_size"], plan.model["num_attention_heads"]
    print(f"depth      {plan.depth}: width {width}, {heads} heads of 128, context {plan.sequence_length}, ", end="")
    print(f"vocabulary {plan.vocab_size:,}, {plan.parameters:,} parameters")
    steps = f"{plan.steps} steps of {plan.rows} x {plan.sequence_length}"
    print(f"pretrain   {plan.tokens:,} tokens: {steps}, learning rate {plan.learning_rate:.3g}")
    print(f"finetune   {plan.chat_steps} steps, learning rate {plan.chat_learning_rate:.3g}", flush=True)


def main() -> int:
    config = parse_options(SpeedrunConfig, __doc__)
    check(config)
    text, folder = config.text.resolve(), config.run_dir.resolve()
    chats = config.chats and config.chats.resolve()
    if chats:
        read_chats(chats)  # a wrong line is named now, not after hours
    size = bytes_of(text)
    chat_bytes = chats.stat().st_size if chats else min(size // 4, CHAT_BYTES)
    plan = make_plan(config.depth, size, chat_bytes, config.most_steps, config.vocab_size)
    of_slice = options_of_slice(plan, config.slice)
    if not (folder / "speedrun.json").exists():
        check_text(text, plan, chats)
    keep_settings(config, folder, plan)
    print_plan(plan)
    price = None
    given = plan, text, chats, folder, config.optimizer, config.seed, absolute(config.tasks)
    stages = stages_of(*given, of_slice)
    if config.slice:
        trainings = {stage.name: stage for stage in stages if stage.name in TRAININGS}
        price = ask_compiler(trainings, plan, config.slice, config.price, config.search_minutes, folder)
        print("\n".join(lines_of_price(price)), flush=True)
        stages = stages_of(*given, with_changes(of_slice, price.changes))
    if config.cost_only:
        return 0
    if code := run_stages(stages, folder):
        return code
    print(write_report(folder, text, plan, results_of(folder, stages), questions_of(chats), price))
    print(f"{folder / 'report.md'}: the report, with report.png beside it")
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main))
