"""Matrices in int8, with a scale for each output column. Activations, the cache and all else stay as they are.

A product reads a byte of memory for each weight: the weight becomes the compute dtype inside it, which holds every int8
exactly, and the scale multiplies what comes out.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Int8:
    """values: (outputs..., inputs...) int8, viewed as a product wants it; scale: of the outputs, in order, float32."""

    values: torch.Tensor
    scale: torch.Tensor

    def view(self, *sizes: int) -> "Int8":
        return Int8(self.values.view(*sizes), self.scale)

    def __iter__(self) -> Iterator["Int8"]:
        """Along the first axis, which is of the outputs."""
        return map(Int8, self.values, self.scale.reshape(len(self.values), -1))

    def widened(self, dtype: torch.dtype) -> torch.Tensor:
        """What a product reads."""
        return self.values.to(dtype)

    def scaled(self, y_BTO: torch.Tensor) -> torch.Tensor:
        """What a product with widened() means. The axes of the outputs may be several."""
        return (y_BTO * self.scale.view(y_BTO.shape[2:])).to(y_BTO.dtype)

    def divided(self, by: float) -> "Int8":
        return Int8(self.values, self.scale / by)


def scale_name(name: str) -> str:
    """Name of the buffer that holds the scales of a parameter."""
    return f"scale_of_{name.replace('.', '_')}"


def quantize(matrix) -> tuple[torch.Tensor, torch.Tensor]:
    """(int8, scales (..., O)) of a matrix (..., O, I). The largest value of a column becomes 127."""
    scale = (matrix.float().abs().amax(-1) / 127).clamp_min(1e-30)
    return (matrix.float() / scale[..., None]).round().to(torch.int8), scale
