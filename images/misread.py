"""The test images that a trained model misreads, counted and drawn. Imports torch only where a model is run."""

import math
import os
import sys
from dataclasses import dataclass
from importlib import util
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tpu_utils.base.errors import InputError

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure

    from images.arrays import ImageDataset

MOST_MISREAD = 64  # shown; all are counted
MOST_WORK = 4 * 10**12
"""Floating-point operations on the host for a picture: seconds on two cores."""
LARGEST_SIDE = 512  # pixels along a side of an image


@dataclass(frozen=True)
class Misread:
    """images: the first MOST_MISREAD (N, H, W) or (N, 3, H, W) uint8; None for images that cannot be drawn."""

    images: np.ndarray | None
    labels: np.ndarray
    predictions: np.ndarray
    num_misread: int
    num_tested: int
    step: int

    def __str__(self) -> str:
        return f"{self.num_misread:,} of {self.num_tested:,} test images misread after step {self.step:,}"


def find_misread(model: "torch.nn.Module", dataset: "ImageDataset", step: int) -> Misread:
    """All is computed on the host by plain PyTorch, in float32. After a bfloat16 run a borderline image may be read
    otherwise. A model that would take too long is tested on the first images alone.

    Raises InputError where labels are no classes, one for each image.
    """
    if dataset.num_classes is None or dataset.test_labels.ndim > 1:
        raise InputError(f"labels are {dataset.test_labels.dtype} {dataset.test_labels.shape}; expected a class each")
    predictions = predict(model, dataset.test_images)
    labels = dataset.test_labels[: len(predictions)]
    wrong = np.flatnonzero(predictions != labels)
    shown = wrong[:MOST_MISREAD]
    images = as_bytes(dataset.test_images[shown])
    return Misread(images, labels[shown], predictions[shown], len(wrong), len(predictions), step)


def predict(model: "torch.nn.Module", images: np.ndarray) -> np.ndarray:
    """The class of each image, (N,) int64, of the first ones if all would take more than MOST_WORK operations."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from images.arrays import sent

    model.eval()
    with torch.no_grad():
        with FlopCounterMode(display=False) as counter:
            model(torch.tensor(sent(images[:1])))  # a copy: from_numpy warns of a file's read-only memory
        images = images[: max(MOST_MISREAD, MOST_WORK // max(counter.get_total_flops(), 1))]
        parts = (torch.tensor(sent(images[start : start + 200])) for start in range(0, len(images), 200))
        return torch.cat([model(part).argmax(1) for part in parts]).numpy()


def as_bytes(images: np.ndarray) -> np.ndarray | None:
    """Images (N, H, W) or (N, 3, H, W) uint8 to draw; other numbers from their least to their largest as 0 to 255.

    None for arrays of another shape, and for (N, H, W) that may be sequences: of fractions beyond 0 to 1.
    """
    if images.ndim == 3 and images.dtype.kind == "f" and images.size and not 0 <= images.min() <= images.max() <= 1:
        return None
    if images.ndim == 4 and images.shape[1] == 1:
        images = images[:, 0]
    colours = images.shape[1:2] if images.ndim == 4 else ()
    if images.ndim not in (3, 4) or colours not in ((), (3,)) or max(images.shape[-2:]) > LARGEST_SIDE:
        return None
    if images.dtype != np.uint8 and images.size:
        values = images.astype(np.float64)
        low, high = values.min(), values.max()
        images = np.round((values - low) * (255 / max(high - low, 1e-300)))
    return np.ascontiguousarray(images.astype(np.uint8))


def misread_figure(found: Misread) -> "Figure":
    """A grid of the images, each with its label and, in red, what was read."""
    from matplotlib.figure import Figure  # only when a picture is drawn

    images = found.images
    columns = min(8, max(4, len(images)))
    rows = max(1, math.ceil(len(images) / columns))
    height = 1.25 * rows + 0.8
    figure = Figure(figsize=(1.05 * columns, height))
    shown = f", the first {len(images)} of them" if len(images) < found.num_misread else ""
    figure.suptitle(f"{found}{shown}\nabove each: label -> what was read", fontsize=9, y=1 - 0.05 / height, va="top")
    figure.subplots_adjust(0.02, 0.1 / height, 0.98, 1 - 0.65 / height)  # a layout engine would draw all of it twice
    for place, axes in enumerate(figure.subplots(rows, columns, squeeze=False).flat):
        axes.axis("off")
        if place < len(images):
            image = images[place]
            axes.imshow(image if image.ndim == 2 else image.transpose(1, 2, 0), cmap="gray_r", vmin=0, vmax=255)
            axes.set_title(f"{found.labels[place]} -> {found.predictions[place]}", fontsize=9, color="#b30000", pad=2)
    return figure


def draw_misread(script: Path, folder: Path) -> "Figure":
    """The test images that the last checkpoint of a run misreads. script: what has trained it, with its build_model()
    and load_dataset(). Raises InputError for a run of another script, and for images that cannot be drawn."""
    os.environ.setdefault("PJRT_DEVICE", "CPU")  # nothing runs on a device; left unset, torch_xla warns
    import torch  # only here, as in the script

    from tpu_utils.checkpoint.loading import CheckpointReader
    from tpu_utils.options.stored import resolve_stored

    spec = util.spec_from_file_location("drawn_script", script)
    if spec is None or not script.is_file():
        raise InputError(f"{script}: no such script; expected the one that trained {folder}")
    module = util.module_from_spec(spec)
    sys.path.insert(0, str(script.resolve().parent))
    spec.loader.exec_module(module)
    if not all(hasattr(module, name) for name in ("train", "build_model", "load_dataset")):
        raise InputError(f"{script} has no train(), build_model() and load_dataset(); expected a script for images")
    config = resolve_stored(signature(module.train).parameters["config"].annotation, str(folder), "must")
    saved = CheckpointReader(folder / "checkpoints").load("must")
    dataset = module.load_dataset(config)
    torch.manual_seed(config.seed)
    model = module.build_model(config, dataset)
    model.load_state_dict(saved.part("model"))
    found = find_misread(model, dataset, saved.step)
    print(f"{folder}: {found}")
    if found.images is None:
        raise InputError(
            f"images are {dataset.test_images.shape[1:]}; expected grey (H, W), or of three colours (3, H, W); floats "
            "(H, W) beyond 0 to 1 may be sequences: give pictures as (1, H, W)"
        )
    return misread_figure(found)
