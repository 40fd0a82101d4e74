"""What a finished run shows of itself: its summary in TensorBoard, misread digits, a sample of text.

All of it is computed on the host by plain PyTorch, from the last checkpoint, after the last step: no graph, nothing
read from the device.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from config import BYTE_VOCAB_SIZE, InputError, TrainConfig, TransformerConfig
from tpu_utils.checkpoint import Checkpoints, write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MISREAD_FILE = "misread.npz"
MOST_MISREAD = 64  # shown; all are counted
SAMPLE_BYTES, SAMPLE_TEMPERATURE = 100, 0.8
LARGEST_SAMPLED = 2_000_000  # parameters; 19 M took 46 s on two shared cores: use generate_tpu.py


@contextlib.contextmanager
def _events(config: TrainConfig, run_dir: Path) -> Iterator[Any]:
    """A TensorBoard writer into the run's own folder; None without --tensorboard."""
    if not config.tensorboard:
        yield None
        return
    from torch.utils.tensorboard import SummaryWriter  # a second of imports

    with SummaryWriter(str(run_dir / "tensorboard")) as writer:
        yield writer


def log_summary(config: TrainConfig, run_dir: Path, summary: dict[str, Any]) -> None:
    """TensorBoard: hyperparameters beside the run's results, and the goodput split in seconds."""
    with _events(config, run_dir) as writer:
        if not writer:
            return
        from torch.utils.tensorboard.summary import hparams

        step = summary["steps"]
        results = {
            f"summary/{name}": value
            for name, value in summary.items()
            if isinstance(value, int | float) and math.isfinite(value)
        }
        options = {name: v if isinstance(v, bool | int | float | str) else str(v) for name, v in asdict(config).items()}
        for event in hparams(options, results):  # SummaryWriter.add_hparams would make a folder, hence a second run
            writer.file_writer.add_summary(event)
        for name, value in results.items():
            writer.add_scalar(name, value, step)
        for phase, seconds in summary["goodput"].items():
            writer.add_scalar(f"goodput_seconds/{phase}", seconds, step)


def print_summary(summary: dict[str, Any]) -> None:
    """The last lines of every script: graphs, what should not have been, and where the seconds went."""
    print(f"graphs     {summary['train_graphs']} train, {summary['eval_graphs']} eval")
    if summary["skipped_steps"]:
        print(f"skipped    {summary['skipped_steps']} of {summary['steps']} updates, which were not finite")
    if summary["host_to_device_uploads_per_step"]:
        print(f"uploads    {summary['host_to_device_uploads_per_step']} a step beside the batch; expected 0")
    split = ", ".join(f"{name} {seconds:.1f}" for name, seconds in summary["goodput"].items())
    print(f"seconds    {summary['seconds']:.1f}: {split}")


def log_misread(config: TrainConfig, run_dir: Path, model: torch.nn.Module, dataset) -> None:
    """Write misread.npz, and the first of the test images that the final model misreads to TensorBoard.

    model: one on the host; its weights become those of the last checkpoint. dataset: data.ImageDataset.
    Float32 on the host: where the run had bfloat16 a borderline image may fall on the other side.
    """
    state = Checkpoints(run_dir / "checkpoints", keep=1).load_for_resume("must")
    model.load_state_dict(state["model"])
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
        step=np.array(state["step"]),
    )
    content = BytesIO()
    np.savez_compressed(content, **found)
    write_atomically(run_dir / MISREAD_FILE, content.getvalue())
    with _events(config, run_dir) as writer:
        if writer:
            writer.add_figure("misread", misread_figure(**found), state["step"])


def log_sample(config: TransformerConfig, run_dir: Path, build: Callable[[], torch.nn.Module]) -> None:
    """sample.txt and TensorBoard: bytes that the final model continues the start of a document with.

    Of models of bytes only, up to LARGEST_SAMPLED parameters. build: makes the model on the host, unsharded. Every byte
    is a forward pass over all before it, without cache and without graph: generate_tpu.py is the way to sample more.
    """
    shape = config.shape
    of_bytes = config.dataset != "synthetic" and shape.vocab_size == BYTE_VOCAB_SIZE
    if not of_bytes or shape.num_parameters > LARGEST_SAMPLED:
        return
    model, state = build(), Checkpoints(run_dir / "checkpoints", keep=1).load_for_resume("must")
    model.load_state_dict(state["model"])
    random = torch.Generator().manual_seed(config.seed)
    tokens = [BYTE_VOCAB_SIZE - 1]  # what stands before every document
    with torch.no_grad():
        while len(tokens) <= min(SAMPLE_BYTES, shape.sequence_length - 1):
            logits = model(torch.tensor([tokens]))[0, -1, : BYTE_VOCAB_SIZE - 1].float()
            tokens.append(int(torch.multinomial((logits / SAMPLE_TEMPERATURE).softmax(-1), 1, generator=random)))
    text = bytes(tokens[1:]).decode(errors="replace")
    write_atomically(run_dir / "sample.txt", text.encode())
    with _events(config, run_dir) as writer:
        if writer:
            # indented by four: Markdown shows it as it is
            writer.add_text("sample", "\n".join(f"    {line}" for line in text.splitlines()), state["step"])


def read_misread(run_dir: Path) -> dict[str, np.ndarray]:
    """What log_misread wrote. Raises InputError when the file is damaged."""
    path = run_dir / MISREAD_FILE
    try:
        with np.load(path, allow_pickle=False) as file:
            names = ("images", "labels", "predictions", "num_misread", "num_tested", "step")
            return {name: file[name] for name in names}
    except Exception as error:  # np.load raises what zipfile, zlib and its own header parser raise
        raise InputError(f"{path} cannot be read: {error}; delete it, the curves need it not") from error


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
