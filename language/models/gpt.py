"""GPT-2 and GPT-3: parameters in llm.c's order, and the model. The operations are in operations.py.

Shape suffixes: B batch, T time, D embedding width, H heads, K head_dim, V padded vocabulary; L layers.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from language.models.layers import (
    Decoder,
    ModelOutput,
    adapter,
    add_adapter,
    apply_layers,
    divided,
    find_documents,
    product,
    projections,
)
from language.models.operations import add_bias, causal_attention, layer_norm
from language.options.shapes import ModelShape
from language.xla.saved_activations import SAVE_NOTHING
from language.xla.shards import gathered
from tpu_utils.device.dropout import dropout, layer_keys, positions


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


LAYER_MATRICES = ("qkv_weight", "attention_out_weight", "mlp_in_weight", "mlp_out_weight")
LAYER_VECTORS = ("ln1_weight", "ln1_bias", "qkv_bias", "attention_out_bias")
LAYER_VECTORS += ("ln2_weight", "ln2_bias", "mlp_in_bias", "mlp_out_bias")


class GPT(Decoder):
    """GPT-2: learned positions, pre-norm, GELU (tanh), one matrix for token embedding and output head.

    The head reads `token_embedding` itself, so there is no second weight that a move to the device could untie.
    dropout: probability, as in GPT-2 on the embeddings and on what attention and MLP add to the residual stream.
    """

    def __init__(
        self,
        shape: ModelShape,
        compute_dtype=torch.float32,
        *,
        attention: Callable = causal_attention,
        dropout=0.0,
        **options,
    ):
        """attention: that, flash_attention(), or one of them by context_parallel(). options: of a Decoder."""
        super().__init__(shape, parameter_shapes(shape), compute_dtype, **options)
        self.attention = attention
        self.query_divisor = math.sqrt(shape.head_dim)
        self.dropout = dropout

    def cast(self) -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
        """All parameters in the compute dtype, once a step, and those of each layer.

        Layer norms stay float32: they compute in it anyway. The biases of q, and b of its adapters, are divided by
        query_divisor here; layer() divides its weights, which XLA fuses into the matrix product.
        """
        cast = self.weights()
        scale = F.pad(torch.ones(2, 1, device=self.qkv_bias.device), (0, 0, 1, 0), value=1 / self.query_divisor)
        cast["qkv_bias"] = cast["qkv_bias"] * scale
        for name in (name for name in cast if "_lora_b" in name):
            cast[name] = cast[name] * (self.adapter_scale * (scale[..., None] if "qkv" in name else 1.0))
        cast = {name: p.float() if "ln" in name else self.in_compute_dtype(name, p) for name, p in cast.items()}
        return cast, self.parameters_by_layer(cast, LAYER_VECTORS, LAYER_MATRICES)

    def layer(self, x_BTD, w, kept=SAVE_NOTHING, attention: Callable | None = None, indices=None):
        """(x, None) after one pre-norm layer. w: its parameters by name, as cast() gives them (biases of q scaled).

        attention: of q, k and v (B, T, H, K), as causal_attention(); None: the model's. With dropout w["dropout_keys"]
        is (2, B), for its two calls; indices: positions(x_BTD.shape[1:]) for both, as devices hold them; None: they are
        made here.
        """
        attention = attention or self.attention
        keys = w.get("dropout_keys")  # None: nothing is dropped
        H, D = self.shape.num_heads, x_BTD.shape[-1]
        if keys is not None and indices is None:
            indices = self.hold_positions(positions(x_BTD.shape[1:], x_BTD.device))
        y = layer_norm(x_BTD, w["ln1_weight"], w["ln1_bias"])
        # (H, K, D) keeps the head axis apart, so that it can be sharded over the mesh
        q, k, v = zip(w["qkv_weight"].view(3, H, -1, D), w["qkv_bias"].view(3, H, -1), strict=True)
        q = divided(q[0], self.query_divisor), q[1]  # fused with the product; cast() does the bias
        add = torch.add if attention is causal_attention else add_bias  # XLA cannot fuse a bias gradient into a kernel
        qkv = projections(y, (q, k, v), add)
        qkv = [add_adapter(x, y, adapter(w, "qkv", part)) for part, x in enumerate(qkv)]
        qkv = [kept.heads(point, x) for point, x in zip(("query", "key", "value"), qkv, strict=True)]
        y, saved = attention(*qkv, w.get("starts"), kept.attention())
        kept.keep_attention(saved)
        out_weight = w["attention_out_weight"].view(D, H, -1)
        y = product("bthk,dhk->btd", y, out_weight, adapter(w, "attention_out")) + w["attention_out_bias"]
        y = y if keys is None else dropout(y, self.dropout, keys[0], indices)
        x_BTD = kept("residual", self.hold_sharding(x_BTD + y))
        y = layer_norm(x_BTD, w["ln2_weight"], w["ln2_bias"])
        y = kept("up", product("btd,ed->bte", y, w["mlp_in_weight"], adapter(w, "mlp_in")) + w["mlp_in_bias"])
        y = product("bte,de->btd", F.gelu(y, approximate="tanh"), w["mlp_out_weight"], adapter(w, "mlp_out"))
        if keys is None:
            return self.hold_sharding(x_BTD + y + w["mlp_out_bias"]), None
        return self.hold_sharding(x_BTD + dropout(y + w["mlp_out_bias"], self.dropout, keys[1], indices)), None

    def head(self, x_BTD, cast):
        """Logits of what the last layer gave."""
        x_BTD = layer_norm(x_BTD, cast["final_ln_weight"], cast["final_ln_bias"])
        return self.logits(x_BTD, cast["token_embedding"])

    def forward(self, tokens_BT, keys_B=None) -> ModelOutput:
        """packed: documents begin at START. keys_B: row_keys() of dropout.py, (B,) int32, for dropout. None: an
        evaluation, nothing is dropped."""
        if self.dropout and keys_B is None and torch.is_grad_enabled():
            raise ValueError(f"dropout is {self.dropout} and a training step gave no keys; expected row_keys(...)")
        cast, layers = self.cast()
        if self.packed:
            here = self.positions(tokens_BT.shape[1], tokens_BT.device)
            tokens_BT, starts_BT = find_documents(tokens_BT, here)
            layers = [w | {"starts": starts_BT} for w in layers]
            at_position = F.embedding(here - starts_BT, gathered(self.position_embedding))
        else:
            at_position = self.hold_positions(gathered(self.position_embedding)[: tokens_BT.shape[1]])
        x = self.rows_of_tokens(tokens_BT).float() + at_position
        indices = None
        if self.dropout and keys_B is not None:
            keys = layer_keys(keys_B, 1 + 2 * len(layers))
            indices = self.hold_positions(positions(x.shape[1:], x.device))
            x = dropout(x, self.dropout, keys[0], indices)
            for layer, w in enumerate(layers):
                w["dropout_keys"] = keys[1 + 2 * layer : 3 + 2 * layer]
        x = self.hold_sharding(x.to(self.compute_dtype))
        x, routing = apply_layers(self.layer, self.execution, x, layers, [{"indices": indices} for _ in layers])
        return ModelOutput(self.head(x, cast), routing)
