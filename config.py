"""Frozen configurations and presets. Imports no torch.

Run:     python config.py            # every preset, resolved and checked:
                                     # each value, and where it came from
         python config.py --json     # the same for machines

A value is looked up in this order, the last one wins: the field's default, the
preset, the optimization level, the command line. Presets never set a field that
a level owns, so no value is overridden behind the reader's back. A resumed run
has its own config.json in place of the preset, unless --preset is given.

A configuration of your own is a subclass; command_line() of a script takes it as it is:

    @dataclass(frozen=True)
    class MyConfig(MnistConfig):
        '''My options.'''  # the heading in --help

        hidden_layers: Annotated[int, Range("[1, inf)")] = 2
        '''How many hidden layers the model has.'''
        learning_rate: float = 0.01  # stands with each preset of MnistConfig

        presets = {  # in place of those of MnistConfig, else it has the same
            "small": {},  # the defaults; the first one is taken when none is named
            "large": dict(hidden_layers=8, learning_rate=0.001),
            "production": MnistConfig.presets["production"],
        }

A default that a class states anew stands against the presets of its parents; a
preset that the class states itself sets it. What redeclares a field without
Annotated keeps the bounds and the sentence of its parent's.
"""

import argparse
import dataclasses
import json
import re
import signal
import sys
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from model_shapes import BYTE_VOCAB_SIZE, MODEL_SIZES, LlamaShape, ModelShape, shape_of
from tpu_compiler.flags import NO_WINDOWED_EINSUM, parse_compiler_options
from tpu_compiler.hardware import parse_topology
from tpu_utils.errors import InputError
from tpu_utils.fields import check_class, check_types, declaring, marks, nearest, values_in
from tpu_utils.inputs import parse_object, read_json


@dataclass(frozen=True)
class Range:
    """The numbers a field may have, as an interval: "[1, inf)" is 1 or more, "(0, 1]" above 0 and up to 1."""

    interval: str

    def __contains__(self, value: float) -> bool:
        low, high = (float(bound) for bound in self.interval[1:-1].split(","))
        above = value >= low if self.interval[0] == "[" else value > low
        return above and (value <= high if self.interval[-1] == "]" else value < high)

    def __str__(self) -> str:
        low, high = (bound.strip() for bound in self.interval[1:-1].split(","))
        if high == "inf":
            return f"{low} or more" if self.interval[0] == "[" else f"a finite number above {low}"
        return f"{low} {'<=' if self.interval[0] == '[' else '<'} x {'<=' if self.interval[-1] == ']' else '<'} {high}"


FREE = "may differ between a run and its resumption without changing a single bit of what it computes"
# Fields that say how many devices share the work, and how, are FREE too: there the numbers are equal to about 1e-7.
LENGTHS = ("num_steps", "num_epochs")
"""Fields that a resumption may change where the steps done keep their learning rates."""


@dataclass(frozen=True)
class RunOptions:
    """What runs, on what, and where it is kept."""

    preset: Annotated[str, FREE] = "quick_test"
    """Named set of values; `python config.py` prints them all."""
    device: Annotated[Literal["auto", "tpu", "cpu"], FREE] = "auto"
    """auto takes a TPU when one is attached, else the XLA CPU backend. Presets made for TPU ask for tpu."""
    seed: Annotated[int, Range("[0, 4294967295]")] = 0
    """Seeds the initial weights, the order of the examples and their augmentation."""
    run_dir: Annotated[str, FREE] = ""
    """Run directory, a folder or gs://BUCKET/FOLDER. Empty: a new folder runs/PRESET_DATE_TIME each time."""
    resume: Annotated[Literal["never", "auto", "must"], FREE] = "never"
    """never refuses a run_dir that holds a run; auto resumes if there is a checkpoint; must needs one. With auto and
    must, options that are not given are those of the run, unless --preset is given."""
    compile_for: Annotated[str, FREE] = ""
    """A TPU slice, such as v5litepod-8: compile the first step with the TPU compiler, report, do not train."""
    debug: Annotated[bool, FREE] = False
    """Show the traceback of an error instead of its message alone."""


@dataclass(frozen=True)
class DataOptions:
    """Where the data is."""

    data_dir: Annotated[str, FREE] = "datasets"
    """Where data files are read from."""
    download: Annotated[bool, FREE] = False
    """Allow the data set to be downloaded into data_dir."""


