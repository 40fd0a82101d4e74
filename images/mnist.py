"""MNIST, and digits that need no download: read and checked. Imports no torch."""

import math
import struct
from pathlib import Path
from urllib.error import URLError

import numpy as np

from config import MnistConfig
from images.arrays import ImageDataset
from tpu_utils.base.errors import InputError, PassingError
from tpu_utils.base.files import file_size, open_regular


def check_files(config: MnistConfig) -> None:
    """Raises InputError when the files that config names are missing or damaged. Fast; imports no torch."""
    if config.dataset == "mnist" and not config.download and not shapes_suffice(config):
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
        return load_mnist(Path(config.data_dir), config.download)
    from images.made import make_synthetic  # only where it is asked for

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
            raise PassingError(
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
