"""Many devices, same numbers: distributed_mnist_tpu.py and ddp_mnist_tpu.py against plain PyTorch.

The number of XLA devices is fixed per process, so every run is a process of its own; the ladder's runs are started
together, two at a time, and shared by the tests.
"""

import ast
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from processes import COMPILED, ROOT, environment_with, free_port, run, start, waits
from run_files import files_of, losses_in, summary_in
from small_models import DroppingDigits, Normed

import ddp_mnist_tpu
import distributed_mnist_tpu as script
from config import DdpMnistConfig, DistributedMnistConfig
from images.arrays import TrainBatches, check_divisible
from images.mnist import load_dataset
from tpu_utils.base.errors import InputError
from tpu_utils.base.hardware import GENERATIONS
from tpu_utils.checkpoint.saved import read_checkpoint
from tpu_utils.options.parsing import parse_command_line
from tpu_utils.step import replicas
from tpu_utils.step.optim import learning_rates

NUM_STEPS = 22  # one epoch of the digits at global batch 64
# Two correct runs can only be as equal as the recipe lets them: with seed 0 one input of a ReLU in step 1 is 9e-9, and
# its sign is a matter of rounding.
RECIPE = ["--num_epochs", "1", "--seed", "3", "--learning_rate", "2e-3", "--warmup_steps", "10"]
RECIPE += ["--log_every", "1", "--no-tensorboard"]
TOLERANCE = 1e-5


def train(run_dir, *options, code=0, name="distributed_mnist_tpu.py", **environment):
    """The run, which has ended with this code."""
    done = run(name, *RECIPE, "--device", "cpu", "--run_dir", run_dir, *options, **environment)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def by_replicas(folder, count: int, num_steps: int, model, *options) -> dict:
    """What so many replicas of ddp_mnist_tpu.py find, traced as they are and run as one program."""
    for arguments in (("trace", folder, count, num_steps, model, *options), ("run", folder)):
        done = run("tests/distributed_replicas.py", *arguments)
        assert done.returncode == 0, done.stderr
    return json.loads((folder / "curve.json").read_text())


# ------------------------------------------------------------------------------------------------------- parity ladder
SCRIPTS = {"xla_1": "simple_mnist_tpu.py", "ddp_1": "ddp_mnist_tpu.py"}
LADDER = {
    "xla_1": ["--eval_batch_size", "512"],  # simple_mnist_tpu.py
    "spmd_2": ["--num_virtual_devices", "2", "--eval_batch_size", "99"],
    "spmd_8": ["--num_virtual_devices", "8", "--eval_batch_size", "99"],
    "fsdp_4": ["--num_virtual_devices", "4", "--eval_batch_size", "99", "--shard_parameters"],
    "ddp_1": ["--eval_batch_size", "99"],  # ddp_mnist_tpu.py
}


@pytest.fixture(scope="session")
def ladder(tmp_path_factory):
    """{name: run directory}, each with the XLA programs of the run in a folder `programs`."""
    folder = tmp_path_factory.mktemp("ladder")

    def step_of_ladder(name):
        if name == "replicas_8":
            (folder / name).mkdir()
            by_replicas(folder / name, 8, NUM_STEPS, "ConvNet", *RECIPE)
        else:
            which = SCRIPTS.get(name, "distributed_mnist_tpu.py")
            dump = f"{COMPILED} --xla_dump_to={folder / name / 'programs'}"  # as text; a script knows these flags
            train(folder / name, *LADDER[name], name=which, XLA_FLAGS=dump)

    names = ["replicas_8", *LADDER]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(step_of_ladder, names))
    return {name: folder / name for name in names}


@functools.cache
def plain_pytorch(build=script.ConvNet, num_steps=NUM_STEPS):
    """The losses of a loop that shares nothing with the scripts but the model, the batches and the schedule."""
    config = parse_command_line(DistributedMnistConfig, "", RECIPE)
    dataset = load_dataset(config)
    torch.manual_seed(config.seed)
    model = build(dataset.image_size, config.channels, config.hidden_dim)
    betas = (config.adam_beta1, config.adam_beta2)
    optimizer = torch.optim.AdamW(model.parameters(), betas=betas, weight_decay=config.weight_decay)
    rates = learning_rates(config, num_steps)
    losses = []
    batches = TrainBatches(dataset, config)
    for step in range(num_steps):
        images, labels = map(torch.from_numpy, batches.batch(step))
        optimizer.param_groups[0]["lr"] = rates[step].item()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels.long())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def largest_difference(name: str, losses) -> float:
    """Relative, to plain PyTorch. Printed too: README.md's table is the output of pytest -s."""
    found = np.abs(np.array(losses) / np.array(plain_pytorch()) - 1).max()
    print(f"{name}: {found:.1e}")
    return found


