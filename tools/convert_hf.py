"""Read and write weights in Hugging Face's format.

Run:     python -m tools.convert_hf import DIR RUN_DIR
             makes a run of a folder with config.json and safetensors
             of a model in docs/hugging_face.md; tools.generate samples
             from it
         python -m tools.convert_hf export RUN_DIR DIR [bf16] [best]
             writes the newest checkpoint of a run, or its best one, as a
             folder that AutoModelForCausalLM.from_pretrained loads, with
             its tokenizer, and of a run on conversations their template
             and end tokens; of a LoRA run with its adapters merged
         python -m tools.convert_hf export RUN_DIR DIR adapter [bf16] [best]
             writes the adapters of a LoRA run for the peft library
"""

import dataclasses
import json
import math
import os
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path

from language.options.hf_config import hugging_face_config, shape_of
from language.options.llama_shape import LlamaShape
from language.options.model_config import precision_of
from language.options.shapes import ModelShape
from language.options.transformer_options import TransformerConfig
from tpu_utils.base.errors import InputError, SaveError, run_script
from tpu_utils.base.files import read_json
from tpu_utils.options.fields import nearest
from tpu_utils.options.parsing import as_json

OPTIONS = {"import": (), "export": ("bf16", "best", "adapter")}


def parse(arguments: list[str]) -> list[str]:
    """COMMAND FROM TO [OPTION ...]; or the process ends here, with help or with one message."""
    if arguments in (["--help"], ["-h"]):
        print(__doc__)
        sys.exit(0)
    command, *rest = arguments or [""]
    if command not in OPTIONS or len(rest) < 2:
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    if code := run_script(lambda: check_arguments(command, *rest)):
        sys.exit(code)
    return arguments


def check_arguments(command: str, source: str, target: str, *options: str) -> None:
    """Raises InputError for what can be known to be wrong before torch is imported."""
    allowed = OPTIONS[command]
    for number, option in enumerate(options):
        if option not in allowed or option in options[:number]:
            some = f"expected {', '.join(allowed)}, each once" if allowed else f"{command} has no options"
            raise InputError(f"{option!r:.60} is no option here; {some}{nearest(option, allowed)}")
    if any(path.startswith("gs://") for path in (source, target)):
        raise InputError("found gs://; expected local folders; copy a bucket's with gcloud storage cp -r")
    try:
        os.scandir(source).close()  # raises where it is no folder
        if command == "import":
            shape_of(read_json(Path(source, "config.json"), "a Hugging Face model"), f"{source}/config.json")
        target_path = Path(target)
        if target_path.exists() and not (target_path.is_dir() and not any(target_path.iterdir())):
            raise InputError(f"{target} is there already; expected a new or an empty folder; choose another")
    except OSError as error:
        raise InputError(f"{error.filename}: {error.strerror}; expected a folder, as --help says") from error


if __name__ == "__main__":  # a wrong option or file is answered before the seconds that the next imports take
    arguments = parse(sys.argv[1:])
    os.environ.setdefault("PJRT_DEVICE", "CPU")  # all is computed on the host; left unset, torch_xla warns

import torch

from language.data.tokenizer_files import (
    CONFIG,
    GENERATION_CONFIG,
    RUN_TOKENIZER,
    TEMPLATE,
    TOKENIZER_FILES,
    VOCABULARIES,
    copy_tokenizer,
    export_tokenizer,
    reads_as_trained,
    write_json,
)
from language.models.layers import OF_EXPERTS
from language.weights.hf_files import ADAPTER_CONFIG, MOST_BYTES, open_weights, read_config, write_weights
from language.weights.hf_layout import sources, their_tensors
from language.weights.run_weights import PREFIX, adapter_names, longest_context, read_merged, read_parameter, read_run
from language.weights.weight_loading import check_finite
from tpu_utils.base.new_folder import written_aside
from tpu_utils.checkpoint import has_room, room
from tpu_utils.checkpoint.state import Kind
from tpu_utils.checkpoint.streaming import stream_tensors, write_checkpoint
from tpu_utils.options.parsing import write_config


