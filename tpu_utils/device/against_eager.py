"""The first call of a compiled step beside the same call as it is written: a compiler may compute something else.

torch 2.11 loses the gradient of some torch.autograd.Functions in a graph that holds loss.backward(), without a word.
No version is asked for: what the step gives and what it leaves in its arguments is compared.
"""

import copy
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from tpu_utils.base.errors import InputError, first_line

TOLERANCE = 0.1
"""Allowed error of what a call changes in a tensor, relative to that change. In bfloat16 two orders of sums differ by
less; a lost gradient is an error of 1."""
NOISE = 1e-3
"""Also allowed: an error of this share of what the call changes in all tensors of a kind. That is rounding, such as in
the gradient of a bias before BatchNorm."""
LARGEST_RATIO = 2.0
"""Also allowed where a step computes in 16 bits: an error of this many times what rounding its weights changes, if
neither norm is this many times the other. In bfloat16 gradients of ResNet-50's first step on random pictures are off by
more than their length; one that is lost, or left from elsewhere, has another length."""
ROUNDING = 2.0**-9
"""Relative rounding error of bfloat16."""
LEFT = "gradients left behind"
Tensors = dict[tuple[str, str], torch.Tensor]
"""By kind and name."""


def first_call(function: Callable, compiled: Callable, arguments: tuple, keywords: dict[str, Any]) -> Any:
    """compiled(*arguments, **keywords). Raises InputError where function, on copies, gives or leaves other tensors.

    Both draw the same from torch's generator. A function that has its model from elsewhere than its arguments is not
    tried: it would train it twice.
    """
    outside = inspect.getclosurevars(inspect.unwrap(function))
    own = nn.Module | torch.optim.Optimizer | torch.Tensor
    held = [name for name, value in {**outside.globals, **outside.nonlocals}.items() if isinstance(value, own)]
    if held:
        print(f"check      {function.__name__} is not compared with eager PyTorch: {held[0]} is no argument of it")
        return compiled(*arguments, **keywords)
    named = inspect.signature(function).bind(*arguments, **keywords).arguments
    # on the host: a GPU has no memory left for what only the comparison needs
    before = {key: tensor.detach().to("cpu", copy=True) for key, tensor in tensors_of(named).items()}
    noise: dict[tuple[str, str], float] = {}
    try:
        with SeesSixteenBits() as seen:
            expected = eager_changes(function, named, before)
        if seen.any:
            rounded = eager_changes(function, named, before, rounded=True)
            noise = {key: (rounded[key] - tensor).norm().item() for key, tensor in expected.items()}
    except torch.OutOfMemoryError as error:  # a compiled step needs less
        print(f"check      {function.__name__} is not compared with eager PyTorch: {first_line(error)}", flush=True)
        expected = None
    except RuntimeError as error:
        from tpu_utils.device.no_graph import raise_if_not_deterministic  # only for an error

        raise_if_not_deterministic(error)
        raise
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    result = compiled(*arguments, **keywords)
    if expected is not None:
        check_same(function.__name__, changes(before, tensors_of({**named, "result": result})), expected, noise)
    return result


class SeesSixteenBits(TorchFunctionMode):
    """Whether an operation inside gives a tensor of 16 bits."""

    any = False

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype in (torch.bfloat16, torch.float16):
            self.any = True
        return result


def eager_changes(function: Callable, named: dict[str, Any], before: Tensors, rounded: bool = False) -> Tensors:
    """What function changes in copies of its arguments, and gives. The generators are then where they were.

    rounded: of modules whose weights are off by up to ROUNDING.
    """
    copied = copy.deepcopy(named)
    weights = [p for value in copied.values() if isinstance(value, nn.Module) and rounded for p in value.parameters()]
    for weight in weights:
        weight.detach().mul_(1 + ROUNDING * torch.sin(1e4 * weight.detach()))  # the generators stay as they are
    for name, value in named.items():
        if isinstance(value, torch.optim.Optimizer):  # its own copy leaves out what a subclass added
            vars(copied[name]).update({key: own for key, own in vars(value).items() if key not in vars(copied[name])})
    bound = inspect.signature(function).bind_partial()
    bound.arguments = copied
    with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_initialized() else []):
        result = function(*bound.args, **bound.kwargs)
    return changes(before, tensors_of({**copied, "result": result}))


