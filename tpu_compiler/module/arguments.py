"""For a module without a script: what its forward takes, what is counted of it, and what a report says of it."""

import inspect

import torch
from torch.utils._pytree import tree_map_only

from tpu_compiler.module.kv_cache import decode_inputs
from tpu_compiler.module.programs import Question
from tpu_utils.base.errors import InputError
from tpu_utils.options.fields import nearest


def meta_inputs(question: Question, model: torch.nn.Module) -> tuple[list, dict]:
    """The inputs as forward takes them, tensors without memory. Raises InputError for a name it does not take."""
    signature = inspect.signature(model.forward).parameters.values()
    names = [p.name for p in signature if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes_all = any(p.kind == p.VAR_KEYWORD for p in signature)
    args, kwargs = [], {}
    for given in question.inputs:
        value = (
            torch.empty(given.shape, dtype=getattr(torch, given.dtype), device="meta") if given.dtype else given.value
        )
        if not given.name:
            args.append(value)
        elif given.name in names or takes_all:
            kwargs[given.name] = value
        else:
            raise InputError(
                f"inputs: forward of {question.target} takes no {given.name!r}; expected one of {', '.join(names)}"
                f"{nearest(given.name, names)}"
            )
    return args, kwargs


def to_bfloat16(values):
    """Every tensor of floats in a pytree as bfloat16."""

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor

    return tree_map_only(torch.Tensor, cast, values)


def prepare(
    question: Question, level: str, model: torch.nn.Module, args: list, kwargs: dict, notes: list[str]
) -> tuple[list, dict, int]:
    """(args, kwargs, length of the cache) of a step. Sets the model's mode and its precision where nothing trains."""
    model.train(question.mode == "train")
    length = 0
    if question.mode == "decode":
        kwargs, length = decode_inputs(question, model, kwargs or dict(enumerate(args)))
        args = []
    elif getattr(getattr(model, "config", None), "use_cache", None):
        model.config.use_cache = False
        notes.append("use_cache of its configuration is turned off: no key-value cache is made")
    if level == "conservative":
        notes.append("float32 tensors, which a TPU multiplies in one pass of bfloat16 by default")
    elif question.mode != "train":
        model.to(torch.bfloat16)
        args, kwargs = to_bfloat16((args, kwargs))
        notes.append("weights and inputs in bfloat16, no float32 masters to keep")
    return args, kwargs, length


def sizes_of(question: Question, args: list, kwargs: dict) -> dict:
    """examples of a step and their unit: tokens where the first tensor holds integers of shape (batch, time)."""
    first = next(a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor))
    if first.dim() == 2 and not first.is_floating_point():
        return dict(examples=first.numel(), unit="tokens")
    return dict(examples=first.shape[0] if first.dim() else 1)


def settings_of(question: Question) -> dict:
    inputs = [f"{i.name}={i.dtype}{list(i.shape)}" if i.dtype else f"{i.name}={i.value!r}" for i in question.inputs]
    fields = dict(target=question.target, inputs=inputs, mode=question.mode, mesh=question.mesh)
    return fields | (dict(optimizer=question.optimizer, loss=question.loss) if question.mode == "train" else {})


def model_flops(forward: int, question: Question, model: torch.nn.Module, notes: list[str]) -> float | None:
    """FLOPs of a step from those of the forward pass: three times as many for training. None where parameters are
    frozen: it depends on which."""
    times = 3 if question.mode == "train" else 1
    if times == 3 and not all(parameter.requires_grad for parameter in model.parameters()):
        notes.append("model FLOPs: not counted, because some parameters are frozen; so there is no MFU")
        return None
    said = ", times 3 for a training step" if times == 3 else ""
    notes.append(f"model FLOPs: {forward:.3g}, the products and convolutions of the forward pass{said}")
    return float(forward * times) or None
