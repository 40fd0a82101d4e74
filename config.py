"""Frozen configurations, presets, a typed command line, and the optimizers and schedules they name.

Run:     python config.py            # every preset, resolved: each value and where it came from, checked
         python config.py --json     # the same for machines

A value is looked up in this order, the last one wins: the field's default, the preset, the optimization level, the
command line. Presets never set a field that a level owns, so no value is overridden behind the reader's back.
"""

import argparse
import dataclasses
import json
import math
import re
import signal
import sys
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np
import torch
import tyro


class InputError(ValueError):
    """What the user gave cannot work: a field, an option, a data file. Scripts exit with code 2."""


@dataclass(frozen=True)
class TrainConfig:
    """What every training script takes."""

    preset: Literal["quick_test", "development", "production", "distributed"] = "quick_test"
    """Named set of values; `python config.py` prints them all."""
    device: Literal["auto", "tpu", "cpu"] = "auto"
    """auto takes a TPU when one is attached, else the XLA CPU backend. Presets made for TPU ask for tpu."""
    seed: int = 0
    """Seeds the initial weights, the order of the examples and their augmentation."""
    run_dir: str = ""
    """Receives config.json, metrics.jsonl, checkpoints/, TensorBoard events and summary.json. gs://BUCKET/FOLDER keeps
    them in Cloud Storage. Empty: a new folder runs/PRESET_DATE_TIME each time."""
    resume: Literal["never", "auto", "must"] = "never"
    """never starts anew, refuses a run_dir that holds a run; auto resumes if there is a checkpoint; must needs one."""
    debug: bool = False
    """Show the traceback of an error instead of its message alone."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """A step whose loss or gradient is infinite or not a number: stop the run at the next log line, or skip the update
    on the device, count it and go on."""

    stall_seconds: int = 600
    """Without progress for so long (start-up and compiling: six times as long) the stacks of all threads are printed;
    the run goes on waiting. 0: never."""

    dataset: str = ""
    data_dir: str = "datasets"
    """Where data files are read from."""
    download: bool = False
    """Allow the data set to be downloaded into data_dir."""

    global_batch_size: int = 64
    """Examples per optimizer step, over all devices and hosts."""

    optimizer: Literal["sgd", "adam", "adamw"] = "adamw"
    learning_rate: float = 1e-3
    """Peak learning rate."""
    momentum: float = 0.9
    """sgd only."""
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    weight_decay: float = 0.0
    """Decoupled in adamw, added to the gradient in sgd and adam."""

    scheduler: Literal["constant", "linear", "cosine", "step", "wsd"] = "cosine"
    """wsd: warm-up, stable, then linear decay over the last decay_fraction of the steps."""
    warmup_steps: int = 0
    """Linear warm-up: step s of the first warmup_steps runs at (s + 1) / warmup_steps of the learning rate."""
    decay_every: int = 1000
    """Steps between two decays of the step scheduler."""
    decay_factor: float = 0.5
    """What one decay of the step scheduler multiplies the learning rate by."""
    decay_fraction: float = 0.2
    """Share of the steps in which wsd decays."""
    final_learning_rate_fraction: float = 0.0
    """Where linear, cosine and wsd end, as a share of learning_rate."""

    optimization_level: Literal["conservative", "balanced", "aggressive"] = "balanced"
    """Sets precision, matmul_precision and prefetch_batches; each can still be set by itself."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Compute precision. bfloat16 is autocast: weights and optimizer state stay float32."""
    matmul_precision: Literal["default", "high", "highest"] = "default"
    """Float32 matrix products on TPU: default is one bfloat16 pass, high three, highest six. No effect on CPU."""
    prefetch_batches: int = 4
    """Batches sent to the device ahead of the step."""

    log_every: int = 20
    """Steps between two log lines: the only reads from the device."""
    save_every: int = 200
    """Steps between two checkpoints. The last step is always saved."""
    keep_checkpoints: int = 3
    """Newest checkpoints kept."""
    tensorboard: bool = True
    """Write TensorBoard events to run_dir/tensorboard."""
    profile_steps: str = ""
    """FIRST:LAST, the steps to trace, for example 10:13 for steps 10, 11 and 12."""
    compile_for: str = ""
    """A TPU slice, such as v5litepod-8: compile the first step with the TPU compiler, report, do not train."""
    compile_cache: str = "auto"
    """Folder of compiled programs for a warm start on TPU. auto: ~/.cache/torch_xla_programs; empty: none."""

    def __post_init__(self):
        problems = check(self)
        if problems:
            raise InputError("\n".join(problems))

    @property
    def profile_range(self) -> tuple[int, int]:
        """First step to trace and the step after the last; (-1, -1) when nothing is traced."""
        return parse_profile_steps(self.profile_steps)


