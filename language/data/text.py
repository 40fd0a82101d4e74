"""--dataset text: files of UTF-8 text, trained on as bytes. Imports no torch."""

import codecs
import functools
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from language.data.entries import check_apart, entries_of, tell_once
from language.data.sequence_data import ALONE, Host, SequenceData
from language.options.shapes import BYTE_VOCAB_SIZE
from language.options.transformer_options import TransformerConfig
from tpu_utils.base.errors import InputError
from tpu_utils.base.files import open_regular

TEXT = "a UTF-8 text file or a folder of them"
END_OF_DOCUMENT_BYTE = BYTE_VOCAB_SIZE - 1  # the token after the 256 bytes; it stands before every document


def check(config: TransformerConfig) -> None:
    """Raises InputError for files that are missing, or named twice. Reads little of them."""
    paths = [path for path in config.data_paths if path]
    for path in paths:
        if not path.is_dir():
            open_regular(path, TEXT).close()
    check_apart(text_files(paths[0]), text_files(paths[-1]) if paths[1:] else [])


def load(config: TransformerConfig, process_index: int = 0, process_count: int = 1) -> SequenceData:
    """The text in train_data and validation_data; without the latter, the end of the former is for validation."""
    T, rows = config.shape.sequence_length, config.global_batch_size // process_count
    host = Host(process_index, process_count)
    train_path, validation_path = config.data_paths
    documents = read_documents(train_path, config.document_separator)
    if validation_path:
        training, validating = documents, read_documents(validation_path, config.document_separator)
        check_apart(text_files(train_path), text_files(validation_path))
    else:
        training, validating = split_documents(documents)
    train = TextWindows(training, T, rows, config.seed, True, config.bucketed, host)
    validation = TextWindows(validating, T, rows, shuffle=False, host=host)
    description = (
        f"{len(documents)} documents, {len(train.tokens):,} training and {len(validation.tokens):,} validation tokens: "
        "bytes, and the end of each document"
    )
    batches = min(config.eval_batches, validation.batches_per_epoch)
    crc32 = zlib.crc32(validation.tokens.tobytes()) << 32 | zlib.crc32(train.tokens.tobytes())
    return SequenceData(config, train, validation, batches, description, crc32)


def text_files(path: Path) -> list[Path]:
    """One UTF-8 file, or all files in a folder, as entries_of() has them."""
    return entries_of(path, (p for p in path.rglob("*") if not p.is_dir())) if path.is_dir() else [path]


def read_documents(path: Path, separator: str = "") -> list[bytes]:
    """Documents of one UTF-8 file, or of all files in a folder. Without a separator a file is one document. Raises
    InputError for a separator that divides nothing."""
    try:
        divider = separator.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"document_separator is {separator!r}; expected UTF-8 text") from error
    documents, divided = [], not divider
    for file in text_files(path):
        with open_regular(file, TEXT) as opened:
            content = opened.read().removeprefix(codecs.BOM_UTF8)
        try:
            content.decode("utf-8")
        except UnicodeDecodeError as error:
            at = error.start
            raise InputError(f"{file}: not UTF-8 (byte {content[at]:#x} at {at}); convert it first") from None
        if (at := content.find(0)) >= 0:
            raise InputError(
                f"{file}: a byte 0 at {at}, as UTF-16 has many; expected UTF-8 text; convert it first, such as by "
                "iconv --from-code UTF-16LE --to-code UTF-8"
            )
        if file.suffix in (".json", ".jsonl"):
            tell_once(f"as text    {path}: JSON with its quotes and brackets; --dataset stream reads the texts in it")
        if divider:
            check_line_ends(file, content, separator)
        divided = divided or divider in content
        documents += content.split(divider) if divider else [content]
    documents = [document for document in documents if document.strip()]
    if not documents:
        raise InputError(f"{path}: empty; expected UTF-8 text")
    if not divided:
        raise InputError(
            f"{path}: document_separator {separator!r:.60} stands nowhere in it; expected it between documents; give "
            "what stands there (of bash, a blank line is $'\\n\\n'), or leave it out: a file is one document"
        )
    return documents


def check_line_ends(file: Path, content: bytes, separator: str) -> None:
    """Raises InputError where the separator would stand in the file more often if its lines ended as elsewhere."""
    other = separator.replace("\n", "\r\n")
    if content.count(other.encode()) > content.count(separator.encode()):
        raise InputError(
            f"{file}: its lines end with \\r\\n, so document_separator stands there as {other!r}; expected \\n; "
            "convert it with dos2unix, or give that separator"
        )


