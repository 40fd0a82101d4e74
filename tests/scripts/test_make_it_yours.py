"""Copies, as README and docs/make_it_yours.md say: by the command, by the patch, without all that may be deleted."""

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import processes
import pytest
import safetensors.torch
import torch
from processes import ROOT, Script, run
from run_files import losses_in, summary_in

from images.arrays import ImageDataset
from images.made import make_stripes
from tools import copy_example
from tpu_utils.options.parsing import parse_command_line

PAGE = (ROOT / "README.md").read_text()
SECTION = PAGE[PAGE.index("## Copy one and make it yours") : PAGE.index("## On a TPU VM")]
MORE = (ROOT / "docs" / "make_it_yours.md").read_text()
IMAGES = ["--num_epochs=1", "--warmup_steps=1", "--log_every=1"]
TWO_STEPS = {
    **{name: [*IMAGES, "--global_batch_size=700", "--channels=2"] for name in ("simple", "distributed", "ddp")},
    "resnet": [*IMAGES, "--depth=8", "--width=2", "--global_batch_size=1900"],
    "transformer": ["--num_steps=2", "--warmup_steps=1", "--eval_batches=1", "--log_every=1", "--global_batch_size=8"],
}
SCRIPTS = sorted(path.name for path in ROOT.glob("*_tpu.py") if path.name.split("_")[0] in TWO_STEPS)
# python -c BY_ITSELF SCRIPT ...: runs it, then says which files it has imported
BY_ITSELF = """
import runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    print("imported", *(getattr(module, "__file__", None) for module in list(sys.modules.values())))
"""
MY_MODEL = """
from torch import nn


def normed(inputs, outputs, stride):
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())


class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.layers = nn.Sequential(normed(3, 8, 1), normed(8, 16, 2), normed(16, 16, 1))
        self.head = nn.Linear(16, num_classes)

    def forward(self, images):
        return self.head(self.layers(images).mean((2, 3)))
"""
OPTIONS = "--device=cpu --max_shift=2 --optimizer=sgd --learning_rate=0.1 --warmup_steps=4 --log_every=1".split()


def arrays() -> ImageDataset:
    """Five kinds of stripes as somebody would have them: floats in [0, 1], labels int64."""
    data, found = make_stripes(), []
    for images, labels in ((data.train_images, data.train_labels), (data.test_images, data.test_labels)):
        kept = np.flatnonzero(labels < 5)
        found += [images[kept].astype(np.float32) / 255, labels[kept].astype(np.int64)]
    return ImageDataset("mine", *found)


def copied(command: str, folder: Path) -> str:
    """What the page's command says, which is run in the checkout, into this folder in place of the page's."""
    words = re.sub(r"\.\./mine\S*", str(folder), command).split()
    assert words[:2] == [".venv/bin/python", "-m"]
    done = run(*words[2:])
    assert done.returncode == 0, done.stderr
    return done.stdout


def what_to_delete() -> list[tuple[str, str, list[str]]]:
    """(what nobody needs, in a copy of, files and folders), the rows of the page."""
    table = MORE[MORE.index("## What to delete") :].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("| ")]
    return [(what, copy, re.findall("`([^`]+)`", delete)) for what, copy, delete in rows[1:]]


