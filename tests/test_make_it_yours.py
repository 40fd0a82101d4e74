"""README's "Copy one and make it yours", done to the letter in an empty folder, with a small ResNet."""

import re
import shutil
import signal
import subprocess

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import losses_in, read_lines, state_in, summary_in
from processes import ROOT, Script, waits
from test_simple_mnist import assert_identical

from cifar_data import make_stripes
from config import MnistConfig
from image_data import ImageDataset, TrainBatches
from optim import learning_rates

PAGE = (ROOT / "README.md").read_text()
SECTION = PAGE[PAGE.index("## Copy one and make it yours") : PAGE.index("## On a TPU VM")]
MY_MODEL = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.conv1 = nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 16, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(16)
        self.shortcut = nn.Conv2d(8, 16, 1, stride=2, bias=False)
        self.head = nn.Linear(16, num_classes)

    def forward(self, images):
        x = torch.relu(self.norm(self.conv(images)))
        y = torch.relu(self.norm1(self.conv1(x)))
        x = torch.relu(self.norm2(self.conv2(y)) + self.shortcut(x))
        return self.head(x.mean((2, 3)))
"""
OPTIONS = [
    "--device=cpu",
    "--max_shift=2",
    "--optimizer=sgd",
    "--learning_rate=0.1",
    "--warmup_steps=4",
    "--log_every=1",
]


def arrays() -> ImageDataset:
    """Five kinds of stripes as somebody would have them: floats in [0, 1], labels int64."""
    data, found = make_stripes(), []
    for images, labels in ((data.train_images, data.train_labels), (data.test_images, data.test_labels)):
        kept = np.flatnonzero(labels < 5)
        found += [images[kept].astype(np.float32) / 255, labels[kept].astype(np.int64)]
    return ImageDataset("mine", *found)


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    """A folder of its own, as README says, nothing else in reach."""
    if not shutil.which("patch"):
        pytest.skip("this machine has no patch program, which README's section needs")
    folder = tmp_path_factory.mktemp("stranger")
    blocks = re.findall(r"```(\w+)\n(.*?)```", SECTION, re.S)
    (copying,) = [text for kind, text in blocks if kind == "bash"]
    (my_data,) = [text for kind, text in blocks if kind == "python"]
    (patch,) = [text for kind, text in blocks if kind == "diff"]
    for name in ("*.py", "requirements.txt"):
        for path in ROOT.glob(name):
            shutil.copy(path, folder)
    for name in ("tpu_utils", "tpu_compiler"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(copying, shell=True, check=True, cwd=folder)
    mine = folder / "mine"
    (mine / "my_data.py").write_text(my_data)
    (mine / "my_model.py").write_text(MY_MODEL)
    done = subprocess.run(["patch"], input=patch, text=True, cwd=mine, capture_output=True)
    assert done.returncode == 0 and "fuzz" not in done.stdout, done.stdout
    script = (mine / "simple_mnist_tpu.py").read_text()
    start = script.index("class ConvNet")
    (mine / "simple_mnist_tpu.py").write_text(script[:start] + script[script.index("@torch_xla.compile") :])
    (mine / "mnist_data.py").unlink()
    data = arrays()
    for name in ("train_images", "train_labels", "test_images", "test_labels"):
        np.save(mine / f"{name}.npy", getattr(data, name))
    return mine


def start(mine, run_dir, *options) -> Script:
    return Script("simple_mnist_tpu.py", "--data_dir=.", *OPTIONS, f"--run_dir={run_dir}", *options, folder=mine)


def test_the_patch_is_short_and_leaves_the_loop_alone():
    changed = [line for line in SECTION.splitlines() if re.match(r"[+-](?![+-])", line)]
    assert len(changed) <= 40
    loop = (ROOT / "simple_mnist_tpu.py").read_text().partition("        for step, (images")[2]
    assert loop and not [line for line in changed if line[0] == "-" and line[1:] in loop.splitlines()]


def test_an_epoch_of_somebodys_own(mine):
    script = start(mine, "runs/epoch", "--num_epochs=1")
    assert script.wait() == 0, script.text("err")
    said, summary = script.text("out"), summary_in(mine / "runs/epoch")
    assert "data       mine, 3 x 32 x 32 float32: " in said and "misread.npz" in said
    assert (summary["train_graphs"], summary["eval_graphs"], summary["host_to_device_uploads_per_step"]) == (1, 1, 0)
    losses = losses_in(mine / "runs/epoch")
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:5])
    help_text = Script("simple_mnist_tpu.py", "--help", folder=mine)
    assert help_text.wait() == 0 and "--channels" not in help_text.text("out")
    (mine / "test_labels.npy").rename(mine / "away.npy")
    missing = start(mine, "runs/missing")
    assert missing.wait() == 2 and "test_labels.npy: no such file; expected an array" in missing.text("err")
    (mine / "away.npy").rename(mine / "test_labels.npy")


@pytest.mark.slow
def test_a_resnet_of_ones_own_learns_as_plain_pytorch_does_and_survives_kill_9(mine):
    """Accuracy within 0.2 points of a loop that shares nothing with the script but the batches and the schedule."""
    options = ["--num_epochs=6", "--save_every=10", "--keep_checkpoints=99"]
    whole, killed = start(mine, "runs/whole", *options), start(mine, "runs/killed", *options)
    waits(lambda: (mine / "runs/killed/checkpoints/step_00000030/done").exists(), alive=killed)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert not (mine / "runs/killed/summary.json").exists()
    resumed = Script("simple_mnist_tpu.py", "--run_dir=runs/killed", "--resume=must", folder=mine)
    for script in (whole, resumed):
        assert script.wait() == 0, script.text("err")
    steps = read_lines(mine / "runs/whole")[-1]["step"]
    assert_identical(*(state_in(mine / f"runs/{name}/checkpoints/step_{steps:08d}") for name in ("whole", "killed")))

    data, config = arrays(), MnistConfig(num_epochs=6, max_shift=2, learning_rate=0.1, warmup_steps=4)
    namespace: dict = {}
    exec(MY_MODEL, namespace)
    torch.manual_seed(0)
    model = namespace["Net"](5)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    batches = TrainBatches(data, config)
    for step, rate in enumerate(learning_rates(config, batches.num_steps)):
        images, labels = map(torch.from_numpy, batches.batch(step))
        optimizer.param_groups[0]["lr"] = rate.item()
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels.long()).backward()
        optimizer.step()
    with torch.no_grad():
        right = model.eval()(torch.from_numpy(data.test_images)).argmax(1).numpy() == data.test_labels
    summary = summary_in(mine / "runs/whole")
    print(f"plain PyTorch {right.mean():.4f}, ours {summary['test_accuracy']:.4f}, {len(right)} test images")
    assert summary["test_accuracy"] == pytest.approx(right.mean(), abs=0.002) and right.mean() > 0.9