@dataclass(frozen=True)
class OptimizerOptions:
    """One optimizer step, and its learning rate over the run."""

    global_batch_size: Annotated[int, Range("[1, inf)")] = 64
    """Examples per optimizer step, over all devices and hosts."""
    optimizer: Literal["sgd", "adam", "adamw"] = "adamw"
    """How gradients become updates."""
    learning_rate: Annotated[float, Range("(0, inf)")] = 1e-3
    """Peak learning rate."""
    momentum: Annotated[float, Range("[0, 1)")] = 0.9
    """Of sgd."""
    adam_beta1: Annotated[float, Range("[0, 1)")] = 0.9
    """Of adam and adamw: decay of the mean of the gradients."""
    adam_beta2: Annotated[float, Range("[0, 1)")] = 0.999
    """Of adam and adamw: decay of the mean of their squares."""
    weight_decay: Annotated[float, Range("[0, inf)")] = 0.0
    """Decoupled in adamw, added to the gradient in sgd and adam."""
    scheduler: Literal["constant", "linear", "cosine", "step", "wsd"] = "cosine"
    """Shape of the learning rate. wsd: warm-up, stable, then linear decay over the last decay_fraction of the steps."""
    warmup_steps: Annotated[int, Range("[0, inf)")] = 0
    """Linear warm-up: step s of the first warmup_steps runs at (s + 1) / warmup_steps of the learning rate."""
    decay_every: Annotated[int, Range("[1, inf)")] = 1000
    """Of the step scheduler: steps between two decays."""
    decay_factor: Annotated[float, Range("(0, inf)")] = 0.5
    """Of the step scheduler: what one decay multiplies the learning rate by."""
    decay_fraction: Annotated[float, Range("(0, 1]")] = 0.2
    """Of wsd: share of the steps in which the learning rate decays."""
    final_learning_rate_fraction: Annotated[float, Range("[0, inf)")] = 0.0
    """Where linear, cosine and wsd end, as a share of learning_rate."""
    on_nonfinite: Annotated[Literal["stop", "skip"], FREE] = "stop"
    """When a loss or gradient is not finite: stop the run at the next log line, or skip that step's update."""


@dataclass(frozen=True)
class SpeedOptions:
    """Speed against precision."""

    optimization_level: Annotated[Literal["conservative", "balanced", "aggressive"], FREE] = "balanced"
    """Sets precision, matmul_precision and prefetch_batches; each can still be set by itself."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Of activations and matrix products. Weights and optimizer state are always float32."""
    matmul_precision: Literal["default", "high", "highest"] = "default"
    """Float32 matrix products on TPU: default is one bfloat16 pass, high three, highest six. No effect on CPU."""
    prefetch_batches: Annotated[int, Range("[1, inf)"), FREE] = 4
    """Batches sent to the device ahead of the step."""
    windowed_einsum: Annotated[bool, FREE] = False
    """Let the TPU compiler gather large sharded weights piece by piece, between small products."""
    compiler_options: Annotated[str, FREE] = ""
    """More options of the TPU compiler, "NAME=VALUE NAME=VALUE". Those in LIBTPU_INIT_ARGS stand."""


@dataclass(frozen=True)
class LogOptions:
    """What a run writes, and how often."""

    log_every: Annotated[int, Range("[1, 1000000]")] = 20
    """Steps between two log lines. Evaluations and checkpoints read from the device too, nothing else does."""
    save_every: Annotated[int, Range("[1, inf)"), FREE] = 200
    """Steps between two checkpoints. The last step is always saved."""
    keep_checkpoints: Annotated[int, Range("[1, inf)"), FREE] = 3
    """How many of the newest checkpoints are kept."""
    keep_best: Annotated[bool, FREE] = False
    """Keep the checkpoint of the best evaluation too: the largest accuracy, or the smallest validation_loss."""
    tensorboard: Annotated[bool, FREE] = True
    """Write TensorBoard events to run_dir/tensorboard."""
    profile_steps: Annotated[str, FREE] = ""
    """FIRST:LAST, the steps to trace, for example 10:13 for steps 10, 11 and 12."""
    stall_seconds: Annotated[int, Range("[0, 100000000]"), FREE] = 600
    """Print the stacks of all threads after so long without progress (start-up and compiling: six times). 0: never."""


@dataclass(frozen=True)
class TrainConfig(
    LogOptions, SpeedOptions, OptimizerOptions, DataOptions, RunOptions
):  # the last one's fields are first
    """What every training script takes."""

    presets: ClassVar[dict[str, dict[str, Any]]] = {"quick_test": {}}  # the defaults of the fields
    """For each name that --preset takes, the fields it sets. The first one is taken when none is named."""
    options_from = ""  # without a type, so no option: the config.json that gave what the command line did not

    def __post_init__(self):
        if problems := check(self):
            raise InputError("\n".join(problems))

    @property
    def tpu_options(self) -> dict[str, str]:
        """What the TPU compiler is told, {name: value}."""
        return ({} if self.windowed_einsum else NO_WINDOWED_EINSUM) | parse_compiler_options(self.compiler_options)

    @property
    def profile_range(self) -> tuple[int, int]:
        """First step to trace and the step after the last; (-1, -1) when nothing is traced."""
        return parse_profile_steps(self.profile_steps)


