"""Llama 3 and Qwen3: parameters, one layer, the model. The operations are in operations.py.

Shape suffixes: B batch, T time, D embedding width, H heads of queries, G heads of keys and values, K head_dim,
E width of the MLP, V padded vocabulary; L layers.
"""

import math
from functools import partial

import torch
import torch.nn.functional as F

from layers import Decoder
from model_shapes import LlamaShape
from operations import causal_attention, rms_norm

LAYER_MATRICES = ("q_weight", "kv_weight", "attention_out_weight", "gate_up_weight", "mlp_out_weight")
LAYER_VECTORS = ("ln1_weight", "ln2_weight")


def parameter_shapes(shape: LlamaShape) -> dict[str, tuple[int, ...]]:
    """Every parameter, those of the L layers stacked. Norms have ln in their names, as those of the GPT."""
    L, D, V, E = shape.num_layers, shape.embedding_dim, shape.padded_vocab_size, shape.mlp_dim
    K, queries, keys = shape.head_dim, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    return {
        "token_embedding": (V, D),
        "ln1_weight": (L, D),
        "q_weight": (L, queries, D),
        "kv_weight": (L, 2, keys, D),
        **({"q_ln_weight": (L, K), "k_ln_weight": (L, K)} if shape.qk_norm else {}),
        "attention_out_weight": (L, D, queries),
        "ln2_weight": (L, D),
        "gate_up_weight": (L, 2, E, D),
        "mlp_out_weight": (L, D, E),
        "final_ln_weight": (D,),
        **({} if shape.tied_head else {"head_weight": (V, D)}),
    }


def rotary_frequencies(shape: LlamaShape) -> torch.Tensor:
    """Radians a position for each pair of a head's values, (K / 2,) float32; stretched as Llama 3.1 does it."""
    K, scaling = shape.head_dim, shape.rope_scaling
    frequencies = 1.0 / shape.rope_theta ** (torch.arange(0, K, 2, dtype=torch.float32) / K)
    if scaling is None:
        return frequencies
    # waves much shorter than the original context stay, much longer ones are stretched, those between in part
    waves = scaling.original_context * frequencies / (2 * math.pi)  # in the original context
    share = (waves - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    share = share.clamp(0.0, 1.0)
    return (1 - share) * frequencies / scaling.factor + share * frequencies


def rotate(x_BTHK, cos_TK, sin_TK):
    """Rotary positions (Su et al. 2021), pairs as Hugging Face has them: value i with value i + K / 2."""
    x, y = x_BTHK.float().chunk(2, -1)
    cos, sin = cos_TK[:, None], sin_TK[:, None]
    return torch.cat([x * cos - y * sin, y * cos + x * sin], -1).to(x_BTHK.dtype)


def for_each_query(x_BTGK, num_heads: int):
    """Heads of keys or values once for each head of queries that they serve, (B, T, H, K)."""
    B, T, G, K = x_BTGK.shape
    if num_heads == G:
        return x_BTGK
    return x_BTGK.unsqueeze(3).expand(B, T, G, num_heads // G, K).reshape(B, T, num_heads, K)


def block(x_BTD, w, shape: LlamaShape, attention, keep=lambda x: x, place=None):
    """One pre-norm layer. w: its parameters by name, as Llama.cast() gives them. place: cos and sin of positions.

    attention: of q (B, T, H, K) divided by sqrt(K), and k, v (B, T, G, K).
    """
    D, H, G, eps = x_BTD.shape[-1], shape.num_heads, shape.num_kv_heads, shape.norm_eps
    y = rms_norm(x_BTD, w["ln1_weight"], eps)
    scale = shape.head_dim**-0.5
    # (H, K, D) keeps the head axis apart, so that it can be sharded over the mesh
    q_weight = w["q_weight"] if shape.qk_norm else (w["q_weight"].float() * scale).to(w["q_weight"].dtype)
    k_weight, v_weight = w["kv_weight"].view(2, G, -1, D)
    q = torch.einsum("btd,hkd->bthk", y, q_weight.view(H, -1, D))
    k, v = (torch.einsum("btd,gkd->btgk", y, weight) for weight in (k_weight, v_weight))
    if shape.qk_norm:
        q, k = rms_norm(q, w["q_ln_weight"] * scale, eps), rms_norm(k, w["k_ln_weight"], eps)
    place = angles(positions(x_BTD), w["frequencies"]) if place is None else place
    y = attention(rotate(q, *place), rotate(k, *place), v)
    x_BTD = keep(x_BTD + torch.einsum("bthk,dhk->btd", y, w["attention_out_weight"].view(D, H, -1)))
    y = rms_norm(x_BTD, w["ln2_weight"], eps)
    gate, up = (torch.einsum("btd,ed->bte", y, weight) for weight in w["gate_up_weight"])
    return keep(x_BTD + torch.einsum("bte,de->btd", F.silu(gate) * up, w["mlp_out_weight"]))


def positions(x_BT):
    """0 to T - 1, (T,) float32."""
    return torch.arange(x_BT.shape[1], dtype=torch.float32, device=x_BT.device)


def angles(positions_T, frequencies_K):
    """(cos, sin) of positions, each (T, K / 2) float32."""
    radians = positions_T[:, None] * frequencies_K
    return radians.cos(), radians.sin()


class Llama(Decoder):
    """Llama 3, and Qwen3 by qk_norm of its shape: RMSNorm, rotary positions, SwiGLU, grouped queries, no biases.

    A tied head reads `token_embedding` itself, so there is no second weight that a move to the device could untie.
    """

    def __init__(self, shape: LlamaShape, compute_dtype=torch.float32, *, attention=None, **options):
        """options: of a Decoder."""
        super().__init__(shape, parameter_shapes(shape), compute_dtype, **options)
        attend, H = attention or causal_attention, shape.num_heads
        grouped = lambda q, k, v: attend(q, for_each_query(k, H), for_each_query(v, H))  # noqa: E731
        self.block = partial(block, shape=shape, attention=grouped, keep=self.keep)
        self.register_buffer("frequencies", rotary_frequencies(shape), persistent=False)

    def cast(self) -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
        """All parameters in the compute dtype, once a step, and those of each layer. Norms stay float32."""
        cast = {name: p if "ln" in name else p.to(self.compute_dtype) for name, p in self.named_parameters()}
        vectors = LAYER_VECTORS + (("q_ln_weight", "k_ln_weight") if self.shape.qk_norm else ())
        layers = self.of_layers(cast, vectors, LAYER_MATRICES)
        return cast, [w | {"frequencies": self.frequencies} for w in layers]

    def forward(self, tokens_BT):
        """Logits over the padded vocabulary, (B, T, V), in the compute dtype."""
        cast, layers = self.cast()
        # the lookup reads float32 rows: the gradients of a frequent token add up in float32
        x = self.keep(F.embedding(tokens_BT, self.token_embedding).to(self.compute_dtype))
        x = self.through_layers(x, layers, angles(positions(tokens_BT), self.frequencies))
        return self.head(x, cast)

    def head(self, x_BTD, cast):
        x_BTD = rms_norm(x_BTD, cast["final_ln_weight"], self.shape.norm_eps)
        return F.linear(x_BTD, cast["token_embedding" if self.shape.tied_head else "head_weight"])
