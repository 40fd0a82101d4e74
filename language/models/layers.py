"""What the language models share: parameters by layer, their place on the mesh, products, adapters.

Shape suffixes: B batch, T time, D embedding width; L layers.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

from language.models.operations import contract
from language.options.shapes import START, ModelShape
from language.xla.loops import BATCH
from language.xla.saved_activations import LEVELS, SAVE_NOTHING, LayerExecution
from language.xla.shards import balanced, gathered, size_of
from tpu_utils.device import DEVICE_TYPE, IS_XLA, get_global_mesh, mark_sharding_with_gradients

# One parameter per layer and matrix (`qkv_weight.0`): slices of a stacked parameter need an extra pass over memory to
# cast, and another to collect gradients; with separate ones XLA fuses both into the matrix product. The vectors stay
# stacked: fewer tensors to trace. The loop of --scan_layers reads stacks, and pays for those passes.
LAYER_MATRICES = ("qkv_weight", "q_weight", "kv_weight", "attention_out_weight")
LAYER_MATRICES += ("mlp_in_weight", "gate_up_weight", "mlp_out_weight")
OF_EXPERTS = ("router_weight", "expert_gate_up_weight", "expert_out_weight")
LAYER_MATRICES += OF_EXPERTS


def is_matrix(name: str) -> bool:
    """Embeddings, weights of linear layers and their adapters: the only parameters with weight decay."""
    return re.search(r"_(embedding|weight|lora_[ab])(\.\d+)?$", name) is not None and "ln" not in name


def split_layers(stacked: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """From tensors stacked as in parameter_shapes() to a model's parameters, where each layer has its matrices."""
    named = {}
    for name, value in stacked.items():
        by_layer = {f"{name}.{layer}": row for layer, row in enumerate(value)}
        named |= by_layer if name in LAYER_MATRICES else {name: value}
    return named


