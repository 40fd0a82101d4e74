"""The files of a tokenizer that go out with a model, so that text, chats and their end are the same elsewhere.

A run on conversations writes what it was trained on: the template of its format, a file in chat_templates/, and the
tokens that end an answer. A model of bytes, or of GPT-2's tokens, gets that of vocabularies/. Templates that a
folder brings are copied, never run. Imports no torch.
"""

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from language.data import chat as chat_data
from language.data.entries import matching
from language.data.llmc_files import GPT2_VOCAB_SIZE
from language.data.tokenizer import VOCABULARY_FOLDERS, FromFile, Tokenizer, load_tokenizer
from language.options.hf_config import SPECIAL_TOKENS
from language.options.shapes import BYTE_VOCAB_SIZE
from language.options.transformer_options import TransformerConfig
from tpu_utils.base.errors import InputError
from tpu_utils.base.files import read_json, read_regular
from tpu_utils.base.new_folder import write_together

CONFIG = "config.json"
TOKENIZER_JSON = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION_CONFIG = "generation_config.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
TEMPLATE = "chat_template.jinja"
TOKENIZER_FILES = (TOKENIZER_JSON, TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP, "added_tokens.json")
TOKENIZER_FILES += ("vocab.json", "merges.txt", "tokenizer.model", TEMPLATE, GENERATION_CONFIG)
VOCABULARIES = {TOKENIZER_JSON, "vocab.json", "tokenizer.model"}
BUILT_IN = ("bytes", "gpt2", "numbers")
LARGEST_TOKENIZER_FILE = 1 << 28
LINKS = "(a snapshot in Hugging Face's cache is made of links: copy it with `cp -rL`)"
EXPECTED = f"a file of a tokenizer {LINKS}"
END = "<|endoftext|>"  # how the end token of bytes is written. GPT-2's is called so too
LEAST_ALIKE = 0.9
"""Share of the tokens of one vocabulary that another one must have at the same numbers to count as the same."""
RUN_TOKENIZER = "tokenizer"  # the folder in a run that tools.convert_hf made, with what belongs to the tokenizer


def copy_tokenizer(source: Path, target: Path, names: tuple[str, ...] = TOKENIZER_FILES) -> list[str]:
    """Copy the files of these names that are there, as bytes. Raises InputError for one that is no regular file."""
    copied = [name for name in names if os.path.lexists(source / name)]
    for name in copied:
        (target / name).write_bytes(read_regular(source / name, EXPECTED, LARGEST_TOKENIZER_FILE, follow=False))
    return copied


def write_json(path: Path, value: dict) -> None:
    with path.open("x") as file:
        json.dump(value, file, indent=2)
        file.flush()
        os.fsync(file.fileno())


# ----------------------------------------------------------------------------------------------- which tokenizer it is


def folder_of_shards(prefix: str) -> Path:
    """Where tools.prepare_data keeps the tokenizer of the shards PREFIX_train_000000.bin, PREFIX_val_000000.bin, ..."""
    return Path(f"{prefix}_tokenizer")


def keep_with_shards(tokenizer: Tokenizer, prefix: str) -> Path | None:
    """Copy the files of a tokenizer to its shards, in place of those of earlier ones. None: it has none."""
    folder, contents = folder_of_shards(prefix), {}
    if isinstance(tokenizer, FromFile):
        beside = [name for name in (*TOKENIZER_FILES, CONFIG) if (tokenizer.path.parent / name).exists()]
        paths = {name: tokenizer.path.parent / name for name in beside} | {TOKENIZER_JSON: tokenizer.path}
        contents = {name: read_regular(path, EXPECTED, LARGEST_TOKENIZER_FILE) for name, path in paths.items()}
        write_together(folder, contents)
    for name in {*TOKENIZER_FILES, CONFIG} - contents.keys():
        (folder / name).unlink(missing_ok=True)
    return folder if contents else None


def places_of(run_dir: Path, config: TransformerConfig) -> list[Path]:
    """Folders or files that the tokenizer of a run may be in: in the run, which may have been moved, or where it came
    from. --tokenizer is believed before the folder of the initial weights, that before what shards name."""
    places = [run_dir / RUN_TOKENIZER, *(Path(text) for text in (config.tokenizer, config.initial_weights) if text)]
    if config.dataset == "tokens" and config.train_data:
        places += places_of_shards(config.data_paths[:1])
    return places


