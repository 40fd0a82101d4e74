"""Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) for the matrices of a language model's layers.

Momentum is made orthogonal, nearly: its singular values all become about 1. Embeddings, head, norms, biases and
routers are updated by AdamW. An update has the size of AdamW's (Liu et al. 2025, arXiv:2502.16982), so both take one
learning rate and one weight decay.
"""

import math
from functools import partial

import torch

from language.models.layers import LAYER_MATRICES, Decoder, is_matrix
from language.options.transformer_options import TransformerConfig
from language.xla.loops import AXES
from language.xla.shards import gathered, sharded_like
from tpu_utils.base.errors import InputError
from tpu_utils.device import Mesh, mark_sharding
from tpu_utils.step.optim import Adam, make_optimizer

ITERATIONS = 5
"""Newton-Schulz iterations, each a polynomial of degree 5."""
COEFFICIENTS = (3.4445, -4.775, 2.0315)
"""Jordan's: singular values between 0.01 and 1 end between 0.68 and 1.13."""
UPDATE_SIZE = 0.2
"""Root of the mean square of an update, over the learning rate. AdamW's is 0.2 to 0.4 (Liu et al.)."""

OF_MUON = ("momentum_buffer",)
"""State of a matrix."""


def is_muons(name: str) -> bool:
    """Whether Muon updates the parameter of this name: a matrix of a layer, but no router."""
    return name.partition(".")[0] in LAYER_MATRICES and not name.startswith("router")


def spread(mesh: Mesh | None, matrices_NAB: torch.Tensor) -> torch.Tensor:
    """The same, each of the N whole on one device."""
    if mesh is not None:
        mark_sharding(matrices_NAB, mesh, (AXES, None, None))
    return matrices_NAB


def orthogonalised(x_NAB: torch.Tensor) -> torch.Tensor:
    """About U V for each of N matrices U S V of shape (A, B), A at most B: all singular values end near 1."""
    a, b, c = COEFFICIENTS
    norm = x_NAB.float().square().sum((1, 2), keepdim=True).sqrt()
    x = (x_NAB / (norm + 1e-7)).to(x_NAB.dtype)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


class Muon(Adam):
    """Muon for groups whose state is OF_MUON, AdamW for the others.

    Matrices of one shape are updated together. On a mesh each lies whole on one device meanwhile, so that devices share
    the products, and no product is reduced over devices.
    """

    def __init__(self, params, *, momentum: float, mesh: Mesh | None, dtype: torch.dtype, **options):
        """dtype: of the products that make momentum orthogonal. options: of Adam."""
        super().__init__(params, **options)
        self.momentum, self.mesh, self.dtype = momentum, mesh, dtype

    def update(self, group: dict) -> None:
        if group.get("state") != OF_MUON:
            return super().update(group)
        shrink = 1 - group["lr"] * group["weight_decay"]
        alike: dict[tuple, list] = {}
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            buffer = self.state[parameter]["momentum_buffer"]
            buffer.copy_(torch.lerp(buffer, parameter.grad, 1 - self.momentum))
            ahead = torch.lerp(parameter.grad, buffer, self.momentum)  # Nesterov's
            A, B = parameter.shape[-2:]
            matrices = gathered(ahead.to(self.dtype)).reshape(-1, A, B)  # each fused matrix, each expert by itself
            alike.setdefault((min(A, B), max(A, B)), []).append((parameter, matrices if A <= B else matrices.mT))
        for (_, B), given in alike.items():
            counts = [len(matrices) for _, matrices in given]
            stacked = spread(self.mesh, torch.cat([matrices for _, matrices in given]))
            changes = spread(self.mesh, orthogonalised(stacked)).float() * (UPDATE_SIZE * math.sqrt(B))
            for (parameter, _), change in zip(given, changes.split(counts), strict=True):
                change = change if parameter.shape[-2] <= parameter.shape[-1] else change.mT
                change = sharded_like(parameter, change.reshape(parameter.shape))
                parameter.copy_(parameter * shrink - group["lr"] * change)


def make_muon(config: TransformerConfig, model: Decoder) -> Muon:
    """Muon for the matrices of the layers, AdamW for the rest, with their state. Raises InputError."""
    matrices, vectors, layers = [], [], []
    for name, parameter in model.trained().items():
        (layers if is_muons(name) else matrices if is_matrix(name) else vectors).append(parameter)
    if not layers:
        raise InputError(
            "optimizer is muon, but no parameter has the name of a layer's matrix; expected adamw, adam, sgd"
        )
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}, {"params": layers, "state": OF_MUON}]
    muon = partial(Muon, momentum=config.muon_momentum, mesh=model.mesh, dtype=model.compute_dtype)
    return make_optimizer(config, groups, muon)
