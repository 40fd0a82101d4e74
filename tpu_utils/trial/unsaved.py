"""What a step changes and no checkpoint holds: a resumed run would go on without it. Imported once steps run.

Nothing is listed. What a step is given, in its arguments, its closure and the globals it names, is compared after its
first and its second call: tensors by the count of writes that torch keeps, all else by value.
"""

import random
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from tpu_utils.base.errors import InputError, is_own
from tpu_utils.checkpoint.state import Tracked
from tpu_utils.device import seed_host
from tpu_utils.step.seen import shape_of

NO_STATE = {*vars(nn.Module()), *vars(torch.optim.SGD([torch.zeros(1)]))}
"""Attributes that every module or optimizer has."""
SET_BY_STEPS = {"params", "lr", "lr_ratio", "capturable"}
"""What step_optimizer() puts into an optimizer's groups."""
LONGEST = 1000
"""Items of a collection that are looked at: one that grows is found at its beginning."""
Leaves = dict[str, tuple[Any, Any]]
"""{path: (value, what differs once it was written to)}."""


def written(value: Any) -> Any:
    """What differs before and after a write to this value; None where there is none, or nobody could tell."""
    if isinstance(value, torch.Tensor):
        return None if value.is_inference() else value._version
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return zlib.crc32(np.ascontiguousarray(value))
    if isinstance(value, np.random.Generator):
        return str(value.bit_generator.state)
    if isinstance(value, random.Random):
        return value.getstate()
    return value.get_state().numpy().tobytes() if isinstance(value, torch.Generator) else None


