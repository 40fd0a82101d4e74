"""Many devices, same numbers: distributed_mnist_tpu.py against plain PyTorch, and what its processes agree on.

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
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import distributed_mnist_tpu as script
from config import DistributedMnistConfig, InputError, check_divisible, learning_rates, parse_command_line
from data import ReplicaSampler, TrainBatches, load_dataset
from tpu_utils import read_checkpoint

ROOT = Path(__file__).resolve().parent.parent
MNIST = ROOT.parent / "shared" / "data" / "mnist"
NUM_STEPS = 22  # one epoch of the digits at global batch 64
# Two correct runs can only be as equal as the recipe lets them: with seed 0 one input of a ReLU in step 1 is 9e-9, and
# its sign is a matter of rounding.
RECIPE = ["--num_epochs", "1", "--seed", "3", "--learning_rate", "2e-3", "--warmup_steps", "10"]
RECIPE += ["--log_every", "1", "--no-tensorboard"]
TOLERANCE = 1e-5


def environment(**extra):
    unset = ("PJRT_DEVICE", "CPU_NUM_DEVICES", "XLA_FLAGS")
    return {k: v for k, v in os.environ.items() if k not in unset} | {k: str(v) for k, v in extra.items()}


def start(*command, **extra):
    command = [sys.executable, *map(str, command)]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen(command, env=environment(**extra), cwd=ROOT, **pipes)


def run(*command, **extra):
    """(exit code, stdout, stderr)"""
    process = start(*command, **extra)
    out, err = process.communicate(timeout=600)
    return process.returncode, out, err


def train(run_dir, *options, name="distributed_mnist_tpu.py", **extra):
    return run(name, *RECIPE, "--device", "cpu", "--run_dir", run_dir, *options, **extra)


def losses_in(run_dir):
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line["kind"] == "train"]


def summary_in(run_dir):
    return json.loads((run_dir / "summary.json").read_text())


# ------------------------------------------------------------------------------------------------------- parity ladder

LADDER = {
    "xla_1": ["--eval_batch_size", "512"],  # simple_mnist_tpu.py
    "spmd_2": ["--num_virtual_devices", "2", "--eval_batch_size", "99"],
    "spmd_4": ["--num_virtual_devices", "4", "--eval_batch_size", "99"],
    "spmd_8": ["--num_virtual_devices", "8", "--eval_batch_size", "99"],
    "fsdp_4": ["--num_virtual_devices", "4", "--eval_batch_size", "99", "--shard_parameters"],
    "ddp_1": ["--strategy", "ddp", "--eval_batch_size", "99"],
}


@pytest.fixture(scope="session")
def ladder(tmp_path_factory):
    """{name: run directory}, each with the XLA programs of the run in a folder `programs`."""
    folder = tmp_path_factory.mktemp("ladder")

    def step_of_ladder(name):
        if name == "replicas_8":
            (folder / name).mkdir()
            program = "tests/distributed_replicas.py"
            first = run(program, "trace", folder / name, 8, NUM_STEPS, *RECIPE)
            return first if first[0] else run(program, "run", folder / name)
        which = "simple_mnist_tpu.py" if name == "xla_1" else "distributed_mnist_tpu.py"
        dump = f"--xla_dump_to={folder / name / 'programs'} --xla_dump_hlo_as_text"
        return train(folder / name, *LADDER[name], name=which, XLA_FLAGS=dump)

    names = ["replicas_8", *LADDER]
    with ThreadPoolExecutor(2) as pool:
        for name, (code, out, err) in zip(names, pool.map(step_of_ladder, names), strict=True):
            assert code == 0, f"{name}: {out}\n{err}"
    return {name: folder / name for name in names}


@functools.cache
def plain_pytorch():
    """The losses of a loop that shares nothing with the scripts but the model, the batches and the schedule."""
    config = parse_command_line(DistributedMnistConfig, "", RECIPE)
    dataset = load_dataset(config)
    torch.manual_seed(config.seed)
    model = script.ConvNet(dataset.image_size, config.channels, config.hidden_dim)
    betas = (config.adam_beta1, config.adam_beta2)
    optimizer = torch.optim.AdamW(model.parameters(), betas=betas, weight_decay=config.weight_decay)
    rates = learning_rates(config, NUM_STEPS)
    losses = []
    for step, (images, labels) in enumerate(TrainBatches(dataset, config, 0, NUM_STEPS)):
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


def compiled_step(run_dir):
    """The partitioned program of the train step, one device's view."""
    (path,) = (run_dir / "programs").glob("*train_step*cpu_after_optimizations.txt")
    text = path.read_text()
    return text, re.findall(r"= (\w+\[[\d,]*\])\S* parameter\(", text[text.index("ENTRY") :])


