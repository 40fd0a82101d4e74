"""Labelled examples in arrays, checked once, and the batches made of them. Knows nothing of TPUs, imports no torch.

A batch is a pure function of (seed, step): to resume at step s, start at step s. Images are uploaded in their own type
and scaled on the device: uint8 is a quarter of the bytes of float32.
"""

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING

import numpy as np

from tpu_utils.base.errors import InputError, first_line

if TYPE_CHECKING:
    from config import ImageConfig

# Types that a TPU has not, and what is sent for them; all other numbers are sent as they are.
SENT_AS = {np.dtype(wide): np.int32 for wide in (np.int64, np.uint16, np.uint32, np.uint64)}
SENT_AS |= {np.dtype(wide): np.float32 for wide in (np.float64, np.longdouble)}
IGNORED = -100
"""A label that counts neither in a loss nor in an accuracy: ignore_index of PyTorch's cross_entropy."""
LARGEST_READ = 1 << 30
"""Bytes of an array that are read to check it. Of a larger one, which may be a file, this much, evenly spaced."""


@dataclass(frozen=True)
class ImageDataset:
    """Examples (N, ...) and their labels (N, ...): arrays in memory, or files mapped by np.load(path, mmap_mode="r").

    Images: any kind of number and any shape, both the same in the two sets; of pictures (N, H, W) or, channels first,
    (N, C, H, W). Labels: whole numbers from 0 are classes, IGNORED none of them; floats are targets of a regression.
    Raises InputError that names the array, what was found there, what was expected, and what to do.
    """

    name: str
    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray
    best_accuracy: float | None = None
    """Best possible expected test accuracy, in closed form; None where nobody knows it."""
    loss_floor: float | None = None
    """Best possible expected cross-entropy in nats, in closed form; None where nobody knows it."""

    def __post_init__(self):
        for name in ("train_images", "train_labels", "test_images", "test_labels"):  # frozen: set once, here
            object.__setattr__(self, name, as_numbers(f"{self.name}: {name}", getattr(self, name)))
        check_pair(f"{self.name}: train", self.train_images, self.train_labels)
        check_pair(f"{self.name}: test", self.test_images, self.test_labels)
        check_same_kind(f"{self.name}: images", self.train_images, self.test_images)
        check_same_kind(f"{self.name}: labels", sent(self.train_labels[:1], True), sent(self.test_labels[:1], True))
        for part, labels in (("train", self.train_labels), ("test", self.test_labels)):
            if (labels == IGNORED).all():
                raise InputError(
                    f"{self.name}: {part}_labels are all {IGNORED}, which counts neither in a loss nor in an accuracy; "
                    "expected at least one class, 0 or more"
                )

    @property
    def num_examples(self) -> int:
        """Examples in the training set."""
        return len(self.train_labels)

    @property
    def image_size(self) -> int:
        """The last axis of an image."""
        return self.train_images.shape[-1]

    @cached_property
    def num_classes(self) -> int | None:
        """Number of classes, if labels are classes 0, 1, ..., also as floats, or a probability for each class, (N, C);
        None for other targets."""
        labels = self.train_labels
        if labels.dtype.kind == "f":
            if labels.ndim == 2 and (labels >= 0).all() and np.allclose(labels.sum(1), 1):
                return labels.shape[1]
            if labels.ndim > 1 or labels.min() < 0 or (labels != np.trunc(labels)).any():
                return None
        return 1 + int(max(self.train_labels.max(), self.test_labels.max()))

    @property
    def description(self) -> str:
        kind, shape = self.train_images.dtype, " x ".join(map(str, self.train_images.shape[1:]))
        text = f"{self.name}, {shape}{'' if kind == np.uint8 else f' {kind}'}: "
        text += f"{len(self.train_labels)} train, {len(self.test_labels)} test"
        classes = 0 if self.train_labels.dtype.kind == "f" else self.num_classes
        present = np.unique(self.train_labels) if classes else np.arange(0)
        present = present[present != IGNORED]
        if absent := classes - len(present):
            first = int(np.flatnonzero(np.append(present, -1) != np.arange(len(present) + 1))[0])
            text += f"; no training example of class {first}{f' and {absent - 1} more' if absent > 1 else ''}"
        if self.best_accuracy is None:
            return text
        return f"{text}; best possible accuracy {self.best_accuracy:.4f}, loss {self.loss_floor:.4f}"

    def fingerprint(self) -> int:
        """CRC-32 of the training set, and that of the test set above it: a run is resumed on the data it began with."""
        found = [0, 0]
        for place, name in enumerate(("train_images", "test_images", "train_labels", "test_labels")):
            for part in parts_of(getattr(self, name)):
                found[place % 2] = zlib.crc32(np.ascontiguousarray(part), found[place % 2])
        return found[1] << 32 | found[0]

    def first(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The first training examples, as in a batch: a copy, because torch warns of the read-only memory of a file."""
        return sent(np.array(self.train_images[:count])), sent(self.train_labels[:count], labels=True)


def as_numbers(name: str, values) -> np.ndarray:
    """The same memory as an array of numbers in this machine's byte order, with at least one example."""
    if isinstance(values, np.ma.MaskedArray):  # asarray would give what lies under the mask
        raise InputError(f"{name} is a masked array; expected numbers; leave such examples out, or fill them")
    try:
        array = np.asarray(values)
    except (ValueError, TypeError, RuntimeError) as error:  # rows of unequal length; a tensor on a device, or with grad
        raise InputError(
            f"{name} is no array: {first_line(error)}; expected numbers, all examples of one shape"
        ) from error
    if array.dtype.kind not in "biuf":
        raise InputError(f"{name} is of {array.dtype}; expected numbers: bool, integers or floats; convert it")
    if array.ndim < (2 if name.endswith("images") else 1) or 0 in array.shape:
        raise InputError(f"{name} is {array.shape}; expected the examples along the first axis, and at least one")
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def check_pair(name: str, images: np.ndarray, labels: np.ndarray) -> None:
    """Raises InputError unless there is a label for each image, and the values can be trained on."""
    if len(images) != len(labels):
        raise InputError(f"{name}_images has {len(images)} examples, its labels are {len(labels)}; expected as many")
    for what, array in (("images", images), ("labels", labels)):
        as_type = sent(array[:0], labels=what == "labels").dtype
        if array.dtype.kind != "f" and array.dtype == as_type and what == "images":
            continue  # any value is right
        low = None if array.dtype.kind == "f" else 0 if what == "labels" else np.iinfo(as_type).min
        for place, part in enumerate(parts_of(array)):
            if low is None:
                with np.errstate(over="ignore"):  # too large for float32 is an infinity on the device
                    bad = ~np.isfinite(part.astype(as_type, copy=False))
                expected = "finite numbers; replace or leave out such examples"
            else:
                bad = (part < low) & ~((part == IGNORED) & (what == "labels")) | (part > np.iinfo(as_type).max)
                expected = f"{low} to {np.iinfo(as_type).max}"
                if what == "labels":
                    expected += f": classes, from 0 on, {IGNORED} for none; make targets of a regression float32"
            if bad.any():
                where = tuple(int(i) for i in np.argwhere(bad)[0])
                example = (place * part_length(array) + where[0]) * step_between(array)
                raise InputError(f"{name}_{what}: example {example} has {part[where]!s}; expected {expected}")


def check_same_kind(name: str, train: np.ndarray, test: np.ndarray) -> None:
    if (train.shape[1:], train.dtype) != (test.shape[1:], test.dtype):
        raise InputError(
            f"{name} are {train.dtype} {train.shape[1:]} in the training set, {test.dtype} {test.shape[1:]} in the "
            "test set; expected the same type and shape; convert one of them"
        )


def step_between(array: np.ndarray) -> int:
    """1: every example is read to check an array; n: every n-th, of an array larger than LARGEST_READ."""
    return max(1, -(-array.nbytes // LARGEST_READ))


def part_length(array: np.ndarray) -> int:
    """Examples of a part: 16 MiB of them, so that no check needs memory as large as the array."""
    return max(1, (1 << 24) * len(array) // max(array.nbytes, 1))


def parts_of(array: np.ndarray) -> Iterator[np.ndarray]:
    """The examples that are read to check an array, a part at a time."""
    read, length = array[:: step_between(array)], part_length(array)
    return (read[start : start + length] for start in range(0, len(read), length))


def sent(array: np.ndarray, labels: bool = False) -> np.ndarray:
    """What is sent to the device for it. Labels: int32, or float32 for a regression."""
    if labels:
        return array.astype(np.float32 if array.dtype.kind == "f" else np.int32)
    return array.astype(SENT_AS.get(array.dtype, array.dtype), copy=False)


# -------------------------------------------------------------------------------------------------------- augmentation


class ExampleRandom:
    """Random numbers, one for each example of a global batch: they do not depend on how many parts it is read in.

    per_pixel: whether the labels have a value for each pixel, which would have to move with it.
    """

    def __init__(self, seed: list[int], size: int, part: int = 0, num_parts: int = 1, per_pixel: bool = False):
        self._rng, self._size, self.per_pixel = np.random.default_rng(seed), size, per_pixel
        self._own = slice(part, None, num_parts)

    def integers(self, low: int, high: int) -> np.ndarray:
        """(B,) whole numbers from low to high - 1."""
        return self._rng.integers(low, high, self._size)[self._own]

    def random(self) -> np.ndarray:
        """(B,) floats in [0, 1)."""
        return self._rng.random(self._size)[self._own]


def random_shift(images: np.ndarray, draw: ExampleRandom, max_shift: int) -> np.ndarray:
    """Each image (B, H, W) or (B, C, H, W) moved by at most max_shift pixels in y and x, zeros drawn in."""
    check_movable(images, draw)
    height_and_width = images.shape[-2:] if images.ndim in (3, 4) else (0, 0)
    if max_shift >= min(height_and_width):
        raise InputError(
            f"max_shift is {max_shift} but images are {images.shape[1:]}; expected (H, W) or (C, H, W), both sides "
            "longer than it; choose a smaller one, 0 for none"
        )
    others = images.ndim - 2  # axes that do not move
    padded = np.pad(images, ((0, 0),) * others + ((max_shift, max_shift),) * 2)
    windows = np.lib.stride_tricks.sliding_window_view(padded, height_and_width, axis=(-2, -1))
    y, x = draw.integers(0, 2 * max_shift + 1), draw.integers(0, 2 * max_shift + 1)
    return windows[(np.arange(len(images)), *(slice(None),) * (others - 1), y, x)]


def check_movable(images: np.ndarray, draw: ExampleRandom) -> None:
    """Raises InputError for images that no longer fit their labels, or lose their colours, when they are moved."""
    if images.ndim == 4 and images.shape[-1] in (1, 3, 4) and images.shape[1] > 4:
        raise InputError(f"images are {images.shape[1:]}; expected channels first; transpose them: (0, 3, 1, 2)")
    if draw.per_pixel:
        raise InputError(
            "labels have a value for each pixel, and images alone would be moved; expected --max_shift 0, and "
            "--no_flip where there is one; move both in the data set"
        )


def random_flip(images: np.ndarray, draw: ExampleRandom) -> np.ndarray:
    """Half of the images (B, ..., W) mirrored left to right."""
    check_movable(images, draw)
    mirrored = draw.random() < 0.5
    return np.where(mirrored.reshape(-1, *(1,) * (images.ndim - 1)), images[..., ::-1], images)


# ------------------------------------------------------------------------------------------------------------- batches


class TrainBatches:
    """batch(index) of a run, for step index + 1: images (B, ...), labels (B, ...) int32, float32 for a regression.

    Every epoch follows a fresh permutation and leaves its short end out, so that all batches have one shape.
    part of num_parts: what one of several hosts or replicas reads, every num_parts-th example of the global batch. So B
    is global_batch_size / num_parts, which must be whole, and a global batch holds the same examples at any num_parts.
    augment(images, draw): another version of a batch, the shape and type the same. None: shifts, by config.max_shift.
    """

    def __init__(
        self,
        dataset: ImageDataset,
        config: "ImageConfig",
        part: int = 0,
        num_parts: int = 1,
        augment: Callable[[np.ndarray, ExampleRandom], np.ndarray] | None = None,
    ):
        """Raises InputError when not even one batch can be filled, or the run has too many or too few steps."""
        assert config.global_batch_size % num_parts == 0, (config.global_batch_size, num_parts)
        self.dataset, self.config, self.part, self.num_parts = dataset, config, part, num_parts
        if augment is None and config.max_shift:
            augment = partial(random_shift, max_shift=config.max_shift)
        self.steps_per_epoch, self.num_steps = num_steps_of(config, dataset.num_examples, dataset.name)
        self._augment, self._epoch, self._order = augment, -1, np.empty(0, int)
        if augment:  # what cannot be augmented is refused here
            image, *_, label = dataset.first(1)
            self._per_pixel = label.ndim > 2 and label.shape[-2:] == image.shape[-2:]
            self.augmented(0, np.repeat(image, config.global_batch_size // num_parts, axis=0))

    def ids(self, index: int) -> np.ndarray:
        """The training examples of a batch, in order: (B,) indices."""
        epoch, batch = divmod(index, self.steps_per_epoch)
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = np.random.default_rng([self.config.seed, epoch]).permutation(self.dataset.num_examples)
        size = self.config.global_batch_size
        return self._order[batch * size : (batch + 1) * size][self.part :: self.num_parts]

    def batch(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        ids = self.ids(index)
        images, labels = self.dataset.train_images[ids], self.dataset.train_labels[ids]
        return self.augmented(index, sent(images)), sent(labels, labels=True)

    def augmented(self, index: int, images: np.ndarray) -> np.ndarray:
        """Raises InputError when augment changes more than the values."""
        if self._augment is None:
            return images
        size = self.config.global_batch_size
        draw = ExampleRandom([self.config.seed, index, 1], size, self.part, self.num_parts, self._per_pixel)
        changed = np.ascontiguousarray(self._augment(images, draw))
        if (changed.shape, changed.dtype) != (images.shape, images.dtype):
            raise InputError(
                f"augment made {changed.dtype} {changed.shape} of {images.dtype} {images.shape}; expected the same "
                "type and shape, because an evaluation sees images as they are; convert them back"
            )
        return changed


def num_steps_of(config: "ImageConfig", num_examples: int, name: str) -> tuple[int, int]:
    """(steps per epoch, steps of the whole run). Raises InputError when not even one batch can be filled."""
    steps_per_epoch = num_examples // config.global_batch_size
    if steps_per_epoch == 0:
        raise InputError(
            f"global_batch_size is {config.global_batch_size} but {name} has {num_examples} training "
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
            f"warmup_steps is {config.warmup_steps} but the run has {num_steps} steps; choose less, or more epochs"
        )
    return steps_per_epoch, num_steps


def check_divisible(config: "ImageConfig", num_devices: int) -> None:
    """Raises InputError unless every device gets the same number of examples of a global batch."""
    size = config.global_batch_size
    if size % num_devices:
        below, above = size // num_devices * num_devices, -(-size // num_devices) * num_devices
        raise InputError(
            f"global_batch_size is {size} but there are {num_devices} devices, which would get unequal parts; "
            f"the nearest that works: {f'{below} or {above}' if below else above}"
        )


def eval_batches(
    dataset: ImageDataset, size: int, num_devices: int = 1, part: int = 0, num_parts: int = 1
) -> Iterator[tuple[np.ndarray, ...]]:
    """Every test example once, in batches of one static size: images, labels as they are sent, mask (size,) float32.

    size: of a batch over all devices; the next multiple of their number is taken. The last batch is filled up with
    zeros that the mask leaves out. part of num_parts: every num_parts-th row, as in TrainBatches.
    """
    size = -(-size // num_devices) * num_devices
    for start in range(0, len(dataset.test_images), size):
        images = sent(dataset.test_images[start : start + size])
        labels = sent(dataset.test_labels[start : start + size], labels=True)
        rows = (images, labels, np.ones(len(labels), np.float32))
        whole = (np.concatenate([some, np.zeros((size - len(some), *some.shape[1:]), some.dtype)]) for some in rows)
        yield tuple(some[part::num_parts] for some in whole)