def delete_what_the_page_says(folder: Path, script: str, *kinds: str) -> None:
    """All of it: what runs without many files runs without any one of them."""
    kinds += ("any script", "`transformer_tpu.py`" if script == "transformer_tpu.py" else "an image script")
    kinds += () if script == "ddp_mnist_tpu.py" else ("any script but `ddp_mnist_tpu.py`",)
    for _, copy, paths in what_to_delete():
        for path in paths if copy in kinds else ():
            if path.endswith("/"):
                shutil.rmtree(folder / path, ignore_errors=True)
            else:
                (folder / path).unlink()


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    """A folder of its own, as README says, nothing else in reach."""
    if not shutil.which("patch"):
        pytest.skip("this machine has no patch program, which README's section needs")
    folder = tmp_path_factory.mktemp("stranger")
    (block,) = re.findall(r"```bash\n(.*?)```", SECTION, re.S)
    copying, patching = block.strip().splitlines()
    mine = folder / "mine"
    copied(copying, mine)
    done = subprocess.run(patching.replace("../mine", str(mine)), shell=True, text=True, cwd=ROOT, capture_output=True)
    assert done.returncode == 0 and "fuzz" not in done.stdout, done.stdout
    (mine / "my_model.py").write_text(MY_MODEL)
    script = (mine / "simple_mnist_tpu.py").read_text()
    start = script.index("class ConvNet")
    (mine / "simple_mnist_tpu.py").write_text(script[:start] + script[script.index("def build_model") :])
    delete_what_the_page_says(mine, "simple_mnist_tpu.py", "an image script with your data")
    data = arrays()
    for name in ("train_images", "train_labels", "test_images", "test_labels"):
        np.save(mine / f"{name}.npy", getattr(data, name))
    return mine


def start(mine, run_dir, *options) -> Script:
    return Script("simple_mnist_tpu.py", "--data_dir=.", *OPTIONS, f"--run_dir={run_dir}", *options, folder=mine)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_copy_of_each_script_trains_by_itself_with_all_deleted_that_may_be(script, tmp_path):
    copied(f".venv/bin/python -m tools.copy_example {script} ../mine", tmp_path / "mine")
    delete_what_the_page_says(tmp_path / "mine", script)
    done = Script("-c", BY_ITSELF, script, *TWO_STEPS[script.split("_")[0]], "--run_dir=run", folder=tmp_path / "mine")
    assert done.wait() == 0, done.text("err")
    summary = summary_in(tmp_path / "mine" / "run")
    assert (summary["steps"], summary["train_graphs"], summary["eval_graphs"]) == (2, 1, 1)
    imported = done.text("out").rpartition("imported ")[2].split()
    ours = {name for name in imported if name.startswith(str(ROOT)) and "/.venv/" not in name}
    assert ours <= {processes.__file__}, "imported from the checkout"


def test_each_row_names_what_a_copy_has(tmp_path):
    for script in ("simple_mnist_tpu.py", "transformer_tpu.py"):
        copied(f".venv/bin/python -m tools.copy_example {script} ../mine --compiler", tmp_path / script)
    for what, copy, paths in what_to_delete():
        kind = "transformer_tpu.py" if "transformer" in copy else "simple_mnist_tpu.py"
        assert paths and all((tmp_path / kind / path).exists() for path in paths), what


@pytest.mark.parametrize("script", copy_example.scripts())
def test_the_loss_is_where_the_command_says(script):
    said = ", ".join(copy_example.places_to_edit(ROOT / script))
    named = re.findall(r"the loss in (\w+), line", said)
    assert named == ["summed_loss" if script.startswith("transformer") else "train_step", "eval_step"]
    for name in named:
        (function,) = re.findall(rf"^def {name}\(.*?(?=^\S)", (ROOT / script).read_text(), re.M | re.S)
        assert re.search(r"\b(losses|cross_entropy)\(", function), name


def test_the_command_says_what_it_copied_and_where_to_begin(tmp_path):
    said = copied(".venv/bin/python -m tools.copy_example simple_mnist_tpu.py ../mine", tmp_path / "mine")
    names = "simple_mnist_tpu.py, config.py, images/, tpu_utils/, requirements.txt, LICENSE"
    assert said.startswith(f"copied     {names} to {tmp_path}/mine\nedit first its first lines, which --help prints")
    found = {path.name for path in (tmp_path / "mine").iterdir()}
    assert found == {name.rstrip("/") for name in names.split(", ")}
    lines = (tmp_path / "mine" / "simple_mnist_tpu.py").read_text().splitlines()
    for name, line in re.findall(r"(\w+), line (\d+)", said):
        assert re.match(rf"(class|def) {name}\b", lines[int(line) - 1]), said
    assert not list((tmp_path / "mine").rglob("__pycache__"))
    done = Script("simple_mnist_tpu.py", "--compile_for=v5litepod-1", folder=tmp_path / "mine")
    assert done.wait() == 2 and "compile_for needs the folder tpu_compiler" in done.text("err"), done.text("err")


