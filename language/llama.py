"""Llama 3 and Qwen3: parameters, one layer, the model. The operations are in operations.py.

Shape suffixes: B batch, T time, D embedding width, H heads of queries, G heads of keys and values, K head_dim,
E width of the MLP, V padded vocabulary; L layers.
"""

import math
from functools import partial

import torch
import torch.nn.functional as F

from language.layers import Decoder, add_adapter, find_documents, product
from language.operations import causal_attention, rms_norm
from language.shapes import LlamaShape

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
    frequencies = 1.0 / shape.rope_theta ** (torch.arange(0, K, 2, dtype=torch.float32, device="cpu") / K)
    if scaling is None:
        return frequencies
    # waves much shorter than the original context stay, much longer ones are stretched, those between in part
    waves = scaling.original_context * frequencies / (2 * math.pi)  # periods in the original context
    share = (waves - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    share = share.clamp(0.0, 1.0)
    return (1 - share) * frequencies / scaling.factor + share * frequencies


def rotate(x_BTHK, cos, sin):
    """Rotary positions (Su et al. 2021), pairs as Hugging Face has them: value i with value i + K / 2.

    cos, sin: (T, K / 2), or (B, T, K / 2) where positions are those in a document.
    """
    x, y = x_BTHK.float().chunk(2, -1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.cat([x * cos - y * sin, y * cos + x * sin], -1).to(x_BTHK.dtype)


def block(x_BTD, w, shape: LlamaShape, attention, hold_sharding=lambda x: x, shared=None, saved=None):
    """One pre-norm layer. w: its parameters by name, as Llama.cast() gives them. shared: cos and sin of the rotations.

    attention: of q (B, T, H, K) divided by sqrt(K), k and v (B, T, G, K), and the documents' first positions.
    """
    D, H, G, eps = x_BTD.shape[-1], shape.num_heads, shape.num_kv_heads, shape.norm_eps
    starts_BT = w.get("starts")
    cos, sin = angles(positions(x_BTD, starts_BT), w["frequencies"]) if shared is None else shared
    y = rms_norm(x_BTD, w["ln1_weight"], eps)
    # (H, K, D) keeps the head axis apart, so that it can be sharded over the mesh
    q = product("btd,hkd->bthk", y, w["q_weight"].view(H, -1, D), adapter(w, "q"))
    k_weight, v_weight = w["kv_weight"].view(2, G, -1, D)
    k = product("btd,gkd->btgk", y, k_weight, adapter(w, "kv", 0))
    v = product("btd,gkd->btgk", y, v_weight, adapter(w, "kv", 1))
    if shape.qk_norm:
        q, k = rms_norm(q, w["q_ln_weight"], eps), rms_norm(k, w["k_ln_weight"], eps)
    scale = shape.head_dim**-0.5  # of q, applied in its rotation: that is in float32
    y = attention(rotate(q, cos * scale, sin * scale), rotate(k, cos, sin), v, starts_BT, saved)
    out_weight = w["attention_out_weight"].view(D, H, -1)
    x_BTD = hold_sharding(x_BTD + product("bthk,dhk->btd", y, out_weight, adapter(w, "attention_out")))
    y = rms_norm(x_BTD, w["ln2_weight"], eps)
    # one product, so that its gradient is one tensor, as the weight is
    gate, up = torch.einsum("btd,ced->btce", y, w["gate_up_weight"]).unbind(2)
    gate, up = add_adapter(gate, y, adapter(w, "gate_up", 0)), add_adapter(up, y, adapter(w, "gate_up", 1))
    y = product("bte,de->btd", F.silu(gate) * up, w["mlp_out_weight"], adapter(w, "mlp_out"))
    return hold_sharding(x_BTD + y)


def adapter(w, matrix: str, part=...):
    """LoRA's (a, b) of a matrix, or of one part of it, such as k of kv; None without LoRA."""
    return (w[f"{matrix}_lora_a"][part], w[f"{matrix}_lora_b"][part]) if f"{matrix}_lora_a" in w else None


def positions(x_BT, starts_BT=None):
    """0 to T - 1, (T,) float32; or counted from the first token of each document, (B, T)."""
    here = torch.arange(x_BT.shape[1], dtype=torch.float32, device=x_BT.device)
    return here if starts_BT is None else here - starts_BT


def angles(positions_T, frequencies_K):
    """(cos, sin) of positions (T,) or (B, T), each (..., K / 2) float32."""
    radians = positions_T[..., None] * frequencies_K
    return radians.cos(), radians.sin()


class Llama(Decoder):
    """Llama 3, and Qwen3 by qk_norm of its shape: RMSNorm, rotary positions, SwiGLU, grouped queries, no biases.

    A tied head reads `token_embedding` itself, so there is no second weight that a move to the device could untie.
    """

    def __init__(self, shape: LlamaShape, compute_dtype=torch.float32, *, attention=None, **options):
        """options: of a Decoder."""
        super().__init__(shape, parameter_shapes(shape), compute_dtype, **options)
        self.block = partial(
            block, shape=shape, attention=attention or causal_attention, hold_sharding=self.hold_sharding
        )
        self.register_buffer("frequencies", rotary_frequencies(shape), persistent=False)

    def cast(self) -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
        """All parameters in the compute dtype, once a step, and those of each layer. Norms stay float32."""
        cast = {}
        for name, p in self.named_parameters():
            p = p * self.adapter_scale if "_lora_b" in name else p
            cast[name] = p.float() if "ln" in name else p.to(self.compute_dtype)
        vectors = LAYER_VECTORS + (("q_ln_weight", "k_ln_weight") if self.shape.qk_norm else ())
        layers = self.of_layers(cast, vectors, LAYER_MATRICES)
        return cast, [w | {"frequencies": self.frequencies} for w in layers]

    def forward(self, tokens_BT):
        """Logits over the padded vocabulary, (B, T, V), in the compute dtype. packed: documents begin at START."""
        cast, layers = self.cast()
        starts_BT = None
        if self.packed:
            tokens_BT, starts_BT = find_documents(tokens_BT)
            layers = [w | {"starts": starts_BT} for w in layers]
        # the lookup reads float32 rows: the gradients of a frequent token add up in float32
        x = self.hold_sharding(F.embedding(tokens_BT, self.token_embedding).to(self.compute_dtype))
        x = self.through_layers(x, layers, angles(positions(tokens_BT, starts_BT), self.frequencies))
        return self.head(x, cast)

    def head(self, x_BTD, cast):
        """Logits of what the last layer gave."""
        x_BTD = rms_norm(x_BTD, cast["final_ln_weight"], self.shape.norm_eps)
        return F.linear(x_BTD, cast["token_embedding" if self.shape.tied_head else "head_weight"])
