"""--dataset tokens: shards of tokens in llm.c's format and order, which tools.prepare_data writes. Imports no torch."""

import zlib
from pathlib import Path

import numpy as np

from language.data.entries import allow_open_files, check_apart, matching
from language.data.llmc_files import check_tokens, open_token_shard
from language.data.preparations import check_preparations
from language.data.sequence_data import ALONE, Host, SequenceData
from language.options.transformer_options import TransformerConfig
from tpu_utils.base.errors import InputError

SAMPLES = 4096
SAMPLED_TOKENS = 1 << 13
"""Tokens of a sample. For llm.c's GPT-2 tokens all samples are 64 MiB: a cold disk reads them in a second or so."""


def check(config: TransformerConfig) -> None:
    """Raises InputError for shards that load() refuses, and for a tokenizer with another vocabulary."""
    load(config)
    if config.tokenizer:
        from language.data.tokenizer import check_tokenizer, load_tokenizer  # only for a run that names one

        check_tokenizer(load_tokenizer(config.tokenizer), config.shape.vocab_size)
    if config.tokenizer or config.initial_weights:
        from language.data.tokenizer_files import check_one_tokenizer

        check_one_tokenizer(config)


def load(config: TransformerConfig, process_index: int = 0, process_count: int = 1) -> SequenceData:
    """The shards that train_data and validation_data match. Raises InputError."""
    train_path, validation_path = config.data_paths
    if not validation_path:
        raise InputError("dataset is tokens but validation_data is empty; name shards with --validation_data")
    T = config.shape.sequence_length
    vocab_size = config.shape.vocab_size
    rows = config.global_batch_size // process_count
    host = Host(process_index, process_count)
    train = TokenShards(str(train_path), vocab_size, T, rows, host)
    check_apart(train.paths, matching(validation_path))
    validation = TokenShards(str(validation_path), vocab_size, T, rows, host, padded=True)
    count = sum(map(len, train.shards))
    description = f"{len(train.shards)} shard{'s' * (len(train.shards) > 1)}, {count:,} tokens"
    batches = min(config.eval_batches, validation.batches_per_epoch)
    crc32 = validation.fingerprint() << 64 | train.fingerprint()
    return SequenceData(config, train, validation, batches, description, crc32)


class TokenShards:
    """llm.c's order: shards sorted by name, process r reads B*T+1 tokens at r*B*T and strides processes*B*T.

    What is left at the end of a shard after the last whole global batch is skipped, as there; after the last shard
    it starts over. `rows` is the batch of this process.
    """

    def __init__(self, pattern: str, vocab_size: int, T: int, rows: int, host: Host = ALONE, padded: bool = False):
        """padded: a shard shorter than a global batch is one, filled up with ~0; else it is refused."""
        paths = matching(Path(pattern))
        if not paths:
            raise InputError(f"{pattern}: matches no file; expected llm.c token shards; tools.prepare_data writes them")
        check_preparations(Path(pattern), paths)
        self.paths = paths
        self.vocab_size = vocab_size
        self.T = T
        self.rows = rows
        allow_open_files(len(paths), f"the shards that {pattern} matches")
        self.shards = [open_token_shard(path, vocab_size) for path in paths]  # open until the end, as they were
        check_tokens(self.shards[0][: 1 << 26], vocab_size, paths[0])  # further ones as they are read
        self.stride = host.count * rows * T
        self.offset = host.index * rows * T
        steps = [(len(shard) - 1) // self.stride or int(padded and len(shard) > 1) for shard in self.shards]
        if empty := [
            f"{path} ({len(s)} tokens)" for path, s, n in zip(paths, self.shards, steps, strict=True) if n == 0
        ]:
            raise InputError(
                f"shorter than one global batch of {self.stride} + 1 tokens: {', '.join(empty[:3])}; lower "
                "--global_batch_size, or leave these shards out"
            )
        self.ends = np.cumsum(steps)
        self.batches_per_epoch = int(self.ends[-1])

    def fingerprint(self) -> int:
        """The CRC-32 of the shards' names and lengths, and above it that of their tokens: of all of them up to
        SAMPLES * SAMPLED_TOKENS, of more in samples spread evenly over each shard."""
        names = " ".join(f"{path.name} {len(shard)}" for path, shard in zip(self.paths, self.shards, strict=True))
        content, count = 0, max(1, SAMPLES // len(self.shards))
        for shard in self.shards:
            if len(shard) <= count * SAMPLED_TOKENS:
                content = zlib.crc32(shard, content)
                continue
            for start in np.linspace(0, len(shard) - SAMPLED_TOKENS, count).astype(int):
                content = zlib.crc32(shard[start : start + SAMPLED_TOKENS], content)
        return content << 32 | zlib.crc32(names.encode())

    def batch(self, step: int) -> np.ndarray:
        step %= self.batches_per_epoch
        index = int(np.searchsorted(self.ends, step, "right"))
        within = step - (int(self.ends[index - 1]) if index else 0)
        start = within * self.stride + self.offset
        tokens = self.shards[index][start : start + self.rows * self.T + 1].astype(np.int32)
        check_tokens(tokens, self.vocab_size, self.paths[index])
        tokens = np.pad(tokens, (0, self.rows * self.T + 1 - len(tokens)), constant_values=-1)
        return tokens[np.arange(self.rows)[:, None] * self.T + np.arange(self.T + 1)]