@dataclass(frozen=True)
class ImageConfig(TrainConfig):
    """Passes over labelled images."""

    num_epochs: Annotated[int, Range("[1, inf)")] = 10
    """Passes over the training set. The last, short batch of a pass is left out; each pass is shuffled anew."""
    max_shift: Annotated[int, Range("[0, inf)")] = 0
    """Augmentation: each image moves by up to this many pixels in x and in y, on the host."""
    eval_batch_size: Annotated[int, Range("[1, inf)"), FREE] = 512
    """Examples per evaluation step. The last batch is padded and masked, so each example counts once."""


@dataclass(frozen=True)
class MnistConfig(ImageConfig):
    """What the MNIST scripts train."""

    dataset: Literal["digits", "mnist", "synthetic"] = "digits"
    """digits: 1,797 real digits, no download. mnist: IDX files in data_dir. synthetic: best accuracy known."""
    channels: Annotated[int, Range("[1, inf)")] = 32
    """Channels of the first convolution; the later ones have twice as many."""
    hidden_dim: Annotated[int, Range("[1, inf)")] = 128
    """Width of the hidden linear layer."""

    # DistributedMnistConfig has them too: equal global batch, epochs and seed give equal numbers in both scripts
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "quick_test": dict(num_epochs=40, learning_rate=4e-3, weight_decay=0.05, max_shift=1, warmup_steps=20),
        "development": dict(dataset="mnist", num_epochs=3, global_batch_size=128, warmup_steps=50, log_every=10),
        "production": dict(
            run_dir="runs/mnist_production",
            device="tpu",
            resume="auto",
            dataset="mnist",
            num_epochs=10,
            global_batch_size=64,
            learning_rate=3e-3,
            weight_decay=0.05,
            max_shift=2,
            warmup_steps=100,
        ),
        "distributed": dict(
            run_dir="runs/mnist_distributed",
            device="tpu",
            resume="auto",
            dataset="mnist",
            num_epochs=10,
            global_batch_size=256,
            learning_rate=3e-3,
            weight_decay=0.05,
            max_shift=2,
            warmup_steps=50,
        ),
    }


@dataclass(frozen=True)
class HostOptions:
    """Of a slice with several hosts."""

    peers_timeout: Annotated[int, Range("[1, 1000000]"), FREE] = 300
    """Seconds to wait at the start for the other hosts of a pod slice."""
    peers_secret: Annotated[str, FREE] = ""
    """File with a secret that all hosts of a slice have, mode 600. Empty: peers-secret of the VM's metadata, if any."""


@dataclass(frozen=True)
class DeviceOptions(HostOptions):
    """Virtual devices, to try out what runs on many."""

    num_virtual_devices: Annotated[int, Range("[0, inf)"), FREE] = 0
    """CPU only: how many devices the XLA CPU backend pretends to have. 0: CPU_NUM_DEVICES, or one."""


@dataclass(frozen=True)
class ParallelOptions(DeviceOptions):
    """How many devices share the work."""

    strategy: Annotated[Literal["spmd", "ddp"], FREE] = "spmd"
    """spmd: one program over all devices, a process per host. ddp: DistributedDataParallel, a process per device."""
    shard_parameters: Annotated[bool, FREE] = False
    """Of spmd: shard parameters and optimizer state over the devices too (FSDP) instead of one copy each."""


@dataclass(frozen=True)
class DistributedMnistConfig(ParallelOptions, MnistConfig):
    """What distributed_mnist_tpu.py trains."""


@dataclass(frozen=True)
class CifarConfig(DeviceOptions, ImageConfig):
    """What resnet_cifar_tpu.py trains."""

    dataset: Literal["stripes", "cifar10"] = "stripes"
    """stripes: made, best accuracy known. cifar10: its binary files in data_dir."""
    depth: Annotated[int, Range("[8, 1202]")] = 20
    """Layers of the ResNet: 6 n + 2."""
    width: Annotated[int, Range("[1, inf)")] = 16
    """Channels of its first third; the next two have twice and four times as many."""
    flip: bool = True
    """Augmentation: half of the pictures are mirrored left to right, on the host."""

    # stochastic gradient descent as He et al. 2015, section 4.2, with a cosine in place of the steps
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "quick_test": dict(
            depth=8, optimizer="sgd", learning_rate=0.1, weight_decay=5e-4, num_epochs=4, max_shift=4, warmup_steps=20
        ),
        "development": dict(
            dataset="cifar10",
            depth=8,
            width=32,
            optimizer="sgd",
            learning_rate=0.1,
            weight_decay=5e-4,
            global_batch_size=128,
            num_epochs=3,
            max_shift=4,
            warmup_steps=200,
        ),
        "production": dict(
            run_dir="runs/cifar10_width_128",
            device="tpu",
            resume="auto",
            optimization_level="aggressive",
            dataset="cifar10",
            depth=8,
            width=128,
            optimizer="sgd",
            learning_rate=0.1,
            weight_decay=5e-4,
            global_batch_size=128,
            num_epochs=100,
            max_shift=4,
            warmup_steps=400,
            save_every=1000,
        ),
        "distributed": dict(
            run_dir="runs/cifar10_width_256",
            device="tpu",
            resume="auto",
            optimization_level="aggressive",
            dataset="cifar10",
            depth=8,
            width=256,
            optimizer="sgd",
            learning_rate=0.4,
            weight_decay=5e-4,
            global_batch_size=512,
            num_epochs=100,
            max_shift=4,
            warmup_steps=500,
            save_every=500,
        ),
    }


