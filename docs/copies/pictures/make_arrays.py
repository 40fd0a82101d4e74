"""Makes the four arrays that simple_mnist_tpu.py reads of a folder with a folder of pictures for each class.

Run:     python make_arrays.py PICTURES DATA --size 64

PICTURES/CLASS/NAME.jpg (or .png, .webp, .bmp) becomes one row: scaled, cropped to a square, red, green and blue.
A fifth of each class, the same at each start, is for the test. DATA/classes.json names the classes. DATA is made whole
or not at all.
"""

import argparse
import json
import random
import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from tpu_utils.base.errors import InputError, first_line, run_script
from tpu_utils.base.files import open_regular
from tpu_utils.base.new_folder import written_aside

ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp")


def read_picture(path: Path, size: int) -> np.ndarray:
    """A picture as bytes (3, size, size). Raises InputError for a file that is no picture."""
    expected = f"a picture: {', '.join(ENDINGS)}"
    with open_regular(path, expected) as file:
        try:
            picture = as_rgb(ImageOps.exif_transpose(Image.open(file)))
            return np.asarray(ImageOps.fit(picture, (size, size))).transpose(2, 0, 1)
        except Exception as error:  # whatever PIL's parsers raise
            raise InputError(f"{path}: {first_line(error)}; expected {expected}; replace or delete it") from error


def as_rgb(picture: Image.Image) -> Image.Image:
    """Grey of 16 bits in 8, and what is transparent over white."""
    if picture.mode.startswith("I"):  # PIL itself makes 255 of all that is more
        picture = Image.fromarray((np.asarray(picture) // 257).clip(0, 255).astype(np.uint8))
    if "A" in picture.getbands() or "transparency" in picture.info:
        picture = picture.convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture)
    return picture.convert("RGB")


def list_pictures(folder: Path) -> dict[str, list[Path]]:
    """The pictures of each class, by its name. Raises InputError for fewer than two classes, or pictures of one."""
    folders = sorted(path for path in folder.glob("[!.]*") if path.is_dir())
    found = {path.name: sorted(p for p in path.rglob("*") if p.suffix.lower() in ENDINGS) for path in folders}
    if len(found) < 2 or any(len(paths) < 2 for paths in found.values()):
        counts = {name: len(paths) for name, paths in found.items()}
        raise InputError(
            f"{folder} has pictures {counts}; expected two folders or more, each with two pictures or more"
        )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pictures", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--size", type=int, default=64, help="pixels of a side; a multiple of 8")
    arguments = parser.parse_args()
    if arguments.size < 8 or arguments.size % 8:
        raise InputError(f"--size is {arguments.size}; expected a multiple of 8, such as 64")
    if arguments.data.exists():
        raise InputError(f"{arguments.data} exists; expected a new folder: name another one, or delete it")
    classes = list_pictures(arguments.pictures)
    files = sum(path.is_file() for path in arguments.pictures.rglob("*"))
    others = files - sum(map(len, classes.values()))
    rows = {"train": [], "test": []}
    shuffle = random.Random(0).shuffle
    for label, paths in enumerate(classes.values()):
        shuffle(paths)
        tested = max(1, len(paths) // 5)
        rows["test"] += [(path, label) for path in paths[:tested]]
        rows["train"] += [(path, label) for path in paths[tested:]]
    with written_aside(arguments.data) as made:
        for part, pairs in rows.items():
            shape = (len(pairs), 3, arguments.size, arguments.size)
            # on disk: the pictures may be larger than memory
            images = np.lib.format.open_memmap(made / f"{part}_images.npy", "w+", np.uint8, shape)
            for place, (path, _) in enumerate(pairs):
                images[place] = read_picture(path, arguments.size)
            images.flush()
            np.save(made / f"{part}_labels.npy", np.array([label for _, label in pairs]))
        (made / "classes.json").write_text(json.dumps({"classes": list(classes), "size": arguments.size}))
    left = f"; left out, for they end otherwise: {others} files" if others else ""
    print(f"{len(classes)} classes: {len(rows['train'])} pictures to train on, {len(rows['test'])} to test{left}")
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main))
