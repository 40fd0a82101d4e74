"""Losses whose logits are never whole in memory: --loss_parts. Llama 3 8B has 8.4 GB of them for 32,768 tokens.

Shape suffixes: B batch, T time, D embedding width, V padded vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from language.models.operations import losses
from tpu_utils.base.errors import InputError
from tpu_utils.device import optimization_barrier_


class LogitsInParts(NamedTuple):
    """What logits are made of, in their place: losses() of operations.py makes them for a part of each sequence at a
    time. product(x, weight, mesh) gives logits."""

    x_BTD: torch.Tensor
    weight_VD: torch.Tensor
    parts: int
    product: Callable

    def __getattr__(self, name: str):
        if name.startswith("_"):  # what libraries ask of anything
            raise AttributeError(name)
        raise InputError(
            f"the step takes {name} of logits that loss_parts divides; expected losses() of language/models/operations"
            ".py, which makes them part by part, or --loss_parts 1"
        )

    def losses(self, targets_BT, vocab_size: int, mesh=None):
        """(B, T) float32, as of losses()."""

        def of_part(x, weight, targets):
            return losses(self.product(x, weight, mesh), targets, vocab_size, mesh)

        return LossesInParts.apply(self.x_BTD, self.weight_VD, targets_BT, of_part, self.parts)


class LossesInParts(torch.autograd.Function):
    """The parts one after the other, and again in the backward pass. The gradient of the weight adds up in float32."""

    @staticmethod
    def forward(ctx, x_BTD, weight_VD, targets_BT, of_part, parts):
        ctx.save_for_backward(x_BTD, weight_VD, targets_BT)
        ctx.of_part, ctx.parts = of_part, parts
        found = []
        for x, targets in zip(x_BTD.chunk(parts, 1), targets_BT.chunk(parts, 1), strict=True):
            with torch.enable_grad():  # as in the backward pass: an evaluation's sums are rounded otherwise
                found.append(of_part(*leaves([x, weight_VD], found[-1:]), targets).detach())
        return torch.cat(found, 1)

    @staticmethod
    def backward(ctx, grad_BT):
        x_BTD, weight_VD, targets_BT = ctx.saved_tensors
        found = []
        total = torch.zeros_like(weight_VD, dtype=torch.float32)
        for x, targets, grad in zip(*(t.chunk(ctx.parts, 1) for t in (x_BTD, targets_BT, grad_BT)), strict=True):
            inputs = leaves([x, weight_VD], [grad, total])
            with torch.enable_grad():
                grad_x, grad_weight = torch.autograd.grad(ctx.of_part(*inputs, targets), inputs, grad)
            found.append(grad_x)
            total = total + grad_weight
        optimization_barrier_([*found, total])  # or the last part's whole gradient waits for its sum over devices
        return torch.cat(found, 1), total.to(weight_VD.dtype), None, None, None


def leaves(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors as leaves of a graph, read once the others are computed: so XLA has one part in memory at a time."""
    held = [t.detach().clone() for t in (*tensors, *others)]
    optimization_barrier_(held)
    return [t.requires_grad_() for t in held[: len(tensors)]]
