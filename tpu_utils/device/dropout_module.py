"""nn.Dropout by the masks of dropout.py: put Dropout in its place, or call replace_dropout(module, seed) where a model
of your own is made.
"""

import zlib

import torch
from torch import nn

from tpu_utils.base.errors import InputError, TrainingError
from tpu_utils.device import DEVICE_TYPE, global_ordinal, world_size
from tpu_utils.device.dropout import dropout, row_keys


class Dropout(nn.Module):
    """nn.Dropout without its upload in every step. Axis 0 of its input has the rows of the batch.

    step: how often it was called in training, (1,) int32, part of the state_dict. salt: any integer, another one for
    each Dropout of a model. A DDP replica holds every n-th row of the global batch, and uses the masks of those rows.
    """

    def __init__(self, p: float, salt: int):
        super().__init__()
        if not 0 <= p < 1:
            raise InputError(f"the probability of dropout is {p}; expected 0 <= p < 1")
        self.p, self.salt = p, salt
        self.register_buffer("step", torch.zeros(1, dtype=torch.int32))  # (1,): a scalar () would become a constant
        self.replica: torch.Tensor | None = None  # its index, (1,) int32: an input, as all run one program

    def _apply(self, fn, recurse=True):
        """Called by to(device). replica is no buffer: DDP's start would broadcast the first replica's to all."""
        super()._apply(fn, recurse)
        if self.step.device.type == DEVICE_TYPE and world_size() > 1:
            self.replica = torch.tensor([global_ordinal()], dtype=torch.int32).to(self.step.device)
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training or not self.p:
            return x
        if torch._C._current_graph_task_id() != -1:  # inside a backward pass
            raise TrainingError(
                "a Dropout module is called once more in the backward pass, by a checkpoint that computes its "
                "activations again, and its step count has moved on, so the mask would be another; leave it outside "
                "of the checkpoint, or hand keys of row_keys() to the checkpoint and call dropout(x, p, keys) inside"
            )
        rows = torch.arange(x.shape[0], dtype=torch.int32, device=x.device)
        if self.replica is not None:
            rows = rows * world_size() + self.replica
        keys_B = row_keys(self.step, self.salt, rows)
        self.step.add_(1)
        return dropout(x, self.p, keys_B)

    def extra_repr(self) -> str:
        return f"p={self.p}, salt={self.salt}"


def replace_dropout(model: nn.Module, seed: int) -> nn.Module:
    """The model with a Dropout in place of every nn.Dropout, its salt made of the seed and the module's name.

    Call it before the model moves to the device. Raises InputError for a module that draws random numbers in another
    way; calls of F.dropout cannot be seen from here, but are an upload per step in summary.json.
    """
    for name, module in model.named_modules():
        kind = type(module).__name__
        rate = getattr(module, "dropout", 0.0) if isinstance(module, nn.MultiheadAttention | nn.RNNBase) else 0.0
        if isinstance(module, nn.modules.dropout._DropoutNd) and type(module) is not nn.Dropout:
            rate = module.p
        if kind == "StochasticDepth":  # torchvision's
            rate = module.p
        if rate:
            raise InputError(
                f"{name or 'the model'} is a {kind} with dropout {rate}, which uploads a seed in every step; only "
                "nn.Dropout can be replaced; set it to 0 or write that module with dropout.dropout"
            )
    made: dict[nn.Module, Dropout] = {}  # a module in two places stays one
    for name, module in list(model.named_modules(remove_duplicate=False)):
        for child_name, child in list(module._modules.items()):  # named_children() leaves the second place out
            if type(child) is nn.Dropout:
                path = f"{name}.{child_name}".lstrip(".")
                made.setdefault(child, Dropout(child.p, zlib.crc32(f"{seed} {path}".encode())))
                setattr(module, child_name, made[child].train(child.training))
    return model
