"""Images that are made, of which the best possible accuracy is known. Imports no torch."""

import math

import numpy as np

from images.arrays import ImageDataset

FLIP = 0.1
"""Probability with which a label is drawn anew from all ten classes."""


def with_labels(name: str, images: np.ndarray, classes: np.ndarray, num_train: int, rng) -> ImageDataset:
    """Images of known classes, and labels of which FLIP are drawn anew: right with probability 1 - 0.9 FLIP, each wrong
    class with FLIP / 10. The best that any model can do is that accuracy, and the entropy of these as its loss."""
    labels = np.where(rng.random(len(classes)) < FLIP, rng.integers(0, 10, len(classes)), classes).astype(np.uint8)
    wrong = FLIP / 10
    right = 1 - 9 * wrong
    loss = -right * math.log(right) - 9 * wrong * math.log(wrong)
    parts = images[:num_train], labels[:num_train], images[num_train:], labels[num_train:]
    return ImageDataset(name, *parts, best_accuracy=right, loss_floor=loss)


def make_synthetic(num_train: int = 4096, num_test: int = 2048) -> ImageDataset:
    """Images (8, 8) whose class can be read without error, and labels of which a known share is wrong.

    Each class has a fixed pattern of dark (below 112) and bright (from 144) pixels; two patterns differ in half of the
    pixels and the noise never crosses the gap, so the class is certain.
    """
    rng = np.random.default_rng(20_240_101)  # the data set is fixed: it never follows config.seed
    # rows 1 to 10 of a Walsh-Hadamard matrix: any two differ in exactly half of the pixels
    patterns = np.array([[(pixel & row).bit_count() % 2 for pixel in range(64)] for row in range(1, 11)])
    count = num_train + num_test
    classes = rng.integers(0, 10, count)
    dark, bright = rng.integers(0, 112, (count, 64)), rng.integers(144, 256, (count, 64))
    images = np.where(patterns[classes], bright, dark).astype(np.uint8).reshape(count, 8, 8)
    return with_labels("synthetic", images, classes, num_train, rng)


def make_stripes(num_train: int = 4096, num_test: int = 2048) -> ImageDataset:
    """Stripes (3, 32, 32), horizontal or vertical, 2, 4, 8, 16 or 32 pixels apart, and labels of which some are wrong.

    A stripe's pixels are dark (below 112) or bright (from 144) in all colours and the noise never crosses the gap, so
    the class can be read without error, whatever the place, which is random; a shift or a mirror does not change it.
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
    return with_labels("stripes", images, classes, num_train, rng)
