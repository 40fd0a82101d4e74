"""Labelled images on the host, and the batches made of them. Nothing here knows about TPUs, nothing imports torch.

A batch is a pure function of (seed, step): to resume at step s, start at step s. Images go to the device as uint8, a
quarter of the bytes of float32, and are scaled there.
"""

import math
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError

import numpy as np

from config import MnistConfig
from tpu_utils.errors import InputError
from tpu_utils.inputs import file_size, open_regular


@dataclass(frozen=True)
class ImageDataset:
    """Images (N, H, W) uint8 and labels (N,) uint8, in memory."""

    name: str
    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray
    best_accuracy: float | None = None
    """Best possible expected test accuracy, in closed form; None where nobody knows it."""
    loss_floor: float | None = None
    """Best possible expected cross-entropy in nats, in closed form; None where nobody knows it."""

    @property
    def image_size(self) -> int:
        return self.train_images.shape[-1]

    @property
    def description(self) -> str:
        size, num_train, num_test = self.image_size, len(self.train_labels), len(self.test_labels)
        text = f"{self.name}, {size} x {size}: {num_train} train, {num_test} test"
        if self.best_accuracy is None:
            return text
        return f"{text}; best possible accuracy {self.best_accuracy:.4f}, loss {self.loss_floor:.4f}"

    def fingerprint(self) -> int:
        """CRC-32 of the training set: a run is resumed on the data it began with."""
        return zlib.crc32(self.train_labels.tobytes(), zlib.crc32(self.train_images.tobytes()))


def check_files(config: MnistConfig) -> None:
    """Raises InputError when the files that config names are missing or damaged. Takes no second, and no torch."""
    if config.dataset == "mnist" and not config.download and not shapes_suffice(config):
        load_mnist(Path(config.data_dir), download=False)


def shapes_suffice(config: MnistConfig) -> bool:
    """Whether the compiler is asked about MNIST where there is none: it needs no data."""
    return bool(config.compile_for) and len(list(Path(config.data_dir, "MNIST", "raw").glob("*-ubyte"))) < 4


def load_dataset(config: MnistConfig) -> ImageDataset:
    """The data set the config names. Raises InputError when its files are missing or damaged."""
    if config.dataset == "mnist" and shapes_suffice(config):
        parts = [np.zeros(shape, np.uint8) for count in (60_000, 10_000) for shape in ((count, 28, 28), count)]
        return ImageDataset(f"mnist's shapes are assumed, no files in {config.data_dir}", *parts)
    if config.dataset == "digits":
        return load_digits()
    if config.dataset == "mnist":
        return load_mnist(Path(config.data_dir), config.download)
    return make_synthetic()


def load_digits() -> ImageDataset:
    """scikit-learn's 1,797 handwritten digits, 8 x 8; every class gives a fifth of its images to the test set.

    Source: UCI "Optical Recognition of Handwritten Digits" test set, as shipped inside scikit-learn.
    """
    from sklearn.datasets import load_digits as sklearn_digits
    from sklearn.model_selection import train_test_split

    images, labels = sklearn_digits(return_X_y=True)
    images = np.round(images.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)  # stored as 0..16
    # the split is part of the data set: it never follows config.seed
    split = train_test_split(images, labels.astype(np.uint8), test_size=0.2, stratify=labels, random_state=0)
    train_images, test_images, train_labels, test_labels = split
    return ImageDataset("digits", train_images, train_labels, test_images, test_labels)


def load_mnist(data_dir: Path, download: bool) -> ImageDataset:
    """MNIST IDX files in torchvision's layout, data_dir/MNIST/raw; any number of images."""
    if download:
        from torchvision.datasets import MNIST

        try:
            MNIST(str(data_dir), train=True, download=True)
        except (RuntimeError, URLError, OSError) as error:
            raise InputError(
                f"MNIST could not be downloaded into {data_dir}: {error}; check the network, or copy the files there"
            ) from error
    raw = data_dir / "MNIST" / "raw"
    arrays = []
    for part in ("train", "t10k"):
        images = read_idx(raw / f"{part}-images-idx3-ubyte", num_dims=3)
        labels = read_idx(raw / f"{part}-labels-idx1-ubyte", num_dims=1)
        if len(images) != len(labels):
            raise InputError(
                f"{raw}/{part}-*: found {len(images)} images but {len(labels)} labels; expected as many; fetch both"
            )
        if images.shape[1] != images.shape[2] or images.shape[1] % 4:
            raise InputError(
                f"{raw}/{part}-images: images are {images.shape[1:]}; expected a square, side divisible by 4"
            )
        if labels.max() > 9:
            where = int(np.argmax(labels > 9))
            raise InputError(
                f"{raw}/{part}-labels: label {where} is {labels[where]}; expected 0 to 9; fetch the file again"
            )
        arrays += [images, labels]
    return ImageDataset("mnist", *arrays)


