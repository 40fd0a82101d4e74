"""The machine that is measured, child processes, and the record of what is done."""

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tpu_compiler.estimate.calibration import CALIBRATION, FORMAT, SHORTEST_MS, is_held_up
from tpu_utils.base.errors import DeviceError, InputError, TrainingError
from tpu_utils.base.files import parse_json, read_json
from tpu_utils.base.hardware import parse_topology
from tpu_utils.base.restarts import ends_with_this
from tpu_utils.base.writing import write_atomically
from tpu_utils.options.environment import attached_chips
from tpu_utils.options.variables import MOST_DEVICES
from tpu_utils.remote.hosts import chips_in, family, settle_hosts

ROOT = Path(__file__).resolve().parent.parent.parent


MISSING = "not installed"


class Cannot(Exception):
    """This cannot be measured here; the message says why."""


@dataclass(frozen=True)
class Machine:
    """What was measured, with its versions and commit. If any of it differs, earlier figures do not count."""

    device: str  # tpu or cpu
    chip: str  # v5e, or cpu
    slice: str  # what steps are predicted for; "" where the compiler has no such slice
    num_devices: int
    versions: dict[str, str]
    commit: str


def version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return MISSING


def find_machine(device: str, root: Path) -> Machine:
    """Raises DeviceError when a TPU is asked for and none is there, InputError for a slice of several hosts."""
    chips = attached_chips(root / "sys/bus/pci/devices")
    if device == "tpu" and not chips:
        raise DeviceError("found no TPU chip on this machine; run it on a TPU VM, or rehearse with --device cpu")
    versions = {"python": sys.version.split()[0]}
    versions |= {name: version_of(name) for name in ("torch", "torch_xla", "libtpu", "jax")}
    if device == "cpu" or not chips:
        said = os.environ.get("CPU_NUM_DEVICES", "1")
        if not said.isdecimal() or not 0 < (count := int(said)) <= MOST_DEVICES:
            raise InputError(f"CPU_NUM_DEVICES is {said!r:.50}; expected a number from 1 to {MOST_DEVICES}")
        return Machine("cpu", "cpu", f"v5litepod-{count}" if count in (1, 4, 8) else "", count, versions, find_commit())
    if visible := os.environ.get("TPU_VISIBLE_CHIPS"):
        raise InputError(
            f"TPU_VISIBLE_CHIPS is {visible!r:.50}: processes would see a part of the {len(chips)} chips here; "
            "expected all of them; unset it"
        )
    chip, environment = chips[0], dict(os.environ)  # a copy: each child settles its own
    _, hosts = settle_hosts(chips, environment)
    kind = environment.get("TPU_ACCELERATOR_TYPE")
    if len(hosts) > 1 or (kind and chips_in(kind, chip) not in (0, len(chips))):
        raise InputError(
            f"this host has {len(chips)} chips of {kind or 'a slice'}, which has {len(hosts)} hosts; expected a slice "
            "of one host, whole; calibrate on one such as v5litepod-8, v6e-8 or v4-8"
        )
    name, each = family(chip)
    try:
        # newest_only: PyTorch/XLA's libtpu cannot compile for it, so nothing is predicted
        topology = None if chip.newest_only else parse_topology(f"{name}-{len(chips) * each}")
    except ValueError:  # no slice has so many chips
        topology = None
    devices = len(chips) * chip.devices_per_chip
    return Machine("tpu", chip.name, topology.name if topology else "", devices, versions, find_commit())


def find_commit() -> str:
    """Git commit of this code, with "-changed" if files differ from it; "unknown" outside a clone."""
    head, changed = "rev-parse --short=12 HEAD", "status --porcelain --untracked-files=no"
    run = partial(subprocess.run, cwd=ROOT, capture_output=True, text=True, check=True)
    try:
        commit, changes = (run(["git", *words.split()]).stdout for words in (head, changed))
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit.strip() + ("-changed" if changes else "")


def start_child(command: list[str], out: Path, err: Path, changes: dict[str, str]) -> subprocess.Popen:
    """`python COMMAND` in this folder. It dies with this process: nothing may hold the chip when this is killed."""
    with out.open("wb") as stdout, err.open("wb") as stderr:
        return subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env=os.environ | changes,
            stdout=stdout,
            stderr=stderr,
            **ends_with_this(),
        )


