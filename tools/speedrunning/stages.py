"""The commands of a speedrun, one after the other, each with a file that says it is done."""

import json
import os
import resource
import shlex
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from language.tasks.scores import parse_tasks
from tools.make_chats import ASKED
from tools.speedrunning.dial import Plan, files_of
from tpu_utils.base.errors import InputError, TrainingError
from tpu_utils.base.files import open_regular, read_json
from tpu_utils.base.restarts import ends_with_this
from tpu_utils.base.writing import checksum_of, write_atomically
from tpu_utils.options.environment import attached_chips

ROOT = Path(__file__).resolve().parent.parent.parent
QUESTIONS = ("Now is the winter of our discontent", "What say you to this, my lord?", "I pray you, tell me the truth.")


@dataclass(frozen=True)
class Stage:
    """A command of the scripts. made: a folder that the command renames into its place when it is whole, if it does
    so: a kill between that and the marker must not run it again."""

    name: str
    command: list[str]
    made: Path | None = None
    kept: bool = False
    """Whether what it prints is kept beside the marker."""
    reads: tuple[Path, ...] = ()
    """What it reads of the user's: its record says which bytes these were."""
    leaves: tuple[Path, ...] = ()
    """What it makes and later stages read: its record says so of this too."""

    @property
    def shown(self) -> str:
        words = ["python", *(["-m"] if not self.command[0].endswith(".py") else []), *self.command]
        return " ".join([*(f"{name}={value}" for name, value in variables().items()), shlex.join(words)])


ON_A_CPU = {"XLA_FLAGS": "--xla_backend_optimization_level=1", "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_MAX_": "0"}
ON_A_CPU["MALLOC_TRIM_THRESHOLD_"] = str(1 << 40)
"""XLA compiles in two thirds of the time, and steps are as fast. glibc keeps the 100 MB that a step of depth 2 takes
and gives back: fresh pages for each step were a fifth of its CPU-seconds."""


def variables() -> dict[str, str]:
    """Variables to add to a stage's environment. Variables that are already set stay as they are."""
    return {} if attached_chips() else {name: value for name, value in ON_A_CPU.items() if name not in os.environ}


def stages_of(
    plan: Plan,
    text: Path,
    chats: Path | None,
    folder: Path,
    optimizer: str,
    seed: int,
    tasks: list[str],
    of_slice: list[str],
) -> list[Stage]:
    """All stages in order. tasks: of tools.evaluate. of_slice: options of the training that a slice needs."""
    shards, chat_folder = folder / "shards", chats.parent if chats else folder / "chats"
    both = [f"--global_batch_size={plan.rows}", f"--optimizer={optimizer}", f"--seed={seed}", "--resume=auto"]
    both += [f"--sequence_length={plan.sequence_length}", "--log_every=20", "--eval_batches=1000", *of_slice]
    schedule = ["--scheduler=wsd", "--decay_fraction=0.65", "--final_learning_rate_fraction=0.05"]  # nanochat's

    def training(steps: int, rate: float) -> list[str]:
        # rounded up: the last step is always evaluated, and would be the second one within a few steps
        every = [f"--{name}={-(-steps // n)}" for name, n in (("eval_every", 4), ("save_every", 8))]
        return [f"--num_steps={steps}", f"--learning_rate={rate:.3g}", f"--warmup_steps={max(1, steps // 50)}", *every]

    pretraining = ["--dataset=tokens", f"--data_dir={shards}", "--train_data=text_train_*.bin"]
    pretraining += ["--validation_data=text_val_*.bin", f"--model_config={folder / 'config.json'}"]
    pretraining += [f"--sample_every={-(-plan.steps // 4)}", "--sample_prompts", "The", "I", *both, *schedule]
    tuning = [f"--initial_weights={folder / 'base'}", "--dataset=chat", f"--data_dir={chat_folder}", *both]
    tuning += [f"--train_data={chats.name}"] if chats else ["--train_data=train.jsonl"]
    tuning += [] if chats else ["--validation_data=held_out.jsonl"]
    tokenizer = folder / "tokenizer"
    train_tokenizer = ["tools.train_tokenizer", str(text), "--vocab_size", str(plan.vocab_size)]
    prepare = ["tools.prepare_data", str(text), "--output", str(shards / "text"), "--tokenizer", str(tokenizer)]
    ask = ["tools.generate", "--run_dir", str(folder / "finetuned"), "--temperature", "0.5", "--chat"]
    ask += questions_of(chats)
    runs, bases = (folder / "pretrained", folder / "finetuned"), (folder / "base", folder / "model")
    export = [["tools.convert_hf", "export", str(run), str(base)] for run, base in zip(runs, bases, strict=True)]
    pretrain = ["transformer_tpu.py", *pretraining, *training(plan.steps, plan.learning_rate)]
    finetune = ["transformer_tpu.py", *tuning, *training(plan.chat_steps, plan.chat_learning_rate)]
    scored = [["tools.evaluate", str(run), "--tasks", *tasks] for run in runs]
    named = parse_tasks(tasks)
    asked = (*named.values(), *(Path(name) for name in named if name.endswith(".yaml")))
    make = ["tools.make_chats", str(text), "--output", str(chat_folder)]
    made = [] if chats else [Stage("chats", make, reads=(text,), leaves=(chat_folder,))]
    weights = [(run / "checkpoints",) for run in runs]
    return [
        Stage("tokenizer", [*train_tokenizer, "--output", str(tokenizer)], None, True, (text,), (tokenizer,)),
        Stage("shards", prepare, reads=(text,), leaves=(shards,)),
        *made,
        Stage("pretrain", [*pretrain, f"--run_dir={runs[0]}"], leaves=weights[0]),
        *([Stage("evaluate_pretrained", scored[0], kept=True, reads=asked)] if tasks else []),
        Stage("base", export[0], made=bases[0], leaves=(bases[0],)),
        Stage("finetune", [*finetune, f"--run_dir={runs[1]}"], reads=(chats,) if chats else (), leaves=weights[1]),
        *([Stage("evaluate_finetuned", scored[1], kept=True, reads=asked)] if tasks else []),
        Stage("chat", ask, kept=True),
        Stage("model", export[1], made=bases[1], leaves=(bases[1],)),
    ]


