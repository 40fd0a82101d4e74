"""simple_mnist_tpu.py as users run it, and its step by itself."""

import json
import signal
import time

import pytest
import torch
import torch_xla
from processes import run, start, waits
from run_files import assert_identical, in_process, numbers, read_lines, saved_steps, state_in, summary_in, to_host
from test_checkpoint import a_full_disk

import simple_mnist_tpu
from config import MnistConfig
from images.mnist import load_digits
from tpu_utils.device import graphs_compiled, send, transfers_from_device, transfers_to_device
from tpu_utils.record.metrics import DeviceMetrics
from tpu_utils.step.optim import learning_rates, make_optimizer
from tpu_utils.trial.checks import check_model

SMALL = ["--channels=4", "--hidden_dim=23"]  # a width that no other test compiles: graphs are counted
SHORT = ["simple_mnist_tpu.py", *SMALL, "--num_epochs=4", "--log_every=7", "--save_every=10", "--no_tensorboard"]
FINAL = "checkpoints/step_00000088"


@pytest.fixture(scope="module")
def quick_test(tmp_path_factory):
    """An eighth of the first README command, in a folder of its own."""
    run_dir = tmp_path_factory.mktemp("quick") / "run"
    began = time.time()
    options = ("--num_epochs=5", "--log_every=10", "--save_every=50", "--run_dir", run_dir)
    result = run("simple_mnist_tpu.py", *options, cold=True)
    assert result.returncode == 0, result.stderr
    return run_dir, result, began


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    result = run(*SHORT, "--run_dir", run_dir)
    assert result.returncode == 0, result.stderr
    return run_dir


@pytest.mark.slow
def test_the_first_command_ends_with_the_accuracy_that_it_says(tmp_path):
    result = run("simple_mnist_tpu.py", "--run_dir", tmp_path / "run")
    assert result.returncode == 0, result.stderr
    assert summary_in(tmp_path / "run")["test_accuracy"] >= 0.98


def test_first_command_learns_with_one_graph_and_uploads_nothing_but_the_batch(quick_test):
    run_dir, result, began = quick_test
    summary = summary_in(run_dir)
    assert summary["test_accuracy"] >= 0.9
    assert (summary["train_graphs"], summary["eval_graphs"]) == (1, 1)
    assert summary["host_to_device_uploads_per_step"] == 0
    assert sum(summary["goodput"].values()) == pytest.approx(summary["seconds"])
    until_summary = (run_dir / "summary.json").stat().st_mtime - began  # imports and misread images included
    assert summary["seconds"] == pytest.approx(until_summary, rel=0.01, abs=0.1)
    assert "CPU (XLA CPU backend: no TPU)" in result.stdout.splitlines()[0]
    assert result.stderr == ""


def test_first_command_leaves_a_complete_run_directory(quick_test):
    run_dir, *_ = quick_test
    lines = read_lines(run_dir)
    assert {line["kind"] for line in lines} == {"train", "eval", "checkpoint"}
    train = [line for line in lines if line["kind"] == "train"]
    assert [line["step"] for line in train] == list(range(10, 111, 10))
    fields = "loss learning_rate step_seconds examples_per_second mfu data_wait_seconds host_seconds"
    assert train[-1].keys() >= set(fields.split())
    assert all(line["wait_seconds"] >= 0 for line in lines if line["kind"] == "checkpoint")
    assert train[-1]["mfu"] is None, "the peak of a CPU is not known"
    assert len([line for line in lines if line["kind"] == "eval"]) == 5
    assert json.loads((run_dir / "config.json").read_text())["preset"] == "quick_test"
    kept = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    assert kept == ["step_00000050", "step_00000100", "step_00000110"]
    assert list((run_dir / "tensorboard").glob("events.out.tfevents.*"))


def end_state(run_dir):
    return state_in(run_dir / FINAL)


