"""Host-side data: labelled images, token shards and text, and the batches cut from them. Nothing here knows about TPUs.

Batches are a pure function of (seed, step): to resume at step s, start at step s. Images go to the device as uint8, a
quarter of the bytes of float32, and are scaled there.
"""

import functools
import math
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError

import numpy as np
import torch
from torch.utils.data import DistributedSampler

from config import BYTE_VOCAB_SIZE, InputError, MnistConfig, TransformerConfig


@dataclass(frozen=True)
class ImageDataset:
    """Images (N, H, W) uint8 and labels (N,) uint8, in memory."""

    name: str
    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray
    num_classes: int = 10
    best_accuracy: float | None = None
    """Best possible expected test accuracy, in closed form; None where nobody knows it."""
    loss_floor: float | None = None
    """Best possible expected cross-entropy in nats, in closed form; None where nobody knows it."""

    @property
    def image_size(self) -> int:
        return self.train_images.shape[-1]

    def fingerprint(self) -> int:
        """CRC-32 of the training set: a run is resumed on the data it began with."""
        return zlib.crc32(self.train_labels.tobytes(), zlib.crc32(self.train_images.tobytes()))


def load_dataset(config: MnistConfig) -> ImageDataset:
    """The data set the config names. Raises InputError when its files are missing or damaged."""
    if config.dataset == "digits":
        return load_digits()
    if config.dataset == "mnist":
        return load_mnist(Path(config.data_dir), config.download)
    return make_synthetic()


def load_digits() -> ImageDataset:
    """scikit-learn's 1,797 handwritten digits, 8 x 8; every class gives a fifth of its images to the test set.

    Source: UCI "Optical Recognition of Handwritten Digits" test set, as shipped inside scikit-learn.
    """
    from sklearn.datasets import load_digits as sklearn_digits
    from sklearn.model_selection import train_test_split

    images, labels = sklearn_digits(return_X_y=True)
    images = np.round(images.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)  # stored as 0..16
    # the split is part of the data set: it never follows config.seed
    split = train_test_split(images, labels.astype(np.uint8), test_size=0.2, stratify=labels, random_state=0)
    train_images, test_images, train_labels, test_labels = split
    return ImageDataset("digits", train_images, train_labels, test_images, test_labels)


def load_mnist(data_dir: Path, download: bool) -> ImageDataset:
    """MNIST IDX files in torchvision's layout, data_dir/MNIST/raw; any number of images."""
    from torchvision.datasets import MNIST

    if download:
        try:
            MNIST(str(data_dir), train=True, download=True)
        except (RuntimeError, URLError, OSError) as error:
            raise InputError(
                f"MNIST could not be downloaded into {data_dir}: {error}; check the network, or copy the files there"
            ) from error
    raw = data_dir / "MNIST" / "raw"
    arrays = []
    for part in ("train", "t10k"):
        images = read_idx(raw / f"{part}-images-idx3-ubyte", num_dims=3)
        labels = read_idx(raw / f"{part}-labels-idx1-ubyte", num_dims=1)
        if len(images) != len(labels):
            raise InputError(
                f"{raw}/{part}-*: found {len(images)} images but {len(labels)} labels; expected as many; fetch both"
            )
        if images.shape[1] != images.shape[2] or images.shape[1] % 4:
            raise InputError(
                f"{raw}/{part}-images: images are {images.shape[1:]}; expected a square, side divisible by 4"
            )
        if labels.max() > 9:
            where = int(np.argmax(labels > 9))
            raise InputError(
                f"{raw}/{part}-labels: label {where} is {labels[where]}; expected 0 to 9; fetch the file again"
            )
        arrays += [images, labels]
    return ImageDataset("mnist", *arrays)