@pytest.mark.parametrize("name", LADDER)
def test_losses_equal_plain_pytorch(ladder, name):
    expected = plain_pytorch()
    assert expected[-1] < 0.9 * expected[0], "a curve that does not move proves nothing"
    assert largest_difference(name, losses_in(ladder[name])) < TOLERANCE


def test_eight_ddp_replicas_equal_plain_pytorch(ladder):
    found = json.loads((ladder["replicas_8"] / "curve.json").read_text())
    for losses in found["losses"]:  # each replica logs the loss of the global batch
        assert largest_difference("replicas_8", losses) < TOLERANCE
    assert found["weights_apart"] == 0


def test_replicas_of_ddp_drop_what_one_device_would_drop(tmp_path):
    """Each of four has every fourth row of the batch, and the masks of these rows."""
    expected = plain_pytorch(DroppingDigits, 6)
    for losses in by_replicas(tmp_path, 4, 6, "DroppingDigits", *RECIPE)["losses"]:
        np.testing.assert_allclose(losses, expected, rtol=TOLERANCE)


def test_a_step_with_two_backward_passes_is_one_program_of_the_replicas(tmp_path):
    """DDP's second forward pass would agree on buckets with replicas that are not there while a step is traced."""
    text = (ROOT / "ddp_mnist_tpu.py").read_text()
    twice = "    loss.backward()\n    (0 * replica(images)).sum().backward()"
    (tmp_path / "mine.py").write_text(text.replace("    loss.backward()", twice))
    draw = np.random.default_rng(0)
    for name in ("train", "test"):
        np.save(tmp_path / f"{name}_images.npy", draw.integers(0, 255, (64, 8, 8), np.uint8))
        np.save(tmp_path / f"{name}_labels.npy", draw.integers(0, 10, 64))
    options = ("--device=cpu", f"--data_dir={tmp_path}", "--global_batch_size=16", "--warmup_steps=1")
    found = by_replicas(tmp_path, 4, 3, tmp_path / "mine.py", *options)
    assert found["weights_apart"] == 0 and np.isfinite(found["losses"]).all()


def test_batch_norm_over_several_replicas_is_refused(monkeypatch):
    monkeypatch.setattr(replicas, "world_size", lambda: 8)
    message = r"there are 8 replicas, and in each norm \(BatchNorm2d\) would have .*; use distributed_mnist_tpu.py"
    with pytest.raises(InputError, match=message):
        ddp_mnist_tpu.replicate(Normed(8, 0, 0), tracing=True)
    with pytest.raises(InputError, match=r"in each 0 \(InstanceNorm1d\) would have the"):
        ddp_mnist_tpu.replicate(torch.nn.Sequential(torch.nn.InstanceNorm1d(3, track_running_stats=True)), tracing=True)


@pytest.mark.parametrize("name", LADDER)
def test_one_graph_and_no_uploads(ladder, name):
    summary = summary_in(ladder[name])
    assert (summary["train_graphs"], summary["eval_graphs"]) == (1, 1)
    assert summary["host_to_device_uploads_per_step"] == 0


@pytest.mark.parametrize("name", [name for name in LADDER if name.startswith(("spmd", "fsdp"))])
def test_spmd_compiles_two_programs_in_all(ladder, name):
    """Counted by XLA itself: nothing is compiled on the side, at the start or for the checkpoint."""
    programs = sorted(path.name for path in (ladder[name] / "programs").glob("*before_optimizations.txt"))
    compiled = [program for program in programs if "ReplicateShardedData" not in program]
    assert len(compiled) == 2, programs


@pytest.mark.parametrize("name", LADDER)
def test_every_test_example_counts_once(ladder, name):
    """360 examples in batches of 99: no device count divides it, and the last batch is mostly padding."""
    summary, expected = summary_in(ladder[name]), summary_in(ladder["xla_1"])
    assert summary["test_accuracy"] == pytest.approx(expected["test_accuracy"], abs=1e-12)
    assert summary["test_loss"] == pytest.approx(expected["test_loss"], rel=TOLERANCE)


# ---------------------------------------------------------------------------------------------------- what is sharded
def inputs_of_step(run_dir) -> list[str]:
    """Shapes of what one device gets in the partitioned program of the train step."""
    (path,) = (run_dir / "programs").glob("*train_step*cpu_after_optimizations.txt")
    text = path.read_text()
    return re.findall(r"= (\w+\[[\d,]*\])\S* parameter\(", text[text.index("ENTRY") :])


