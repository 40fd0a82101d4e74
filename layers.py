"""What the language models share: parameters by layer, their place on the mesh, the way through the layers.

Shape suffixes: B batch, T time, D embedding width; L layers.
"""

import contextlib
import math
import re
from collections.abc import Callable

import torch
import torch.nn.functional as F
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
from torch.autograd.graph import saved_tensors_hooks
from torch_xla.experimental import scan

from model_shapes import ModelShape
from token_data import START

BATCH = ("data", "fsdp")  # the mesh axes that the batch axis is sharded over

# One parameter per layer and matrix (`qkv_weight.0`): slices of a stack would need an extra pass over memory to cast,
# and another to collect gradients, where XLA makes both part of the product. The vectors stay stacked: fewer tensors to
# trace. --scan_layers, whose loop wants a stack, pays for those passes.
LAYER_MATRICES = ("qkv_weight", "q_weight", "kv_weight", "attention_out_weight")
LAYER_MATRICES += ("mlp_in_weight", "gate_up_weight", "mlp_out_weight")


def is_matrix(name: str) -> bool:
    """Embeddings, weights of linear layers and their adapters: the only parameters with weight decay."""
    return re.search(r"_(embedding|weight|lora_[ab])(\.\d+)?$", name) is not None and "ln" not in name


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


def product(equation: str, x_BTI, weight, adapter=None):
    """x times a weight, by einsum. x_BTI may have its last axis as two, the output too."""
    return add_adapter(torch.einsum(equation, x_BTI, weight), x_BTI, adapter)


def add_adapter(y, x_BTI, adapter=None):
    """y of x and a weight. adapter: a (rank, I) and b (O, rank), whose product stands beside the weight (Hu et al.
    2021, LoRA)."""
    if adapter is None:
        return y
    a, b = adapter
    return y + F.linear(F.linear(x_BTI.flatten(2), a), b).view(y.shape)


def find_documents(marked_BT):
    """Tokens, and the position at which the document of each begins, both (B, T), of rows that hold several documents.

    The first token of a document comes as START + token. Compared, not summed up: a running sum is slow on a TPU.
    """
    begins, position = marked_BT >= START, torch.arange(marked_BT.shape[1], dtype=torch.int32, device=marked_BT.device)
    before = begins[:, None, :] & (position[None, :] <= position[:, None])  # (B, T, T)
    return marked_BT - START * begins, torch.where(before, position, 0).amax(-1)


class Decoder(torch.nn.Module):
    """Layers over a residual stream. A model adds the block of one layer, and forward.

    sizes: of every parameter, those of the L layers stacked. compute_dtype: of activations and matrix products.
    mesh: activations stay sharded along the batch; None: one device. block(x_BTD, w, place=None, kept=None) is set by
    the model. remat: a layer runs again in the backward pass; remat_keep: "inputs", or "attention" beside them.
    packed: rows hold several documents, which do not see each other. lora_rank: all that has a size is frozen, in
    bfloat16, and an adapter of this rank beside each matrix of a layer is trained, times lora_alpha / lora_rank.
    """

    def __init__(
        self,
        shape: ModelShape,
        sizes: dict[str, tuple[int, ...]],
        compute_dtype=torch.float32,
        *,
        remat=False,
        remat_keep="inputs",
        scan_layers=False,
        mesh=None,
        packed=False,
        lora_rank=0,
        lora_alpha=16.0,
    ):
        super().__init__()
        self.shape, self.compute_dtype, self.mesh = shape, compute_dtype, mesh
        self.kept_by_layer = remat_keep if remat else "positions"
        self.remat, self.scan_layers, self.packed = remat, scan_layers, packed
        self.adapter_scale = lora_alpha / lora_rank if lora_rank else 0.0
        for name, size in sizes.items():
            if name in LAYER_MATRICES:
                self.register_module(name, torch.nn.ParameterList(torch.empty(size[1:]) for _ in range(size[0])))
            else:
                self.register_parameter(name, torch.nn.Parameter(torch.empty(size)))
        if lora_rank:
            self.to(torch.bfloat16).requires_grad_(False)
            for name, (layers, *size) in adapter_sizes(sizes, lora_rank).items():
                self.register_module(name, torch.nn.ParameterList(torch.empty(size) for _ in range(layers)))

    def trained(self) -> dict[str, torch.nn.Parameter]:
        """The parameters that the optimizer changes, by name."""
        return {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}

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
                torch.nn.init.constant_(parameter, float(name.endswith("_weight")))
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name in ("token_embedding", "head_weight"):
                    parameter[self.shape.vocab_size :] = 0.0

    def keep(self, x_BTD):
        """Hold an activation to its place on the mesh, in both passes; left alone, the partitioner may move it."""
        return x_BTD if self.mesh is None else xs.mark_sharding_with_gradients(x_BTD, self.mesh, (BATCH, None, None))

    def of_layers(self, named: dict[str, torch.Tensor], vectors: tuple[str, ...], matrices: tuple[str, ...]):
        """The parameters of each layer by name, adapters too: [{name: of one layer}]."""
        if self.adapter_scale:
            matrices += tuple(n.removesuffix("weight") + f"lora_{part}" for n in matrices for part in "ab")
        columns = [named[n].unbind(0) for n in vectors]
        columns += [[named[f"{n}.{layer}"] for layer in range(self.shape.num_layers)] for n in matrices]
        return [dict(zip(vectors + matrices, of_one, strict=True)) for of_one in zip(*columns, strict=True)]

    def through_layers(self, x_BTD, layers: list[dict[str, torch.Tensor]], place=None):
        """place: what a block shares with all others, where they are not scanned."""
        shared = {} if self.scan_layers else {"place": place}

        def run(x, values, **options):
            return self.block(x, dict(zip(layers[0], values, strict=True)), **options, **shared)

        if self.scan_layers:
            stacked = [torch.stack([w[name] for w in layers]) for name in layers[0]]
            return ScannedLayers.apply(run, self.kept_by_layer, x_BTD, *stacked)
        for w in layers:
            if self.remat:
                x_BTD = RematLayer.apply(run, self.kept_by_layer, x_BTD, *w.values())
            else:
                x_BTD = run(x_BTD, w.values())
        return x_BTD