@dataclass(frozen=True)
class MnistConfig(TrainConfig):
    """simple_mnist_tpu.py and distributed_mnist_tpu.py."""

    dataset: Literal["digits", "mnist", "synthetic"] = "digits"
    """digits: 1,797 real digits from scikit-learn, no download. mnist: IDX files in data_dir. synthetic: known best."""
    num_epochs: int = 10
    """Passes over the training set. The last, short batch of a pass is left out; each pass is shuffled anew."""
    max_shift: int = 0
    """Augmentation: each image moves by up to this many pixels in x and in y, on the host."""
    channels: int = 32
    """Channels of the first convolution; the later ones have twice as many."""
    hidden_dim: int = 128
    """Width of the hidden linear layer."""
    eval_batch_size: int = 512
    """Examples per evaluation step. The last batch is padded and masked, so each example counts once."""


@dataclass(frozen=True)
class DistributedMnistConfig(MnistConfig):
    """distributed_mnist_tpu.py."""

    strategy: Literal["spmd", "ddp"] = "spmd"
    """spmd: one program over all devices, a process per host. ddp: DistributedDataParallel, a process per device."""
    shard_parameters: bool = False
    """spmd only: cut parameters and optimizer state over the devices too (FSDP) instead of one copy each."""
    num_virtual_devices: int = 0
    """CPU only: how many devices the XLA CPU backend pretends to have. 0: CPU_NUM_DEVICES, or one."""
    peers_timeout: int = 300
    """Seconds to wait at the start for the other hosts of a pod slice."""


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
    def num_parameters(self) -> int:
        """Padded vocabulary included, as llm.c counts. Per layer: qkv 3DD+3D, out DD+D, mlp 8DD+5D, two norms 4D."""
        D = self.embedding_dim
        per_layer = 12 * D * D + 13 * D
        return (self.padded_vocab_size + self.sequence_length + 2) * D + self.num_layers * per_layer

    @property
    def flops_per_token(self) -> int:
        """Of a training step: 6 N + 12 L D T, both passes, the causal half of attention not taken off (as llm.c)."""
        return 6 * self.num_parameters + 12 * self.num_layers * self.embedding_dim * self.sequence_length


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
}
BYTE_VOCAB_SIZE = 257  # the 256 bytes and the token that stands before every document
SMALLEST_VOCAB_SIZE = {"synthetic": 4, "text": BYTE_VOCAB_SIZE, "tokens": 1}
DEFAULT_VOCAB_SIZE = {"synthetic": 64, "text": BYTE_VOCAB_SIZE, "tokens": 50257}