def read_idx(path: Path, num_dims: int) -> np.ndarray:
    """An IDX file of unsigned bytes, checked before it is believed: magic, sizes, length.

    Format: http://yann.lecun.com/exdb/mnist. Raises InputError: found, expected, what to do.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise InputError(
            f"{path} is missing; expected MNIST in torchvision's layout under --data_dir; add --download to fetch it"
        ) from error
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    header = 4 + 4 * num_dims
    if len(content) < header:
        raise InputError(
            f"{path} has {len(content)} bytes; expected a header of {header}; the file is cut short, fetch it again"
        )
    magic, *shape = struct.unpack(f">{1 + num_dims}I", content[:header])
    expected_magic = 0x0800 + num_dims  # 08: unsigned bytes
    if magic != expected_magic:
        raise InputError(
            f"{path} begins with magic {magic:#010x}; expected {expected_magic:#010x}; it is not this kind of IDX file "
            "(a .gz must be unpacked first)"
        )
    if len(content) != header + math.prod(shape) or not math.prod(shape):
        raise InputError(
            f"{path} has {len(content)} bytes; its header {tuple(shape)} needs {header + math.prod(shape)}; fetch it"
        )
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def make_synthetic(num_train: int = 4096, num_test: int = 2048, size: int = 8, flip: float = 0.1) -> ImageDataset:
    """Images whose class can be read without error, and labels of which a known share lies.

    Each class has a fixed pattern of dark (below 112) and bright (from 144) pixels; two patterns differ in half of the
    pixels and the noise never crosses the gap, so the class is certain. With probability `flip` the label is drawn anew
    from all ten classes. The best any model can do, in expectation: accuracy 1 - 0.9 flip; loss the entropy of
    (1 - 0.9 flip, 9 times flip / 10).
    """
    rng = np.random.default_rng(20_240_101)  # the data set is fixed: it never follows config.seed
    # rows 1 to 10 of a Walsh-Hadamard matrix: any two differ in exactly half of the pixels
    patterns = np.array([[(pixel & row).bit_count() % 2 for pixel in range(size * size)] for row in range(1, 11)])
    count = num_train + num_test
    classes = rng.integers(0, 10, count)
    dark, bright = rng.integers(0, 112, (count, size * size)), rng.integers(144, 256, (count, size * size))
    images = np.where(patterns[classes], bright, dark).astype(np.uint8).reshape(count, size, size)
    labels = np.where(rng.random(count) < flip, rng.integers(0, 10, count), classes).astype(np.uint8)
    right, wrong = 1 - 0.9 * flip, flip / 10
    entropy = -right * math.log(right) - (9 * wrong * math.log(wrong) if wrong else 0.0)
    parts = images[:num_train], labels[:num_train], images[num_train:], labels[num_train:]
    return ImageDataset("synthetic", *parts, best_accuracy=right, loss_floor=entropy)


def epoch_order(num_examples: int, seed: int, epoch: int) -> np.ndarray:
    """The permutation of the training set that an epoch follows: (num_examples,) indices."""
    return np.random.default_rng([seed, epoch]).permutation(num_examples)


def random_shift(
    images: np.ndarray, max_shift: int, rng: np.random.Generator, replica: int = 0, num_replicas: int = 1
) -> np.ndarray:
    """Each image (B, H, W) moved by its own offset of up to max_shift pixels in y and x, zeros drawn in.

    Offsets are drawn for the whole global batch: an example moves alike whichever replica has it.
    """
    padded = np.pad(images, ((0, 0), (max_shift, max_shift), (max_shift, max_shift)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, images.shape[1:], axis=(1, 2))
    offsets = rng.integers(0, 2 * max_shift + 1, (2, len(images) * num_replicas))[:, replica::num_replicas]
    return windows[np.arange(len(images)), offsets[0], offsets[1]]


class ReplicaSampler(DistributedSampler):
    """torch's DistributedSampler, shuffled by epoch_order: the ids that one of num_replicas replicas or hosts reads.

    Replica r reads every num_replicas-th example from the r-th on, so the same positions of all replicas together are
    one stretch of epoch_order: a global batch holds the same examples whatever num_replicas is.
    """

    def __init__(self, num_examples: int, seed: int, replica: int, num_replicas: int):
        super().__init__(range(num_examples), num_replicas, replica, shuffle=True, seed=seed, drop_last=True)

    def __iter__(self) -> Iterator[int]:
        order = epoch_order(len(self.dataset), self.seed, self.epoch)[: self.total_size]
        return iter(order[self.rank :: self.num_replicas].tolist())


class TrainBatches:
    """Batches of steps first_step to num_steps: images (B, H, W) uint8, labels (B,) int32.

    Every epoch follows a fresh permutation and leaves its short end out, so that all batches have one shape. Of many
    replicas or hosts each gets its part: B is global_batch_size / num_replicas, which must be whole.
    """

    def __init__(
        self,
        dataset: ImageDataset,
        config: MnistConfig,
        first_step: int,
        num_steps: int,
        replica: int = 0,
        num_replicas: int = 1,
    ):
        assert config.global_batch_size % num_replicas == 0, (config.global_batch_size, num_replicas)
        self.dataset, self.config, self.first_step, self.num_steps = dataset, config, first_step, num_steps
        self.sampler = ReplicaSampler(len(dataset.train_images), config.seed, replica, num_replicas)

    def __len__(self) -> int:
        return self.num_steps - self.first_step

    def ids(self) -> Iterator[np.ndarray]:
        """The training examples of each batch, in order: (B,) indices."""
        size = self.config.global_batch_size // self.sampler.num_replicas
        steps_per_epoch = len(self.dataset.train_images) // self.config.global_batch_size
        current_epoch, order = -1, None
        for step in range(self.first_step, self.num_steps):
            epoch, batch = divmod(step, steps_per_epoch)
            if epoch != current_epoch:
                current_epoch = epoch
                self.sampler.set_epoch(epoch)  # without it every epoch would come in the same order
                order = np.array(list(self.sampler))
            yield order[batch * size : (batch + 1) * size]

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        seed, max_shift, sampler = self.config.seed, self.config.max_shift, self.sampler
        images, labels = self.dataset.train_images, self.dataset.train_labels
        for step, ids in enumerate(self.ids(), self.first_step):
            chosen = images[ids]
            if max_shift:
                rng = np.random.default_rng([seed, step, 1])
                chosen = random_shift(chosen, max_shift, rng, sampler.rank, sampler.num_replicas)
            yield torch.from_numpy(chosen), torch.from_numpy(labels[ids].astype(np.int32))


def eval_batches(images: np.ndarray, labels: np.ndarray, size: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """Every example once, in batches of one static size: images, labels (size,) int32, mask (size,) float32.

    The last batch is filled up with zeros that the mask leaves out.
    """
    for start in range(0, len(images), size):
        count = len(images[start : start + size])
        batch = np.zeros((size, *images.shape[1:]), np.uint8)
        target, mask = np.zeros(size, np.int32), np.zeros(size, np.float32)
        batch[:count], target[:count], mask[:count] = images[start : start + count], labels[start : start + count], 1
        yield torch.from_numpy(batch), torch.from_numpy(target), torch.from_numpy(mask)


# ---------------------------------------------------------------------------------------------- tokens and text
#
# Every source answers batch(step) with int32 (rows, T + 1): tokens and, shifted by one, their targets. A token that is
# read but is no target stands as ~token (negative); padding is ~0. So one array goes up to the device, whatever counts.
# A batch depends on nothing but the step, so resuming a run needs no position beside the step.

HEADER_WORDS = 256  # int32; every llm.c file starts with 1,024 bytes of header
END_OF_DOCUMENT_BYTE = BYTE_VOCAB_SIZE - 1  # the token after the 256 bytes; stands before every document
# magic number -> version, token type, vocabulary, name (llm.c, dev/data/data_common.py)
TOKEN_FORMATS = {20240520: (1, np.uint16, 50257, "GPT-2"), 20240801: (7, np.uint32, 128256, "Llama-3")}
HELLASWAG_MAGIC, HELLASWAG_VERSION, START_OF_EXAMPLE = 20240522, 1, 65535


def read_header(path: Path, kind: str) -> np.ndarray:
    """The 256 int32 in front of every llm.c file. Raises InputError when the file is missing or shorter than that."""
    if not path.is_file():
        raise InputError(f"{path}: no such file; expected {kind}")
    header = np.fromfile(path, "<i4", HEADER_WORDS)
    if len(header) < HEADER_WORDS:
        raise InputError(
            f"{path}: {path.stat().st_size} bytes; {kind} starts with a header of {HEADER_WORDS * 4} bytes; copy or "
            "write it again"
        )
    return header


def write_header(file, *words: int) -> None:
    header = np.zeros(HEADER_WORDS, "<i4")
    header[: len(words)] = words
    file.write(header.tobytes())


def check_size(path: Path, expected: int, what: str) -> None:
    """Raises InputError unless the file is exactly as long as its header says."""
    found = path.stat().st_size
    if found != expected:
        problem = "cut short" if found < expected else "longer than its header says"
        raise InputError(f"{path}: {problem}: {found} bytes, expected {expected} ({what}); copy or write it again")


def open_token_shard(path: Path, vocab_size: int) -> np.ndarray:
    """Memory-mapped tokens of one llm.c shard, uint16 or uint32, checked: magic, version, size, vocabulary."""
    header = read_header(path, "a token shard")
    magic, version, count = (int(word) for word in header[:3])
    if magic not in TOKEN_FORMATS:
        known = ", ".join(f"{m} ({name})" for m, (*_, name) in TOKEN_FORMATS.items())
        raise InputError(f"{path}: magic number {magic} is not a token shard's; expected {known}; see prepare_data.py")
    known_version, dtype, full_vocab, name = TOKEN_FORMATS[magic]
    if version != known_version:
        raise InputError(f"{path}: {name} tokens of version {version}; expected {known_version}; write the shard again")
    check_size(path, HEADER_WORDS * 4 + count * np.dtype(dtype).itemsize, f"{count} {name} tokens")
    if name == "Llama-3" and vocab_size < full_vocab:
        raise InputError(
            f"{path}: {name} tokens (vocabulary {full_vocab}) for a model with vocab_size {vocab_size}; "
            f"use GPT-2 tokens or --vocab_size {full_vocab}"
        )
    if count == 0:
        raise InputError(f"{path}: no tokens; expected at least one sequence")
    return np.memmap(path, dtype, "r", HEADER_WORDS * 4, (count,))


def write_token_shard(path: Path, tokens: np.ndarray) -> None:
    """Write one GPT-2 shard (uint16). Raises InputError for tokens that do not fit."""
    if len(tokens) and (tokens.min() < 0 or tokens.max() > 65535):
        raise InputError(f"token {tokens.max()} does not fit the 16 bits of a GPT-2 shard")
    with path.open("wb") as file:
        write_header(file, 20240520, 1, len(tokens))
        file.write(np.asarray(tokens, "<u2").tobytes())


def check_tokens(tokens: np.ndarray, vocab_size: int, where: object) -> None:
    if (largest := int(tokens.max())) >= vocab_size:
        raise InputError(
            f"{where}: token {largest}, but vocab_size is {vocab_size}; use the matching tokenizer or vocabulary"
        )


class TokenShards:
    """llm.c's order: shards sorted by name, process r reads B*T+1 tokens at r*B*T and strides processes*B*T.

    What is left at the end of a shard after the last whole global batch is skipped, as there; after the last shard
    it starts over. `rows` is the batch of this process.
    """

    def __init__(
        self, pattern: str, vocab_size: int, T: int, rows: int, process_index: int = 0, process_count: int = 1
    ):
        paths = [Path(pattern)] if Path(pattern).is_file() else sorted(Path(pattern).parent.glob(Path(pattern).name))
        if not paths:
            raise InputError(f"{pattern}: matches no file; expected llm.c token shards; prepare_data.py writes them")
        self.paths, self.vocab_size, self.T, self.rows = paths, vocab_size, T, rows
        self.shards = [open_token_shard(path, vocab_size) for path in paths]
        check_tokens(self.shards[0][: 1 << 26], vocab_size, paths[0])  # further ones as they are read
        self.stride = process_count * rows * T
        self.offset = process_index * rows * T
        steps = [(len(shard) - 1) // self.stride for shard in self.shards]
        if empty := [
            f"{path} ({len(s)} tokens)" for path, s, n in zip(paths, self.shards, steps, strict=True) if n == 0
        ]:
            raise InputError(
                f"shorter than one global batch of {self.stride} + 1 tokens: {', '.join(empty[:3])}; lower "
                "--global_batch_size, or leave these shards out"
            )
        self.ends = np.cumsum(steps)
        self.batches_per_epoch = int(self.ends[-1])

    def batch(self, step: int) -> np.ndarray:
        step %= self.batches_per_epoch
        index = int(np.searchsorted(self.ends, step, "right"))
        within = step - (int(self.ends[index - 1]) if index else 0)
        start = within * self.stride + self.offset
        tokens = self.shards[index][start : start + self.rows * self.T + 1]
        check_tokens(tokens, self.vocab_size, self.paths[index])
        windows = np.lib.stride_tricks.as_strided(
            tokens, (self.rows, self.T + 1), (self.T * tokens.itemsize, tokens.itemsize), writeable=False
        )
        return windows.astype(np.int32)


def read_documents(path: Path, separator: str = "") -> list[bytes]:
    """Documents of one UTF-8 file, or of all files in a folder. Without a separator a file is one document."""
    paths = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    documents = []
    for file in paths:
        if not file.is_file():
            raise InputError(f"{file}: no such file; expected a UTF-8 text file or a folder of them")
        content = file.read_bytes()
        try:
            content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise InputError(
                f"{file}: not UTF-8 (byte {content[error.start]:#x} at {error.start}); convert it first"
            ) from None
        documents += content.split(separator.encode()) if separator else [content]
    documents = [document for document in documents if document.strip()]
    if not documents:
        raise InputError(f"{path}: empty; expected UTF-8 text")
    return documents


def split_documents(documents: list[bytes], validation_fraction: float = 0.1) -> tuple[list[bytes], list[bytes]]:
    """The last part of the bytes is for validation, as in nanoGPT; the document under the cut is divided."""
    total = sum(map(len, documents))
    cut = total - int(total * validation_fraction)
    training, validation, seen = [], [], 0
    for document in documents:
        here = min(max(cut - seen, 0), len(document))
        training += [document[:here]] if here else []
        validation += [document[here:]] if here < len(document) else []
        seen += len(document)
    return training, validation


class TextWindows:
    """Byte-level sequences; no sequence holds parts of two documents.

    Every document starts with the end-of-document token and is cut into windows of T + 1 tokens that overlap by one,
    so each byte is a target exactly once an epoch. A short last window is padded with targets that do not count; with
    `bucketed`, only to the next multiple of 128, and each batch comes from one bucket: at most T / 128 graphs, which
    `lengths` names beforehand.
    """

    def __init__(
        self, documents: list[bytes], T: int, rows: int, seed: int = 0, shuffle: bool = True, bucketed: bool = False,
        process_index: int = 0, process_count: int = 1,
    ):  # fmt: skip
        self.tokens = np.concatenate([
            np.concatenate([np.array([END_OF_DOCUMENT_BYTE], np.int32), np.frombuffer(document, np.uint8)])
            for document in documents
        ])  # fmt: skip
        if len(self.tokens) < T + 1:
            raise InputError(
                f"{len(self.tokens)} tokens of text, shorter than one sequence of {T} + 1; shorten --sequence_length"
            )
        self.rows, self.seed, self.shuffle = rows, seed, shuffle
        self.process_index, self.process_count = process_index, process_count
        lengths = np.array([1 + len(document) for document in documents])
        ends = np.cumsum(lengths)
        self.starts = np.concatenate([np.arange(e - n, e - 1, T) for e, n in zip(ends, lengths, strict=True)])
        last = np.repeat(ends, -(-(lengths - 1) // T))
        self.counts = np.minimum(self.starts + T, last - 1) - self.starts  # targets in each window
        self.buckets = -(-self.counts // 128) * 128 if bucketed else np.full_like(self.counts, T)
        self.buckets = np.minimum(self.buckets, T)
        self.lengths = sorted(set(self.buckets.tolist()))
        self.batches_per_epoch = sum(-(-int((self.buckets == n).sum()) // self.global_rows) for n in self.lengths)

    @property
    def global_rows(self) -> int:
        return self.rows * self.process_count

    @functools.lru_cache(maxsize=2)  # noqa: B019 - two epochs, and the source lives as long as the run
    def plan(self, epoch: int) -> list[tuple[int, np.ndarray]]:
        """(sequence length, indices of windows) of every batch of an epoch; short last batches stay short."""
        random = np.random.default_rng((self.seed, epoch))
        batches = []
        for length in self.lengths:
            members = np.flatnonzero(self.buckets == length)
            if self.shuffle:
                random.shuffle(members)
            batches += [(length, members[i : i + self.global_rows]) for i in range(0, len(members), self.global_rows)]
        if self.shuffle and len(self.lengths) > 1:
            random.shuffle(batches)
        return batches

    def batch(self, step: int) -> np.ndarray:
        epoch, index = divmod(step, self.batches_per_epoch)
        length, members = self.plan(epoch)[index]
        members = members[self.process_index * self.rows : (self.process_index + 1) * self.rows]
        out = np.full((self.rows, length + 1), -1, np.int32)
        reach = self.starts[members, None] + np.arange(length + 1)
        valid = np.arange(length + 1) <= self.counts[members, None]
        out[: len(members)] = np.where(valid, self.tokens[np.minimum(reach, len(self.tokens) - 1)], -1)
        return out


class MarkovChain:
    """Sequences from a Markov chain whose entropy rate is known in closed form.

    Every token has 4 possible successors, its own random ones, with probabilities 1/2, 1/4, 1/8, 1/8. Each row of the
    transition matrix is the same distribution over other tokens, so whatever the stationary distribution is, the
    entropy rate is 1.75 bits = 1.2130 nats, and no model can have a lower expected loss.
    """

    probabilities = np.array([0.5, 0.25, 0.125, 0.125])
    entropy = float(-(probabilities * np.log(probabilities)).sum())  # nats per token

    def __init__(
        self,
        vocab_size: int,
        T: int,
        rows: int,
        seed: int = 0,
        stream: int = 0,
        process_index: int = 0,
        process_count: int = 1,
    ):
        if vocab_size < 4:
            raise InputError(f"vocab_size {vocab_size}: the Markov chain needs at least 4 tokens")
        table = np.random.default_rng((seed, 1))
        self.successors = np.stack([table.choice(vocab_size, 4, replace=False) for _ in range(vocab_size)]).astype(
            np.int32
        )
        self.vocab_size, self.T, self.rows, self.seed, self.stream = vocab_size, T, rows, seed, stream
        self.process_index, self.process_count = process_index, process_count

    def batch(self, step: int) -> np.ndarray:
        random = np.random.default_rng((self.seed, 2 + self.stream, step))
        rows = self.rows * self.process_count  # every process draws the global batch and keeps its part
        choice = np.array([0, 0, 0, 0, 1, 1, 2, 3])[random.integers(0, 8, (self.T, rows), np.uint8)]  # eighths
        out = np.empty((self.T + 1, rows), np.int32)
        out[0] = random.integers(0, self.vocab_size, rows)
        for t in range(self.T):
            out[t + 1] = self.successors[out[t], choice[t]]
        return np.ascontiguousarray(out.T[self.process_index * self.rows : (self.process_index + 1) * self.rows])


@dataclass(frozen=True)
class MultipleChoice:
    """One HellaSwag question: a context and four endings, as tokens; `label` is the right one."""

    index: int
    label: int
    context: np.ndarray
    endings: list[np.ndarray]

    def rows(self, T: int) -> np.ndarray:
        """int32 (4, T + 1): context (no target) and ending (targets). Raises InputError when that is too long."""
        out = np.full((4, T + 1), -1, np.int32)
        for row, ending in zip(out, self.endings, strict=True):
            if len(self.context) + len(ending) > T + 1:
                raise InputError(
                    f"HellaSwag example {self.index}: {len(self.context) + len(ending)} tokens, longer than {T}"
                )
            row[: len(self.context)] = ~self.context
            row[len(self.context) : len(self.context) + len(ending)] = ending
        return out


def read_hellaswag(path: Path, vocab_size: int) -> list[MultipleChoice]:
    """Questions of an llm.c HellaSwag file. Raises InputError for a foreign, truncated or damaged file."""
    header = read_header(path, "a HellaSwag file")
    if tuple(header[:2]) != (HELLASWAG_MAGIC, HELLASWAG_VERSION):
        raise InputError(
            f"{path}: magic {header[0]}, version {header[1]}; expected {HELLASWAG_MAGIC}, {HELLASWAG_VERSION}"
        )
    stream = np.fromfile(path, "<u2", offset=HEADER_WORDS * 4).astype(np.int64)
    questions, at = [], 0
    for number in range(int(header[2])):
        if at + 6 > len(stream) or stream[at] != START_OF_EXAMPLE or at + stream[at + 1] // 2 > len(stream):
            raise InputError(f"{path}: example {number} of {header[2]} is cut short or damaged; copy the file again")
        end = at + int(stream[at + 1]) // 2
        index, label, endings = (int(x) for x in stream[at + 2 : at + 5])
        parts, at = [], at + 5
        for _ in range(1 + endings):
            parts.append(stream[at + 1 : at + 1 + int(stream[at])].astype(np.int32))
            at += 1 + len(parts[-1])
        if at != end or endings != 4 or label > 3 or not all(map(len, parts)):
            raise InputError(f"{path}: example {number} of {header[2]} is damaged; copy the file again")
        check_tokens(np.concatenate(parts), vocab_size, f"{path}, example {number}")
        questions.append(MultipleChoice(index, label, parts[0], parts[1:]))
    if not questions or at != len(stream):
        raise InputError(
            f"{path}: {len(questions)} examples, then {len(stream) - at} unread words; copy the file again"
        )
    return questions


def write_hellaswag(path: Path, questions: list[MultipleChoice]) -> None:
    streams = []
    for question in questions:
        parts = [np.r_[len(part), part] for part in (question.context, *question.endings)]
        body = np.concatenate([[question.index, question.label, len(question.endings)], *parts])
        streams.append(np.concatenate([[START_OF_EXAMPLE, 2 * (len(body) + 2)], body]).astype("<u2"))
    with path.open("wb") as file:
        write_header(file, HELLASWAG_MAGIC, HELLASWAG_VERSION, len(streams), max(2 * len(s) for s in streams))
        file.write(np.concatenate(streams).tobytes())


@dataclass(frozen=True)
class SequenceData:
    """What a language model trains and is validated on. Both sources answer batch(step) for this host."""

    train: TokenShards | TextWindows | MarkovChain
    validation: TokenShards | TextWindows | MarkovChain
    validation_batches: int
    description: str
    fingerprint: int
    """CRC-32 of what names the data: a run is resumed on the data it began with."""
    loss_floor: float | None = None
    """Lowest possible expected loss in nats, in closed form; None where nobody knows it."""


def load_sequences(config: TransformerConfig, process_index: int = 0, process_count: int = 1) -> SequenceData:
    """The data the config names, checked. Raises InputError: found, expected, what to do."""
    T, vocab_size = config.shape.sequence_length, config.shape.vocab_size
    rows = config.global_batch_size // process_count
    eval_rows = rows // config.gradient_accumulation_steps  # no more at a time than in training
    part = dict(process_index=process_index, process_count=process_count)
    if config.dataset == "synthetic":
        train = MarkovChain(vocab_size, T, rows, config.seed, 0, **part)
        validation = MarkovChain(vocab_size, T, eval_rows, config.seed, 1, **part)
        description = f"Markov chain over {vocab_size} tokens"
        return SequenceData(train, validation, config.eval_batches, description, vocab_size, MarkovChain.entropy)
    if not config.train_data:
        raise InputError(f"dataset is {config.dataset} but train_data is empty; name the data with --train_data")
    train_path, validation_path = (Path(config.data_dir) / name for name in (config.train_data, config.validation_data))
    if config.dataset == "tokens":
        if not config.validation_data:
            raise InputError("dataset is tokens but validation_data is empty; name shards with --validation_data")
        train = TokenShards(str(train_path), vocab_size, T, rows, **part)
        validation = TokenShards(str(validation_path), vocab_size, T, eval_rows, **part)
        names = [f"{path.name} {len(shard)}" for path, shard in zip(train.paths, train.shards, strict=True)]
        fingerprint = zlib.crc32(" ".join(names).encode())
        description = f"{len(train.shards)} shards, {sum(map(len, train.shards)):,} tokens"
        batches = min(config.eval_batches, validation.batches_per_epoch)
        return SequenceData(train, validation, batches, description, fingerprint)
    documents = read_documents(train_path, config.document_separator)
    if config.validation_data:
        training, validating = documents, read_documents(validation_path, config.document_separator)
    else:
        training, validating = split_documents(documents)
    train = TextWindows(training, T, rows, config.seed, True, config.bucketed, **part)
    validation = TextWindows(validating, T, eval_rows, shuffle=False, **part)
    description = (
        f"{len(documents)} documents, {len(train.tokens):,} training and {len(validation.tokens):,} validation bytes"
    )
    batches = min(config.eval_batches, validation.batches_per_epoch)
    return SequenceData(train, validation, batches, description, zlib.crc32(train.tokens.tobytes()))


def gpt2_encoding():
    """tiktoken's GPT-2 tokenizer. Raises InputError where the package or its vocabulary cannot be had."""
    try:
        import tiktoken

        return tiktoken.get_encoding("gpt2")
    except ImportError as error:
        raise InputError("the GPT-2 tokenizer needs tiktoken; pip install tiktoken, or use bytes") from error
    except OSError as error:  # requests' errors are OSErrors
        raise InputError(
            f"tiktoken could not download the GPT-2 vocabulary ({type(error).__name__}); fetch it on a machine with "
            "internet and set TIKTOKEN_CACHE_DIR to that folder, or use bytes"
        ) from error
