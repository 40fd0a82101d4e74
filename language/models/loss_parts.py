"""Losses whose logits are never whole in memory: --loss_parts. Llama 3 8B has 8.4 GB of them for 32,768 tokens.

A part is some columns of the vocabulary, for all tokens (Wijmans et al. 2024, Cut Your Losses): devices gather each
part of the weight once in a pass, and sum its gradient once. Parts of the tokens would gather all of it for each.

Shape suffixes: B batch, T time, N = B * T, D embedding width, V padded vocabulary, C columns of a part; S: devices that
share the vocabulary, V = S * (V / S).
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F

from language.models.operations import row_sums
from tpu_utils.base.errors import InputError
from tpu_utils.device import optimization_barrier_

LANES = 128
"""Columns of a part are a multiple of what a TPU reads at once."""


class LogitsInParts(NamedTuple):
    """What logits are made of, in their place: losses() of operations.py makes them, some columns at a time."""

    x_BTD: torch.Tensor
    weight_VD: torch.Tensor
    parts: int

    def __getattr__(self, name: str):
        if name.startswith("_"):  # what libraries ask of anything
            raise AttributeError(name)
        raise InputError(
            f"the step takes {name} of logits that loss_parts divides; expected losses() of language/models/operations"
            ".py, which makes them part by part, or --loss_parts 1"
        )

    def losses(self, targets_BT, vocab_size: int, mesh=None):
        """(B, T) float32, as of losses()."""
        shards = 1 if mesh is None else mesh.shape()["tensor"]
        weight_SVD = self.weight_VD.unflatten(0, (shards, -1))
        x_ND, target_N = self.x_BTD.flatten(0, 1), targets_BT.flatten()
        return LossesInParts.apply(x_ND, weight_SVD, target_N, self.parts, vocab_size).view(targets_BT.shape)


class LossesInParts(torch.autograd.Function):
    """One part after the other, and again in the backward pass. Columns and the gradient of x add up in float32."""

    @staticmethod
    def forward(ctx, x_ND, weight_SVD, target_N, parts, vocab_size):
        logsumexps, picked = [], []
        for weight_CD, column_C in parts_of(weight_SVD, parts):
            z = F.linear(x_ND, weight_CD).float().masked_fill(column_C >= vocab_size, -1e30)
            largest = z.amax(-1, keepdim=True)
            sums = row_sums((z - largest).exp(), x_ND.dtype == torch.bfloat16)
            logsumexps.append((largest + sums.log())[:, 0])
            picked.append(z.masked_fill(column_C != target_N[:, None], -1e30).amax(-1))
            x_ND, logsumexps[-1], picked[-1] = after_each_other(x_ND, logsumexps[-1], picked[-1])
        logsumexp = torch.stack(logsumexps).logsumexp(0)
        ctx.save_for_backward(x_ND, weight_SVD, target_N, logsumexp)
        ctx.parts, ctx.vocab_size = parts, vocab_size
        return (logsumexp - torch.stack(picked).amax(0)) * (target_N >= 0).float()

    @staticmethod
    def backward(ctx, grad_N):
        x_ND, weight_SVD, target_N, logsumexp = ctx.saved_tensors
        grad_N = (target_N >= 0).float() * grad_N
        grad_x, grad_weight = torch.zeros_like(x_ND, dtype=torch.float32), []
        for weight_CD, column_C in parts_of(weight_SVD, ctx.parts):
            p = (F.linear(x_ND, weight_CD).float() - logsumexp[:, None]).exp()
            p = p.masked_fill(column_C >= ctx.vocab_size, 0.0) - (column_C == target_N[:, None]).float()
            grad_NC = (p * grad_N[:, None]).to(x_ND.dtype)
            grad_x = grad_x + (grad_NC @ weight_CD).float()
            grad_weight.append((grad_NC.t() @ x_ND).unflatten(0, (len(weight_SVD), -1)))
            x_ND, grad_x, grad_weight[-1] = after_each_other(x_ND, grad_x, grad_weight[-1])
        return grad_x.to(x_ND.dtype), torch.cat(grad_weight, 1), None, None, None


def parts_of(weight_SVD, parts: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(weight (C, D), its columns of the vocabulary (C,)) of each part: as many of each shard, at most LANES fewer or
    more than another part has."""
    shards, size, _ = weight_SVD.shape
    column_SV = torch.arange(shards * size, dtype=torch.int32, device=weight_SVD.device).view(shards, size)
    step = LANES * -(-size // (LANES * parts))
    for start in range(0, size, step):
        here = slice(start, start + step)
        yield weight_SVD[:, here].flatten(0, 1), column_SV[:, here].flatten()


def after_each_other(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """The tensors, of which none is read before all are computed: so XLA has one part in memory at a time."""
    held = [tensor.clone() for tensor in tensors]
    optimization_barrier_(held)
    return held
