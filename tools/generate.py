"""Sample from a language model, with a key-value cache.

Run:     python -m tools.generate --run_dir RUN --prompt "ROMEO:"
             from the newest checkpoint of a run of transformer_tpu.py,
             or from the best one: --checkpoint best
         python -m tools.generate --hf Qwen3-0.6B/ --prompt "One" "A second"
             from a folder of Hugging Face, two at once
         python -m tools.generate --hf Qwen3-0.6B/ --chat "Who are you?"
             a question to a model that was trained on conversations
         python -m tools.generate --llmc gpt2_124M.bin --prompt "Hello"
             from llm.c weights
         python -m tools.generate --hf benchmarks/models/llama_3_2_1b.json
             --compile_for v5litepod-1 --num_prompts 8 --context 2048
             what a token costs on a slice, by its compiler, without weights

Expect:  two graphs, prefill and decode, whatever the length of the prompts.
         Of a folder that browser.export wrote: python -m browser.onnx_generate
"""

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from language.data.llmc_files import read_header
from language.generation.sampling import SamplingOptions, ask, print_continuations
from language.options.hf_config import shape_of
from language.options.shapes import ModelShape
from tpu_utils.base.errors import InputError, run_script
from tpu_utils.base.files import open_regular, read_json
from tpu_utils.options.compiler_flags import parse_compiler_options
from tpu_utils.options.environment import choose_device, command_line
from tpu_utils.options.fields import Range
from tpu_utils.options.tool_arguments import parse_options
from tpu_utils.options.train_config import TrainConfig


@dataclass(frozen=True)
class GenerateConfig(SamplingOptions):
    """What to sample from, and how."""

    run_dir: str = ""
    """A run of transformer_tpu.py."""
    checkpoint: Literal["newest", "best"] = "newest"
    """Checkpoint of the run. best: that of its best evaluation, which a run with --keep_best keeps."""
    hf: str = ""
    """A folder of Hugging Face instead: config.json, safetensors, tokenizer.json."""
    llmc: str = ""
    """llm.c's weights instead."""
    tokenizer: str = ""
    """bytes, gpt2, numbers, a tokenizer.json or its folder. Empty: that of the run or folder, else by the size of the
    vocabulary: 257 are bytes, 50257 GPT-2's, others take token numbers such as '3 17 5'."""
    context: Annotated[int, Range("[0, inf)")] = 0
    """Tokens that the cache has room for, at most as many as the model's config.json says that it reads, though its
    run may have read fewer. 0: as many as this needs, rounded up to 128."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Data type of weights and computation. auto: that of the run, or of the files."""
    int8: bool = False
    """Matrices in int8 with a scale for each output column: half the bytes of bfloat16, at some error of the logits."""
    device: Literal["auto", "tpu", "gpu", "cpu"] = "auto"
    """auto uses a TPU if one is attached, else the XLA CPU backend."""
    devices: Literal["one", "all"] = "one"
    """all: those of this host share the heads, the MLP and the vocabulary, so each reads its part of weights and cache.
    On the CPU CPU_NUM_DEVICES says how many there are."""
    compile_for: str = ""
    """A TPU slice such as v5litepod-4: decoding is compiled for it instead, and what a token costs is printed. --hf
    needs no weights then, and may be a config.json; auto precision is bfloat16."""
    compiler_options: str = ""
    """More options for the TPU compiler, "NAME=VALUE NAME=VALUE". Options in LIBTPU_INIT_ARGS take precedence."""
    num_prompts: Annotated[int, Range("[1, inf)")] = 1
    """With compile_for: number of prompts continued together, in a cache of --context tokens."""

    def __post_init__(self):
        if bool(self.run_dir) + bool(self.llmc) + bool(self.hf) != 1:
            raise InputError("give one of --run_dir, --hf and --llmc")
        if not self.run_dir and self.checkpoint != "newest":
            raise InputError("checkpoint is best, but only a --run_dir has checkpoints; leave it out")
        if self.compile_for and not self.context:
            raise InputError(
                "context is 0 with compile_for; expected --context, the tokens that the cache has room for"
            )
        if self.compile_for and (self.chat or self.prompt != ("",)):
            raise InputError("found a text with compile_for, which generates nothing; expected --num_prompts")
        if self.num_prompts > 1 and not self.compile_for:
            raise InputError("num_prompts has no effect without compile_for; give several texts to --prompt")
        try:
            parse_compiler_options(self.compiler_options)
        except ValueError as error:
            raise InputError(str(error)) from error
        super().__post_init__()

    @property
    def for_device(self) -> TrainConfig:
        """As start_device wants it."""
        named = ("device", "seed", "compile_for", "compiler_options")
        return TrainConfig(**{name: getattr(self, name) for name in named})


def read_shape(config: GenerateConfig) -> ModelShape:
    """Shape of the model of --hf, which may be its config.json alone if no weights are needed."""
    path = Path(config.hf)
    path = path if config.compile_for and path.suffix == ".json" else path / "config.json"
    return shape_of(read_json(path, "the configuration of a Hugging Face model"), str(path))


