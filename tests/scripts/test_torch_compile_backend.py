"""Scripts on both backends, unchanged: torch_xla and torch.compile. The simplest one is a copy.

The environment of the second is made of requirements-compile.txt, once for all tests here, and is then removed. There
is no TPU: torch runs the one graph that Dynamo has made.
"""

import csv
import json
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import numpy as np
import pytest
import torch
from processes import ROOT, run
from run_files import assert_identical, losses_in, read_lines, state_in, summary_in

REQUIREMENTS = ROOT / "requirements-compile.txt"
NEEDED_GIB = 10
"""With the libraries of CUDA, which PyTorch's wheels for Linux bring along."""
OPTIONS = "--device cpu --dataset digits --num_epochs 1 --global_batch_size 70 --warmup_steps 5 --log_every 1"
OPTIONS = (*OPTIONS.split(), "--save_every", "10", "--keep_checkpoints", "9")
OPTIONS += ("--channels", "4")  # of 7 million activations one is 9e-9, and its sign, so its gradient, is rounding
TOLERANCE = 1e-5
IMAGES = "--device cpu --dataset stripes --depth 8 --width 8 --global_batch_size 500 --num_epochs 1 --log_every 1"
IMAGES += " --warmup_steps 2"
LANGUAGE = (
    "--device cpu --num_steps 6 --warmup_steps 2 --log_every 1 --eval_every 6 --save_every 3 --keep_checkpoints 9"
)
LANGUAGE += " --num_layers 1 --embedding_dim 64 --global_batch_size 8 --dropout 0.1 --gradient_accumulation_steps 2"
LANGUAGE += " --optimizer muon --remat --no_tensorboard"
PROCESSES = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=4")

REFUSED = """import os
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # as the command line of a script does for --device cpu
import torch
from tpu_utils.base.process import Goodput
from tpu_utils.base.errors import InputError, RecompileError
from tpu_utils.device import compile_step
from tpu_utils.step.graphs import StepWatch, one_graph

@one_graph
def double(x):
    return x * 2

@one_graph
def reads(x):
    return x * x.sum().item()

@one_graph
def asks(x):
    return x if x.sum() > 0 else -x

@one_graph  # by itself, without a run
def alone(x):
    return x * 3

@compile_step
def leaves(model, x):  # by torch 2.13 gradients behind
    model(x).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.01 * parameter.grad
            parameter.grad = None

watch = StepWatch([double, reads, asks], Goodput())
for step in (double, alone):
    step(torch.ones(2)), step(torch.ones(2))
longer = torch.ones(3)
calls = [(step, longer) for step in (double, reads, asks, alone)]
for step, *given in (*calls, (leaves, torch.nn.Linear(3, 2), longer)):
    try:
        step(*given)
    except (InputError, RecompileError) as error:
        print(error)
"""

WHAT_A_TORCH_DOES = """import os
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
import torch
from tpu_utils.base.errors import InputError, RecompileError
from tpu_utils.device import compile_step

class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return (x.float() * weight).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return (grad.float() * weight).to(x.dtype), (grad.float() * x).sum(0)

def update(model, gradients):
    with torch.no_grad():
        for parameter, gradient in zip(model.parameters(), gradients):
            parameter -= 0.1 * gradient

def backward(model, x):
    loss = torch.nn.functional.layer_norm(model(x), (4,)).square().mean() + model(x).exp().mean()
    loss.backward()
    update(model, [parameter.grad for parameter in model.parameters()])
    model.zero_grad(set_to_none=True)
    return loss.detach()

def own_function(model, x):
    loss = Scaled.apply(model[0](x), model[1].weight[0]).square().mean()
    loss.backward()
    update(model, [p.grad if p.grad is not None else 0 * p for p in model.parameters()])
    model.zero_grad(set_to_none=True)
    return loss.detach()

def gradients_asked_for(model, x):
    update(model, torch.autograd.grad(model(x).square().mean(), list(model.parameters())))

for step in (backward, own_function, gradients_asked_for):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    try:
        compile_step(step)(model, torch.randn(3, 4))
        print("right")
    except (InputError, RecompileError):
        print("refused")
"""


