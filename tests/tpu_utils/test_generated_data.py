"""60 generated data sets, each trained and evaluated as plain PyTorch does it, or refused in one line before a graph.

15 of them are in the quick tests. The examples are the same in every run (derandomize). Shapes are few, to share
programs.
"""

import contextlib
import io
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from run_files import in_process, summary_in
from small_models import Flat
from test_bad_inputs import generated

import simple_mnist_tpu
from images.arrays import ImageDataset
from tpu_utils.checkpoint.loading import CheckpointReader
from tpu_utils.device import graphs_compiled

OPTIONS = ["--device=cpu", "--num_epochs=1", "--no_tensorboard", "--eval_batch_size=16", "--global_batch_size=8"]
OPTIONS += ["--warmup_steps=0", "--learning_rate=1e-3"]
NUMBERS = ["?", "u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8", "g", ">u2", ">i8", ">f4", ">f8"]
NO_NUMBERS = ["O", "c8", "c16", "S3", "U3", "M8[s]", "V4"]
INTEGERS = ["u1", "i1", "i2", "i4", "i8", "u8", ">i4"]
SHAPES = [(6,), (4, 4), (3, 4, 4), (2, 3, 4, 4)]


def mapped(array: np.ndarray) -> np.ndarray:
    with tempfile.TemporaryDirectory() as folder:  # the file is mapped until the array is gone
        np.save(Path(folder, "array.npy"), array)
        return np.load(Path(folder, "array.npy"), mmap_mode="r", allow_pickle=False)


GOOD_HOLDERS = {
    "array": lambda array: array,
    "file": lambda array: array if array.dtype.kind == "O" else mapped(array),
    "by columns": np.asfortranarray,
    "every second": lambda array: np.repeat(array, 2, axis=0)[::2],
    "read-only": lambda array: np.broadcast_to(array, array.shape),
    "list": lambda array: array.tolist(),
}
BAD_HOLDERS = {
    "masked": lambda array: np.ma.masked_array(array, np.arange(array.size).reshape(array.shape) % 3 == 0),
    "ragged": lambda array: [*array.tolist(), [0]],
    "gradient": lambda array: torch.ones(array.shape, requires_grad=True),
    "bfloat16": lambda array: torch.ones(array.shape, dtype=torch.bfloat16),
    "sparse": lambda array: torch.ones(array.shape).to_sparse(),
    "text": lambda array: "images",
    "nothing": lambda array: None,
    "iterator": iter,
}
BAD_LABELS = {
    "beyond the outputs": lambda labels: np.where(np.arange(len(labels)) == len(labels) - 1, 4, labels).astype("i8"),
    "beyond int32": lambda labels: labels.astype("i8") + 2**32,
    "negative": lambda labels: -1 - labels.astype("i4"),
    "fractions": lambda labels: labels + 0.5,
    "floats without a value": lambda labels: labels * np.nan,
    "a column": lambda labels: labels[:, None],
    "a row each": lambda labels: np.eye(4, dtype="i4")[labels.astype(int)],
    "probabilities": lambda labels: np.eye(4, dtype="f4")[labels.astype(int)],
    "objects": lambda labels: labels.astype("O"),
    "words": lambda labels: labels.astype("U3"),
    "complex": lambda labels: labels.astype("c8"),
    "a scalar": lambda labels: np.int64(3),
    "too few": lambda labels: labels[:-1],
}


# what can be wrong: (which, how); half of the data sets are right
WRONG = [("count", 0), ("count", 7), ("test shape", 1), ("test shape", 2), ("test dtype", None), ("shift", None)]
WRONG += [("dtype", dtype) for dtype in NO_NUMBERS]
WRONG += [("value", value) for value in (np.nan, np.inf, -np.inf, 1e300)]
WRONG += [("labels", name) for name in BAD_LABELS] + [("holder", name) for name in BAD_HOLDERS]


