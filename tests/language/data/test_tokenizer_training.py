"""A tokenizer of one's own: the same file from the same text, read by us, by transformers and by a chat."""

import json
from types import SimpleNamespace

import pytest
from mutations import a_full_disk, no_hang

from language.data.chat import choose_format, format_chat
from language.data.tokenizer import load_tokenizer
from tools import prepare_data, train_tokenizer
from tpu_utils.base.errors import InputError

TEXT = "".join(
    f"To be {n}, or not to be {n * n}: that's the question;\nwhether 'tis nobler in mind.\n" for n in range(400)
)


def train(monkeypatch, *arguments) -> int:
    monkeypatch.setattr("sys.argv", ["tools.train_tokenizer", *map(str, arguments)])
    return train_tokenizer.run_script(train_tokenizer.main)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "in.txt").write_text(TEXT)
    assert train(monkeypatch, tmp_path / "in.txt", "--vocab_size", 300, "--output", tmp_path / "own") == 0
    return tmp_path / "own"


def test_the_same_text_gives_the_same_bytes(folder, tmp_path, monkeypatch, capsys):
    before = (folder / "tokenizer.json").read_bytes()
    assert train(monkeypatch, tmp_path / "in.txt", "--vocab_size", 300, "--output", folder) == 0  # again, in its place
    assert (folder / "tokenizer.json").read_bytes() == before
    assert "held-out" in capsys.readouterr().out


def test_a_full_disk_leaves_the_earlier_one(folder, tmp_path):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    large = SimpleNamespace(to_str=lambda pretty: "." * 200_000)
    for output in (folder, tmp_path / "new"):
        with a_full_disk(), pytest.raises(OSError, match=r"File too large: '.*/tokenizer\.json'"):
            train_tokenizer.write_tokenizer(large, output)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before and not (tmp_path / "new").exists()


def test_text_comes_back_and_numbers_are_pairs_of_digits(folder):
    tokenizer = load_tokenizer(str(folder))
    text = "Once \N{SNOWMAN} 12345 <|im_end|>\n"
    tokens = tokenizer.encode(text)
    assert tokenizer.vocab_size == 300 and tokenizer.decode(tokens) == text
    assert not {297, 298, 299} & set(tokens), "special tokens in a text are text"
    assert (tokenizer.end, tokenizer.begin, tokenizer.token("<|im_end|>")) == (297, 297, 299)
    digits = [token for token in range(297) if tokenizer.decode([token]).strip().isdigit()]
    assert digits and all(len(tokenizer.decode([token]).strip()) <= 2 for token in digits)


def test_transformers_reads_it_and_chats_are_chatml(folder):
    transformers = pytest.importorskip("transformers", reason="requirements-dev.txt has transformers")
    ours, theirs = load_tokenizer(str(folder)), transformers.AutoTokenizer.from_pretrained(folder)
    assert theirs.encode("not to be", add_special_tokens=False) == ours.encode("not to be")
    assert (theirs.eos_token_id, len(theirs)) == (ours.end, 300)
    assert choose_format("auto", ours) == "chatml"
    tokens, _ = format_chat(
        [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Me."}], "chatml", ours
    )
    assert theirs.decode(tokens) == "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\nMe.<|im_end|>\n"


def test_shards_are_made_with_it(folder, tmp_path, monkeypatch):
    arguments = [tmp_path / "in.txt", "--output", tmp_path / "s", "--tokenizer", folder]
    monkeypatch.setattr("sys.argv", ["tools.prepare_data", *map(str, arguments)])
    assert prepare_data.main() == 0
    assert json.loads((tmp_path / "s_tokenizer" / "tokenizer_config.json").read_text())["eos_token"] == "<|endoftext|>"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--vocab_size", "100"], "vocab_size is 100; expected 259 <= vocab_size"),
        (["--vocab_size", "50000"], r"pairs for a vocabulary of \d+, expected 50000; give more text"),
        (["--validation_fraction", "1"], "validation_fraction is 1.0"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, monkeypatch, arguments, said):
    (tmp_path / "in.txt").write_text(TEXT)
    command = ["tools.train_tokenizer", str(tmp_path / "in.txt"), "--output", str(tmp_path / "own"), *arguments]
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(InputError, match=said):
        train_tokenizer.main()
    assert not (tmp_path / "own").exists()


@pytest.mark.parametrize("run", ["a", "=", " ", "\n", "\u65e5", "ab"])
def test_a_run_of_one_letter_takes_no_square_of_its_length(run):
    """100 kB of one letter took 11 seconds, 1 MB minutes."""
    with no_hang():
        found = train_tokenizer.train_tokenizer([run * 200_000 + TEXT], 270)
    assert max(map(len, found.get_vocab())) <= 256 * len(run.encode())
    assert found.decode(found.encode(run * 1000).ids, skip_special_tokens=True) == run * 1000
