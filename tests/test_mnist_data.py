"""MNIST and the other sets of images: their checks, and the batches made of them."""

import gzip
import math
import struct

import numpy as np
import pytest
from mutations import at_most, make_irregular, mutated, no_hang

from config import MnistConfig
from mnist_data import (
    TrainBatches,
    epoch_order,
    eval_batches,
    load_digits,
    load_mnist,
    make_synthetic,
    num_steps_of,
    random_shift,
    read_idx,
)
from tpu_utils.errors import InputError


@pytest.fixture(scope="module")
def digits():
    return load_digits()


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


def test_digits_keep_a_fifth_of_every_class_for_the_test(digits):
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


@pytest.mark.parametrize(
    "damage, said",
    [
        (lambda path: path.unlink(), "no such file; expected MNIST in torchvision's layout"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "bytes; its header"),
        (lambda path: path.write_bytes(path.read_bytes() + b"x"), "bytes; its header"),
        (lambda path: path.write_bytes(b"\0\0"), "expected a header of"),
        (lambda path: path.write_bytes(b"\x1f\x8b" + path.read_bytes()[2:]), "magic 0x1f8b"),
        (lambda path: path.write_bytes(b""), "expected a header of"),
    ],
)
@pytest.mark.parametrize("name", ["train-images-idx3-ubyte", "t10k-labels-idx1-ubyte"])
def test_damaged_idx_files_are_refused(small_mnist, damage, said, name):
    path = small_mnist / "MNIST" / "raw" / name
    damage(path)
    with pytest.raises(InputError, match=said) as error:
        load_mnist(small_mnist, download=False)
    assert str(path) in str(error.value)


def test_no_damage_of_idx_files_is_a_crash(small_mnist):
    raw, refused = small_mnist / "MNIST" / "raw", 0
    intact = {path: path.read_bytes() for path in sorted(raw.iterdir())}
    for path, content in intact.items():
        for number, damaged in enumerate(mutated(content[:16], 150)):
            path.write_bytes(damaged + content[16:] if number % 2 else next(mutated(content, 1, number)))
            try:
                dataset = load_mnist(small_mnist, download=False)
                assert dataset.train_images.shape == (30, 4, 4) and dataset.test_labels.max() < 10
            except InputError as error:
                refused += 1
                assert path.name.split("-")[0] in str(error)
        path.write_bytes(content)
    assert 200 < refused < 600


@pytest.mark.parametrize("kind", ["FIFO", "folder", "character device"])
def test_idx_files_that_are_no_files_are_refused(small_mnist, kind):
    path = make_irregular(small_mnist / "MNIST" / "raw" / "t10k-labels-idx1-ubyte", kind)
    with no_hang(), pytest.raises(InputError, match=f"{path} is a {kind}; expected MNIST"):
        load_mnist(small_mnist, download=False)


def test_no_more_of_an_idx_file_is_read_than_its_header_says(small_mnist):
    path = small_mnist / "MNIST" / "raw" / "train-images-idx3-ubyte"
    with path.open("r+b") as file:
        file.truncate(200 << 20)
    with at_most(1 << 20), pytest.raises(InputError, match="209715200 bytes; its header"):
        load_mnist(small_mnist, download=False)
    path.write_bytes(gzip.compress(bytes(1 << 24)))  # never inflated
    with at_most(1 << 20), pytest.raises(InputError, match=r"a \.gz must be unpacked first"):
        load_mnist(small_mnist, download=False)


def test_labels_out_of_range_and_files_that_do_not_belong_together(small_mnist):
    raw = small_mnist / "MNIST" / "raw"
    write_idx(raw / "train-labels-idx1-ubyte", np.array([3] * 7 + [12] + [0] * 22))
    with pytest.raises(InputError, match="label 7 is 12; expected 0 to 9"):
        load_mnist(small_mnist, download=False)
    write_idx(raw / "train-labels-idx1-ubyte", np.zeros(29))
    with pytest.raises(InputError, match="found 30 images but 29 labels"):
        load_mnist(small_mnist, download=False)