def test_batch_is_cut_and_parameters_are_copied(ladder):
    text, inputs = compiled_step(ladder["spmd_8"])
    assert "u8[8,8,8]" in inputs and "s32[8]" in inputs  # 8 of 64 examples per device
    assert inputs.count("f32[128,256]") == 3  # weight and two moments, whole
    assert "all-gather(" not in text


def test_fsdp_cuts_parameters_and_optimizer_state(ladder):
    text, inputs = compiled_step(ladder["fsdp_4"])
    assert inputs.count("f32[32,256]") == 3 and "f32[128,256]" not in inputs
    assert inputs.count("f32[16,32,3,3]") == 3 and inputs.count("f32[10,32]") == 3
    assert "all-gather(" in text
    # and what comes out is cut as well, or step 2 would be another program
    outputs = re.search(r"->\s*\((.*)\) \{", text[text.index("ENTRY") :])[1]
    assert outputs.count("f32[32,256]") == 3 and "f32[128,256]" not in outputs


def test_ddp_step_reduces_each_gradient_once(ladder):
    """One all-reduce holds all gradients, one the loss for the log; the f32[] beside each is torch_xla's token."""
    text = (ladder["replicas_8"] / "program.txt").read_text()
    shapes = re.findall(r"= \((.*), f32\[\]\) all-reduce\(", text)
    model = script.ConvNet(8, 32, 128)
    total = sum(p.numel() for p in model.parameters())
    assert shapes == [f"f32[{total}]{{0}}", "f32[]"]
    assert not re.search(r"all-gather|all-to-all|reduce-scatter|collective-permute", text)


def test_compiles_for_eight_ddp_replicas_on_tpu(tmp_path):
    code, out, err = run(
        "distributed_mnist_tpu.py", "--strategy", "ddp", "--compile_for", "v5litepod-8", AOT_TPU_OUTPUT=tmp_path
    )
    assert code == 0, out + err
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["fits"] and report["program"] == "8 replicas"
    assert set(report["collectives"]) == {"all-reduce"}
    num_bytes = 4 * sum(p.numel() for p in script.ConvNet(8, 32, 128).parameters())
    assert num_bytes <= report["collectives"]["all-reduce"]["bytes"] <= num_bytes + 64


# ----------------------------------------------------------------------------------------------------------- sample ids


@pytest.mark.parametrize("num_replicas", [1, 2, 8, 16])
def test_replicas_are_disjoint_complete_and_make_the_same_batches(num_replicas):
    config = parse_command_line(DistributedMnistConfig, "", [*RECIPE, "--num_epochs", "2"])
    dataset = load_dataset(config)
    whole = list(TrainBatches(dataset, config, 0, 2 * NUM_STEPS).ids())
    parts = [
        list(TrainBatches(dataset, config, 0, 2 * NUM_STEPS, replica, num_replicas).ids())
        for replica in range(num_replicas)
    ]
    for step, batch in enumerate(whole):
        together = np.concatenate([part[step] for part in parts])
        assert len(together) == config.global_batch_size
        assert sorted(together) == sorted(batch)
    epochs = [np.concatenate(whole[:NUM_STEPS]), np.concatenate(whole[NUM_STEPS:])]
    for epoch in epochs:
        assert len(set(epoch.tolist())) == NUM_STEPS * config.global_batch_size  # no repeats
    assert (epochs[0] != epochs[1]).any()


def test_sampler_covers_the_epoch_and_reshuffles():
    seen = []
    for epoch in range(2):
        samplers = [ReplicaSampler(100, seed=3, replica=replica, num_replicas=4) for replica in range(4)]
        for sampler in samplers:
            sampler.set_epoch(epoch)
        ids = [list(sampler) for sampler in samplers]
        assert sorted(np.concatenate(ids)) == list(range(100))
        seen.append(ids)
    assert seen[0] != seen[1]


