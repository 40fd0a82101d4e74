"""What a speedrun would cost on a slice, by the TPU compiler's reports on its training steps."""

import dataclasses
import json
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from language.options.transformer_options import TransformerConfig
from tools.speedrunning.dial import Plan
from tools.speedrunning.stages import ROOT, Stage
from tpu_compiler.decide.fastest import FIELDS, WITH_REMAT, with_change
from tpu_compiler.decide.search import option_name
from tpu_utils.base.errors import InputError
from tpu_utils.base.files import read_json
from tpu_utils.base.hardware import parse_topology
from tpu_utils.base.restarts import ends_with_this
from tpu_utils.base.writing import write_atomically

KEPT = ("fits", "reason", "predicted_ms", "predicted_ms_all_hidden", "settings", "limit_bytes", "peak_bytes")
"""Fields of a report that are kept."""
TRAININGS = ("pretrain", "finetune")
ROWS_OF_A_DEVICE = 16  # each 2,048 tokens, at a time


@dataclass(frozen=True)
class Price:
    """Cost of the trainings, by their names."""

    topology: str
    chips: int
    dollars: float
    """An hour and chip. 0: unknown."""
    steps: dict[str, str]
    """What the compiler says of one step: predicted milliseconds, with what nothing hides of communication; memory."""
    seconds: dict[str, float]
    """Seconds of each training, counting its steps alone."""
    changes: dict[str, Any]
    """Fields of both with what a search found for them: mesh, micro-batches, and what else it may change."""

    def dollars_of(self, seconds: float) -> float:
        return seconds / 3600 * self.chips * self.dollars


def options_of_slice(plan: Plan, topology: str) -> list[str]:
    """What the trainings need there. Raises InputError where the batch does not divide over the devices."""
    if not topology:
        return []
    try:
        devices = parse_topology(topology).num_devices
    except ValueError as error:
        raise InputError(f"slice: {error}") from error
    if plan.rows % devices:
        raise InputError(
            f"slice is {topology}, {devices} devices, but the batch of depth {plan.depth} has {plan.rows} sequences; "
            f"choose a slice of at most {plan.rows} devices, or a greater depth"
        )
    parts = max(1, plan.rows // devices * plan.sequence_length // (ROWS_OF_A_DEVICE * 2048))
    options = ["--precision=bfloat16", f"--gradient_accumulation_steps={parts}"]
    return [*options, "--attention=flash"] if plan.sequence_length % 128 == 0 else options


def question_of(stage: Stage) -> list[str]:
    """The options of a training that say what its step is. Its weights are not there yet."""
    left_out = ("--resume", "--sample", "--run_dir", "--initial_weights")
    return [word for word in stage.command[1:] if word.startswith("--") and not word.startswith(left_out)]


def ask(stage: Stage, question: list[str], folder: Path) -> dict[str, Any]:
    """aot_tpu.py's answer about the step of a training, kept in the folder. Raises InputError where there is none."""
    path = folder / "price.json"
    kept = read_json(path, "the compiler's answers") if path.exists() else {}
    found = kept.get(stage.name)
    if not isinstance(found, dict) or found.get("question") != question or not found.keys() >= {*KEPT}:
        print(f"$ {shlex.join(['python', *question])}", flush=True)
        command = [sys.executable, *question]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, **ends_with_this())
        if done.returncode == 2 or not done.stdout.strip():
            raise InputError(f"the compiler cannot be asked about {stage.name}: see what aot_tpu.py says above")
        reports = json.loads(done.stdout)
        if not reports:  # as a search may end
            raise InputError(f"no setting of {stage.name} fits that --search tried; choose a larger slice")
        found = {"question": question, **{name: reports[0][name] for name in KEPT}}
        write_atomically(path, json.dumps(kept | {stage.name: found}, indent=1).encode())
    return found


def ask_compiler(
    stages: dict[str, Stage], plan: Plan, topology: str, dollars: float, minutes: float, folder: Path
) -> Price:
    """Price of the trainings: the search finds pre-training's setting, and fine-tuning is asked about with it. Each is
    asked once and kept in the folder. minutes: of the search; 0: none. Raises InputError for a step that does not fit.
    """
    script = ["aot_tpu.py", "transformer_tpu.py", "--topology", topology, "--json"]
    searched = ["--search", "--minutes", f"{minutes:g}"] if minutes else []
    counts = dict(pretrain=plan.steps, finetune=plan.chat_steps)
    changes = {}
    steps = {}
    seconds = {}
    for name, stage in stages.items():
        if name == "pretrain":
            found = ask(stage, [*script, *question_of(stage), *searched], folder)
            changes = changes_of(found["settings"], stage) if minutes else {}
        else:
            question = with_changes(question_of(stage), changes)
            found = ask(stage, [*script, *question, f"--model_config={folder / 'config.json'}"], folder)
        if not found["fits"]:
            raise InputError(
                f"{name} of depth {plan.depth} does not fit {topology}: {found['reason']}; choose a larger slice"
            )
        memory = f"{found['peak_bytes'] / 2**30:.2f} of {found['limit_bytes'] / 2**30:.2f} GiB"
        milliseconds = found["predicted_ms_all_hidden"] or found["predicted_ms"]
        steps[name] = f"predicted, {milliseconds:.4g} ms a step, {memory}"
        seconds[name] = counts[name] * milliseconds / 1e3
    return Price(topology, parse_topology(topology).num_chips, dollars, steps, seconds, changes)


def changes_of(settings: dict[str, Any], stage: Stage) -> dict[str, Any]:
    """Fields that a search may change, where the value is not the script's default or the stage gives one."""
    default = {field.name: field.default for field in dataclasses.fields(TransformerConfig)}
    given = {option_name(word) for word in stage.command if word.startswith("--")}
    names = [name for name in FIELDS if name in settings and (settings[name] != default[name] or name in given)]
    without = {"global_batch_size", *(() if settings.get("remat") else WITH_REMAT)}  # the batch is the depth's
    return {name: settings[name] for name in names if name not in without}


def with_changes(options: list[str], changes: dict[str, Any]) -> list[str]:
    for name, value in changes.items():
        options = with_change(options, name, value)
    return options


def lines_of_price(price: Price) -> list[str]:
    """A table of Markdown: the trainings."""
    found = ", ".join(f"{name} {value}" for name, value in price.changes.items())
    rows = [f"found by a search for {price.topology}: {found}", ""] if found else []
    rows += ["| | hours | dollars | from |", "|---|---|---|---|"]
    for name, seconds in price.seconds.items():
        cost = f"{price.dollars_of(seconds):.2f}" if price.dollars else "-"
        rows.append(f"| {name} on {price.topology} | {seconds / 3600:.3f} | {cost} | {price.steps[name]} |")
    return rows