class TorchCompile:
    """A Python with these requirements and no torch_xla, and the folder that the script was copied to."""

    def __init__(self, folder: Path, requirements: Path):
        self.mine, self.python = folder / "mine", folder / "venv" / "bin" / "python"
        done = run("tools.copy_example", "simple_mnist_tpu.py", self.mine)
        assert done.returncode == 0, done.stderr
        if (free := shutil.disk_usage(folder).free / 2**30) < NEEDED_GIB:
            pytest.skip(f"{folder} has {free:.1f} GiB free; an environment with another torch may need {NEEDED_GIB}")
        venv.create(folder / "venv")
        # those of the packages of this environment have not these
        environment = {n: v for n, v in os.environ.items() if n not in ("PIP_NO_INDEX", "PIP_FIND_LINKS")}
        command = [sys.executable, "-m", "pip", "--python", self.python, "install", "-q", "--no-input"]
        command += ["--disable-pip-version-check", "--no-compile", "-r", requirements]
        done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            pytest.skip(f"pip cannot install {requirements.name}: {done.stderr.strip().splitlines()[-1]}")

    def run(self, *arguments, code: int = 0, folder: Path | None = None) -> str:
        """Its output; of another exit code its errors."""
        environment = {n: v for n, v in os.environ.items() if not n.startswith(("PYTHON", "PJRT", "XLA", "TPU"))}
        environment |= {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "OMP_NUM_THREADS": "1"}  # torchrun loads torch_tpu too
        command = [str(argument) for argument in (self.python, *arguments)]
        where = folder or self.mine
        done = subprocess.run(command, cwd=where, env=environment, capture_output=True, text=True, timeout=900)
        assert done.returncode == code, done.stderr
        return done.stderr if code else done.stdout

    def succeeds(self, *arguments) -> bool:
        try:
            self.run(*arguments)
        except AssertionError:
            return False
        return True

    def train(self, backend: str, run_dir, *options) -> None:
        """The copy, by this Python or by that of the tests."""
        arguments = (self.mine / "simple_mnist_tpu.py", *OPTIONS, "--run_dir", run_dir, *options)
        if backend == "torch_compile":
            assert "no TPU, no torch_xla" in self.run(*arguments)
            return
        done = run(*arguments)
        assert done.returncode == 0, done.stderr


OLDER = "2.11.0"


@pytest.fixture(scope="module")
def older(tmp_path_factory):
    """With another torch: gigabytes."""
    folder = tmp_path_factory.mktemp("older")
    kept = [line for line in REQUIREMENTS.read_text().splitlines() if not re.match("torch|libtpu", line)]
    (folder / "requirements.txt").write_text("\n".join([f"torch=={OLDER}", *kept]))
    yield TorchCompile(folder, folder / "requirements.txt")
    shutil.rmtree(folder / "venv")


@pytest.fixture(scope="module")
def torch_compile(tmp_path_factory):
    folder = tmp_path_factory.mktemp("torch_compile")
    made = TorchCompile(folder, REQUIREMENTS)
    for backend in ("torch_xla", "torch_compile"):
        made.train(backend, folder / backend)
    yield made
    shutil.rmtree(folder / "venv")


def resumed(torch_compile, backend: str, before: str):
    """The run directory of a run that one backend has begun and another, or the same, has ended."""
    folder = torch_compile.mine.parent
    target = folder / f"{before}_then_{backend}"
    shutil.copytree(folder / before, target)
    shutil.rmtree(target / "checkpoints" / "step_00000020")
    torch_compile.train(backend, target, "--resume", "must")
    return target


def assert_alike(folder, expected) -> None:
    """The losses of a run and of the other backend's, and its graphs."""
    losses = losses_in(expected)
    assert len(losses) > 2 and losses[-1] < losses[0]
    np.testing.assert_allclose(losses_in(folder), losses, rtol=TOLERANCE)
    summary = summary_in(folder)
    assert (summary["train_graphs"], summary["eval_graphs"]) == (1, 1)


@pytest.mark.slow
def test_twenty_losses_and_one_graph_on_each_backend(torch_compile):
    one, two = (torch_compile.mine.parent / backend for backend in ("torch_xla", "torch_compile"))
    assert len(losses_in(one)) == 20
    assert_alike(one, one)
    assert_alike(two, one)
    uploads = [summary_in(folder)["host_to_device_uploads_per_step"] for folder in (one, two)]
    assert uploads == [0.0, None]  # nobody counts them there


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="inductor compiles C++ on the CPU")
def test_inductor_has_the_same_losses_and_its_steps_are_traced(torch_compile):
    folder = torch_compile.mine.parent
    torch_compile.train("torch_compile", folder / "inductor", "--compile", "inductor", "--profile_steps", "5:7")
    assert_alike(folder / "inductor", folder / "torch_xla")
    (trace,) = (folder / "inductor" / "tensorboard").glob("*.json")
    names = [event.get("name") for event in json.loads(trace.read_text())["traceEvents"]]
    assert names.count("train") == 2


@pytest.mark.slow
def test_a_resumption_on_the_torch_compile_backend_ends_bit_identical(torch_compile):
    whole = torch_compile.mine.parent / "torch_compile"
    again = resumed(torch_compile, "torch_compile", before="torch_compile")
    assert_identical(*(state_in(folder / "checkpoints" / "step_00000020") for folder in (again, whole)))


