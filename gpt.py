"""GPT-2 and GPT-3: parameters in llm.c's order, one layer, the model. The operations are in operations.py.

Shape suffixes: B batch, T time, D embedding width, H heads, K head_dim, V padded vocabulary; L layers.
"""

import math
import re
from functools import partial

import torch
import torch.nn.functional as F
import torch_xla.distributed.spmd as xs
from functorch.compile import default_partition, min_cut_rematerialization_partition
from torch_xla.experimental import scan
from torch_xla.utils.checkpoint import checkpoint

from config import ModelShape
from dropout import dropout, layer_keys, positions
from operations import causal_attention, layer_norm

# On a mesh torch_xla 2.9 ties the gradients of a scanned layer to the sharding of its inputs by a jax function that
# needs torchax, and that flax (torch_xla/experimental/scan.py, _backward_shard_alike). PARTITION in transformer_tpu.py
# places every gradient and GPT.keep every activation, so there is nothing left to tie.
scan.shard_as = lambda a, b: (a, b)

BATCH = ("data", "fsdp")  # the mesh axes that the batch axis is sharded over


def parameter_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Every parameter, those of the L layers stacked, in the order of llm.c's weight files."""
    L, D, V, T = shape.num_layers, shape.embedding_dim, shape.padded_vocab_size, shape.sequence_length
    return {
        "token_embedding": (V, D),
        "position_embedding": (T, D),
        "ln1_weight": (L, D),
        "ln1_bias": (L, D),
        "qkv_weight": (L, 3, D, D),
        "qkv_bias": (L, 3, D),
        "attention_out_weight": (L, D, D),
        "attention_out_bias": (L, D),
        "ln2_weight": (L, D),
        "ln2_bias": (L, D),
        "mlp_in_weight": (L, 4 * D, D),
        "mlp_in_bias": (L, 4 * D),
        "mlp_out_weight": (L, D, 4 * D),
        "mlp_out_bias": (L, D),
        "final_ln_weight": (D,),
        "final_ln_bias": (D,),
    }


def is_matrix(name: str) -> bool:
    """Embeddings and weights of linear layers: the only parameters with weight decay."""
    return re.search(r"_(embedding|weight)(\.\d+)?$", name) is not None and "ln" not in name


# One parameter per layer and matrix (`qkv_weight.0`): slices of a stack would need an extra pass over memory to cast,
# and another to collect gradients, where XLA makes both part of the product. The vectors stay stacked: fewer tensors to
# trace. --scan_layers, whose loop wants a stack, pays for those passes.
LAYER_MATRICES = ("qkv_weight", "attention_out_weight", "mlp_in_weight", "mlp_out_weight")
LAYER_VECTORS = ("ln1_weight", "ln1_bias", "qkv_bias", "attention_out_bias")
LAYER_VECTORS += ("ln2_weight", "ln2_bias", "mlp_in_bias", "mlp_out_bias")