def import_weights(folder: Path, run_dir: Path) -> None:
    """Write a run at step 0: weights, no optimizer state. One parameter is in memory at a time."""
    found = read_config(folder)
    config = TransformerConfig(
        dataset="tokens",
        model_config=json.dumps(hugging_face_config(shape_of(found), tokens=found)),
        tokenizer=str(run_dir.resolve() / RUN_TOKENIZER) if (folder / "tokenizer.json").exists() else "",
    )
    weights = open_weights(folder, config.shape)  # the run's context may be shorter than the model's
    if all(weights.kind(name).dtype == torch.bfloat16 for name in weights.names):
        config = dataclasses.replace(config, precision="bfloat16")
    kinds = {PREFIX + name: Kind(weights.kind(name).shape, torch.float32) for name in weights.names}
    check_room(run_dir, kinds)
    with written_aside(run_dir) as aside:
        (aside / RUN_TOKENIZER).mkdir()
        copy_tokenizer(folder, aside / RUN_TOKENIZER, (*TOKENIZER_FILES, CONFIG))
        run_id = secrets.token_hex(8)
        tensors = ((PREFIX + name, weights.read(name, torch.float32)) for name in weights.names)
        write_checkpoint(
            aside / "checkpoints" / "step_00000000", 0, run_id, {"config": as_json(config)}, kinds, tensors
        )
        write_config(aside, {**as_json(config), "run_id": run_id})
    print(f"{run_dir}: step 0, {described_shape(config.shape)}, from {named(weights.kind('token_embedding').dtype)}")


def described_shape(shape: ModelShape) -> str:
    """llama, 16 layers of width 2,048, 32 heads (8 of keys and values), ..."""
    family = shape.family if isinstance(shape, LlamaShape) else "gpt2"
    heads, kept = f"{shape.num_heads} heads", shape.num_cached_heads
    heads += f" ({kept} of keys and values)" * (kept != shape.num_heads)
    size = f"{shape.num_layers} layers of width {shape.embedding_dim:,}, {heads}, vocabulary {shape.vocab_size:,}"
    return f"{family}, {size}, {shape.num_parameters:,} parameters"


def named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def export(
    run_dir: Path, folder: Path, dtype: torch.dtype, checkpoint: str = "newest", most_bytes: int = MOST_BYTES
) -> None:
    """The newest or the best checkpoint of a run. One parameter is in memory at a time."""
    config, saved = read_run(run_dir, checkpoint)
    shape = config.shape
    check_room(folder, {name: Kind(source.size, dtype) for name, source in sources(shape).items()})

    def merged(name: str) -> torch.Tensor:
        return check_finite(read_merged(saved, name, config).to(dtype), f"{saved.folder}: {name}, as {dtype}")

    with written_aside(folder) as aside:
        write_weights(aside, shape, dtype, their_tensors(shape, merged), most_bytes)
        written, known = export_tokenizer(run_dir, config, aside)
        described = hugging_face_config(shape, named(dtype), known)
        if isinstance(shape, LlamaShape):
            described["max_position_embeddings"] = longest_context(config)
        write_json(aside / CONFIG, described)
        if GENERATION_CONFIG not in written:
            write_json(aside / GENERATION_CONFIG, {"_from_model_config": True, **known})
    print(f"{folder}: step {saved.step}, {described_shape(shape)}, {named(dtype)}")
    print_files(folder, config, written)


def print_files(folder: Path, config: TransformerConfig, written: list[str]) -> None:
    """What went out beside the weights, and what did not."""
    if written:
        print(f"{folder}: with {', '.join(written)}")
    if config.dataset == "chat" and TEMPLATE in written and not reads_as_trained(folder, config.chat_format):
        print(
            f"{folder}: programs that apply {TEMPLATE} read a conversation as other tokens than training did: the "
            "tokenizer puts a space before each text; ask the model through tools.generate"
        )
    if VOCABULARIES & set(written) or config.dataset == "synthetic":
        return
    wanted = config.tokenizer or config.initial_weights
    why = f"{wanted} has no tokenizer.json any more" if wanted else "the run does not know its own"
    template = f" and no {TEMPLATE}" if config.dataset == "chat" else ""
    print(f"{folder}: no tokenizer{template}, because {why}; copy the files there by hand")


