"""What a run says of itself: metrics.jsonl, TensorBoard, progress lines, summary."""

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from tpu_utils.base.writing import write_atomically

SHORT = {  # how a value stands in a train line
    "loss": "loss {:.4f}",
    "gradient_norm": "norm {:.3f}",
    "largest_gradient_norm": "largest {:.3f}",
    "skipped_steps": "skipped {}",
    "learning_rate": "lr {:.2e}",
}

BESIDE = {"host_to_device_uploads_per_step": "uploads", "device_to_host_reads_per_step": "reads"}
"""Beside the batch; a right run has none."""


class RunLog:
    """metrics.jsonl, TensorBoard, the progress bar and the printed lines of a run.

    On resume, lines and events after first_step are dropped: they will be written again. Damaged lines are dropped too,
    and named in one warning; an unfinished last line, left by a kill, is dropped silently. The others keep every byte.
    silent: write and print nothing; set on all processes but the first.
    before: num_steps before the resumption, where it was another. Raises InputError when metrics.jsonl is there and is
    no regular file.
    """

    def __init__(
        self, run_dir: Path, first_step: int, num_steps: int, tensorboard: bool, silent: bool = False, before: int = 0
    ):
        self._silent, self._run_dir = silent, run_dir
        self._path = Path(os.devnull) if silent else run_dir / "metrics.jsonl"
        if not silent and self._path.exists():
            from tpu_utils.record.records import lines_to_keep  # only here: a new run has none

            write_atomically(self._path, lines_to_keep(self._path, first_step, max(num_steps, before)))
        self._file = self._path.open("a", buffering=1)
        self.events = None  # TensorBoard's writer, None where there is none
        if tensorboard and not silent:
            from tpu_utils.record.events import Events  # only here: it imports TensorBoard

            self.events = Events(run_dir / "tensorboard", first_step)
        # a terminal gets a bar on stderr; a pipe or a file gets the lines alone, and so does a job in the background,
        # whose bar would be drawn over that of the one in front
        self._bar = tqdm(
            total=num_steps,
            initial=first_step,
            unit="step",
            dynamic_ncols=True,
            # steps per second stand in the lines; without them 40 columns are enough for a day and 99,999 steps
            bar_format="{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}]",
            disable=silent or not _in_front_of_a_terminal(),
        )

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, *exception) -> None:
        self._bar.close()
        self._file.close()
        if self.events:
            self.events.close()

    def advance(self) -> None:
        """One step was dispatched: moves the bar, waits for nothing."""
        self._bar.update()

    def train(self, step: int, values: dict[str, float], speed: dict[str, float | None]) -> None:
        """A train line. values: loss and whatever else is to be seen. speed: of Speed.measure()."""
        self.write("train", step, **values, **speed)
        shown = {name: value for name, value in values.items() if value or name != "skipped_steps"}
        columns = [SHORT.get(name, f"{name} {{:.4g}}").format(value) for name, value in shown.items()]
        if speed["step_seconds"] is not None:
            rate = next(name for name in speed if name.endswith("_per_second"))
            columns.append(f"{speed['step_seconds'] * 1e3:.1f} ms/step")
            columns.append(f"{speed[rate]:.0f} {rate.removesuffix('_per_second')}/s")
            columns.append(f"data wait {speed['data_wait_seconds'] * 1e3:.1f} ms")
        columns += [f"{word} {speed[name]:.3g}/step" for name, word in BESIDE.items() if speed.get(name)]
        if speed["mfu"] is not None:
            columns.append(f"mfu {speed['mfu']:.1%}")
        self._print(step, *columns)

    def evaluation(self, step: int, **fields: float) -> None:
        self.write("eval", step, **fields)
        shown = (f"{name} {value:.4f}" for name, value in fields.items() if not isinstance(value, list))
        self._print(step, *shown)

    def sample(self, step: int, **fields: Any) -> None:
        self.write("sample", step, **fields)
        self._print(step, f"{fields['prompt']!r}: {fields['text']!r}")

    def checkpoint(self, step: int, **fields: float) -> None:
        """A checkpoint line. fields: wait_seconds of the step loop. Call it before the checkpoint is written: all lines
        are on disk before a checkpoint says their steps are done."""
        self.write("checkpoint", step, **fields)
        if not self._silent:
            os.fsync(self._file.fileno())

    def summary(self, config: dict[str, Any], summary: dict[str, Any]) -> None:
        """summary.json, and in TensorBoard the options beside the results, and the goodput split in seconds."""
        if self._silent:
            return
        write_atomically(self._run_dir / "summary.json", json.dumps(summary, indent=2).encode())
        if self.events:
            self.events.summary(config, summary)

    def write(self, kind: str, step: int, **fields: Any) -> None:
        """One JSON object; numbers and samples also go to TensorBoard. Non-finite numbers become null in JSON."""
        if self.events:
            self.events.record(kind, step, fields)
        for name, value in fields.items():
            if isinstance(value, int | float) and not math.isfinite(value):
                fields[name] = None
        self._file.write(json.dumps({"kind": kind, "step": step, **fields}) + "\n")

    def _print(self, step: int, *columns: str) -> None:
        if self._silent:
            return
        # above the bar on a terminal, a plain line elsewhere
        self._bar.write("  ".join([f"step {step:6d}/{self._bar.total}", *columns]))
        sys.stdout.flush()


def _in_front_of_a_terminal() -> bool:
    """Whether stderr is a terminal, and this process is not one of its background jobs."""
    if not sys.stderr.isatty():
        return False
    try:
        return os.tcgetpgrp(sys.stderr.fileno()) == os.getpgrp()
    except OSError:  # the terminal of another session: it has no jobs of ours
        return True


def print_summary(summary: dict[str, Any]) -> None:
    """The last lines of every script: results, graphs, skipped updates, unexpected uploads, seconds of each phase."""
    known = ("steps", "train_graphs", "eval_graphs", *BESIDE, "seconds")
    known += ("skipped_steps", "best_step", "hbm_peak_bytes")
    results = [
        f"{name.replace('_', ' ')} {value:.4f}"
        for name, value in summary.items()
        if name not in known and isinstance(value, int | float)
    ]
    if results:
        print(f"result     {', '.join(results)}")
    if summary.get("best_step") is not None:
        print(f"best       the evaluation of step {summary['best_step']}, whose checkpoint is kept")
    print(f"graphs     {summary['train_graphs']} train, {summary['eval_graphs']} eval")
    if summary.get("hbm_peak_bytes"):
        print(f"memory     at most {summary['hbm_peak_bytes'] / 2**30:.2f} GiB per device")
    if summary["skipped_steps"]:
        print(f"skipped    {summary['skipped_steps']} of {summary['steps']} updates, which were not finite")
    for name in (name for name in BESIDE if summary.get(name)):
        print(
            f"{BESIDE[name]:10} {summary[name]:.3g} a step beside the batch: the numbers are right, but each makes the "
            "host or the device wait; a line above names the code, and --strict stops there"
        )
    split = ", ".join(f"{name} {seconds:.1f}" for name, seconds in summary["goodput"].items())
    print(f"seconds    {summary['seconds']:.1f}: {split}", flush=True)