def stack_layers(named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inverse of split_layers()."""
    by_name: dict[str, list[torch.Tensor]] = {}
    for name, value in named.items():
        by_name.setdefault(name.split(".")[0], []).append(value)
    return {name: torch.stack(found) if name in LAYER_MATRICES else found[0] for name, found in by_name.items()}


def product(equation: str, x_BTI, weight, adapter=None):
    """x times a weight, by einsum, plus its adapter. The last axis of x and of the output may be split into two."""
    read = weight if isinstance(weight, torch.Tensor) else weight.widened(x_BTI.dtype)  # else Int8
    y = matmul_one_token(x_BTI, read) if is_decode_step(x_BTI) else contract(equation, x_BTI, read)
    return add_adapter(y if read is weight else weight.scaled(y), x_BTI, adapter)


def projections(x_BTD, parts, add: Callable = torch.add):
    """(B, T, H, K) of each (weight (H, K, D), bias (H, K)); one product for torch's compiler, which joins none."""
    if IS_XLA or is_decode_step(x_BTD) or not isinstance(parts[0][0], torch.Tensor):  # else Int8
        return [add(product("btd,hkd->bthk", x_BTD, weight), bias) for weight, bias in parts]
    w, bias = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return F.linear(x_BTD, w.flatten(0, 1), bias.flatten()).unflatten(-1, (len(parts), *parts[0][1].shape)).unbind(2)


def head_product(x_BTD, weight_VD, mesh=None):
    """Logits. F.linear makes one axis of batch and time, for which see losses() of operations.py."""
    read = weight_VD if isinstance(weight_VD, torch.Tensor) else weight_VD.widened(x_BTD.dtype)
    if is_decode_step(x_BTD):
        y = matmul_one_token(x_BTD, read)
    else:
        y = torch.einsum("btd,vd->btv", x_BTD, read) if size_of(mesh) > 1 else F.linear(x_BTD, read)
    return y if read is weight_VD else weight_VD.scaled(y)


def divided(weight, by: float):
    return (weight.float() / by).to(weight.dtype) if isinstance(weight, torch.Tensor) else weight.divided(by)


def is_decode_step(x_BTI) -> bool:
    """Whether XLA decodes one token of each row. An export to ONNX keeps the weight where it is quantized: second."""
    return x_BTI.shape[1] == 1 and x_BTI.device.type == DEVICE_TYPE


def matmul_one_token(x_B1I, weight):
    """The product of a decoding step. The weight comes first, or XLA's CPU backend takes 4 to 8 times as long; in two
    parts, or XLA turns the product around again."""
    B, inputs = len(x_B1I), x_B1I.dim() - 2  # axes that are summed over, the weight's last
    y = torch.einsum("pqi,bi->pqb", weight.reshape(2, -1, x_B1I[0].numel()), x_B1I.view(B, -1))
    return y.permute(2, 0, 1).reshape(B, 1, *weight.shape[:-inputs])


def add_adapter(y, x_BTI, adapter=None):
    """y, the product of x and a weight, plus LoRA's x a^T b^T, of a (rank, I) and b (O, rank) (Hu et al. 2021)."""
    if adapter is None:
        return y
    a, b = adapter
    low = torch.einsum("bti,ri->btr", x_BTI.flatten(2), a)
    return y + torch.einsum("btr,or->bto", low, b).view(y.shape)


def adapter(w, matrix: str, part=...):
    """LoRA's (a, b) of a matrix, or of one part of it, such as k of kv; None without LoRA."""
    return (w[f"{matrix}_lora_a"][part], w[f"{matrix}_lora_b"][part]) if f"{matrix}_lora_a" in w else None


def find_documents(marked_BT, position_T):
    """(tokens, position at which the document of each token begins), both (B, T), for rows of several documents.

    The first token of a document is given as START + token. position: of each token in its row, int32. Positions are
    compared in pairs: a cumsum is slow on a TPU.
    """
    begins = marked_BT >= START
    before = begins[:, None, :] & (position_T[None, :] <= position_T[:, None])  # (B, T, T)
    return marked_BT - START * begins, torch.where(before, position_T, 0).amax(-1)


@dataclass(frozen=True)
class LoRA:
    """Each matrix of a layer has a trained adapter, scaled by alpha / rank; the base weights are frozen."""

    rank: int
    alpha: float = 16.0
    base_dtype: torch.dtype = torch.bfloat16


class ModelOutput(NamedTuple):
    """logits: (B, T, V) over the padded vocabulary, in the compute dtype. routing: what the routers of all layers
    decided, (L, B, R), as of route(); None without experts."""

    logits: torch.Tensor
    routing: torch.Tensor | None


class Decoder(torch.nn.Module):
    """Layers over a residual stream. A model adds layer(), head() and forward().

    sizes: of every parameter, those of the L layers stacked. compute_dtype: of activations and matrix products.
    mesh: activations stay sharded along the batch and, with a context axis, along time; None: one device. pieces: in
    which order devices hold a sequence, of shards.py. packed: rows hold several documents, which do not attend to
    each other.
    """

    def __init__(
        self,
        shape: ModelShape,
        sizes: dict[str, tuple[int, ...]],
        compute_dtype=torch.float32,
        *,
        execution: LayerExecution | None = None,
        mesh=None,
        pieces=1,
        packed=False,
        lora: LoRA | None = None,
    ):
        super().__init__()
        self.shape, self.compute_dtype, self.mesh = shape, compute_dtype, mesh
        self.reported: tuple[str, ...] = ()
        """What a step reports beside the loss."""
        self.execution, self.pieces, self.packed = execution or LayerExecution(), pieces, packed
        self.adapter_scale = lora.alpha / lora.rank if lora else 0.0
        for name, size in sizes.items():
            if name in LAYER_MATRICES:
                self.register_module(name, torch.nn.ParameterList(torch.empty(size[1:]) for _ in range(size[0])))
            else:
                self.register_parameter(name, torch.nn.Parameter(torch.empty(size)))
        if lora:
            self.to(lora.base_dtype).requires_grad_(False)
            for name, (layers, *size) in adapter_sizes(sizes, lora.rank).items():
                self.register_module(name, torch.nn.ParameterList(torch.empty(size) for _ in range(layers)))

    def trained(self) -> dict[str, torch.nn.Parameter]:
        """The parameters that the optimizer changes, by name."""
        return {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}

    def weights(self) -> dict[str, torch.Tensor]:
        """All parameters by name, whole but for the matrices of layers: a layer gathers its own (shards.py)."""
        named = self.named_parameters()
        return {name: p if name.partition(".")[0] in LAYER_MATRICES else gathered(p) for name, p in named}

    def in_compute_dtype(self, name: str, parameter):
        if parameter.dtype == torch.int8:
            from language.models.int8 import Int8, scale_name  # only for a model with such weights

            return Int8(parameter, self.get_buffer(scale_name(name)))
        return parameter.to(self.compute_dtype)

    def logits(self, x_BTD, weight_VD):
        """(B, T, V); in a training step with loss_parts what losses() takes in their place."""
        if self.execution.loss_parts > 1 and torch.is_grad_enabled():
            from language.models.loss_parts import LogitsInParts  # only where they are asked for

            return LogitsInParts(x_BTD, weight_VD, self.execution.loss_parts)
        return head_product(x_BTD, weight_VD, self.mesh)

    def rows_of_tokens(self, tokens_BT):
        """(B, T, D) of the token embedding. In float32 if that is: the gradients of a frequent token add up in it."""
        if size_of(self.mesh) > 1:
            return self.columns_of_tokens(tokens_BT)
        rows = F.embedding(tokens_BT, gathered(self.token_embedding))
        if rows.dtype != torch.int8:
            return rows
        from language.models.int8 import scale_name

        return rows * F.embedding(tokens_BT, self.get_buffer(scale_name("token_embedding"))[:, None])

    def columns_of_tokens(self, tokens_BT):
        """rows_of_tokens() where devices share sequences: each looks up its columns for all tokens, and exchanges them
        for its rows, then for its positions. Left alone, the partitioner would give every device all of both."""
        apart = tuple(axis for axis in BATCH if axis != "fsdp")
        tokens_BT = mark_sharding_with_gradients(tokens_BT, self.mesh, (apart, None))
        x = F.embedding(tokens_BT, self.token_embedding)
        for spec in ((apart, None, ("fsdp", "context")), (BATCH, None, "context"), (BATCH, "context", None)):
            x = mark_sharding_with_gradients(x, self.mesh, spec)
        return x

    def initialise(self, seed: int) -> None:
        """llm.c's initialisation: N(0, 0.02), residual projections N(0, 0.02 / sqrt(2 L)), biases and padding 0."""
        generator = torch.Generator().manual_seed(seed)
        residual_std = 0.02 / math.sqrt(2 * self.shape.num_layers)
        for name, parameter in self.named_parameters():
            if "_lora_" in name:
                initialise_adapter(name, parameter, generator)
            elif is_matrix(name):
                torch.nn.init.normal_(parameter, 0.0, residual_std if "_out_" in name else 0.02, generator=generator)
            else:
                is_norm = name.endswith("_weight")
                torch.nn.init.constant_(parameter, 1.0 - self.shape.norm_offset if is_norm else 0.0)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name in ("token_embedding", "head_weight"):
                    parameter[self.shape.vocab_size :] = 0.0

    def hold_sharding(self, x_BTD, *rest):
        """Keep an activation sharded, in both passes; left alone, the partitioner may move it. rest: axes of the mesh
        for its third dimension and those behind."""
        spec = (BATCH, "context", *(rest or (None,)))
        alone = self.mesh is None or get_global_mesh() is None  # also of a second model, such as a teacher
        return x_BTD if alone else mark_sharding_with_gradients(x_BTD, self.mesh, spec)

    def hold_positions(self, x, axis: int = 0):
        """x, whole, with its positions along an axis, 0 or 1 behind the batch, as devices hold those of a sequence."""
        if size_of(self.mesh) == 1:
            return x
        spec = (BATCH,) * axis + ("context",) + (None,) * (x.dim() - axis - 1)
        return mark_sharding_with_gradients(balanced(x, self.pieces, axis), self.mesh, spec)

    def positions(self, length: int, device):
        """0 to length - 1 as devices hold them, (T,) int32."""
        return self.hold_positions(torch.arange(length, dtype=torch.int32, device=device))

    def parameters_by_layer(self, named: dict[str, torch.Tensor], vectors: tuple[str, ...], matrices: tuple[str, ...]):
        """The parameters of each layer by name, adapters too: [{name: of one layer}]."""
        if self.adapter_scale:
            adapted = [n.removesuffix("weight") for n in matrices if n not in OF_EXPERTS]
            matrices += tuple(f"{n}lora_{part}" for n in adapted for part in "ab")
        columns = [named[n].unbind(0) for n in vectors]
        columns += [[named[f"{n}.{layer}"] for layer in range(self.shape.num_layers)] for n in matrices]
        return [dict(zip(vectors + matrices, of_one, strict=True)) for of_one in zip(*columns, strict=True)]


def apply_layers(layer: Callable, execution: LayerExecution, x_BTD, layers: list[dict], options: list[dict]):
    """(x, routing of a ModelOutput) of a model's layer(x, w, **options), one after the other. layers: the parameters of
    each by name. options: what each takes beside them; layers that are a loop get none, and make it themselves."""

    def run(x, values, kept=SAVE_NOTHING, **own):
        """layer() as a function of tensors, one or two, which autograd can run again."""
        x, routing = layer(x, dict(zip(layers[0], map(gathered, values), strict=True)), kept=kept, **own)
        return (x,) if routing is None else (x, routing)

    if last := execution.all_but:  # what the last layers keep is free again before the others run again
        first, whole = replace(execution, all_but=0), replace(execution, all_but=0, points=LEVELS["products"])
        x_BTD, routing = apply_layers(layer, first, x_BTD, layers[:-last], options[:-last])
        x_BTD, routing_after = apply_layers(layer, whole, x_BTD, layers[-last:], options[-last:])
        return x_BTD, routing if routing is None else torch.cat([routing, routing_after])
    if execution.scan:
        from language.xla.scanned_layers import ScannedLayers  # only for a run that asks for it

        stacked = [torch.stack([w[name] for w in layers]) for name in layers[0]]
        x_BTD, *routing = ScannedLayers.apply(run, execution, x_BTD, *stacked)
        return x_BTD, routing[0] if routing else None
    if execution.points is not None:
        from language.xla.remat import run_again  # likewise
    routings = []
    for w, own in zip(layers, options, strict=True):
        if execution.points is None:
            x_BTD, *routing = run(x_BTD, w.values(), **own)
        else:
            x_BTD, *routing = run_again(partial(run, **own), execution, x_BTD, *w.values())
        routings += routing
    return x_BTD, torch.stack(routings) if routings else None


def adapter_sizes(sizes: dict[str, tuple[int, ...]], rank: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the LoRA adapters, stacked over the layers: a (L, ..., rank, in), b (L, ..., out, rank)."""
    found = {}
    adapted = [name for name in sizes if name in LAYER_MATRICES and name not in OF_EXPERTS]
    for name, (*axes, outputs, inputs) in ((name, sizes[name]) for name in adapted):
        of_matrix = name.removesuffix("weight") + "lora_"
        found |= {of_matrix + "a": (*axes, rank, inputs), of_matrix + "b": (*axes, outputs, rank)}
    return found


def initialise_adapter(name: str, parameter, generator) -> None:
    """As the peft library does: a uniform within 1 / sqrt(in), b zero, so that training begins at the base."""
    bound = parameter.shape[-1] ** -0.5 if "_lora_a" in name else 0.0
    torch.nn.init.uniform_(parameter, -bound, bound, generator=generator)
