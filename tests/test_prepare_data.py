"""Text to shards: what was written is what the training script reads."""

import json

import numpy as np
import pytest

import llmc_files
import prepare_data
import token_data


def prepare(monkeypatch, *arguments) -> int:
    monkeypatch.setattr("sys.argv", ["prepare_data.py", *map(str, arguments)])
    return prepare_data.run_script(prepare_data.main)


def test_bytes_to_shards_and_back(tmp_path, monkeypatch):
    text = "To be, or not to be.\n\n" + "Öther ünicode: \N{SNOWMAN}\n\n" + "third " * 60
    (tmp_path / "in.txt").write_text(text)
    code = prepare(
        monkeypatch,
        tmp_path / "in.txt",
        "--output",
        tmp_path / "out" / "t",
        "--document_separator",
        "\n\n",
        "--shard_tokens",
        100,
    )
    assert code == 0
    paths = sorted((tmp_path / "out").glob("t_train_*.bin"))
    assert len(paths) > 1 and (tmp_path / "out" / "t_val_000000.bin").exists()
    tokens = np.concatenate([llmc_files.open_token_shard(path, 257) for path in paths])
    assert (tokens == token_data.END_OF_DOCUMENT_BYTE).sum() == 3 and tokens[0] == token_data.END_OF_DOCUMENT_BYTE
    validation = llmc_files.open_token_shard(tmp_path / "out" / "t_val_000000.bin", 257)
    both = [bytes(part[part < 256].astype(np.uint8)) for part in (tokens, validation)]
    assert b"".join(both).decode() == text.replace("\n\n", "")
    source = token_data.TokenShards(str(tmp_path / "out" / "t_train_*.bin"), 257, 16, 2)
    np.testing.assert_array_equal(source.batch(0)[1], tokens[16:33])


def test_hellaswag_questions(tmp_path, monkeypatch):
    record = dict(ctx="A man sits", label=2, endings=["down", "up", "still", "by"])
    (tmp_path / "q.jsonl").write_text(json.dumps(record) + "\n")
    assert prepare(monkeypatch, tmp_path / "q.jsonl", "--output", tmp_path / "out", "--hellaswag") == 0
    (question,) = llmc_files.read_hellaswag(tmp_path / "out" / "hellaswag_val.bin", 257)
    assert question.label == 2 and bytes(question.context.astype(np.uint8)) == b"A man sits"
    assert bytes(question.endings[2].astype(np.uint8)) == b" still"


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda p: None, [], "no such file"),
        (lambda p: p.write_text(""), [], "empty; expected UTF-8 text"),
        (lambda p: p.write_bytes(b"\xff\xfe"), [], "not UTF-8"),
        (lambda p: p.write_text("x"), ["--validation_fraction", "1.5"], "expected 0 <= validation_fraction < 1"),
        (lambda p: p.write_text("{}\n"), ["--hellaswag"], "line 1: not a HellaSwag question"),
    ],
)
def test_bad_input(tmp_path, monkeypatch, capsys, make, options, message):
    make(tmp_path / "in.txt")
    assert prepare(monkeypatch, tmp_path / "in.txt", "--output", tmp_path / "o", *options) == 2
    assert message in capsys.readouterr().err