def test_images_where_labels_belong(small_mnist):
    raw = small_mnist / "MNIST" / "raw"
    with pytest.raises(InputError, match="magic 0x00000803; expected 0x00000801"):
        read_idx(raw / "train-images-idx3-ubyte", num_dims=1)


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
    again = make_synthetic(num_train=60_000, num_test=10)
    assert again.fingerprint() == dataset.fingerprint()


def test_synthetic_classes_can_be_told_apart_by_every_single_image():
    dataset = make_synthetic(num_train=5_000, num_test=10)
    bright = dataset.train_images.reshape(-1, 64) >= 128
    assert len(np.unique(bright, axis=0)) == 10


def test_an_epoch_covers_the_training_set_without_repeats_and_the_next_is_shuffled_anew(digits):
    config = MnistConfig(global_batch_size=100, num_epochs=2)
    orders = [epoch_order(1437, 0, epoch) for epoch in range(2)]
    assert all(len(np.unique(order)) == 1437 for order in orders) and (orders[0] != orders[1]).any()
    source = TrainBatches(digits, config)
    assert (source.steps_per_epoch, source.num_steps) == (14, 28)
    batches = [source.batch(step) for step in range(28)]
    assert all(images.shape == (100, 8, 8) and labels.shape == (100,) for images, labels in batches)
    seen = np.concatenate([images for images, _ in batches[:14]])
    np.testing.assert_array_equal(seen, digits.train_images[orders[0][:1400]])


def test_batches_depend_on_seed_and_step_alone(digits):
    config = MnistConfig(global_batch_size=64, max_shift=1, seed=3)
    whole = TrainBatches(digits, config)
    whole = [whole.batch(step) for step in range(30)]
    resumed = TrainBatches(digits, config)
    for step in (25, 26, 29, 3):  # in any order
        assert all(np.array_equal(a, b) for a, b in zip(whole[step], resumed.batch(step), strict=True))
    other, _ = TrainBatches(digits, MnistConfig(global_batch_size=64, max_shift=1, seed=4)).batch(0)
    assert not np.array_equal(other, whole[0][0])


def test_random_shift_moves_each_image_by_at_most_that():
    images = np.zeros((500, 9, 9), np.uint8)
    images[:, 4, 4] = 255
    moved = random_shift(images, 2, np.random.default_rng(0))
    _, y, x = np.nonzero(moved)
    assert len(y) == 500 and set(y) == set(x) == {2, 3, 4, 5, 6}


def test_the_channels_of_an_image_move_together():
    grey = np.random.default_rng(1).integers(0, 255, (50, 9, 9)).astype(np.uint8)
    colour = np.stack([grey, 255 - grey, grey // 2], 1)
    moved, expected = (random_shift(images, 2, np.random.default_rng(0)) for images in (colour, grey))
    assert moved.shape == colour.shape and moved.dtype == np.uint8
    assert (moved[:, 0] == expected).all() and (moved[:, 2] == expected // 2).all()


def test_evaluation_counts_every_example_once():
    images, labels = np.arange(10 * 4).reshape(10, 2, 2).astype(np.uint8), np.arange(10).astype(np.uint8)
    batches = list(eval_batches(images, labels, 4))
    assert all(len(part) == 4 for batch in batches for part in batch)
    masks = np.concatenate([mask for _, _, mask in batches]).astype(bool)
    assert masks.sum() == 10
    assert np.concatenate([target for _, target, _ in batches])[masks].tolist() == list(range(10))


def test_steps_of_a_run():
    assert num_steps_of(MnistConfig(global_batch_size=64, num_epochs=3), 200) == (3, 9)
    with pytest.raises(InputError, match=r"global_batch_size is 64 .* choose at most 63"):
        num_steps_of(MnistConfig(global_batch_size=64), 63)
    with pytest.raises(InputError, match="warmup_steps is 9 but the run has 9 steps"):
        num_steps_of(MnistConfig(global_batch_size=64, num_epochs=3, warmup_steps=9), 200)
