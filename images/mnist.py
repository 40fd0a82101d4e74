"""What --dataset of the MNIST scripts names: digits that need no download, MNIST, made images. Imports no torch."""

from pathlib import Path

import numpy as np

from config import MnistConfig
from images.arrays import ImageDataset


def check_files(config: MnistConfig) -> None:
    """Raises InputError when the files that config names are missing or damaged. Fast; imports no torch."""
    if config.dataset == "mnist" and not config.download and not shapes_suffice(config):
        from images.mnist_files import load_mnist  # only where it is asked for, as below

        load_mnist(Path(config.data_dir), download=False)


def shapes_suffice(config: MnistConfig) -> bool:
    """Whether MNIST's shapes are enough: its files are absent and --compile_for, which needs no data, is given."""
    return bool(config.compile_for) and len(list(Path(config.data_dir, "MNIST", "raw").glob("*-ubyte"))) < 4


def load_dataset(config: MnistConfig) -> ImageDataset:
    """The data set the config names. Raises InputError when its files are missing or damaged."""
    if config.dataset == "mnist" and shapes_suffice(config):
        parts = [np.zeros(shape, np.uint8) for count in (60_000, 10_000) for shape in ((count, 28, 28), count)]
        return ImageDataset(f"mnist's shapes are assumed, no files in {config.data_dir}", *parts)
    if config.dataset == "digits":
        return load_digits()
    if config.dataset == "mnist":
        from images.mnist_files import load_mnist

        return load_mnist(Path(config.data_dir), config.download)
    from images.made import make_synthetic

    return make_synthetic()


def load_digits() -> ImageDataset:
    """scikit-learn's 1,797 handwritten digits, 8 x 8; every class gives a fifth of its images to the test set. Source:
    UCI "Optical Recognition of Handwritten Digits" test set, as shipped inside scikit-learn."""
    from sklearn.datasets import load_digits as sklearn_digits
    from sklearn.model_selection import train_test_split

    images, labels = sklearn_digits(return_X_y=True)
    images = np.round(images.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)  # stored as 0..16
    # the split is part of the data set: it never follows config.seed
    split = train_test_split(images, labels.astype(np.uint8), test_size=0.2, stratify=labels, random_state=0)
    train_images, test_images, train_labels, test_labels = split
    return ImageDataset("digits", train_images, train_labels, test_images, test_labels)