def check_source(config: GenerateConfig) -> None:
    """Raises InputError when there is nothing to sample from, DeviceError when there is no such device."""
    choose_device(config.for_device)
    if config.llmc:
        with open_regular(Path(config.llmc), "an llm.c GPT-2 model") as file:
            read_header(file, "an llm.c GPT-2 model")
    elif config.hf:
        read_shape(config)
    elif not list(Path(config.run_dir, "checkpoints").glob("step_*/done")):
        raise InputError(f"{config.run_dir} holds no complete checkpoint to sample from; check --run_dir")


if __name__ == "__main__":  # a wrong option or file is answered before the seconds that the next imports take
    config = command_line(GenerateConfig, __doc__, check_source, parse_options)

import torch

from language.data.entries import tell_once
from language.data.tokenizer_files import GENERATION_CONFIG
from language.generation.decoding import TOKENS, Cache, check_lengths, decode, decode_loop, generate, rows_of
from language.models.int8 import scale_name
from language.models.layers import Decoder
from language.weights.sources import Source, load, open_source, sampling_mesh, sampling_spec, without_values
from tpu_utils.device import Mesh, graphs_compiled, start_device
from tpu_utils.step.graphs import FirstStep

NEUTRAL = {"repetition_penalty": 1, "no_repeat_ngram_size": 0} | dict.fromkeys(
    ("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id")
)
"""What changes the greedy tokens of transformers and is not done here; the value that changes nothing."""


def tell_not_done(folder: Path) -> None:
    path = folder / GENERATION_CONFIG
    said = read_json(path, "a generation_config.json of Hugging Face's") if path.exists() else {}
    found = [f"{name} {said[name]}" for name, none in NEUTRAL.items() if said.get(name, none) not in (None, none)]
    if found:
        tell_once(f"{path}: {', '.join(found)} makes other tokens in transformers; not applied here")


def source_of(config: GenerateConfig) -> Source:
    if config.hf:
        tell_not_done(Path(config.hf))
    named = ("run_dir", "hf", "llmc", "checkpoint", "tokenizer", "precision", "chat_format")
    found = open_source(**{name: getattr(config, name) for name in named})
    longest = max(found.longest, found.shape.sequence_length)
    return dataclasses.replace(found, shape=dataclasses.replace(found.shape, sequence_length=longest))


def start_mesh(config: GenerateConfig, shape: ModelShape) -> Mesh | None:
    return sampling_mesh(shape) if config.devices == "all" else None


def ask_ahead(config: GenerateConfig) -> FirstStep:
    """Decoding with a model that has no weights, which tpu_compiler compiles."""
    if config.hf:
        dtype = torch.float32 if config.precision == "float32" else torch.bfloat16
        source = Source(read_shape(config), dtype, None, None, None, "")
    else:
        source = source_of(config)
    check_lengths(source.shape, [[0]], None, config.context)
    device, mesh = start_device(config.for_device, lambda: start_mesh(config, source.shape))
    model, rows = without_values(source, device, config.int8, mesh), rows_of(config.num_prompts, "TPU")
    cache = Cache(model, config.context, device, [0] * rows, shapes_only=True)
    held = [value for value in vars(cache).values() if isinstance(value, torch.Tensor)] + cache.keys + cache.values
    devices, read = 1 if mesh is None else mesh.size(), read_per_token(model)
    cache_bytes = sum(t.numel() * t.element_size() for t in cache.keys + cache.values) * config.num_prompts // rows
    reads = dict(batch=config.num_prompts, length=config.context, tokens=TOKENS, cache_bytes=cache_bytes)
    reads |= dict(read_bytes=read + cache_bytes / devices, flops=2 * rows * source.shape.num_multiplied)
    facts = dict(topology=config.compile_for, examples=config.num_prompts * TOKENS, unit="tokens", reads=reads)
    facts |= dict(owners=(torch.nn.ModuleList([model]), held), settings=dataclasses.asdict(config))
    return FirstStep(decode, (decode_loop(model, cache, config), cache), {}, facts)


def read_per_token(model: Decoder) -> float:
    """Bytes of weights that a device reads for a token. Of an embedding that is no head, and of positions, a row."""
    devices = 1 if model.mesh is None else model.mesh.size()
    lookups = ("position_embedding", "" if getattr(model.shape, "tied_head", True) else "token_embedding")
    read = 0.0
    for name, tensor in model.named_parameters():
        if name not in lookups:
            share = devices if "tensor" in sampling_spec(name, tensor) else 1
            scales = model.get_buffer(scale_name(name)) if tensor.dtype == torch.int8 else tensor[:0]
            read += (tensor.numel() * tensor.element_size() + scales.numel() * scales.element_size()) / share
    return read


def main(config: GenerateConfig) -> int:
    if config.compile_for:
        raise ask_ahead(config)
    source = source_of(config)
    stops = set(source.tokenizer.stops)
    asked = ask(config, source.tokenizer, source.start, source.chat_format, stops, source.after)
    check_lengths(source.shape, asked.prompts, config.num_tokens, config.context)
    device, mesh = start_device(config.for_device, lambda: start_mesh(config, source.shape))
    before, model = graphs_compiled(), load(source, device, config.int8, mesh)
    found = generate(model, asked.prompts, config, device, asked.ends, config.context, asked.stops)
    print_continuations(config, asked, found, source.tokenizer)
    print(f"{sum(map(len, found))} tokens, {graphs_compiled() - before} graphs", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(run_script(lambda: main(config), answers=True))
