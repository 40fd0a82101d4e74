"""The options that every training script takes. Imports no torch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from tpu_utils.options.fields import FREE, NoEffect, Range, Seldom
from tpu_utils.options.parsing import Options, names_a_place

if TYPE_CHECKING:
    from tpu_utils.base.hardware import Topology

# every preset made for a TPU has these values
ON_TPU = dict(device="tpu", resume="auto")
NOT_DOWNLOADED = ("digits", "synthetic", "stripes", "text", "tokens", "chat", "stream")
NO_STEPS = NoEffect("scheduler", "constant", "linear", "cosine", "wsd")
NO_WSD = NoEffect("scheduler", "constant", "linear", "cosine", "step")
NO_DECAY = NoEffect("scheduler", "constant", "step")


@dataclass(frozen=True)
class RunOptions:
    """What to run, on which device, and where to store it."""

    preset: Annotated[str, FREE] = "quick_test"
    """Named set of option values; `python config.py` prints all of them."""
    device: Annotated[Literal["auto", "tpu", "gpu", "cpu"], FREE] = "auto"
    """auto uses a TPU if one is attached, else, without torch_xla, an NVIDIA GPU, else the CPU. Presets made for TPU
    set tpu."""
    seed: Annotated[int, Range("[0, 4294967295]")] = 0
    """Random seed of the initial weights, the order of the examples and their augmentation."""
    run_dir: Annotated[str, FREE] = ""
    """Directory of the run: a folder or gs://BUCKET/FOLDER. Empty: a new folder runs/PRESET_DATE_TIME."""
    resume: Annotated[Literal["never", "auto", "must"], FREE] = "never"
    """never refuses a run_dir that holds a run; auto resumes if there is a checkpoint; must needs one. With auto and
    must, options that are not given keep the values of the run, unless --preset is given."""
    compile_for: Annotated[str, FREE] = ""
    """TPU slice, such as v5litepod-8: compile the first step for it, print a report and do not train."""
    debug: Annotated[bool, FREE, Seldom()] = False
    """Show the traceback of an error instead of its message alone."""


@dataclass(frozen=True)
class DataOptions:
    """Where the data is stored."""

    data_dir: Annotated[str, FREE] = "datasets"
    """Folder of the data files."""
    download: Annotated[bool, FREE, NoEffect("dataset", *NOT_DOWNLOADED)] = False
    """Allow downloading the data set into data_dir."""


@dataclass(frozen=True)
class OptimizerOptions:
    """The optimizer and its learning rate over the run."""

    global_batch_size: Annotated[int, Range("[1, inf)")] = 64
    """Examples per optimizer step, over all devices and hosts."""
    optimizer: Literal["sgd", "adam", "adamw"] = "adamw"
    """Optimizer that updates the weights."""
    learning_rate: Annotated[float, Range("(0, 3e38]")] = 1e-3
    """Peak learning rate."""
    momentum: Annotated[float, Range("[0, 1)"), NoEffect("optimizer", "adam", "adamw")] = 0.9
    """Momentum of SGD."""
    adam_beta1: Annotated[float, Range("[0, 1)"), NoEffect("optimizer", "sgd"), Seldom()] = 0.9
    """Decay rate of the mean of the gradients in Adam and AdamW."""
    adam_beta2: Annotated[float, Range("[0, 1)"), NoEffect("optimizer", "sgd")] = 0.999
    """Decay rate of the mean of the squared gradients in Adam and AdamW."""
    weight_decay: Annotated[float, Range("[0, inf)")] = 0.0
    """Weight decay. AdamW decouples it from the gradient; SGD and Adam add it to the gradient."""
    scheduler: Literal["constant", "linear", "cosine", "step", "wsd"] = "cosine"
    """Learning rate schedule. wsd: warm-up, constant, then linear decay over the last decay_fraction of the steps."""
    warmup_steps: Annotated[int, Range("[0, inf)")] = 0
    """Steps of linear warm-up: step s, counted from 0, runs at (s + 1) / warmup_steps of the learning rate."""
    decay_every: Annotated[int, Range("[1, inf)"), NO_STEPS] = 1000
    """Number of steps between two decays of the step scheduler."""
    decay_factor: Annotated[float, Range("(0, inf)"), NO_STEPS] = 0.5
    """Factor by which each decay of the step scheduler multiplies the learning rate."""
    decay_fraction: Annotated[float, Range("(0, 1]"), NO_WSD] = 0.2
    """Fraction of the steps in which the wsd scheduler decays the learning rate."""
    final_learning_rate_fraction: Annotated[float, Range("[0, inf)"), NO_DECAY] = 0.0
    """Final learning rate of linear, cosine and wsd, as a fraction of learning_rate."""
    on_nonfinite: Annotated[Literal["stop", "skip"], FREE, Seldom()] = "stop"
    """If a loss or gradient is not finite: stop the run at the next log line, or skip the update of that step."""


@dataclass(frozen=True)
class SpeedOptions:
    """Speed and numerical precision."""

    optimization_level: Annotated[Literal["conservative", "balanced", "aggressive"], FREE] = "balanced"
    """Sets precision, matmul_precision and prefetch_batches together; each can also be set by itself."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Data type of activations and matrix products. Weights and optimizer state are always float32."""
    matmul_precision: Annotated[Literal["default", "high", "highest"], Seldom()] = "default"
    """Bfloat16 passes per float32 matrix product on TPU: default one, high three, highest six. No effect on CPU."""
    prefetch_batches: Annotated[int, Range("[1, inf)"), FREE, Seldom()] = 4
    """Number of batches to send to the device ahead of the step."""
    compile: Annotated[Literal["auto", "inductor", "eager"], FREE, Seldom()] = "auto"
    """Without torch_xla: inductor compiles the graph of a step, eager runs it operation by operation. auto: inductor on
    a GPU, eager on the CPU."""
    deterministic: Annotated[bool, FREE, Seldom()] = True
    """On a GPU: kernels that give the same bits each time, so that a resumed run ends bit-identical."""
    windowed_einsum: Annotated[bool, FREE, Seldom("compile_for")] = False
    """Let the TPU compiler gather large sharded weights in pieces, between smaller matrix products."""
    compiler_options: Annotated[str, FREE, Seldom("compile_for")] = ""
    """More options for the TPU compiler, "NAME=VALUE NAME=VALUE". Options in LIBTPU_INIT_ARGS take precedence."""


