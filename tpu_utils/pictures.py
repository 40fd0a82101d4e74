"""What a finished run misread, as a file and as a picture. Imports torch only where a model is run."""

import math
import sys
import zipfile
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tpu_utils.errors import InputError, first_line
from tpu_utils.files import write_atomically
from tpu_utils.inputs import read_regular

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure

    from image_data import ImageDataset
    from tpu_utils.run import Run

MISREAD_FILE = "misread.npz"
MISREAD_DIMS = {"images": (3, 4), "labels": (1,), "predictions": (1,)}
MISREAD_DIMS |= {"num_misread": (0,), "num_tested": (0,), "step": (0,)}
MOST_MISREAD = 64  # shown; all are counted
MOST_WORK = 4 * 10**12
"""Floating-point operations on the host for a picture: seconds on two cores."""
LARGEST_FILE = 1 << 26  # bytes; a run's own has a few thousand
LARGEST_SIDE = 512  # of an image, in pixels


def log_misread(run: "Run", model: "torch.nn.Module", dataset: "ImageDataset") -> None:
    """Write misread.npz, and the first test images that the final model misreads to TensorBoard. Not for a stopped run.

    model: one on the host; its weights become those of the last checkpoint. All is computed there by plain PyTorch,
    in float32: no graph, nothing read from the device. After a bfloat16 run a borderline image may be read otherwise.
    Images that are neither grey (N, H, W) nor of three colours (N, 3, H, W) are counted, not drawn; where labels are no
    classes there is nothing to count. What fails here is said, and costs the run neither its summary nor its exit code.
    """
    saved = run.last_checkpoint()
    if saved is None or dataset.num_classes is None or dataset.test_labels.ndim > 1:
        return
    try:
        model.load_state_dict(saved.part("model"))
        predictions = predict(model, dataset.test_images)
        labels = dataset.test_labels[: len(predictions)]
        wrong = np.flatnonzero(predictions != labels)
        said = f"misread    {len(wrong)} of {'' if len(labels) == len(dataset.test_labels) else 'the first '}"
        said += f"{len(predictions)} test images"
        shown = wrong[:MOST_MISREAD]
        images = as_bytes(dataset.test_images[shown])
        if images is None:
            run.print(said)
            return
        found = dict(
            images=images,
            labels=labels[shown].astype(np.int64),
            predictions=predictions[shown],
            num_misread=np.array(len(wrong)),
            num_tested=np.array(len(predictions)),
            step=np.array(saved.step),
        )
        content = BytesIO()
        np.savez_compressed(content, **found)
        write_atomically(run.run_dir / MISREAD_FILE, content.getvalue())
        run.print(f"{said}; plot_run.py draws them from {MISREAD_FILE}")
        if run.events:
            run.events.add_figure("misread", misread_figure(**found), saved.step)
    except Exception as error:  # whatever a copied script's model and images do here: the training is done and saved
        print(f"warning: no picture of misread images: {type(error).__name__}: {error}", file=sys.stderr)


def predict(model: "torch.nn.Module", images: np.ndarray) -> np.ndarray:
    """The class of each image, (N,) int64, of the first ones if all would take more than MOST_WORK operations."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from image_data import sent

    model.eval()
    with torch.no_grad():
        with FlopCounterMode(display=False) as counter:
            model(torch.tensor(sent(images[:1])))  # a copy: from_numpy warns of a file's read-only memory
        images = images[: max(MOST_MISREAD, MOST_WORK // max(counter.get_total_flops(), 1))]
        parts = (torch.tensor(sent(images[start : start + 200])) for start in range(0, len(images), 200))
        return torch.cat([model(part).argmax(1) for part in parts]).numpy()


def as_bytes(images: np.ndarray) -> np.ndarray | None:
    """Images (N, H, W) or (N, 3, H, W) uint8 to draw; other numbers from their least to their largest as 0 to 255.

    None for images that are of another shape.
    """
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


def read_misread(run_dir: Path) -> dict[str, np.ndarray]:
    """What log_misread wrote; of more than MOST_MISREAD images the first. Raises InputError for a damaged file."""
    path = run_dir / MISREAD_FILE
    expected = "the misread images of a run; delete it; only the picture of misread images needs it"
    content = read_regular(path, expected, LARGEST_FILE)
    try:
        if content.count(b"PK\1\2") > 100:  # a member each; their list may take far more memory than the file
            raise ValueError(f"it is no archive of {len(MISREAD_DIMS)} arrays")
        with zipfile.ZipFile(BytesIO(content)) as archive:
            found = {name: _read_first(archive, name, dims) for name, dims in MISREAD_DIMS.items()}
        counts = [len(found[name]) for name in ("images", "labels", "predictions")]
        colours = found["images"].shape[1:-2]
        if colours not in ((), (3,)) or found["images"].dtype != np.uint8:
            raise ValueError(f"images are {found['images'].dtype} {found['images'].shape}")
        if len(set(counts)) > 1 or counts[0] > found["num_misread"]:
            raise ValueError(f"images, labels and predictions are {counts} of {found['num_misread']} misread")
        return found
    except Exception as error:  # whatever zipfile, zlib and numpy's parser of headers raise
        raise InputError(f"{path} cannot be read: {first_line(error)}; expected {expected}") from error


def _read_first(archive: zipfile.ZipFile, name: str, dims: tuple[int, ...]) -> np.ndarray:
    """The first MOST_MISREAD of an array of whole numbers. Its header is checked before memory is taken for it."""
    member = archive.getinfo(f"{name}.npy")
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{name} is compressed as numpy never does it")  # others inflate without bound
    with archive.open(member) as file:
        if np.lib.format.read_magic(file) != (1, 0):
            raise ValueError(f"{name} is not of format 1.0")  # later ones have headers of up to 4 GiB
        shape, by_columns, dtype = np.lib.format.read_array_header_1_0(file, max_header_size=1000)
        sides_fit = all(1 <= side <= LARGEST_SIDE for side in shape[1:])
        if len(shape) not in dims or min(shape, default=0) < 0 or not sides_fit or by_columns or dtype.kind not in "iu":
            raise ValueError(f"{name} is {shape} of {dtype}; expected {dims[0]} dimensions of whole numbers")
        shape = tuple(min(size, MOST_MISREAD) if axis == 0 else size for axis, size in enumerate(shape))
        values = file.read(math.prod(shape) * dtype.itemsize)
    return np.frombuffer(values, dtype, math.prod(shape)).reshape(shape)


def misread_figure(images, labels, predictions, num_misread, num_tested, step) -> "Figure":
    """A grid of images (N, H, W) or (N, 3, H, W) uint8, the first MOST_MISREAD, each with its label and, in red, what
    was read."""
    from matplotlib.figure import Figure  # only when a picture is drawn

    images = images[:MOST_MISREAD]
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
            image = images[place]
            axes.imshow(image if image.ndim == 2 else image.transpose(1, 2, 0), cmap="gray_r", vmin=0, vmax=255)
            axes.set_title(f"{labels[place]} -> {predictions[place]}", fontsize=9, color="#b30000", pad=2)
    return figure
