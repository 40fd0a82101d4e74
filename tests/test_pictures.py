"""What a finished run shows of itself: TensorBoard's hyperparameters and goodput, misread digits."""

import json

import numpy as np
import pytest
from processes import run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mnist_data import load_digits
from tpu_utils.errors import InputError
from tpu_utils.pictures import read_misread


def events(run_dir):
    found = EventAccumulator(str(run_dir / "tensorboard"))
    found.Reload()
    return found


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


def test_a_damaged_file_of_misread_digits_is_named(tmp_path):
    (tmp_path / "misread.npz").write_bytes(b"PK\x03\x04 cut")
    with pytest.raises(InputError, match=r"misread.npz cannot be read: .*; delete it; only the picture"):
        read_misread(tmp_path)
    np.savez(tmp_path / "misread.npz", images=np.zeros(1))
    with pytest.raises(InputError, match=r"misread.npz cannot be read"):
        read_misread(tmp_path)
