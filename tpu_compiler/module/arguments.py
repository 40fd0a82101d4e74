"""For a module without a script: what its forward takes, what is counted of it, and what a report says of it."""

import inspect

import torch

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


def to_bfloat16(value):
    return value.to(torch.bfloat16) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


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


def model_flops(forward: int, question: Question, notes: list[str]) -> float | None:
    """FLOPs of a step from those of the forward pass: three times as many for training."""
    times = 3 if question.mode == "train" else 1
    said = ", times 3 for a training step" if times == 3 else ""
    notes.append(f"model FLOPs: {forward:.3g}, the products and convolutions of the forward pass{said}")
    return float(forward * times) or None
