"""What fixes the size of a language model, the published sizes, and what Hugging Face's config.json says of one.

Imports no torch, and of ours errors alone.
"""

from dataclasses import dataclass

from tpu_utils.errors import InputError

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
    def num_multiplied(self) -> int:
        """Parameters that take part in a token's matrix products. As llm.c counts: all of them."""
        return self.num_parameters

    @property
    def flops_per_token(self) -> int:
        """Of a training step: 6 N + 12 L D T, both passes, the causal half of attention not taken off (as llm.c)."""
        heads = self.num_heads * self.head_dim
        return 6 * self.num_multiplied + 12 * self.num_layers * heads * self.sequence_length


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
    """Hidden width of the MLP: of its gate and up projections each."""
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
    def num_multiplied(self) -> int:
        """Without a token embedding that is not tied to the head: it is looked up, not multiplied."""
        return self.num_parameters - (0 if self.tied_head else self.padded_vocab_size * self.embedding_dim)


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


# ------------------------------------------------------------------------------------------ Hugging Face's config.json

MOST = {"layers": 1024, "heads": 4096, "width": 1 << 20, "tokens": 1 << 24}
"""Bounds of the numbers in a config.json, so that no file can ask for a model that nobody could list."""
ONE_WAY = {  # options in a config.json and the values that this project supports; the first is the default
    "gpt2": {
        **{"activation_function": ("gelu_new", "gelu_pytorch_tanh"), "layer_norm_epsilon": (1e-5,)},
        **{"tie_word_embeddings": (True,), "scale_attn_weights": (True,), "add_cross_attention": (False,)},
        "scale_attn_by_inverse_layer_idx": (False,),
    },
    "llama": {"hidden_act": ("silu", "swish"), "attention_bias": (False,), "mlp_bias": (False,)},
    "qwen3": {"hidden_act": ("silu", "swish"), "attention_bias": (False,), "use_sliding_window": (False,)},
}
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def shape_of(found: dict, name: str = "config.json") -> ModelShape:
    """What a Hugging Face config.json says of a model. sequence_length: the longest that it says it can read.

    name: of the file, for messages. Raises InputError for a model that is not one of ours.
    """
    kind = found.get("model_type")
    if not isinstance(kind, str) or kind not in ONE_WAY:
        raise InputError(
            f"{name}: model_type is {kind!r:.60}; expected {', '.join(ONE_WAY)}; other models are not built here"
        )
    ways = ONE_WAY[kind] | {"quantization_config": (None,), "partial_rotary_factor": (1.0, None)}
    for key, (usual, *others) in ways.items():
        if (value := found.get(key, usual)) not in (usual, *others):
            raise InputError(
                f"{name}: {key} is {value!r:.60}; expected {usual}: the {kind} of this project has no other"
            )
    layer_types = found.get("layer_types") or []
    if not isinstance(layer_types, list) or any(layer != "full_attention" for layer in layer_types):
        raise InputError(f"{name}: layer_types is {layer_types!r:.60}; expected full_attention in every layer")

    def size(key: str, bound: str, default: int | None = None) -> int:
        value = default if found.get(key) is None else found[key]
        if type(value) is not int or not 1 <= value <= MOST[bound]:
            raise InputError(
                f"{name}: {key} is {value!r:.60}; expected an integer from 1 to {MOST[bound]:,}; copy the file again"
            )
        return value

    if kind == "gpt2":
        sizes = (
            size("n_layer", "layers"),
            size("n_head", "heads"),
            size("n_embd", "width"),
            size("n_positions", "tokens"),
        )
        shape = ModelShape(*sizes, size("vocab_size", "tokens"))
        inner = size("n_inner", "width", 4 * shape.embedding_dim)
        if inner != 4 * shape.embedding_dim or shape.embedding_dim % shape.num_heads:
            raise InputError(
                f"{name}: n_embd {shape.embedding_dim}, n_head {shape.num_heads}, n_inner {inner}; expected a width"
                " that the heads divide, and an n_inner of 4 times that width"
            )
        return shape
    layers, heads = size("num_hidden_layers", "layers"), size("num_attention_heads", "heads")
    width = size("hidden_size", "width")
    # older Llama files leave these two out; Qwen3 must give them: they do not follow from the other sizes
    kv_heads = size("num_key_value_heads", "heads", heads if kind == "llama" else None)
    head_dim = size("head_dim", "width", width // heads if kind == "llama" and width % heads == 0 else None)
    if heads % kv_heads or head_dim % 2:
        raise InputError(
            f"{name}: {heads} heads of width {head_dim}, {kv_heads} of keys and values; expected an even width, and "
            "that the one number divides the other"
        )
    tied = found.get("tie_word_embeddings", False)
    if type(tied) is not bool:
        raise InputError(f"{name}: tie_word_embeddings is {tied!r:.60}; expected true or false; copy the file again")
    theta, scaling = _rotary(found, name)
    return LlamaShape(
        layers, heads, width, size("max_position_embeddings", "tokens"), size("vocab_size", "tokens"), kv_heads,
        size("intermediate_size", "width"), 0 if head_dim * heads == width else head_dim, tied, kind == "qwen3", theta,
        scaling, _positive(found, "rms_norm_eps", name, 1e-6),
    )  # fmt: skip


def _positive(found: dict, key: str, name: str, default: float | None = None) -> float:
    value = default if found.get(key) is None else found[key]
    if type(value) not in (int, float) or not 0 < value < 1e30:
        raise InputError(f"{name}: {key} is {value!r:.60}; expected a finite number above 0; copy the file again")
    return float(value)


def _rotary(found: dict, name: str) -> tuple[float, RopeScaling | None]:
    """rope_theta and rope_scaling; transformers 5 has both in rope_parameters."""
    said = found.get("rope_parameters") or found.get("rope_scaling") or {}
    kind = said.get("rope_type", said.get("type", "default")) if isinstance(said, dict) else said
    if not isinstance(said, dict) or kind not in ("default", "llama3"):
        raise InputError(
            f"{name}: the rotary positions are {kind!r:.60}; expected default or llama3; others are not built here"
        )
    theta = _positive(
        {"rope_theta": 1e4} | {k: v for k, v in found.items() if v is not None} | said, "rope_theta", name
    )
    if kind == "default":
        return theta, None
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    factor, low, high, original = (_positive(said, key, name) for key in keys)
    if not (factor >= 1 and low < high and original == int(original) <= MOST["tokens"]):
        raise InputError(
            f"{name}: rope_scaling is {said!r:.200}; expected a factor of 1 or more, low_freq_factor below "
            "high_freq_factor, and an original context of whole tokens"
        )
    return theta, RopeScaling(factor, low, high, int(original))


def hugging_face_config(shape: ModelShape, dtype: str = "float32", tokens: dict | None = None) -> dict:
    """config.json for AutoModelForCausalLM.from_pretrained. tokens: SPECIAL_TOKENS, as far as they are known."""
    known = {name: (tokens or {}).get(name) for name in SPECIAL_TOKENS}
    if not isinstance(shape, LlamaShape):
        return {
            **{"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "torch_dtype": dtype},
            **{"n_layer": shape.num_layers, "n_head": shape.num_heads, "n_embd": shape.embedding_dim},
            **{"n_positions": shape.sequence_length, "vocab_size": shape.vocab_size},
            **{name: values[0] for name, values in ONE_WAY["gpt2"].items()},
            **known,
        }
    kind, scaling = "qwen3" if shape.qk_norm else "llama", shape.rope_scaling
    return {
        **{"architectures": ["Qwen3ForCausalLM" if shape.qk_norm else "LlamaForCausalLM"], "model_type": kind},
        **{"torch_dtype": dtype, "num_hidden_layers": shape.num_layers, "hidden_size": shape.embedding_dim},
        **{"num_attention_heads": shape.num_heads, "num_key_value_heads": shape.num_kv_heads},
        **{"head_dim": shape.head_dim, "intermediate_size": shape.mlp_dim, "vocab_size": shape.vocab_size},
        **{"max_position_embeddings": shape.sequence_length, "rms_norm_eps": shape.norm_eps},
        **{"tie_word_embeddings": shape.tied_head, "rope_theta": shape.rope_theta},
        "rope_scaling": scaling
        and {
            **{"rope_type": "llama3", "factor": scaling.factor, "low_freq_factor": scaling.low_freq_factor},
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_context,
        },
        **{name: values[0] for name, values in ONE_WAY[kind].items()},
        **known,
    }
