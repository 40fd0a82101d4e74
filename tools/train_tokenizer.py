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

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from language.data.text import read_documents, split_documents
from language.data.tokenizer import LARGEST_VOCAB_SIZE, load_tokenizer
from tools.tokenizer_training import SMALLEST, SPECIAL, train_tokenizer, write_tokenizer
from tpu_utils.base.errors import InputError, run_script
from tpu_utils.options.tool_arguments import parse_options


@dataclass(frozen=True)
class TokenizerConfig:
    """What to read and what to write."""

    text: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """UTF-8 text files, or folders of them."""
    output: Path
    """A folder: tokenizer.json and tokenizer_config.json are written there, in place of earlier ones."""
    vocab_size: int = 4096
    """Tokens, with the end of a document and those of ChatML."""
    document_separator: str = ""
    """What divides documents inside a file. Empty: a file is one document."""
    validation_fraction: float = 0.1
    """Share of the bytes that is not trained on, as of tools.prepare_data."""
    debug: bool = False
    """Show the traceback of an error instead of its message alone."""


def main() -> int:
    config = parse_options(TokenizerConfig, __doc__)
    if not SMALLEST <= config.vocab_size <= LARGEST_VOCAB_SIZE:
        raise InputError(f"vocab_size is {config.vocab_size}; expected {SMALLEST} to {LARGEST_VOCAB_SIZE}")
    if not 0 <= config.validation_fraction < 1:
        raise InputError(f"validation_fraction is {config.validation_fraction}; expected 0 or more, below 1")
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
