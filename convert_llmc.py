"""Read and write llm.c's GPT-2 weights and debug states.

Run:     python convert_llmc.py describe gpt2_124M.bin
         python convert_llmc.py check gpt2_124M.bin gpt2_124M_debug_state.bin
             compares loss, logits and gradients
         python convert_llmc.py export RUN_DIR model.bin [bf16] [best]
             writes the newest checkpoint of a run, or its best one
"""

import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from llmc_files import HEADER_WORDS, check_size, read_header, write_header
from model_shapes import LlamaShape, ModelShape
from tpu_utils.errors import InputError, run_script
from tpu_utils.inputs import open_regular


def parse(arguments: list[str]) -> list[str]:
    """COMMAND FILE ...; or the process ends here, with help or with one message."""
    if arguments in (["--help"], ["-h"]):
        print(__doc__)
        sys.exit(0)
    allowed = {"describe": (2,), "check": (3,), "export": (3, 4, 5)}
    ways = [[], ["bf16"], ["best"], ["bf16", "best"]]
    if not arguments or len(arguments) not in allowed.get(arguments[0], ()) or arguments[3:] not in ways:
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    for path in arguments[1 : 3 if arguments[0] == "check" else 2]:
        try:
            Path(path).stat()
        except OSError as error:
            problem = "no such file or folder" if isinstance(error, FileNotFoundError) else error.strerror
            print(f"error: {path}: {problem}; expected what --help says", file=sys.stderr)
            sys.exit(2)
    return arguments


if __name__ == "__main__":  # a wrong option or file is answered before the seconds that the next imports take
    arguments = parse(sys.argv[1:])
    os.environ.setdefault("PJRT_DEVICE", "CPU")  # all is computed on the host; left unset, torch_xla warns

import numpy as np
import torch

from gpt import GPT, parameter_shapes
from layers import split_layers, stack_layers
from operations import losses
from run_weights import read_run

MODEL_MAGIC, STATE_MAGIC, STATE_VERSION = 20240326, 20240327, 2
MODEL_VERSIONS = {3: torch.float32, 5: torch.bfloat16}


def number_of_values(shape: ModelShape) -> int:
    return sum(map(math.prod, parameter_shapes(shape).values()))


