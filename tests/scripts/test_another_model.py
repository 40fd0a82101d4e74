"""docs/another_model.md: each folder of docs/copies in a copy of the simplest script, trained as plain PyTorch does."""

import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from processes import ROOT, Script, run
from run_files import read_lines, summary_in

from config import ImageConfig
from images.arrays import TrainBatches
from tpu_utils.checkpoint.loading import CheckpointReader
from tpu_utils.step.optim import learning_rates
from tpu_utils.trial.checks import with_tensors

COPIES = ROOT / "docs" / "copies"
EPOCHS, BATCH = 2, 16
OPTIONS = [f"--num_epochs={EPOCHS}", f"--global_batch_size={BATCH}", "--eval_batch_size=32", "--log_every=1"]
OPTIONS += ["--device=cpu", "--no_tensorboard", "--warmup_steps=2", "--data_dir=.", "--learning_rate=0.01"]
DRAW = np.random.default_rng(0)


def add(name: str, folder: Path) -> None:
    """What the page says: copy the files of docs/copies/NAME, and apply the patch that is among them."""
    for path in (COPIES / name).iterdir():
        shutil.copy(path, folder)
    if (COPIES / name / "simple_mnist_tpu.patch").exists():
        command = ["patch", "-i", "simple_mnist_tpu.patch"]
        done = subprocess.run(command, text=True, cwd=folder, capture_output=True)
        assert done.returncode == 0 and "fuzz" not in done.stdout, done.stdout


@pytest.fixture(scope="module")
def copied(tmp_path_factory):
    """The copy that README makes, but for its model."""
    if not shutil.which("patch"):
        pytest.skip("this machine has no patch program, which README's section needs")
    folder = tmp_path_factory.mktemp("another") / "copy"
    assert run("tools.copy_example", "simple_mnist_tpu.py", folder).returncode == 0
    add("arrays", folder)
    script = (folder / "simple_mnist_tpu.py").read_text()
    start = script.index("class ConvNet")
    (folder / "simple_mnist_tpu.py").write_text(script[:start] + script[script.index("def build_model") :])
    return folder


def pixels(count: int):
    images = DRAW.integers(0, 255, (count, 3, 8, 8), np.uint8)
    labels = (images[:, 0] > 127).astype(np.int64) + (images[:, 1] > 200)
    return images, np.where(DRAW.random(labels.shape) < 0.3, -100, labels)


def sequences(count: int):
    lengths, rows = DRAW.integers(2, 7, count), DRAW.normal(size=(count, 7, 4)).astype(np.float32)
    there = np.arange(7) < lengths[:, None]
    rows *= there[:, :, None]
    rows[:, :, 0] = np.arange(7) == lengths[:, None] - 1
    return rows, (rows[:, :, 1].sum(1) > 0).astype(np.int64)


def rows_and(targets: Callable):
    def make(count: int):
        rows = DRAW.normal(size=(count, 6)).astype(np.float32)
        return rows, targets(rows)

    return make


def cross_entropy(model, images, labels, teacher=None):
    return F.cross_entropy(model(images), labels)


def distilled(model, images, labels, teacher):
    logits, taught = model(images), (teacher(images) / 2).softmax(1)
    imitation = F.kl_div((logits / 2).log_softmax(1), taught, reduction="batchmean")
    return 0.5 * F.cross_entropy(logits, labels) + 2 * imitation


def two_inputs(count: int):
    images, rows = DRAW.integers(0, 255, (count, 4, 4), np.uint8), DRAW.normal(size=(count, 6)).astype(np.float32)
    return images, (images.mean((1, 2)) / 127 + rows[:, 0] > 1).astype(np.int64), rows


CLASSES = rows_and(lambda rows: (rows[:, 0] + rows[:, 1] > 0).astype(np.int64))
UNLABELLED = rows_and(lambda rows: np.zeros(len(rows), np.int64))
PERCEPTRON = "from torch import nn\n\n\nclass Net(nn.Sequential):\n    def __init__(self, num_classes):\n"
PERCEPTRON += "        super().__init__(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, num_classes))\n"
KINDS = {  # a folder: arrays of so many examples; the loss of a batch
    "pixels": (pixels, cross_entropy),
    "sequences": (sequences, cross_entropy),
    "regression": (
        rows_and(lambda rows: (rows[:, :3] * 2 - rows[:, 3:]).astype(np.float32)),
        lambda model, rows, targets, teacher: (model(rows) - targets).square().mean(),
    ),
    "autoencoder": (UNLABELLED, lambda model, rows, labels, teacher: (model(rows) - rows).square().mean()),
    "diffusion": (UNLABELLED, None),  # its noise is the device's
    "teacher": (CLASSES, distilled),
    "two_inputs": (two_inputs, lambda model, inputs, labels, teacher: F.cross_entropy(model(*inputs), labels)),
    "optimizer": (CLASSES, cross_entropy),
}


