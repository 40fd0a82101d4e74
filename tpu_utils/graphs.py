"""One graph for each kind of step, held; transfers between host and device, counted."""

import ast
import linecache
import re
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch_xla
import torch_xla.debug.metrics as met

from tpu_utils.errors import RecompileError, first_line, line_of


def transfers_to_device() -> int:
    """Host-to-device transfers of this process so far, by torch_xla's own counter."""
    return (met.metric_data("TransferToDeviceTime") or [0])[0]


def transfers_from_device() -> int:
    """Device-to-host transfers of this process so far, by torch_xla's own counter."""
    return (met.metric_data("TransferFromDeviceTime") or [0])[0]


def graphs_compiled() -> int:
    """Programs compiled, or read from the compile cache, by this process so far."""
    return sum(met.counter_value(name) or 0 for name in ("UncachedCompile", "PersistentCacheHit"))


class CompileWatch:
    """Attributes every graph compiled from now on to a kind of step ("train", "eval").

    compiled(kind) counts; check() stops the run at a kind's second graph.
    """

    def __init__(self):
        self._total = graphs_compiled()
        self._inputs: dict[str, list[str]] = {}
        self._numbers: dict[str, dict[tuple, Any]] = {}
        self._changed: dict[str, set[tuple]] = {}
        self._state: dict[str, int] | None = None
        self._graphs: dict[str, int] = {}
        self._calls: dict[str, int] = {}
        self._held: dict[str, list[dict[str, Held]]] = {}

    def compiled(self, kind: str) -> int:
        """Graphs compiled for all kinds of step whose name starts so."""
        return sum(count for name, count in self._graphs.items() if name.startswith(kind))

    def seen(self, kind: str) -> bool:
        return kind in self._graphs

    def before(self, kind: str, caller: types.FrameType) -> None:
        """Call it right before a step of this kind: looks at what its caller's modules and optimizers hold, in two
        calls."""
        if self._state is None:
            self._state = _state_sizes(caller)
        self._calls[kind] = self._calls.get(kind, 0) + 1
        if self._calls[kind] <= 2:
            self._held.setdefault(kind, []).append(_held_by_modules(caller))

    def check(self, kind: str, step: int, inputs: Sequence[torch.Tensor], caller: types.FrameType) -> int:
        """Call it right after a step of this kind. Returns the graphs it compiled. Raises RecompileError.

        caller: the frame that calls the step. Reads counters of the host and the caller's Python numbers: those that
        changed are what may have become part of the program.
        """
        shapes = [_shape_of(t) for t in inputs]
        before, self._inputs[kind] = self._inputs.get(kind, shapes), shapes
        total, first = graphs_compiled(), kind not in self._graphs
        new, self._total = total - self._total, total
        self._graphs[kind] = self._graphs.get(kind, 0) + new
        numbers = _numbers_in(caller)
        numbers_before, self._numbers[kind] = self._numbers.get(kind, numbers), numbers
        different = {name for name, value in numbers.items() if numbers_before.get(name, value) != value}
        always, self._changed[kind] = self._changed.get(kind, set()), different  # step itself, and other counters
        if self._graphs[kind] <= 1:
            return new
        names = {id(value): name for name, value in caller.f_locals.items()}
        reasons = [
            f"{names.get(id(t), f'input {i}')} was {a}, is {b}"
            for i, (t, a, b) in enumerate(zip(inputs, before, shapes, strict=True))
            if a != b
        ]
        calls, held = self._calls.get(kind, 0), self._held.get(kind, [])
        in_modules = _reasons_in_modules(calls, held, _held_by_modules(caller))
        reasons += in_modules
        if first:
            reasons = [
                "this is its first call, so operations on device tensors before it became a graph of their own; "
                "do them inside the step, or on the host before the tensor is sent",
                *in_modules,
            ]
        elif born := {n: size for n, size in _state_sizes(caller).items() if size > (self._state or {}).get(n, size)}:
            reasons = [
                f"{name} has {size} tensors of state and had {self._state[name]} before its first step: state that is "
                "created inside a step makes the next one another program; create it before, as make_optimizer of "
                f"optim.py does: for each parameter {name}.state[parameter] = {{name: zeros made on the host, sent to "
                "the device}"
                for name, size in born.items()
            ]
        elif not reasons:
            values = [
                f"{name[0]}{''.join(f'[{key!r}]' for key in name[1:])} {numbers_before[name]!r} -> {value!r}"
                for name, value in numbers.items()
                if name in different - always
            ]
            reasons = [
                "no input changed its shape or dtype, so look for a Python number that is part of the program "
                "(0, 1, sizes, positions and dims are; make it a tensor on the device), for an operation on device "
                "tensors between the steps (move it into the step), or for state that was created inside the step; "
                "numbers among the variables there (one written in the call itself is not seen) that changed now, "
                f"and not before: {', '.join(values) or 'none'}"
            ]
        raise RecompileError(
            f"step {step} compiled graph {self._graphs[kind]} of the {kind} step, expected 1, called at "
            f"{_statement_at(caller)}: {'; '.join(reasons)}"
        )


