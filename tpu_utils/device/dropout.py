"""Dropout that needs nothing from the host: its masks are computed on the device from a count of steps that lies there.

torch's own dropout on XLA uploads a seed in every step. Here a value is dropped or kept by a hash of the row it belongs
to, its position in the row, the layer, and the step. So a resumed run has the masks of one that never stopped, and rows
have the same masks on any number of devices.

transformer_tpu.py and gpt.py use batch_keys() and dropout(); for a model of your own see dropout_module.py.
"""

import torch


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
