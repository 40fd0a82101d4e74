"""A copy of simple_mnist_tpu.py with another model and other data is right, or says why not."""

import json
import re
import shutil
from functools import partial

import numpy as np
import pytest
import torch
from conftest import in_process, losses_in, state_in, summary_in
from processes import run
from small_models import Dropping, Normed, Vision, colour_images
from test_simple_mnist import assert_identical

import simple_mnist_tpu
from image_data import ImageDataset
from tpu_utils.checkpoint import Checkpoints

SHORT = ["--device=cpu", "--num_epochs=2", "--max_shift=0", "--no_tensorboard", "--eval_batch_size=48"]
SHORT += ["--warmup_steps=2", "--learning_rate=1e-3"]


@pytest.fixture
def copied(monkeypatch):
    """The script with this model and these images."""

    def change(model: type, data: ImageDataset) -> None:
        monkeypatch.setattr(simple_mnist_tpu, "load_dataset", lambda config: data)
        monkeypatch.setattr(simple_mnist_tpu, "ConvNet", model)

    return change


@pytest.mark.parametrize("dtype", [np.float32, np.uint8])
@pytest.mark.parametrize("kind", [Dropping, Normed])
def test_another_model_on_colour_images_is_evaluated_as_plain_pytorch_does(tmp_path, copied, kind, dtype):
    data = colour_images(dtype)
    copied(kind, data)
    assert in_process(*SHORT, "--run_dir", tmp_path / "run") == 0
    summary, config = summary_in(tmp_path / "run"), json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["data"] == data.description and "mine" in config["data"], "what --dataset says is not what was read"
    model = kind(data.image_size, 0, 0).eval()
    model.load_state_dict(Checkpoints(tmp_path / "run" / "checkpoints", 1).load("must").part("model"))
    with torch.no_grad():
        logits = model(torch.from_numpy(data.test_images))
    accuracy = (logits.argmax(1).numpy() == data.test_labels).mean()
    assert summary["test_accuracy"] == pytest.approx(accuracy, abs=1e-6)
    expected = torch.nn.functional.cross_entropy(logits, torch.from_numpy(data.test_labels)).item()
    assert summary["test_loss"] == pytest.approx(expected, rel=1e-4)
    assert max(summary["train_graphs"], summary["eval_graphs"]) <= 1  # 0: another test here has compiled it


@pytest.mark.parametrize(
    "make",
    [
        partial(torch.optim.SGD, lr=0.01, momentum=0.9),
        partial(torch.optim.AdamW, lr=0.01, capturable=True),
    ],
)
def test_an_optimizer_that_creates_its_state_in_step_1_is_named(tmp_path, copied, monkeypatch, capsys, make):
    copied(Normed, colour_images(np.float32))
    monkeypatch.setattr(simple_mnist_tpu, "make_optimizer", lambda config, parameters: make(parameters))
    monkeypatch.setattr(simple_mnist_tpu, "step_optimizer", lambda optimizer, *rest: optimizer.step())
    assert in_process(*SHORT, "--run_dir", tmp_path / "run") == 1
    said = capsys.readouterr().err
    assert re.search(r"step 2 compiled graph 2 .*: optimizer has \d+ tensors of state and had 0 before its first", said)
    assert "as make_optimizer of optim.py does" in said and "Python number" not in said


@pytest.mark.parametrize("kind", [Normed, Vision])
def test_a_run_with_state_in_its_layers_resumes_bit_identical_from_its_first_step(tmp_path, copied, kind):
    """The count of batches of BatchNorm is 1 then, which torch_xla would make a constant of, and that of dropout."""
    copied(kind, colour_images(np.float32))
    options = [*SHORT, "--save_every=1", "--keep_checkpoints=99"]
    assert in_process(*options, "--run_dir", tmp_path / "run") == 0
    resumed = tmp_path / "resumed" / "checkpoints"
    shutil.copytree(tmp_path / "run" / "checkpoints" / "step_00000001", resumed / "step_00000001")
    assert in_process(*options, "--run_dir", resumed.parent, "--resume=must") == 0
    assert summary_in(resumed.parent)["train_graphs"] == 0, "it is the program of the run before"
    assert_identical(*(state_in(folder / "step_00000014") for folder in (tmp_path / "run" / "checkpoints", resumed)))


@pytest.mark.parametrize("kind, uploads", [("Normed", 0), ("Dropping", 1), ("Vision", 0)])
def test_on_a_mesh_batch_norm_is_over_the_global_batch_and_dropout_the_same(tmp_path, kind, uploads):
    """uploads: torch_xla sends the seed of its own dropout in every step."""
    for devices in (1, 4):
        done = run(
            *("tests/small_models.py", kind, devices, *SHORT, "--run_dir", tmp_path / str(devices)),
            *("--log_every=7", "--prefetch_batches=1"),  # batches are still sent while uploads are counted
        )
        assert done.returncode == 0, done.stderr
        summary = summary_in(tmp_path / str(devices))
        assert (summary["train_graphs"], summary["eval_graphs"]) == (1, 1)
        assert summary["host_to_device_uploads_per_step"] == uploads
    one, four = (losses_in(tmp_path / str(devices)) for devices in (1, 4))
    assert one[-1] < one[0]
    np.testing.assert_allclose(four, one, rtol=1e-5)
    results = [summary_in(tmp_path / str(devices))["test_loss"] for devices in (1, 4)]
    assert results[0] == pytest.approx(results[1], rel=1e-5)
