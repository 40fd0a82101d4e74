"""What a backend computes otherwise than PyTorch, as PyTorch has it: averages of BatchNorm and InstanceNorm, and elu.

torch_xla 2.9 puts into running_var what XLA's BatchNormTraining gives, the variance over all n values of a channel
(torch_xla/csrc/tensor_methods.cpp, native_batch_norm). PyTorch puts there n / (n - 1) of it, the unbiased estimate
(aten/src/ATen/native/Normalization.cpp, batch_norm_cpu_update_stats_template). Training reads neither, an evaluation
does. Averages of a checkpoint are taken as they are: the next steps move them on. And a layer in eval mode while others
learn has no backward pass there.

Its gradients of elu, selu and celu are of their input taken for their result: elu_backward does not hand on which of
both it is given (torch_xla/csrc/aten_xla_type.cpp).
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.nn.modules.batchnorm import _BatchNorm

PLAIN_FORWARD, PLAIN = _BatchNorm.forward, {"batch_norm": F.batch_norm, "instance_norm": F.instance_norm}


def average_as_pytorch(biased_on: str = "") -> None:
    """Functions of torch.nn.functional and BatchNorm with momentum=None, for the rest of the process.

    biased_on: the type of the devices whose running_var is biased; "": none.
    """
    F.batch_norm = _averaging("batch_norm", biased_on)
    F.instance_norm = _averaging("instance_norm", biased_on)
    _BatchNorm.forward = _forward


@functools.cache
def elu_as_pytorch() -> torch.library.Library:
    """elu, selu and celu of torch_xla's tensors, of operations whose gradients are right, while the result lives."""

    def elu(input: torch.Tensor, alpha=1.0, scale=1.0, input_scale=1.0) -> torch.Tensor:
        return scale * torch.where(input > 0, input, alpha * torch.expm1(input.clamp(max=0) * input_scale))

    kernels = torch.library.Library("aten", "IMPL")
    kernels.impl("elu", elu, "AutogradXLA")
    kernels.impl("celu", lambda input, alpha=1.0: elu(input, alpha, 1.0, 1 / alpha), "AutogradXLA")
    kernels.impl("selu", lambda input: elu(input, 1.6732632423543772, 1.0507009873554805), "AutogradXLA")
    return kernels


def _averaging(name: str, biased_on: str) -> Callable:
    """The function of that name, which takes a tensor as momentum too."""
    plain, for_each = PLAIN[name], name == "instance_norm"

    @functools.wraps(plain)
    def normalize(
        input,
        running_mean=None,
        running_var=None,
        weight=None,
        bias=None,
        training=for_each,
        momentum=0.1,
        eps=1e-5,
        use_input_stats=True,
    ):
        learns, is_biased = training and use_input_stats, input.device.type == biased_on
        if is_biased and not learns and running_var is not None and torch.is_grad_enabled():
            # frozen: torch_xla's backward pass wants a mean of the batch, and there is none ("offset factor is 0")
            shape = (1, -1, *[1] * (input.dim() - 2))
            scale = torch.rsqrt(running_var + eps) * (1 if weight is None else weight)
            output = (input - running_mean.view(shape)) * scale.view(shape)
            return (output if bias is None else output + bias.view(shape)).to(input.dtype)
        if not learns or running_var is None or not (is_biased or isinstance(momentum, torch.Tensor)):
            return plain(input, running_mean, running_var, weight, bias, learns, momentum, eps)
        # autograd keeps the averages that it is given, so they must not change behind it: these are new ones
        mean, var = torch.zeros_like(running_mean), torch.zeros_like(running_var)
        output = plain(input, mean, var, weight, bias, True, 1.0, eps)
        values = input[:, 0].numel() // (len(input) if for_each else 1)
        unbiased = values / (values - 1) if is_biased else 1.0
        with torch.no_grad():
            running_mean += (mean - running_mean) * momentum
            running_var += (var * unbiased - running_var) * momentum
        return output

    return normalize


def _forward(self: _BatchNorm, input: torch.Tensor) -> torch.Tensor:
    """With momentum=None PyTorch reads num_batches_tracked, on the host: inside of a step it stays on the device."""
    if self.momentum is not None or not (self.training and self.track_running_stats):
        return PLAIN_FORWARD(self, input)
    self._check_input_dim(input)
    self.num_batches_tracked.add_(1)
    share = 1.0 / self.num_batches_tracked
    return F.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, True, share, self.eps)