def module_of(name: str):
    """A module of the folder that the test works in."""
    specification = importlib.util.spec_from_file_location(name, Path.cwd() / f"{name}.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def trained(folder: Path, run_dir: str, *options: str) -> str:
    done = Script("simple_mnist_tpu.py", *OPTIONS, f"--run_dir={run_dir}", *options, folder=folder)
    assert done.wait() == 0, done.text("err")
    return done.text("out")


def test_the_page_names_each_folder_and_a_patch_is_short():
    page = (ROOT / "docs" / "another_model.md").read_text()
    assert (
        {path.name for path in COPIES.iterdir()}
        == {*KINDS, "arrays", "pictures"}
        == set(re.findall(r"\(copies/(\w+)\)", page))
    )
    for patch in COPIES.glob("*/*.patch"):
        assert len(patch.read_text().splitlines()) <= 45, patch


@pytest.mark.parametrize("name", KINDS)
def test_training_and_evaluation_are_those_of_plain_pytorch(name, copied, tmp_path, monkeypatch):
    (arrays, loss_of), folder = KINDS[name], tmp_path / "mine"
    shutil.copytree(copied, folder)
    monkeypatch.chdir(folder)
    (folder / "my_model.py").write_text(PERCEPTRON)
    for which, count in (("train", 80), ("test", 45)):
        for what, array in zip(("images", "labels", "rows"), arrays(count), strict=False):
            np.save(folder / f"{which}_{what}.npy", array)
    if name == "teacher":
        trained(folder, "runs/teacher", "--seed=1")
    add(name, folder)
    said = trained(folder, "run")
    lines = read_lines(folder / "run")
    found = [line["loss"] for line in lines if line["kind"] == "train"]
    evaluated = [line for line in lines if line["kind"] == "eval"][-1]
    if loss_of is None:
        assert "draws random numbers (rand, randn_like)" in said and summary_in(folder / "run")["train_graphs"] == 1
        assert len(found) == EPOCHS * (80 // BATCH) and 0 < evaluated["validation_loss"] < 1.5
        return

    monkeypatch.setitem(sys.modules, "my_model", module_of("my_model"))
    config = ImageConfig(num_epochs=EPOCHS, global_batch_size=BATCH, warmup_steps=2, learning_rate=0.01, data_dir=".")
    torch.manual_seed(0)
    my_data = module_of("my_data")
    dataset = my_data.load_dataset(config)
    batches, teacher = getattr(my_data, "TrainBatches", TrainBatches)(dataset, config), None
    model = sys.modules["my_model"].Net(dataset.num_classes)
    model = with_tensors(model, lambda tensor: tensor.detach().clone())  # with PyTorch's own GRU
    if name == "teacher":
        teacher = sys.modules["my_model"].Net(dataset.num_classes).requires_grad_(False)
        teacher.load_state_dict(CheckpointReader(folder / "runs/teacher/checkpoints").load("must").part("model"))
    make = module_of("my_optimizer").Lion if name == "optimizer" else partial(torch.optim.AdamW, weight_decay=0.0)
    optimizer, rates, losses = make(model.parameters()), learning_rates(config, batches.num_steps), []
    for index in range(batches.num_steps):
        *inputs, labels = (torch.from_numpy(array) for array in batches.batch(index))
        images = inputs[0] if len(inputs) == 1 else inputs
        for group in optimizer.param_groups:
            group["lr"] = rates[index : index + 1]
        loss = loss_of(model, images, labels if labels.is_floating_point() else labels.long(), teacher)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        images, labels = torch.from_numpy(dataset.test_images.copy()), torch.from_numpy(dataset.test_labels.copy())
        if hasattr(dataset, "test_rows"):
            images = [images, torch.from_numpy(dataset.test_rows)]
        evaluated_by = cross_entropy if name == "teacher" else loss_of
        expected = {key: evaluated_by(model, images, labels, None).item() for key in evaluated if key.endswith("loss")}
        if "accuracy" in evaluated:
            logits = model(*images) if name == "two_inputs" else model(images)
            expected["accuracy"] = (logits.argmax(1) == labels)[labels != -100].float().mean().item()
    assert expected.keys() & {"test_loss", "validation_loss"}
    np.testing.assert_allclose(found, losses, rtol=2e-4, atol=1e-5)
    assert {name: evaluated[name] for name in expected} == pytest.approx(expected, rel=5e-4)
    assert "check  " not in said or name == "teacher", said


def test_a_data_source_of_ones_own(tmp_path):
    """The page's steps. A source without a vocabulary is refused: bytes would train as GPT-2's 50,257 tokens."""
    assert run("tools.copy_example", "transformer_tpu.py", tmp_path / "mine").returncode == 0
    data, options = tmp_path / "mine" / "language" / "data", tmp_path / "mine" / "language" / "options"
    (data / "mine.py").write_text((data / "text.py").read_text().replace("--dataset text", "--dataset mine"))
    (tmp_path / "mine" / "some.txt").write_text("To be, or not to be, that is the question. " * 500)
    code = (options / "transformer_options.py").read_text()
    code = code.replace('"chat", "stream"]', '"chat", "stream", "mine"]')

    def train() -> Script:
        words = "--dataset mine --data_dir=. --train_data some.txt --num_steps 2 --warmup_steps 1 --log_every 1"
        words += " --device cpu --num_layers 1 --global_batch_size 8 --eval_batches 1 --run_dir run"
        return Script("transformer_tpu.py", *words.split(), folder=tmp_path / "mine")

    (options / "transformer_options.py").write_text(code)
    refused = train()
    assert refused.wait() == 2 and "dataset mine has no vocabulary in DEFAULT_VOCAB_SIZE" in refused.text("err")
    tables = {"SMALLEST_VOCAB_SIZE", "DEFAULT_VOCAB_SIZE"}
    code = re.sub(r"^(\w+) = \{", lambda m: f'{m[0]}"mine": 257, ' if m[1] in tables else m[0], code, flags=re.M)
    (options / "transformer_options.py").write_text(code)
    done = train()
    assert done.wait() == 0, done.text("err")
    first = next(line for line in read_lines(tmp_path / "mine" / "run") if line["kind"] == "train")
    assert first["loss"] == pytest.approx(np.log(257), abs=0.3)
