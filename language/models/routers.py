"""The routers of a mixture of experts: which experts a token chooses.

Shape suffixes: B batch, T time, D width, X experts, J experts of a token.
"""

import math

import torch
import torch.nn.functional as F


def route(y_BTD, router_XD, per_token: int, normalised: bool):
    """(weights (B, T, J) float32, experts (B, T, J) int32, routing (B, 2 X + 1) float32) of the J likeliest experts.

    Computed in float32. normalised: the weights of a token add up to 1. routing, of each sequence: the mean probability
    of each expert, the mean square of the logarithm of their sum, and how many tokens chose it.
    """
    logits = F.linear(y_BTD.float(), router_XD.float())
    left, chosen = logits.detach(), []
    for _ in range(per_token):  # a sort takes longer on a TPU
        chosen.append(one_hot_mask(left.argmax(-1), len(router_XD)))
        left = left.masked_fill(chosen[-1], -math.inf)
    chosen_BTJX = torch.stack(chosen, 2)
    picked, total = torch.where(chosen_BTJX, logits[:, :, None], 0.0).sum(-1), logits.logsumexp(-1)
    weights = picked.softmax(-1) if normalised else (picked - total[..., None]).exp()
    parts = logits.softmax(-1).mean(1), (total * total).mean(1, keepdim=True), chosen_BTJX.float().sum((1, 2))
    experts = torch.where(chosen_BTJX, arange_like(len(router_XD), logits), 0.0).sum(-1).int()
    return weights, experts, torch.cat(parts, -1)


def arange_like(count: int, like) -> torch.Tensor:
    """0 to count - 1, float32: integers of a step would be a constant array of the program."""
    return torch.arange(count, dtype=torch.float32, device=like.device)


def full_like_scalar(value: int, like) -> torch.Tensor:
    """(1,) float32. A Python number is an input of the program to torch_xla, and what each device of a mesh computes
    for itself would ask a loop around it for an input of each device."""
    return torch.arange(value, value + 1, dtype=torch.float32, device=like.device)


def one_hot_mask(numbers_of, count: int) -> torch.Tensor:
    """(..., count) bool, true where the last axis is the number."""
    return numbers_of[..., None].float() == arange_like(count, numbers_of)
