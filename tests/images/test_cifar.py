"""CIFAR-10's binary files, and stripes with a known best accuracy."""

import hashlib
import io
import math
import tarfile

import numpy as np
import pytest
from mutations import at_most, make_irregular, no_hang

from images import cifar
from images.cifar import FOLDER, RECORD, TEST_FILES, TRAIN_FILES, check_files, load_cifar10
from images.cifar_config import CifarConfig
from images.made import make_stripes
from tpu_utils.base.errors import InputError, PassingError


@pytest.fixture
def small_cifar(tmp_path):
    (tmp_path / FOLDER).mkdir()
    for number, name in enumerate(TRAIN_FILES + TEST_FILES):
        records = np.zeros((4, RECORD), np.uint8)
        records[:, 0], records[:, 1], records[:, 1 + 2 * 1024] = np.arange(4), 10 * number, 200 + np.arange(4)
        (tmp_path / FOLDER / name).write_bytes(records.tobytes())
    return tmp_path


def test_binary_files_are_red_green_and_blue(small_cifar):
    data = load_cifar10(small_cifar, download=False)
    check_files(CifarConfig(dataset="cifar10", data_dir=str(small_cifar)))
    assert data.train_images.shape == (20, 3, 32, 32) and data.test_images.shape == (4, 3, 32, 32)
    assert data.train_images[4, 0, 0, 0] == 10 and data.train_images[5, 2, 0, 0] == 201
    assert data.train_labels[:5].tolist() == [0, 1, 2, 3, 0] and data.num_classes == 4


@pytest.mark.parametrize("name", [TRAIN_FILES[0], TEST_FILES[0]])
@pytest.mark.parametrize(
    "damage, said",
    [
        (lambda path: path.unlink(), "no such file; expected CIFAR-10's binary version under --data_dir"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "has 12291 bytes; expected records of 3073"),
        (lambda path: path.write_bytes(b""), "has 0 bytes"),
        (lambda path: path.write_bytes(b"\x0a" + path.read_bytes()[1:]), "label 0 is 10; expected 0 to 9"),
        (lambda path: make_irregular(path, "FIFO"), "is a FIFO; expected CIFAR-10"),
    ],
)
def test_damaged_files_are_refused_before_the_slow_imports(small_cifar, damage, said, name):
    damage(small_cifar / FOLDER / name)
    config = CifarConfig(dataset="cifar10", data_dir=str(small_cifar))
    for attempt in (lambda: check_files(config), lambda: load_cifar10(small_cifar, download=False)):
        with no_hang(), at_most(1 << 20), pytest.raises(InputError, match=said) as error:
            attempt()
        assert name in str(error.value)


def archive(folder, names) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as tar:
        for name in names:
            tar.add(folder / FOLDER / name, f"{FOLDER}/{name}")
        tar.add(folder / FOLDER / TEST_FILES[0], "../outside.bin")
    return content.getvalue()


def test_a_download_is_checked_and_only_its_pictures_are_written(small_cifar, tmp_path, monkeypatch):
    content = archive(small_cifar, TRAIN_FILES + TEST_FILES)
    (tmp_path / "archive.tar.gz").write_bytes(content)
    monkeypatch.setattr(cifar, "ARCHIVE", (tmp_path / "archive.tar.gz").as_uri())
    fetched = tmp_path / "fetched"
    with pytest.raises(InputError, match=rf"has {len(content)} bytes with MD5 .*; expected 170052171 with"):
        load_cifar10(fetched, download=True)
    assert not fetched.exists()
    monkeypatch.setattr(cifar, "ARCHIVE_MD5", hashlib.md5(content, usedforsecurity=False).hexdigest())
    data = load_cifar10(fetched, download=True)
    assert data.fingerprint() == load_cifar10(small_cifar, download=False).fingerprint()
    assert sorted(path.name for path in fetched.rglob("*.*")) == sorted(TRAIN_FILES + TEST_FILES)
    (tmp_path / "archive.tar.gz").unlink()
    assert load_cifar10(fetched, download=True).fingerprint() == data.fingerprint(), "nothing is fetched twice"
    with pytest.raises(PassingError, match=r"CIFAR-10 could not be downloaded into .*; check the network, or copy"):
        load_cifar10(tmp_path / "other", download=True)


def test_stripes_have_the_best_accuracy_and_loss_they_say():
    data = make_stripes(num_train=20_000, num_test=10)
    read = classes_of(data.train_images)
    right = read == data.train_labels
    assert abs(right.mean() - data.best_accuracy) < 4 * math.sqrt(0.91 * 0.09 / 20_000)
    assert abs(-np.where(right, math.log(0.91), math.log(0.01)).mean() - data.loss_floor) < 0.04
    assert make_stripes(20_000, 10).fingerprint() == data.fingerprint()
    shown = make_stripes()
    assert abs((classes_of(shown.test_images) == shown.test_labels).mean() - shown.best_accuracy) < 5e-4


def classes_of(images) -> np.ndarray:
    """What the stripes are, read off each image: how often brightness changes, and along which axis."""
    bright = images[:, 0] >= 128
    assert (bright == (images[:, 1] >= 128)).all()
    down, across = ((bright != np.roll(bright, 1, axis)).sum((1, 2)) // 32 for axis in (1, 2))
    assert ((down == 0) != (across == 0)).all(), "one of the two, in every image"
    apart = 64 // np.maximum(down, across)
    return 2 * (np.log2(apart).round().astype(int) - 1) + (across > 0)