@pytest.mark.parametrize(
    "number, code",
    [
        (signal.SIGTERM, 143),
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, 129, marks=pytest.mark.slow),
    ],
)
def test_stopped_and_killed_anywhere_a_run_ends_bit_identical(uninterrupted, tmp_path, number, code):
    run_dir, output = tmp_path / "run", {}
    for signal_number, expected, more in ((number, code, []), (signal.SIGKILL, -9, ["--resume=must"])):
        before = max(saved_steps(run_dir), default=0)
        process = start(*SHORT, "--run_dir", run_dir, *more)
        waits(lambda before=before: max(saved_steps(run_dir), default=0) > before, alive=process)
        process.send_signal(signal_number)
        output[expected], errors = process.communicate()
        assert process.returncode == expected, output[expected] + errors
    assert f"repeat the command with --run_dir {run_dir} --resume must" in output[code]
    assert not (run_dir / FINAL).exists()
    resumed = run(*SHORT, "--run_dir", run_dir, "--resume", "must")
    assert resumed.returncode == 0 and "resumed" in resumed.stdout, resumed.stderr
    assert_identical(end_state(run_dir), end_state(uninterrupted))
    saves = {line["step"] for line in numbers(uninterrupted) if line["kind"] == "checkpoint"}
    lines = [line for line in numbers(run_dir) if line["kind"] != "checkpoint" or line["step"] in saves]
    assert lines == numbers(uninterrupted)  # but for the save of the stop, wherever it was


def test_synthetic_approaches_its_known_best(tmp_path):
    run_dir = tmp_path / "run"
    options = ["--dataset=synthetic", "--num_epochs=4", "--max_shift=0", "--learning_rate=1e-3", "--channels=8"]
    result = run("simple_mnist_tpu.py", *options, "--run_dir", run_dir, "--no_tensorboard")
    assert result.returncode == 0, result.stderr
    summary = summary_in(run_dir)
    assert "best possible accuracy 0.9100, loss 0.5003" in result.stdout
    # 2,048 test labels of which each lies with probability 0.09: three standard deviations are 0.019
    assert abs(summary["test_accuracy"] - 0.91) < 0.02
    assert summary["test_loss"] < 1.25 * summary["loss_floor"]


# -------------------------------------------------------------------------------------------------- the step itself
def step_parts(device, config, hidden_dim=16):
    torch.manual_seed(0)
    model = simple_mnist_tpu.ConvNet(8, 4, hidden_dim).to(device)
    optimizer = make_optimizer(config, model.parameters())
    metrics = DeviceMetrics(["loss", "gradient_norm"], 20, device)
    return model, optimizer, learning_rates(config, 20).to(device), metrics


def sent(images, labels, device):
    return send((images, labels.astype("int32")), device)


@pytest.fixture(scope="module")
def digits():
    return load_digits()


@pytest.mark.parametrize("optimizer, hidden_dim", [("sgd", 17), ("adam", 18), ("adamw", 19)])
def test_steps_make_one_graph_and_neither_read_nor_upload(digits, optimizer, hidden_dim):
    """With a state that was loaded: torch's load_state_dict leaves some of it on the host."""
    device = torch_xla.device()
    config = MnistConfig(optimizer=optimizer, learning_rate=0.01, warmup_steps=5)
    parts = step_parts(device, config, hidden_dim=hidden_dim)  # a width no other test compiles: graphs are cached
    parts[1].load_state_dict(to_host(parts[1].state_dict()))
    batch = sent(digits.train_images[:16], digits.train_labels[:16], device)
    graphs = graphs_compiled()
    for step in range(1, 21):
        if step == 2:  # the constants of the first step have been sent
            uploads, reads = transfers_to_device(), transfers_from_device()
        simple_mnist_tpu.train_step.compiled(*parts, *batch, config)
    assert graphs_compiled() - graphs == 1
    assert (transfers_to_device(), transfers_from_device()) == (uploads, reads)
    losses = parts[3].read(0, 20)["loss"]
    assert transfers_from_device() == reads + 1
    assert losses[-1] < losses[0]


