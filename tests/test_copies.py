"""A copy of simple_mnist_tpu.py with another model and other data is right, or says why not."""

import shutil

import numpy as np
import pytest
import torch
from conftest import in_process, state_in, summary_in
from test_simple_mnist import assert_identical
from torch import nn

import simple_mnist_tpu
from mnist_data import ImageDataset
from tpu_utils.checkpoint import Checkpoints

SHORT = ["--device=cpu", "--num_epochs=2", "--max_shift=0", "--no_tensorboard", "--eval_batch_size=48"]
SHORT += ["--warmup_steps=2", "--learning_rate=1e-3"]


class Dropping(nn.Module):
    """Half of what it knows is left out in training, and none of it in an evaluation."""

    def __init__(self, image_size, channels, hidden_dim):
        super().__init__()
        self.hidden, self.head = nn.LazyLinear(32), nn.Linear(32, 5)
        self.hidden(torch.zeros(1, 3 * image_size**2))

    def forward(self, images):
        hidden = torch.relu(self.hidden(images.float().flatten(1)))
        return self.head(nn.functional.dropout(hidden, 0.5, self.training))


class Normed(nn.Module):
    """BatchNorm has statistics that an evaluation reads, and a count of batches without a dimension."""

    def __init__(self, image_size, channels, hidden_dim):
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.head = nn.Linear(8 * image_size**2, 5)

    def forward(self, images):
        return self.head(torch.relu(self.norm(self.convolution(images.float()))).flatten(1))


def colour_images(dtype):
    """Five classes by their mean colour, (N, 3, 8, 8); floats in [0, 1], which are all 0 as bytes."""
    random = np.random.default_rng(0)
    labels = random.integers(0, 5, 600).astype(np.int64)
    images = random.random((600, 3, 8, 8)) * 0.5 + labels[:, None, None, None] * 0.1
    images = images.astype(dtype) if dtype == np.float32 else (images * 255).astype(dtype)
    return ImageDataset("mine", images[:480], labels[:480], images[480:], labels[480:])


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
    summary = summary_in(tmp_path / "run")
    model = kind(data.image_size, 0, 0).eval()
    model.load_state_dict(Checkpoints(tmp_path / "run" / "checkpoints", 1).load("must").part("model"))
    with torch.no_grad():
        logits = model(torch.from_numpy(data.test_images))
    accuracy = (logits.argmax(1).numpy() == data.test_labels).mean()
    assert summary["test_accuracy"] == pytest.approx(accuracy, abs=1e-6)
    expected = nn.functional.cross_entropy(logits, torch.from_numpy(data.test_labels)).item()
    assert summary["test_loss"] == pytest.approx(expected, rel=1e-4)
    assert max(summary["train_graphs"], summary["eval_graphs"]) <= 1  # 0: another test here has compiled it


def test_a_run_with_batch_norm_resumes_bit_identical_from_its_first_step(tmp_path, copied):
    """Its count of batches is 1 then, which torch_xla would make a constant of."""
    copied(Normed, colour_images(np.float32))
    options = [*SHORT, "--save_every=1", "--keep_checkpoints=99"]
    assert in_process(*options, "--run_dir", tmp_path / "run") == 0
    resumed = tmp_path / "resumed" / "checkpoints"
    shutil.copytree(tmp_path / "run" / "checkpoints" / "step_00000001", resumed / "step_00000001")
    assert in_process(*options, "--run_dir", resumed.parent, "--resume=must") == 0
    assert summary_in(resumed.parent)["train_graphs"] == 0, "it is the program of the run before"
    assert_identical(*(state_in(folder / "step_00000014") for folder in (tmp_path / "run" / "checkpoints", resumed)))
