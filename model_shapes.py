"""What fixes the size of a language model, and the published sizes. Imports nothing of ours, and no torch."""

from dataclasses import dataclass

BYTE_VOCAB_SIZE = 257  # the 256 bytes and the token that stands before every document


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
    def head_dim(self) -> int:
        return self.embedding_dim // self.num_heads

    @property
    def num_cached_heads(self) -> int:
        """Of keys and values."""
        return self.num_heads

    @property
    def num_parameters(self) -> int:
        """Padded vocabulary included, as llm.c counts. Per layer: qkv 3DD+3D, out DD+D, mlp 8DD+5D, two norms 4D."""
        D = self.embedding_dim
        per_layer = 12 * D * D + 13 * D
        return (self.padded_vocab_size + self.sequence_length + 2) * D + self.num_layers * per_layer

    @property
    def flops_per_token(self) -> int:
        """Of a training step: 6 N + 12 L D T, both passes, the causal half of attention not taken off (as llm.c)."""
        return 6 * self.num_parameters + 12 * self.num_layers * self.embedding_dim * self.sequence_length


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's stretching of rotary positions beyond the context of pre-training, as in its config.json."""

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True)
class LlamaShape(ModelShape):
    """Of the Llama family, with Qwen3's differences: what its config.json says."""

    num_kv_heads: int = 0
    """Heads of keys and values; each serves num_heads / num_kv_heads heads of queries."""
    mlp_dim: int = 0
    """Width inside the MLP, of its gate and of its other half alike."""
    head_width: int = 0
    """0: embedding_dim / num_heads."""
    tied_head: bool = False
    """Whether the output head is the token embedding."""
    qk_norm: bool = False
    """Qwen3: RMSNorm of each head's query and key."""
    rope_theta: float = 500000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.head_width or self.embedding_dim // self.num_heads

    @property
    def num_cached_heads(self) -> int:
        return self.num_kv_heads

    @property
    def num_parameters(self) -> int:
        """Padded vocabulary included. Per layer: q and out 2DHK, k and v 2DGK, MLP 3DE, norms 2D, of heads 2K."""
        D, K = self.embedding_dim, self.head_dim
        attention = 2 * D * K * (self.num_heads + self.num_kv_heads)
        per_layer = attention + 3 * D * self.mlp_dim + 2 * D + 2 * K * self.qk_norm
        return (2 - self.tied_head) * self.padded_vocab_size * D + D + self.num_layers * per_layer

    @property
    def flops_per_token(self) -> int:
        """As that of ModelShape, the lookup of a head of its own not counted: it is no product."""
        lookup = 0 if self.tied_head else self.padded_vocab_size * self.embedding_dim
        heads = self.num_heads * self.head_dim
        return 6 * (self.num_parameters - lookup) + 12 * self.num_layers * heads * self.sequence_length


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
    "qwen3_0.6B": LlamaShape(28, 16, 1024, 4096, 151936, 8, 3072, 128, True, True, 1e6, norm_eps=1e-6),
    "qwen3_8B": LlamaShape(36, 32, 4096, 4096, 151936, 8, 12288, 128, False, True, 1e6, norm_eps=1e-6),
}