SMALLEST_VOCAB_SIZE = {"synthetic": 4, "text": BYTE_VOCAB_SIZE, "tokens": 1, "chat": 1}
DEFAULT_VOCAB_SIZE = {"synthetic": 64, "text": BYTE_VOCAB_SIZE, "chat": BYTE_VOCAB_SIZE}  # tokens: of the model's size
HUGGING_FACE_CONFIG = "a model's config.json in a local folder (hf download NAME --local-dir DIR)"


@dataclass(frozen=True)
class TransformerConfig(HostOptions, TrainConfig):
    """What transformer_tpu.py trains, and on which mesh."""

    dataset: Literal["synthetic", "text", "tokens", "chat"] = "synthetic"
    """synthetic: a Markov chain of known entropy. text: UTF-8 bytes. tokens: llm.c shards. chat: conversations in JSON
    lines, with loss on the answers alone."""
    train_data: str = ""
    """text, chat: a file or folder. tokens: shards, for example 'fineweb_train_*.bin'. Relative to data_dir."""
    validation_data: str = ""
    """As train_data. Empty with text and chat: the last tenth of train_data."""
    tokenizer: Annotated[str, FREE] = ""
    """chat: tokenizer.json or its folder. Empty: that of initial_weights, else bytes."""
    chat_format: Literal["auto", "plain", "chatml", "qwen3", "llama3"] = "auto"
    """chat: how a conversation becomes text. auto: by the special tokens that the tokenizer has, else plain."""
    document_separator: str = ""
    """text: what divides documents inside a file, for example a blank line. Empty: a file is one document."""
    bucketed: bool = False
    """text: pad short documents to the next multiple of 128 only; one graph for each length that occurs."""
    hellaswag: Annotated[str, FREE] = ""
    """llm.c's HellaSwag file; scored at every evaluation. Empty: not."""
    model_size: Literal[
        "tiny", "124M", "350M", "774M", "1558M",
        "gpt3_125M", "gpt3_350M", "gpt3_760M", "gpt3_1.3B", "gpt3_2.7B", "gpt3_6.7B",
        "llama_tiny", "smollm2_135M", "llama3_1B", "llama3_3B", "llama3_8B", "llama3_70B", "qwen3_0.6B", "qwen3_8B",
    ] = "tiny"  # fmt: skip
    """Layers, heads, width and context of a published model; each can be set by itself below."""
    initial_weights: Annotated[str, FREE] = ""
    """Folder of Hugging Face with config.json and safetensors (GPT-2, Llama, Qwen3): the model, and where it begins."""
    model_config: str = ""
    """A config.json of Hugging Face, in place of model_size. The run keeps its text. Empty: that of initial_weights."""
    lora_rank: Annotated[int, Range("[0, 4096]")] = 0
    """Of Llama and Qwen3: freeze the weights, in bfloat16, and train adapters of this rank. 0: train all weights."""
    lora_alpha: Annotated[float, Range("(0, inf)")] = 32.0
    """Of LoRA: adapters count lora_alpha / lora_rank."""
    num_layers: Annotated[int, Range("[0, inf)")] = 0
    """Transformer layers. 0: those of model_size, here and in the next three."""
    num_heads: Annotated[int, Range("[0, inf)")] = 0
    """Attention heads of a layer."""
    embedding_dim: Annotated[int, Range("[0, inf)")] = 0
    """Width of the model."""
    sequence_length: Annotated[int, Range("[0, inf)")] = 0
    """Context: the longest sequence, in tokens. 0 with model_config: what that says, at most 4096."""
    vocab_size: Annotated[int, Range("[0, inf)")] = 0
    """0: 64 for synthetic, 257 for text and chat (bytes), that of model_size for tokens, that of model_config."""
    num_steps: Annotated[int, Range("[1, 10000000]")] = 500
    """Optimizer steps of the run."""
    gradient_accumulation_steps: Annotated[int, Range("[1, inf)")] = 1
    """Smaller batches a global batch is computed in, one after another inside one graph."""
    clip_gradient_norm: Annotated[float, Range("[0, inf)")] = 1.0
    """Largest global norm of the gradient. 0: no clipping."""
    dropout: Annotated[float, Range("[0, 1)")] = 0.0
    """Of embeddings and of what attention and MLP add, in training steps only. Attention weights are not dropped."""
    adam_beta2: Annotated[float, Range("[0, 1)")] = 0.95
    """Of adam and adamw: decay of the mean of the squares of the gradients."""
    weight_decay: Annotated[float, Range("[0, inf)")] = 0.1
    """Of matrices only; layer norms and biases never decay."""
    mesh: Annotated[str, FREE] = "auto"
    """DATAxFSDPxTENSOR, for example 2x4x1; the product is the number of devices."""
    sharding: Annotated[Literal["table", "auto"], FREE] = "table"
    """table: PARTITION in transformer_tpu.py. auto: XLA's auto-sharding, experimental, TPU only."""
    print_placement: Annotated[bool, FREE] = False
    """Print where every parameter lies."""
    remat: Annotated[bool, FREE] = False
    """Keep only the input of each layer for the backward pass, compute the rest again: less memory, more time."""
    remat_keep: Annotated[Literal["inputs", "attention"], FREE] = "inputs"
    """What remat keeps of a layer. attention: what attention gave too, so that it does not run again."""
    scan_layers: Annotated[bool, FREE] = False
    """Compile one layer and loop over it: smaller graph, slower step. With remat it is faster than without."""
    attention: Annotated[Literal["plain", "flash"], FREE] = "plain"
    """flash: jax 0.7.1's Pallas kernels, TPU only; sequence_length a multiple of 128."""
    eval_every: Annotated[int, Range("[1, inf)")] = 100
    """Steps between two evaluations. The last step is always evaluated."""
    eval_batches: Annotated[int, Range("[1, inf)")] = 20
    """Most batches of global_batch_size in one evaluation."""

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "quick_test": dict(num_steps=200, global_batch_size=32, learning_rate=2e-3, warmup_steps=20),
        # nanoGPT's CPU example: 4 layers, 4 heads, width 128, context 64, batch 12, 2,000 iterations
        "development": dict(
            dataset="text",
            train_data="tinyshakespeare.txt",
            num_layers=4,
            num_heads=4,
            global_batch_size=12,
            num_steps=2000,
            learning_rate=3e-3,
            final_learning_rate_fraction=0.1,
            adam_beta2=0.99,
            warmup_steps=100,
            log_every=50,
            save_every=500,
            eval_every=500,
            eval_batches=1000,
        ),
        # llm.c's GPT-2 124M on 10B tokens of FineWeb; for v5litepod-8
        "production": dict(
            run_dir="runs/gpt2_124M",
            device="tpu",
            resume="auto",
            optimization_level="aggressive",
            dataset="tokens",
            train_data="fineweb_train_*.bin",
            validation_data="fineweb_val_*.bin",
            model_size="124M",
            global_batch_size=512,
            gradient_accumulation_steps=8,
            num_steps=18865,
            learning_rate=6e-4,
            warmup_steps=700,
            save_every=1000,
            eval_every=250,
        ),
        # the largest GPT-2, for v5litepod-16: --mesh auto makes two copies of the state, each sharded over 8 chips.
        # With 1x16x1 libtpu 0.0.21 makes 133,000 collective-permutes of a step, and by its estimate the work between
        # them takes 13.6 s instead of 5.6. Scanned: 48 layers written out are compiled one by one
        "distributed": dict(
            run_dir="runs/gpt2_1558M",
            device="tpu",
            resume="auto",
            optimization_level="aggressive",
            dataset="tokens",
            train_data="fineweb_train_*.bin",
            validation_data="fineweb_val_*.bin",
            model_size="1558M",
            remat=True,
            scan_layers=True,
            global_batch_size=512,
            gradient_accumulation_steps=4,
            num_steps=18865,
            learning_rate=2e-4,
            warmup_steps=700,
            save_every=500,
            eval_every=250,
        ),
    }

    def __post_init__(self):
        for option, path in (("model_config", self.model_config), ("initial_weights", self.initial_weights)):
            if path and not self.model_config.startswith("{"):  # in a run it is the text
                path = Path(path) if option == "model_config" else Path(path, "config.json")
                object.__setattr__(self, "model_config", read_model_config(option, path))
        super().__post_init__()

    @property
    def shape(self) -> ModelShape:
        own = ("num_layers", "num_heads", "embedding_dim", "sequence_length")
        changes = {name: getattr(self, name) for name in own if getattr(self, name)}
        if self.model_config:
            published = shape_of(parse_object(self.model_config.encode(), "model_config", HUGGING_FACE_CONFIG))
            changes.setdefault("sequence_length", min(published.sequence_length, 4096))
            return dataclasses.replace(published, **changes)
        published = MODEL_SIZES[self.model_size]
        vocab_size = self.vocab_size or DEFAULT_VOCAB_SIZE.get(self.dataset, published.vocab_size)
        return dataclasses.replace(published, **changes, vocab_size=vocab_size)

    @property
    def flops_per_token(self) -> int:
        """That of the shape. LoRA: without the gradients of frozen weights, a third of their products; adapters not
        counted."""
        return self.shape.flops_per_token - (2 * self.shape.num_multiplied if self.lora_rank else 0)