@dataclass(frozen=True)
class LogOptions:
    """What the run writes, and how often."""

    log_every: Annotated[int, Range("[1, 1000000]")] = 20
    """Steps between two log lines. Only log lines, evaluations and checkpoints read from the device."""
    save_every: Annotated[int, Range("[1, inf)"), FREE] = 200
    """Steps between two checkpoints. The last step is always saved."""
    keep_checkpoints: Annotated[int, Range("[1, inf)"), FREE] = 3
    """Number of newest checkpoints to keep."""
    save_memory_every: Annotated[int, Range("[0, inf)"), FREE, Seldom()] = 0
    """Steps between two checkpoints in host memory, from which a restarted run can go on. 0: none."""
    memory_dir: Annotated[str, FREE, Seldom("save_memory_every")] = "/dev/shm"
    """File system in memory where save_memory_every keeps its checkpoints, in a folder of their own."""
    keep_best: Annotated[bool, FREE] = False
    """Also keep the checkpoint of the best evaluation: the highest accuracy, or the lowest validation_loss."""
    tensorboard: Annotated[bool, FREE] = True
    """Write TensorBoard events to run_dir/tensorboard."""
    profile_steps: Annotated[str, FREE, Seldom()] = ""
    """Steps to trace, as FIRST:LAST without LAST: 10:13 traces steps 10, 11 and 12."""
    strict: Annotated[bool, FREE, Seldom()] = False
    """Stop at a step that reads from the device or sends it more than the batch, and name the line of code."""
    stall_seconds: Annotated[int, Range("[0, 100000000]"), FREE, Seldom()] = 600
    """Print all stacks after this many seconds without progress (start-up and compiling: six times). 0: never."""


@dataclass(frozen=True)
class TrainConfig(
    LogOptions, SpeedOptions, OptimizerOptions, DataOptions, RunOptions, Options
):  # the fields of the last base class come first
    """Options of every training script."""

    levels: ClassVar[dict[str, dict[str, Any]]] = {
        "conservative": dict(precision="float32", matmul_precision="highest", prefetch_batches=2),
        "balanced": dict(precision="float32", matmul_precision="default", prefetch_batches=4),
        "aggressive": dict(precision="bfloat16", matmul_precision="default", prefetch_batches=8),
    }
    # a run of one image script may be resumed by another; compile_cache and strategy are of older versions
    free_elsewhere = frozenset({"shard_parameters", "num_virtual_devices", "peers_timeout", "peers_secret"})
    free_elsewhere |= {"compile_cache", "strategy"}

    @property
    def tpu_options(self) -> dict[str, str]:
        """Options for the TPU compiler, {name: value}."""
        from tpu_utils.options.compiler_flags import NO_WINDOWED_EINSUM, parse_compiler_options  # only for a TPU

        return ({} if self.windowed_einsum else NO_WINDOWED_EINSUM) | parse_compiler_options(self.compiler_options)

    @property
    def topology(self) -> "Topology":
        """The slice of compile_for."""
        from tpu_utils.base.hardware import parse_topology  # only where it compiles ahead of time

        return parse_topology(self.compile_for)

    @property
    def profile_range(self) -> tuple[int, int]:
        """First step to trace and the step after the last, of profile_steps FIRST:LAST."""
        first, _, last = self.profile_steps.partition(":")
        if not (first.isdecimal() and last.isdecimal() and int(first) < int(last)):
            raise ValueError(
                f"profile_steps is {self.profile_steps!r}; expected FIRST:LAST with FIRST < LAST, for example 10:13"
            )
        return int(first), int(last)

    def problems(self) -> list[str]:
        problems = []
        if self.resume == "must" and not self.run_dir:
            problems.append("resume is must but run_dir is empty; name the folder of the run to resume with --run_dir")
        if not names_a_place(self.run_dir):
            problems.append(f"run_dir is {self.run_dir!r}; expected a local folder or gs://BUCKET/FOLDER")
        for name, parse in (
            ("", lambda: self.profile_steps and self.profile_range),
            ("compile_for: ", lambda: self.compile_for and self.topology),
            ("", lambda: self.compiler_options and self.tpu_options),
        ):
            try:
                parse()
            except ValueError as error:
                problems.append(f"{name}{error}")
        return problems


@dataclass(frozen=True)
class HostOptions:
    """Options for a slice with several hosts."""

    peers_timeout: Annotated[int, Range("[1, 1000000]"), FREE, Seldom()] = 300
    """Seconds to wait at the start for the other hosts of a pod slice."""
    peers_secret: Annotated[str, FREE, Seldom()] = ""
    """File with a secret shared by all hosts of a slice, mode 600. Empty: peers-secret of the VM's metadata, if any."""


@dataclass(frozen=True)
class DeviceOptions(HostOptions):
    """Virtual devices, to try out a run on several devices."""

    num_virtual_devices: Annotated[int, Range("[0, 127]"), FREE] = 0
    """Number of devices that the XLA CPU backend simulates. CPU only. 0: CPU_NUM_DEVICES, or one."""