@pytest.mark.parametrize(
    "script, target, said",
    [
        ("simple_mnist.py", "new", "no training script; expected .*; did you mean simple_mnist_tpu.py"),
        ("simple_mnist_tpu.py", "full", "is there already; expected a new folder, or an empty one"),
        ("simple_mnist_tpu.py", ROOT / "tests" / "new", "is inside a folder of this project"),
    ],
)
def test_a_copy_that_cannot_be_made_is_refused_and_nothing_is_written(tmp_path, script, target, said):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis").write_text("years of work")
    done = run("tools.copy_example", script, tmp_path / target)
    assert done.returncode == 2 and re.search(said, done.stderr), done.stderr
    assert [path.name for path in tmp_path.rglob("*")] == ["full", "thesis"] and not (ROOT / "tests" / "new").exists()


def test_options_of_a_copy_for_many_devices_are_those_of_the_page():
    (block,) = re.findall(r"```python\n(from config import DeviceOptions.*?)```", MORE, re.S)
    namespace: dict = {}
    exec("from dataclasses import dataclass\n" + block, namespace)
    given = parse_command_line(namespace["MyConfig"], "", ["--num_virtual_devices=8", "--shard_parameters"])
    assert (given.num_virtual_devices, given.shard_parameters, given.num_epochs) == (8, True, 10)


def test_the_patch_is_short_and_leaves_the_loop_alone():
    patch = (ROOT / "docs/copies/arrays/simple_mnist_tpu.patch").read_text()
    changed = [line for line in patch.splitlines() if re.match(r"[+-](?![+-])", line)]
    assert len(changed) <= 40
    loop = (ROOT / "simple_mnist_tpu.py").read_text().partition("        for step, (images")[2]
    gone = {line[1:] for line in changed if line[0] == "-" and line[1:]}
    assert loop and gone and not gone.intersection(loop.splitlines())


def classify_as_the_page_does(run_dir: Path, accuracy: float) -> None:
    """Each test image as one new picture: as many are right as the run's evaluation says."""
    (block,) = re.findall(r"```python\n(saved = safetensors.*?)```", MORE, re.S)
    (folder,) = (run_dir / "checkpoints").glob("step_*")
    namespace: dict = {"safetensors": safetensors}
    exec(MY_MODEL, namespace)
    namespace["model"] = namespace["Net"](5)
    block, data = block.replace("RUN/checkpoints/step_00001000", str(folder)), arrays()
    labels = []
    for image in data.test_images:
        names = namespace | {"image": torch.from_numpy(image)}
        exec(block, names)
        labels.append(int(names["label"]))
    assert np.mean(labels == data.test_labels) == pytest.approx(accuracy)


def test_an_epoch_of_somebodys_own(mine):
    script = start(mine, "runs/epoch", "--num_epochs=1")
    assert script.wait() == 0, script.text("err")
    said, summary = script.text("out"), summary_in(mine / "runs/epoch")
    assert "data       mine, 3 x 32 x 32 float32: " in said
    assert (summary["train_graphs"], summary["eval_graphs"], summary["host_to_device_uploads_per_step"]) == (1, 1, 0)
    losses = losses_in(mine / "runs/epoch")
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:5])
    classify_as_the_page_does(mine / "runs/epoch", summary["test_accuracy"])
    help_text = Script("simple_mnist_tpu.py", "--help", folder=mine)
    assert help_text.wait() == 0 and "my_data.py" in help_text.text("out")
    of_the_digits = ("--channels", "digit", "MNIST", "99.")
    assert not [words for words in of_the_digits if words in help_text.text("out")]
    (mine / "test_labels.npy").rename(mine / "away.npy")
    missing = start(mine, "runs/missing")
    assert missing.wait() == 2 and "test_labels.npy: no such file; expected an array" in missing.text("err")
    (mine / "away.npy").rename(mine / "test_labels.npy")