def read_model_config(option: str, path: Path) -> str:
    """The text of a Hugging Face config.json, on one line. Raises InputError for a model that is not one of ours."""
    try:
        found = read_json(path, HUGGING_FACE_CONFIG)
        shape_of(found, str(path))
    except InputError as error:
        raise InputError(f"{option}: {error}") from error
    return json.dumps(found, sort_keys=True)


def check_initial_weights(config: TransformerConfig) -> None:
    """Raises InputError where the folder is of another model than model_config, or a new run finds no weights in it.
    A run goes on without its folder."""
    path = Path(config.initial_weights, "config.json")
    known = not config.initial_weights or not path.exists()
    if not known and read_model_config("initial_weights", path) != config.model_config:
        raise InputError(
            f"initial_weights is {config.initial_weights}, but its config.json is not that of the run or of "
            "--model_config; expected the same model"
        )
    if known or config.compile_for or config.resume != "never":
        return
    if not any((path.parent / name).exists() for name in ("model.safetensors", "model.safetensors.index.json")):
        raise InputError(
            f"initial_weights is {config.initial_weights}, which has no model.safetensors and no index; only "
            "safetensors are read; transformers writes them: from_pretrained(DIR).save_pretrained(OTHER)"
        )


class AnyText:
    """What is not empty."""

    def __contains__(self, value: str) -> bool:
        return bool(value)


