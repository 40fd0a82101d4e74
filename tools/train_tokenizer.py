"""Train a tokenizer on text: byte-level BPE, with the tokens of ChatML.

Run:     python -m tools.train_tokenizer corpus/ --output own_tokenizer
             4,096 tokens, from a text file, a folder, or several
         python -m tools.train_tokenizer a.txt b.txt --vocab_size 32768 \\
             --output own_tokenizer

Then:    python -m tools.prepare_data corpus/ --output datasets/own \\
             --tokenizer own_tokenizer

Expect:  the same text gives the same file. Text for validation, the same
         tenth as prepare_data's, is not trained on: its bytes per token
         are printed.
"""

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tokenizers
import tyro
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from language.data.chat import FORMATS
from language.data.text import read_documents, split_documents
from language.data.tokenizer import LARGEST_VOCAB_SIZE, load_tokenizer
from language.data.tokenizer_files import END, TOKENIZER_CONFIG, TOKENIZER_JSON
from tpu_utils.base.errors import InputError, run_script
from tpu_utils.base.new_folder import write_together
from tpu_utils.options.fields import Range
from tpu_utils.options.tool_arguments import parse_options

SPECIAL = (END, *FORMATS["chatml"])
"""Behind the trained tokens, in this order."""
SMALLEST = 256 + len(SPECIAL)
"""Every byte has a token, so that any text can be encoded."""
WORDS = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
"""What no token reaches across: GPT-4's pattern with at most two digits together, as in nanochat: more of them are
worth no token of a small vocabulary. Source: nanochat/tokenizer.py of github.com/karpathy/nanochat."""
PIECES = r"[\s\S]{1,256}"
"""What a longer word is split into in training, whose time grows with the square of a word: a run of one letter."""


@dataclass(frozen=True)
class TokenizerConfig:
    """What to read and what to write."""

    text: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """UTF-8 text files, or folders of them."""
    output: Path
    """A folder: tokenizer.json and tokenizer_config.json are written there, in place of earlier ones."""
    vocab_size: Annotated[int, Range(f"[{SMALLEST}, {LARGEST_VOCAB_SIZE}]")] = 4096
    """Tokens, with the end of a document and those of ChatML."""
    document_separator: str = ""
    """What divides documents inside a file. Empty: a file is one document."""
    validation_fraction: Annotated[float, Range("[0, 1)")] = 0.1
    """Share of the bytes that is not trained on, as of tools.prepare_data."""


def train_tokenizer(documents: Iterable[str], vocab_size: int) -> tokenizers.Tokenizer:
    """The same documents give the same tokenizer, byte for byte. Raises InputError for a text that is too short."""
    made = tokenizers.Tokenizer(models.BPE())
    split, pieces = (pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in (WORDS, PIECES))
    to_bytes = pre_tokenizers.ByteLevel(False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([split, pieces, to_bytes])
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    size = vocab_size - len(SPECIAL)
    made.train_from_iterator(
        documents, trainers.BpeTrainer(vocab_size=size, show_progress=False, initial_alphabet=alphabet)
    )
    made.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    if (found := made.get_vocab_size()) < size:
        raise InputError(
            f"the text has pairs for a vocabulary of {found + len(SPECIAL)}, expected {vocab_size}; give more text, or "
            f"--vocab_size {found + len(SPECIAL)} at most"
        )
    made.add_special_tokens([tokenizers.AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    made.post_processor = processors.TemplateProcessing(
        f"{END} $A", f"{END} $A {END} $B", special_tokens=[(END, made.token_to_id(END))]
    )
    return made


def write_tokenizer(tokenizer: tokenizers.Tokenizer, folder: Path) -> None:
    """The files that load_tokenizer and transformers read, in place of earlier ones."""
    named = {"bos_token": END, "eos_token": END, "tokenizer_class": "PreTrainedTokenizerFast"}
    settings = json.dumps(named | {"clean_up_tokenization_spaces": False}, indent=2)
    made = tokenizer.to_str(pretty=True)
    write_together(folder, {TOKENIZER_JSON: made.encode(), TOKENIZER_CONFIG: settings.encode()})


def main() -> int:
    config = parse_options(TokenizerConfig, __doc__)
    if not config.text:
        raise InputError("found no text; expected files or folders of UTF-8 text")
    if config.output.exists() and not config.output.is_dir():
        raise InputError(f"output is {config.output}, a file; expected a folder, or a new name")
    documents = [part for path in config.text for part in read_documents(path, config.document_separator)]
    training, held_out = split_documents(documents, config.validation_fraction)
    write_tokenizer(train_tokenizer((part.decode() for part in training), config.vocab_size), config.output)
    tokenizer = load_tokenizer(str(config.output))  # as whoever uses it reads it
    print(f"{config.output}: {tokenizer.vocab_size:,} tokens, the last of them {', '.join(SPECIAL)}")
    for kind, parts in (("training", training), ("held-out", held_out)):
        num_bytes, tokens = sum(map(len, parts)), sum(len(tokenizer.encode_document(part)) for part in parts)
        if tokens:
            print(f"{kind:10} {num_bytes / tokens:.3f} bytes per token: {num_bytes:,} bytes, {tokens:,} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main))