def forward_layer(run, keep: str, needed, x_BTD, *values):
    """(output, [what is kept]) of run(x, values). keep: inputs: nothing beside x. attention: its output and row sums;
    the kernel of flash attention does not run again. positions: all that autograd saves and that has values for
    each position.
    """
    kept, (x, *values) = [], leaves([x_BTD, *values], needed)
    if keep == "positions":
        hooks = saved_tensors_hooks(lambda t: kept.append(t.detach()) if of_positions(t, x) else None, lambda _: None)
        with torch.enable_grad(), hooks:
            return run(x, values).detach(), kept
    with torch.no_grad():
        return run(x, values, **({"kept": kept} if keep == "attention" else {})), kept


def backward_layer(run, keep: str, needed, grad_BTD, x_BTD, *rest):
    """(gradient of x, [those of the values that need one]). rest: the values, then what forward_layer kept, which
    stands in for what the layer, run again, would save."""
    (x, *values), kept = leaves([x_BTD, *rest[: len(needed) - 1]], needed), list(rest[len(needed) - 1 :])
    saved = iter(kept)
    hooks = saved_tensors_hooks(lambda t: next(saved) if of_positions(t, x) else t, lambda t: t)
    with torch.enable_grad(), hooks if keep == "positions" else contextlib.nullcontext():
        out = run(x, values, **({"kept": kept} if keep == "attention" else {}))
    grad_x, *gradients = torch.autograd.grad(out, [t for t in (x, *values) if t.requires_grad], grad_BTD)
    return grad_x, gradients


class RematLayer(torch.autograd.Function):
    """A layer that is run again in the backward pass.

    torch.utils.checkpoint would be undone by common subexpression elimination: the barrier keeps the two apart, as in
    torch_xla's checkpoint, which has no choice of what is kept.
    """

    @staticmethod
    def forward(ctx, run, keep, x_BTD, *values):
        ctx.run, ctx.keep, ctx.needed = run, keep, (True, *ctx.needs_input_grad[3:])
        out, kept = forward_layer(run, keep, ctx.needed, x_BTD, *values)
        ctx.save_for_backward(x_BTD, *values, *kept)
        return out

    @staticmethod
    def backward(ctx, grad):
        behind = [t.clone() for t in (grad, *ctx.saved_tensors)]  # in place: of a weight itself it would stay
        xm.optimization_barrier_(behind)
        found, gradients = backward_layer(ctx.run, ctx.keep, ctx.needed, *behind)
        gradients = iter(gradients)
        return None, None, found, *(next(gradients) if is_needed else None for is_needed in ctx.needed[1:])