# An option that a command line gives although it changes nothing is refused: field -> (the field that decides, and its
# values with which the first has no effect). Values of a preset, and a subclass's own values, are never refused.
WITHOUT_EFFECT: dict[str, tuple[str, Container]] = {
    "momentum": ("optimizer", {"adam", "adamw"}),
    "adam_beta1": ("optimizer", {"sgd"}),
    "adam_beta2": ("optimizer", {"sgd"}),
    "decay_every": ("scheduler", {"constant", "linear", "cosine", "wsd"}),
    "decay_factor": ("scheduler", {"constant", "linear", "cosine", "wsd"}),
    "decay_fraction": ("scheduler", {"constant", "linear", "cosine", "step"}),
    "final_learning_rate_fraction": ("scheduler", {"constant", "step"}),
    "download": ("dataset", {"digits", "synthetic", "stripes", "text", "tokens", "chat"}),
    "train_data": ("dataset", {"synthetic"}),
    "validation_data": ("dataset", {"synthetic"}),
    "hellaswag": ("dataset", {"synthetic", "chat"}),
    "document_separator": ("dataset", {"synthetic", "tokens", "chat"}),
    "bucketed": ("dataset", {"synthetic", "tokens", "chat"}),
    "tokenizer": ("dataset", {"synthetic", "text", "tokens"}),
    "chat_format": ("dataset", {"synthetic", "text", "tokens"}),
    "lora_alpha": ("lora_rank", {0}),
    "remat_keep": ("remat", {False}),
    "model_size": ("model_config", AnyText()),  # that of initial_weights too
}

# Visible sets of fields: what a level means is all here.
LEVELS: dict[str, dict[str, Any]] = {
    "conservative": dict(precision="float32", matmul_precision="highest", prefetch_batches=2),
    "balanced": dict(precision="float32", matmul_precision="default", prefetch_batches=4),
    "aggressive": dict(precision="bfloat16", matmul_precision="default", prefetch_batches=8),
}


FORMER = {"compile_cache"}
"""Options that the files of an older run may hold: they changed no number."""


def free_on_resume(config_class: type[TrainConfig]) -> set[str]:
    """Names of the fields marked FREE, in this class or in another script's: one may resume the run of another."""
    classes = (config_class, DistributedMnistConfig, CifarConfig, TransformerConfig)
    fields = [(kind, field.name) for kind in classes for field in dataclasses.fields(kind)]
    return {name for kind, name in fields if FREE in marks(kind, name)} | FORMER


def as_json(config: TrainConfig) -> dict[str, Any]:
    """The fields as a file gives them back: a tuple is a list there, a number of numpy a number."""
    return json.loads(json.dumps(dataclasses.asdict(config), default=lambda number: number.item()))


