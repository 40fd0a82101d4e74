"""What README promises, tried on the device itself. Each returns figures, or raises TrainingError: not kept."""

import statistics
import time
from typing import Any

from tools.on_chip.bench import Bench, Cannot, compare, hold, last_object, losses_in, results_in
from tools.on_chip.steps import GPT2_8
from tpu_utils.base.files import read_json
from tpu_utils.base.hardware import GENERATIONS, GIB

TINY = "--warmup_steps=2 --eval_batches=1 --global_batch_size={batch}"
TINIER = f"{TINY} --num_layers=1 --embedding_dim=32 --sequence_length=32"  # the promises hold at any size
DIGITS_TESTED = 360  # the held-out fifth
BAND = 1e-5  # README: float32 losses over 20 steps, whatever the devices
FLASH_BAND = 5e-3  # bfloat16 against float32, as the tests of transformer_tpu.py allow


# `python SCRIPT OPTIONS`, and afterwards how often something was read from the device
COUNT_READS = """
import runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    from tpu_utils.device import transfers_from_device
    print(transfers_from_device())
"""


def no_reads(bench: Bench) -> dict[str, Any]:
    """Twice as many steps between as many log lines read as often from the device; one graph, nothing uploaded."""
    reads = []
    for steps in (20, 40):
        run_dir, name = bench.run_dir("no_reads"), f"promise no_reads {steps}"
        every = " ".join(f"--{each}={steps}" for each in ("num_steps", "log_every", "eval_every", "save_every"))
        command = bench.training("transformer_tpu.py", f"{TINIER} {every}", run_dir)
        reads.append(int(bench.child(name, ["-c", COUNT_READS, *command]).split()[-1]))
        summary, _ = results_in(run_dir)
        graphs, uploads = summary["train_graphs"], summary["host_to_device_uploads_per_step"]
        hold(graphs == 1 and uploads == 0, f"{graphs} graphs and {uploads} uploads a step, expected 1 and 0")
    hold(reads[0] == reads[1], f"20 steps read {reads[0]} times from the device, 40 steps {reads[1]} times")
    return dict(train_graphs=1, uploads_per_step=0, reads_of_20_steps=reads[0], reads_of_40_steps=reads[1])


def resume(bench: Bench) -> dict[str, Any]:
    """Killed by SIGKILL and resumed, a run ends with the bits of one that was not; seconds to save and to restore."""
    large = f"{GPT2_8} " if bench.machine.device == "tpu" else f"{TINIER} "
    options = large + "--num_steps=60 --log_every=5 --save_every=20 --eval_every=60"
    bench.train("resume whole", "transformer_tpu.py", options)
    whole, killed = bench.runs / "resume_whole", bench.run_dir("resume killed")
    command = bench.training("transformer_tpu.py", f"{options} --resume=auto", killed)
    process, deadline = bench.start("resume first", command), time.monotonic() + bench.time_limit
    while process.poll() is None and not list(killed.glob("checkpoints/*/done")) and time.monotonic() < deadline:
        time.sleep(0.01)
    ended = process.poll()
    process.kill()
    process.wait()
    hold(ended is None, f"the run to be killed ended by itself with {ended}")
    bench.child("resume killed", command)
    (first, lines), (second, resumed) = results_in(whole), results_in(killed)
    markers = [read_json(run_dir / "checkpoints/step_00000060/done", "a marker") for run_dir in (whole, killed)]
    tensors = [{n: f for n, f in m["files"].items() if n.endswith(".safetensors")} for m in markers]
    losses = losses_in(lines), losses_in(resumed)
    hold(tensors[0] == tensors[1], "the last checkpoints differ")
    hold(losses[0] == losses[1], f"the losses differ: {losses[0]} and {losses[1]}")
    waits = [line["wait_seconds"] for line in lines if line["kind"] == "checkpoint"]
    return dict(
        checkpoint_bytes=sum(file["bytes"] for file in tensors[0].values()),
        save_wait_seconds=statistics.median(waits),
        start_up_seconds=first["goodput"]["start_up"],
        restore_seconds=second["goodput"]["restore"],
        compile_seconds=first["goodput"]["compile"],
    )


