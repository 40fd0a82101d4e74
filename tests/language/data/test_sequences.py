"""What the options of a run name as its data, whichever of the five sources it is."""

import json
import os
import shutil

import numpy as np
import pytest
from documents import write_documents

from language.data.llmc_files import write_token_shard
from language.options.transformer_options import TransformerConfig
from language.sequences import check_files, load_sequences
from tpu_utils.base.errors import InputError

T = 16
SOURCES = {
    "synthetic": {},
    "tokens": dict(train_data="t_0.bin", validation_data="v_*.bin", vocab_size=257),
    "text": dict(train_data="a.txt"),
    "chat": dict(train_data="c.jsonl", model_size="llama_tiny"),
    "stream": dict(train_data="d.jsonl"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder, random = tmp_path_factory.mktemp("sources"), np.random.default_rng(0)
    lengths = {"t_0": 3000, "v_0": 16 * T * 3 + 200, "v_1": 40, "v_2": 16 * T + 1}  # v_0 has a rest, v_1 is short
    for name, length in lengths.items():
        write_token_shard(folder / f"{name}.bin", random.integers(1, 257, length), 257)
    (folder / "a.txt").write_bytes(random.integers(97, 123, 9000).astype(np.uint8).tobytes())
    chats = [{"prompt": f"{i}", "completion": "x"} for i in range(400)]
    (folder / "c.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    write_documents(folder / "d.jsonl", [f"{i} " * int(random.integers(5, 60)) for i in range(100)])
    return folder


def validated(folder, dataset: str, accumulation: int, hosts: int, batches: int) -> list[bytes]:
    """Every row that has a target, in any order."""
    config = TransformerConfig(
        dataset=dataset,
        data_dir=str(folder),
        global_batch_size=16,
        sequence_length=32 if dataset == "chat" else T,
        eval_batches=batches,
        gradient_accumulation_steps=accumulation,
        **SOURCES[dataset],
    )
    rows = []
    for host in range(hosts):
        data = load_sequences(config, host, hosts)
        given = [data.validation.batch(i) for i in range(data.validation_batches)]
        assert all(len(batch) == 16 // accumulation // hosts for batch in given), "what a micro-batch has"
        rows += [row.tobytes() for batch in given for row in batch if (row[1:] >= 0).any()]
    return sorted(rows)


@pytest.mark.parametrize("batches", [1, 3, 1000])
@pytest.mark.parametrize("dataset", SOURCES)
def test_accumulation_and_hosts_do_not_change_what_is_evaluated(folder, dataset, batches):
    """--eval_batches once counted batches of global_batch_size / gradient_accumulation_steps rows."""
    if dataset == "synthetic" and batches == 1000:
        batches = 30
    expected = validated(folder, dataset, 1, 1, batches)
    assert len(expected) >= min(batches, 2) * 8
    for accumulation, hosts in ((2, 1), (8, 1), (16, 1), (1, 2), (4, 4)):
        assert validated(folder, dataset, accumulation, hosts, batches) == expected


def test_a_short_shard_is_evaluated_whole(folder):
    """Not refused where a global batch is longer, as accumulation would hide."""
    rows = [np.frombuffer(row, np.int32) for row in validated(folder, "tokens", 1, 1, 1000)]
    targets = sum(int((row[1:] >= 0).sum()) for row in rows)
    assert targets == 3 * 16 * T + 39 + 16 * T


WRITERS = {
    "tokens": lambda path: write_token_shard(path, np.arange(900) % 200 + 1, 257),
    "text": lambda path: path.write_text("some words " * 100),
    "chat": lambda path: path.write_text('{"prompt": "a", "completion": "b"}\n'),
    "stream": lambda path: write_documents(path, ["some words"] * 20),
}
ENDING = {"tokens": "bin", "text": "txt", "chat": "jsonl", "stream": "jsonl"}
LINKS = {"link": os.symlink, "hard link": os.link, "copy": shutil.copy}


@pytest.mark.parametrize("how", ["same", "another way", *LINKS])
@pytest.mark.parametrize("dataset", WRITERS)
def test_a_file_for_validation_is_not_trained_on(tmp_path, dataset, how):
    """One file, by whatever name: as part of a pattern or a folder it was trained on, and validated on."""
    (tmp_path / "d").mkdir()
    name, other = f"d/a.{ENDING[dataset]}", f"v.{ENDING[dataset]}"
    WRITERS[dataset](tmp_path / name)
    if how in LINKS:
        LINKS[how](tmp_path / name, tmp_path / other)
    else:
        other = name if how == "same" else f"d/../{name}"
    trained = "d" if dataset in ("text", "chat", "stream") else f"d/*.{ENDING[dataset]}"
    config = TransformerConfig(
        **SOURCES[dataset] | dict(dataset=dataset, train_data=trained, validation_data=other, data_dir=str(tmp_path)),
        global_batch_size=2,
        sequence_length=64,
    )
    for read in (check_files, load_sequences):
        with pytest.raises(InputError, match=r"in train_data and in validation_data; expected .* --train_data without"):
            read(config)
