"""The weights of a run of transformer_tpu.py: its configuration and checkpoint, proved to fit each other."""

import json
from dataclasses import fields
from pathlib import Path

import torch

from language.models.layers import adapter_sizes
from language.options.hf_config import shape_of
from language.options.llama_shape import LlamaShape
from language.options.shapes import ModelShape
from language.options.transformer_options import TransformerConfig
from language.weights.hf_layout import sizes_of, sources
from language.weights.weight_loading import check_finite
from tpu_utils.base.errors import InputError
from tpu_utils.checkpoint.loading import CheckpointReader
from tpu_utils.checkpoint.saved import Saved, check_alike
from tpu_utils.checkpoint.state import Kind

PREFIX = "model/"


def read_run(run_dir: Path, checkpoint: str = "newest") -> tuple[TransformerConfig, Saved]:
    """The configuration and the newest or the best checkpoint of a run of transformer_tpu.py. Raises InputError for any
    other run, and where there is no such checkpoint."""
    checkpoints = CheckpointReader(run_dir / "checkpoints")
    saved = checkpoints.load_best() if checkpoint == "best" else checkpoints.load("must")
    if f"{PREFIX}token_embedding" not in saved.entries:
        raise InputError(f"{run_dir} is not a run of transformer_tpu.py")
    names = {field.name for field in fields(TransformerConfig)}
    found = saved.value("config", dict)
    try:
        # JSON has no tuple
        values = {name: tuple(v) if isinstance(v, list) else v for name, v in found.items() if name in names}
        config = TransformerConfig(**values)
        check_weights(config.shape, saved, config.lora_rank)
    except InputError as error:
        raise InputError(f"{run_dir}: {error}; expected options and weights that transformer_tpu.py saved") from error
    return config, saved


def check_weights(shape: ModelShape, saved: Saved, lora_rank: int = 0) -> None:
    """Raises InputError unless the checkpoint's model has the parameters of this shape; none of it is allocated."""
    found = {path.removeprefix(PREFIX): e.kind for path, e in saved.entries.items() if path.startswith(PREFIX)}
    if shape.num_layers > len(found) or shape.num_parameters > 2**48:  # too large to list, or for torch
        raise InputError(f"the checkpoint is of another model: its {len(found)} tensors are not those of {shape}")
    dtype = torch.float32
    if lora_rank and found.get("token_embedding", Kind((), dtype)).dtype == torch.bfloat16:
        dtype = torch.bfloat16  # LoRA's base weights are all of this type
    wanted = {name: Kind(source.size, dtype) for name, source in sources(shape).items()}
    if lora_rank:
        for name, (layers, *size) in adapter_sizes(sizes_of(shape), lora_rank).items():
            wanted |= {f"{name}.{layer}": Kind(tuple(size), torch.float32) for layer in range(layers)}
    check_alike(wanted, found)


def adapter_names(name: str) -> tuple[str, str]:
    """Names of the two adapters of a layer's matrix: "q_weight.3" -> ("q_lora_a.3", "q_lora_b.3")."""
    matrix, _, layer = name.partition("_weight.")
    return f"{matrix}_lora_a.{layer}", f"{matrix}_lora_b.{layer}"


def read_parameter(saved: Saved, name: str) -> torch.Tensor:
    """One parameter of the model, whole on the CPU, in memory of its own. Raises InputError for no numbers."""
    return check_finite(saved.files().read(PREFIX + name), f"{saved.folder}: {name}")


def read_merged(saved: Saved, name: str, config: TransformerConfig) -> torch.Tensor:
    """W + lora_alpha / lora_rank b @ a in float32 where the matrix has adapters, else the parameter as it is."""
    value = read_parameter(saved, name)
    a, b = adapter_names(name)
    if PREFIX + a not in saved.entries:
        return value
    value = value.float()
    a, b = read_parameter(saved, a), read_parameter(saved, b)
    for whole, down, up in zip(*(t.reshape(-1, *t.shape[-2:]) for t in (value, a, b)), strict=True):
        whole.addmm_(up, down, alpha=config.lora_alpha / config.lora_rank)
    return value


def longest_context(config: TransformerConfig) -> int:
    """Tokens that the model of a run reads: where positions are rotary those of its config.json, if these are more."""
    own = config.shape.sequence_length
    if not config.model_config or not isinstance(config.shape, LlamaShape):
        return own
    return max(own, shape_of(json.loads(config.model_config)).sequence_length)
