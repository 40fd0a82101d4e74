"""The checkpoints of a folder, found, checked and loaded."""

import shutil
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tpu_utils.base.errors import CheckpointError, DamagedCheckpoint, PassingError
from tpu_utils.base.process import Peers
from tpu_utils.base.writing import checksum_of
from tpu_utils.checkpoint.saved import Saved, check_alike, one_thread, read_checkpoint, read_marker, sizes_of_files
from tpu_utils.checkpoint.sharded_tensors import put_sharded
from tpu_utils.checkpoint.state import StepFolders, index_as_json, kind_of, tensors_by_path
from tpu_utils.checkpoint.tensor_reading import parse_index
from tpu_utils.device import is_sharded, put

if TYPE_CHECKING:
    from tpu_utils.remote.storage import Mirror


class CheckpointReader(StepFolders):
    """Reads checkpoints; from a bucket, the mirror fetches them. All processes must make the calls that say so."""

    def __init__(self, folder: Path, peers: Peers | None = None, mirror: "Mirror | None" = None, run_id: str = ""):
        """run_id: of the run that the checkpoints must belong to, where that is known."""
        self.folder = folder
        self._peers = peers or Peers()
        self._mirror = mirror
        self.run_id = run_id

    def load_for_resume(self, resume: str) -> Saved | None:
        """The newest complete checkpoint; None when a new run is to begin. All processes must call it. resume is never,
        auto or must. A damaged checkpoint is named and the one before it is used. Raises CheckpointError when all are
        damaged, or when there is none and resume is must."""
        saved: Saved | None = None

        def load() -> dict[str, Any] | None:
            nonlocal saved
            saved = self.load(resume)
            if saved is None:
                return None
            tensors = index_as_json(saved.entries)
            found = {"step": saved.step, "run": saved.run_id, "values": saved.values, "tensors": tensors}
            if self._mirror:  # the others fetch what they need by these sums
                found["files"] = read_marker(saved.folder)["files"]
            return found

        with self._peers.patient():
            found = self._peers.from_first(load)
        if found is None or self._peers.index == 0:
            return saved
        folder, entries = self.path(found["step"]), parse_index(found["tensors"])
        fetch = partial(self._fetch, folder, found["files"]) if self._mirror else None
        return Saved(folder, found["step"], found["run"], found["values"], entries, fetch)

    def _fetch(self, folder: Path, files: dict[str, dict[str, int]], name: str) -> None:
        """Fetch a file that the first process has checked. Raises PassingError if it has changed since."""
        self._mirror.fetch(folder, {name: files[name]["bytes"]})
        found = None
        if (folder / name).exists():
            with (folder / name).open("rb") as file:
                found = checksum_of(file)
        if found != files[name]:
            raise PassingError(f"{name} of {folder.name} has changed in the bucket since it was checked; start again")

    def load(self, resume: str) -> Saved | None:
        """As load_for_resume, for one process by itself."""
        if resume == "never":
            return None
        problems = []
        for step in reversed(self.steps()):
            try:
                if self._mirror:
                    self._mirror.fetch(self.path(step), sizes_of_files(self.path(step)))
                return read_checkpoint(self.path(step), self.run_id)
            except DamagedCheckpoint as error:
                problems.append(str(error))
                print(f"warning: {error}; trying the checkpoint before it", file=sys.stderr)
        if problems:
            raise CheckpointError(
                f"no checkpoint can be used: {'; '.join(problems)}; if this is a copy, copy the run again; a new run "
                "needs another --run_dir"
            )
        if resume == "must":
            raise CheckpointError(f"{self.folder} holds no complete checkpoint; check the name of the run's directory")
        return None

    def load_best(self) -> Saved:
        """The checkpoint of the best evaluation, as the newest one names it; for one process by itself. Raises
        CheckpointError where there is none, or it is damaged: another one is never taken instead."""
        newest = self.load("must")
        best = newest.best()
        if best is None:
            raise CheckpointError(f"{newest.folder} names no best checkpoint: the run has none, or no --keep_best")
        if best["step"] not in self.steps():
            raise CheckpointError(f"{self.path(best['step'])}, the best checkpoint, is not there; use the newest one")
        return newest if best["step"] == newest.step else read_checkpoint(self.path(best["step"]), newest.run_id)

    def restore(self, saved: Saved, parts: dict[str, Any]) -> None:
        """Fill the tensors in parts, nestings as they were saved. All processes must call it. They stay where they are:
        a sharded one gets each device's shard, whatever mesh or single device it was saved from. Raises CheckpointError
        before anything is changed if names, shapes or types differ."""
        wanted = tensors_by_path(parts)
        found = {path: entry.kind for path, entry in saved.entries.items() if path.split("/")[0] in parts}
        check_alike({path: kind_of(tensor) for path, tensor in wanted.items()}, found)
        files = saved.files()
        with one_thread(), self._peers.patient():
            for path, tensor in wanted.items():
                if saved.entries[path].shards and is_sharded(tensor):
                    put_sharded(tensor, lambda piece, offsets, path=path: files.read_into(piece, path, offsets))
                elif saved.entries[path].shards:
                    put(tensor, files.read(path))
                else:  # in a file that the first process alone may have
                    kind, own = saved.entries[path].kind, self._peers.index == 0
                    value = files.read(path) if own else torch.empty(kind.shape, dtype=kind.dtype)
                    self._peers.tensor_from_first(value)
                    put(tensor, value)
        if saved.fetch:  # another restore fetches it again
            shutil.rmtree(saved.folder, ignore_errors=True)