@st.composite
def data_sets(draw):
    """(arrays as a user hands them over, the same as numbers, --max_shift, what is wrong with them or None)."""
    random, parts = np.random.default_rng(draw(st.integers(0, 2**32 - 1))), ("train", "test")
    wrong, how = draw(st.sampled_from(WRONG)) if draw(st.booleans()) else (None, None)
    part = draw(st.sampled_from(parts))  # that has it
    shape, dtype = draw(st.sampled_from(SHAPES)), draw(st.sampled_from(NUMBERS))
    counts = {"train": draw(st.sampled_from([8, 20, 23])), "test": draw(st.sampled_from([1, 16, 21]))}
    classes = draw(st.sampled_from([1, 2, 4]))  # there are four outputs
    label_dtype = draw(st.sampled_from([*INTEGERS, "f4", "?"] if classes < 3 else [*INTEGERS, "f4"]))
    images = {part: random.integers(0, 2 if dtype == "?" else 100, (counts[part], *shape)) for part in parts}
    images = {part: array.astype(dtype) for part, array in images.items()}
    labels = {part: random.integers(0, classes, counts[part]).astype(label_dtype) for part in parts}
    pictures = len(shape) in (2, 3)
    max_shift = draw(st.sampled_from([0, 1])) if pictures else 0

    if wrong == "count":
        part = "train" if how else part
        images[part], labels[part] = images[part][:how], labels[part][:how]
    elif wrong == "dtype":
        images[part] = images[part].astype("i4").astype(how)
    elif wrong == "test shape":
        images["test"] = images["test"][..., :-1] if how == 1 else images["test"][..., None]
    elif wrong == "test dtype":
        images["test"] = images["test"].astype("u1" if images["test"].dtype.newbyteorder("=") == "f4" else "f4")
    elif wrong == "value":
        images = {part: array.astype("f8") for part, array in images.items()}
        images[part].reshape(-1)[draw(st.integers(0, images[part].size - 1))] = how
    elif wrong == "labels":
        labels = {part: BAD_LABELS[how](array) for part, array in labels.items()}
    elif wrong == "shift":
        max_shift = 4 if pictures else 1
    numbers = {f"{part}_images": images[part] for part in parts} | {f"{part}_labels": labels[part] for part in parts}
    handed = {}
    for name, array in numbers.items():
        # a list has no dtype: the integers of one are int64, as the other set has them then
        same = array.ndim and array.dtype.kind not in "OV" and ("labels" in name or array.dtype == "i8")
        handed[name] = GOOD_HOLDERS[draw(st.sampled_from([kind for kind in GOOD_HOLDERS if same or kind != "list"]))](
            array
        )
    if wrong == "holder":
        name = f"{part}_{draw(st.sampled_from(['images', 'labels']))}"
        handed[name] = BAD_HOLDERS[how](numbers[name])
    return handed, numbers, max_shift, wrong and f"{wrong}: {how}"


def check(case) -> None:
    handed, numbers, max_shift, wrong = case
    made = {}

    def load_dataset(config):
        data = ImageDataset("mine", **handed)
        made["size"] = int(np.prod(data.train_images.shape[1:]))
        return data

    said, before = io.StringIO(), graphs_compiled()
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(simple_mnist_tpu, "load_dataset", load_dataset)
        patch.setattr(simple_mnist_tpu, "ConvNet", lambda *sizes: Flat(made["size"]))
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            code = in_process(*OPTIONS, f"--max_shift={max_shift}", "--run_dir", Path(folder, "run"))
        if code:
            assert (code, graphs_compiled()) == (2, before), said.getvalue()
            (line,) = said.getvalue().splitlines()
            assert line.startswith("error: ") and wrong, line
            assert any(word in line for word in ("images", "labels", "global_batch_size", "max_shift")), line
            return
        assert wrong is None, "trained on"
        assert "warning" not in said.getvalue(), said.getvalue()
        summary = summary_in(Path(folder, "run"))
        assert max(summary["train_graphs"], summary["eval_graphs"]) <= 1
        model = Flat(made["size"]).eval()
        model.load_state_dict(CheckpointReader(Path(folder, "run", "checkpoints")).load("must").part("model"))
        with torch.no_grad():
            logits = model(torch.from_numpy(numbers["test_images"].astype(np.float32)))
        labels = torch.from_numpy(numbers["test_labels"].astype(np.int64))
        assert summary["test_accuracy"] == pytest.approx((logits.argmax(1) == labels).float().mean().item(), abs=1e-6)
        expected = torch.nn.functional.cross_entropy(logits, labels).item()
        assert summary["test_loss"] == pytest.approx(expected, rel=1e-4)


@generated(15)
@given(data_sets())
def test_a_data_set_is_trained_right_or_refused_before_a_graph(case):
    check(case)


@pytest.mark.exhaustive
@generated(60)
@given(data_sets())
def test_60_data_sets_are_trained_right_or_refused_before_a_graph(case):
    check(case)