def items_of(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """(path, value) of what stands in a module, an optimizer, a collection, or an object of the user's own classes."""
    if isinstance(value, nn.parallel.DistributedDataParallel):
        yield path, value.module
    elif isinstance(value, nn.Module | torch.optim.Optimizer):
        kinds = [{} if type(value).__module__.startswith(("torch.", "torch_xla.")) else vars(value)]
        if isinstance(value, nn.Module):
            kinds += value._parameters, value._buffers, value._modules
        else:
            yield from ((f"{path}.state", [*value.state.values()]), (f"{path}.param_groups", value.param_groups))
        yield from ((f"{path}.{name}", one) for kind in kinds for name, one in kind.items() if name not in NO_STATE)
    elif isinstance(value, dict):
        yield from ((f"{path}[{key!r}]", one) for key, one in [*value.items()][:LONGEST] if key not in SET_BY_STEPS)
    elif isinstance(value, list | tuple | deque | set):
        yield from ((f"{path}[{number}]", one) for number, one in enumerate([*value][:LONGEST]))
    elif is_own(getattr(sys.modules.get(type(value).__module__), "__file__", None) or "<"):
        yield from ((f"{path}.{name}", one) for name, one in getattr(value, "__dict__", {}).items())


def leaves_of(named: dict[str, Any], left_out: set[int]) -> Leaves:
    """All that these values reach, each once. left_out: ids of what is not entered."""
    found = {}
    seen = set(left_out)
    waiting = [*named.items()]
    while waiting:
        path, value = waiting.pop()
        if (count := written(value)) is None:
            if id(value) not in seen and not isinstance(value, type):
                waiting += items_of(value, path)
        elif id(value) not in seen or not isinstance(value, torch.Tensor):
            found[path] = value, count
        seen.add(id(value))
    return found


def weights_of(named: dict[str, Any]) -> Leaves:
    """Parameters and buffers of the modules among these values: what an evaluation computes with."""
    modules = [(name, one) for name, one in named.items() if isinstance(one, nn.Module)]
    pairs = [pair for name, one in modules for pair in (*one.named_parameters(name), *one.named_buffers(name))]
    return {path: (one, one._version) for path, one in pairs}


def host_generators() -> dict[str, tuple]:
    """What NumPy's and Python's generators would give next."""
    _, words, *rest = np.random.get_state()
    return {"numpy": (words.tobytes(), *rest), "python": random.getstate()}


@contextmanager
def drawing_from(seed: int) -> Iterator[None]:
    """Inside, the host's generators begin at seed; afterwards they go on as if nothing had been drawn."""
    before = np.random.get_state(), random.getstate()
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        seed_host(seed)
        try:
            yield
        finally:
            np.random.set_state(before[0])
            random.setstate(before[1])


def check_pure(batches: Any, index: int) -> None:
    """Raises InputError unless batch(index) is the same whatever the generators of this host have given before.

    batches: of a run; one whose batch() is dear has a sample() of it.
    """
    read, found = getattr(batches, "sample", batches.batch), []
    for seed in (1, 2):
        with drawing_from(seed):
            arrays = read(index)
        found.append([np.array(np.asarray(one)) for one in (arrays if isinstance(arrays, tuple | list) else (arrays,))])
    for number, (one, other) in enumerate(zip(*found, strict=True)):
        if not np.array_equal(one, other, equal_nan=one.dtype.kind == "f"):
            raise InputError(
                f"{type(batches).__name__}.batch({index}), read twice, differs in array {number}: a resumed run would "
                "train on other data; expected a function of the index alone: in augment= draw.integers() and "
                "draw.random(), elsewhere np.random.default_rng([seed, index])"
            )


def changes(before: Leaves, after: Leaves) -> Iterator[tuple[str, Any, Any]]:
    """(path, value, what written() gave before) of what was written to, is another tensor, or was not there."""
    for path, (value, count) in after.items():
        old, old_count = before.get(path, (None, None))
        is_other = count != old_count or (isinstance(value, torch.Tensor) and value is not old)
        if is_other and getattr(value, "grad_fn", None) is None:  # with one it was computed from parameters
            yield path, value, old_count


class Unsaved:
    """Raises InputError when steps, or what an evaluation computes with, change what Run.track() was not given."""

    def __init__(self, tracked: Tracked):
        self._tracked = tracked
        parts = tracked.parts.values()
        self._whole = {id(part) for part in parts if not isinstance(part, nn.Module | torch.optim.Optimizer)}
        """Parts that save themselves: their insides are their own."""
        self._calls: dict[int, int] = {}
        self._seen: dict[int, tuple[str, Callable[[], Leaves], Leaves]] = {}
        self._results: dict[int, torch.Tensor] = {}
        self._rates: dict[str, Any] = {}
        """Rates of optimizers' groups as the last step left them, then those that the loop has put there since."""
        self._constant: set[str] = set()
        """Paths of tensors that a step writes to without changing them, or computes from parameters."""

    def before(self, step, named: dict[str, Any]) -> None:
        """Call it before each call of the training step: what the loop changes in between, it can compute again."""
        carried = [name for name, value in named.items() if id(value) in self._results]
        if carried and not {id(named[name]) for name in carried} <= self._saved():
            name = carried[0]
            raise InputError(
                f"{step.__name__} gets {name} from its last call, and no checkpoint holds it; expected one tensor that "
                f"the step writes to, {name}.copy_(...), and run.track({name}={name}, ...)"
            )
        rates = rates_in(named)
        self._rates = {path: rates[path] for path, _, _ in changes(self._rates, rates) if path in self._rates}
        if self._calls.get(id(step)) == 1:
            _, look, before = self._seen[id(step)]
            before |= {path: leaf for path, leaf in look().items() if not isinstance(leaf[0], torch.Tensor)}

    def after(self, step, named: dict[str, Any], result: Any, is_training: bool, batch: list[torch.Tensor]) -> None:
        """Call it after each call of a step. batch: what goes up in each step."""
        if is_training:
            rates = rates_in(named)
            if unused := [path for path, _, _ in changes(self._rates, rates) if path in self._rates]:
                raise InputError(
                    f"{step.__name__} computes with a rate of its own, so {unused[0]}, which the loop has set, has no "
                    "effect; expected another schedule, such as learning_rates(config, num_steps) times a factor of "
                    "each step, made before step 1"
                )
            self._rates = rates
            given = (one for one, _ in leaves_of({"": result}, set()).values())
            self._results = {id(one): one for one in given if isinstance(one, torch.Tensor)}
        calls = self._calls[id(step)] = self._calls.get(id(step), 0) + 1
        if calls == 2 and is_training:
            self.check(step)
        if calls > 1:
            return
        reached = self.given(named, batch)
        look = (lambda: leaves_of(reached, self._whole)) if is_training else (lambda: weights_of(reached))
        self._seen[id(step)] = step.__name__, look, look()

    def given(self, named: dict[str, Any], batch: list[torch.Tensor]) -> dict[str, Any]:
        """Without the batch, numbers, which the loop computes, and what saves itself."""
        left_out = {id(one) for one in batch} | self._whole
        kept = {name: value for name, value in named.items() if id(value) not in left_out}
        return {name: value for name, value in kept.items() if not isinstance(value, bool | int | float | str)}

    def _saved(self) -> set[int]:
        return {id(tensor) for tensor in self._tracked.tensors()}

    def check(self, step=None) -> None:
        """Raises InputError for what has changed since the first call. step: the training step, right after a call;
        else tensors alone are compared: the loop may have changed a number."""
        saved = self._saved()
        for number, (name, look, before) in self._seen.items():
            now = look()
            if number == id(step):  # what a step computes from parameters, as a loss kept aside, it does not go on from
                self._constant |= {path for path, (one, _) in now.items() if getattr(one, "grad_fn", None) is not None}
            found = [
                change
                for change in changes(before, now)
                if (number == id(step) or isinstance(change[1], torch.Tensor))
                and change[0] not in self._constant
                and not {id(change[1]), id(getattr(change[1], "_base", None))} & saved  # a view of what is saved
            ]
            if found:
                raise InputError(says(name, found))

    def check_copies(self, step, named: dict[str, Any], copies: dict[str, Any], call: Callable[[], Any]) -> None:
        """As check(), for what a call of the step changes in copies on the host. named: what they are copies of.

        Here values can be compared: what is written to and stays the same is no state.
        """
        saved, before = self._saved(), leaves_of(copies, set())
        values = {path: one.clone() for path, (one, _) in before.items() if isinstance(one, torch.Tensor)}
        call()
        kept = {path for path, (value, _) in leaves_of(named, set()).items() if id(value) in saved}
        found = [change for change in changes(before, leaves_of(copies, set())) if change[0] in before.keys() - kept]
        tensors = [(path, value) for path, value, _ in found if path in values and isinstance(value, torch.Tensor)]
        self._constant |= {p for p, one in tensors if values[p].shape == one.shape and torch.equal(values[p], one)}
        # what was not there before may be a cache
        if found := [change for change in found if change[0] not in self._constant]:
            raise InputError(says(step.__name__, found))


def rates_in(named: dict[str, Any]) -> Leaves:
    """Learning rates of the groups of optimizers among these values, by path, as leaves_of() gives values."""
    return {
        f'{name}.param_groups[{number}]["lr"]': (group["lr"], written(group["lr"]))
        for name, one in named.items()
        if isinstance(one, torch.optim.Optimizer)
        for number, group in enumerate(one.param_groups)
    }


def says(step: str, found: list[tuple[str, Any, Any]]) -> str:
    """found: (path, value, what written() gave before)."""
    names, remedies = [], set()
    for path, value, old in found:
        root, name = path.partition(".")[0].partition("[")[0], path.rpartition(".")[2]
        if isinstance(value, torch.Tensor):
            names.append(f"{path} ({shape_of(value)})")
            remedies.add(f"{root}={root} among what run.track() is given, and the tensor in its state_dict()")
        elif isinstance(value, bool | int | float | str):
            names.append(f"{path} ({old!r} -> {value!r})")
            remedies.add(
                f"in place of the Python number a tensor: self.register_buffer({name!r}, torch.zeros(1)) in __init__, "
                f"self.{name}.add_(1) in the step; in an optimizer one in state[parameter]"
            )
        elif isinstance(value, np.ndarray):
            names.append(f"{path} (an array)")
            remedies.add("in place of the array a tensor on the device, in run.track()")
        else:
            names.append(f"{path} (a {type(value).__name__})")
            remedies.add("numbers drawn from torch's, NumPy's or Python's own generator, which a resumed run has too")
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (
        f"{step} works with {', '.join(names[:3])}{more}, which changed during the first steps, and no checkpoint "
        f"holds that: a resumed run would be another one; expected {'; '.join(sorted(remedies))}; what the next step "
        "does not read: set it to None at the end of the step"
    )
