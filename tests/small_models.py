"""Models and images of somebody's own, put into the scripts by test_copies.py; on a mesh by this file itself:

python tests/small_models.py FOLDER [options of distributed_mnist_tpu.py]

trains every cell of the matrix, one after the other in one process, over 4 virtual devices, each in FOLDER/CELL.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
if __name__ == "__main__":
    os.environ.update(PJRT_DEVICE="CPU", CPU_NUM_DEVICES="4")

import shutil

import numpy as np
import torch
from torch import nn
from torchvision.models import VisionTransformer

from images.arrays import ImageDataset
from tpu_utils.device.dropout_module import Dropout, replace_dropout

CLASSES = 5


class Vision(nn.Module):
    """torchvision's transformer, whose dropout uploads nothing once it is replaced, and a scalar that is a float."""

    def __init__(self, image_size, channels, hidden_dim):
        super().__init__()
        vision = VisionTransformer(image_size, 4, 1, 2, 16, 32, dropout=0.2, num_classes=CLASSES)
        torch.nn.init.normal_(vision.heads.head.weight, 0.0, 0.1)  # zeros would be a curve of their own
        self.vision = replace_dropout(vision, seed=0)
        self.register_buffer("scale", torch.tensor(1.0), persistent=False)

    def forward(self, images):
        self.scale.copy_(self.scale * 0.5 + 0.5)  # stays 1
        return self.vision(images.float() * self.scale)


class Dropping(nn.Module):
    """torch's own dropout, which uploads a seed in every step."""

    def __init__(self, image_size, channels, hidden_dim):
        super().__init__()
        self.hidden, self.head = nn.Linear(3 * image_size**2, 32), nn.Linear(32, CLASSES)

    def forward(self, images):
        hidden = torch.relu(self.hidden(images.float().flatten(1)))
        return self.head(nn.functional.dropout(hidden, 0.5, self.training))


class DroppingDigits(nn.Module):
    def __init__(self, image_size, channels, hidden_dim):
        super().__init__()
        self.hidden, self.dropout, self.head = nn.Linear(64, 48), Dropout(0.5, salt=7), nn.Linear(48, 10)

    def forward(self, images):
        return self.head(self.dropout(torch.relu(self.hidden(images.float().flatten(1) / 16))))


class Normed(nn.Module):
    """BatchNorm has statistics that an evaluation reads, and a count of batches without a dimension."""

    def __init__(self, image_size, channels, hidden_dim):
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.head = nn.Linear(8 * image_size**2, CLASSES)

    def forward(self, images):
        return self.head(torch.relu(self.norm(self.convolution(images.float()))).flatten(1))


class Flat(nn.Module):
    """Images of any shape, with so many numbers each -> logits (B, 4)."""

    def __init__(self, size):
        super().__init__()
        self.head = nn.Linear(size, 4)

    def forward(self, images):
        return self.head(images.flatten(1).float() / 64)


def colour_images(dtype) -> ImageDataset:
    """Five classes by their mean colour, (N, 3, 8, 8): bytes, or floats of about -1 to 1. Six batches of 64."""
    random = np.random.default_rng(0)
    labels = random.integers(0, CLASSES, 500).astype(np.int64)
    images = random.random((500, 3, 8, 8)) * 0.5 + labels[:, None, None, None] * 0.1
    images = (images * 2 - 1).astype(dtype) if dtype == np.float32 else (images * 255).astype(dtype)
    return ImageDataset("mine", images[:384], labels[:384], images[384:], labels[384:])


# --------------------------------------------------------------------------------------------------------- the matrix
KINDS = ((Normed, "uint8"), (Normed, "float32"), (Vision, "float32"), (Dropping, "float32"))
CELLS = {f"{kind.__name__}-{dtype}": (kind, dtype) for kind, dtype in KINDS}
STEPS = 6
# after step 1 the count of batches of BatchNorm is 1, which torch_xla would make a constant of
RESUMED_FROM = {"uint8": 1, "float32": 3}


def train_cell(cell: str, folder: Path, script, train: Callable[..., int]) -> None:
    """An epoch in folder/CELL/whole, and from a checkpoint of it on in folder/CELL/resumed."""
    kind, dtype = CELLS[cell]
    data = colour_images(np.dtype(dtype))
    script.load_dataset, script.ConvNet = lambda config: data, kind
    whole = folder / cell / "whole"
    assert train("--run_dir", whole) == 0, cell
    resumed, name = folder / cell / "resumed", f"step_{RESUMED_FROM[dtype]:08}"
    shutil.copytree(whole / "checkpoints" / name, resumed / "checkpoints" / name)
    assert train("--run_dir", resumed, "--resume=must") == 0, cell


def main() -> None:
    import distributed_mnist_tpu as script
    from config import DistributedMnistConfig
    from tpu_utils.base.errors import run_script
    from tpu_utils.options.parsing import parse_command_line

    folder, *options = sys.argv[1:]

    def train(*more) -> int:
        argv = ["--num_virtual_devices=4", *options, *map(str, more)]
        return run_script(lambda: script.train(parse_command_line(DistributedMnistConfig, "", argv)))

    for cell in CELLS:
        train_cell(cell, Path(folder), script, train)


if __name__ == "__main__":
    main()
