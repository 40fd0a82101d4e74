"""Each preset's step: what the compiler estimates, and what the clock says."""

import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpu_calibration.bench import Bench, Cannot
from tpu_compiler.report import Report
from tpu_compiler.search import OUTPUT_VARIABLE
from tpu_utils.errors import TrainingError
from tpu_utils.inputs import read_json


@dataclass(frozen=True)
class Step:
    """A training script's step. {batch} in its options: 8 sequences for each device. for_tpu: too much for a CPU."""

    name: str
    script: str
    options: str
    for_tpu: bool = False


FIFTY = "--warmup_steps=2 --num_steps=50 --eval_batches=1"
BYTES = "--dataset=synthetic --vocab_size=257 --global_batch_size={batch}"
GPT2 = f"--preset=production --dataset=synthetic --vocab_size=50257 {FIFTY}"
GPT2_8 = f"{GPT2} --global_batch_size={{batch}} --gradient_accumulation_steps=1"
MADE = "--warmup_steps=2 --dataset="  # data that needs no download, shaped for the preset's model
STEPS = (
    Step("mnist quick_test", "simple_mnist_tpu.py", f"{MADE}digits --num_epochs=3"),
    Step("mnist production", "simple_mnist_tpu.py", f"--preset=production {MADE}synthetic --num_epochs=1"),
    Step("mnist distributed", "distributed_mnist_tpu.py", f"--preset=distributed {MADE}synthetic --num_epochs=3"),
    Step("cifar production", "resnet_cifar_tpu.py", f"--preset=production {MADE}stripes --num_epochs=2", True),
    Step("cifar distributed", "resnet_cifar_tpu.py", f"--preset=distributed {MADE}stripes --num_epochs=6", True),
    Step("transformer quick_test", "transformer_tpu.py", FIFTY),
    Step("transformer development", "transformer_tpu.py", f"--preset=development {BYTES} {FIFTY}"),
    Step("gpt2 124M", "transformer_tpu.py", GPT2_8, True),
    Step("gpt2 124M flash", "transformer_tpu.py", f"{GPT2_8} --attention=flash", True),
    Step("gpt2 124M heads of 128", "transformer_tpu.py", f"{GPT2_8} --num_heads=6", True),
    Step("gpt2 124M scan remat", "transformer_tpu.py", f"{GPT2_8} --scan_layers --remat", True),
    Step("gpt2 350M scan remat", "transformer_tpu.py", f"{GPT2_8} --model_size=350M --scan_layers --remat", True),
    Step("gpt2 production", "transformer_tpu.py", GPT2, True),
    Step("gpt2 distributed", "transformer_tpu.py", GPT2.replace("production", "distributed"), True),
)


def left_out(bench: Bench, step: Step) -> None:
    if step.for_tpu and bench.machine.device == "cpu":
        raise Cannot("made for a TPU: a step would take minutes on this CPU")


def estimate(bench: Bench, step: Step) -> dict[str, Any]:
    """The compiler's figures for the step, compiled ahead of time on the host: the chip stays free."""
    left_out(bench, step)
    if not bench.machine.slice:
        raise Cannot(f"the compiler has no slice of {bench.machine.num_devices} devices of {bench.machine.chip}")
    with tempfile.TemporaryDirectory() as folder:
        command = [step.script, *bench.options(step.options), f"--compile_for={bench.machine.slice}"]
        bench.child(f"estimate {step.name}", command, (0, 1), **{OUTPUT_VARIABLE: folder})
        report = Report(**read_json(Path(folder, "report.json"), "a report of the compiler", 1 << 24))
    names = "fits reason estimated_ms estimated_mfu peak_bytes limit_bytes communication_lower_bound_ms collectives"
    return {name: getattr(report, name) for name in f"{names} operations_without_estimate compile_seconds".split()}


def run_step(bench: Bench, step: Step) -> dict[str, Any]:
    """The step, run: the median over log intervals of 5 steps, without the first, and their range."""
    left_out(bench, step)
    asked = bench.figures(f"estimate {step.name}")
    if asked and not asked["fits"]:
        raise Cannot(f"does not fit {bench.machine.slice}: {asked['reason']}")
    summary, lines = bench.train(f"step {step.name}", step.script, f"{step.options} --log_every=5 --save_every=100000")
    timed = [line for line in lines if line["kind"] == "train" and line["step_seconds"] is not None][1:]
    if len(timed) < 3:
        raise TrainingError(f"{len(timed)} intervals were timed; expected 3 or more")
    ms, mfu = [line["step_seconds"] * 1e3 for line in timed], [line["mfu"] for line in timed if line["mfu"]]
    figures = dict(ms=statistics.median(ms), ms_low=min(ms), ms_high=max(ms), intervals=len(ms), steps=summary["steps"])
    figures |= {"mfu": statistics.median(mfu) if mfu else None, "hbm_peak_bytes": summary["hbm_peak_bytes"]}
    return figures | {f"{phase}_seconds": summary["goodput"][phase] for phase in ("start_up", "compile", "checkpoint")}
