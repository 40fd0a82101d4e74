"""CIFAR-10: downloaded, read and checked. Imports no torch."""

import hashlib
import io
import tarfile
import urllib.request
from http.client import HTTPException
from pathlib import Path

import numpy as np

from images.arrays import ImageDataset
from images.cifar_config import CifarConfig
from tpu_utils.base.errors import InputError, PassingError
from tpu_utils.base.files import file_size, open_regular
from tpu_utils.base.writing import write_atomically

FOLDER = "cifar-10-batches-bin"  # the archive's own name, and torchvision's for the same pictures
TRAIN_FILES, TEST_FILES = [f"data_batch_{number}.bin" for number in range(1, 6)], ["test_batch.bin"]
# Source of address, size, checksum and format: https://www.cs.toronto.edu/~kriz/cifar.html
ARCHIVE = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
ARCHIVE_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
ARCHIVE_BYTES = 170_052_171
RECORD = 1 + 3 * 32 * 32  # a label, then red, green and blue


def check_files(config: CifarConfig) -> None:
    """Raises InputError when the files that config names are missing or damaged. Fast; imports no torch."""
    if config.dataset == "cifar10" and not config.download and not shapes_suffice(config):
        for name in TRAIN_FILES + TEST_FILES:
            read_records(Path(config.data_dir) / FOLDER / name, most=1)


def shapes_suffice(config: CifarConfig) -> bool:
    """Whether CIFAR-10's shapes are enough: files are absent and --compile_for, which needs no data, is given."""
    found = (Path(config.data_dir, FOLDER, name).exists() for name in TRAIN_FILES + TEST_FILES)
    return bool(config.compile_for) and not all(found)


def load_dataset(config: CifarConfig) -> ImageDataset:
    """The data set the config names. Raises InputError when its files are missing or damaged."""
    if config.dataset == "cifar10" and shapes_suffice(config):
        parts = [(np.zeros((count, 3, 32, 32), np.uint8), np.arange(count) % 10) for count in (50_000, 10_000)]
        return ImageDataset(f"cifar10's shapes are assumed, no files in {config.data_dir}", *parts[0], *parts[1])
    if config.dataset == "cifar10":
        return load_cifar10(Path(config.data_dir), config.download)
    from images.made import make_stripes  # only where it is asked for

    return make_stripes()


def load_cifar10(data_dir: Path, download: bool) -> ImageDataset:
    """CIFAR-10's binary files in data_dir/cifar-10-batches-bin, any number of pictures in each."""
    folder = data_dir / FOLDER
    if download and not all((folder / name).exists() for name in TRAIN_FILES + TEST_FILES):
        download_cifar10(folder)
    train, test = (
        np.concatenate([read_records(folder / name) for name in names]) for names in (TRAIN_FILES, TEST_FILES)
    )
    arrays = [(records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0]) for records in (train, test)]
    return ImageDataset("cifar10", *arrays[0], *arrays[1])


def read_records(path: Path, most: int | None = None) -> np.ndarray:
    """A file's records, (N, 3073) uint8; most: no more than so many. Raises InputError: found, expected, what to do."""
    with open_regular(path, "CIFAR-10's binary version under --data_dir; add --download to fetch it") as file:
        size = file_size(file)
        if size == 0 or size % RECORD:
            raise InputError(
                f"{path} has {size} bytes; expected records of {RECORD}, a label and 3 x 32 x 32 values; fetch it again"
            )
        records = np.frombuffer(file.read(size if most is None else most * RECORD), np.uint8).reshape(-1, RECORD)
    if records[:, 0].max() > 9:
        where = int(np.argmax(records[:, 0] > 9))
        raise InputError(f"{path}: label {where} is {records[where, 0]}; expected 0 to 9; fetch the file again")
    return records


def download_cifar10(folder: Path) -> None:
    """Fetch the archive of its authors, check it, and write the six files of pictures; nothing else of it is used."""
    said = "check the network, or copy the six .bin files there"
    try:
        with urllib.request.urlopen(ARCHIVE, timeout=60) as answer:
            content = answer.read(ARCHIVE_BYTES + 1)
    except (OSError, HTTPException) as error:  # URLError is an OSError
        raise PassingError(f"CIFAR-10 could not be downloaded into {folder}: {error}; {said}") from error
    if (found := hashlib.md5(content, usedforsecurity=False).hexdigest()) != ARCHIVE_MD5:
        raise InputError(
            f"{ARCHIVE} has {len(content)} bytes with MD5 {found}; expected {ARCHIVE_BYTES} with {ARCHIVE_MD5}; {said}"
        )
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        for name in TRAIN_FILES + TEST_FILES:
            write_atomically(folder / name, archive.extractfile(f"{FOLDER}/{name}").read())