def places_of_shards(patterns: Iterable[Path | None]) -> list[Path]:
    """Where the tokenizer of the first shard that each pattern matches may be."""
    shards = [shard for pattern in patterns if pattern for shard in matching(pattern)[:1]]
    return [folder_of_shards(re.sub(r"(_train|_val)?_\d+\.bin$", "", str(shard))) for shard in shards]


def check_one_tokenizer(config: TransformerConfig) -> None:
    """Raises InputError where shards, or shards and the model, are of two tokenizers: of one size, each token passes.
    Some tokens may have other names: a model for conversations names those that its base keeps free."""
    named = [Path(text) for text in (config.initial_weights, config.tokenizer) if text]
    named = [VOCABULARY_FOLDERS / place if str(place) in BUILT_IN else place for place in named]
    found = {}
    for place in [*places_of_shards(config.data_paths), *named]:
        if (file := place if place.is_file() else place / TOKENIZER_JSON).exists():
            found.setdefault(read_regular(file, EXPECTED, LARGEST_TOKENIZER_FILE), file)
    if len(found) < 2:
        return
    known = [(file, load_tokenizer(str(file)).tokenizer.get_vocab()) for file in found.values()]
    for name, vocabulary in known[1:]:
        first, tokens = known[0]
        if len(vocabulary.items() & tokens.items()) < LEAST_ALIKE * min(len(vocabulary), len(tokens)):
            raise InputError(
                f"{name} has other tokens than {first}; expected one tokenizer of the shards and of the model; prepare "
                "the shards again: tools.prepare_data --tokenizer, with the folder of the model"
            )


def tokenizer_of_run(run_dir: Path, config: TransformerConfig) -> str:
    """What load_tokenizer takes, or "numbers"; "" where nobody knows."""
    if config.dataset == "text" or config.tokenizer in BUILT_IN:
        return config.tokenizer or "bytes"
    for place in places_of(run_dir, config):
        if (file := place if place.is_file() else place / TOKENIZER_JSON).exists():
            return str(file)
    if config.tokenizer:  # it is gone: whoever opens it says so
        return config.tokenizer
    if config.dataset == "synthetic" and not config.model_config:
        return "numbers"
    return tokenizer_by_size(config.shape.vocab_size, places_of(run_dir, config))


def tokenizer_by_size(vocab_size: int, folders: Iterable[Path]) -> str:
    """ "bytes" or "gpt2", by the size of the vocabulary; "" for another size, and where a folder without a
    tokenizer.json brings a vocabulary that is not GPT-2's: many have as many tokens."""
    for folder in folders:
        if (folder / "tokenizer.model").exists() or not is_gpt2s(folder / "vocab.json"):
            return ""
    return {BYTE_VOCAB_SIZE: "bytes", GPT2_VOCAB_SIZE: "gpt2"}.get(vocab_size, "")


def is_gpt2s(path: Path) -> bool:
    """Whether a vocab.json is GPT-2's, or not there."""
    if not path.exists():
        return True
    try:
        found = read_json(path, EXPECTED, LARGEST_TOKENIZER_FILE)
    except InputError:  # whoever copies it does not read it
        return False
    return found == load_tokenizer("gpt2").tokenizer.get_vocab()


# ------------------------------------------------------------------------------------------------------ what is written