def test_the_batch_is_sharded_and_by_fsdp_parameters_and_optimizer_state(ladder):
    spmd, fsdp = (inputs_of_step(ladder[name]) for name in ("spmd_8", "fsdp_4"))
    assert "u8[8,8,8]" in spmd and "s32[8]" in spmd  # 8 of 64 examples per device
    assert spmd.count("f32[128,256]") == 3  # weight and two moments, whole
    assert "u8[16,8,8]" in fsdp and "f32[128,256]" not in fsdp
    assert [fsdp.count(shard) for shard in ("f32[32,256]", "f32[16,32,3,3]", "f32[10,32]")] == [3, 3, 3]


def test_ddp_step_reduces_each_gradient_once(ladder):
    """One all-reduce holds all gradients, one counts the labels, one is of the loss for the log."""
    text = (ladder["replicas_8"] / "program.txt").read_text()
    assert text.count(" all-reduce(") == 3
    assert not re.search(r"all-gather|all-to-all|reduce-scatter|collective-permute", text)


# ----------------------------------------------------------------------------------------------------------- sample ids
@pytest.mark.parametrize("num_parts", [1, 2, 8, 16])
def test_parts_are_disjoint_complete_and_make_the_same_batches(num_parts):
    """A part belongs to a host or a replica: whatever divides the batch."""
    config = parse_command_line(DistributedMnistConfig, "", [*RECIPE, "--num_epochs", "2"])
    dataset = load_dataset(config)
    whole = TrainBatches(dataset, config)
    parts = [TrainBatches(dataset, config, part, num_parts) for part in range(num_parts)]
    epochs = [[], []]
    for step in range(2 * NUM_STEPS):
        together = np.concatenate([part.ids(step) for part in parts])
        assert len(together) == config.global_batch_size
        assert sorted(together) == sorted(whole.ids(step))
        epochs[step // NUM_STEPS] += together.tolist()
    for epoch in epochs:
        assert len(set(epoch)) == NUM_STEPS * config.global_batch_size  # no repeats
    assert epochs[0] != epochs[1], "reshuffled"


# ------------------------------------------------------------------------------------------------ stopping and resuming
def stop_after_step(run_dir, step, *options, name="distributed_mnist_tpu.py"):
    """Exit code of a run that gets SIGTERM once it has logged this step."""
    process = start(name, *RECIPE, "--device", "cpu", "--run_dir", run_dir, *options)
    waits(lambda: (run_dir / "metrics.jsonl").exists() and len(losses_in(run_dir)) >= step, alive=process)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate()
    assert "saved after step" in out, out + err
    return process.returncode


def test_fsdp_stopped_and_resumed_on_the_same_and_on_other_devices(ladder, tmp_path):
    options = LADDER["fsdp_4"]
    assert stop_after_step(tmp_path / "same", 3, *options) == 143
    (saved,) = (tmp_path / "same" / "checkpoints").glob("step_*")
    assert 3 <= int(saved.name[5:]) < NUM_STEPS
    weights = read_checkpoint(saved).part("model")
    whole = script.ConvNet(8, 32, 128).state_dict()
    assert {name: p.shape for name, p in weights.items()} == {name: p.shape for name, p in whole.items()}
    shutil.copytree(tmp_path / "same", tmp_path / "other")

    train(tmp_path / "same", *options, "--resume", "must")
    assert losses_in(tmp_path / "same") == losses_in(ladder["fsdp_4"])  # bit-identical
    assert summary_in(tmp_path / "same")["test_loss"] == summary_in(ladder["fsdp_4"])["test_loss"]

    train(tmp_path / "other", *LADDER["spmd_2"], "--resume", "must")
    np.testing.assert_allclose(losses_in(tmp_path / "other"), losses_in(ladder["fsdp_4"]), rtol=TOLERANCE)


def test_a_finished_run_that_is_resumed_changes_nothing(ladder):
    """With no options but where it is: the virtual devices too are those of the run."""
    before = files_of(ladder["spmd_2"])
    done = run("distributed_mnist_tpu.py", "--run_dir", ladder["spmd_2"], "--resume", "must")
    assert done.returncode == 0 and "2 devices, each with 32 examples" in done.stdout, done.stderr
    assert done.stdout.endswith(f"finished   step {NUM_STEPS} of {NUM_STEPS} was reached before; nothing to do\n")
    assert files_of(ladder["spmd_2"]) == before


def test_ddp_stopped_and_resumed(ladder, tmp_path):
    name = "ddp_mnist_tpu.py"
    assert stop_after_step(tmp_path / "run", 3, *LADDER["ddp_1"], name=name) == 143
    train(tmp_path / "run", *LADDER["ddp_1"], "--resume", "must", name=name)
    assert losses_in(tmp_path / "run") == losses_in(ladder["ddp_1"])
    last = f"checkpoints/step_{NUM_STEPS:08d}"
    found, expected = (
        read_checkpoint(run_dir / last).part("random") for run_dir in (tmp_path / "run", ladder["ddp_1"])
    )
    assert all(torch.equal(found[name], expected[name]) for name in ("torch", "xla"))


@pytest.mark.slow
def test_torchrun_stopped_and_resumed(ladder, tmp_path):
    """The signal reaches torchrun alone, which hands it on to the replicas and waits for them."""
    run_dir = tmp_path / "run"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=1", f"--master_port={free_port()}"]
    command += ["ddp_mnist_tpu.py", *RECIPE, "--device", "cpu", "--run_dir", str(run_dir), *LADDER["ddp_1"]]
    settings = dict(cwd=ROOT, env=environment_with({}), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    first = subprocess.Popen(command, **settings)
    waits(lambda: first.poll() is not None or ((run_dir / "metrics.jsonl").exists() and len(losses_in(run_dir)) >= 3))
    first.send_signal(signal.SIGTERM)
    out, err = first.communicate(timeout=600)
    assert "saved after step" in out and first.returncode != 0, out + err
    # one replica needs no launcher
    train(run_dir, *LADDER["ddp_1"], "--resume", "must", name="ddp_mnist_tpu.py")
    assert losses_in(run_dir) == losses_in(ladder["ddp_1"])


# ------------------------------------------------------------------------------------------------------------ bad input
def test_indivisible_batch_is_refused_with_the_nearest_that_works(tmp_path):
    err = train(tmp_path / "run", "--num_virtual_devices", "8", "--global_batch_size", "60", code=2).stderr
    assert "global_batch_size is 60 but there are 8 devices" in err and "56 or 64" in err
    assert "Traceback" not in err and not (tmp_path / "run").exists()


def test_fewer_examples_than_devices():
    config = parse_command_line(DistributedMnistConfig, "", ["--global_batch_size", "4"])
    with pytest.raises(InputError, match=r"nearest that works: 8$"):
        check_divisible(config, 8)


def refused(monkeypatch, *options):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    return ddp_mnist_tpu.check_launched(parse_command_line(DdpMnistConfig, "", list(options)))


def test_many_ddp_replicas_on_cpu_are_refused(monkeypatch):
    monkeypatch.setenv("CPU_NUM_DEVICES", "8")
    with pytest.raises(InputError, match=r"ddp_mnist_tpu.py has 8 virtual CPU devices.*use distributed_mnist_tpu.py"):
        refused(monkeypatch, "--device", "cpu")


def test_ddp_on_several_chips_says_how_to_start_it(monkeypatch):
    monkeypatch.setattr(replicas, "attached_chips", lambda: [GENERATIONS["v6e"]] * 8)
    monkeypatch.setattr(replicas, "choose_device", lambda config: "tpu")
    monkeypatch.setattr(sys, "argv", ["ddp_mnist_tpu.py"])
    with pytest.raises(InputError, match=r"8 devices, found one.*\n  torchrun --standalone --nproc_per_node=8"):
        refused(monkeypatch)


@pytest.mark.parametrize("option", ["--strategy=ddp", "--shard_parameters", "--num_virtual_devices=8"])
def test_ddp_has_no_options_that_change_nothing_there(option, capsys):
    with pytest.raises(SystemExit) as stop:
        parse_command_line(DdpMnistConfig, "", [option])
    assert stop.value.code == 2


# ------------------------------------------------------------------------------------------------------- both scripts
def test_the_scripts_hold_the_same_model_and_evaluation():
    def definitions(name):
        tree = ast.parse((ROOT / name).read_text())
        return {node.name: ast.unparse(node) for node in tree.body if hasattr(node, "name")}

    simple = definitions("simple_mnist_tpu.py")
    for name, equal in {
        "distributed_mnist_tpu.py": ("ConvNet", "evaluate"),
        "ddp_mnist_tpu.py": ("ConvNet", "evaluate"),
        "resnet_cifar_tpu.py": ("evaluate",),
    }.items():
        for one in equal:
            assert definitions(name)[one] == simple[one], (name, one)
    spmd, resnet = definitions("distributed_mnist_tpu.py"), definitions("resnet_cifar_tpu.py")
    assert spmd["eval_step"] == resnet["eval_step"]


def test_a_parameter_without_values_is_replicated(monkeypatch):
    """Sharded it had no shards, and the first save failed."""
    specs = []
    monkeypatch.setattr(script, "mark_sharding", lambda tensor, mesh, spec: specs.append(spec))
    script.shard([torch.zeros(0, 16), torch.zeros(3, 0), torch.zeros(3, 8)], SimpleNamespace(size=lambda: 8))
    assert specs == [(None, None), (None, None), (None, "data")]