@pytest.mark.parametrize("replica, num_replicas", [(0, 1), (3, 8)])
def test_same_examples_and_pixels_after_resume(replica, num_replicas):
    config = parse_command_line(DistributedMnistConfig, "", [*RECIPE, "--max_shift", "2"])
    dataset = load_dataset(config)
    whole = list(TrainBatches(dataset, config, 0, 30, replica, num_replicas))
    resumed = list(TrainBatches(dataset, config, 25, 30, replica, num_replicas))
    for expected, found in zip(whole[25:], resumed, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_an_example_is_shifted_alike_on_any_replica():
    config = parse_command_line(DistributedMnistConfig, "", [*RECIPE, "--max_shift", "2"])
    dataset = load_dataset(config)
    images, _ = next(iter(TrainBatches(dataset, config, 0, 1)))
    for replica in range(4):
        part, _ = next(iter(TrainBatches(dataset, config, 0, 1, replica, 4)))
        assert torch.equal(part, images[replica::4])


# ------------------------------------------------------------------------------------------------ stopping and resuming


def stop_after_step(run_dir, step, *options):
    """Exit code of a run that gets SIGTERM once it has logged this step."""
    process = start("distributed_mnist_tpu.py", *RECIPE, "--device", "cpu", "--run_dir", run_dir, *options)
    deadline = time.monotonic() + 300
    while not ((run_dir / "metrics.jsonl").exists() and len(losses_in(run_dir)) >= step):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert "saved after step" in out, out + err
    return process.returncode


def test_fsdp_stopped_and_resumed_on_the_same_and_on_other_devices(ladder, tmp_path):
    options = LADDER["fsdp_4"]
    assert stop_after_step(tmp_path / "same", 3, *options) == 143
    (saved,) = (tmp_path / "same" / "checkpoints").glob("step_*")
    assert 3 <= int(saved.name[5:]) < NUM_STEPS
    weights = read_checkpoint(saved)["model"]
    assert {name: p.shape for name, p in weights.items()} == {
        name: p.shape for name, p in script.ConvNet(8, 32, 128).state_dict().items()
    }
    shutil.copytree(tmp_path / "same", tmp_path / "other")

    code, out, err = train(tmp_path / "same", *options, "--resume", "must")
    assert code == 0, out + err
    assert losses_in(tmp_path / "same") == losses_in(ladder["fsdp_4"])  # bit-identical
    assert summary_in(tmp_path / "same")["test_loss"] == summary_in(ladder["fsdp_4"])["test_loss"]

    code, out, err = train(tmp_path / "other", *LADDER["spmd_2"], "--resume", "must")
    assert code == 0, out + err
    np.testing.assert_allclose(losses_in(tmp_path / "other"), losses_in(ladder["fsdp_4"]), rtol=TOLERANCE)


def test_ddp_stopped_through_its_launcher_and_resumed(ladder, tmp_path):
    """The signal reaches only the process that called torch_xla.launch."""
    assert stop_after_step(tmp_path / "run", 3, *LADDER["ddp_1"]) == 143
    code, out, err = train(tmp_path / "run", *LADDER["ddp_1"], "--resume", "must")
    assert code == 0, out + err
    assert losses_in(tmp_path / "run") == losses_in(ladder["ddp_1"])
    last = f"checkpoints/step_{NUM_STEPS:08d}"
    found, expected = (read_checkpoint(run_dir / last)["random"] for run_dir in (tmp_path / "run", ladder["ddp_1"]))
    assert found["xla"] == expected["xla"] and torch.equal(found["torch"], expected["torch"])


def test_torchrun(ladder, tmp_path):
    torchrun = ["-m", "torch.distributed.run", "--nproc_per_node=1", f"--master_port={free_port()}"]
    options = [*RECIPE, "--device", "cpu", "--run_dir", tmp_path / "run", *LADDER["ddp_1"]]
    code, out, err = run(*torchrun, "distributed_mnist_tpu.py", *options)
    assert code == 0, out + err
    assert losses_in(tmp_path / "run") == losses_in(ladder["ddp_1"])


# ------------------------------------------------------------------------------------------------------------ bad input


def test_indivisible_batch_is_refused_with_the_nearest_that_works(tmp_path):
    code, _, err = train(tmp_path / "run", "--num_virtual_devices", "8", "--global_batch_size", "60")
    assert code == 2
    assert "global_batch_size is 60 but there are 8 devices" in err and "56 or 64" in err
    assert "Traceback" not in err and not (tmp_path / "run").exists()


def test_fewer_examples_than_devices():
    config = parse_command_line(DistributedMnistConfig, "", ["--global_batch_size", "4"])
    with pytest.raises(InputError, match=r"nearest that works: 8$"):
        check_divisible(config, 8)


def refused(monkeypatch, *options):
    monkeypatch.setattr(sys, "argv", ["distributed_mnist_tpu.py", "--device", "cpu", *options])
    monkeypatch.setattr(os, "environ", dict(os.environ))
    return script.main()


def test_many_ddp_replicas_on_cpu_are_refused(monkeypatch):
    with pytest.raises(InputError, match="ddp has 8 virtual CPU devices"):
        refused(monkeypatch, "--strategy", "ddp", "--num_virtual_devices", "8")


def test_sharded_parameters_with_ddp_are_refused(monkeypatch, capsys):
    with pytest.raises(SystemExit, match="2"):
        refused(monkeypatch, "--strategy", "ddp", "--shard_parameters")
    assert "shard_parameters is for strategy spmd" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------------- hosts


def free_port():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def start_host(index, count, port, seconds):
    slice_of = dict(TPU_SKIP_MDS_QUERY=1, TPU_WORKER_ID=index, TPU_WORKER_HOSTNAMES=",".join(["localhost"] * count))
    return start("tests/distributed_hosts.py", port, seconds, **slice_of)


def test_two_hosts_meet_agree_and_read_disjoint_parts():
    port = free_port()
    processes = [start_host(index, 2, port, seconds=60) for index in (0, 1)]
    results = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], results
    found = [json.loads(out.splitlines()[-1]) for out, _ in results]
    for index, (host, (out, _)) in enumerate(zip(found, results, strict=True)):
        assert f"host       {index} of 2" in out
        assert (host["index"], host["count"]) == (index, 2)
        assert host["from_first"] == "said by host 0" and host["error"] == "raised by host 0"
        assert host["largest"] == 15
    config = parse_command_line(DistributedMnistConfig, "", [])
    whole = TrainBatches(load_dataset(config), config, 0, 30).ids()
    for ids, first, second in zip(whole, found[0]["ids"], found[1]["ids"], strict=True):
        assert not set(first) & set(second)
        assert sorted(first + second) == sorted(ids.tolist())


