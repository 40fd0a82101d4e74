"""The weights that --initial_weights names, as the beginning of a run."""

from collections.abc import Callable
from pathlib import Path

from language.models.layers import Decoder
from language.options.transformer_options import TransformerConfig
from language.weights.hf_files import HuggingFaceWeights, open_weights
from language.weights.weight_loading import load_weights
from tpu_utils.base.errors import InputError


def begin_with(
    config: TransformerConfig, build: Callable[[], Decoder], device, partition_spec: Callable, say: Callable
) -> Decoder:
    """build() with the weights of --initial_weights, on the device; see build_model(). Raises InputError."""
    weights = open_weights(Path(config.initial_weights), config.shape)
    check_base(config, weights)
    read = weights.read
    if config.dataset == "chat":
        from language.weights.new_tokens import with_new_tokens

        read = with_new_tokens(config, weights.names, read, say)
    return load_weights(build, read, device, partition_spec, config.seed)


def check_base(config: TransformerConfig, weights: HuggingFaceWeights) -> None:
    """Raises InputError where LoRA would round the weights of a folder, and nobody asked for it."""
    found = weights.kind("token_embedding").dtype
    if config.lora_rank and config.lora_base == "auto" and config.base_precision == "bfloat16" != str(found)[6:]:
        raise InputError(
            f"{config.initial_weights}: config.json says bfloat16, but the tensors are {str(found)[6:]}; expected one "
            "type; give --lora_base float32, or bfloat16 to round them"
        )
