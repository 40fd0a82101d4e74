"""The data that the options of transformer_tpu.py name, checked. Imports no torch."""

import dataclasses
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from language.data.chat_data import check_chats, check_tokenizer, load_chats, tokenizer_of
from language.data.streams import check_stream, load_stream
from language.data.token_data import (
    TEXT,
    MarkovChain,
    MicroBatches,
    SequenceData,
    TextWindows,
    TokenShards,
    check_apart,
    matching,
    read_documents,
    split_documents,
    text_files,
)
from language.data.tokenizer import load_tokenizer
from language.generation.sample_prompts import check_samples
from language.options.transformer_options import TransformerConfig, check_initial_weights
from language.tasks.scores import check_tasks
from tpu_utils.base.errors import InputError
from tpu_utils.base.files import open_regular


def load_sequences(config: TransformerConfig, process_index: int = 0, process_count: int = 1) -> SequenceData:
    """The data the config names, checked; of several processes each gets its rows. Raises InputError."""
    if config.compile_for:
        return shapes_alone(config)
    data = load_batches(config, process_index, process_count)
    parts = config.gradient_accumulation_steps  # no more rows at a time than in training, and as many in all
    validation, batches = MicroBatches(data.validation, parts), parts * data.validation_batches
    return dataclasses.replace(data, validation=validation, validation_batches=batches)


def load_batches(config: TransformerConfig, process_index: int, process_count: int) -> SequenceData:
    """As load_sequences(), whose batches for validation have the rows of a batch of training."""
    if config.dataset == "chat":
        return load_chats(config, tokenizer_of(config), process_index, process_count)
    if config.dataset == "stream":
        return load_stream(config, process_index, process_count)
    T, vocab_size = config.shape.sequence_length, config.shape.vocab_size
    rows = config.global_batch_size // process_count
    part = dict(process_index=process_index, process_count=process_count)
    if config.dataset == "synthetic":
        train = MarkovChain(vocab_size, T, rows, config.seed, 0, **part)
        validation = MarkovChain(vocab_size, T, rows, config.seed, 1, **part)
        description = f"Markov chain over {vocab_size} tokens"
        return SequenceData(
            config, train, validation, config.eval_batches, description, vocab_size, MarkovChain.entropy
        )
    if not config.train_data:
        raise InputError(f"dataset is {config.dataset} but train_data is empty; name the data with --train_data")
    train_path, validation_path = (Path(config.data_dir) / name for name in (config.train_data, config.validation_data))
    if config.dataset == "tokens":
        if not config.validation_data:
            raise InputError("dataset is tokens but validation_data is empty; name shards with --validation_data")
        train = TokenShards(str(train_path), vocab_size, T, rows, **part)
        check_apart(train.paths, matching(validation_path))
        validation = TokenShards(str(validation_path), vocab_size, T, rows, **part, padded=True)
        description = (
            f"{len(train.shards)} shard{'s' * (len(train.shards) > 1)}, {sum(map(len, train.shards)):,} tokens"
        )
        batches = min(config.eval_batches, validation.batches_per_epoch)
        return SequenceData(config, train, validation, batches, description, train.fingerprint())
    documents = read_documents(train_path, config.document_separator)
    if config.validation_data:
        training, validating = documents, read_documents(validation_path, config.document_separator)
        check_apart(text_files(train_path), text_files(validation_path))
    else:
        training, validating = split_documents(documents)
    train = TextWindows(training, T, rows, config.seed, True, config.bucketed, **part)
    validation = TextWindows(validating, T, rows, shuffle=False, **part)
    description = (
        f"{len(documents)} documents, {len(train.tokens):,} training and {len(validation.tokens):,} validation tokens: "
        "bytes, and the end of each document"
    )
    batches = min(config.eval_batches, validation.batches_per_epoch)
    return SequenceData(config, train, validation, batches, description, zlib.crc32(train.tokens.tobytes()))


def shapes_alone(config: TransformerConfig) -> SequenceData:
    """Zeros in the shape of a batch: the TPU compiler needs no data."""
    tokens = np.zeros((config.global_batch_size, config.shape.sequence_length + 1), np.int32)
    return SequenceData(config, SameBatch(tokens), SameBatch(tokens), 0, "none: nothing runs", 0)


@dataclass(frozen=True)
class SameBatch:
    tokens: np.ndarray

    def batch(self, step: int) -> np.ndarray:
        return self.tokens


def check_files(config: TransformerConfig) -> None:
    """Raises InputError when the files that config names are missing or damaged. Reads little, and imports no torch."""
    check_initial_weights(config)
    check_samples(config)
    if config.compile_for or config.dataset == "synthetic":
        return
    check_tasks(config)
    if config.dataset == "chat":
        check_chats(config)
        return
    if config.dataset == "stream":
        check_stream(config)
        return
    if config.dataset == "tokens" or not config.train_data:
        load_sequences(config)
        if config.tokenizer:
            check_tokenizer(load_tokenizer(config.tokenizer), config.shape.vocab_size)
        return
    paths = [Path(config.data_dir) / name for name in (config.train_data, config.validation_data) if name]
    for path in paths:
        if not path.is_dir():
            open_regular(path, TEXT).close()
    check_apart(text_files(paths[0]), text_files(paths[-1]) if paths[1:] else [])
