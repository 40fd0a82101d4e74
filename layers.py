"""What the language models share: parameters by layer, their place on the mesh, the way through the layers.

Shape suffixes: B batch, T time, D embedding width; L layers.
"""

import math
import re

import torch
import torch_xla.distributed.spmd as xs
from functorch.compile import default_partition, min_cut_rematerialization_partition
from torch_xla.experimental import scan
from torch_xla.utils.checkpoint import checkpoint

from model_shapes import ModelShape

# On a mesh torch_xla 2.9 ties the gradients of a scanned layer to the sharding of its inputs by a jax function that
# needs torchax, and that flax (torch_xla/experimental/scan.py, _backward_shard_alike). PARTITION in transformer_tpu.py
# places every gradient and Decoder.keep every activation, so there is nothing left to tie.
scan.shard_as = lambda a, b: (a, b)

BATCH = ("data", "fsdp")  # the mesh axes that the batch axis is sharded over

# One parameter per layer and matrix (`qkv_weight.0`): slices of a stack would need an extra pass over memory to cast,
# and another to collect gradients, where XLA makes both part of the product. The vectors stay stacked: fewer tensors to
# trace. --scan_layers, whose loop wants a stack, pays for those passes.
LAYER_MATRICES = ("qkv_weight", "q_weight", "kv_weight", "attention_out_weight")
LAYER_MATRICES += ("mlp_in_weight", "gate_up_weight", "mlp_out_weight")


def is_matrix(name: str) -> bool:
    """Embeddings and weights of linear layers: the only parameters with weight decay."""
    return re.search(r"_(embedding|weight)(\.\d+)?$", name) is not None and "ln" not in name


def split_layers(stacked: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """From the names and shapes of parameter_shapes to those of a model's parameters."""
    named = {}
    for name, value in stacked.items():
        parts = {f"{name}.{layer}": part for layer, part in enumerate(value)}
        named |= parts if name in LAYER_MATRICES else {name: value}
    return named


def stack_layers(named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The other way round."""
    parts: dict[str, list[torch.Tensor]] = {}
    for name, value in named.items():
        parts.setdefault(name.split(".")[0], []).append(value)
    return {name: torch.stack(found) if name in LAYER_MATRICES else found[0] for name, found in parts.items()}


class Decoder(torch.nn.Module):
    """Layers over a residual stream. A model adds the block of one layer, and forward.

    sizes: of every parameter, those of the L layers stacked. compute_dtype: of activations and matrix products.
    mesh: activations stay sharded along the batch; None: one device. block(x_BTD, w, place=None) is set by the model.
    """

    def __init__(
        self,
        shape: ModelShape,
        sizes: dict[str, tuple[int, ...]],
        compute_dtype=torch.float32,
        *,
        remat=False,
        scan_layers=False,
        mesh=None,
    ):
        super().__init__()
        self.shape, self.compute_dtype, self.mesh = shape, compute_dtype, mesh
        self.remat, self.scan_layers = remat, scan_layers
        # scan caches its trace by function and shapes; a trace made without gradients must not serve training
        self._scanned = {grad: lambda x_BTD, w: (self.block(x_BTD, w), None) for grad in (True, False)}
        for name, size in sizes.items():
            if name in LAYER_MATRICES:
                self.register_module(name, torch.nn.ParameterList(torch.empty(size[1:]) for _ in range(size[0])))
            else:
                self.register_parameter(name, torch.nn.Parameter(torch.empty(size)))

    def initialise(self, seed: int) -> None:
        """llm.c's initialisation: N(0, 0.02), residual projections N(0, 0.02 / sqrt(2 L)), biases and padding 0."""
        generator = torch.Generator().manual_seed(seed)
        residual_std = 0.02 / math.sqrt(2 * self.shape.num_layers)
        for name, parameter in self.named_parameters():
            if is_matrix(name):
                torch.nn.init.normal_(parameter, 0.0, residual_std if "_out_" in name else 0.02, generator=generator)
            else:
                torch.nn.init.constant_(parameter, float(name.endswith("_weight")))
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name in ("token_embedding", "head_weight"):
                    parameter[self.shape.vocab_size :] = 0.0

    def keep(self, x_BTD):
        """Hold an activation to its place on the mesh, in both passes; left alone, the partitioner may move it."""
        return x_BTD if self.mesh is None else xs.mark_sharding_with_gradients(x_BTD, self.mesh, (BATCH, None, None))

    def of_layers(self, named: dict[str, torch.Tensor], vectors: tuple[str, ...], matrices: tuple[str, ...]):
        """The parameters of each layer by name: [{name: of one layer}]."""
        columns = [named[n].unbind(0) for n in vectors]
        columns += [[named[f"{n}.{layer}"] for layer in range(self.shape.num_layers)] for n in matrices]
        return [dict(zip(vectors + matrices, of_one, strict=True)) for of_one in zip(*columns, strict=True)]

    def through_layers(self, x_BTD, layers: list[dict[str, torch.Tensor]], place=None):
        """place: what a block shares with all others, where they are not scanned."""
        if self.scan_layers:
            partition = save_nothing_partition if self.remat else default_partition
            stacked = {name: torch.stack([w[name] for w in layers]) for name in layers[0]}
            body = self._scanned[torch.is_grad_enabled()]
            return scan.scan(body, x_BTD, stacked, partition_fn=partition, is_fn_pure=True)[0]
        for w in layers:
            if self.remat:  # torch.utils.checkpoint would be undone by common subexpression elimination
                run = lambda x, *values: self.block(x, dict(zip(layers[0], values, strict=True)), place=place)  # noqa: E731
                x_BTD = checkpoint(run, x_BTD, *(value.clone() for value in w.values()), preserve_rng_state=False)
            else:
                x_BTD = self.block(x_BTD, w, place=place)
        return x_BTD


def save_nothing_partition(*args, **kwargs):
    """Partition for scan that keeps only the inputs of a layer for the backward pass."""
    with torch._functorch.config.patch(activation_memory_budget=0.0):
        return min_cut_rematerialization_partition(*args, **kwargs)