def read_tensors(file, shape: ModelShape, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """All parameters in model order. bfloat16 travels as raw 16-bit words, which numpy has no type for."""
    word = np.dtype("<f4") if dtype == torch.float32 else np.dtype("<i2")
    tensors = {}
    for name, size in parameter_shapes(shape).items():
        values = np.fromfile(file, word, math.prod(size))
        tensors[name] = torch.from_numpy(values).view(dtype).reshape(size)
    return tensors


def write_tensors(file, shape: ModelShape, tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    for name, size in parameter_shapes(shape).items():
        if tuple(tensors[name].shape) != size:
            raise InputError(f"{name}: shape {tuple(tensors[name].shape)}; expected {size} for {shape}")
        values = tensors[name].detach().cpu().to(dtype).contiguous()
        file.write((values if dtype == torch.float32 else values.view(torch.int16)).numpy().tobytes())


def read_model(path: Path) -> tuple[ModelShape, dict[str, torch.Tensor]]:
    """Weights in the file's own dtype. Raises InputError for a foreign, damaged or unsupported file."""
    with open_regular(path, "an llm.c GPT-2 model") as file:
        header = read_header(file, "an llm.c GPT-2 model")
        magic, version, T, V, L, H, D, padded = (int(word) for word in header[:8])
        if magic != MODEL_MAGIC or version not in MODEL_VERSIONS:
            raise InputError(
                f"{path}: magic {magic}, version {version}; expected {MODEL_MAGIC} with version 3 (float32) or 5 "
                "(bfloat16)"
            )
        if min(T, V, L, H, D) < 1 or D % H:
            raise InputError(f"{path}: damaged header: context {T}, vocabulary {V}, {L} layers, {H} heads, width {D}")
        shape = ModelShape(num_layers=L, num_heads=H, embedding_dim=D, sequence_length=T, vocab_size=V)
        if padded != shape.padded_vocab_size:
            raise InputError(
                f"{path}: vocabulary padded to {padded}; expected {shape.padded_vocab_size} for {V} tokens"
            )
        dtype = MODEL_VERSIONS[version]
        check_size(file, HEADER_WORDS * 4 + number_of_values(shape) * dtype.itemsize, f"{shape} in {dtype}")
        return shape, read_tensors(file, shape, dtype)


def write_model(path: Path, shape: ModelShape, tensors: dict[str, torch.Tensor], dtype=torch.float32) -> None:
    """Write weights llm.c can train from. bfloat16 rounds to nearest even."""
    version = next(number for number, known in MODEL_VERSIONS.items() if known == dtype)
    with path.open("wb") as file:
        write_header(
            file, MODEL_MAGIC, version, shape.sequence_length, shape.vocab_size, shape.num_layers, shape.num_heads,
            shape.embedding_dim, shape.padded_vocab_size,
        )  # fmt: skip
        write_tensors(file, shape, tensors, dtype)


@dataclass(frozen=True)
class DebugState:
    """What llm.c's train_gpt2.py computed for one batch: a yardstick for another implementation."""

    tokens: torch.Tensor  # int32 (B, T)
    targets: torch.Tensor  # int32 (B, T)
    logits: torch.Tensor  # float32 (B, T, vocab_size)
    loss: float  # nats per token
    gradients: dict[str, torch.Tensor]  # float32, model order, vocabulary padded


def read_debug_state(path: Path, shape: ModelShape) -> DebugState:
    """Raises InputError for a foreign or damaged file, or one made for a model of another shape."""
    with open_regular(path, "an llm.c debug state") as file:
        magic, version, B, T = (int(word) for word in read_header(file, "an llm.c debug state")[:4])
        if (magic, version) != (STATE_MAGIC, STATE_VERSION):
            raise InputError(f"{path}: magic {magic}, version {version}; expected {STATE_MAGIC}, {STATE_VERSION}")
        if B < 1 or not 1 <= T <= shape.sequence_length:
            raise InputError(f"{path}: {B} sequences of {T} tokens for a model with context {shape.sequence_length}")
        words = 2 * B * T + B * T * shape.vocab_size + 1 + number_of_values(shape)
        check_size(file, 4 * (HEADER_WORDS + words), f"{B} x {T} tokens for {shape}")
        both = np.fromfile(file, "<i4", 2 * B * T)
        if len(outside := both[(both < 0) | (both >= shape.vocab_size)]):
            raise InputError(
                f"{path}: token {outside[0]}, expected 0 to {shape.vocab_size - 1}; copy or write it again"
            )
        tokens, targets = torch.from_numpy(both.reshape(2, B, T))
        logits = torch.from_numpy(np.fromfile(file, "<f4", B * T * shape.vocab_size).reshape(B, T, -1))
        loss = np.fromfile(file, "<f4", 1).item()
        return DebugState(tokens, targets, logits, loss, read_tensors(file, shape, torch.float32))


def write_debug_state(path: Path, shape: ModelShape, state: DebugState) -> None:
    with path.open("wb") as file:
        write_header(file, STATE_MAGIC, STATE_VERSION, *state.tokens.shape)
        for part in (state.tokens, state.targets):
            file.write(part.numpy().astype("<i4").tobytes())
        file.write(state.logits.contiguous().numpy().astype("<f4").tobytes())
        file.write(np.array(state.loss, "<f4").tobytes())
        write_tensors(file, shape, state.gradients, torch.float32)


def compute_debug_state(shape: ModelShape, tensors: dict[str, torch.Tensor], tokens, targets) -> DebugState:
    """What this project's model says of a batch, in float32 on the host."""
    model = GPT(shape)
    model.load_state_dict(split_layers({name: tensor.float() for name, tensor in tensors.items()}))
    logits = model(tokens)
    loss = losses(model(tokens), targets, shape.vocab_size).sum() / targets.numel()
    loss.backward()
    gradients = stack_layers({name: parameter.grad for name, parameter in model.named_parameters()})
    return DebugState(tokens, targets, logits.detach()[..., : shape.vocab_size], loss.item(), gradients)


def differences(found: DebugState, expected: DebugState) -> dict[str, float]:
    """Largest relative difference of loss, logits and each gradient: max |a - b| / max |b|."""
    pairs = {"loss": (torch.tensor(found.loss), torch.tensor(expected.loss)), "logits": (found.logits, expected.logits)}
    pairs |= {f"gradient of {n}": (g, expected.gradients[n]) for n, g in found.gradients.items()}
    return {n: ((a - b).abs().max() / b.abs().max().clamp_min(1e-30)).item() for n, (a, b) in pairs.items()}


def export(run_dir: Path, path: Path, dtype: torch.dtype, checkpoint: str = "newest") -> None:
    """Write the newest or the best checkpoint of a run."""
    config, saved = read_run(run_dir, checkpoint)
    if isinstance(config.shape, LlamaShape):
        raise InputError(f"{run_dir} is of the Llama family; expected a GPT, which llm.c has; see convert_hf.py --help")
    write_model(path, config.shape, stack_layers(saved.part("model")), dtype)
    print(f"{path}: step {saved.step}, {config.shape}, {dtype}")


def check_state(shape: ModelShape, tensors: dict[str, torch.Tensor], expected: DebugState) -> int:
    """Print how far this project's model is from a debug state. 0 if they agree, 1 if not."""
    found = compute_debug_state(shape, tensors, expected.tokens, expected.targets)
    print(f"loss {found.loss:.6f}, expected {expected.loss:.6f}")
    worst = 0.0
    for name, difference in differences(found, expected).items():
        print(f"{difference:10.2e}  {name}")
        worst = math.inf if math.isnan(difference) else max(worst, difference)
    limit = 1e-2  # a state may come from hardware that multiplies in TF32
    print(f"{'agrees' if worst <= limit else 'DIFFERS'}: largest relative difference {worst:.2e}, limit {limit}")
    return 0 if worst <= limit else 1


def main(arguments: list[str]) -> int:
    command, path = arguments[0], Path(arguments[1])
    if command == "export":
        dtype = torch.bfloat16 if "bf16" in arguments[3:] else torch.float32
        export(path, Path(arguments[2]), dtype, "best" if "best" in arguments[3:] else "newest")
        return 0
    shape, tensors = read_model(path)
    print(f"{shape}, {number_of_values(shape):,} values of {next(iter(tensors.values())).dtype}")
    return check_state(shape, tensors, read_debug_state(Path(arguments[2]), shape)) if command == "check" else 0


if __name__ == "__main__":
    sys.exit(run_script(lambda: main(arguments), answers=True))
