"""What an exported model keeps and costs: loss, size and tokens a second, in three kinds of weights.

Run:     python benchmarks/exported_models.py RUN_DIR TEXT_FILE
             a run of bytes; the last tenth of the file is what the loss is of
Prints:  a row for PyTorch on the CPU, and one for each kind of weights.
"""

import math
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch

from browser import export
from browser.onnx_cached import CachedModel
from browser.onnx_generate import OnnxModel
from tools.generate import GenerateConfig, open_source

WINDOWS, TOKENS = 40, 100


class Eager:
    """The same steps in PyTorch, eager."""

    def __init__(self, run_dir: str, context: int):
        self.model = CachedModel(export.load(open_source(GenerateConfig(run_dir=run_dir))))
        _, _, _, self.keys, self.values = export.example(self.model.model.shape, context, 1)
        self.position = 0

    def read(self, tokens: list[int]) -> np.ndarray:
        numbers = torch.tensor([self.position], dtype=torch.int32), torch.tensor([len(tokens)], dtype=torch.int32)
        logits, *new = self.model(torch.tensor([tokens], dtype=torch.int32), *numbers, self.keys, self.values)
        for rows, made in zip((self.keys, self.values), new, strict=True):
            rows[:, :, self.position : self.position + len(tokens)] = made
        self.position += len(tokens)
        return logits[0].numpy()


def loss_of(model, windows: np.ndarray) -> float:
    """Nats a byte: each window from its start, token by token."""
    total = 0.0
    for window in windows:
        model.position = 0
        for token, target in pairwise(window):
            logits = model.read([int(token)]).astype(np.float64)
            total += np.log(np.exp(logits - logits.max()).sum()) + logits.max() - logits[target]
    return total / (windows.shape[0] * (windows.shape[1] - 1))


def speed_of(model, context: int) -> float:
    """Tokens a second of decoding, the median of five passes."""
    seconds = []
    for _ in range(5):
        model.position, start = 0, time.perf_counter()
        for token in range(min(TOKENS, context)):
            model.read([token])
        seconds.append(time.perf_counter() - start)
    return min(TOKENS, context) / float(np.median(seconds))


def main(run_dir: str, text: str) -> int:
    context = open_source(GenerateConfig(run_dir=run_dir)).shape.sequence_length
    held_out = np.frombuffer(Path(text).read_bytes(), np.uint8)
    held_out = held_out[len(held_out) * 9 // 10 :]
    starts = np.linspace(0, len(held_out) - context - 1, WINDOWS).astype(int)
    windows = np.stack([np.concatenate([[256], held_out[at : at + context]]) for at in starts])
    print("| program | weights | MB | loss, nats a byte | perplexity | tokens/s |\n|---|---|---|---|---|---|")

    def row(program: str, weights: str, size: str, model) -> None:
        loss = loss_of(model, windows)
        print(
            f"| {program} | {weights} | {size} | {loss:.4f} | {math.exp(loss):.3f} | {speed_of(model, context):,.0f} |"
        )

    row("PyTorch, eager", "float32", "-", Eager(run_dir, context))
    for weights in export.WEIGHTS:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "out")
            export.main(export.parse([run_dir, str(out), f"--weights={weights}"]))
            size = sum(path.stat().st_size for path in out.iterdir()) / 1e6
            row("onnxruntime", weights, f"{size:.2f}", OnnxModel(out))
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    sys.exit(main(*sys.argv[1:]))
