"""llm.c's GPT-2 weights and debug states: read, written, compared with this project's model."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from language.data.llmc_files import HEADER_WORDS, check_size, header_of, read_header
from language.models.gpt import GPT, parameter_shapes
from language.models.layers import split_layers, stack_layers
from language.models.operations import losses
from language.options.shapes import ModelShape
from language.weights.weight_loading import check_finite
from tpu_utils.base.errors import InputError
from tpu_utils.base.files import open_regular
from tpu_utils.base.writing import write_atomically

MODEL_MAGIC = 20240326
STATE_MAGIC = 20240327
STATE_VERSION = 2
MODEL_VERSIONS = {3: torch.float32, 5: torch.bfloat16}


def number_of_values(shape: ModelShape) -> int:
    return sum(map(math.prod, parameter_shapes(shape).values()))


def read_tensors(file, shape: ModelShape, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """All parameters in model order. bfloat16 travels as raw 16-bit words, which numpy has no type for."""
    word = np.dtype("<f4") if dtype == torch.float32 else np.dtype("<i2")
    tensors = {}
    for name, size in parameter_shapes(shape).items():
        values = np.fromfile(file, word, math.prod(size))
        tensors[name] = check_finite(torch.from_numpy(values).view(dtype).reshape(size), f"{file.name}: {name}")
    return tensors


def bytes_of(shape: ModelShape, tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> Iterator[bytes]:
    for name, size in parameter_shapes(shape).items():
        assert tensors[name].shape == size, name
        values = tensors[name].detach().cpu().to(dtype).contiguous()
        yield (values if dtype == torch.float32 else values.view(torch.int16)).numpy().tobytes()


def read_model(path: Path) -> tuple[ModelShape, dict[str, torch.Tensor]]:
    """Weights in the file's own dtype. Raises InputError for a foreign, damaged or unsupported file."""
    with open_regular(path, "an llm.c GPT-2 model") as file:
        magic, version, T, V, L, H, D, padded = map(int, read_header(file, "an llm.c GPT-2 model")[:8])
        if magic != MODEL_MAGIC or version not in MODEL_VERSIONS:
            raise InputError(
                f"{path}: magic {magic}, version {version}; expected {MODEL_MAGIC}, version 3 (float32) or 5 (bfloat16)"
            )
        if min(T, V, L, H, D) < 1 or D % H:
            raise InputError(f"{path}: damaged header: context {T}, vocabulary {V}, {L} layers, {H} heads, width {D}")
        shape = ModelShape(num_layers=L, num_heads=H, embedding_dim=D, sequence_length=T, vocab_size=V)
        if padded != shape.padded_vocab_size:
            raise InputError(f"{path}: vocabulary padded to {padded}; expected {shape.padded_vocab_size} for {V}")
        dtype = MODEL_VERSIONS[version]
        check_size(file, HEADER_WORDS * 4 + number_of_values(shape) * dtype.itemsize, f"{shape} in {dtype}")
        return shape, read_tensors(file, shape, dtype)


def write_model(path: Path, shape: ModelShape, tensors: dict[str, torch.Tensor], dtype=torch.float32) -> None:
    """Write weights llm.c can train from. bfloat16 rounds to nearest even."""
    version = next(number for number, known in MODEL_VERSIONS.items() if known == dtype)
    sizes = (shape.sequence_length, shape.vocab_size, shape.num_layers, shape.num_heads, shape.embedding_dim)
    header = header_of(MODEL_MAGIC, version, *sizes, shape.padded_vocab_size)
    write_atomically(path, itertools.chain([header], bytes_of(shape, tensors, dtype)))


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
            raise InputError(f"{path}: token {outside[0]}, expected 0 to {shape.vocab_size - 1}; copy it again")
        tokens, targets = torch.from_numpy(both.reshape(2, B, T))
        logits = torch.from_numpy(np.fromfile(file, "<f4", B * T * shape.vocab_size).reshape(B, T, -1))
        loss = np.fromfile(file, "<f4", 1).item()
        return DebugState(tokens, targets, logits, loss, read_tensors(file, shape, torch.float32))


def compute_debug_state(shape: ModelShape, tensors: dict[str, torch.Tensor], tokens, targets) -> DebugState:
    """What this project's model says of a batch, in float32 on the host."""
    model = GPT(shape)
    model.load_state_dict(split_layers({name: tensor.float() for name, tensor in tensors.items()}))
    logits = model(tokens).logits
    loss = losses(logits, targets, shape.vocab_size).sum() / targets.numel()
    loss.backward()
    gradients = stack_layers({name: parameter.grad for name, parameter in model.named_parameters()})
    return DebugState(tokens, targets, logits.detach()[..., : shape.vocab_size], loss.item(), gradients)


def differences(found: DebugState, expected: DebugState) -> dict[str, float]:
    """Largest relative difference of loss, logits and each gradient: max |a - b| / max |b|."""
    pairs = {"loss": (torch.tensor(found.loss), torch.tensor(expected.loss)), "logits": (found.logits, expected.logits)}
    pairs |= {f"gradient of {n}": (g, expected.gradients[n]) for n, g in found.gradients.items()}
    return {n: ((a - b).abs().max() / b.abs().max().clamp_min(1e-30)).item() for n, (a, b) in pairs.items()}
