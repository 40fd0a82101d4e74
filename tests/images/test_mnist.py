"""MNIST and the other sets of images: their checks, and the batches made of them."""

import gzip
import math
import shutil
import struct

import numpy as np
import pytest
from mutations import at_most, make_irregular, mutated, no_hang, refusals

from images.made import make_synthetic
from images.mnist import load_digits
from images.mnist_files import load_mnist
from tpu_utils.base.errors import InputError


def write_idx(path, array, magic=None):
    header = struct.pack(f">{1 + array.ndim}I", magic or 0x0800 + array.ndim, *array.shape)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(header + array.astype(np.uint8).tobytes())


@pytest.fixture
def small_mnist(tmp_path):
    raw = tmp_path / "MNIST" / "raw"
    for part, count in (("train", 30), ("t10k", 20)):
        write_idx(raw / f"{part}-images-idx3-ubyte", np.arange(count * 16).reshape(count, 4, 4) % 251)
        write_idx(raw / f"{part}-labels-idx1-ubyte", np.arange(count) % 10)
    return tmp_path


def test_digits_keep_a_fifth_of_every_class_for_the_test():
    digits = load_digits()
    assert len(digits.train_labels) == 1437 and len(digits.test_labels) == 360
    assert digits.train_images.dtype == np.uint8 and digits.train_images.max() == 255
    assert np.bincount(digits.test_labels).min() >= 34
    train = {image.tobytes() for image in digits.train_images}
    assert not any(image.tobytes() in train for image in digits.test_images)


def test_real_mnist_loads(mnist_dir):
    dataset = load_mnist(mnist_dir, download=False)
    assert dataset.train_images.shape == (10_000, 28, 28) and dataset.test_images.shape == (5_000, 28, 28)
    assert set(dataset.train_labels) == set(range(10))


def test_idx_files_of_any_number_of_images(small_mnist):
    dataset = load_mnist(small_mnist, download=False)
    assert dataset.train_images.shape == (30, 4, 4) and dataset.test_labels.shape == (20,)
    assert dataset.train_images[1, 0, 0] == 16


IMAGES, LABELS = "train-images-idx3-ubyte", "t10k-labels-idx1-ubyte"
DAMAGES = [
    (lambda path: path.unlink(), "no such file; expected MNIST in torchvision's layout"),
    (lambda path: path.write_bytes(path.read_bytes()[:-1]), "bytes; its header"),
    (lambda path: path.write_bytes(path.read_bytes() + b"x"), "bytes; its header"),
    (lambda path: path.write_bytes(b"\0\0"), "expected a header of"),
    (lambda path: path.write_bytes(b"\x1f\x8b" + path.read_bytes()[2:]), "magic 0x1f8b"),
    (lambda path: path.write_bytes(b""), "expected a header of"),
    (lambda path: make_irregular(path, "FIFO"), "is a FIFO; expected MNIST"),
]


@pytest.mark.parametrize(
    "name, damage, said",
    [
        *((name, *damage) for name in (IMAGES, LABELS) for damage in DAMAGES),
        (LABELS, lambda path: shutil.copy(path.with_name(IMAGES), path), "magic 0x00000803; expected 0x00000801"),
        (LABELS, lambda path: write_idx(path, np.array([3] * 7 + [12] * 13)), "label 7 is 12; expected 0 to 9"),
        (LABELS, lambda path: write_idx(path, np.zeros(19)), "found 20 images but 19 labels"),
    ],
)
def test_damaged_idx_files_are_refused(small_mnist, name, damage, said):
    path = small_mnist / "MNIST" / "raw" / name
    damage(path)
    with no_hang(), pytest.raises(InputError, match=said) as error:
        load_mnist(small_mnist, download=False)
    assert str(path.parent) in str(error.value)


def test_no_damage_of_idx_files_is_a_crash(small_mnist):
    refused = 0

    def read():
        dataset = load_mnist(small_mnist, download=False)
        assert dataset.train_images.shape == (30, 4, 4) and dataset.test_labels.max() < 10

    for path in sorted((small_mnist / "MNIST" / "raw").iterdir()):
        content = path.read_bytes()
        damaged = [header + content[16:] for header in mutated(content[:16], 75)]
        refused += refusals(path, [*damaged, *mutated(content, 75)], read, path.name.split("-")[0])
        path.write_bytes(content)
    assert 200 < refused < 600


def test_no_more_of_an_idx_file_is_read_than_its_header_says(small_mnist):
    path = small_mnist / "MNIST" / "raw" / "train-images-idx3-ubyte"
    with path.open("r+b") as file:
        file.truncate(200 << 20)
    with at_most(1 << 20), pytest.raises(InputError, match="209715200 bytes; its header"):
        load_mnist(small_mnist, download=False)
    path.write_bytes(gzip.compress(bytes(1 << 24)))  # never inflated
    with at_most(1 << 20), pytest.raises(InputError, match=r"a \.gz must be unpacked first"):
        load_mnist(small_mnist, download=False)


def test_synthetic_has_the_best_accuracy_and_loss_it_says():
    dataset = make_synthetic(num_train=60_000, num_test=10)
    # the class is what a matched filter reads off the image; it never errs
    classes = np.arange(10)
    means = np.stack([dataset.train_images[dataset.train_labels == c].mean(0).ravel() for c in classes])
    centered = means - means.mean(0)
    read = (dataset.train_images.reshape(-1, 64) @ centered.T - (centered * means).sum(1) / 2).argmax(1)
    accuracy = (read == dataset.train_labels).mean()
    assert abs(accuracy - dataset.best_accuracy) < 4 * math.sqrt(0.91 * 0.09 / 60_000)
    # cross-entropy of the true conditional distribution
    right = read == dataset.train_labels
    loss = -np.where(right, math.log(0.91), math.log(0.01)).mean()
    assert abs(loss - dataset.loss_floor) < 0.02
    assert make_synthetic(num_train=60_000, num_test=10).fingerprint() == dataset.fingerprint()
    bright = dataset.train_images.reshape(-1, 64) >= 128
    assert len(np.unique(bright, axis=0)) == 10, "every single image can be told"
