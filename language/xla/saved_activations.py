"""What is kept of a layer's first run, for layers that are run again in the backward pass: remat.py.

Shape suffixes: B batch, T time, H heads, K their width.
"""

import dataclasses

import torch

from tpu_utils.device import place_to_host

LEVELS = {"inputs": ("input",)}
LEVELS["attention"] = (*LEVELS["inputs"], "attention", "scale")
LEVELS["projections"] = (*LEVELS["attention"], "query", "key", "value")
LEVELS["residual"] = (*LEVELS["projections"], "residual")
LEVELS["products"] = (*LEVELS["residual"], "gate", "up")
"""The points of a layer whose values --remat_keep keeps, by the names that a model's layer() gives them."""


@dataclasses.dataclass(frozen=True)
class LayerExecution:
    """How a model runs its layers. points, of LEVELS: layers run again in the backward pass, and the values of these
    points are kept; None: all that autograd saves. on_host: the points whose values lie in the host's memory meanwhile,
    but for small ones. scan: all layers are one loop in the graph. loss_parts: parts of the vocabulary whose logits are
    made one after the other. all_but: the last layers, so many, keep "products". turns: of a loop around all layers."""

    points: tuple[str, ...] | None = None
    on_host: tuple[str, ...] = ()
    scan: bool = False
    loss_parts: int = 1
    all_but: int = 0
    turns: int = 1


class SavedActivations:
    """The values of a layer's points, in the order in which they come up.

    values: None while the layer runs the first time, and they are collected; else they are used instead of what is
    computed again, so that what computed it is no part of the program. offloaded: which of them lie on the host.
    """

    def __init__(self, execution: LayerExecution, values=None):
        self.execution, self.first = execution, values is None
        self.values, self.offloaded = list(values or []), []

    def __call__(self, point: str, value: torch.Tensor) -> torch.Tensor:
        if point not in self.execution.points:
            return value
        if self.first:
            self.put(point, value)
            return value
        return Instead.apply(value, self.values.pop(0))

    def heads(self, point: str, value_BTHK: torch.Tensor) -> torch.Tensor:
        """Kept with the heads first and the positions last, as the kernels of flash attention read them."""
        return self(point, value_BTHK.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    def attention(self) -> tuple[torch.Tensor, ...] | None:
        """What attention takes as `saved`: (output, a value for each row) of its first run; (): this is the first run,
        which is to return them; None: they are not kept."""
        if "attention" not in self.execution.points:
            return None
        return () if self.first else (self.values.pop(0), self.values.pop(0))

    def keep_attention(self, saved: tuple[torch.Tensor, torch.Tensor]) -> None:
        """saved: what attention returns beside its output, for its second run."""
        if self.first and "attention" in self.execution.points:
            self.put("attention", saved[0])
            self.put("", saved[1])  # small: it stays here

    def put(self, point: str, value: torch.Tensor) -> None:
        self.offloaded.append(point in self.execution.on_host and point != "scale")
        self.values.append(place_to_host(value.detach()) if self.offloaded[-1] else value.detach())


SAVE_NOTHING = SavedActivations(LayerExecution(points=()))


class Instead(torch.autograd.Function):
    """The kept value; its gradient is that of the one computed again."""

    @staticmethod
    def forward(ctx, computed, kept):
        return kept.view_as(kept)

    @staticmethod
    def backward(ctx, grad):
        return grad, None
