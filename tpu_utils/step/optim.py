"""Learning rates over a run, optimizers whose state is there before step 1, the gradient's norm and the update."""

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch

from tpu_utils.base.errors import InputError

if TYPE_CHECKING:
    from tpu_utils.options.train_config import TrainConfig


def learning_rates(config: "TrainConfig", num_steps: int) -> torch.Tensor:
    """The learning rate of every step: (num_steps,) float32, every value above 0.

    The table goes to the device once and the compiled step looks its own value up: a rate that came from Python would
    be uploaded each step, and one that is exactly 0 or 1 would be baked into the graph and cost a second one.
    Warm-up counts from (s + 1) / warmup_steps; the decay runs over the steps that are left and would reach 0 one step
    after the last.
    """
    return torch.from_numpy(rates_of(np.arange(num_steps, dtype=np.float64), config, num_steps))


def rates_of(step: np.ndarray, config: "TrainConfig", num_steps: int) -> np.ndarray:
    """The learning rates, float32, of some of the steps 0, 1, ... of a run of num_steps."""
    after = step - config.warmup_steps
    progress = np.clip(after / max(1, num_steps - config.warmup_steps), 0, 1)
    shapes = {
        "constant": np.ones(len(step)),
        "linear": 1 - progress,
        "cosine": (1 + np.cos(np.pi * progress)) / 2,
        "step": np.float64(config.decay_factor) ** np.maximum(0, after // config.decay_every),
        "wsd": np.minimum(1, (num_steps - step) / max(1, round(config.decay_fraction * num_steps))),
    }
    if config.scheduler in ("linear", "cosine", "wsd"):
        last = config.final_learning_rate_fraction
        shapes[config.scheduler] = last + (1 - last) * shapes[config.scheduler]
    warm_up = np.minimum(1, (step + 1) / config.warmup_steps) if config.warmup_steps else 1
    limits = np.finfo(np.float32)  # step decay of a long run can underflow
    rates = np.maximum(config.learning_rate * warm_up * shapes[config.scheduler], limits.tiny)
    if len(rates) and not rates.max() <= limits.max:  # nan included
        raise InputError(
            f"learning_rate is {config.learning_rate} and {config.scheduler} takes it to {rates.max():g}; expected at "
            f"most {limits.max:g}, the largest float32"
        )
    return rates.astype(np.float32)


class Adam(torch.optim.Optimizer):
    """Adam, or with decoupled weight decay AdamW, whose learning rate may be a device tensor.

    The same update as torch.optim.Adam(capturable=True), which has a step count on the device for every tensor and
    computes 1 - beta ** step in float32, whose rounding is 3e-5 of 1 - 0.999 (torch/optim/adam.py,
    _single_tensor_adam). Here a group has one count, and expm1 avoids the rounding. A tensor is written by one copy_:
    torch_xla 2.9.0 takes several times as long to trace other in-place operations. The count is not called `step`,
    because torch's load_state_dict leaves a state of that name on the host.
    """

    def __init__(self, params, lr, betas: tuple[float, float], decoupled: bool, weight_decay=0.0, eps=1e-8):
        super().__init__(params, dict(lr=lr, betas=betas, decoupled=decoupled, weight_decay=weight_decay, eps=eps))

    @torch.no_grad()
    def step(self, closure=None):
        assert closure is None, "closures are not supported"
        for group in self.param_groups:
            self.update(group)

    def update(self, group: dict) -> None:
        beta1, beta2 = group["betas"]
        count = self.state[group["params"][0]]["count"].add_(1)  # one step count for the group
        correction1, correction2 = (-torch.expm1(count * (math.log(b) if b else -math.inf)) for b in group["betas"])
        size, root = -group["lr"] / correction1, correction2.sqrt()
        shrink = 1 - group["lr"] * group["weight_decay"]
        for parameter in filter(lambda p: p.grad is not None, group["params"]):
            gradient, state, old = parameter.grad, self.state[parameter], parameter
            if group["weight_decay"] and group["decoupled"]:
                old = parameter * shrink
            elif group["weight_decay"]:
                gradient = gradient + parameter * group["weight_decay"]
            # lerp and addcmul as in torch: other forms round differently once fused with step_optimizer's torch.where
            mean = torch.lerp(state["exp_avg"], gradient, 1 - beta1)
            square = torch.addcmul(state["exp_avg_sq"] * beta2, gradient, gradient, value=1 - beta2)
            state["exp_avg"].copy_(mean)
            state["exp_avg_sq"].copy_(square)
            new = old + mean * size / (square.sqrt() / root + group["eps"])
            parameter.copy_(new if parameter.dim() else new.view(()))  # the rate is (1,), a scalar is ()


def make_optimizer(config: "TrainConfig", parameters, adam: Callable = Adam) -> torch.optim.Optimizer:
    """The optimizer, with its state already there. adam: what is made unless config says sgd.

    State that step 1 creates is an additional input of step 2, hence a second graph. Zeros are made on the host and
    sent, because zeros made on the device are a graph of their own. The step count is (1,), because torch_xla turns a
    host scalar () of 0 or 1 into a constant. A group without parameters is left out; one with "state" names its own.
    A group may have a "lr", "weight_decay", "betas", "eps" or "momentum" of its own: step_optimizer() keeps the ratio
    of its rate to config.learning_rate. Raises InputError for an option that the optimizer would not obey.
    """
    parameters = [given for given in parameters if not isinstance(given, dict) or given["params"]]
    common = dict(lr=torch.full((1,), config.learning_rate), weight_decay=config.weight_decay)
    if config.optimizer == "sgd":
        from tpu_utils.step.sgd import SGD  # only where it is asked for

        optimizer, usual = SGD(parameters, momentum=config.momentum, **common), ("momentum_buffer",)
    elif adam is Adam and config.optimizer not in ("adam", "adamw"):
        raise InputError(
            f"optimizer is {config.optimizer}, which make_optimizer does not make; expected adam, adamw, sgd"
        )
    else:
        betas = (config.adam_beta1, config.adam_beta2)
        optimizer = adam(parameters, betas=betas, decoupled=config.optimizer != "adam", **common)
        usual = ("exp_avg", "exp_avg_sq")
    obeyed = {*optimizer.defaults, "params", "param_names", "state"}
    for number, group in enumerate(optimizer.param_groups):
        if unknown := [name for name in group if name not in obeyed]:
            raise InputError(
                f"parameter group {number} has {unknown[0]} {group[unknown[0]]!r}, which {type(optimizer).__name__} "
                f"does not know; expected some of {', '.join(optimizer.defaults)}; leave it out, or write an optimizer "
                "of your own"
            )
        names = group.get("state", usual)
        for p in group["params"]:
            # compile_for asks about shapes alone: zeros on the device are never computed there, so they take no memory
            like = torch.empty_like(p, device=p.device if config.compile_for else "cpu")
            optimizer.state[p] = {name: torch.zeros_like(like).to(p.device) for name in names}
        if "exp_avg" in names:
            first = group["params"][0]
            optimizer.state[first]["count"] = torch.zeros(1).to(first.device)
    return optimizer


def gradient_norm(parameters: Iterable[torch.nn.Parameter]) -> torch.Tensor:
    """The norm over all gradients, () float32, inside the compiled step. Not finite if one of their values is not."""
    gradients = [p.grad.float() for p in parameters if p.grad is not None]  # None: frozen, or not used
    return torch.stack([(gradient * gradient).sum() for gradient in gradients]).sum().sqrt()


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


def step_optimizer(
    optimizer: torch.optim.Optimizer, rate: torch.Tensor, finite: torch.Tensor, on_nonfinite: str
) -> torch.Tensor | None:
    """optimizer.step() inside the compiled step, at a learning rate (1,) that lies on the device. A group that was made
    with another rate than its optimizer keeps the ratio of the two.

    finite: () bool on the device: whether loss and gradients are finite. on_nonfinite "skip": an update that is not
    finite is left out; returns whether it was, a () bool. "stop": returns None; the run stops when it next reads.
    """
    keep_rate_ratios(optimizer)
    for group in optimizer.param_groups:
        group["lr"] = rate if group["lr_ratio"] == 1 else rate * group["lr_ratio"]
    if on_nonfinite == "stop":
        optimizer.step()
        return None
    # undone inside the graph: no weight decay, no momentum, the same step count
    tensors = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    tensors += [value for parameter in tensors for value in optimizer.state[parameter].values()]
    with torch.no_grad():
        before = [tensor.clone() for tensor in tensors]
        optimizer.step()
        for tensor, old in zip(tensors, before, strict=True):
            tensor.copy_(torch.where(finite, tensor, old))
    return ~finite
