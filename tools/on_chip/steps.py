"""Each preset's step: what is predicted by the compiler, and what the clock says."""

import statistics
import struct
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tools.on_chip.bench import Bench, Cannot
from tpu_compiler.decide.search import OUTPUT_VARIABLE
from tpu_compiler.estimate.report import Report
from tpu_utils.base.errors import TrainingError
from tpu_utils.base.files import read_json
from tpu_utils.base.writing import write_atomically


@dataclass(frozen=True)
class Step:
    """A training script's step. In its options {batch} is 8 examples for each device, {devices} one, {steps} 50, or 20
    on a CPU, and {mnist} a folder with images of MNIST's size. on_cpu: it takes seconds there."""

    name: str
    script: str
    options: str
    on_cpu: bool = False


NOISE = "--dataset=mnist --data_dir={mnist}"
MNIST = {  # by preset; 44 to 50 steps
    "quick_test": "--num_epochs=2",
    "development": f"{NOISE} --num_epochs=2",
    "production": f"{NOISE} --num_epochs=1",
    "distributed": f"{NOISE} --num_epochs=4",
}
CIFAR_EPOCHS = {"quick_test": 1, "development": 1, "production": 1, "distributed": 6}  # 64, 32, 32 and 48 steps
LENGTH = "--warmup_steps=2 --num_steps={steps} --eval_batches=1"
BYTES = "--dataset=synthetic --vocab_size=257 --global_batch_size={batch}"  # 12, the preset's, does not divide by 8
GPT2 = f"--preset=production --dataset=synthetic --vocab_size=50257 {LENGTH}"
LLAMA3 = "--preset=finetune_8B --dataset=synthetic --model_size=llama3_8B --vocab_size=128256"
QWEN3 = "--preset=finetune --dataset=synthetic --model_size=qwen3_0.6B --vocab_size=151936"
GPT2_8 = f"{GPT2} --global_batch_size={{batch}} --gradient_accumulation_steps=1"
STEPS = (
    *(
        Step(f"{name} {preset}", f"{name}_tpu.py", f"--preset={preset} --warmup_steps=2 {data}", preset == "quick_test")
        for name in ("simple_mnist", "distributed_mnist")
        for preset, data in MNIST.items()
    ),
    *(  # stripes: generated images of CIFAR-10's size
        Step(
            f"resnet_cifar {preset}",
            "resnet_cifar_tpu.py",
            f"--preset={preset} --warmup_steps=2 --dataset=stripes --num_epochs={epochs}",
        )
        for preset, epochs in CIFAR_EPOCHS.items()
    ),
    Step("transformer quick_test", "transformer_tpu.py", LENGTH, True),
    Step("transformer development", "transformer_tpu.py", f"--preset=development {BYTES} {LENGTH}"),
    Step("transformer production", "transformer_tpu.py", GPT2),
    Step("transformer distributed", "transformer_tpu.py", GPT2.replace("production", "distributed")),
    Step("transformer finetune", "transformer_tpu.py", f"{QWEN3} {LENGTH} --global_batch_size={{batch}}"),
    Step("transformer finetune_8B", "transformer_tpu.py", f"{LLAMA3} {LENGTH} --global_batch_size={{devices}}"),
    Step("gpt2 124M", "transformer_tpu.py", GPT2_8),
    Step("gpt2 124M flash", "transformer_tpu.py", f"{GPT2_8} --attention=flash"),
    Step("gpt2 124M heads of 128", "transformer_tpu.py", f"{GPT2_8} --num_heads=6"),
    Step("gpt2 124M scan remat", "transformer_tpu.py", f"{GPT2_8} --scan_layers --remat"),
    Step("gpt2 350M scan remat", "transformer_tpu.py", f"{GPT2_8} --model_size=350M --scan_layers --remat"),
)
"""Every preset of these scripts, and variants of GPT-2."""


def write_mnist(folder: Path) -> None:
    """3,200 training images and 512 test images of noise, in MNIST's size and layout: its steps need no download."""
    random = np.random.default_rng(0)
    for part, count in (("train", 3200), ("t10k", 512)):
        for kind, shape in (("images-idx3", (count, 28, 28)), ("labels-idx1", (count,))):
            content = random.integers(0, 10, shape, np.uint8)
            header = struct.pack(f">{1 + len(shape)}I", 0x0800 + len(shape), *shape)
            path = folder / "MNIST" / "raw" / f"{part}-{kind}-ubyte"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, header + content.tobytes())


def left_out(bench: Bench, step: Step) -> None:
    if bench.machine.device == "cpu" and not step.on_cpu:
        raise Cannot("too large for a rehearsal on a CPU")


def estimate(bench: Bench, step: Step) -> dict[str, Any]:
    """The compiler's figures for the step, compiled ahead of time on the host: the chip stays free."""
    left_out(bench, step)
    if not bench.machine.slice:
        raise Cannot(f"the compiler has no slice of {bench.machine.num_devices} devices of {bench.machine.chip}")
    with tempfile.TemporaryDirectory() as folder:
        path, name = Path(folder, "report.json"), f"estimate {step.name}"
        command = [step.script, *bench.options(step.options), f"--compile_for={bench.machine.slice}"]
        try:
            bench.child(name, command, **{OUTPUT_VARIABLE: folder})
        except TrainingError:
            if not path.exists():  # else exit code 1 is that of a step that does not fit
                raise
        report = Report(**read_json(path, "a report of the compiler", 1 << 24))
    names = "fits reason predicted_ms predicted_mfu predicted_ms_all_hidden predicted_ms_nothing_hidden estimated_ms "
    names += "ruled_ms peak_bytes limit_bytes communication_lower_bound_ms collectives operations_without_estimate"
    return {name: getattr(report, name) for name in f"{names} compile_seconds".split()}


def run_step(bench: Bench, step: Step) -> dict[str, Any]:
    """The step, run: the median over log intervals, without the first, and their range."""
    left_out(bench, step)
    asked = bench.figures(f"estimate {step.name}")
    if asked and not asked["fits"]:
        raise Cannot(f"does not fit {bench.machine.slice}: {asked['reason']}")
    every = 8 if bench.machine.device == "tpu" else 5  # a rehearsal has fewer steps
    options = f"{step.options} --log_every={every} --save_every=100000"
    summary, lines = bench.train(f"step {step.name}", step.script, options)
    timed = [line for line in lines if line["kind"] == "train" and line["step_seconds"] is not None][1:]
    if len(timed) < 3:
        raise TrainingError(f"{len(timed)} intervals were timed; expected 3 or more")
    ms, mfu = [line["step_seconds"] * 1e3 for line in timed], [line["mfu"] for line in timed if line["mfu"]]
    figures = dict(ms=statistics.median(ms), ms_low=min(ms), ms_high=max(ms), intervals=len(ms), steps=summary["steps"])
    for name in ("host", "data_wait"):
        figures[f"{name}_ms"] = statistics.median(line[f"{name}_seconds"] * 1e3 for line in timed)
    figures |= {"mfu": statistics.median(mfu) if mfu else None, "hbm_peak_bytes": summary["hbm_peak_bytes"]}
    return figures | {f"{phase}_seconds": summary["goodput"][phase] for phase in ("start_up", "compile", "checkpoint")}
