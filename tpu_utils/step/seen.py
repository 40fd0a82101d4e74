"""What each call of a step was given, so that a later one can be compared with it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from tpu_utils.device import DEVICE_TYPE, pending_operation, sharding_spec


@dataclass(frozen=True)
class Held:
    """A parameter or buffer on the device, or a module."""

    kind: str
    shape: str
    operation: str  # what pending_operation() returns for it
    mode: str
    MODES = ("in eval mode or frozen", "in training")


@dataclass
class Seen:
    """What was seen of a step, or of one of its sets of shapes."""

    step: Callable
    calls: int = 0
    graphs: int = 0
    shapes: dict[str, str] = field(default_factory=dict)
    """Shapes of the last call's tensors, by the names of the step's parameters."""
    numbers: dict[tuple, Any] = field(default_factory=dict)
    """Python numbers of the last call, and which of them that call changed."""
    changed: set[tuple] = field(default_factory=set)
    state: dict[str, int] = field(default_factory=dict)
    """Tensors in the state of each optimizer before the first call."""
    held: list[dict[str, Held]] = field(default_factory=list)
    """What modules held before each of the first two calls."""


def held_by_modules(named: dict[str, Any]) -> dict[str, Held]:
    """Modules, parameters and buffers of the modules among a step's arguments, by path, each once."""
    found, seen = {}, set()
    for name, module in ((name, one) for name, one in named.items() if isinstance(one, torch.nn.Module)):
        for path, one in (*module.named_buffers(name), *module.named_parameters(name)):
            if one.device.type == DEVICE_TYPE and id(one) not in seen:
                seen.add(id(one))
                kind = "parameter" if isinstance(one, torch.nn.Parameter) else "buffer"
                shape = f"{shape_of(one)} {sharding_spec(one)}".rstrip()
                found[path] = Held(kind, shape, pending_operation(one), Held.MODES[one.requires_grad])
        for path, one in module.named_modules(prefix=name) if found else ():
            found[path] = Held("module", "", "", Held.MODES[one.training])
            own = {k: v for k, v in vars(one).items() if isinstance(v, (list, dict, int, float)) and k[0] != "_"}
            modes = {k: repr(v) if isinstance(v, (int, float)) else f"of {len(v)} items" for k, v in own.items()}
            found |= {f"{path}.{k}": Held("value", "", "", mode) for k, mode in modes.items() if k != "training"}
    return found


def shape_of(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def numbers_in(named: dict[str, Any]) -> dict[tuple, Any]:
    """Python numbers among a step's arguments, in tuples and lists there, and in optimizers' groups, by path."""
    found = {}
    for name, value in named.items():
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


def state_sizes(named: dict[str, Any]) -> dict[str, int]:
    """Tensors in the state of each optimizer among a step's arguments."""
    return {
        name: sum(isinstance(value, torch.Tensor) for state in one.state.values() for value in state.values())
        for name, one in named.items()
        if isinstance(one, torch.optim.Optimizer)
    }
