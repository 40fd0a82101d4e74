"""What fixes the size of Llama and the families like it, the published sizes, and what cannot work with them.

Imports no torch.
"""

import math
from dataclasses import dataclass
from typing import Any

from language.options.families import FAMILIES, Family
from language.options.shapes import GPT_SIZES, ModelShape


@dataclass(frozen=True)
class RopeScaling:
    """How rotary positions are stretched beyond the context of pre-training, as in config.json."""

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    kind: str = "llama3"  # llama3: long waves alone. linear: all waves. longrope: each wave by a factor of its own
    short_factors: tuple[float, ...] = ()
    """longrope: one factor for each pair of rotated values, for texts within the original context."""
    long_factors: tuple[float, ...] = ()  # longrope: the factors for longer texts

    @property
    def amplitude(self) -> float:
        """What longrope multiplies rotated queries and keys by."""
        if self.kind != "longrope" or self.factor <= 1:
            return 1.0
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original_context))


@dataclass(frozen=True)
class LlamaShape(ModelShape):
    """Llama and the families like it: the numbers in config.json. What else differs is in families.py."""

    num_kv_heads: int = 0  # heads of keys and values; each serves num_heads / num_kv_heads heads of queries
    mlp_dim: int = 0  # hidden width of the MLP: of its gate and up projections each
    head_width: int = 0  # 0: embedding_dim / num_heads
    tied_head: bool = False  # whether the output head is the token embedding
    family: str = "llama"  # by its model_type
    rope_theta: float = 500000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    window: int = 0  # tokens that one in a local layer sees, itself among them
    pattern: tuple[str, ...] = ("global",)
    """Kinds of the layers, repeated over them: global; local, with the window; unrotated, without rotary positions."""
    local_theta: float = 0.0  # rope_theta of local layers, which are not stretched then. 0: they are as the others
    rotated_width: int = 0  # values of a head that are rotated, the first. 0: all
    query_scalar: float = 0.0  # queries are divided by its root. 0: head_dim
    num_experts: int = 0  # experts of a layer: MLPs of width mlp_dim. 0: one MLP for all tokens
    experts_per_token: int = 0
    normalised_experts: bool = True  # whether the weights of a token's experts add up to 1

    @property
    def conventions(self) -> Family:
        return FAMILIES[self.family]

    @property
    def norm_offset(self) -> float:
        return self.conventions.norm_offset

    @property
    def head_dim(self) -> int:
        return self.head_width or self.embedding_dim // self.num_heads

    @property
    def num_cached_heads(self) -> int:
        return self.num_kv_heads

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kind of each layer."""
        return tuple(self.pattern[layer % len(self.pattern)] for layer in range(self.num_layers))

    @property
    def windows(self) -> tuple[int, ...]:
        return tuple(
            self.window if kind == "local" and self.window < self.sequence_length else 0 for kind in self.kinds
        )

    @property
    def num_parameters(self) -> int:
        """Padded vocabulary included. Per layer: q and out 2DHK, k and v 2DGK, MLP 3DE, or of experts X (3DE + D);
        norms 2D or 4D; of queries and keys 2K or HK + GK; biases HK + 2GK."""
        D, K, family = self.embedding_dim, self.head_dim, self.conventions
        queries, keys = K * self.num_heads, K * self.num_kv_heads
        per_layer = 2 * D * (queries + keys) + (4 if family.norms == "both" else 2) * D
        per_layer += 3 * D * self.mlp_dim * (self.num_experts or 1) + self.num_experts * D
        per_layer += {"": 0, "head": 2 * K, "whole": queries + keys}[family.qk_norm]
        per_layer += (queries + 2 * keys) * family.qkv_bias
        return (2 - self.tied_head) * self.padded_vocab_size * D + D + self.num_layers * per_layer

    @property
    def num_multiplied(self) -> int:
        """Without a token embedding of its own, which is looked up, and experts that a token does not choose."""
        idle = 3 * self.embedding_dim * self.mlp_dim * (self.num_experts - self.experts_per_token)
        looked_up = 0 if self.tied_head else self.padded_vocab_size * self.embedding_dim
        return self.num_parameters - looked_up - self.num_layers * idle


MIXTRAL: dict[str, Any] = dict(family="mixtral", num_experts=8, experts_per_token=2)
QWEN3_MOE: dict[str, Any] = dict(family="qwen3_moe", num_experts=128, experts_per_token=8)
MODEL_SIZES: dict[str, ModelShape] = GPT_SIZES | {
    # Hugging Face's config.json of each; contexts are those of training, not the longest that they can read
    "llama_tiny": LlamaShape(2, 4, 128, 64, 50257, num_kv_heads=2, mlp_dim=384, tied_head=True, rope_theta=1e4),
    "smollm2_135M": LlamaShape(30, 9, 576, 2048, 49152, 3, 1536, tied_head=True, rope_theta=1e5),
    "llama3_1B": LlamaShape(16, 32, 2048, 8192, 128256, 8, 8192, tied_head=True, rope_scaling=RopeScaling(32.0)),
    "llama3_3B": LlamaShape(28, 24, 3072, 8192, 128256, 8, 8192, tied_head=True, rope_scaling=RopeScaling(32.0)),
    "llama3_8B": LlamaShape(32, 32, 4096, 8192, 128256, 8, 14336, rope_scaling=RopeScaling(8.0)),
    "llama3_70B": LlamaShape(80, 64, 8192, 8192, 128256, 8, 28672, rope_scaling=RopeScaling(8.0)),
    "qwen3_0.6B": LlamaShape(28, 16, 1024, 4096, 151936, 8, 3072, 128, True, "qwen3", 1e6, norm_eps=1e-6),
    "mixtral_tiny": LlamaShape(2, 4, 128, 64, 50257, 2, 192, tied_head=True, rope_theta=1e4, **MIXTRAL),
    "mixtral_8x7B": LlamaShape(32, 32, 4096, 4096, 32000, 8, 14336, rope_theta=1e6, **MIXTRAL),
    "qwen3_30B_A3B": LlamaShape(48, 32, 2048, 4096, 151936, 4, 768, 128, rope_theta=1e6, norm_eps=1e-6, **QWEN3_MOE),
    "qwen3_8B": LlamaShape(36, 32, 4096, 4096, 151936, 8, 12288, 128, False, "qwen3", 1e6, norm_eps=1e-6),
}


def check_llama(config, shape: LlamaShape) -> list[str]:
    """What a model like Llama, layers of several kinds, or rotations that depend on the length of a text cannot do."""
    problems, scaling = [], shape.rope_scaling
    if shape.num_heads % shape.num_kv_heads:
        problems.append(
            f"num_heads ({shape.num_heads}) must be divisible by the {shape.num_kv_heads} heads of keys and values"
        )
    if config.dropout:
        problems.append(f"dropout is {config.dropout}, but {config.model_size} has none; leave it out")
    if config.attention == "flash" and config.scan_layers and len(set(shape.windows)) > 1:
        problems.append(
            f"attention is flash and scan_layers is on, but the layers of {shape.family} have different windows, and a "
            "loop has one kernel; leave --scan_layers out, or choose --attention plain"
        )
    is_long = scaling is not None and scaling.kind == "longrope" and shape.sequence_length > scaling.original_context
    if is_long and config.dataset == "chat":
        problems.append(
            f"sequence_length is {shape.sequence_length}, but a row holds conversations of all lengths, and longrope "
            f"turns those above {scaling.original_context} otherwise; choose {scaling.original_context} or less"
        )
    return problems