@pytest.mark.slow
def test_a_checkpoint_of_torch_xla_goes_on_upon_the_torch_compile_backend(torch_compile):
    """Weights, optimizer and place in the data; that of torch's random numbers too."""  # the other way: below
    whole = torch_compile.mine.parent / "torch_xla"
    target = resumed(torch_compile, "torch_compile", before="torch_xla")
    np.testing.assert_allclose(losses_in(target), losses_in(whole), rtol=TOLERANCE)
    states = [state_in(folder / "checkpoints" / "step_00000020") for folder in (target, whole)]
    assert states[0].keys() == states[1].keys()
    assert torch.equal(states[0]["random/torch"], states[1]["random/torch"])


@pytest.mark.slow
def test_a_second_graph_a_read_and_another_result_are_refused(torch_compile):
    program = torch_compile.mine / "refused.py"
    program.write_text(REFUSED)
    double, reads, asks, alone, leaves = torch_compile.run(program).splitlines()
    assert double == "step 3 compiled graph 2 of double, expected 1: x was float32[2], is float32[3]"
    assert alone == "call 3 compiled graph 2 of alone, expected 1: x was float32[2], is float32[3]"
    assert reads.startswith(f"torch.compile makes no one graph of reads, at {program}:15: it reads a tensor; expected")
    assert asks.startswith(f"torch.compile makes no one graph of asks, at {program}:19: Data-dependent branching; exp")
    assert re.match(r"torch.compile of torch 2\S+ computes something else of leaves than PyTorch without it", leaves)
    assert re.search(r"gradients left behind of .*expected 0.*use zero_grad", leaves)


@pytest.mark.slow
def test_images_with_batch_norm(torch_compile, tmp_path):
    options = (*IMAGES.split(), "--run_dir")
    assert run("resnet_cifar_tpu.py", *options, tmp_path / "one").returncode == 0
    torch_compile.run(ROOT / "resnet_cifar_tpu.py", *options, tmp_path / "two")
    assert_alike(tmp_path / "two", tmp_path / "one")
    one, two = (summary_in(tmp_path / name)["test_loss"] for name in ("one", "two"))
    assert two == pytest.approx(one, rel=1e-4)  # by the averages


@pytest.mark.slow
def test_a_language_model_on_one_device_and_over_four_processes(torch_compile, tmp_path):
    """Four devices of SPMD beside four processes of DTensor and gloo, and beside one device. Any of them goes on from a
    checkpoint of the processes: with as many of them every bit is the same."""
    script, options, sharded = ROOT / "transformer_tpu.py", (*LANGUAGE.split(), "--run_dir"), ("--mesh", "2x2x1")
    assert run(script.name, *options, tmp_path / "spmd", *sharded, CPU_NUM_DEVICES=4).returncode == 0
    torch_compile.run(*PROCESSES, script, *options, tmp_path / "four", *sharded)
    torch_compile.run(script, *options, tmp_path / "alone")
    for name in ("four", "alone"):
        assert_alike(tmp_path / name, tmp_path / "spmd")
    for name in ("again", "xla"):
        shutil.copytree(tmp_path / "four", tmp_path / name)
        shutil.rmtree(tmp_path / name / "checkpoints" / "step_00000006")
    must = ("--resume", "must")
    torch_compile.run(*PROCESSES, script, *options, tmp_path / "again", *must, *sharded)
    last = [tmp_path / name / "checkpoints" / "step_00000006" for name in ("again", "four")]
    assert_identical(*map(state_in, last))
    one = (*must, "--mesh", "1x1x1")
    assert run(script.name, *options, tmp_path / "xla", *one, CPU_NUM_DEVICES=1).returncode == 0
    assert_alike(tmp_path / "xla", tmp_path / "spmd")


MODEL = "--device cpu --num_steps 4 --warmup_steps 1 --log_every 2 --save_every 4 --eval_batches 1 --no_tensorboard"
MODEL += " --global_batch_size 2 --num_layers 1 --sequence_length 128 --vocab_size 64"
SAMPLED = ("--num_heads", "2", "--embedding_dim", "32", "--sample_every", "2", "--sample_prompts", "1 2 3", "7")


@pytest.mark.slow
def test_samples_are_those_of_torch_xla_and_a_mixture_of_experts_trains(torch_compile, tmp_path):
    options, script = (*MODEL.split(), *SAMPLED), ROOT / "transformer_tpu.py"
    assert run(script.name, *options, "--run_dir", tmp_path / "one").returncode == 0
    torch_compile.run(script, *options, "--run_dir", tmp_path / "two")
    one, two = ([line for line in read_lines(tmp_path / n) if line["kind"] == "sample"] for n in ("one", "two"))
    assert len(one) == 4 and [line["text"] for line in two] == [line["text"] for line in one]
    assert [line["graphs"] for line in two] == [2, 2, 0, 0]  # prefill and one token
    torch_compile.run(script, *MODEL.split(), "--model_size", "mixtral_tiny", "--run_dir", tmp_path / "mixture")


