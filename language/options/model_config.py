"""initial_weights and model_config: a config.json of Hugging Face says what the model is. Imports no torch."""

import json
from pathlib import Path

from language.options.hf_config import shape_of
from language.options.shapes import BYTE_VOCAB_SIZE, ModelShape
from tpu_utils.base.errors import InputError
from tpu_utils.base.files import parse_object, read_json

HUGGING_FACE_CONFIG = "a model's config.json in a local folder (hf download NAME --local-dir DIR)"


def read_model_config(option: str, path: Path) -> str:
    """The text of a Hugging Face config.json, on one line. Raises InputError for a model that is not one of ours."""
    try:
        found = read_json(path, HUGGING_FACE_CONFIG)
        shape_of(found, str(path))
    except InputError as error:
        raise InputError(f"{option}: {error}") from error
    return json.dumps(found, sort_keys=True)


def precision_of(model_config: str) -> str:
    """bfloat16 or float32: the narrower one that holds the weights exactly, by the text of their config.json."""
    found = json.loads(model_config)
    return "bfloat16" if "bfloat16" in (found.get("dtype"), found.get("torch_dtype")) else "float32"


def shape_in(model_config: str) -> ModelShape:
    """By the text of a config.json. Raises InputError."""
    return shape_of(parse_object(model_config.encode(), "model_config", HUGGING_FACE_CONFIG))


def check_initial_weights(config) -> None:
    """Raises InputError for the folder of another model, and where a new run finds no weights in it."""
    path = Path(config.initial_weights, "config.json")
    gone = not path.exists()  # a run goes on without its folder
    if not gone and read_model_config("initial_weights", path) != config.model_config:
        raise InputError(
            f"initial_weights is {config.initial_weights}; its config.json is not that of the run or of --model_config"
        )
    if gone or config.compile_for or config.resume != "never":
        return
    if not any((path.parent / name).exists() for name in ("model.safetensors", "model.safetensors.index.json")):
        raise InputError(
            f"initial_weights is {config.initial_weights}, which has no model.safetensors and no index; only "
            "safetensors are read; transformers writes them: from_pretrained(DIR).save_pretrained(OTHER)"
        )


def check_model_config(config) -> list[str]:
    """What stands against the config.json that says what the model is."""
    own = ("num_layers", "num_heads", "embedding_dim", "vocab_size")
    problems = [
        f"{name} is {getattr(config, name)}, but config.json says what the model is; leave --{name} out"
        for name in own
        if getattr(config, name)
    ]
    longest = shape_of(json.loads(config.model_config)).sequence_length
    if config.initial_weights and config.sequence_length > longest:
        problems.append(
            f"sequence_length is {config.sequence_length}, but {config.initial_weights} reads {longest}; choose "
            f"{longest} or less"
        )
    if config.initial_weights and config.dataset == "synthetic" and not config.compile_for:
        problems.append("initial_weights is given, but synthetic is random tokens; choose --dataset chat or tokens")
    if config.dataset == "text" and config.shape.vocab_size != BYTE_VOCAB_SIZE:
        problems.append(
            f"dataset text is bytes, and the model has a vocabulary of {config.shape.vocab_size}; make tokens with "
            "tools.prepare_data --tokenizer, and give --dataset tokens"
        )
    return problems


def check_adapters(config) -> list[str]:
    """What stands against LoRA, and against new rows for the tokens of a chat format."""
    problems = []
    if config.lora_rank and not (config.initial_weights or config.compile_for):
        problems.append(f"lora_rank is {config.lora_rank}, but there are no weights to adapt; give --initial_weights")
    if config.lora_rank and config.optimizer == "muon":
        problems.append("optimizer is muon, but adapters are no matrices of a layer; expected adamw, adam or sgd")
    if config.initialise_new_tokens == "mean" and (config.lora_rank or not config.initial_weights):
        why = "adapters leave these rows as they are" if config.lora_rank else "there are no initial_weights"
        problems.append(f"initialise_new_tokens is mean, but {why}; expected a run that trains all weights of a folder")
    if config.sample_every and config.lora_rank:
        problems.append("sample_every is given, but a model with adapters is sampled by tools.generate; leave it out")
    return problems
