"""MNIST's IDX files: downloaded, read and checked. Imports no torch."""

import math
import struct
from pathlib import Path

import numpy as np

from images.arrays import ImageDataset
from tpu_utils.base.errors import InputError, PassingError
from tpu_utils.base.files import file_size, open_regular


def load_mnist(data_dir: Path, download: bool) -> ImageDataset:
    """MNIST IDX files in torchvision's layout, data_dir/MNIST/raw; any number of images."""
    if download:
        from torchvision.datasets import MNIST

        try:
            MNIST(str(data_dir), train=True, download=True)
        except (RuntimeError, OSError) as error:  # URLError is an OSError
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
