"""What a finished MNIST run misread, as a file and as a picture. Imports torch only where a model is run."""

import math
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tpu_utils.errors import InputError
from tpu_utils.files import write_atomically

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure

    from mnist_data import ImageDataset
    from tpu_utils.run import Run

MISREAD_FILE = "misread.npz"
MOST_MISREAD = 64  # shown; all are counted


def log_misread(run: "Run", model: "torch.nn.Module", dataset: "ImageDataset") -> None:
    """Write misread.npz, and the first test images that the final model misreads to TensorBoard. Not for a stopped run.

    model: one on the host; its weights become those of the last checkpoint. All is computed there by plain PyTorch,
    in float32: no graph, nothing read from the device. After a bfloat16 run a borderline image may be read otherwise.
    """
    import torch

    saved = run.last_checkpoint()
    if saved is None:
        return
    model.load_state_dict(saved.part("model"))
    with torch.no_grad():
        parts = torch.tensor(dataset.test_images).split(1000)
        predictions = torch.cat([model(images).argmax(1) for images in parts]).numpy().astype(np.uint8)
    wrong = np.flatnonzero(predictions != dataset.test_labels)
    shown = wrong[:MOST_MISREAD]
    found = dict(
        images=dataset.test_images[shown],
        labels=dataset.test_labels[shown],
        predictions=predictions[shown],
        num_misread=np.array(len(wrong)),
        num_tested=np.array(len(predictions)),
        step=np.array(saved.step),
    )
    content = BytesIO()
    np.savez_compressed(content, **found)
    write_atomically(run.run_dir / MISREAD_FILE, content.getvalue())
    run.print(f"misread    {len(wrong)} of {len(predictions)} test images; plot_run.py draws them from {MISREAD_FILE}")
    if run.events:
        run.events.add_figure("misread", misread_figure(**found), saved.step)


def read_misread(run_dir: Path) -> dict[str, np.ndarray]:
    """What log_misread wrote. Raises InputError when the file is damaged."""
    path = run_dir / MISREAD_FILE
    try:
        with np.load(path, allow_pickle=False) as file:
            names = ("images", "labels", "predictions", "num_misread", "num_tested", "step")
            return {name: file[name] for name in names}
    except Exception as error:  # np.load raises what zipfile, zlib and its own header parser raise
        raise InputError(
            f"{path} cannot be read: {error}; delete it; only the picture of misread digits needs it"
        ) from error


def misread_figure(images, labels, predictions, num_misread, num_tested, step) -> "Figure":
    """A grid of images (N, H, W) uint8, each with its label and, in red, what was read."""
    from matplotlib.figure import Figure  # only when a picture is drawn

    columns = min(8, max(4, len(images)))
    rows = max(1, math.ceil(len(images) / columns))
    height = 1.25 * rows + 0.8
    figure = Figure(figsize=(1.05 * columns, height))
    shown = f", the first {len(images)} of them" if len(images) < num_misread else ""
    title = f"step {int(step):,}: {int(num_misread):,} of {int(num_tested):,} test images misread{shown}"
    figure.suptitle(f"{title}\nabove each: label -> what was read", fontsize=9, y=1 - 0.05 / height, va="top")
    figure.subplots_adjust(0.02, 0.1 / height, 0.98, 1 - 0.65 / height)  # a layout engine would draw all of it twice
    for place, axes in enumerate(figure.subplots(rows, columns, squeeze=False).flat):
        axes.axis("off")
        if place < len(images):
            axes.imshow(images[place], cmap="gray_r", vmin=0, vmax=255)
            axes.set_title(f"{labels[place]} -> {predictions[place]}", fontsize=9, color="#b30000", pad=2)
    return figure
