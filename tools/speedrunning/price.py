"""What a speedrun would cost on a slice, by the TPU compiler's report on its training step."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tools.speedrunning.dial import Plan
from tools.speedrunning.stages import ROOT, Stage
from tpu_utils.errors import InputError
from tpu_utils.files import read_json, write_atomically
from tpu_utils.hardware import parse_topology

ROWS_OF_A_DEVICE = 16  # of 2,048 tokens, at a time
PUBLISHED = (
    ("nanochat d20, 8 H100", 4.0, 96.0, "its README of January 2026: about 4 hours at $24, the whole speedrun"),
    ("nanochat d24, 8 H100", 3.04, 73.0, "its leaderboard, row 1, 348fbb3: pre-training; $24 an hour"),
    ("nanochat d24, 8 H100", 1.65, 39.6, "its leaderboard, row 6, a825e63: ratio 8, fp8; $24 an hour"),
    ("nanochat-jax d24, v6e-8", 5.0, None, "karpathy/nanochat issue 284, tucan9389: pre-training"),
)
"""What it is, hours, dollars, where it says so. None: no price is given there."""


@dataclass(frozen=True)
class Price:
    """Of the two trainings. milliseconds: of a step, predicted; of fine-tuning taken as that of pre-training, whose
    shapes it has."""

    topology: str
    chips: int
    dollars: float
    """An hour and chip. 0: unknown."""
    milliseconds: float
    memory: str
    seconds: dict[str, float]
    """Of each training, steps alone."""

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


def ask_compiler(stage: Stage, plan: Plan, topology: str, dollars: float, folder: Path) -> Price:
    """Asked once and kept in the folder. Raises InputError for a step that does not fit."""
    kept = folder / "price.json"
    command = [word for word in stage.command[1:] if not word.startswith(("--resume", "--sample"))]
    command = [word for word in command if word.startswith("--") and not word.startswith("--run_dir")]
    question = ["aot_tpu.py", "transformer_tpu.py", "--topology", topology, "--json", *command]
    found = read_json(kept, "the compiler's answer") if kept.exists() else {}
    if found.get("question") != question:
        print(f"$ python {' '.join(question)}", flush=True)
        done = subprocess.run([sys.executable, *question], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        if done.returncode == 2 or not done.stdout.strip():
            raise InputError(f"the compiler cannot be asked about {topology}: see what aot_tpu.py says above")
        report = json.loads(done.stdout)[0]
        found = {"question": question, **{name: report[name] for name in ("fits", "reason", "predicted_ms")}}
        found["gib"] = min(report["compiler_peak_bytes"] or report["peak_bytes"], report["peak_bytes"]) / 2**30
        found["limit_gib"] = report["limit_bytes"] / 2**30
        write_atomically(kept, json.dumps(found, indent=1).encode())
    if not found["fits"]:
        raise InputError(f"depth {plan.depth} does not fit {topology}: {found['reason']}; choose a larger slice")
    asked, step = parse_topology(topology), found["predicted_ms"]
    return Price(
        topology=topology,
        chips=asked.num_devices // asked.hardware.devices_per_chip,
        dollars=dollars,
        milliseconds=step,
        memory=f"{found['gib']:.2f} of {found['limit_gib']:.2f} GiB",
        seconds={"pretrain": plan.steps * step / 1e3, "finetune": plan.chat_steps * step / 1e3},
    )


def lines_of_price(price: Price) -> list[str]:
    """A table of Markdown: the trainings, and what is published beside them."""
    rows = ["| | hours | dollars | from |", "|---|---|---|---|"]
    for name, seconds in price.seconds.items():
        cost = f"{price.dollars_of(seconds):.2f}" if price.dollars else "-"
        what = f"predicted, {price.milliseconds:.1f} ms a step, {price.memory}"
        rows.append(f"| {name} on {price.topology} | {seconds / 3600:.3f} | {cost} | {what} |")
    for name, hours, dollars, source in PUBLISHED:
        rows.append(f"| {name} | {hours} | {'-' if dollars is None else f'{dollars:.0f}'} | {source} |")
    return rows
