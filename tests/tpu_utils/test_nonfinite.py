"""Steps whose loss or gradient is infinite or not a number: found at the next log line, or skipped on the device."""

import shutil
import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch_xla
from run_files import assert_identical, in_process, numbers, read_lines, saved_steps, state_in, summary_in, to_host

import simple_mnist_tpu
import transformer_tpu
from config import MnistConfig
from images.mnist import load_digits
from language.models import operations
from language.models.gpt import GPT
from language.options.transformer_options import TransformerConfig
from tpu_utils import checkpoint
from tpu_utils.base.errors import run_script
from tpu_utils.checkpoint.saved import read_checkpoint
from tpu_utils.device import graphs_compiled
from tpu_utils.options.parsing import parse_command_line
from tpu_utils.record.metrics import DeviceMetrics
from tpu_utils.record.speed import READS, UPLOADS
from tpu_utils.step.optim import learning_rates, make_optimizer

NAMES = ["loss", "gradient_norm"]
SKIP = MnistConfig(on_nonfinite="skip")
TINY = ["--num_epochs=2", "--warmup_steps=2", "--channels=4", "--hidden_dim=16", "--log_every=7", "--save_every=10"]
TINY += ["--device=cpu", "--no_tensorboard"]


class Poison(torch.autograd.Function):
    """The value as it is, a gradient that is infinite where bad: what an overflow in the backward pass looks like."""

    @staticmethod
    def forward(ctx, value, bad):
        ctx.save_for_backward(bad)
        return value * 1.0

    @staticmethod
    def backward(ctx, gradient):
        (bad,) = ctx.saved_tensors
        return torch.where(bad, torch.full_like(gradient, torch.inf), gradient), None


@pytest.fixture
def bad_gradients(monkeypatch):
    """Gradients that are infinite, under a loss that is finite, in every batch that begins with a nine."""
    cross_entropy = F.cross_entropy

    def poisoned(logits, labels, **options):
        return Poison.apply(cross_entropy(logits, labels, **options), labels[0] == 9)

    monkeypatch.setattr(F, "cross_entropy", poisoned)


def parts_of(optimizer: str, weight_decay=0.1, seed=0):
    config = MnistConfig(optimizer=optimizer, learning_rate=0.01, weight_decay=weight_decay)
    device = torch_xla.device()
    torch.manual_seed(seed)
    model = simple_mnist_tpu.ConvNet(8, 4, 16).to(device)
    optimizer = make_optimizer(config, model.parameters())
    return model, optimizer, learning_rates(config, 20).to(device), DeviceMetrics(NAMES, 20, device)


def batches_with_bad(bad_steps, count=8):
    digits, device = load_digits(), torch_xla.device()
    for step in range(count):
        labels = digits.train_labels[16 * step : 16 * step + 16].astype("int32")
        labels[0] = 9 if step in bad_steps else 0
        images = digits.train_images[16 * step : 16 * step + 16]
        yield torch.from_numpy(images).to(device), torch.from_numpy(labels).to(device)


def state_of(model, optimizer):
    return to_host([model.state_dict(), optimizer.state_dict()["state"]])


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_a_skipped_step_changes_no_bit_of_parameters_and_optimizer(bad_gradients, optimizer):
    parts, graphs, states = parts_of(optimizer), graphs_compiled(), []
    for batch in batches_with_bad({2, 5}):
        simple_mnist_tpu.train_step.compiled(*parts, *batch, SKIP)
        states.append(state_of(*parts[:2]))
    assert graphs_compiled() - graphs == 1
    for step in range(1, 8):
        if step in {2, 5}:
            assert_identical(states[step - 1], states[step])
        else:
            assert not torch.equal(states[step - 1][0]["head.weight"], states[step][0]["head.weight"])
    values = parts[3].read(0, 8)
    assert parts[3].skipped_steps == 2
    assert np.isfinite(values["loss"]).all()
    assert np.flatnonzero(~np.isfinite(values["gradient_norm"])).tolist() == [2, 5]


def test_good_steps_are_the_same_bits_with_and_without_skip():
    found = []
    for config in (MnistConfig(), SKIP):
        parts = parts_of("adamw")
        for batch in batches_with_bad(set()):
            simple_mnist_tpu.train_step.compiled(*parts, *batch, config)
        found.append([parts[3].read(0, 8)["loss"].tolist(), state_of(*parts[:2])])
    assert_identical(*found)


def test_the_transformer_skips_a_step_too(monkeypatch):
    """Also where one micro-batch alone is bad."""
    sizes = dict(num_layers=1, num_heads=2, embedding_dim=32, sequence_length=16, vocab_size=64)
    config = TransformerConfig(**sizes, optimizer="adamw", gradient_accumulation_steps=2, on_nonfinite="skip")
    model = GPT(config.shape)
    model.initialise(0)
    model = model.to(torch_xla.device())
    optimizer = transformer_tpu.build_optimizer(config, model)
    metrics = DeviceMetrics(NAMES, 8, torch_xla.device())
    rates = learning_rates(config, 8).to(torch_xla.device())
    cross_entropy = operations.CrossEntropy.apply

    class Poisoned:
        @staticmethod
        def apply(logits, targets, vocab_size):
            return Poison.apply(cross_entropy(logits, targets, vocab_size), (targets[:2] == 9).all())

    monkeypatch.setattr(operations, "CrossEntropy", Poisoned)
    states, random = [], np.random.default_rng(0)
    for step in range(4):
        tokens = random.integers(10, 64, (4, 17)).astype(np.int32)
        tokens[0, 1:3] = 9 if step == 2 else 10
        batch = torch.from_numpy(tokens).to(torch_xla.device())
        transformer_tpu.train_step.compiled(model, optimizer, rates, metrics, batch, config)
        states.append(state_of(model, optimizer))
    assert_identical(states[1], states[2])
    assert not torch.equal(states[2][0]["qkv_weight.0"], states[3][0]["qkv_weight.0"])
    metrics.read(0, 4)
    assert metrics.skipped_steps == 1