def export_adapter(run_dir: Path, folder: Path, dtype: torch.dtype, checkpoint: str = "newest") -> None:
    """The adapters of a LoRA run as peft has them, and no other weight."""
    config, saved = read_run(run_dir, checkpoint)
    if not config.lora_rank:
        raise InputError(f"{run_dir} has no adapters; expected a run with --lora_rank; leave `adapter` out")
    kinds = {}
    several = {}
    rank = config.lora_rank
    for module, parts in adapters(config.shape).items():
        outputs = sum(size[0] for *_, size in parts)
        kinds[f"{module}.lora_A.weight"] = Kind((rank * len(parts), parts[0][2][1]), dtype)
        kinds[f"{module}.lora_B.weight"] = Kind((outputs, rank * len(parts)), dtype)
        several[module.split(".")[-1]] = len(parts)
    check_room(folder, kinds)

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for module, parts in adapters(config.shape).items():
            pairs = [adapter_names(name) for name, *_ in parts]
            a, b = ([read_parameter(saved, n) for n in names] for names in zip(*pairs, strict=True))
            a, b = ([t.view(-1, *t.shape[-2:])[p[1]] for t, p in zip(x, parts, strict=True)] for x in (a, b))
            for name, tensor in (("lora_A.weight", torch.cat(a)), ("lora_B.weight", torch.block_diag(*b))):
                yield f"{module}.{name}", check_finite(tensor.to(dtype), f"{saved.folder}: {module}, as {dtype}")

    with written_aside(folder) as aside:
        stream_tensors(aside / "adapter_model.safetensors", kinds, tensors(), {"format": "pt"})
        write_json(
            aside / ADAPTER_CONFIG,
            {
                "peft_type": "LORA",
                "task_type": "CAUSAL_LM",
                "r": rank,
                "lora_alpha": config.lora_alpha,
                "rank_pattern": {module: rank * n for module, n in several.items() if n > 1},
                "alpha_pattern": {module: config.lora_alpha * n for module, n in several.items() if n > 1},
                "lora_dropout": 0.0,
                "bias": "none",
                "fan_in_fan_out": not isinstance(config.shape, LlamaShape),
                "target_modules": sorted(several),
                "base_model_name_or_path": config.initial_weights,
                "inference_mode": True,
                "modules_to_save": None,
                "init_lora_weights": True,
            },
        )
        written, _ = export_tokenizer(run_dir, config, aside)
    rank, modules = config.lora_rank, ", ".join(sorted(several))
    print(f"{folder}: step {saved.step}, adapters of rank {rank}, {named(dtype)}: {modules}")
    print_files(folder, config, written)
    base = saved.entries[f"{PREFIX}token_embedding"].kind.dtype
    if base == torch.bfloat16 and precision_of(config.model_config) != "bfloat16":
        print(
            f"{folder}: the adapters belong to weights rounded to bfloat16, as the run had them: load "
            f"{config.initial_weights} with dtype=torch.bfloat16"
        )


def adapters(shape: ModelShape) -> dict[str, list[tuple[str, int, tuple[int, int]]]]:
    """peft's name of each matrix that has adapters -> those of ours: (our parameter, number of the matrix in it, its
    shape (out, in)). Several where theirs is one of what are several matrices here, such as GPT-2's c_attn."""
    found: dict[str, list[tuple[str, int, tuple[int, int]]]] = {}
    for name, source in sources(shape).items():
        if "_weight." not in name or name.split(".")[0] in OF_EXPERTS:  # which have no adapters
            continue
        count = math.prod(source.size[:-2])
        for number in range(count):
            theirs = source.names[number * len(source.names) // count].removesuffix(".weight")
            found.setdefault(f"base_model.model.{theirs}", []).append((name, number, source.size[-2:]))
    return found


def check_room(target: Path, kinds: dict[str, Kind]) -> None:
    """Raises SaveError if the disk lacks room, before anything is written: a full disk breaks other programs too."""
    needed = sum(kind.num_bytes for kind in kinds.values()) + 2**25
    folder = next(path for path in target.resolve().parents if path.exists())
    if not has_room(folder, needed):
        raise SaveError(f"{target} needs {needed / 2**20:,.0f} MiB, but {room(folder)} at {folder}; make room there")


def main(arguments: list[str]) -> int:
    command, source, target, *options = arguments
    if command == "import":
        import_weights(Path(source), Path(target))
        return 0
    write = export_adapter if "adapter" in options else export
    dtype = torch.bfloat16 if "bf16" in options else torch.float32
    write(Path(source), Path(target), dtype, "best" if "best" in options else "newest")
    return 0


if __name__ == "__main__":
    sys.exit(run_script(lambda: main(arguments), answers=True))
