"""What a step changes and no checkpoint holds: a resumed run would go on without it. Imported once steps run.

Nothing is listed. What a step is given, in its arguments, its closure and the globals it names, is compared after its
first and its second call: tensors by the count of writes that torch keeps, all else by value.
"""

import random
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from tpu_utils.checkpoint.state import Tracked
from tpu_utils.checks import tensors_in
from tpu_utils.device import drawing_from
from tpu_utils.errors import InputError, is_own

NO_STATE = {*vars(nn.Module()), "params", "lr", "lr_ratio", "capturable"}
"""Attributes that every module has, and what the step itself puts into an optimizer's groups."""
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
    elif isinstance(value, nn.Module):
        attributes = {} if type(value).__module__.startswith("torch.") else vars(value)
        for kind in (value._parameters, value._buffers, value._modules, attributes):
            yield from ((f"{path}.{name}", one) for name, one in kind.items() if name not in NO_STATE)
    elif isinstance(value, torch.optim.Optimizer):
        yield from ((f"{path}.state", [*value.state.values()]), (f"{path}.param_groups", value.param_groups))
    elif isinstance(value, dict):
        yield from ((f"{path}[{key!r}]", one) for key, one in [*value.items()][:LONGEST] if key not in NO_STATE)
    elif isinstance(value, list | tuple | deque | set):
        yield from ((f"{path}[{number}]", one) for number, one in enumerate([*value][:LONGEST]))
    elif is_own(getattr(sys.modules.get(type(value).__module__), "__file__", None) or "<"):
        yield from ((f"{path}.{name}", one) for name, one in getattr(value, "__dict__", {}).items())


def leaves_of(named: dict[str, Any], left_out: set[int]) -> Leaves:
    """All that these values reach, each once. left_out: ids of what is not entered."""
    found, seen, waiting = {}, set(left_out), [*named.items()]
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
    found = {}
    for name, module in named.items():
        if isinstance(module, nn.Module):
            found |= {
                path: (one, one._version) for path, one in (*module.named_parameters(name), *module.named_buffers(name))
            }
    return found


def check_pure(batches: Any, index: int) -> None:
    """Raises InputError unless batch(index) is the same whatever the generators of this host have given before.

    batches: of a run; one whose batch() is dear has a sample() of it.
    """
    read, found = getattr(batches, "sample", batches.batch), []
    for seed in (1, 2):
        with drawing_from(seed):
            arrays = read(index)
        found.append([np.array(one) for one in (arrays if isinstance(arrays, tuple | list) else (arrays,))])
    for number, (one, other) in enumerate(zip(*found, strict=True)):
        if not np.array_equal(one, other, equal_nan=one.dtype.kind == "f"):
            raise InputError(
                f"{type(batches).__name__}.batch({index}), read twice, differs in array {number}: a resumed run would "
                "train on other data; expected a function of the index alone: in augment= draw.integers() and "
                "draw.random(), elsewhere np.random.default_rng([seed, index])"
            )


class Unsaved:
    """Raises InputError when steps, or what an evaluation computes with, change what Run.track() was not given."""

    def __init__(self, tracked: Tracked):
        self._tracked, self._calls = tracked, {}
        self._seen: dict[Any, tuple[Callable[[], Leaves], Leaves]] = {}
        self._results: dict[int, torch.Tensor] = {}

    def before(self, step, named: dict[str, Any]) -> None:
        """Call it before each call of the training step: what the loop changes in between, it can compute again."""
        carried = [name for name, value in named.items() if id(value) in self._results]
        if carried and not {id(named[name]) for name in carried} <= self._saved():
            name = carried[0]
            raise InputError(
                f"{step.__name__} gets {name} from its last call, and no checkpoint holds it; expected one tensor that "
                f"the step writes to, {name}.copy_(...), and run.track({name}={name}, ...)"
            )
        if self._calls.get(step) == 1:
            look, before = self._seen[step]
            before |= {path: leaf for path, leaf in look().items() if not isinstance(leaf[0], torch.Tensor)}

    def after(self, step, named: dict[str, Any], result: Any, is_training: bool, batch: list[torch.Tensor]) -> None:
        """Call it after each call of a step. batch: what goes up in each step."""
        calls = self._calls[step] = self._calls.get(step, 0) + 1
        if is_training:
            self._results = {id(one): one for one in tensors_in(result)}
        if calls > 2 or (calls == 2 and not is_training):
            return
        if calls == 2:
            return self.check(step)
        function = step.__wrapped__
        reached = {name: function.__globals__.get(name) for name in function.__code__.co_names}
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        reached |= {name: cell.cell_contents for name, cell in cells} | named
        sent = {id(one) for one in batch}
        reached = {
            name: value
            for name, value in reached.items()
            if id(value) not in sent and not isinstance(value, bool | int | float | str)
        }
        whole = {
            id(part) for part in self._tracked.parts.values() if not isinstance(part, nn.Module | torch.optim.Optimizer)
        }
        look = (lambda: leaves_of(reached, whole)) if is_training else (lambda: weights_of(reached))
        self._seen[step] = look, look()

    def _saved(self) -> set[int]:
        return {id(tensor) for tensor in self._tracked.tensors()}

    def check(self, step=None) -> None:
        """Raises InputError for what has changed since the first call. step: the training step, right after a call;
        else tensors alone are compared: the loop may have changed a number."""
        saved = self._saved()
        for function, (look, before) in self._seen.items():
            found = []
            for path, (value, count) in look().items():
                is_tensor = isinstance(value, torch.Tensor)
                old = before.get(path, (None, None))
                if (count == old[1] and (value is old[0] or not is_tensor)) or (not is_tensor and function is not step):
                    continue
                # with a grad_fn it was computed from parameters; what it is a view of may be saved
                if not is_tensor or not (value.grad_fn or {id(value), id(value._base)} & saved):
                    found.append((path, value, old[1]))
            if found:
                raise InputError(says(function.__name__, found))


def says(step: str, found: list[tuple[str, Any, Any]]) -> str:
    """found: (path, value, what written() gave before)."""
    names, remedies = [], set()
    for path, value, old in found:
        root, name = path.partition(".")[0].partition("[")[0], path.rpartition(".")[2]
        if isinstance(value, torch.Tensor):
            names.append(f"{path} ({str(value.dtype).removeprefix('torch.')}{list(value.shape)})")
            remedies.add(f"{root}={root} among what run.track() is given")
        elif isinstance(value, bool | int | float | str):
            names.append(f"{path} ({old!r} -> {value!r})")
            remedies.add(
                f"in place of the Python number a tensor: self.register_buffer({name!r}, torch.zeros(1)) in __init__, "
                f"self.{name}.add_(1) in the step"
            )
        elif isinstance(value, np.ndarray):
            names.append(f"{path} (an array)")
            remedies.add("in place of the array a tensor on the device, in run.track()")
        else:
            names.append(f"{path} (a {type(value).__name__})")
            remedies.add("numbers drawn from torch's, NumPy's or Python's own generator, which checkpoints hold")
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (
        f"{step} works with {', '.join(names[:3])}{more}, which changed during the first steps, and no checkpoint "
        f"holds that: a resumed run would be another one; expected {'; '.join(sorted(remedies))}; what the next step "
        "does not read: set it to None at the end of the step"
    )