def test_an_evaluation_without_a_finite_loss_ends_the_run_before_it_is_saved(tmp_path, capsys):
    """The last update is seen by no further step: such a run ended well, with accuracy 0.1 and a checkpoint."""
    options = ["--optimizer=sgd", "--learning_rate=1e38", "--global_batch_size=1437", "--num_epochs=1"]
    options += ["--warmup_steps=0", "--save_every=1", "--run_dir", tmp_path / "run"]
    assert in_process(*TINY, *options) == 1
    error = capsys.readouterr().err
    assert "error: the evaluation after step 1 has test_loss nan; expected a finite number; lower --learning" in error
    assert saved_steps(tmp_path / "run") == [] and not (tmp_path / "run" / "summary.json").exists()
    assert in_process(*TINY, *options[:-1], tmp_path / "skip", "--on_nonfinite=skip") == 0  # as was asked for


def test_stop_finds_a_bad_gradient_before_it_is_saved_and_says_where(tmp_path, capsys, bad_gradients, monkeypatch):
    """The gradient of the step that is saved is the one no loss has seen yet. The save before it, still under way on
    this slow disk, is the last checkpoint all the same."""
    sync_folder = checkpoint.sync_folder
    options = [*TINY, "--num_epochs=1", "--save_every=1", "--run_dir", tmp_path / "run", "--log_every=50"]
    with monkeypatch.context() as slow_disk:
        slow_disk.setattr(checkpoint, "sync_folder", lambda folder: (time.sleep(0.05), sync_folder(folder)))
        assert in_process(*options) == 1
    error = capsys.readouterr().err
    last = max(saved_steps(tmp_path / "run"))
    assert f"step {last + 1}, of steps 1 to {last + 1} read now, has loss " in error
    assert "gradient norm inf" in error or "gradient norm nan" in error
    assert f"the last checkpoint is of step {last}; lower --learning_rate in another" in error
    assert "--resume must --on_nonfinite skip" in error and error.count("\n") == 1
    state = read_checkpoint(tmp_path / "run" / "checkpoints" / f"step_{last:08d}")
    assert all(torch.isfinite(tensor).all() for tensor in state.part("model").values())

    assert in_process(*options, "--resume=must", "--on_nonfinite=skip") == 0, "and so the run goes on"
    assert summary_in(tmp_path / "run")["skipped_steps"] >= 1


def test_skip_counts_in_the_log_and_resumes_bit_identical(tmp_path, capsys, bad_gradients):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    options = [*TINY, "--on_nonfinite=skip", "--keep_checkpoints=9"]
    assert in_process(*options, "--run_dir", whole) == 0
    out = capsys.readouterr().out
    summary = summary_in(whole)
    train = [line for line in read_lines(whole) if line["kind"] == "train"]
    assert summary["skipped_steps"] == train[-1]["skipped_steps"] >= 2
    assert f"  skipped {summary['skipped_steps']}" in out
    assert f"skipped    {summary['skipped_steps']} of 44 updates, which were not finite\n" in out
    assert all(line["loss"] is not None for line in train)
    assert (summary["train_graphs"], summary[UPLOADS], summary[READS]) == (1, 0, 0)

    shutil.copytree(whole, resumed)
    for step in ("step_00000040", "step_00000044"):
        shutil.rmtree(resumed / "checkpoints" / step)
    assert in_process(*options, "--run_dir", resumed, "--resume=must") == 0
    assert_identical(*(state_in(folder / "checkpoints" / "step_00000044") for folder in (whole, resumed)))
    assert numbers(whole) == numbers(resumed)
    assert summary_in(resumed)["skipped_steps"] == summary["skipped_steps"]


def test_the_transformer_stops_or_skips_and_keeps_its_count_when_it_is_resumed(tmp_path, capsys):
    """Its state comes back by another way than that of the MNIST script: straight into the places on the mesh."""
    options = ["--num_layers=1", "--num_heads=2", "--embedding_dim=32", "--sequence_length=16", "--num_steps=6"]
    options += ["--global_batch_size=4", "--warmup_steps=0", "--device=cpu", "--no_tensorboard", "--log_every=6"]
    options += ["--optimizer=sgd", "--learning_rate=1e38", "--clip_gradient_norm=0"]

    def train(run_dir, *more: str) -> int:
        config = parse_command_line(TransformerConfig, "", [*options, f"--run_dir={run_dir}", *more])
        return run_script(lambda: transformer_tpu.train(config))

    assert train(tmp_path / "stops") == 1
    error = capsys.readouterr().err
    assert "of steps 1 to 6 read now" in error and "there is no checkpoint before it" in error
    counts = []
    for _ in range(2):
        assert train(tmp_path / "run", "--on_nonfinite=skip", "--resume=auto") == 0, capsys.readouterr().err
        counts.append(summary_in(tmp_path / "run")["skipped_steps"])
    assert counts[0] == counts[1] >= 4
