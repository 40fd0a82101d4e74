"""Llama and the families like it, by the table in families.py: parameters, rotary positions, the model.

Shape suffixes: B batch, T time, D embedding width, H heads of queries, G heads of keys and values, K head_dim,
E width of the MLP, V padded vocabulary; L layers.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from language.models.experts import mixture
from language.models.layers import (
    LAYER_MATRICES,
    Decoder,
    ModelOutput,
    adapter,
    add_adapter,
    apply_layers,
    find_documents,
    is_decode_step,
    product,
)
from language.models.operations import causal_attention, rms_norm, rms_scale
from language.models.routing import REPORTED
from language.options.llama_shape import LlamaShape
from language.xla.saved_activations import SAVE_NOTHING


def parameter_shapes(shape: LlamaShape) -> dict[str, tuple[int, ...]]:
    """Every parameter, those of the L layers stacked. Norms have ln in their names, as those of the GPT: ln1 and ln2 of
    what attention and MLP read, ln1_after and ln2_after of what they give."""
    family, per_head = shape.conventions, shape.conventions.qk_norm == "head"
    L, D, V = shape.num_layers, shape.embedding_dim, shape.padded_vocab_size
    K = shape.head_dim
    queries = shape.num_heads * shape.head_dim
    keys = shape.num_kv_heads * shape.head_dim
    return {
        "token_embedding": (V, D),
        **({"ln1_weight": (L, D), "ln2_weight": (L, D)} if family.norms != "after" else {}),
        **({"ln1_after_weight": (L, D), "ln2_after_weight": (L, D)} if family.norms != "before" else {}),
        "q_weight": (L, queries, D),
        "kv_weight": (L, 2, keys, D),
        **({"q_bias": (L, queries), "kv_bias": (L, 2, keys)} if family.qkv_bias else {}),
        **({"q_ln_weight": (L, K if per_head else queries)} if family.qk_norm else {}),
        **({"k_ln_weight": (L, K if per_head else keys)} if family.qk_norm else {}),
        "attention_out_weight": (L, D, queries),
        **mlp_shapes(shape),
        "final_ln_weight": (D,),
        **({} if shape.tied_head else {"head_weight": (V, D)}),
    }


def mlp_shapes(shape: LlamaShape) -> dict[str, tuple[int, ...]]:
    L, D, E, X = shape.num_layers, shape.embedding_dim, shape.mlp_dim, shape.num_experts
    if not X:
        return {"gate_up_weight": (L, 2, E, D), "mlp_out_weight": (L, D, E)}
    return {"router_weight": (L, X, D), "expert_gate_up_weight": (L, X, 2, E, D), "expert_out_weight": (L, X, D, E)}


def rotary_frequencies(shape: LlamaShape, kind: str = "global", long: bool = False) -> torch.Tensor:
    """Radians a position for each pair of rotated values, float32, in a layer of this kind; without rotary positions 0.

    long: of longrope, for texts longer than the original context.
    """
    R = shape.rotated_width or shape.head_dim
    scaling = shape.rope_scaling
    is_local = kind == "local"
    theta = shape.local_theta if is_local and shape.local_theta else shape.rope_theta
    waves = theta ** (torch.arange(0, R, 2, dtype=torch.float32, device="cpu") / R)
    if kind == "unrotated":
        return torch.zeros_like(waves)
    if scaling is None or (is_local and shape.local_theta):
        return 1.0 / waves
    if scaling.kind == "longrope":
        factors = scaling.long_factors if long else scaling.short_factors
        return 1.0 / (torch.tensor(factors, dtype=torch.float32, device="cpu") * waves)
    frequencies = 1.0 / waves
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    # waves much shorter than the original context stay, much longer ones are stretched, those between in part
    waves = scaling.original_context * frequencies / (2 * math.pi)  # periods in the original context
    share = (waves - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    share = share.clamp(0.0, 1.0)
    return (1 - share) * frequencies / scaling.factor + share * frequencies


def frequency_table(shape: LlamaShape) -> torch.Tensor:
    """A row for each kind of layer in the order of shape.pattern, and with longrope the same rows for long texts."""
    longs = (False, True) if shape.rope_scaling and shape.rope_scaling.kind == "longrope" else (False,)
    return torch.stack(
        [rotary_frequencies(shape, kind, long) for long in longs for kind in dict.fromkeys(shape.pattern)]
    )


def rotate(x_BTHK, cos, sin, scale: float = 1.0):
    """Rotary positions (Su et al. 2021), pairs as Hugging Face has them: value i with value i + R / 2 of the first R.

    cos, sin: (T, R / 2), or (B, T, R / 2) where positions are those in a document. scale: of values after the first R.
    """
    R = 2 * cos.shape[-1]
    x, y = x_BTHK[..., :R].float().chunk(2, -1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    rest = [x_BTHK[..., R:].float() * scale] if x_BTHK.shape[-1] > R else []
    return torch.cat([x * cos - y * sin, y * cos + x * sin, *rest], -1).to(x_BTHK.dtype)


def in_document(positions_T, starts_BT=None):
    """Positions, (T,) float32; or counted from the first token of each document, (B, T)."""
    return positions_T.float() if starts_BT is None else (positions_T - starts_BT).float()


def angles(positions_T, frequencies, shape: LlamaShape):
    """(cos, sin) of positions (T,) or (B, T), each (..., R / 2) float32."""
    radians, scaling = positions_T[..., None] * frequencies, shape.rope_scaling
    cos, sin = radians.cos(), radians.sin()
    return (
        (cos, sin) if scaling is None or scaling.amplitude == 1 else (cos * scaling.amplitude, sin * scaling.amplitude)
    )


class Llama(Decoder):
    """RMSNorm, rotary positions, a gated MLP, grouped queries; the rest as shape and shape.conventions say.

    A tied head reads `token_embedding` itself, so there is no second weight that a move to the device could untie.
    """

    def __init__(
        self,
        shape: LlamaShape,
        compute_dtype=torch.float32,
        *,
        attention: Callable = causal_attention,
        expert_capacity=0.0,
        expert_kernels=False,
        **options,
    ):
        """attention: that, flash_attention(), or one of them by context_parallel(). expert_capacity, expert_kernels: as
        mixture() takes them. options: of a Decoder."""
        super().__init__(shape, parameter_shapes(shape), compute_dtype, **options)
        self.attention = attention
        self.expert_capacity, self.expert_kernels = expert_capacity, expert_kernels
        self.reported = REPORTED if shape.num_experts else ()
        self.register_buffer("frequencies", frequency_table(shape), persistent=False)
        # a scanned layer is traced once for all: where their windows differ, each has its own as a tensor
        if self.execution.scan and len(set(shape.windows)) > 1:
            windows = [window or shape.sequence_length for window in shape.windows]
            self.register_buffer("windows", torch.tensor(windows, dtype=torch.int32, device="cpu"), persistent=False)

    def cast(self) -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
        """All parameters in the compute dtype, once a step, and those of each layer. Norms stay float32."""
        cast, offset = {}, self.shape.norm_offset
        for name, p in self.weights().items():
            p = p * self.adapter_scale if "_lora_b" in name else p
            cast[name] = p.float() + offset if "ln" in name else self.in_compute_dtype(name, p)
            if "router" in name:
                cast[name] = p.float()
        vectors = tuple(name for name in cast if ("ln" in name or "bias" in name) and name != "final_ln_weight")
        matrices = tuple(name for name in LAYER_MATRICES if f"{name}.0" in cast)
        return cast, self.parameters_by_layer(cast, vectors, matrices)

    def embed(self, tokens_BT):
        """(B, T, D) in the compute dtype."""
        x = self.rows_of_tokens(tokens_BT).to(self.compute_dtype)
        scale = torch.tensor(self.shape.embedding_dim**0.5, device="cpu").to(self.compute_dtype)  # rounded, as Gemma's
        return x * scale.item() if self.shape.conventions.scaled_embedding else x

    def frequencies_by_kind(self, length: int) -> dict[str, torch.Tensor]:
        """Rotary frequencies by kind of layer. length: of the longest text, which decides with longrope."""
        distinct, scaling = dict.fromkeys(self.shape.pattern), self.shape.rope_scaling
        is_long = scaling is not None and scaling.kind == "longrope" and length > scaling.original_context
        return dict(zip(distinct, self.frequencies[len(distinct) * is_long :], strict=False))

    def layer_kwargs(self, positions_T, length: int) -> list[dict]:
        """What layer() takes beside parameters. positions: (T,) or (B, T). length: as in frequencies_by_kind()."""
        own = self.frequencies_by_kind(length).items()
        rotations = {kind: angles(positions_T, frequencies, self.shape) for kind, frequencies in own}
        return [
            {"rotation": rotations[kind], "window": window}
            for kind, window in zip(self.shape.kinds, self.shape.windows, strict=True)
        ]

    def norm(self, x, w, name: str, kept, point=""):
        """RMS norm by the weight of this name, where the layer has it. point: what is kept of x, because the norm's
        gradient needs it."""
        if name not in w:
            return x
        x = kept(point, x)
        rows = x if w[name].shape[-1] == x.shape[-1] else x.flatten(2)  # or of all heads together
        scale = kept("scale", rms_scale(rows, self.shape.norm_eps))
        return rms_norm(rows, w[name], self.shape.norm_eps, scale).view(x.shape)

    def queries_keys_values(self, y_BTD, w, rotation, kept):
        """q (B, T, H, K), scaled, k and v (B, T, G, K) of what attention reads."""
        D, H, G = y_BTD.shape[-1], self.shape.num_heads, self.shape.num_kv_heads
        # (H, K, D) keeps the head axis apart, so that it can be sharded over the mesh
        q = product("btd,hkd->bthk", y_BTD, w["q_weight"].view(H, -1, D), adapter(w, "q"))
        kv_weight = w["kv_weight"].view(2, G, -1, D)
        if is_decode_step(y_BTD):  # halves of a weight would be copied for each token
            k, v = product("btd,cgkd->btcgk", y_BTD, kv_weight).unbind(2)
        else:
            k, v = (product("btd,gkd->btgk", y_BTD, weight) for weight in kv_weight)
        k, v = add_adapter(k, y_BTD, adapter(w, "kv", 0)), add_adapter(v, y_BTD, adapter(w, "kv", 1))
        if "q_bias" in w:
            k_bias, v_bias = w["kv_bias"].view(2, G, -1)
            q, k, v = q + w["q_bias"].view(H, -1), k + k_bias, v + v_bias
        q, k = self.norm(q, w, "q_ln_weight", kept, "query"), self.norm(k, w, "k_ln_weight", kept, "key")
        (cos, sin), scale = rotation, (self.shape.query_scalar or self.shape.head_dim) ** -0.5
        # q is scaled in its rotation, which is in float32
        q, k = rotate(q, cos * scale, sin * scale, scale), rotate(k, cos, sin)
        if "q_ln_weight" not in w:
            q, k = kept.heads("query", q), kept.heads("key", k)
        return q, k, kept.heads("value", v)

    def mlp(self, y_BTD, w, kept, experts: Callable | None):
        """(what the MLP gives, None), or of experts (what they give, routing of route())."""
        activation = F.silu if self.shape.conventions.activation == "silu" else partial(F.gelu, approximate="tanh")
        if "router_weight" in w:
            experts = experts or partial(mixture, capacity=self.expert_capacity, kernels=self.expert_kernels)
            return experts(y_BTD, w, self.shape, activation)
        # one product, so that its gradient is one tensor, as the weight is
        gate, up = self.hold_sharding(product("btd,ced->btce", y_BTD, w["gate_up_weight"]), None, "tensor").unbind(2)
        gate, up = add_adapter(gate, y_BTD, adapter(w, "gate_up", 0)), add_adapter(up, y_BTD, adapter(w, "gate_up", 1))
        gate, up = kept("gate", gate), kept("up", up)
        return product("bte,de->btd", activation(gate) * up, w["mlp_out_weight"], adapter(w, "mlp_out")), None

    def layer(
        self,
        x_BTD,
        w,
        kept=SAVE_NOTHING,
        attention: Callable | None = None,
        experts: Callable | None = None,
        rotation=None,
        window: int | None = None,
    ):
        """(x, routing of route(), or None without experts) after one layer. w: its parameters by name, as cast() gives
        them; which norms and biases it has, they tell.

        attention: as causal_attention(); None: the model's. experts: mixture(); None: with the model's capacity and
        kernels. rotation: cos and sin; None: they are made here. window: of attention; None: it is in w, or that of
        all layers.
        """
        starts_BT, attention = w.get("starts"), attention or self.attention
        window = w.get("window", self.shape.windows[0] if window is None else window)
        if rotation is None:
            here = in_document(self.positions(x_BTD.shape[1], x_BTD.device), starts_BT)
            rotation = angles(here, w["frequencies"], self.shape)
        y = self.norm(x_BTD, w, "ln1_weight", kept)
        q, k, v = self.queries_keys_values(y, w, rotation, kept)
        y, saved = attention(q, k, v, starts_BT, kept.attention(), window)
        kept.keep_attention(saved)
        out_weight = w["attention_out_weight"].view(x_BTD.shape[-1], self.shape.num_heads, -1)
        y = product("bthk,dhk->btd", y, out_weight, adapter(w, "attention_out"))
        x_BTD = self.hold_sharding(x_BTD + self.norm(y, w, "ln1_after_weight", kept, "residual"))
        if "ln1_after_weight" not in w:
            x_BTD = kept("residual", x_BTD)
        y, routing = self.mlp(self.norm(x_BTD, w, "ln2_weight", kept), w, kept, experts)
        return self.hold_sharding(x_BTD + self.norm(y, w, "ln2_after_weight", kept)), routing

    def forward(self, tokens_BT, keys_B=None) -> ModelOutput:
        """packed: documents begin at START. keys_B: as of a GPT; there is no dropout here."""
        cast, layers = self.cast()
        starts_BT, length = None, tokens_BT.shape[1]
        here = self.positions(length, tokens_BT.device)
        if self.packed:
            tokens_BT, starts_BT = find_documents(tokens_BT, here)
            layers = [w | {"starts": starts_BT} for w in layers]
        if self.execution.scan:
            own = self.frequencies_by_kind(length)
            layers = [w | {"frequencies": own[kind]} for w, kind in zip(layers, self.shape.kinds, strict=True)]
            if hasattr(self, "windows"):
                layers = [w | {"window": window} for w, window in zip(layers, self.windows, strict=True)]
        x, options = self.hold_sharding(self.embed(tokens_BT)), self.layer_kwargs(in_document(here, starts_BT), length)
        x, routing = apply_layers(self.layer, self.execution, x, layers, options)
        return ModelOutput(self.head(x, cast), routing)

    def head(self, x_BTD, cast):
        """Logits of what the last layer gave."""
        x_BTD = rms_norm(x_BTD, cast["final_ln_weight"], self.shape.norm_eps)
        return self.logits(x_BTD, cast["token_embedding" if self.shape.tied_head else "head_weight"])
