"""What a step computes of the routers of a mixture of experts: their losses, and how evenly experts are used.

Shape suffixes: B batch, T time, X experts, L layers.
"""

import math

REPORTED = ("balance_loss", "router_z", "largest_load", "dropped_tokens")
"""What a step reports of its routers: see with_routers()."""


def slots_of_capacity(shape, length: int, capacity: float) -> int:
    """Slots of an expert in a sequence of this length: a multiple of 8, and no more than there are tokens."""
    share = length * shape.experts_per_token / shape.num_experts
    return min(length, -(-math.ceil(share * capacity) // 8) * 8)


def with_targets(targets_BT):
    """(B, 1), 1.0 for each sequence that has a target, 0.0 for those that fill up a batch."""
    return (targets_BT >= 0).any(1, keepdim=True).float()


def with_routers(loss, routing, targets_BT, config) -> tuple:
    """(what the gradients are of, the loss, REPORTED) of a micro-batch. loss: summed over its targets. routing: as a
    model's forward() gives it; None: there are no experts, and nothing is added. Sequences without a target do not
    count.

    balance_loss: X sum_x f_x P_x, mean over layers, where f_x of the tokens chose expert x, of mean probability P_x
    (Fedus et al. 2021; transformers takes f and P of all layers together). router_z: the mean square of the logits'
    logsumexp (Zoph et al. 2022). largest_load: of an expert, in even shares, the largest of all layers. dropped_tokens:
    a token counts for each expert of each layer that had no place for it.
    """
    if routing is None:
        return loss, loss
    shape, X, T = config.shape, config.num_experts, targets_BT.shape[1]
    share, counted = 1 / config.gradient_accumulation_steps, with_targets(targets_BT)
    # means over the sequences that count: (L, X) and (L, 1)
    probability, z, chose = (routing * counted).sum(1).div(counted.sum().clamp(min=1.0)).split([X, 1, X], -1)
    balance, z = X * (chose / T * probability).sum(-1).mean(), z.mean()
    loads = chose * (X / (T * shape.experts_per_token))
    places = slots_of_capacity(shape, T, config.expert_capacity) if config.expert_capacity else T
    dropped = ((routing[..., X + 1 :] - places).clamp(min=0) * counted).sum()
    count = (targets_BT >= 0).sum().float()  # the loss is a sum, too
    objective = loss + count * (config.balance_loss * balance + config.router_z_loss * z)
    return objective, loss, balance * share, z * share, loads.flatten().amax(0) * share, dropped


def tokens_of_experts(routing, targets_BT) -> list:
    """[how many tokens of each sequence chose each expert of each layer, (B, L X)]; [] without experts. Sequences
    without targets, which fill up a batch, have 0."""
    if routing is None:
        return []
    chose = routing[..., routing.shape[-1] // 2 + 1 :]
    return [(chose * with_targets(targets_BT)).transpose(0, 1).flatten(1)]


def as_table(chosen, config) -> dict[str, list]:
    """Field of an eval line: of each layer how many tokens chose each expert; {} without experts."""
    if not config.num_experts:
        return {}
    X = config.num_experts
    return {"tokens_of_experts": [[int(n) for n in chosen[at : at + X]] for at in range(0, len(chosen), X)]}