def questions_of(chats: Path | None) -> list[str]:
    """What the model is asked at the end."""
    return list(QUESTIONS) if chats else [ASKED.format(line=question) for question in QUESTIONS]


def digest_of(path: Path) -> dict[str, int]:
    """How many files a path leads to, their bytes, and a CRC-32 of their names and bytes."""
    found = {"files": 0, "bytes": 0, "crc32": 0}
    for file in files_of(path):
        with open_regular(file, "what a stage reads") as opened:
            sums = checksum_of(opened)
        named = f"{file.relative_to(path)} {sums['bytes']} {sums['crc32']}\n"
        found["files"], found["bytes"] = found["files"] + 1, found["bytes"] + sums["bytes"]
        found["crc32"] = zlib.crc32(named.encode(errors="surrogateescape"), found["crc32"])
    return found


def digests_of(paths: Iterable[Path]) -> dict[str, dict[str, int]]:
    return {str(path): digest_of(path) for path in dict.fromkeys(paths)}


def check_same(title: str, was: Any, now: dict[str, dict[str, int]]) -> None:
    """Raises InputError where what a stage has read or made is not what is there now. was: of its record, as JSON."""
    for name in now.keys() & was.keys() if isinstance(was, dict) else ():
        if was[name] != now[name]:
            raise InputError(
                f"{name} is not what {title} has read or made: it was {was[name]!s:.80}, now {now[name]}; put the "
                "former one back, or begin anew in another --run_dir"
            )


def marker_of(folder: Path, name: str) -> Path:
    return folder / "stages" / f"{name}.json"


def run_stages(stages: list[Stage], folder: Path) -> int:
    """Runs those that are not done. Returns 0, or the exit code of a stage that was stopped by a signal. Raises
    TrainingError when a stage fails, InputError when it refuses its input or a stage has read another one."""
    (folder / "stages").mkdir(parents=True, exist_ok=True)
    there = digests_of(path for stage in stages for path in stage.reads)
    # what somebody has removed, for room, is named by the stage that needs it
    there |= digests_of(path for stage in stages for path in stage.leaves if path.exists())
    for number, stage in enumerate(stages, 1):
        marker, title = marker_of(folder, stage.name), f"stage {number} of {len(stages)}, {stage.name}"
        if marker.exists():
            check_same(title, read_json(marker, "the marker of a stage").get("read"), there)
            print(f"{title}: done before", flush=True)
            continue
        print(f"\n{title}\n$ {stage.shown}", flush=True)
        began = time.monotonic()
        spent = cpu_seconds()
        printed = ""
        if stage.made is None or not stage.made.exists():
            code, printed = run_stage(stage)
            if code in (129, 130, 143):
                print(f"{title}: stopped; the same command goes on from here", flush=True)
                return code
            if code:
                error = InputError if code == 2 else TrainingError
                raise error(f"{title} ended with exit code {code}; repair what it says, and repeat the command")
        read = digests_of(stage.reads)
        check_same(title, there, read)  # while it ran
        read |= digests_of(stage.leaves)
        done = {"command": stage.shown, "seconds": time.monotonic() - began, "printed": printed, "read": read}
        done |= {"cpu_seconds": cpu_seconds() - spent}
        write_atomically(marker, json.dumps(done, indent=1).encode())
    return 0


def cpu_seconds() -> float:
    """CPU-seconds of all stages that this process has waited for. On a busy machine they are fewer than the seconds on
    the clock."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run_stage(stage: Stage) -> tuple[int, str]:
    """(exit code, what it printed if that is kept). Signals to this process go on to the script, which saves. What ends
    without one, by kill -9 or for lack of memory, ends the script and what that has started too."""
    environment = os.environ | variables() | {"PYTHONUNBUFFERED": "1"}
    command = [sys.executable, *([] if stage.command[0].endswith(".py") else ["-m"]), *stage.command]
    output = subprocess.PIPE if stage.kept else None
    child = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, text=True, **ends_with_this())
    before = {}
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        before[number] = signal.signal(number, lambda n, _: child.send_signal(n))
    try:
        printed, _ = child.communicate()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    print(printed or "", end="", flush=True)
    code = child.returncode if child.returncode >= 0 else 128 - child.returncode
    return code, printed or ""


def results_of(folder: Path, stages: list[Stage]) -> dict[str, dict]:
    """What the marker of each stage says, by name."""
    return {stage.name: read_json(marker_of(folder, stage.name), "the marker of a stage") for stage in stages}