def test_bfloat16_keeps_float32_weights_and_stays_near_float32(digits):
    device, losses = torch_xla.device(), {}
    for precision in ("float32", "bfloat16"):
        config = MnistConfig(precision=precision)
        parts = step_parts(device, config)
        for i in range(20):
            batch = sent(digits.train_images[16 * i : 16 * i + 16], digits.train_labels[16 * i : 16 * i + 16], device)
            simple_mnist_tpu.train_step.compiled(*parts, *batch, config)
        losses[precision] = torch.from_numpy(parts[3].read(0, 20)["loss"])
        assert all(parameter.dtype == torch.float32 for parameter in parts[0].parameters())
    assert not torch.equal(losses["float32"], losses["bfloat16"])
    torch.testing.assert_close(losses["bfloat16"], losses["float32"], rtol=0.03, atol=0.03)


def test_flops_are_those_of_the_layers():
    model = simple_mnist_tpu.ConvNet(8, 32, 128)
    forward = 2 * (64 * 32 * 9 + 16 * 64 * 32 * 9 + 4 * 64 * 64 * 9 + 256 * 128 + 128 * 10)
    first_layer = 2 * 64 * 32 * 9  # needs no gradient of its input
    assert check_model(model, load_digits()) == 3 * forward - first_layer


# ------------------------------------------------------------------------------------------------------- bad input
@pytest.mark.parametrize(
    "options, said",
    [
        (["--dataset", "mnist", "--data_dir", "nowhere"], "expected MNIST in torchvision's layout"),
        (["--global_batch_size", "5000"], "choose at most 1437"),
        (["--profile_steps", "100:900"], "choose among the steps this run does, 1 to 880"),
        (["--resume", "must"], "holds no complete checkpoint"),
    ],
)
def test_bad_input_gives_one_message_and_exit_code_2(tmp_path, capsys, options, said):
    assert in_process("--run_dir", tmp_path / "run", "--no_tensorboard", *options) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and said in error and "Traceback" not in error and error.count("\n") == 1
    assert not (tmp_path / "run" / "config.json").exists(), "the corrected command is not told that a run is there"


def test_resuming_from_a_mistyped_run_dir_leaves_nothing_behind(tmp_path, capsys):
    assert in_process("--run_dir", tmp_path / "rnu", "--resume", "must") == 2
    assert "it does not exist" in capsys.readouterr().err and not (tmp_path / "rnu").exists()


def test_a_save_that_fails_behind_the_steps_fails_the_run(tmp_path, capsys):
    options = ["--num_epochs", "1", "--warmup_steps", "2", "--save_every", "5", "--log_every", "5", "--no_tensorboard"]
    with a_full_disk():
        assert in_process("--run_dir", tmp_path / "run", "--channels=4", "--hidden_dim=2000", *options) == 1
    captured = capsys.readouterr()
    assert "error: checkpoint of step 5 could not be written" in captured.err and "step     15/" not in captured.out
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


def test_a_trace_names_steps_and_phases_and_leaves_the_graphs_alone(tmp_path, capsys):
    from jax.profiler import ProfileData  # reads xplane.pb

    run_dir = tmp_path / "run"
    options = ["--channels=4", "--hidden_dim=24", "--num_epochs=2", "--warmup_steps=2", "--save_every=22"]
    options += ["--profile_steps=21:24"]
    assert in_process("--run_dir", run_dir, *options, "--log_every", "5", "--no_tensorboard") == 0
    (path,) = run_dir.glob("tensorboard/plugins/profile/*/*.xplane.pb")
    assert f"tensorboard --logdir {run_dir}/tensorboard" in capsys.readouterr().out
    found, steps = set(), []
    for plane in ProfileData.from_file(str(path)).planes:
        for line in plane.lines:
            for event in line.events:
                found.add(event.name)
                if event.name == "train":
                    steps.append(dict(event.stats)["step_num"])
    assert sorted(steps) == [21, 22, 23]
    assert found >= {"phase data_wait", "phase step", "phase evaluation", "phase checkpoint"}
    summary = summary_in(run_dir)
    assert summary["train_graphs"] == 1 and summary["eval_graphs"] <= 1, "0: a test before had the same evaluation"
    assert summary["host_to_device_uploads_per_step"] == 0