def defaults_of(config_class: type[TrainConfig]) -> dict[str, Any]:
    """The default of every field, as a file would give it."""
    return json.loads(json.dumps({field.name: field.default for field in dataclasses.fields(config_class)}))


def parse_profile_steps(text: str) -> tuple[int, int]:
    """'10:13' -> (10, 13). '' -> (-1, -1). Raises InputError for anything else."""
    if not text:
        return -1, -1
    first, colon, last = text.partition(":")
    if not (colon and first.isdecimal() and last.isdecimal() and int(first) < int(last)):
        raise InputError(f"profile_steps is {text!r}; expected FIRST:LAST with FIRST < LAST, for example 10:13")
    return int(first), int(last)


def check(config: TrainConfig) -> list[str]:
    """What can be known to be wrong before any data is read, each as a sentence: found, expected, what to do."""
    if problems := [*check_class(type(config))] or check_types(config):
        return problems
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        for allowed in marks(type(config), field.name):
            if isinstance(allowed, Range) and not all(number in allowed for number in values_in(value)):
                problems.append(f"{field.name} is {value}; expected {allowed}".replace(" x ", f" {field.name} "))
    if config.resume == "must" and not config.run_dir:
        problems.append("resume is must but run_dir is empty; name the folder of the run to resume with --run_dir")
    if not names_a_place(config.run_dir):
        problems.append(f"run_dir is {config.run_dir!r}; expected a local folder or gs://BUCKET/FOLDER")
    try:
        parse_profile_steps(config.profile_steps)
    except InputError as error:
        problems.append(str(error))
    try:
        parse_topology(config.compile_for or "v5litepod-1")
    except ValueError as error:
        problems.append(f"compile_for: {error}")
    try:
        parse_compiler_options(config.compiler_options)
    except ValueError as error:
        problems.append(str(error))
    if isinstance(config, ParallelOptions) and config.shard_parameters and config.strategy == "ddp":
        problems.append("shard_parameters is for strategy spmd; ddp keeps a whole copy per device; drop one of the two")
    if isinstance(config, CifarConfig) and config.depth % 6 != 2:
        depth = config.depth // 6 * 6 + 2
        problems.append(f"depth is {config.depth}; expected 6 n + 2; the nearest: {depth} or {depth + 6}")
    if isinstance(config, TransformerConfig) and not problems:
        problems += check_transformer(config)
    return problems


def names_a_place(run_dir: str) -> bool:
    """Whether it is a local folder or gs://BUCKET/FOLDER, and no other address."""
    folder_in_bucket = r"gs://[a-z0-9][a-z0-9._-]+[a-z0-9](/(?!\.\.?(/|$))[\w.=+-]+)+/?"
    return not re.match(r"\w+:/", run_dir) or re.fullmatch(folder_in_bucket, run_dir) is not None


