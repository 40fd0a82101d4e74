"""Stochastic gradient descent, imported where --optimizer is sgd."""

import torch


class SGD(torch.optim.Optimizer):
    """Stochastic gradient descent with momentum whose learning rate may be a device tensor.

    The same update as torch.optim.SGD(momentum=...). That one passes a tensor learning rate as alpha=-lr, which reads
    it back to the host in every step (torch/optim/sgd.py, _single_tensor_sgd).
    """

    def __init__(self, params, lr, momentum: float, weight_decay: float = 0.0):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        assert closure is None, "closures are not supported"
        for group in self.param_groups:
            for parameter in filter(lambda p: p.grad is not None, group["params"]):
                gradient = parameter.grad
                if group["weight_decay"]:
                    gradient = gradient.add(parameter, alpha=group["weight_decay"])
                velocity = self.state[parameter]["momentum_buffer"]
                velocity.mul_(group["momentum"]).add_(gradient)
                change = group["lr"] * velocity
                parameter.sub_(change if parameter.dim() else change.view(()))  # the rate is (1,), a scalar is ()
