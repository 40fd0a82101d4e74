"""The run directory and the checkpoints in it: atomic, checked, never executed."""

import datetime
import json
import os
import shutil
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch_xla.core.xla_model as xm

from config import FREE_ON_RESUME, InputError, TrainConfig
from tpu_utils.errors import CheckpointError, SaveError


def write_atomically(path: Path, content: bytes) -> None:
    """The file has the old content or the new one, never a part, whenever the machine stops."""
    aside = path.with_name(path.name + ".writing")
    with aside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """A rename is on disk only when its folder is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_run_dir(config: TrainConfig) -> Path:
    """The run directory, made and proved writable. Raises InputError where it is not, or already holds a run."""
    now = datetime.datetime.now()
    run_dir = Path(config.run_dir or f"runs/{config.preset}_{now:%Y%m%d_%H%M%S_%f}")
    if config.compile_for:
        return run_dir  # nothing runs, nothing is written
    if config.resume == "must" and not run_dir.exists():
        raise InputError(
            f"resume is must, but {run_dir} holds no complete checkpoint: it does not exist; check --run_dir"
        )
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        if config.resume == "never" and (run_dir / "config.json").exists():
            raise InputError(
                f"run_dir {run_dir} already holds a run; choose another, or continue it with --resume auto"
            )
        write_atomically(run_dir / "writable", b"")
        (run_dir / "writable").unlink()
    except OSError as error:
        raise InputError(
            f"run_dir {run_dir} cannot be written: {error.strerror}; choose another with --run_dir"
        ) from error
    return run_dir


def check_same_run(config: dict[str, Any], saved: dict[str, Any]) -> None:
    """Raises InputError if a field that shapes the computation is not what the checkpoint was made with."""
    names = sorted((config.keys() | saved.keys()) - FREE_ON_RESUME)
    changed = [f"{n} is {config.get(n)!r}, was {saved.get(n)!r}" for n in names if config.get(n) != saved.get(n)]
    if changed:
        raise InputError(
            f"this is not the run the checkpoint belongs to: {'; '.join(changed)}; repeat the old values, "
            "or start anew in another --run_dir"
        )


def to_host(value: Any) -> Any:
    """The same nesting of dicts, lists and tuples with every tensor on the CPU: what torch.save may write."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: to_host(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(to_host(item) for item in value)
    return value


