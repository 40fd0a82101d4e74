"""What fixes the size of a language model, and the published sizes. Imports no torch."""

from dataclasses import dataclass

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
    def norm_offset(self) -> float:
        """What is added to the weights of norms."""
        return 0.0

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


# GPT-2: Radford et al. 2019 and llm.c. GPT-3: Brown et al. 2020, table 2.1, with llm.c's head counts, at 2,048 tokens.
GPT_SIZES: dict[str, ModelShape] = {
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
}
LLAMA_SIZES = ("llama_tiny", "smollm2_135M", "llama3_1B", "llama3_3B", "llama3_8B", "llama3_70B", "qwen3_0.6B")
LLAMA_SIZES += ("mixtral_tiny", "mixtral_8x7B", "qwen3_30B_A3B", "qwen3_8B")
"""Names of the sizes in llama_shape.py."""
