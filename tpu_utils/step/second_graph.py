"""Why there is a second graph, or a step that reads, in words: imported once there is one."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from traceback import walk_tb
from typing import Any, NoReturn

import torch

from tpu_utils.base.errors import InputError, RecompileError, first_line, line_of
from tpu_utils.device import DEVICE_TYPE, READ_ERROR_MARKERS, operations_on_host, operations_traced
from tpu_utils.record.lines import LineWatch
from tpu_utils.step.seen import Held, Seen, held_by_modules, state_sizes


def raise_why(
    call: str, seen: Seen, named: dict[str, Any], shapes: dict[str, str], numbers: dict[tuple, Any]
) -> NoReturn:
    """Raises RecompileError for a second graph of a step, with what differs between this call of it and those before.

    named: arguments of this call. shapes, numbers: of it, as seen has them of earlier ones.
    """
    host = new_on_host(seen.step.on_host)
    why = [host] if host else reasons(seen, named, shapes, numbers)
    raise RecompileError(f"{call} compiled graph {seen.graphs} of {seen.step.__name__}, expected 1: {'; '.join(why)}")


def reasons(seen: Seen, named: dict[str, Any], shapes: dict[str, str], numbers: dict[tuple, Any]) -> list[str]:
    """What differs between this call of the step and those before, each with a remedy."""
    reasons = [f"{name} was {seen.shapes[name]}, is {s}" for name, s in shapes.items() if seen.shapes.get(name, s) != s]
    reasons += _reasons_in_modules(seen.calls, seen.held, held_by_modules(named))
    if born := {n: size for n, size in state_sizes(named).items() if size > seen.state.get(n, size)}:
        return [
            f"{name} has {size} tensors of state and had {seen.state[name]} before its first step: state that is "
            "created inside a step makes the next one another program; create it before, as make_optimizer of "
            f"tpu_utils/step/optim.py does: for each parameter {name}.state[parameter] = {{name: zeros made on the "
            "host, sent to the device}"
            for name, size in born.items()
        ]
    values = {
        name: f"{name[0]}{''.join(f'[{key!r}]' for key in name[1:])} {seen.numbers[name]!r} -> {value!r}"
        for name, value in numbers.items()
        if seen.numbers.get(name, value) != value
    }
    fresh = [text for name, text in values.items() if name not in seen.changed]
    changed = f"numbers among the arguments that changed now, and not before: {', '.join(fresh) or 'none'}"
    if values and not fresh:  # each value was sent, until one was that of a constant
        changed = (
            "of numbers that change in each call, one may now equal 0, 1 or another number of the program: "
            f"{', '.join(values.values())}"
        )
    scalars = [name for name, value in named.items() if isinstance(value, torch.Tensor) and not value.ndim]
    scalar = f"for the scalar {', '.join(scalars)} (give it the shape (1,)), " if scalars else ""
    return reasons or [
        "no argument changed its shape or dtype, so look for a Python number that is part of the program "
        "(0, 1, sizes, positions and dims are, and one that equals another number there; make it a tensor of shape "
        f"(1,) on the device), {scalar}for a tensor in x[:n] (use torch.where), or for state that was created inside "
        f"the step; {changed}"
    ]


def new_on_host(before: dict[str, int]) -> str:
    """What a step computes on the host, in words; "": nothing. before: operations_on_host() as it began."""
    names = [name for name, count in operations_on_host().items() if count > before.get(name, 0)]
    if not names:
        return ""
    return (
        f"computes {', '.join(names)} on the host, because torch_xla has no such operation: its tensors are read and "
        "sent back; expected operations that it has, such as torch.where(mask, x, 0) for x[mask] and nonzero, "
        "(a * b).sum() for the vdot of spectral_norm, g * v / v.norm(dim=1, keepdim=True) for weight_norm, "
        "nn.Embedding and a mean for nn.EmbeddingBag, or repeat_interleave for F.interpolate"
    )


def raise_if_read(error: RuntimeError, step: Callable, call: str) -> None:
    """Raises RecompileError, which names the line, for torch_xla's error about a tensor that the step reads, or for any
    behind an operation that torch_xla leaves to the host; InputError for a line that fails on the device alone."""
    name, host = step.__name__, new_on_host(step.on_host)
    if not host and not any(said in str(error) for said in READ_ERROR_MARKERS):
        if step.is_tried and step.__wrapped__.__code__ in [one.f_code for one, _ in walk_tb(error.__traceback__)]:
            raise InputError(
                f"{name} runs on the host, and fails on the device in {call}: {first_line(error)}, at "
                f"{line_of(error)}; expected operations that the device has too"
            ) from error
        return
    if isinstance(error.__context__, RuntimeError):  # torch_xla's sync() behind the step fails over the same
        error = error.__context__
    if host:
        raise RecompileError(f"in {call} {name} {host}, at {line_of(error)}") from None
    raise_of_read(name, call, f", at {line_of(error)}", f" (torch_xla says: {first_line(error)})")


def raise_of_read(name: str, call: str, where: str = "", said: str = "") -> None:
    """Raises RecompileError for a tensor read in a step; torch_xla has none where the tensor had its value already."""
    raise RecompileError(
        f"{name} reads a tensor inside the compiled function in {call}{where}; expected none of .item(), "
        "print(tensor), if on a tensor there: keep the value on the device, or read it at a log line; an optimizer of "
        f"torch.optim reads its step size: use make_optimizer of tpu_utils/step/optim.py{said}"
    ) from None  # torch_xla's own text is a stack of C++


def check_on_device(name: str, named: dict[str, Any]) -> None:
    """Raises InputError for a function by itself whose tensors are all on the host: nothing would be compiled."""
    types = {value.device.type for value in named.values() if isinstance(value, torch.Tensor)}
    if types and DEVICE_TYPE not in types:
        raise InputError(
            f"{name} gets no tensor on the device ({DEVICE_TYPE}); expected its model and batch there, or, of a step "
            f"of a run, Run(config, {name}, ...), and this call inside its with statement"
        )


class GraphsOutside:
    """Names the line of a run that makes a graph of its own beside the steps: found when it comes again."""

    def __init__(self, call: str, name: str, seen: Seen):
        """call, name: of the step that was called after it. Raises RecompileError before the first one at once."""
        self._before, self._calls, self._lines = f"{call} of {name}", 0, LineWatch({"operations": operations_traced})
        if seen.calls == 1:
            why = "do them inside the step, or on the host before the tensor is sent"
            raise self._error("", "; ".join([why, *_reasons_in_modules(1, seen.held, {})]))
        self._is_watched = self._lines.start()

    def left_out(self) -> AbstractContextManager:
        """Around a step: what is computed there is its own."""
        return self._lines.left_out() if self._is_watched else nullcontext()

    def check(self, is_last: bool = False) -> None:
        """Raises RecompileError once the line is known, or will not be."""
        self._calls += 1
        lines = self._lines.lines("operations") if self._is_watched else []
        if self._is_watched and not (lines or is_last or self._calls > MOST_CALLS):
            return
        if self._is_watched:
            self._lines.stop()
        raise self._error(
            f", at {lines[0][1]}" if lines else "",
            "move them into a step, or read the tensor as it is, by .cpu(), and compute on the host; a function that "
            "@one_graph decorates is one of the steps in Run(config, train_step, ...)",
        )

    def _error(self, where: str, remedy: str) -> RecompileError:
        return RecompileError(
            f"operations on device tensors before {self._before}, outside of it{where}, became a graph of their own, "
            f"expected none: {remedy}"
        )


MOST_CALLS = 100
"""Calls of steps to wait for the line of an outside operation; then the error is raised without it."""


def _reasons_in_modules(calls: int, before: list[dict[str, Held]], now: dict[str, Held]) -> list[str]:
    """What modules held that can be the cause of a second graph, each with a remedy.

    calls: of the step so far. before: what was held before each of its first two calls.
    """
    if not before:
        return []
    operations = {path: held.operation for path, held in before[-1].items() if held.operation and calls <= 2}
    found = {
        PENDING: [f"{path} ({name})" for path, name in operations.items() if name != "prim::Constant"],
        CONSTANT: [path for path, name in operations.items() if name == "prim::Constant"],
    }
    if calls > 1:
        old, new = (before[0], before[1]) if calls == 2 else (before[1], now)
        counts = [p for p, one in before[0].items() if calls > 2 and one.kind == "value" and one != before[1].get(p)]
        common = [path for path in new if path in old and path not in counts]
        found[CREATED] = [f"{new[p].kind} {p} ({new[p].shape})" for p in new if p not in old and new[p].shape]
        found[CHANGED] = [f"{p} was {old[p].mode}, is {new[p].mode}" for p in common if old[p].mode != new[p].mode]
        found[RESHAPED] = [f"{p} was {old[p].shape}, is {new[p].shape}" for p in common if old[p].shape != new[p].shape]
    texts = {remedy: names[:5] + [f"{len(names) - 5} more"] * (len(names) > 5) for remedy, names in found.items()}
    return [f"{', '.join(names)} {remedy}" for remedy, names in texts.items() if names]


PENDING = (
    "was still to be computed on the device when the step was called; compute it on the host before model.to(device), "
    "or inside the step, or call torch_xla.sync() before the loop"
)
CREATED = "was created in a step, so the next one has an input more: register it in __init__, in its final shape"
CHANGED = (
    "in the step after: that is another program; expected it as it is later from step 1 on (in place of a list that "
    "grows a buffer of one size), or two runs, the second one from the checkpoint of the first"
)
RESHAPED = "in the step after: give it its final shape, dtype and sharding before step 1, and write into it"
CONSTANT = (
    "is a scalar, and of 0 or 1 torch_xla makes a constant instead of sending it: give its module to run.track(), "
    "which sends it, or give it the shape (1,)"
)