class Checkpoints:
    """step_00001200/state.pt and a `done` marker with its size and CRC-32; the newest `keep` of them.

    A step is written aside, synced, renamed and only then marked: a folder without its marker is not a checkpoint.
    """

    def __init__(self, folder: Path, keep: int):
        self.folder, self.keep = folder, keep

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, oldest first."""
        return sorted(int(path.parent.name[5:]) for path in self.folder.glob("step_????????/done"))

    def path(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}"

    def save(self, step: int, state: dict[str, Any]) -> Path:
        """Returns the folder written. Raises SaveError; then the earlier checkpoints are as they were."""
        state, target, aside = to_host(state), self.path(step), self.folder / f".writing_{step:08d}"
        try:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
            with (aside / "state.pt").open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            marker = {"step": step, "bytes": (aside / "state.pt").stat().st_size, "crc32": crc32_of(aside / "state.pt")}
            sync_folder(aside)
            if target.exists():  # a kill left it without its marker, or a resumed run comes past it again
                self._remove(target)
            aside.rename(target)
            sync_folder(self.folder)
            write_atomically(target / "done", json.dumps(marker).encode())
            for old in self.steps()[: -self.keep]:
                self._remove(self.path(old))
        except (OSError, RuntimeError) as error:  # torch.save reports a full disk as RuntimeError
            shutil.rmtree(aside, ignore_errors=True)
            free = shutil.disk_usage(self.folder.parent).free / 2**20
            raise SaveError(
                f"checkpoint of step {step} could not be written to {target}: {error}; {free:.0f} MiB are free there; "
                f"the checkpoints of steps {self.steps()} are intact"
            ) from error
        return target

    @staticmethod
    def _remove(folder: Path) -> None:
        (folder / "done").unlink(missing_ok=True)  # first of all: half a folder must not look complete
        shutil.rmtree(folder)

    def load_for_resume(self, resume: str) -> dict[str, Any] | None:
        """State of the newest complete checkpoint, on the CPU; None when a new run is to begin.

        resume is never, auto or must. A damaged checkpoint is named and the one before it is used. Raises
        CheckpointError when all are damaged, when one holds anything but tensors and plain values, or when there is
        none and resume is must.
        """
        if resume == "never":
            return None
        problems = []
        for step in reversed(self.steps()):
            try:
                return read_checkpoint(self.path(step))
            except DamagedCheckpoint as error:
                problems.append(str(error))
                print(f"warning: {error}; trying the checkpoint before it", file=sys.stderr)
        if problems:
            raise CheckpointError(
                "no checkpoint can be used: " + "; ".join(problems) + "; start anew in another --run_dir"
            )
        if resume == "must":
            raise CheckpointError(f"resume is must, but {self.folder} holds no complete checkpoint; check --run_dir")
        return None


class DamagedCheckpoint(CheckpointError):
    """Its bytes are not those that were written."""


def read_checkpoint(folder: Path) -> dict[str, Any]:
    """The state in a checkpoint folder, on the CPU. Never runs what the file says: weights_only.

    Raises DamagedCheckpoint for other bytes than were written, CheckpointError for foreign content.
    """
    path = folder / "state.pt"
    try:
        marker = json.loads((folder / "done").read_text())
        found = {"bytes": path.stat().st_size, "crc32": crc32_of(path)}
    except (OSError, ValueError) as error:
        raise DamagedCheckpoint(f"checkpoint {folder} is damaged: {error}") from error
    for name, value in found.items():
        if not isinstance(marker, dict) or marker.get(name) != value:
            expected = marker.get(name) if isinstance(marker, dict) else None
            raise DamagedCheckpoint(f"checkpoint {path} is damaged: {name} is {value}, its done marker says {expected}")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # bytes that are no pickle can make the unpickler raise anything
        raise CheckpointError(
            f"{path} is not a checkpoint of these scripts: it holds more than tensors and plain values, and nothing of "
            "it was run; remove it, or choose another --run_dir"
        ) from error
    if not isinstance(state, dict) or "step" not in state:
        raise CheckpointError(
            f"{path} is not a checkpoint of these scripts: found {type(state).__name__} without a step, expected a "
            "dict with one; remove it, or choose another --run_dir"
        )
    for name, kind in (("step", int), ("config", dict), ("model", dict)):
        if name in state and not isinstance(state[name], kind):
            raise CheckpointError(
                f"{path} is not a checkpoint of these scripts: {name} is {_kind(state[name])}, expected "
                f"{kind.__name__}; remove it, or choose another --run_dir"
            )
    return SavedState(state)


class SavedState(dict):
    """What a checkpoint holds. Raises CheckpointError, not KeyError, for what it does not."""

    def __missing__(self, name: str) -> Any:
        raise CheckpointError(
            f"the checkpoint of step {self.get('step')} has {sorted(map(str, self))}, expected {name} too; it is of "
            "another script or version: start anew in another --run_dir"
        )


def crc32_of(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            checksum = zlib.crc32(block, checksum)
    return checksum


def load_model(model: torch.nn.Module, saved: dict[str, torch.Tensor]) -> None:
    """load_state_dict that says in words what differs. Raises CheckpointError before anything is changed."""
    own = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    other = {name: tuple(t.shape) if isinstance(t, torch.Tensor) else _kind(t) for name, t in saved.items()}
    changed = [
        f"{n} is {own.get(n, 'absent')}, was {other.get(n, 'absent')}"
        for n in sorted(own | other)
        if own.get(n) != other.get(n)
    ]
    if changed:
        raise CheckpointError(
            f"the checkpoint is of another model: {'; '.join(changed[:3])}; give the options it was made with, "
            "or start anew in another --run_dir"
        )
    model.load_state_dict(saved)


def load_part(name: str, target: Any, saved: dict[str, Any]) -> None:
    """target.load_state_dict(saved[name]). Raises CheckpointError in words, before anything is changed, when it is not
    of the same keys, shapes and types."""
    check_like(target.state_dict(), saved[name], name)
    target.load_state_dict(saved[name])


def check_like(own: Any, other: Any, name: str) -> None:
    """Raises CheckpointError unless other has the nesting, the shapes and the types of own. name: says where it is."""
    if found := next(_unlike(own, other, name), None):
        raise CheckpointError(
            f"the checkpoint does not fit this run: {found}; give the options it was made with, or start anew in "
            "another --run_dir"
        )


def _unlike(own: Any, other: Any, where: str) -> Iterator[str]:
    """What of other is not as in own. The values of an optimizer's settings are its own: the rate changes its shape."""
    if isinstance(own, dict) and isinstance(other, dict):
        if own.keys() != other.keys():
            yield f"{where} has {sorted(map(str, other))[:9]}, expected {sorted(map(str, own))[:9]}"
        settings = ".param_groups." in where
        for key in own.keys() & other.keys():
            if not settings or key == "params":
                yield from _unlike(own[key], other[key], f"{where}.{key}")
    elif isinstance(own, list | tuple) and isinstance(other, list | tuple) and len(own) == len(other):
        for index, (one, two) in enumerate(zip(own, other, strict=True)):
            yield from _unlike(one, two, f"{where}.{index}")
    elif _kind(own) != _kind(other):
        yield f"{where} is {_kind(other)}, expected {_kind(own)}"


def _kind(value: Any) -> str:
    """What must be equal for one value to stand for another."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return f"{type(value).__name__}[{len(value)}]" if isinstance(value, list | tuple) else type(value).__name__


def random_state() -> dict[str, Any]:
    """Every generator that a script or a layer may draw from on this host and device."""
    return {"torch": torch.get_rng_state(), "xla": xm.get_rng_state()}


def set_random_state(state: dict[str, Any]) -> None:
    """Raises CheckpointError when it is not what random_state() gives."""
    check_like(random_state(), state, "random")
    torch.set_rng_state(state["torch"])
    xm.set_rng_state(state["xla"])