@dataclass(frozen=True)
class TransformerConfig(TrainConfig):
    """transformer_tpu.py."""

    dataset: Literal["synthetic", "text", "tokens"] = "synthetic"
    """synthetic: a Markov chain of known entropy. text: UTF-8 bytes. tokens: llm.c shards."""
    train_data: str = ""
    """text: a file or folder. tokens: shards, for example 'fineweb_train_*.bin'. Relative to data_dir."""
    validation_data: str = ""
    """As train_data. Empty with text: the last tenth of train_data."""
    document_separator: str = ""
    """text: what divides documents inside a file, for example a blank line. Empty: a file is one document."""
    bucketed: bool = False
    """text: pad short documents to the next multiple of 128 only; one graph for each length that occurs."""
    hellaswag: str = ""
    """llm.c's HellaSwag file; scored at every evaluation. Empty: not."""

    model_size: Literal[
        "tiny", "124M", "350M", "774M", "1558M",
        "gpt3_125M", "gpt3_350M", "gpt3_760M", "gpt3_1.3B", "gpt3_2.7B", "gpt3_6.7B",
    ] = "tiny"  # fmt: skip
    """Layers, heads, width and context of a published model; each can be set by itself below."""
    num_layers: int = 0
    """0: that of model_size."""
    num_heads: int = 0
    embedding_dim: int = 0
    sequence_length: int = 0
    vocab_size: int = 0
    """0: 64 for synthetic, 257 for text (bytes), 50257 for tokens (GPT-2)."""

    num_steps: int = 500
    gradient_accumulation_steps: int = 1
    """Parts one global batch is computed in, one after the other inside one graph."""
    clip_gradient_norm: float = 1.0
    """Largest global norm of the gradient. 0: no clipping."""
    adam_beta2: float = 0.95
    weight_decay: float = 0.1
    """Of matrices only; layer norms and biases never decay."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Of activations and matrix products. Weights and optimizer state stay float32, and so does the loss but for what
    its sums read in training."""

    mesh: str = "auto"
    """DATAxFSDPxTENSOR, for example 2x4x1; the product is the number of devices."""
    sharding: Literal["table", "auto"] = "table"
    """table: PARTITION in transformer_tpu.py. auto: XLA's auto-sharding, experimental, TPU only."""
    print_placement: bool = False
    """Print where every parameter lies."""
    remat: bool = False
    """Keep only the input of each layer for the backward pass, compute the rest again: less memory, more time."""
    scan_layers: bool = False
    """Compile one layer and loop over it: smaller graph, slower step."""
    attention: Literal["plain", "flash"] = "plain"
    """flash: jax 0.7.1's Pallas kernels, TPU only; sequence_length a multiple of 128."""

    eval_every: int = 100
    """Steps between two evaluations. The last step is always evaluated."""
    eval_batches: int = 20
    """Most batches of global_batch_size in one evaluation."""
    peers_timeout: int = 300
    """Seconds to wait at the start for the other hosts of a pod slice."""

    @property
    def shape(self) -> ModelShape:
        own = ("num_layers", "num_heads", "embedding_dim", "sequence_length")
        changes = {name: getattr(self, name) for name in own if getattr(self, name)}
        vocab_size = self.vocab_size or DEFAULT_VOCAB_SIZE[self.dataset]
        return dataclasses.replace(MODEL_SIZES[self.model_size], **changes, vocab_size=vocab_size)

    @property
    def smallest_vocab_size(self) -> int:
        return SMALLEST_VOCAB_SIZE[self.dataset]


# Visible sets of fields: what a level means is all here.
LEVELS: dict[str, dict[str, Any]] = {
    "conservative": dict(precision="float32", matmul_precision="highest", prefetch_batches=2),
    "balanced": dict(precision="float32", matmul_precision="default", prefetch_batches=4),
    "aggressive": dict(precision="bfloat16", matmul_precision="default", prefetch_batches=8),
}

PRESETS: dict[type, dict[str, dict[str, Any]]] = {
    MnistConfig: {
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
    },
    TransformerConfig: {
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
        # the largest GPT-2, for v5litepod-16: --mesh auto makes two copies of the state, each divided over 8 chips.
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
    },
}
# the same recipes: equal global batch, epochs and seed give equal numbers in both scripts
PRESETS[DistributedMnistConfig] = PRESETS[MnistConfig]

