"""The learning rates of an optimizer's groups."""

import math

import torch

from tpu_utils.base.errors import InputError


def keep_rate_ratios(optimizer: torch.optim.Optimizer) -> None:
    """Notes in each group its learning rate over the optimizer's own, which it keeps through the run, as under a
    scheduler of torch. A group has its rate until step_optimizer() puts that of the step there.

    Raises InputError for a rate that is no number, and for a scheduler of torch, whose rates would be overwritten.
    """
    for number, group in enumerate(optimizer.param_groups):
        if "initial_lr" in group:  # LRScheduler.__init__ writes it
            raise InputError(
                "a scheduler of torch.optim.lr_scheduler has this optimizer, and step_optimizer() overwrites its rates "
                "in each step; expected --scheduler, or in place of learning_rates() a table of your own: a tensor "
                "(num_steps,), float32"
            )
        if group["lr"] is optimizer.defaults["lr"]:
            group["lr_ratio"] = 1.0
        elif "lr_ratio" not in group:
            own, base = (float(torch.as_tensor(rate).max()) for rate in (group["lr"], optimizer.defaults["lr"]))
            if not (0 <= own < math.inf and 0 < base < math.inf):
                raise InputError(
                    f"parameter group {number} has lr {own:g}, its optimizer {base:g}; expected numbers, not below 0"
                )
            group |= dict(lr_ratio=own / base, lr=torch.full((1,), own))  # a tensor, as the step puts there


def settle(optimizer: torch.optim.Optimizer) -> None:
    """Make its groups what step 1 makes of them: else step 2 would be another graph of torch.compile's."""
    keep_rate_ratios(optimizer)
    on_device: dict[int, torch.Tensor] = {}
    for group in optimizer.param_groups:
        group.setdefault("capturable", True)  # Dynamo sets it
        if isinstance(rate := group["lr"], torch.Tensor):  # the step puts its own there, one for all groups
            group["lr"] = on_device.setdefault(id(rate), rate.to(group["params"][0].device))