def export_tokenizer(run_dir: Path, config: TransformerConfig, target: Path) -> tuple[list[str], dict[str, Any]]:
    """Write the files of a run's tokenizer. Returns their names, and the SPECIAL_TOKENS that config.json has to name,
    as far as they are known. Raises InputError for files that cannot be read."""
    name, written = tokenizer_of_run(run_dir, config), []
    if name not in (*BUILT_IN, "") and Path(name).exists():
        written = copy_tokenizer(Path(name).parent, target)
        if Path(name).name != TOKENIZER_JSON:
            (target / TOKENIZER_JSON).write_bytes(read_regular(Path(name), EXPECTED, LARGEST_TOKENIZER_FILE))
            written = list(dict.fromkeys([TOKENIZER_JSON, *written]))
    elif config.tokenizer not in BUILT_IN:  # older folders have other files instead, which are copied unread
        written = next(filter(None, (copy_tokenizer(place, target) for place in places_of(run_dir, config))), [])
    if name in ("bytes", "gpt2") and not VOCABULARIES & set(written):
        written = [*copy_tokenizer(VOCABULARY_FOLDERS / name, target), *written]
    of_model = json.loads(config.model_config) if config.model_config else {}
    known = {token: of_model.get(token) for token in SPECIAL_TOKENS}
    if TOKENIZER_JSON not in written or (of_model and config.dataset != "chat"):
        return written, known
    tokenizer = load_tokenizer(name)
    if not of_model:
        known |= {"bos_token_id": tokenizer.prefix, "eos_token_id": one_or_all(tokenizer.end, tokenizer.stops)}
    if config.dataset == "chat":
        written, end = name_format(target, written, config.chat_format, tokenizer)
        return written, known | end
    if isinstance(tokenizer, FromFile) and not tokenizer.kind:  # its readers would take the class of the model
        named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokenizer.decode([tokenizer.end])}
        rewrite(target / TOKENIZER_CONFIG, {}, named, ())
        written = list(dict.fromkeys([*written, TOKENIZER_CONFIG]))
    return written, known


def one_or_all(first: int, tokens: Iterable[int]) -> int | list[int]:
    """As eos_token_id has them."""
    numbers = [first, *sorted({*tokens} - {first})]
    return first if len(numbers) == 1 else numbers


def name_format(
    target: Path, written: list[str], format: str, tokenizer: Tokenizer
) -> tuple[list[str], dict[str, Any]]:
    """Make files that were copied name the format of a run's conversations: its template, and all that ends an answer
    in training. Returns the files, and the end tokens that config.json has to name."""
    format = chat_data.choose_format(format, tokenizer)
    first = chat_data.end_of_answer(format, tokenizer)
    named = {"eos_token": tokenizer.decode([first]) or END}
    if format == "plain":  # its template begins with what the tokenizer puts before a text, and with nothing else
        named["bos_token"] = None if tokenizer.begin is None else tokenizer.decode([tokenizer.begin]) or END
    end = {"eos_token_id": one_or_all(first, chat_data.stop_tokens(format, tokenizer) | tokenizer.stops)}
    # an older template in there would be a second one; without a class its readers would take that of the model
    rewrite(target / TOKENIZER_CONFIG, named, {"tokenizer_class": "PreTrainedTokenizerFast"}, ("chat_template",))
    if SPECIAL_TOKENS_MAP in written:
        known = {key: value for key, value in named.items() if value is not None}
        rewrite(target / SPECIAL_TOKENS_MAP, known, {}, tuple(named.keys() - known.keys()))
    rewrite(target / GENERATION_CONFIG, end, {}, ())
    (target / TEMPLATE).write_bytes((chat_data.TEMPLATES / f"{format}.jinja").read_bytes())
    return list(dict.fromkeys([*written, TOKENIZER_CONFIG, GENERATION_CONFIG, TEMPLATE])), end


def reads_as_trained(folder: Path, format: str) -> bool:
    """Whether others make of a templated conversation the tokens of training. Not of a tokenizer that puts a space
    before a text: training encodes a conversation in parts, and so has more of them."""
    tokenizer = load_tokenizer(str(folder))
    messages = [{"role": role, "content": role} for role in ("user", "assistant") * 2]
    parts = chat_data.parts_of(messages, chat_data.choose_format(format, tokenizer), tokenizer)
    text = "".join(part if isinstance(part, str) else tokenizer.decode([part]) for part, _ in parts)
    return tokenizer.encode_marked(text) == chat_data.format_chat(messages, format, tokenizer)[0]


def rewrite(path: Path, changes: dict[str, Any], defaults: dict[str, Any], removed: tuple[str, ...]) -> None:
    """Change some keys of a JSON file, or make it. Raises InputError for a file that holds something else."""
    found = read_json(path, EXPECTED, LARGEST_TOKENIZER_FILE) if path.exists() else {}
    path.unlink(missing_ok=True)
    write_json(path, {k: v for k, v in (defaults | found | changes).items() if k not in removed})