# Fields that may differ between a run and its resumption without changing a single bit of what it computes.
# Those that say how many devices share the work, and how, are the exception: equal to about 1e-7.
FREE_ON_RESUME = frozenset(
    "run_dir resume device debug on_nonfinite stall_seconds data_dir download save_every keep_checkpoints tensorboard "
    "profile_steps compile_for compile_cache prefetch_batches eval_batch_size preset optimization_level mesh sharding "
    "print_placement remat scan_layers attention hellaswag "
    "peers_timeout num_virtual_devices strategy shard_parameters".split()
)


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
    problems = []
    # a table of learning rates and a ring of values have a row for each step; step_00000000 has eight digits
    at_most = dict(seed=2**32 - 1, num_steps=10**7, log_every=10**6, stall_seconds=10**8, peers_timeout=10**6)
    for name, most in at_most.items():
        if getattr(config, name, 0) > most:
            problems.append(f"{name} is {getattr(config, name)}; expected {most} or less")
    at_least_one = [
        "global_batch_size",
        "decay_every",
        "prefetch_batches",
        "log_every",
        "save_every",
        "keep_checkpoints",
    ]
    at_least_one += ["num_epochs", "channels", "hidden_dim", "eval_batch_size", "peers_timeout"]
    at_least_zero = ["seed", "stall_seconds", "warmup_steps", "max_shift", "num_virtual_devices"]
    for name in at_least_one + at_least_zero:
        value, least = getattr(config, name, 1), int(name in at_least_one)
        if value < least:
            problems.append(f"{name} is {value}; expected {least} or more")
    for name in ("learning_rate", "decay_factor"):
        if not (math.isfinite(getattr(config, name)) and getattr(config, name) > 0):
            problems.append(f"{name} is {getattr(config, name)}; expected a finite number above 0")
    if not (math.isfinite(config.weight_decay) and config.weight_decay >= 0):
        problems.append(f"weight_decay is {config.weight_decay}; expected a finite number, 0 or more")
    for name in ("momentum", "adam_beta1", "adam_beta2"):
        if not 0 <= getattr(config, name) < 1:
            problems.append(f"{name} is {getattr(config, name)}; expected 0 <= {name} < 1")
    if getattr(config, "shard_parameters", False) and config.strategy == "ddp":
        problems.append("shard_parameters is for strategy spmd; ddp keeps a whole copy per device; drop one of the two")
    if config.resume == "must" and not config.run_dir:
        problems.append("resume is must but run_dir is empty; name the folder of the run to resume with --run_dir")
    if re.match(r"\w+:/", config.run_dir) and not re.fullmatch(
        r"gs://[a-z0-9][a-z0-9._-]+[a-z0-9](/(?!\.\.?(/|$))[\w.=+-]+)+/?", config.run_dir
    ):
        problems.append(f"run_dir is {config.run_dir!r}; expected a local folder or gs://BUCKET/FOLDER")
    for text, parse in ((config.profile_steps, parse_profile_steps), (config.compile_for, check_slice)):
        try:
            parse(text)
        except ValueError as error:
            problems.append(str(error))
    return problems + (check_transformer(config) if isinstance(config, TransformerConfig) else [])


