import torch


class Lion(torch.optim.Optimizer):
    """Steps of one size, in the sign of a mean of the gradients."""

    def __init__(self, parameters, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(parameters, dict(lr=torch.tensor(1e-4), betas=betas, weight_decay=weight_decay))
        for parameter in (p for group in self.param_groups for p in group["params"]):
            self.state[parameter] = {"momentum": torch.zeros(parameter.shape).to(parameter.device)}

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in (p for p in group["params"] if p.grad is not None):
                momentum = self.state[parameter]["momentum"]
                direction = torch.lerp(momentum, parameter.grad, 1 - beta1).sign()
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * direction)
                momentum.lerp_(parameter.grad, 1 - beta2)