@pytest.mark.parametrize("index, missing", [(0, "host 1 (localhost), host 2 (localhost)"), (1, "host 0 (localhost)")])
def test_missing_hosts_are_named_with_the_command(index, missing):
    process = start_host(index, 3, free_port(), seconds=2)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert f"host {index} of 3 waited 2 s for {missing}" in err
    assert "--worker=all --command='python3 tests/distributed_hosts.py" in err and "Traceback" not in err


# ------------------------------------------------------------------------------------------------------- both scripts


def test_both_scripts_hold_the_same_model_and_evaluation():
    def definitions(name):
        tree = ast.parse((ROOT / name).read_text())
        return {node.name: ast.unparse(node) for node in tree.body if hasattr(node, "name")}

    simple, distributed = definitions("simple_mnist_tpu.py"), definitions("distributed_mnist_tpu.py")
    for name in ("ConvNet", "evaluate", "train_flops_per_example", "print_result"):
        assert simple[name] == distributed[name], name


@pytest.mark.slow
@pytest.mark.skipif(not MNIST.exists(), reason="needs the MNIST files in ../shared/data/mnist")
def test_mnist_accuracy_equals_simple_mnist(tmp_path):
    accuracy = {}
    for name, options in [("simple_mnist_tpu.py", []), ("distributed_mnist_tpu.py", ["--num_virtual_devices", "8"])]:
        recipe = ["--preset", "development", "--data_dir", MNIST, "--device", "cpu", "--run_dir", tmp_path / name]
        code, out, err = run(name, *recipe, *options)
        assert code == 0, out + err
        accuracy[name] = summary_in(tmp_path / name)["test_accuracy"]
    first, second = accuracy.values()
    assert min(first, second) > 0.95 and abs(first - second) <= 0.003