def check_transformer(config: "TransformerConfig") -> list[str]:
    """What is wrong with a transformer's configuration, whatever the devices and the data."""
    problems = []
    shape = config.shape
    for name in ("num_layers", "num_heads", "embedding_dim", "sequence_length"):
        if getattr(shape, name) < 1:
            problems.append(f"{name} is {getattr(shape, name)}; expected 1 or more, or 0 for that of model_size")
    if not problems and shape.embedding_dim % shape.num_heads:
        problems.append(
            f"embedding_dim ({shape.embedding_dim}) must be divisible by num_heads ({shape.num_heads}); "
            f"try {-(-shape.embedding_dim // shape.num_heads) * shape.num_heads}"
        )
    if config.vocab_size and config.vocab_size < config.smallest_vocab_size:
        problems.append(
            f"vocab_size is {config.vocab_size}; {config.dataset} needs {config.smallest_vocab_size} or more"
        )
    if config.attention == "flash" and not problems and shape.sequence_length % 128:
        problems.append(
            f"sequence_length is {shape.sequence_length}; attention flash needs a multiple of 128, or choose plain"
        )
    if config.gradient_accumulation_steps < 1 or config.global_batch_size % config.gradient_accumulation_steps:
        problems.append(
            f"global_batch_size ({config.global_batch_size}) must be divisible by gradient_accumulation_steps "
            f"({config.gradient_accumulation_steps})"
        )
    for name in ("num_steps", "eval_every", "eval_batches"):
        if getattr(config, name) < 1:
            problems.append(f"{name} is {getattr(config, name)}; expected 1 or more")
    if config.warmup_steps >= config.num_steps:
        problems.append(f"warmup_steps is {config.warmup_steps} but the run has {config.num_steps} steps; choose fewer")
    for name in ("clip_gradient_norm", "final_learning_rate_fraction"):
        if not (math.isfinite(getattr(config, name)) and getattr(config, name) >= 0):
            problems.append(f"{name} is {getattr(config, name)}; expected a finite number, 0 or more")
    if not 0 < config.decay_fraction <= 1:
        problems.append(f"decay_fraction is {config.decay_fraction}; expected 0 < decay_fraction <= 1")
    if config.mesh != "auto" and not re.fullmatch(r"[1-9]\d*x[1-9]\d*x[1-9]\d*", config.mesh):
        problems.append(f"mesh is {config.mesh!r}; expected auto, or DATAxFSDPxTENSOR such as 2x4x1")
    return problems


def check_slice(name: str) -> None:
    """Raises ValueError unless name is empty or a TPU slice the compiler knows."""
    if name:
        try:
            from tpu_program import parse_topology  # here, so that a copied script runs without it
        except ModuleNotFoundError as error:
            raise InputError("compile_for needs aot_tpu.py and tpu_program.py beside the script") from error
        try:
            parse_topology(name)
        except ValueError as error:
            raise InputError(f"compile_for: {error}") from error


Config = TypeVar("Config", bound=TrainConfig)


def resolve(config_class: type[Config], preset: str, level: str | None = None) -> tuple[Config, dict[str, str]]:
    """The preset's configuration and, for each field, where its value came from.

    level replaces the preset's optimization level. Raises KeyError for an unknown preset or level.
    """
    values: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(config_class)}
    sources = dict.fromkeys(values, "default")
    chosen = {"preset": preset, **PRESETS[config_class][preset]}
    values.update(chosen)
    sources.update(dict.fromkeys(chosen, f"preset {preset}"))
    if level is not None:
        values["optimization_level"], sources["optimization_level"] = level, "command line"
    fields_of_level = LEVELS[values["optimization_level"]]
    values.update(fields_of_level)
    sources.update(dict.fromkeys(fields_of_level, f"level {values['optimization_level']}"))
    return config_class(**values), sources


def parse_command_line(config_class: type[Config], description: str, argv: list[str] | None = None) -> Config:
    """The configuration of this run. Prints help or the mistake and exits (0 or 2) when there is no run to do.

    Accepts --snake_case and --kebab-case. An unknown option is answered with the nearest names.
    Raises InputError for values that cannot work.
    """
    argv = sys.argv[1:] if argv is None else argv
    names = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    names.add_argument("--preset", default="quick_test")
    names.add_argument("--optimization_level", "--optimization-level", default=None)
    try:
        chosen = names.parse_known_args(argv)[0]
    except argparse.ArgumentError:
        chosen = names.parse_args([])  # an option without its value: tyro says so below
    preset = chosen.preset if chosen.preset in PRESETS[config_class] else "quick_test"  # tyro refuses the others below
    level = chosen.optimization_level if chosen.optimization_level in LEVELS else None
    default, _ = resolve(config_class, preset, level)
    return tyro.cli(config_class, args=argv, default=default, description=description, use_underscores=True)