def read_idx(path: Path, num_dims: int) -> np.ndarray:
    """An IDX file of unsigned bytes, checked before it is read: magic, sizes, length.

    Format: http://yann.lecun.com/exdb/mnist. Raises InputError: found, expected, what to do.
    """
    with open_regular(path, "MNIST in torchvision's layout under --data_dir; add --download to fetch it") as file:
        header = 4 + 4 * num_dims
        size, content = file_size(file), file.read(header)
        if len(content) < header:
            raise InputError(
                f"{path} has {size} bytes; expected a header of {header}; the file is truncated, fetch it again"
            )
        magic, *shape = struct.unpack(f">{1 + num_dims}I", content)
        expected_magic = 0x0800 + num_dims  # 08: unsigned bytes
        if magic != expected_magic:
            raise InputError(
                f"{path} begins with magic {magic:#010x}; expected {expected_magic:#010x}; it is not this kind of IDX "
                "file (a .gz must be unpacked first)"
            )
        if size != header + math.prod(shape) or not math.prod(shape):
            raise InputError(
                f"{path} has {size} bytes; its header {tuple(shape)} needs {header + math.prod(shape)}; fetch it again"
            )
        return np.frombuffer(file.read(), np.uint8).reshape(shape)


def make_synthetic(num_train: int = 4096, num_test: int = 2048, size: int = 8, flip: float = 0.1) -> ImageDataset:
    """Images whose class can be read without error, and labels of which a known share lies.

    Each class has a fixed pattern of dark (below 112) and bright (from 144) pixels; two patterns differ in half of the
    pixels and the noise never crosses the gap, so the class is certain. With probability `flip` the label is drawn anew
    from all ten classes. The best any model can do, in expectation: accuracy 1 - 0.9 flip; loss the entropy of
    (1 - 0.9 flip, 9 times flip / 10).
    """
    rng = np.random.default_rng(20_240_101)  # the data set is fixed: it never follows config.seed
    # rows 1 to 10 of a Walsh-Hadamard matrix: any two differ in exactly half of the pixels
    patterns = np.array([[(pixel & row).bit_count() % 2 for pixel in range(size * size)] for row in range(1, 11)])
    count = num_train + num_test
    classes = rng.integers(0, 10, count)
    dark, bright = rng.integers(0, 112, (count, size * size)), rng.integers(144, 256, (count, size * size))
    images = np.where(patterns[classes], bright, dark).astype(np.uint8).reshape(count, size, size)
    labels = np.where(rng.random(count) < flip, rng.integers(0, 10, count), classes).astype(np.uint8)
    right, wrong = 1 - 0.9 * flip, flip / 10
    entropy = -right * math.log(right) - (9 * wrong * math.log(wrong) if wrong else 0.0)
    parts = images[:num_train], labels[:num_train], images[num_train:], labels[num_train:]
    return ImageDataset("synthetic", *parts, best_accuracy=right, loss_floor=entropy)


def epoch_order(num_examples: int, seed: int, epoch: int) -> np.ndarray:
    """The permutation of the training set that an epoch follows: (num_examples,) indices."""
    return np.random.default_rng([seed, epoch]).permutation(num_examples)