class ScannedLayers(torch.autograd.Function):
    """x through layers of one program: a loop in the graph, which grows with one layer, not with their number.

    torch_xla's own scan with gradients traces a layer by AOTAutograd, which takes einsum apart: its loops come to 1.6
    times the cycles (GPT-2 124M, v5e, libtpu 0.0.21's estimate). Here both loops are traced as the rest of the step
    is. The loop back runs a layer again and takes its gradients; what nothing reads is not in the program. Scores of
    attention are computed again: to write them into a stack takes longer.
    """

    @staticmethod
    def forward(ctx, run, keep, x_BTD, *stacked):
        """stacked: (L, ...) each."""
        ctx.run, ctx.keep, ctx.needed = run, keep, (True, *ctx.needs_input_grad[3:])

        def one_layer(carry, values):
            if not any(ctx.needs_input_grad):
                return [run(*carry, values)], []
            out, kept = forward_layer(run, keep, ctx.needed, *carry, *values)
            return [out], [carry[0].detach(), *kept]

        (out,), kept = scan._scan_impl_flat(one_layer, [x_BTD], list(stacked))
        ctx.save_for_backward(*stacked, *kept)
        return out

    @staticmethod
    def backward(ctx, grad):
        saved, count = ctx.saved_tensors, len(ctx.needed) - 1
        stacked, (inputs, *kept) = saved[:count], saved[count:]

        def one_layer(carry, values):
            grad_x, gradients = backward_layer(ctx.run, ctx.keep, ctx.needed, *carry, *values)
            return [grad_x], gradients

        (grad,), found = scan._scan_impl_flat(one_layer, [grad], [inputs, *stacked, *kept], reverse=True)
        found = iter(found)
        return None, None, grad, *(next(found) if is_needed else None for is_needed in ctx.needed[1:])


def leaves(tensors, needed) -> list[torch.Tensor]:
    """The tensors as the beginning of a graph of their own. needed: which of them get a gradient."""
    return [t.detach().requires_grad_(on) for t, on in zip(tensors, needed, strict=True)]


def of_positions(t, x_BTD) -> bool:
    """Whether it has values for each position, (B, T, ...), and is not x_BTD: no weight, and no attention score."""
    return t is not x_BTD and t.shape[:2] == x_BTD.shape[:2]


def adapter_sizes(sizes: dict[str, tuple[int, ...]], rank: int) -> dict[str, tuple[int, ...]]:
    """Of the adapters of the layers' matrices, stacked: a (L, ..., rank, in), b (L, ..., out, rank)."""
    found = {}
    for name, (*axes, outputs, inputs) in ((n, size) for n, size in sizes.items() if n in LAYER_MATRICES):
        of_matrix = name.removesuffix("weight") + "lora_"
        found |= {of_matrix + "a": (*axes, rank, inputs), of_matrix + "b": (*axes, outputs, rank)}
    return found


def initialise_adapter(name: str, parameter, generator) -> None:
    """As the peft library does: a uniform within 1 / sqrt(in), b zero, so that training begins at the base."""
    bound = parameter.shape[-1] ** -0.5 if "_lora_a" in name else 0.0
    torch.nn.init.uniform_(parameter, -bound, bound, generator=generator)


def load_weights(build: Callable, read: Callable, device, partition_spec: Callable | None = None, seed=0) -> Decoder:
    """build() on the device with weights from elsewhere; adapters begin as in a new run. read: by a parameter's name.
    partition_spec: of a name and its parameter, on a mesh.

    Tensor by tensor, each to its shards at once: the host holds one at a time, in its file's dtype and in the model's.
    """
    with torch.device("meta"):
        model = build()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in list(model.named_parameters()):
        if "_lora_" in name:
            initialise_adapter(name, value := torch.empty(parameter.shape), generator)
        else:
            value = read(name).to(parameter.dtype)
        value = torch.nn.Parameter(value.to(device), requires_grad=parameter.requires_grad)
        if model.mesh is not None:
            xs.mark_sharding(value, model.mesh, partition_spec(name, parameter))
        model.load_state_dict({name: value}, strict=False, assign=True)
        xm.wait_device_ops()  # or the host would hold all that has not been sent yet
    return model.to(device)
