"""What fixes the size of a language model, and the published sizes. Imports no torch."""

import math
from dataclasses import dataclass
from typing import Any

from language.options.families import FAMILIES, Family

BYTE_VOCAB_SIZE = 257  # the 256 bytes and the token that stands before every document
START = 1 << 20  # added to the first token of a document that shares its row with others; no vocabulary is so large


@dataclass(frozen=True)
class ModelShape:
    """What fixes the size of a GPT: layers, heads, width, longest sequence, real vocabulary."""

    num_layers: int
    num_heads: int
    embedding_dim: int
    sequence_length: int
    vocab_size: int = 50257

    @property
    def padded_vocab_size(self) -> int:
        """Next multiple of 128, the lane count of the matrix unit; padded tokens get no probability."""
        return -(-self.vocab_size // 128) * 128

    @property
    def conventions(self) -> Family:
        return FAMILIES["gpt2"]

    @property
    def head_dim(self) -> int:
        return self.embedding_dim // self.num_heads

    @property
    def num_cached_heads(self) -> int:
        """Number of key/value heads."""
        return self.num_heads

    @property
    def windows(self) -> tuple[int, ...]:
        """For each layer, how many positions a token sees, itself among them; 0: the whole context."""
        return (0,) * self.num_layers

    @property
    def num_parameters(self) -> int:
        """Padded vocabulary included, as llm.c counts. Per layer: qkv 3DD+3D, out DD+D, mlp 8DD+5D, two norms 4D."""
        D = self.embedding_dim
        per_layer = 12 * D * D + 13 * D
        return (self.padded_vocab_size + self.sequence_length + 2) * D + self.num_layers * per_layer

    @property
    def num_multiplied(self) -> int:
        """Parameters that take part in a token's matrix products. As llm.c counts: all of them."""
        return self.num_parameters

    @property
    def flops_per_token(self) -> int:
        """FLOPs of a training step per token: 6 N + 12 L D T, both passes, the causal half of attention not taken off
        (as llm.c). In a layer with a window T is the window."""
        seen = sum(window or self.sequence_length for window in self.windows)
        return 6 * self.num_multiplied + 12 * self.num_heads * self.head_dim * seen


@dataclass(frozen=True)
class RopeScaling:
    """How rotary positions are stretched beyond the context of pre-training, as in config.json."""

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    kind: str = "llama3"
    """llama3: long waves alone. linear: all waves. longrope: each wave by a factor of its own."""
    short_factors: tuple[float, ...] = ()
    """longrope: one factor for each pair of rotated values, for texts within the original context."""
    long_factors: tuple[float, ...] = ()
    """longrope: the factors for longer texts."""

    @property
    def amplitude(self) -> float:
        """What longrope multiplies rotated queries and keys by."""
        if self.kind != "longrope" or self.factor <= 1:
            return 1.0
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original_context))


@dataclass(frozen=True)
class LlamaShape(ModelShape):
    """Llama and the families like it: the numbers in config.json. What else differs is in families.py."""

    num_kv_heads: int = 0
    """Heads of keys and values; each serves num_heads / num_kv_heads heads of queries."""
    mlp_dim: int = 0
    """Hidden width of the MLP: of its gate and up projections each."""
    head_width: int = 0
    """0: embedding_dim / num_heads."""
    tied_head: bool = False
    """Whether the output head is the token embedding."""
    family: str = "llama"
    """By its model_type."""
    rope_theta: float = 500000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    window: int = 0
    """Tokens that one in a local layer sees, itself among them."""
    pattern: tuple[str, ...] = ("global",)
    """Kinds of the layers, repeated over them: global; local, with the window; unrotated, without rotary positions."""
    local_theta: float = 0.0
    """rope_theta of local layers, which are not stretched then. 0: they are as the others."""
    rotated_width: int = 0
    """Values of a head that are rotated, the first. 0: all."""
    query_scalar: float = 0.0
    """Queries are divided by its root. 0: head_dim."""
    num_experts: int = 0
    """Experts of a layer: MLPs of width mlp_dim. 0: one MLP for all tokens."""
    experts_per_token: int = 0
    normalised_experts: bool = True
    """Whether the weights of a token's experts add up to 1."""

    @property
    def conventions(self) -> Family:
        return FAMILIES[self.family]

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
        """Without a token embedding that is not tied to the head: it is looked up, not multiplied; and without the
        experts that a token does not choose."""
        idle = 3 * self.embedding_dim * self.mlp_dim * (self.num_experts - self.experts_per_token)
        looked_up = 0 if self.tied_head else self.padded_vocab_size * self.embedding_dim
        return self.num_parameters - looked_up - self.num_layers * idle


MIXTRAL: dict[str, Any] = dict(family="mixtral", num_experts=8, experts_per_token=2)
QWEN3_MOE: dict[str, Any] = dict(family="qwen3_moe", num_experts=128, experts_per_token=8)
# GPT-2: Radford et al. 2019 and llm.c. GPT-3: Brown et al. 2020, table 2.1, with llm.c's head counts, at 2,048 tokens.
MODEL_SIZES: dict[str, ModelShape] = {
    "tiny": ModelShape(2, 2, 128, 64),
    "124M": ModelShape(12, 12, 768, 1024),
    "350M": ModelShape(24, 16, 1024, 1024),
    "774M": ModelShape(36, 20, 1280, 1024),
    "1558M": ModelShape(48, 25, 1600, 1024),
    "gpt3_125M": ModelShape(12, 12, 768, 2048),
    "gpt3_350M": ModelShape(24, 16, 1024, 2048),
    "gpt3_760M": ModelShape(24, 16, 1536, 2048),
    "gpt3_1.3B": ModelShape(24, 16, 2048, 2048),
    "gpt3_2.7B": ModelShape(32, 32, 2560, 2048),
    "gpt3_6.7B": ModelShape(32, 32, 4096, 2048),
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