def check_transformer(config: TransformerConfig) -> list[str]:
    """What does not go together in a transformer's configuration, whatever the devices and the data."""
    try:
        problems, shape = [], config.shape
    except InputError as error:
        return [str(error)]
    if config.model_config:
        problems += check_model_config(config)
    if config.lora_rank and not isinstance(shape, LlamaShape):
        problems.append(f"lora_rank is {config.lora_rank}, but adapters are for Llama and Qwen3; choose 0")
    elif config.lora_rank and not (config.initial_weights or config.compile_for):
        problems.append(
            f"lora_rank is {config.lora_rank}, but there are no weights to adapt; choose a folder by --initial_weights"
        )
    smallest = SMALLEST_VOCAB_SIZE[config.dataset]
    if isinstance(shape, LlamaShape):
        if shape.num_heads % shape.num_kv_heads:
            problems.append(
                f"num_heads ({shape.num_heads}) must be divisible by the {shape.num_kv_heads} heads of keys and values "
                f"of {config.model_size}"
            )
        if config.dropout:
            problems.append(f"dropout is {config.dropout}, but {config.model_size} has none; leave it out")
    if shape.embedding_dim % shape.num_heads and not getattr(shape, "head_width", 0):
        divide = [heads for heads in range(1, 1025) if shape.embedding_dim % heads == 0]
        near = [heads for heads in divide if heads < shape.num_heads][-1:]
        near += [heads for heads in divide if heads > shape.num_heads][:1]
        unit = 8 * shape.num_heads  # so that the width of a head is a multiple of 8
        width = -(-shape.embedding_dim // unit) * unit
        problems.append(
            f"embedding_dim ({shape.embedding_dim}) must be divisible by num_heads ({shape.num_heads}); "
            f"try --num_heads {' or '.join(map(str, near))}, or --embedding_dim {width}"
        )
    if config.vocab_size and config.vocab_size < smallest:
        problems.append(f"vocab_size is {config.vocab_size}; {config.dataset} needs {smallest} or more")
    if config.attention == "flash" and shape.sequence_length % 128:
        problems.append(
            f"sequence_length is {shape.sequence_length}; attention flash needs a multiple of 128, or choose plain"
        )
    if config.global_batch_size % config.gradient_accumulation_steps:
        problems.append(
            f"global_batch_size ({config.global_batch_size}) must be divisible by gradient_accumulation_steps "
            f"({config.gradient_accumulation_steps})"
        )
    if config.warmup_steps >= config.num_steps:
        problems.append(f"warmup_steps is {config.warmup_steps} but the run has {config.num_steps} steps; choose fewer")
    if config.mesh != "auto" and not re.fullmatch(r"[1-9]\d*x[1-9]\d*x[1-9]\d*", config.mesh):
        problems.append(f"mesh is {config.mesh!r}; expected auto, or DATAxFSDPxTENSOR such as 2x4x1")
    return problems


def check_model_config(config: TransformerConfig) -> list[str]:
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
        problems.append(
            "initial_weights is given, but dataset is synthetic: random tokens; choose --dataset chat or tokens"
        )
    if config.dataset == "text" and config.shape.vocab_size != BYTE_VOCAB_SIZE:
        problems.append(
            f"dataset text is bytes, and the model has a vocabulary of {config.shape.vocab_size}; make tokens with "
            "prepare_data.py --tokenizer, and give --dataset tokens"
        )
    return problems


Config = TypeVar("Config", bound=TrainConfig)


def presets_of(config_class: type[TrainConfig]) -> dict[str, dict[str, Any]]:
    """The presets of a class, checked. Raises InputError for a class or a preset that would not do what it says."""
    problems, presets = [*check_class(config_class)], config_class.presets
    levels = {field: "optimization_level" for fields in LEVELS.values() for field in fields}
    if not presets or not all(isinstance(values, dict) for values in presets.values()):
        problems.append(f"{config_class.__name__}.presets is {presets!r:.60}; expected {{name: {{field: value}}}}")
    elif not problems:
        names = declaring(config_class)
        for preset, values in presets.items():
            for name in values:
                if name not in names or name == "preset":
                    problems.append(
                        f"preset {preset}: {name} is no field of {config_class.__name__}{nearest(name, names)}"
                    )
                elif name in levels:
                    problems.append(
                        f"preset {preset} sets {name}, which belongs to {levels[name]}; set that, or drop it"
                    )
    if problems:
        raise InputError("\n".join(problems))
    return presets


def resolve(config_class: type[Config], preset: str, level: str | None = None) -> tuple[Config, dict[str, str]]:
    """The preset's configuration and, for each field, where its value came from.

    Of a default and a preset the one of the nearer class counts: a default that a subclass states anew stands against
    the presets, and the level, that its parents state. In one class the preset counts. level: of the command line, so
    it replaces the preset's, and sets its fields in any case. Raises KeyError for an unknown preset or level.
    """
    values: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(config_class)}
    sources = dict.fromkeys(values, "default")
    chosen, declared, parents = presets_of(config_class)[preset], declaring(config_class), config_class.__mro__
    (*_, stated_by) = (kind for kind in parents if vars(kind).get("presets", {}).get(preset) is chosen)
    chosen = {name: v for name, v in chosen.items() if parents.index(declared[name]) >= parents.index(stated_by)}
    chosen["preset"] = preset
    values.update(chosen)
    sources.update(dict.fromkeys(chosen, f"preset {preset}"))
    if level is not None:
        values["optimization_level"], sources["optimization_level"] = level, "command line"
    fields_of_level = LEVELS[values["optimization_level"]]
    if level is None:
        fields_of_level = {name: v for name, v in fields_of_level.items() if declared[name] is SpeedOptions}
    values.update(fields_of_level)
    sources.update(dict.fromkeys(fields_of_level, f"level {values['optimization_level']}"))
    return config_class(**values), sources


def main() -> int:
    parser = argparse.ArgumentParser(description="Print every preset, resolved: each value and where it came from.")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    as_json = parser.parse_args().json
    everything = {}
    for config_class in (MnistConfig, DistributedMnistConfig, CifarConfig, TransformerConfig):
        for preset in presets_of(config_class):
            config, sources = resolve(config_class, preset)  # an invalid preset raises here
            values = dataclasses.asdict(config)
            everything.setdefault(config_class.__name__, {})[preset] = {
                name: {"value": value, "source": sources[name]} for name, value in values.items()
            }
            if not as_json:
                print(f"{config_class.__name__} --preset {preset}: valid")
                for name, value in values.items():
                    print(f"  {name:28} {value!s:28} {'' if sources[name] == 'default' else sources[name]}".rstrip())
                print()
    if as_json:
        print(json.dumps(everything, indent=2))
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # quiet into `| head`
    sys.exit(main())