@pytest.mark.slow
def test_a_speedrun_from_a_text_to_its_report(torch_compile, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"Line {number} of a play\nso it goes on, {number * 7919}.\n\n" for number in range(3000)))
    options = ("--depth=1", "--most_steps=2", "--vocab_size=320", "--text", text, "--run_dir", tmp_path / "run")
    torch_compile.run("-m", "tools.speedrun", *options, folder=ROOT)
    report = (tmp_path / "run" / "report.md").read_text()
    assert "## The chat" in report and "goes on" in report


def row_of(made: TorchCompile, torch_version: str, folder: Path) -> dict[str, str]:
    """What the table says of this torch, asked of it."""
    (made.mine / "asked.py").write_text(WHAT_A_TORCH_DOES)
    answers = made.run(made.mine / "asked.py").split()
    options = (ROOT / "transformer_tpu.py", *MODEL.split(), "--num_heads", "2", "--embedding_dim", "32", "--run_dir")
    done = [made.succeeds(*options, folder / "micro", "--gradient_accumulation_steps", "2")]
    done += [made.succeeds(*PROCESSES[:-1], "--nproc_per_node=2", *options, folder / "two", "--mesh", "1x2x1")]
    if has_compiler := shutil.which("g++"):
        done.append(made.succeeds(*options, folder / "inductor", "--compile", "inductor"))
    names = "a step of torch's operations", "an own Function that saves tensors", "torch.autograd.grad"
    asked = dict(zip(names, answers, strict=True)) | {"torch": torch_version}
    names = ("micro-batches", "two processes", *(("inductor on a CPU",) if has_compiler else ()))
    return asked | {name: "right" if ok else "refused" for name, ok in zip(names, done, strict=True)}


@pytest.mark.slow
@pytest.mark.parametrize("torch_version", ["2.13.0", OLDER])
def test_what_a_torch_does_is_in_the_table(torch_version, request, tmp_path):
    made = request.getfixturevalue("older" if torch_version == OLDER else "torch_compile")
    row = row_of(made, torch_version, tmp_path)
    rows = csv.DictReader((ROOT / "docs" / "results" / "torch_compile_versions.csv").open())
    (said,) = [said for said in rows if said["torch"] == torch_version]
    assert said == said | row


@pytest.mark.slow
def test_processes_that_do_not_join_are_refused(torch_compile, tmp_path):
    """Each of them would train alone."""
    script, options = ROOT / "simple_mnist_tpu.py", ("--device", "cpu", "--run_dir", tmp_path / "run")
    said = torch_compile.run(*PROCESSES[:-1], "--nproc_per_node=2", script, *options, code=1)  # torchrun's own code
    assert "error: torchrun has started this script, which has one device without torch_xla" in said
    assert not (tmp_path / "run").exists()


NEEDS_TORCH_XLA = {
    "transformer_tpu.py --scan_layers": "scan_layers is True",
    "transformer_tpu.py --mesh 1x1x1x1x2": "mesh is 1x1x1x1x2, 2 devices, but this run has 1; start",
    "ddp_mnist_tpu.py": "DDP needs torch_xla, which is not installed; use simple_mnist_tpu.py",
}
EACH = """import runpy, sys
sys.stderr = sys.stdout
for line in sys.argv[1:]:
    sys.argv = line.split()
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        print("ended with", end.code, file=sys.stderr)  # a script may have another stdout by then
"""


@pytest.mark.slow
def test_what_needs_torch_xla_is_refused(torch_compile, tmp_path):
    """Each script, in one process, whose imports take seconds."""
    (tmp_path / "each.py").write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{EACH}")
    lines = [f"{ROOT}/{words} --device cpu --run_dir {tmp_path / 'run'}" for words in NEEDS_TORCH_XLA]
    told = torch_compile.run(tmp_path / "each.py", *lines).split("ended with 2\n")
    assert len(told) == 4 and all(
        f"error: {said}" in text for said, text in zip(NEEDS_TORCH_XLA.values(), told[:3], strict=True)
    )


def test_its_requirements_are_no_part_of_the_others():
    """torch_tpu needs another torch: nothing else may install it."""
    files = [*ROOT.glob("requirements*.txt"), *ROOT.glob("*/requirements.txt")]
    assert [path.name for path in files if re.search("torch_?tpu", path.read_text())] == [REQUIREMENTS.name]