def split_layers(stacked: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """From the names and shapes of parameter_shapes to those of GPT's parameters."""
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


def block(x_BTD, w, num_heads, attention, keep=lambda x: x, p=0.0, place=None):
    """One pre-norm transformer layer. w: its parameters by name, as GPT.cast() gives them (biases of q scaled).

    With dropout p: w["dropout_keys"] (2, B) for its two places, and positions() where layers share them.
    """
    keys = w.get("dropout_keys")  # None: nothing is dropped
    D = x_BTD.shape[-1]
    y = layer_norm(x_BTD, w["ln1_weight"], w["ln1_bias"])
    # (H, K, D) keeps the head axis apart, so that it can be sharded over the mesh
    q, k, v = zip(w["qkv_weight"].view(3, num_heads, -1, D), w["qkv_bias"].view(3, num_heads, -1), strict=True)
    q = (q[0].float() / math.sqrt(D // num_heads)).to(q[0].dtype), q[1]  # fused with the product; the bias is scaled
    qkv = [torch.einsum("btd,hkd->bthk", y, weight) + bias for weight, bias in (q, k, v)]
    out_weight = w["attention_out_weight"].view(D, num_heads, -1)
    y = torch.einsum("bthk,dhk->btd", attention(*qkv), out_weight) + w["attention_out_bias"]
    y = y if keys is None else dropout(y, p, keys[0], place)
    x_BTD = keep(x_BTD + y)
    y = layer_norm(x_BTD, w["ln2_weight"], w["ln2_bias"])
    y = F.gelu(torch.einsum("btd,ed->bte", y, w["mlp_in_weight"]) + w["mlp_in_bias"], approximate="tanh")
    y = torch.einsum("bte,de->btd", y, w["mlp_out_weight"])
    if keys is None:
        return keep(x_BTD + y + w["mlp_out_bias"])
    return keep(x_BTD + dropout(y + w["mlp_out_bias"], p, keys[1], place))


class GPT(torch.nn.Module):
    """GPT-2: learned positions, pre-norm, GELU (tanh), one matrix for token embedding and output head.

    The head reads `token_embedding` itself, so there is no second weight that a move to the device could untie.
    compute_dtype: of activations and matrix products. mesh: activations stay sharded along the batch; None: one device.
    dropout: probability, as in GPT-2 on the embeddings and on what attention and MLP add to the residual stream.
    """

    def __init__(
        self,
        shape: ModelShape,
        compute_dtype=torch.float32,
        *,
        remat=False,
        scan_layers=False,
        attention=None,
        mesh=None,
        dropout=0.0,
    ):
        super().__init__()
        self.shape, self.compute_dtype, self.mesh = shape, compute_dtype, mesh
        self.remat, self.scan_layers, self.dropout = remat, scan_layers, dropout
        options = dict(num_heads=shape.num_heads, attention=attention or causal_attention, keep=self.keep, p=dropout)
        self.block = partial(block, **options)
        # scan caches its trace by function and shapes; a trace made without gradients must not serve training
        self._scanned = {grad: partial(self._scan_body) for grad in (True, False)}
        for name, size in parameter_shapes(shape).items():
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
            self.token_embedding[self.shape.vocab_size :] = 0.0

    def keep(self, x_BTD):
        """Hold an activation to its place on the mesh, in both passes; left alone, the partitioner may move it."""
        return x_BTD if self.mesh is None else xs.mark_sharding_with_gradients(x_BTD, self.mesh, (BATCH, None, None))

    def _scan_body(self, x_BTD, w):
        return self.block(x_BTD, w), None

    def cast(self) -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
        """All parameters in the compute dtype, once a step, and those of each layer.

        Layer norms stay float32: they compute in it anyway. Biases of q come divided by sqrt(K), in one operation for
        all layers; block() does its weights, where XLA makes that a part of the product.
        """
        cast = dict(self.named_parameters())
        scale = F.pad(torch.ones(2, 1, device=self.qkv_bias.device), (0, 0, 1, 0), value=self.shape.head_dim**-0.5)
        cast["qkv_bias"] = cast["qkv_bias"] * scale
        cast = {name: p if "ln" in name else p.to(self.compute_dtype) for name, p in cast.items()}
        columns = [cast[n].unbind(0) for n in LAYER_VECTORS]
        columns += [[cast[f"{n}.{layer}"] for layer in range(self.shape.num_layers)] for n in LAYER_MATRICES]
        names = LAYER_VECTORS + LAYER_MATRICES
        return cast, [dict(zip(names, of_one, strict=True)) for of_one in zip(*columns, strict=True)]

    def forward(self, tokens_BT, keys_B=None):
        """Logits over the padded vocabulary, (B, T, V), in the compute dtype.

        keys_B: row_keys() of dropout.py, (B,) int32, for dropout. None: an evaluation, nothing is dropped.
        """
        if self.dropout and keys_B is None and torch.is_grad_enabled():
            raise ValueError(f"dropout is {self.dropout} and a training step gave no keys; expected row_keys(...)")
        cast, layers = self.cast()
        # the lookup reads float32 rows: the gradients of a frequent token add up in float32
        x = F.embedding(tokens_BT, self.token_embedding) + self.position_embedding[: tokens_BT.shape[1]]
        place = None
        if self.dropout and keys_B is not None:
            keys, place = layer_keys(keys_B, 1 + 2 * len(layers)), positions(x.shape[1:], x.device)
            x = dropout(x, self.dropout, keys[0], place)
            for layer, w in enumerate(layers):
                w["dropout_keys"] = keys[1 + 2 * layer : 3 + 2 * layer]
        x = self.keep(x.to(self.compute_dtype))
        if self.scan_layers:
            partition = save_nothing_partition if self.remat else default_partition
            body = self._scanned[torch.is_grad_enabled()]
            stacked = {name: torch.stack([w[name] for w in layers]) for name in layers[0]}
            x, _ = scan.scan(body, x, stacked, partition_fn=partition, is_fn_pure=True)
        else:
            for w in layers:
                if self.remat:  # torch.utils.checkpoint would be undone by common subexpression elimination
                    run = lambda x, *values: self.block(x, dict(zip(layers[0], values, strict=True)), place=place)  # noqa: E731
                    x = checkpoint(run, x, *(value.clone() for value in w.values()), preserve_rng_state=False)
                else:
                    x = self.block(x, w, place=place)
        x = layer_norm(x, cast["final_ln_weight"], cast["final_ln_bias"])
        return F.linear(x, cast["token_embedding"])


def save_nothing_partition(*args, **kwargs):
    """Partition for scan that keeps only the inputs of a layer for the backward pass."""
    with torch._functorch.config.patch(activation_memory_budget=0.0):
        return min_cut_rematerialization_partition(*args, **kwargs)