def num_steps_of(config: MnistConfig, num_examples: int) -> tuple[int, int]:
    """(steps per epoch, steps of the whole run). Raises InputError when not even one batch can be filled."""
    steps_per_epoch = num_examples // config.global_batch_size
    if steps_per_epoch == 0:
        raise InputError(
            f"global_batch_size is {config.global_batch_size} but {config.dataset} has {num_examples} training "
            f"examples; choose at most {num_examples}"
        )
    num_steps = steps_per_epoch * config.num_epochs
    if num_steps > 10**7:
        raise InputError(
            f"num_epochs is {config.num_epochs}: {num_steps} steps; expected {10**7} or less, "
            f"{10**7 // steps_per_epoch} epochs of this data"
        )
    if config.warmup_steps >= num_steps:
        raise InputError(
            f"warmup_steps is {config.warmup_steps} but the run has {num_steps} steps; choose fewer, or more epochs"
        )
    return steps_per_epoch, num_steps


def check_divisible(config: MnistConfig, num_devices: int) -> None:
    """Raises InputError unless every device gets the same number of examples of a global batch."""
    size = config.global_batch_size
    if size % num_devices:
        below, above = size // num_devices * num_devices, -(-size // num_devices) * num_devices
        raise InputError(
            f"global_batch_size is {size} but there are {num_devices} devices, which would get unequal parts; "
            f"the nearest that works: {f'{below} or {above}' if below else above}"
        )


