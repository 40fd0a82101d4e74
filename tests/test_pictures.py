"""What a finished run shows of itself: TensorBoard's hyperparameters and goodput, misread digits."""

import io
import json
import zipfile
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import in_process, summary_in
from mutations import at_most, mutated
from processes import run
from small_models import Flat, colour_images
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import simple_mnist_tpu
from image_data import ImageDataset
from mnist_data import load_digits
from tpu_utils.errors import InputError
from tpu_utils.pictures import as_bytes, log_misread, misread_figure, read_misread


def events(run_dir):
    found = EventAccumulator(str(run_dir / "tensorboard"))
    found.Reload()
    return found


@pytest.mark.parametrize(
    "script", ["simple_mnist_tpu.py", pytest.param("distributed_mnist_tpu.py", marks=pytest.mark.slow)]
)
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


class Finished:
    """What log_misread asks of a run that ended with this model."""

    def __init__(self, run_dir, model):
        self.run_dir, self.events, self.said, self.figures = run_dir, self, [], []
        self.print = self.said.append
        self._saved = SimpleNamespace(step=7, part=lambda name: model.state_dict())

    def last_checkpoint(self):
        return self._saved

    def add_figure(self, tag, figure, step):
        self.figures.append((tag, figure, step))


def finished(tmp_path, images, labels=None):
    """(run, data set, labels as the model reads them); about three of four labels are not what it reads."""
    torch.manual_seed(0)
    model = Flat(int(np.prod(images.shape[1:])))
    model.eval()
    with torch.no_grad():
        read = model(torch.tensor(images)).argmax(1).numpy()
    labels = np.arange(len(images)) % 4 if labels is None else labels
    data = ImageDataset("mine", images, labels, images, labels)
    run = Finished(tmp_path, model)
    log_misread(run, Flat(int(np.prod(images.shape[1:]))), data)
    return run, data, read


@pytest.mark.parametrize(
    "shape, dtype",
    [
        *(((6, 6), dtype) for dtype in (np.uint8, np.int32)),
        ((1, 6, 6), np.float32),
        *(((3, 4, 6), dtype) for dtype in (np.uint8, np.float32, np.float16, np.bool_)),
    ],
)
def test_grey_and_colour_images_are_drawn_whatever_their_numbers(tmp_path, capsys, shape, dtype):
    values = np.random.default_rng(0).integers(0, 2 if dtype == np.bool_ else 200, (8, *shape))
    images = (values / 100 - 1 if np.dtype(dtype).kind == "f" else values).astype(dtype)
    run, data, read = finished(tmp_path, images)
    wrong = np.flatnonzero(read != data.test_labels)
    assert run.said == [f"misread    {len(wrong)} of 8 test images; plot_run.py draws them from misread.npz"]
    found = read_misread(tmp_path)
    assert (found["predictions"] == read[wrong]).all() and (found["labels"] == data.test_labels[wrong]).all()
    drawn = found["images"].reshape(len(wrong), *shape).astype(float)
    low, high = (0, 255) if dtype == np.uint8 else (images[wrong].min(), images[wrong].max())
    expected = (images[wrong].astype(float) - low) / (float(high) - low) * 255
    np.testing.assert_allclose(drawn, expected, atol=0.6)
    ((tag, figure, step),) = run.figures
    assert (tag, step) == ("misread", 7) and "misread" in figure.get_suptitle()
    assert len([axes for axes in figure.axes if axes.images]) == len(wrong)
    assert not capsys.readouterr().err


@pytest.mark.parametrize("shape", [(6,), (2, 6, 6), (4, 6, 6), (6, 6, 3), (2, 3, 4, 4), (3, 2, 513), (520, 2)])
def test_images_of_another_shape_are_counted(tmp_path, capsys, shape):
    images = np.random.default_rng(0).integers(0, 200, (40, *shape)).astype(np.uint8)
    run, data, read = finished(tmp_path, images)
    assert run.said == [f"misread    {(read != data.test_labels).sum()} of 40 test images"]
    assert not run.figures and not list(tmp_path.iterdir()) and not capsys.readouterr().err


def test_a_model_that_misreads_nothing_draws_nothing_and_equal_pixels_are_drawn(tmp_path):
    images = np.random.default_rng(0).random((20, 3, 6, 6)).astype(np.float32)
    _, _, read = finished(tmp_path, images)
    run, *_ = finished(tmp_path, images, read)
    assert run.said[0].startswith("misread    0 of 20 test images") and len(read_misread(tmp_path)["images"]) == 0
    assert (as_bytes(np.full((2, 6, 6), 0.5)) == 0).all()
    misread_figure(**read_misread(tmp_path))


@pytest.mark.parametrize("labels", [np.linspace(0, 1, 40), np.zeros((40, 1), int)])
def test_where_labels_are_no_classes_nothing_is_counted(tmp_path, capsys, labels):
    run, *_ = finished(tmp_path, np.zeros((40, 3, 6, 6), np.float32), labels)
    assert not run.said and not run.figures and not list(tmp_path.iterdir()) and not capsys.readouterr().err


class NotOnTheHost(Flat):
    def forward(self, images):
        if images.device.type == "cpu":
            raise KeyError("no host here")
        return super().forward(images)


