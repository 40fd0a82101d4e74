"""Where a resumed run begins: after the step of a checkpoint, which must be of the same run."""

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from tpu_utils.base.errors import CheckpointError, InputError
from tpu_utils.base.files import field_in
from tpu_utils.base.process import Peers
from tpu_utils.checkpoint.loading import CheckpointReader
from tpu_utils.checkpoint.state import Beginning
from tpu_utils.options.stored import RUN_LENGTH_FIELDS, defaults_of, free_on_resume
from tpu_utils.record.run_dir import RunDir
from tpu_utils.step.optim import rates_of

if TYPE_CHECKING:
    from tpu_utils.options.train_config import TrainConfig


def find_beginning(
    config: "TrainConfig", run: dict[str, Any], num_steps: int, run_dir: RunDir, peers: Peers, batches: Any = None
) -> Beginning:
    """run: what the checkpoint must belong to: options, and the data. batches: those of a stream are brought to where
    they stood, by their seek(). All processes must call it. Raises InputError where the checkpoint belongs to another
    run, or to another number of steps, CheckpointError for one that cannot be resumed from."""
    reader = CheckpointReader(run_dir.folder / "checkpoints", peers, run_dir.mirror, run_dir.run_id)
    saved = reader.load_for_resume(config.resume)
    if saved is None:
        return Beginning(num_steps)
    if {path.split("/")[0] for path in saved.entries} == {"model"}:
        raise CheckpointError(
            f"{saved.folder} holds weights alone, expected the state of a training too; train from the folder that "
            "they were imported from: --initial_weights in another --run_dir"
        )
    free = free_on_resume(type(config)) | {"data"}  # a description; data_crc32 must not change
    before = saved.values.get("num_steps")  # absent in older checkpoints: there it cannot change
    if before is not None and (type(before) is not int or not saved.step <= before < 2**53):
        raise CheckpointError(
            f"{saved.folder} is of step {saved.step} of {before!r:.50}; expected a number of steps; start anew in "
            "another --run_dir"
        )
    was = defaults_of(type(config)) | saved.value("config", dict)  # defaults: for fields newer than the checkpoint
    now, then = run["data_crc32"], was.get("data_crc32")
    if isinstance(now, int) and isinstance(then, int) and min(now, then) >= 0:  # one's own may be less
        known = max(1, -(-then.bit_length() // 32))  # older runs know less of their data: not what is tested on
        run = run | {"data_crc32": now % 2 ** (32 * known)}
    check_same_run(run, was, free if before is None else free.union(RUN_LENGTH_FIELDS))
    check_length(config, num_steps, before or num_steps, saved.step)
    best = saved.best() if config.keep_best else None
    if best and not peers.from_first(lambda: best["step"] in reader.steps()):
        best = None  # removed by hand
    # the last thing that a run writes is summary.json
    ended_at = peers.from_first(lambda: field_in(run_dir.folder / "summary.json", "steps", int))
    finished = saved.step == ended_at == num_steps
    evaluation = {name: n for name, n in saved.value("evaluation", dict).items() if type(n) in (int, float)}
    restore = partial(reader.restore, saved)
    if hasattr(batches, "seek"):
        batches.seek(saved.step, saved.values.get("position"))
    return Beginning(before or num_steps, saved.step, saved.run_id, evaluation, best, finished, restore)


def check_same_run(config: dict[str, Any], saved: dict[str, Any], free: set[str]) -> None:
    """Raises InputError if a field that shapes the computation is not what the checkpoint was made with. free: names of
    the fields that may differ."""
    names = sorted((config.keys() | saved.keys()) - free)
    named = {"data_crc32": "the checksum of what is trained and tested on, data_crc32,"}
    changed = [
        f"{named.get(n, n)} is {config.get(n)!r}, was {saved.get(n)!r}" for n in names if config.get(n) != saved.get(n)
    ]
    if changed:
        raise InputError(
            f"this is not the run the checkpoint belongs to: {'; '.join(changed)}; repeat the old values, "
            "or start anew in another --run_dir"
        )


def check_length(config: "TrainConfig", num_steps: int, before: int, done: int) -> None:
    """Raises InputError unless a run planned for `before` steps, of which `done` are done, may go on to num_steps. It
    may if learning_rates() gives every step already done the rate that it had: the run then ends bit-identical to one
    that was started with num_steps."""
    option = next((f"--{name}" for name in RUN_LENGTH_FIELDS if hasattr(config, name)), "number of steps")
    if num_steps == before:
        return
    if num_steps < done:
        raise InputError(
            f"the run has done {done} steps and is now to have {num_steps}; expected {done} or more; choose a larger "
            f"{option}, or start anew in another --run_dir"
        )
    steps = np.arange(done, dtype=np.float64)
    others = np.flatnonzero(rates_of(steps, config, num_steps) != rates_of(steps, config, before))
    if len(others):
        first = others[0] + 1
        here = f"; a checkpoint of step {first - 1} or before could go on" if config.scheduler == "wsd" else ""
        raise InputError(
            f"the run was to have {before} steps and is now to have {num_steps}, but it has done {done}, and with "
            f"scheduler {config.scheduler} the learning rates from step {first} on would have been others; repeat the "
            f"old {option}, or start anew in another --run_dir; runs with scheduler constant or step, or with wsd "
            f"before its decay, can be made longer{here}"
        )
