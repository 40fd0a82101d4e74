"""What a finished run shows of itself: TensorBoard's hyperparameters and goodput, misread digits, a sample of text."""

import dataclasses
import json

import numpy as np
import pytest
from conftest import run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from config import InputError, TransformerConfig
from data import load_digits
from tpu_utils import (
    Checkpoints,
    graphs_compiled,
    log_sample,
    print_summary,
    transfers_from_device,
    transfers_to_device,
)
from tpu_utils.pictures import read_misread
from transformer_tpu import GPT


def events(run_dir):
    found = EventAccumulator(str(run_dir / "tensorboard"))
    found.Reload()
    return found


def test_the_last_lines_say_what_should_not_have_been(capsys):
    good = dict(steps=44, train_graphs=1, eval_graphs=1, skipped_steps=0, host_to_device_uploads_per_step=0.0)
    good |= dict(seconds=3.0, goodput={"step": 2.0, "other": 1.0})
    print_summary(good)
    assert capsys.readouterr().out == "graphs     1 train, 1 eval\nseconds    3.0: step 2.0, other 1.0\n"
    print_summary(good | dict(skipped_steps=3, host_to_device_uploads_per_step=1.0))
    said = capsys.readouterr().out.splitlines()
    assert said[1] == "skipped    3 of 44 updates, which were not finite"
    assert said[2] == "uploads    1.0 a step beside the batch; expected 0" and len(said) == 4


@pytest.mark.parametrize("script", ["simple_mnist_tpu.py", "distributed_mnist_tpu.py"])
def test_a_finished_run_shows_what_it_misread_and_what_it_was(tmp_path, script):
    options = ["--run_dir", tmp_path / "run", "--device", "cpu", "--preset", "quick_test", "--learning_rate", "4e-3"]
    result = run(script, *options, "--num_epochs", "3", "--warmup_steps", "2")
    assert result.returncode == 0, result.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["train_graphs"], summary["eval_graphs"]) == (1, 1)

    found, digits = read_misread(tmp_path / "run"), load_digits()
    assert found["num_misread"] == round((1 - summary["test_accuracy"]) * len(digits.test_labels)) > 0
    assert found["num_tested"] == len(digits.test_labels) and found["step"] == summary["steps"]
    assert (found["labels"] != found["predictions"]).all()
    for image, label in zip(found["images"], found["labels"], strict=True):
        same = (digits.test_images == image).all((1, 2))
        assert label in digits.test_labels[same]

    assert not [path for path in (tmp_path / "run" / "tensorboard").iterdir() if path.is_dir()], "one run, one folder"
    board = events(tmp_path / "run")
    tags = board.Tags()
    assert tags["images"] == ["misread"]
    for phase, seconds in summary["goodput"].items():
        (event,) = board.Scalars(f"goodput_seconds/{phase}")
        assert event.value == pytest.approx(seconds) and event.step == summary["steps"]
    assert board.Scalars("summary/test_accuracy")[-1].value == pytest.approx(summary["test_accuracy"])
    options = board.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    assert b"learning_rate" in options and b"global_batch_size" in options
    assert b"summary/test_accuracy" in board.summary_metadata["_hparams_/experiment"].plugin_data.content


def save_untrained(folder, **changes):
    options = dict(dataset="text", num_layers=1, num_heads=1, embedding_dim=64, sequence_length=40, preset="quick_test")
    config = TransformerConfig(**{**options, **changes})
    model = GPT(config.shape)
    model.initialise(0)
    state = {"step": 7, "config": dataclasses.asdict(config), "model": model.state_dict()}
    Checkpoints(folder / "checkpoints", 1).save(7, state)
    return config


def test_a_sample_of_bytes_takes_no_graph_and_no_transfer(tmp_path):
    config = save_untrained(tmp_path)
    before = graphs_compiled(), transfers_to_device(), transfers_from_device()
    log_sample(config, tmp_path, lambda: GPT(config.shape))
    assert (graphs_compiled(), transfers_to_device(), transfers_from_device()) == before
    text = (tmp_path / "sample.txt").read_text()
    assert 0 < len(text) <= 39, "as many bytes as the context holds"
    log_sample(config, tmp_path, lambda: GPT(config.shape))
    assert (tmp_path / "sample.txt").read_text() == text
    assert events(tmp_path).Tags()["tensors"] == ["sample/text_summary"]


@pytest.mark.parametrize("changes", [dict(dataset="synthetic"), dict(dataset="tokens"), dict(embedding_dim=4096)])
def test_no_sample_of_what_are_no_bytes_or_of_a_large_model(tmp_path, changes):
    options = dict(dataset="text", num_layers=1, num_heads=1, embedding_dim=64)
    log_sample(TransformerConfig(**{**options, **changes}), tmp_path, None)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_file_of_misread_digits_is_named(tmp_path):
    (tmp_path / "misread.npz").write_bytes(b"PK\x03\x04 cut")
    with pytest.raises(InputError, match=r"misread.npz cannot be read: .*; delete it"):
        read_misread(tmp_path)
    np.savez(tmp_path / "misread.npz", images=np.zeros(1))
    with pytest.raises(InputError, match=r"misread.npz cannot be read"):
        read_misread(tmp_path)