def test_a_picture_that_fails_costs_neither_summary_nor_exit_code(tmp_path, monkeypatch, capsys):
    data = colour_images(np.uint8)
    data = ImageDataset("mine", data.train_images, data.train_labels % 4, data.test_images, data.test_labels % 4)
    monkeypatch.setattr(simple_mnist_tpu, "load_dataset", lambda config: data)
    monkeypatch.setattr(simple_mnist_tpu, "ConvNet", lambda *sizes: NotOnTheHost(192))
    options = ["--device=cpu", "--num_epochs=1", "--warmup_steps=1", "--max_shift=0", "--eval_batch_size=48"]
    assert in_process(*options, "--run_dir", tmp_path / "run") == 0
    said = capsys.readouterr()
    assert "warning: no picture of misread images: KeyError: 'no host here'" in said.err
    assert summary_in(tmp_path / "run")["test_accuracy"] > 0 and "misread" not in said.out
    assert not (tmp_path / "run" / "misread.npz").exists()


def test_a_damaged_file_of_misread_digits_is_named(tmp_path):
    (tmp_path / "misread.npz").write_bytes(b"PK\x03\x04 cut")
    with pytest.raises(InputError, match=r"misread.npz cannot be read: .*; delete it; only the picture"):
        read_misread(tmp_path)
    np.savez(tmp_path / "misread.npz", images=np.zeros(1))
    with pytest.raises(InputError, match=r"misread.npz cannot be read"):
        read_misread(tmp_path)


ARRAYS = dict(images=np.zeros((3, 8, 8), np.uint8), labels=np.ones(3, np.uint8), predictions=np.zeros(3, np.uint8))
ARRAYS |= dict(num_misread=np.array(3), num_tested=np.array(100), step=np.array(7))


def npz(method=zipfile.ZIP_DEFLATED, extra=(), **changes) -> bytes:
    """A file of misread digits; a change that is bytes stands in the place of a whole array."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", method) as archive:
        for name, value in (ARRAYS | changes).items():
            if not isinstance(value, bytes):
                array = io.BytesIO()
                np.lib.format.write_array(array, np.asarray(value), allow_pickle=True)
                value = array.getvalue()
            archive.writestr(f"{name}.npy", value)
        for name in extra:
            archive.writestr(name, b"")
    return content.getvalue()


def header(shape: str, dtype: str = "|u1", version: bytes = b"\1\0", fill: int = 0) -> bytes:
    """The header of an array without the array."""
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}}}".encode() + b" " * fill + b"\n"
    return b"\x93NUMPY" + version + len(text).to_bytes(2 if version[0] == 1 else 4, "little") + text


BOMB = header("(64, 512, 512)", version=b"\2\0", fill=200 << 20)  # a header of 200 MB, 200 KB in the file
DAMAGED = {
    "huge": npz(images=header("(1000000, 500, 500)")),
    "wide": npz(images=header("(1, 1, 100000000)")),
    "negative": npz(images=header("(-1, 8, 8)")),
    "negative side": npz(images=header("(3, -8, -8)")),
    "empty side": npz(images=np.zeros((3, 0, 8), np.uint8)),
    "flat": npz(images=np.zeros((3, 64), np.uint8)),
    "float": npz(images=np.zeros((3, 8, 8))),
    "float labels": npz(labels=np.zeros(3)),
    "few labels": npz(labels=np.zeros(2, int)),
    "labels in rows": npz(labels=np.zeros((3, 1), int)),
    "numbers": npz(num_misread=np.arange(2)),
    "text": npz(step=np.array("x")),
    "pickled": npz(labels=np.array([{}, [], None], object)),
    "more images than misread": npz(num_misread=np.array(2)),
    "later format": npz(images=header("(3, 8, 8)", version=b"\2\0")),
    "bomb": npz(images=BOMB),
    "deep header": npz(images=header("(" * 900 + ")" * 900)),
    "lzma": npz(zipfile.ZIP_LZMA),
    "no array": npz(images=b"x"),
    "many members": npz(extra=[str(number) for number in range(200_000)]),
}
del BOMB


@pytest.mark.parametrize("name", DAMAGED)
def test_arrays_are_refused_before_memory_is_taken(tmp_path, name):
    (tmp_path / "misread.npz").write_bytes(DAMAGED[name])
    with (
        at_most(3 * len(DAMAGED[name]) + 200_000),
        pytest.raises(InputError, match=r"misread.npz cannot be read: .*delete"),
    ):
        read_misread(tmp_path)


def test_a_size_that_lies_takes_no_memory(tmp_path):
    """What the archive says of a member's size is not asked: the array's own header says how much is read."""
    content = npz(zipfile.ZIP_STORED)
    size = len(header("(3, 8, 8)")) // 64 * 64 + 64 + 3 * 64
    lying = content.replace(size.to_bytes(4, "little"), (1 << 31).to_bytes(4, "little"))
    assert lying != content
    (tmp_path / "misread.npz").write_bytes(lying)
    with at_most(200_000):
        assert read_misread(tmp_path)["images"].shape == (3, 8, 8)


def test_a_file_larger_than_any_run_writes_is_refused(tmp_path):
    with (tmp_path / "misread.npz").open("wb") as file:
        file.truncate(1 << 30)
    with at_most(1 << 20), pytest.raises(InputError, match=r"1,073,741,824 bytes; expected .* at most"):
        read_misread(tmp_path)


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED])
def test_no_damage_of_misread_digits_is_a_crash(tmp_path, method):
    refused = 0
    for content in mutated(npz(method), 400):
        (tmp_path / "misread.npz").write_bytes(content)
        try:
            found = read_misread(tmp_path)
            assert found["images"].dtype == np.uint8 and found["images"].shape[0] == len(found["labels"]) <= 64
        except InputError as error:
            refused += 1
            assert "misread.npz cannot be read" in str(error)
    assert 100 < refused < 400
