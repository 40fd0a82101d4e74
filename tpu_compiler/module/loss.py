"""For a module without a script: the loss of its training step, and the targets that this loss needs."""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves

from tpu_compiler.module.programs import Question
from tpu_utils.base.errors import InputError


def main_output(output) -> tuple[str, torch.Tensor | None]:
    """(its name, the tensor) that a loss is made of: logits, last_hidden_state, or the first one of floats, whose name
    says which of how many outputs it is."""
    for name in ("logits", "last_hidden_state"):
        value = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if isinstance(value, torch.Tensor):
            return name, value
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    for number, leaf in enumerate(leaves, 1):
        if leaf.is_floating_point():
            return "the output" if len(leaves) == 1 else f"output {number} of {len(leaves)}", leaf
    return "the output", None


def own_loss(output):
    if isinstance(output, torch.Tensor):
        return output if output.numel() == 1 else None
    return output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)


def choose_loss(
    question: Question, output, kwargs: dict, device, notes: list[str]
) -> tuple[Callable, torch.Tensor | None]:
    """(loss of output and targets, targets made from the output's shape)."""
    name, found = main_output(output)
    own = own_loss(output)
    if question.loss == "own" or (question.loss == "auto" and isinstance(own, torch.Tensor)):
        if not isinstance(own, torch.Tensor):
            raise InputError(
                f"loss is own, and {question.target} returns no .loss; expected one, or a scalar; give its labels "
                "among --inputs, or choose --loss cross_entropy or mse"
            )
        notes.append("loss: the module's own")
        return lambda output, _: own_loss(output).float().view(()), None
    if found is None:
        raise InputError(f"{question.target} returns no tensor of floats, so no loss can be made; expected --loss own")
    shape = list(found.shape)
    kind = question.loss
    if kind == "auto":
        of_classes = name == "logits" or (name != "last_hidden_state" and found.dim() in (2, 4))
        kind = "cross_entropy" if of_classes else "mse"
    if kind == "cross_entropy" and found.dim() < 2:
        raise InputError(f"loss is cross_entropy and {name} has the shape {shape}; expected (batch, classes) or more")
    if " of " in name:
        notes.append(
            f"{name} alone is in the loss: nothing is computed for the others; --loss own, if there is a .loss"
        )
    if kind == "mse":
        notes.append(f"loss: mse of {name} {shape} and targets of its shape")
        return lambda output, targets: F.mse_loss(main_output(output)[1].float(), targets), torch.empty(
            shape, device=device
        )
    classes = found.dim() - 1 if found.dim() == 3 else 1
    target_shape = [size for dimension, size in enumerate(shape) if dimension != classes]
    notes.append(f"loss: cross_entropy of {name} {shape}, dimension {classes} the classes")

    def cross_entropy(output, targets):
        logits = main_output(output)[1].float()
        if logits.dim() == 3:
            logits, targets = logits.flatten(0, 1), targets.flatten()
        return F.cross_entropy(logits, targets)

    return cross_entropy, torch.empty(target_shape, dtype=torch.int64, device=device)