def raise_if_read(error: RuntimeError, kind: str, step: int) -> None:
    """Raises RecompileError, which names the line, for torch_xla's error about a tensor that the step reads."""
    if not any(said in str(error) for said in ("Unexpected execution", "tensor_data")):
        return
    raise RecompileError(
        f"the {kind} step reads a tensor inside the compiled function in step {step}, at {line_of(error)}; expected "
        "none of .item(), print(tensor), if on a tensor there: keep the value on the device, or read it at a log line; "
        "an optimizer of torch.optim reads its step size: use make_optimizer of optim.py (torch_xla says: "
        f"{first_line(error)})"
    ) from error


@dataclass(frozen=True)
class Held:
    """A parameter or buffer on the device."""

    kind: str
    shape: str
    operation: str
    """By what torch_xla is still to compute it; prim::Constant is a scalar of 0 or 1 from the host. "": it is there."""


def _held_by_modules(frame: types.FrameType) -> dict[str, Held]:
    """Parameters and buffers of the modules among a function's variables, by path, each once."""
    found, seen = {}, set()
    for name, module in frame.f_locals.items():
        if not isinstance(module, torch.nn.Module):
            continue
        named = [("buffer", *pair) for pair in module.named_buffers(name)]
        named += [("parameter", *pair) for pair in module.named_parameters(name)]
        for kind, path, tensor in named:
            if tensor.device.type == "xla" and id(tensor) not in seen:
                seen.add(id(tensor))
                found[path] = Held(kind, _shape_of(tensor), _pending_operation(tensor))
    return found


def _pending_operation(tensor: torch.Tensor) -> str:
    text = torch_xla._XLAC._get_xla_tensor_debug_info(getattr(tensor, "global_tensor", tensor))
    line = next(line for line in text.splitlines() if line.startswith("IR: "))
    operation = re.search(r"\w+::\w+", line.rpartition("] ")[2])  # behind the scope in brackets; none: IR: None
    return operation[0] if operation and operation[0] != "xla::device_data" else ""


def _shape_of(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


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
        common = [path for path in new if path in old]
        found[CREATED] = [f"{new[p].kind} {p} ({new[p].shape})" for p in new if p not in old]
        found[RESHAPED] = [f"{p} was {old[p].shape}, is {new[p].shape}" for p in common if old[p].shape != new[p].shape]
    texts = {remedy: names[:5] + [f"{len(names) - 5} more"] * (len(names) > 5) for remedy, names in found.items()}
    return [f"{', '.join(names)} {remedy}" for remedy, names in texts.items() if names]


PENDING = (
    "was still to be computed on the device when the step was called; compute it on the host before model.to(device), "
    "or inside the step, or call torch_xla.sync() before the loop"
)
CREATED = "was created in a step, so the next one has an input more: register it in __init__, in its final shape"
RESHAPED = "in the step after: give it its final shape and dtype in __init__, and write into it"
CONSTANT = (
    "is a scalar, and of 0 or 1 torch_xla makes a constant instead of sending it: give its module to run.restore(), "
    "which sends it, or give it the shape (1,)"
)


def _numbers_in(frame: types.FrameType) -> dict[tuple, Any]:
    """Python numbers among a function's variables, in tuples and lists there, and in optimizers' groups, by path."""
    found = {}
    for name, value in frame.f_locals.items():
        if isinstance(value, (int, float)):  # bool is an int
            found[name,] = value
        elif isinstance(value, (tuple, list)):
            found |= {(name, i): one for i, one in enumerate(value[:100]) if isinstance(one, (int, float))}
        elif isinstance(value, torch.optim.Optimizer):
            for i, group in enumerate(value.param_groups):
                for key, option in group.items():
                    if isinstance(option, (int, float)):
                        found[f"{name}.param_groups", i, key] = option
    return found


def _state_sizes(frame: types.FrameType) -> dict[str, int]:
    """Tensors in the state of each optimizer among a function's variables."""
    found = {name: value for name, value in frame.f_locals.items() if isinstance(value, torch.optim.Optimizer)}
    return {
        name: sum(isinstance(value, torch.Tensor) for state in optimizer.state.values() for value in state.values())
        for name, optimizer in found.items()
    }


def _statement_at(frame: types.FrameType) -> str:
    """file:line and the text of the call of the step: the last statement inside the with block that the frame is at."""
    path, here = frame.f_code.co_filename, frame.f_lineno
    tree = ast.parse("".join(linecache.getlines(path)))
    blocks = [node for node in ast.walk(tree) if isinstance(node, ast.With) and node.lineno <= here <= node.end_lineno]
    if not blocks:  # without its source, for example typed into a prompt
        return f"{path}:{here}"
    last = max(blocks, key=lambda block: block.lineno).body[-1]
    text = ast.unparse(last)
    return f"{path}:{last.lineno} ({text if len(text) <= 120 else text[:117] + '...'})"
