"""Dropout that needs nothing from the host: its masks are computed on the device from a count of steps that lies there.

torch's own dropout on XLA uploads a seed in every step. Here a value is dropped or kept by a hash of the row it belongs
to, its position in the row, the layer, and the step. So a resumed run has the masks of one that never stopped, and rows
have the same masks on any number of devices.

In a model of your own put Dropout in place of nn.Dropout, or call replace_dropout(module, seed) where it is made.
transformer_tpu.py and gpt.py use batch_keys() and dropout().
"""

import zlib

import torch
from torch import nn

from tpu_utils.base.errors import InputError, TrainingError
from tpu_utils.device import DEVICE_TYPE, global_ordinal, world_size


def as_int32(number: int) -> int:
    """The integer with the same last 32 bits in the range of int32."""
    return (number + 2**31) % 2**32 - 2**31


GOLDEN = as_int32(0x9E3779B1)  # 2**32 over the golden ratio: its multiples are spread evenly, however many there are


def mixed(x: torch.Tensor) -> torch.Tensor:
    """A hash of int32, whose arithmetic wraps around: two rounds of lowbias32 (Chris Wellons, hash-prospector).

    torch_xla lowers `>>` to a division rounded towards zero; with a Python number as the shift x becomes 64-bit.
    """
    sixteen = torch.arange(16, 17, dtype=torch.int32, device=x.device)  # a constant; torch.full would be an input
    for factor in (0x7FEB352D, as_int32(0x846CA68B)):
        x = (x ^ (torch.bitwise_right_shift(x, sixteen) & 0xFFFF)) * factor
    return x


def row_keys(step: torch.Tensor, salt: int, rows: torch.Tensor) -> torch.Tensor:
    """One random number for each row of the batch in this step, (rows,) int32.

    step: (1,) int32 on the device, the count of steps. salt: any integer, such as the run's seed. rows: (rows,) int32,
    the number of each row in the global batch.
    """
    return mixed(mixed(step * GOLDEN + as_int32(salt * GOLDEN)) + rows * GOLDEN)


def batch_keys(step: torch.Tensor, salt: int, batch: torch.Tensor, first: int = 0) -> torch.Tensor:
    """row_keys of all rows of a batch (B, ...), (B,) int32. first: the number of its first row in the global batch."""
    rows = torch.arange(first, first + len(batch), dtype=torch.int32, device=batch.device)
    return row_keys(step, salt, rows)


def layer_keys(keys_B: torch.Tensor, count: int) -> torch.Tensor:
    """Keys for `count` calls of dropout in a model, (count, B) int32, from those of row_keys."""
    call = torch.arange(1, count + 1, dtype=torch.int32, device=keys_B.device)
    return mixed(keys_B + (call * GOLDEN)[:, None])


def positions(shape: torch.Size, device: torch.device) -> torch.Tensor:
    """A number for each position in a row of this shape, (*shape) int32, spread evenly over their range."""
    index, stride = torch.zeros((), dtype=torch.int32, device=device), 1
    for axis in range(len(shape) - 1, -1, -1):  # a short arange for each axis: it is a constant array of the program
        along = torch.arange(shape[axis], dtype=torch.int32, device=device) * as_int32(stride * GOLDEN)
        index, stride = index + along.view(-1, *[1] * (len(shape) - 1 - axis)), stride * shape[axis]
    return index


def dropout(x: torch.Tensor, p: float, keys_B: torch.Tensor, index: torch.Tensor | None = None) -> torch.Tensor:
    """x (B, ...) with each value 0 with probability p, else divided by 1 - p.

    keys_B: (B,) int32, from row_keys. index: positions(x.shape[1:], device), where several calls share it.
    """
    index = positions(x.shape[1:], x.device) if index is None else index
    hashed = mixed(keys_B.view(-1, *[1] * (x.dim() - 1)) + index)
    # a tensor: compared with a Python number both sides become 64-bit
    smallest = torch.full((1,), round(p * 2**32) - 2**31, dtype=torch.int32, device=x.device)
    return (x * ((hashed >= smallest).float() * (1 / (1 - p)))).to(x.dtype)  # a float32 factor for bfloat16 x too


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