def tensors_of(named: dict[str, Any]) -> Tensors:
    """All in modules, optimizers, collections and objects with fields.

    A parameter is left out where an optimizer averages its gradient: that tells it better than Adam's first step, which
    is of one size for any gradient.
    """
    found: Tensors = {}
    modules = {name: value for name, value in named.items() if isinstance(value, nn.Module)}
    names = {id(p): f"{name}.{path}" for name, module in modules.items() for path, p in module.named_parameters()}
    averaged = set()
    for name, value in named.items():
        if isinstance(value, torch.optim.Optimizer):
            for parameter, state in value.state.items():
                for kind, tensor in state.items():
                    if isinstance(tensor, torch.Tensor):
                        found[f"{name}.state {kind}", names.get(id(parameter), "?")] = tensor
                        averaged |= {id(parameter)} if tensor.shape == parameter.shape else set()
        elif not isinstance(value, nn.Module):
            found |= {(path, path): tensor for path, tensor in below(name, value).items()}
    for name, module in modules.items():
        for path, parameter in module.named_parameters():
            if id(parameter) not in averaged:
                found["parameters", f"{name}.{path}"] = parameter
            if parameter.grad is not None:
                found[LEFT, f"{name}.{path}"] = parameter.grad
        for path, buffer in module.named_buffers():
            found[path.rpartition(".")[2], f"{name}.{path}"] = buffer
    return {key: tensor.to_local() if isinstance(tensor, DTensor) else tensor for key, tensor in found.items()}


def below(path: str, value: Any) -> dict[str, torch.Tensor]:
    """Tensors in tuples, lists, mappings and what has fields."""
    if isinstance(value, torch.Tensor):
        return {path: value}
    if isinstance(value, tuple | list):
        items = {str(i): one for i, one in enumerate(value)}
    else:
        items = value if isinstance(value, dict) else getattr(value, "__dict__", {})
    return {name: tensor for key, one in items.items() for name, tensor in below(f"{path}.{key}", one).items()}


def changes(before: Tensors, after: Tensors) -> Tensors:
    """What a call has made of each tensor; of a new one, from 0."""
    there = {key: tensor.detach().to("cpu") for key, tensor in after.items()}
    return {key: tensor.float() - before.get(key, torch.zeros_like(tensor)) for key, tensor in there.items()}


def check_same(name: str, found: Tensors, expected: Tensors, noise: dict[tuple[str, str], float]) -> None:
    """Raises InputError, which names the tensor that is furthest off. noise: the norm of what rounding changes."""
    sizes: dict[str, float] = {}
    for (kind, _), tensor in expected.items():
        sizes[kind] = sizes.get(kind, 0.0) + tensor.norm().item() ** 2
    worst = []
    for key in found.keys() | expected.keys():
        zero = torch.zeros(())
        here, there = found.get(key, zero), expected.get(key, zero)
        size, apart = there.norm().item(), (here - there).norm().item()
        allowed = TOLERANCE * size + NOISE * sizes.get(key[0], 0.0) ** 0.5
        if size / LARGEST_RATIO <= here.norm().item() <= size * LARGEST_RATIO:
            allowed = max(allowed, LARGEST_RATIO * noise.get(key, 0.0))
        if apart > allowed or (math.isnan(apart) and not math.isnan(size)):
            worst.append((-apart / (size + apart), key, here.norm().item(), size))
    if not worst:
        return
    _, (kind, tensor), here, there = min(worst)
    what = kind if kind == tensor else f"{kind} of {tensor}"
    remedy = "another torch (requirements-compile.txt), or operations of torch in place of a torch.autograd.Function"
    if kind == LEFT:
        remedy = "zero_grad(set_to_none=True) of the model or optimizer, which a graph takes in"
    raise InputError(
        f"torch.compile of torch {torch.__version__} computes something else of {name} than PyTorch without it: its "
        f"first call changes {what} by {here:.4g}, expected {there:.4g} (norms), and {len(worst) - 1} more tensors are "
        f"off; use {remedy}"
    )