def learning_rates(config: TrainConfig, num_steps: int) -> torch.Tensor:
    """The learning rate of every step: (num_steps,) float32, every value above 0.

    The table goes to the device once and the compiled step looks its own value up: a rate that came from Python would
    be uploaded each step, and one that is exactly 0 or 1 would be baked into the graph and cost a second one.
    Warm-up counts from (s + 1) / warmup_steps; the decay runs over the steps that are left and would reach 0 one step
    after the last.
    """
    step = np.arange(num_steps, dtype=np.float64)
    after = step - config.warmup_steps
    progress = np.clip(after / max(1, num_steps - config.warmup_steps), 0, 1)
    shapes = {
        "constant": np.ones(num_steps),
        "linear": 1 - progress,
        "cosine": (1 + np.cos(np.pi * progress)) / 2,
        "step": np.float64(config.decay_factor) ** np.maximum(0, after // config.decay_every),
        "wsd": np.minimum(1, (num_steps - step) / max(1, round(config.decay_fraction * num_steps))),
    }
    if config.scheduler in ("linear", "cosine", "wsd"):
        last = config.final_learning_rate_fraction
        shapes[config.scheduler] = last + (1 - last) * shapes[config.scheduler]
    warm_up = np.minimum(1, (step + 1) / config.warmup_steps) if config.warmup_steps else 1
    limits = np.finfo(np.float32)  # step decay of a long run can underflow
    rates = np.maximum(config.learning_rate * warm_up * shapes[config.scheduler], limits.tiny)
    if not rates.max() <= limits.max:  # nan included
        raise InputError(
            f"learning_rate is {config.learning_rate} and {config.scheduler} takes it to {rates.max():g}; expected at "
            f"most {limits.max:g}, the largest float32"
        )
    return torch.from_numpy(rates.astype(np.float32))


class SGD(torch.optim.Optimizer):
    """Stochastic gradient descent with momentum whose learning rate may be a device tensor.

    The same update as torch.optim.SGD(momentum=...). That one passes a tensor learning rate as alpha=-lr, which reads
    it back to the host in every step (torch/optim/sgd.py, _single_tensor_sgd).
    """

    def __init__(self, params, lr, momentum: float, weight_decay: float = 0.0):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        assert closure is None, "closures are not supported"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                gradient = parameter.grad
                if group["weight_decay"]:
                    gradient = gradient.add(parameter, alpha=group["weight_decay"])
                velocity = self.state[parameter]["momentum_buffer"]
                velocity.mul_(group["momentum"]).add_(gradient)
                parameter.sub_(group["lr"] * velocity)


class Adam(torch.optim.Optimizer):
    """Adam, or with decoupled weight decay AdamW, whose learning rate may be a device tensor.

    The same update as torch.optim's. With capturable=True, which keeps the step count on the device, theirs counts and
    corrects the bias for every tensor, and in float32, whose rounding is 3e-5 of 1 - 0.999 (torch/optim/adam.py,
    _single_tensor_adam). Here once a group, by expm1; and one copy_ a tensor, because torch_xla 2.9.0 takes several
    times as long to trace any other in-place operation. The count is not called `step`: torch's load_state_dict leaves
    a state of that name on the host.
    """

    def __init__(self, params, lr, betas: tuple[float, float], decoupled: bool, weight_decay=0.0, eps=1e-8):
        super().__init__(params, dict(lr=lr, betas=betas, decoupled=decoupled, weight_decay=weight_decay, eps=eps))

    @torch.no_grad()
    def step(self, closure=None):
        assert closure is None, "closures are not supported"
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            count = self.state[group["params"][0]]["count"].add_(1)  # the one of the group
            correction1, correction2 = (-torch.expm1(count * (math.log(b) if b else -math.inf)) for b in group["betas"])
            size, root = -group["lr"] / correction1, correction2.sqrt()
            shrink = 1 - group["lr"] * group["weight_decay"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                gradient, state = parameter.grad, self.state[parameter]
                old = parameter
                if group["weight_decay"] and group["decoupled"]:
                    old = parameter * shrink
                elif group["weight_decay"]:
                    gradient = gradient + parameter * group["weight_decay"]
                # as torch writes them: other forms are rounded another way when step_if's choice is fused with them
                mean = torch.lerp(state["exp_avg"], gradient, 1 - beta1)
                square = torch.addcmul(state["exp_avg_sq"] * beta2, gradient, gradient, value=1 - beta2)
                state["exp_avg"].copy_(mean)
                state["exp_avg_sq"].copy_(square)
                parameter.copy_(old + mean * size / (square.sqrt() / root + group["eps"]))


def make_optimizer(config: TrainConfig, parameters) -> torch.optim.Optimizer:
    """The optimizer, with its state already there.

    State that is born in step 1 makes step 2 a second graph. The zeros are made on the host and sent, because zeros
    made on the device are a graph of their own; the step count is (1,) because torch_xla turns a host scalar () of 0 or
    1 into a constant instead of sending it. The step sets param_groups[...]["lr"] from learning_rates().
    """
    common = dict(lr=torch.tensor(config.learning_rate), weight_decay=config.weight_decay)
    if config.optimizer == "sgd":
        optimizer = SGD(parameters, momentum=config.momentum, **common)
        state = dict(momentum_buffer=torch.zeros_like)
    else:
        betas = (config.adam_beta1, config.adam_beta2)
        optimizer = Adam(parameters, betas=betas, decoupled=config.optimizer == "adamw", **common)
        state = dict(exp_avg=torch.zeros_like, exp_avg_sq=torch.zeros_like)
    for group in optimizer.param_groups:
        for p in group["params"]:
            # compile_for asks about shapes alone: zeros on the device are never computed there, so they take no memory
            like = torch.empty(p.shape, dtype=p.dtype, device=p.device if config.compile_for else "cpu")
            optimizer.state[p] = {name: make(like).to(p.device) for name, make in state.items()}
        if config.optimizer != "sgd":
            first = group["params"][0]
            optimizer.state[first]["count"] = torch.zeros(1).to(first.device)
    return optimizer


def main() -> int:
    parser = argparse.ArgumentParser(description="Print every preset, resolved: each value and where it came from.")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    as_json = parser.parse_args().json
    everything = {}
    for config_class, presets in PRESETS.items():
        for preset in presets:
            config, sources = resolve(config_class, preset)  # an invalid preset raises here
            values = dataclasses.asdict(config)
            everything.setdefault(config_class.__name__, {})[preset] = {
                name: {"value": value, "source": sources[name]} for name, value in values.items()
            }
            if not as_json:
                print(f"{config_class.__name__} --preset {preset}: valid")
                for name, value in values.items():
                    print(f"  {name:20} {value!s:28} {'' if sources[name] == 'default' else sources[name]}".rstrip())
                print()
    if as_json:
        print(json.dumps(everything, indent=2))
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # quiet into `| head`
    sys.exit(main())