def split_documents(documents: list[bytes], validation_fraction: float = 0.1) -> tuple[list[bytes], list[bytes]]:
    """The last part of the bytes is for validation, as in nanoGPT; one document may be split, before a character."""
    total = sum(map(len, documents))
    num_training = total - int(total * validation_fraction)
    training = []
    validation = []
    seen = 0
    for document in documents:
        here = min(max(num_training - seen, 0), len(document))
        while 0 < here < len(document) and document[here] & 0xC0 == 0x80:  # inside a character of UTF-8
            here -= 1
        training += [document[:here]] if here else []
        validation += [document[here:]] if here < len(document) else []
        seen += len(document)
    return training, validation


@dataclass(eq=False)
class EpochRows:
    """Rows sliced from one array of tokens, each once an epoch, in an order of its own. A batch is of one length; the
    last one of each length is short, and filled up."""

    tokens: np.ndarray
    starts: np.ndarray  # where each row begins
    counts: np.ndarray  # how many tokens of each row are not padding
    buckets: np.ndarray  # the length of each row, in targets
    rows: int  # rows of this process in a batch
    seed: int
    shuffle: bool
    host: Host
    padding: int = -1

    @functools.cached_property
    def lengths(self) -> list[int]:
        return sorted(set(self.buckets.tolist()))

    @functools.cached_property
    def batches_per_epoch(self) -> int:
        return len(self.plan(0))

    @functools.lru_cache(maxsize=2)  # noqa: B019 - two epochs, and the source lives as long as the run
    def plan(self, epoch: int) -> list[tuple[int, np.ndarray]]:
        """(sequence length, indices of rows) of every batch of an epoch; short last batches stay short."""
        random = np.random.default_rng((self.seed, epoch))
        batches = []
        size = self.rows * self.host.count
        for length in self.lengths:
            members = np.flatnonzero(self.buckets == length)
            if self.shuffle:
                random.shuffle(members)
            batches += [(length, members[i : i + size]) for i in range(0, len(members), size)]
        if self.shuffle and len(self.lengths) > 1:
            random.shuffle(batches)
        return batches

    def batch(self, step: int) -> np.ndarray:
        """(rows, T + 1) int32 of this process."""
        epoch, index = divmod(step, self.batches_per_epoch)
        length, members = self.plan(epoch)[index]
        members = members[self.host.part(self.rows)]
        out = np.full((self.rows, length + 1), self.padding, np.int32)
        reach = self.starts[members, None] + np.arange(length + 1)
        valid = np.arange(length + 1) < self.counts[members, None]
        tokens = self.tokens[np.minimum(reach, len(self.tokens) - 1)]
        out[: len(members)] = np.where(valid, tokens, self.padding)
        return out


class TextWindows(EpochRows):
    """Byte-level sequences; no sequence holds parts of two documents.

    Every document starts with the end-of-document token and becomes windows of T + 1 tokens that overlap by one, so
    each byte is a target exactly once an epoch. A short last window is padded with targets that do not count. With
    `bucketed` it is padded only to the next multiple of 128, and each batch comes from one bucket: at most T / 128
    graphs, which `lengths` names beforehand.
    """

    def __init__(
        self, documents: list[bytes], T: int, rows: int, seed=0, shuffle=True, bucketed=False, host: Host = ALONE
    ):
        end = np.array([END_OF_DOCUMENT_BYTE], np.int32)
        parts = [part for document in documents for part in (end, np.frombuffer(document, np.uint8))]
        self.tokens = np.concatenate(parts)
        if (count := len(self.tokens)) < T + 1:
            raise InputError(f"{count} tokens of text, shorter than one sequence of {T} + 1; shorten --sequence_length")
        self.rows, self.seed, self.shuffle, self.host = rows, seed, shuffle, host
        lengths = np.array([1 + len(document) for document in documents])
        ends = np.cumsum(lengths)
        self.starts = np.concatenate([np.arange(e - n, e - 1, T) for e, n in zip(ends, lengths, strict=True)])
        last = np.repeat(ends, -(-(lengths - 1) // T))
        self.counts = np.minimum(self.starts + T + 1, last) - self.starts
        targets = self.counts - 1
        self.buckets = np.minimum(-(-targets // 128) * 128, T) if bucketed else np.full_like(targets, T)