def spmd(bench: Bench) -> dict[str, Any]:
    """One SPMD program over all devices has the losses of one device. The recipe of docs/many_devices.md keeps the
    inputs of ReLUs away from 0, where rounding decides their sign."""
    if bench.machine.num_devices == 1:
        raise Cannot("one device: nothing to compare; on the CPU CPU_NUM_DEVICES=4 makes four")
    options = "--num_epochs=1 --log_every=1 --matmul_precision=highest --seed=3 --learning_rate=2e-3 --warmup_steps=10"
    names = {"one device": "simple_mnist_tpu.py", "all devices": "distributed_mnist_tpu.py"}
    runs = [bench.train(f"spmd {name}", script, options) for name, script in names.items()]
    one, many = (losses_in(lines)[:20] for _, lines in runs)
    return compare(one, many, BAND) | {"devices": bench.machine.num_devices}


def flash(bench: Bench) -> dict[str, Any]:
    """Flash attention has the losses of plain attention."""
    if bench.machine.device == "cpu":
        raise Cannot("the flash kernels run on TPU only")
    options = f"{TINY} --num_steps=20 --log_every=1 --sequence_length=256 --optimization_level=aggressive"
    names = {"flash plain": f"{options} --attention=plain", "flash flash": f"{options} --attention=flash"}
    plain, kernels = (bench.train(name, "transformer_tpu.py", words)[1] for name, words in names.items())
    return compare(losses_in(plain), losses_in(kernels), FLASH_BAND)


def evaluation(bench: Bench) -> dict[str, Any]:
    """Every example counts once, whether the last batch is short by one or by most of it."""
    options = "--num_epochs=1 --warmup_steps=2 --matmul_precision=highest --eval_batch_size="
    right = [
        bench.train(f"evaluation {size}", "simple_mnist_tpu.py", f"{options}{size}")[0]["test_accuracy"] * DIGITS_TESTED
        for size in (512, 359)
    ]
    hold(all(abs(count - round(count)) < 1e-3 for count in right), f"{right} of {DIGITS_TESTED} examples were right")
    hold(abs(right[0] - right[1]) < 1e-3, f"batches of 512 count {right[0]:g} right, batches of 359 {right[1]:g}")
    return dict(examples=DIGITS_TESTED, right=round(right[0]))


READ_TRACE = """
import json, sys
from jax.profiler import ProfileData
planes, steps = [], []
for plane in ProfileData.from_file(sys.argv[1]).planes:
    planes.append(plane.name)
    steps += [dict(e.stats).get("step_num") for line in plane.lines for e in line.events if e.name == "train"]
print(json.dumps({"planes": planes, "steps": sorted(step for step in steps if step is not None)}))
"""


def trace(bench: Bench) -> dict[str, Any]:
    """--profile_steps leaves a trace that can be read, with the steps asked for and what the device did."""
    run_dir = bench.run_dir("trace")
    options = f"{TINIER} --num_steps=20 --log_every=5 --profile_steps=10:13"
    bench.child("promise trace", bench.training("transformer_tpu.py", options, run_dir))
    (path,) = run_dir.glob("tensorboard/plugins/profile/*/*.xplane.pb")
    read = bench.child("trace read", ["-c", READ_TRACE, str(path)], JAX_PLATFORMS="cpu")
    found = last_object(read)
    hold(sorted(set(found["steps"])) == [10, 11, 12], f"the trace has steps {found['steps']}, expected 10, 11 and 12")
    of_tpu = [name for name in found["planes"] if name.startswith("/device:TPU")]
    hold(bench.machine.device == "cpu" or bool(of_tpu), f"the trace has no plane of a TPU: {found['planes']}")
    return dict(bytes=path.stat().st_size, planes=found["planes"])


def memory(bench: Bench) -> dict[str, Any]:
    """The runtime told the peak memory of a step on one device, and it is within the chip's."""
    if bench.machine.device == "cpu":
        raise Cannot("the runtime does not tell on the CPU")
    found = (bench.figures("step simple_mnist quick_test") or {}).get("hbm_peak_bytes")
    limit = GENERATIONS[bench.machine.chip].hbm_gib * GIB
    hold(found is not None and 0 < found <= limit, f"peak memory is {found}, expected 1 to {limit} bytes")
    return dict(hbm_peak_bytes=found)


PROMISES = dict(
    no_reads=no_reads, resume=resume, spmd=spmd, flash=flash, evaluation=evaluation, trace=trace, memory=memory
)
"""In the order they are tried."""
