"""Models and images of somebody's own, put into the scripts by test_copies.py; on a mesh by this file itself:

python tests/small_models.py MODEL DEVICES [options of distributed_mnist_tpu.py]
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
if __name__ == "__main__":
    os.environ.update(PJRT_DEVICE="CPU", CPU_NUM_DEVICES=sys.argv[2])

import numpy as np
import torch
from torch import nn
from torchvision.models import VisionTransformer

from dropout import Dropout, replace_dropout
from image_data import ImageDataset


class Dropping(nn.Module):
    """Half of what it knows is left out in training, and none of it in an evaluation."""

    def __init__(self, image_size, channels, hidden_dim):
        super().__init__()
        self.hidden, self.head = nn.LazyLinear(32), nn.Linear(32, 5)
        self.hidden(torch.zeros(1, 3 * image_size**2))

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
        self.head = nn.Linear(8 * image_size**2, 5)

    def forward(self, images):
        return self.head(torch.relu(self.norm(self.convolution(images.float()))).flatten(1))


class Vision(nn.Module):
    """torchvision's transformer, whose dropout uploads nothing once it is replaced, and a scalar that is a float."""

    def __init__(self, image_size, channels, hidden_dim):
        super().__init__()
        vision = VisionTransformer(image_size, 4, 1, 2, 16, 32, dropout=0.2, num_classes=5)
        torch.nn.init.normal_(vision.heads.head.weight, 0.0, 0.1)  # zeros would be a curve of their own
        self.vision = replace_dropout(vision, seed=0)
        self.register_buffer("scale", torch.tensor(1.0), persistent=False)

    def forward(self, images):
        self.scale.copy_(self.scale * 0.5 + 0.5)  # stays 1
        return self.vision(images.float() * self.scale)


def colour_images(dtype):
    """Five classes by their mean colour, (N, 3, 8, 8); floats in [0, 1], which are all 0 as bytes."""
    random = np.random.default_rng(0)
    labels = random.integers(0, 5, 600).astype(np.int64)
    images = random.random((600, 3, 8, 8)) * 0.5 + labels[:, None, None, None] * 0.1
    images = images.astype(dtype) if dtype == np.float32 else (images * 255).astype(dtype)
    return ImageDataset("mine", images[:480], labels[:480], images[480:], labels[480:])


def main() -> int:
    import distributed_mnist_tpu as script
    from config import DistributedMnistConfig
    from tpu_utils.errors import run_script
    from tpu_utils.options import parse_command_line

    script.load_dataset = lambda config: colour_images(np.float32)
    script.ConvNet = globals()[sys.argv[1]]
    options = ["--num_virtual_devices", sys.argv[2], *sys.argv[3:]]
    return run_script(lambda: script.train(parse_command_line(DistributedMnistConfig, "", options)))


if __name__ == "__main__":
    sys.exit(main())
