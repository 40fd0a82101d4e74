"""Sample from a language model, with a key-value cache.

Run:     python -m tools.generate --run_dir RUN --prompt "ROMEO:"
             from the newest checkpoint of a run of transformer_tpu.py,
             or from the best one: --checkpoint best
         python -m tools.generate --hf Qwen3-0.6B/ --prompt "One" "A second"
             from a folder of Hugging Face, two at once
         python -m tools.generate --hf Qwen3-0.6B/ --chat "Who are you?"
             a question to a model that was trained on conversations
         python -m tools.generate --llmc gpt2_124M.bin --prompt "Hello"
             from llm.c weights; needs tiktoken and its GPT-2 vocabulary

Expect:  two graphs, prefill and decode, whatever the length of the prompts.
         Of a folder that browser.export wrote: python -m browser.onnx_generate
"""

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from config import TrainConfig
from language.hf_config import shape_of
from language.llmc_files import read_header
from language.sampling import SamplingOptions, ask, print_continuations
from language.shapes import ModelShape
from tpu_utils.environment import choose_device, command_line
from tpu_utils.errors import InputError, run_script
from tpu_utils.files import open_regular, read_json


@dataclass(frozen=True)
class GenerateConfig(SamplingOptions):
    """What to sample from, and how."""

    run_dir: str = ""
    """A run of transformer_tpu.py."""
    checkpoint: Literal["newest", "best"] = "newest"
    """Of the run. best: of its best evaluation, which a run with --keep_best keeps."""
    hf: str = ""
    """A folder of Hugging Face instead: config.json, safetensors, tokenizer.json."""
    llmc: str = ""
    """llm.c's weights instead."""
    tokenizer: str = ""
    """bytes, gpt2, numbers, a tokenizer.json or its folder. Empty: that of the run or folder, else by the size of the
    vocabulary: 257 are bytes, 50257 GPT-2's, others take token numbers such as '3 17 5'."""
    context: int = 0
    """Tokens that the cache has room for, at most as many as the model's config.json says that it reads, though its
    run may have read fewer. 0: as many as this needs, rounded up to 128."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of weights and computation. auto: that of the run, or of the files."""
    int8: bool = False
    """Matrices in int8 with a scale for each output column: half the bytes of bfloat16, at some error of the logits."""
    device: Literal["auto", "tpu", "cpu"] = "auto"
    """auto takes a TPU when one is attached, else the XLA CPU backend."""
    devices: Literal["one", "all"] = "one"
    """all: those of this host share the heads, the MLP and the vocabulary, so each reads its part of weights and cache.
    On the CPU CPU_NUM_DEVICES says how many there are."""

    def __post_init__(self):
        if bool(self.run_dir) + bool(self.llmc) + bool(self.hf) != 1:
            raise InputError("give one of --run_dir, --hf and --llmc")
        if not self.run_dir and self.checkpoint != "newest":
            raise InputError("checkpoint is best, but only a --run_dir has checkpoints; leave it out")
        if self.context < 0:
            raise InputError(f"context is {self.context}; expected 0 or more")
        super().__post_init__()

    @property
    def for_device(self) -> TrainConfig:
        """As start_device wants it."""
        return TrainConfig(device=self.device, seed=self.seed)


def check_source(config: GenerateConfig) -> None:
    """Raises InputError when there is nothing to sample from, DeviceError when there is no such device."""
    choose_device(config.for_device)
    if config.llmc:
        with open_regular(Path(config.llmc), "an llm.c GPT-2 model") as file:
            read_header(file, "an llm.c GPT-2 model")
    elif config.hf:
        path = Path(config.hf) / "config.json"
        shape_of(read_json(path, "the configuration of a Hugging Face model"), str(path))
    elif not list(Path(config.run_dir, "checkpoints").glob("step_*/done")):
        raise InputError(f"{config.run_dir} holds no complete checkpoint to sample from; check --run_dir")


if __name__ == "__main__":  # a wrong option or file is answered before the seconds that the next imports take
    config = command_line(GenerateConfig, __doc__, check_source)

from torch_xla.distributed.spmd import Mesh

from language.decoding import check_lengths, generate
from language.sources import Source, load, open_source, sampling_mesh
from tpu_utils.device import start_device
from tpu_utils.graphs import graphs_compiled


def source_of(config: GenerateConfig) -> Source:
    named = ("run_dir", "hf", "llmc", "checkpoint", "tokenizer", "precision", "chat_format")
    found = open_source(**{name: getattr(config, name) for name in named})
    longest = max(found.longest, found.shape.sequence_length)
    return dataclasses.replace(found, shape=dataclasses.replace(found.shape, sequence_length=longest))


def start_mesh(config: GenerateConfig, shape: ModelShape) -> Mesh | None:
    return sampling_mesh(shape) if config.devices == "all" else None


def main(config: GenerateConfig) -> int:
    source = source_of(config)
    asked = ask(config, source.tokenizer, source.start, source.chat_format, set(source.tokenizer.stops))
    check_lengths(source.shape, asked.prompts, config.num_tokens, config.context)
    device, mesh = start_device(config.for_device, lambda: start_mesh(config, source.shape))
    before, model = graphs_compiled(), load(source, device, config.int8, mesh)
    found = generate(model, asked.prompts, config, device, asked.ends, config.context, asked.stops)
    print_continuations(config, asked, found, source.tokenizer)
    print(f"{sum(map(len, found))} tokens, {graphs_compiled() - before} graphs", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(run_script(lambda: main(config), answers=True))
