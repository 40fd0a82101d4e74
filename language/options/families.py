"""What differs between the families of language models: one table. The numbers of a model are in shapes.py."""

from dataclasses import dataclass, field
from typing import Any, Literal

Values = dict[str, tuple[Any, ...]]


@dataclass(frozen=True)
class Experts:
    """How Hugging Face's files describe a mixture of experts."""

    count: str  # key of config.json: how many there are
    width: str  # key of config.json: mlp_dim
    below: str  # where they lie in a layer: the router is BELOW.gate, expert N BELOW.experts.N
    matrices: tuple[str, str, str]  # names of gate, up and out in an expert


@dataclass(frozen=True)
class Family:
    """By model_type of Hugging Face's config.json."""

    architecture: str  # class of the transformers library
    expected: Values  # keys of config.json that must have one of these values; absent, they mean the first
    defaults: dict[str, Any] = field(default_factory=dict)
    """What config.json means where it leaves a key out, as far as it differs from Llama's."""
    norms: Literal["before", "after", "both"] = "before"
    """Where attention and MLP have their norms: of what they read, of what they give, or of both."""
    norm_offset: float = 0.0  # what is added to the weights of norms
    qk_norm: Literal["", "head", "whole"] = ""  # RMSNorm of queries and keys: of each head, or of all heads together
    qkv_bias: bool = False
    activation: Literal["silu", "gelu"] = "silu"  # activation of the MLP's gate; gelu is its tanh approximation
    scaled_embedding: bool = False  # whether the embeddings of tokens are multiplied by the root of their width
    fused: bool = False  # whether a file has one matrix of q, k and v, and one of gate and up
    rotary: tuple[str, ...] = ("default", "linear", "llama3")  # kinds of rotary positions that config.json may name
    experts: Experts | None = None  # in place of the MLP
    layers: Literal["alike", "window", "types", "unrotated"] = "alike"
    """How layers differ. window: all alike, in those with sliding_window a token sees no more than so many. types:
    layer_types tells which have the window. unrotated: no_rope_layers tells which have no rotary positions."""


SILU: Values = {"hidden_act": ("silu", "swish"), "attention_dropout": (0.0, None)}
UNBIASED: Values = {"attention_bias": (False, None)}
NO_WINDOW: Values = {"use_sliding_window": (False, None)}

FAMILIES = {
    "gpt2": Family(
        "GPT2LMHeadModel",
        {
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "layer_norm_epsilon": (1e-5,),
            "tie_word_embeddings": (True,),
            "scale_attn_weights": (True,),
            "add_cross_attention": (False,),
            "scale_attn_by_inverse_layer_idx": (False,),
        },
    ),
    "llama": Family("LlamaForCausalLM", SILU | UNBIASED | {"mlp_bias": (False, None)}),
    "mistral": Family("MistralForCausalLM", SILU, {"sliding_window": 4096, "num_key_value_heads": 8}, layers="window"),
    "qwen2": Family("Qwen2ForCausalLM", SILU | NO_WINDOW, {"num_key_value_heads": 32}, qkv_bias=True),
    "qwen3": Family(
        "Qwen3ForCausalLM", SILU | UNBIASED | NO_WINDOW, {"num_key_value_heads": 32, "head_dim": 128}, qk_norm="head"
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        SILU | {"sliding_window": (None,), "router_jitter_noise": (0.0, None)},
        {
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
        },
        experts=Experts("num_local_experts", "intermediate_size", "block_sparse_moe", ("w1", "w3", "w2")),
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        SILU | UNBIASED | NO_WINDOW | {"decoder_sparse_step": (1,), "mlp_only_layers": ([], None)},
        {
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
            "moe_intermediate_size": 768,
        },
        qk_norm="head",
        experts=Experts("num_experts", "moe_intermediate_size", "mlp", ("gate_proj", "up_proj", "down_proj")),
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        {
            "hidden_activation": ("gelu_pytorch_tanh",),
            "attention_dropout": (0.0, None),
            **UNBIASED,
            "attn_logit_softcapping": (None,),
            "final_logit_softcapping": (None,),
            "use_bidirectional_attention": (False, None),
        },
        {
            "tie_word_embeddings": True,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "rope_theta": 1e6,
            "sliding_window": 4096,
            "rope_local_base_freq": 1e4,
            "sliding_window_pattern": 6,
            "num_key_value_heads": 4,
        },
        norms="both",
        norm_offset=1.0,
        qk_norm="head",
        activation="gelu",
        scaled_embedding=True,
        rotary=("default", "linear"),
        layers="types",
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM", SILU | UNBIASED, {"rms_norm_eps": 1e-5}, norms="after", qk_norm="whole", rotary=("default",)
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        {
            **SILU,
            **UNBIASED,
            "mlp_bias": (False, None),
            "lm_head_bias": (False, None),
            "resid_pdrop": (0.0,),
            "embd_pdrop": (0.0,),
            "full_attn_mod": (1,),
            "interpolate_factor": (1,),
        },
        {"rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0, "original_max_position_embeddings": 4096},
        fused=True,
        rotary=("default", "longrope"),
        layers="window",
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        SILU | UNBIASED | NO_WINDOW | {"mlp_bias": (False, None)},
        {"tie_word_embeddings": True, "rope_theta": 2e6, "no_rope_layer_interval": 4, "num_key_value_heads": 4},
        layers="unrotated",
    ),
}