class Bench:
    """The machine, the output folder, and what is measured so far."""

    def __init__(self, machine: Machine, folder: Path, time_limit: float):
        """Raises InputError when the folder cannot be written, or another calibration works there."""
        self.machine = machine
        self.folder = folder
        self.time_limit = time_limit
        self.measurements = {}
        self.file, self.runs = folder / CALIBRATION.name, folder / "runs"
        try:
            (folder / "logs").mkdir(parents=True, exist_ok=True)
            self._lock = (folder / "lock").open("w")
        except OSError as error:
            raise InputError(f"{folder} cannot be written: {error.strerror}; name another --output") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise InputError(f"another calibration works in {folder}; wait for it, or name another --output") from error
        if not self.file.exists():
            return
        found = read_json(self.file, "a calibration of tools.calibrate", 1 << 24)
        if found.get("machine") == asdict(machine) and isinstance(found.get("measurements"), dict):
            self.measurements = found["measurements"]
        else:
            aside = self.file.with_stem(f"calibration_before_{int(time.time())}")
            self.file.rename(aside)
            print(f"machine    another chip, version or commit than in {self.file}, which is now {aside.name}")

    def record(self, name: str, record: dict[str, Any]) -> None:
        self.measurements[name] = record
        content = dict(
            format=FORMAT, machine=asdict(self.machine), ratios=self.ratios(), measurements=self.measurements
        )
        write_atomically(self.file, json.dumps(content, indent=1).encode())

    def ratios(self) -> dict[str, float]:
        """Measured over predicted milliseconds of each step that has both; none on a CPU, whose time is no TPU's, and
        none of a step that waits for its host or its data: that says nothing of the prediction."""
        found = {}
        for name, asked, measured in steps_in(self.measurements) if self.machine.device == "tpu" else ():
            if measured and (asked.get("predicted_ms") or 0) >= SHORTEST_MS and not is_held_up(measured):
                found[name] = measured["ms"] / asked["predicted_ms"]
        return found

    def figures(self, name: str) -> dict[str, Any] | None:
        """What was measured under this name; None before it is done."""
        return self.measurements.get(name, {}).get("figures")

    def logs(self, name: str) -> tuple[Path, Path]:
        """Files for what a child prints on stdout and stderr."""
        out, err = (self.folder / "logs" / f"{name.replace(' ', '_')}.{kind}" for kind in ("out", "err"))
        return out, err

    def start(self, name: str, command: list[str], **changes: str) -> subprocess.Popen:
        return start_child(command, *self.logs(name), changes)

    def child(self, name: str, command: list[str], codes: tuple[int, ...] = (0,), **changes: str) -> str:
        """What `python COMMAND` printed. Raises TrainingError for another exit code, and after time_limit."""
        (out, err), process = self.logs(name), self.start(name, command, **changes)
        try:
            code = process.wait(self.time_limit)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise TrainingError(f"{command[0]} did not end within {self.time_limit:g} s; see {err}") from None
        if code not in codes:
            said = [line for line in err.read_text(errors="replace").splitlines() if line.strip()]
            said = [line for line in said if line.startswith("error: ")][-1:] or said[-1:]
            raise TrainingError(f"{command[0]} ended with {code}: {' '.join(said)[:400]}; see {err}")
        return out.read_text(errors="replace")

    def options(self, options: str) -> list[str]:
        steps = 20 if self.machine.device == "cpu" else 50
        devices = self.machine.num_devices
        values = dict(batch=8 * devices, devices=devices, steps=steps, mnist=self.folder / "mnist")
        return [word.format(**values) for word in options.split()]

    def run_dir(self, name: str) -> Path:
        """The folder of a new run. What an interrupted run left there is deleted."""
        folder = self.runs / name.replace(" ", "_")
        shutil.rmtree(folder, ignore_errors=True)
        return folder

    def training(self, script: str, options: str, run_dir: Path, device: str = "") -> list[str]:
        where = [f"--device={device or self.machine.device}", f"--run_dir={run_dir}", "--no_tensorboard"]
        return [script, *self.options(options), *where]

    def train(self, name: str, script: str, options: str, device: str = "") -> tuple[dict, list[dict]]:
        """summary.json and the lines of metrics.jsonl of a new run. device: another one than is measured."""
        run_dir = self.run_dir(name)
        self.child(name, self.training(script, options, run_dir, device))
        return results_in(run_dir)


def steps_in(measurements: dict[str, Any]) -> Iterator[tuple[str, dict, dict]]:
    """(name, figures of the estimate, figures measured) of each step that has one of them; {} for what is missing."""
    for name in measurements:
        if name.startswith("step "):
            both = [measurements.get(f"{kind} {name[5:]}", {}).get("figures") or {} for kind in ("estimate", "step")]
            if any(both):
                yield name[5:], *both


def results_in(run_dir: Path) -> tuple[dict, list[dict]]:
    lines = (run_dir / "metrics.jsonl").read_bytes().splitlines()
    return read_json(run_dir / "summary.json", "the summary of a run"), [parse_json(line) for line in lines]


def last_object(text: str) -> dict[str, Any]:
    """The JSON object that a child printed last; it begins with a line that begins with a brace."""
    found = re.search(r"^\{.*", text, re.M | re.S)
    if not found:
        raise TrainingError("it printed no JSON object")
    return json.loads(found[0])


def hold(kept: bool, sentence: str) -> None:
    if not kept:
        raise TrainingError(f"not kept: {sentence}")


def losses_in(lines: list[dict]) -> list[float]:
    """The training losses among the lines of metrics.jsonl."""
    return [line["loss"] for line in lines if line["kind"] == "train"]


def compare(one: list[float], other: list[float], allowed: float) -> dict[str, float]:
    """Figures of two runs' losses. Raises TrainingError where two of a step differ by more than is allowed."""
    difference = max(abs(a - b) for a, b in zip(one, other, strict=True))
    hold(difference <= allowed, f"{len(one)} losses differ by up to {difference:.2g}, expected {allowed:g} at most")
    return dict(largest_difference=difference, allowed=allowed)
