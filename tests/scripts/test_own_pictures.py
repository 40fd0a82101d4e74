"""docs/own_pictures.md: its commands as they stand, on pictures made here."""

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from processes import ROOT, Script
from test_docs import blocks_of

CLASSES = {"blue": 2, "green": 1, "red": 0}
QUICKER = {
    "make_arrays.py": " --size 32",
    "simple_mnist_tpu.py": " --global_batch_size 24 --warmup_steps 2 --device cpu",
}


def write_picture(path: Path, channel: int, draw: np.random.Generator) -> None:
    """Noise of any size, and one colour in the middle."""
    height, width = draw.integers(20, 50, 2)
    pixels = draw.integers(0, 120, (height, width, 3), np.uint8)
    pixels[height // 4 : -height // 4, width // 4 : -width // 4, channel] += 120
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


@pytest.fixture(scope="module")
def copied(tmp_path_factory):
    """What the page's first block makes."""
    if not shutil.which("patch"):
        pytest.skip("this machine has no patch program, which the page needs")
    folder = tmp_path_factory.mktemp("own") / "pictures"
    made, patched = (command.text for command in blocks_of(ROOT / "docs" / "own_pictures.md")[0])
    copy = Script(*made.replace("../pictures", str(folder)).split()[1:], folder=ROOT)
    assert copy.wait() == 0, copy.text("err")
    subprocess.run(["bash", "-ec", patched.replace("../pictures", str(folder))], cwd=ROOT, check=True)
    return folder


def run_here(folder: Path, command: str) -> tuple[int, str, str]:
    process = Script(*command.removeprefix("python ").split(), folder=folder)
    code = process.wait()
    return code, process.text("out"), process.text("err")


def test_the_commands_of_the_page_classify_new_pictures(copied):
    draw = np.random.default_rng(0)
    for name, channel in CLASSES.items():
        for number in range(30):
            write_picture(copied / "PICTURES" / name / f"{number}.{'png' if number % 2 else 'jpg'}", channel, draw)
    write_picture(copied / "new.jpg", CLASSES["green"], draw)
    said = []
    for command, reason in blocks_of(ROOT / "docs" / "own_pictures.md")[1]:
        assert reason
        code, out, err = run_here(copied, command + QUICKER.get(command.split()[1], ""))
        assert code == 0, err
        said += out.splitlines()
    page = (ROOT / "docs" / "own_pictures.md").read_text()
    shown = re.search(r"```\n(3 classes.*?)```", page, re.S)[1].splitlines()
    assert said[0] == shown[0] and any(line.startswith(shown[1]) for line in said), said
    assert said[-1].startswith(shown[-1].rpartition(" ")[0]), said[-1]
    code, out, err = run_here(
        copied, f"python classify.py data runs/first PICTURES/blue/3.png {copied}/PICTURES/red/4.jpg"
    )
    assert [line.split()[1] for line in out.splitlines()] == ["blue,", "red,"], out + err
    code, _, err = run_here(copied, "python make_arrays.py PICTURES data")
    assert code == 2 and "data exists; expected a new folder" in err
    known = copied / "data" / "classes.json"
    known.write_text(known.read_text().replace('"red"', '"red", "white"'))
    code, _, err = run_here(copied, "python classify.py data runs/first new.jpg")
    assert code == 2 and "is of another model" in err and "Traceback" not in err


def test_sixteen_bits_and_what_is_transparent_are_seen(copied, tmp_path):
    """X-rays became white, and icons black."""
    grey = np.full((8, 8), 257 * 40, np.uint16)
    grey[2:6, 2:6] = 257 * 200
    icon = np.zeros((8, 8, 4), np.uint8)
    icon[2:6, 2:6, 3] = 255
    for name, pixels in (("a", grey), ("b", icon)):
        (tmp_path / name).mkdir()
        for number in range(2):
            Image.fromarray(pixels).save(tmp_path / name / f"{number}.png")
    code, _, err = run_here(copied, f"python make_arrays.py {tmp_path} {tmp_path / 'data'} --size 8")
    assert code == 0, err
    found, expected = np.load(tmp_path / "data" / "test_images.npy"), np.stack([grey // 257, 255 - icon[..., 3]])
    assert np.array_equal(found, np.repeat(expected[:, None], 3, 1))


def test_what_is_no_picture_is_named(copied, tmp_path):
    draw = np.random.default_rng(1)
    for name in ("a", "b"):
        for number in range(5):
            write_picture(tmp_path / name / f"{number}.png", 0, draw)
    (tmp_path / "b" / "4.jpg").write_bytes(b"no picture")
    command = f"python make_arrays.py {tmp_path} {tmp_path / 'data'}"
    code, _, err = run_here(copied, command)
    assert code == 2 and "4.jpg" in err and "expected a picture" in err and "Traceback" not in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]  # nothing half-made
    (tmp_path / "b" / "4.jpg").rename(tmp_path / "b" / "4.heic")
    code, out, err = run_here(copied, command.replace("/data", "/made"))
    assert code == 0 and "left out, for they end otherwise: 1 files" in out, out + err
    shutil.rmtree(tmp_path / "made")
    shutil.rmtree(tmp_path / "b")
    (tmp_path / ".ipynb_checkpoints").mkdir()
    code, _, err = run_here(copied, command)
    assert code == 2 and "{'a': 5" in err and "two folders or more" in err
    code, _, err = run_here(copied, f"python classify.py {tmp_path} {tmp_path} {tmp_path / 'a' / '0.png'}")
    assert code == 2 and "finished checkpoint" in err
