"""A copy of a script with another model and other data is right, or says why not."""

import json
import re
from functools import cache, partial

import numpy as np
import pytest
import torch
from processes import QUICKLY_COMPILED, run
from run_files import assert_identical, in_process, losses_in, state_in, summary_in
from small_models import CELLS, STEPS, Normed, colour_images, train_cell

import simple_mnist_tpu
from tpu_utils.checkpoint.loading import CheckpointReader

SHORT = ["--device=cpu", "--num_epochs=1", "--max_shift=0", "--no_tensorboard", "--eval_batch_size=48"]
SHORT += ["--warmup_steps=1", "--learning_rate=1e-2", "--global_batch_size=64"]
# batches are still sent while uploads are counted: of steps 4 and 5
MATRIX = [*SHORT, "--save_every=1", "--keep_checkpoints=9", "--log_every=3", "--prefetch_batches=1"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of the cells that a script has trained: trained(script)."""

    @cache
    def train(script: str):
        folder = tmp_path_factory.mktemp(script)
        if script == "distributed":  # over 4 devices
            done = run("tests/small_models.py", folder, *MATRIX, XLA_FLAGS=QUICKLY_COMPILED)
            assert done.returncode == 0, done.stderr
        else:
            with pytest.MonkeyPatch.context() as patch:
                for name in ("load_dataset", "ConvNet"):  # put back at the end
                    patch.setattr(simple_mnist_tpu, name, None)
                for cell in CELLS:
                    train_cell(cell, folder, simple_mnist_tpu, partial(in_process, *MATRIX))
        return folder

    return train


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("script", [pytest.param("simple", marks=pytest.mark.slow), "distributed"])
def test_another_model_on_colour_images_is_one_graph_and_evaluated_as_plain_pytorch_does(trained, script, cell):
    """And uploads nothing beside the batches, but for the seed of torch's own dropout."""
    run_dir, (kind, dtype) = trained(script) / cell / "whole", CELLS[cell]
    summary, data = summary_in(run_dir), colour_images(np.dtype(dtype))
    assert json.loads((run_dir / "config.json").read_text())["data"] == data.description, "not what was read"
    assert (summary["steps"], summary["train_graphs"], summary["eval_graphs"]) == (STEPS, 1, 1)
    assert summary["host_to_device_uploads_per_step"] == (cell == "Dropping-float32")
    model = kind(data.image_size, 0, 0).eval()
    model.load_state_dict(CheckpointReader(run_dir / "checkpoints").load("must").part("model"))
    with torch.no_grad():
        logits = model(torch.from_numpy(data.test_images))
    accuracy = (logits.argmax(1).numpy() == data.test_labels).mean()
    assert summary["test_accuracy"] == pytest.approx(accuracy, abs=1e-6)
    expected = torch.nn.functional.cross_entropy(logits, torch.from_numpy(data.test_labels)).item()
    assert summary["test_loss"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("script", [pytest.param("simple", marks=pytest.mark.slow), "distributed"])
def test_a_resumed_run_ends_bit_identical_with_the_program_of_the_run_before(trained, script, cell):
    whole, resumed = (trained(script) / cell / name for name in ("whole", "resumed"))
    last = f"checkpoints/step_{STEPS:08}"
    assert_identical(state_in(whole / last), state_in(resumed / last))
    assert summary_in(resumed)["train_graphs"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS)
def test_on_a_mesh_batch_norm_is_over_the_global_batch_and_dropout_the_same(trained, cell):
    one, four = (trained(script) / cell / "whole" for script in ("simple", "distributed"))
    assert losses_in(one)[-1] < losses_in(one)[0], "it learns nothing, so all would agree"
    np.testing.assert_allclose(losses_in(four), losses_in(one), rtol=1e-5)
    assert summary_in(four)["test_loss"] == pytest.approx(summary_in(one)["test_loss"], rel=1e-5)


@pytest.mark.parametrize(
    "make", [partial(torch.optim.SGD, lr=0.01, momentum=0.9), partial(torch.optim.AdamW, lr=0.01, capturable=True)]
)
def test_an_optimizer_that_creates_its_state_in_step_1_is_named(tmp_path, monkeypatch, capsys, make):
    data = colour_images(np.float32)
    monkeypatch.setattr(simple_mnist_tpu, "load_dataset", lambda config: data)
    monkeypatch.setattr(simple_mnist_tpu, "ConvNet", Normed)
    monkeypatch.setattr(simple_mnist_tpu, "make_optimizer", lambda config, parameters: make(parameters))
    monkeypatch.setattr(simple_mnist_tpu, "step_optimizer", lambda optimizer, *rest: optimizer.step())
    assert in_process(*SHORT, "--run_dir", tmp_path / "run") == 1
    said = capsys.readouterr().err
    assert re.search(r"step 2 compiled graph 2 .*: optimizer has \d+ tensors of state and had 0 before its first", said)
    assert "as make_optimizer of tpu_utils/step/optim.py does" in said and "Python number" not in said


class Reading(Normed):
    """Looks at a value on the device."""

    def forward(self, images):
        logits = super().forward(images)
        if logits.device.type == "xla" and logits.mean() > 1e9:
            raise AssertionError
        return logits


@pytest.mark.parametrize("kind", ["model", "optimizer"])
def test_what_reads_a_tensor_inside_the_step_is_named_by_its_line(tmp_path, monkeypatch, capsys, kind):
    data = colour_images(np.float32)
    monkeypatch.setattr(simple_mnist_tpu, "load_dataset", lambda config: data)
    monkeypatch.setattr(simple_mnist_tpu, "ConvNet", Reading if kind == "model" else Normed)
    if kind == "optimizer":
        make = partial(torch.optim.AdamW, lr=0.01)
        monkeypatch.setattr(simple_mnist_tpu, "make_optimizer", lambda config, parameters: make(parameters))
    assert in_process(*SHORT, "--run_dir", tmp_path / "run") == 1
    (said,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert "train_step reads a tensor inside the compiled function in step 1, at " in said
    line = "if logits.device.type" if kind == "model" else "optimizer.step()"
    assert line in said and "use make_optimizer of tpu_utils/step/optim.py" in said