def random_shift(
    images: np.ndarray, max_shift: int, rng: np.random.Generator, part: int = 0, num_parts: int = 1
) -> np.ndarray:
    """Each image (B, H, W) or (B, C, H, W) moved by an offset of at most max_shift pixels in y and x, zeros drawn in.

    Offsets are drawn for the whole global batch: an example moves alike in whichever part it is.
    """
    others = images.ndim - 2  # axes that do not move
    padded = np.pad(images, ((0, 0),) * others + ((max_shift, max_shift),) * 2)
    windows = np.lib.stride_tricks.sliding_window_view(padded, images.shape[-2:], axis=(-2, -1))
    offsets = rng.integers(0, 2 * max_shift + 1, (2, len(images) * num_parts))[:, part::num_parts]
    return windows[(np.arange(len(images)), *(slice(None),) * (others - 1), offsets[0], offsets[1])]


class TrainBatches:
    """batch(index) of a run, for step index + 1: images (B, H, W) uint8, labels (B,) int32.

    Every epoch follows a fresh permutation and leaves its short end out, so that all batches have one shape.
    part of num_parts: what one of several hosts or replicas reads, every num_parts-th example of the global batch. So B
    is global_batch_size / num_parts, which must be whole, and a global batch holds the same examples at any num_parts.
    """

    def __init__(self, dataset: ImageDataset, config: MnistConfig, part: int = 0, num_parts: int = 1):
        """Raises InputError when not even one batch can be filled, or the run has too many or too few steps."""
        assert config.global_batch_size % num_parts == 0, (config.global_batch_size, num_parts)
        self.dataset, self.config, self.part, self.num_parts = dataset, config, part, num_parts
        self.steps_per_epoch, self.num_steps = num_steps_of(config, len(dataset.train_images))
        self._epoch, self._order = -1, np.empty(0, int)

    def ids(self, index: int) -> np.ndarray:
        """The training examples of a batch, in order: (B,) indices."""
        epoch, batch = divmod(index, self.steps_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, epoch_order(len(self.dataset.train_images), self.config.seed, epoch)
        size = self.config.global_batch_size
        return self._order[batch * size : (batch + 1) * size][self.part :: self.num_parts]

    def batch(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        ids = self.ids(index)
        images, labels = self.dataset.train_images[ids], self.dataset.train_labels[ids].astype(np.int32)
        if self.config.max_shift:
            rng = np.random.default_rng([self.config.seed, index, 1])
            images = random_shift(images, self.config.max_shift, rng, self.part, self.num_parts)
        return images, labels


def num_steps_of(config: MnistConfig, num_examples: int) -> tuple[int, int]:
    """(steps per epoch, steps of the whole run). Raises InputError when not even one batch can be filled."""
    steps_per_epoch = num_examples // config.global_batch_size
    if steps_per_epoch == 0:
        raise InputError(
            f"global_batch_size is {config.global_batch_size} but {config.dataset} has {num_examples} training "
            f"examples; choose at most {num_examples}"
        )
    num_steps = steps_per_epoch * config.num_epochs
    if num_steps > 10**7:
        raise InputError(
            f"num_epochs is {config.num_epochs}: {num_steps} steps; expected {10**7} or less, "
            f"{10**7 // steps_per_epoch} epochs of this data"
        )
    if config.warmup_steps >= num_steps:
        raise InputError(
            f"warmup_steps is {config.warmup_steps} but the run has {num_steps} steps; choose fewer, or more epochs"
        )
    return steps_per_epoch, num_steps


def check_divisible(config: MnistConfig, num_devices: int) -> None:
    """Raises InputError unless every device gets the same number of examples of a global batch."""
    size = config.global_batch_size
    if size % num_devices:
        below, above = size // num_devices * num_devices, -(-size // num_devices) * num_devices
        raise InputError(
            f"global_batch_size is {size} but there are {num_devices} devices, which would get unequal parts; "
            f"the nearest that works: {f'{below} or {above}' if below else above}"
        )


def eval_batches(images: np.ndarray, labels: np.ndarray, size: int) -> Iterator[tuple[np.ndarray, ...]]:
    """Every example once, in batches of one static size: images, labels (size,) int32, mask (size,) float32.

    The last batch is filled up with zeros that the mask leaves out.
    """
    for start in range(0, len(images), size):
        count = len(images[start : start + size])
        batch = np.zeros((size, *images.shape[1:]), images.dtype)
        target, mask = np.zeros(size, np.int32), np.zeros(size, np.float32)
        batch[:count], target[:count], mask[:count] = images[start : start + count], labels[start : start + count], 1
        yield batch, target, mask
