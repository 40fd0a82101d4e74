"""Images that are made, of which the best possible accuracy is known. Imports no torch."""

import math

import numpy as np

from images.arrays import ImageDataset


def best_possible(flip: float, num_classes: int = 10) -> tuple[float, float]:
    """(accuracy, cross-entropy in nats) of a model that knows every true class. A label is drawn anew with probability
    flip: it is right with probability 1 - flip + flip / num_classes, each wrong class has flip / num_classes."""
    wrong = flip / num_classes
    right = 1 - (num_classes - 1) * wrong
    return right, -right * math.log(right) - ((num_classes - 1) * wrong * math.log(wrong) if wrong else 0.0)


def make_synthetic(num_train: int = 4096, num_test: int = 2048, size: int = 8, flip: float = 0.1) -> ImageDataset:
    """Images whose class can be read without error, and labels of which a known share is wrong.

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
    accuracy, loss = best_possible(flip)
    parts = images[:num_train], labels[:num_train], images[num_train:], labels[num_train:]
    return ImageDataset("synthetic", *parts, best_accuracy=accuracy, loss_floor=loss)


def make_stripes(num_train: int = 4096, num_test: int = 2048, flip: float = 0.1) -> ImageDataset:
    """Stripes (3, 32, 32), horizontal or vertical, 2, 4, 8, 16 or 32 pixels apart, and labels of which some are wrong.

    A stripe's pixels are dark (below 112) or bright (from 144) in all colours and the noise never crosses the gap, so
    the class can be read without error, whatever the place, which is random; a shift or a mirror does not change it.
    With probability `flip` the label is drawn anew from all ten classes. The best any model can do, in expectation:
    accuracy 1 - 0.9 flip; loss the entropy of (1 - 0.9 flip, 9 times flip / 10).
    """
    rng = np.random.default_rng(39)  # the data set is fixed: it never follows config.seed
    count = num_train + num_test
    classes, places = rng.integers(0, 10, count), rng.integers(0, 32, count)
    apart = 2 ** (1 + classes // 2)
    lines = (np.arange(32) + places[:, None]) % apart[:, None] < apart[:, None] // 2  # (N, 32)
    upright = (classes % 2 == 1)[:, None, None]
    bright = np.where(upright, lines[:, None, :], lines[:, :, None])[:, None]  # (N, 1, 32, 32)
    noise = rng.integers(0, 112, (count, 3, 32, 32), dtype=np.uint8)
    images = noise + (bright * 144).astype(np.uint8)
    labels = np.where(rng.random(count) < flip, rng.integers(0, 10, count), classes).astype(np.uint8)
    accuracy, loss = best_possible(flip)
    parts = images[:num_train], labels[:num_train], images[num_train:], labels[num_train:]
    return ImageDataset("stripes", *parts, best_accuracy=accuracy, loss_floor=loss)
