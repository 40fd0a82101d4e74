"""Make conversations of a text: a line is asked, and the next one answers.

Run:     python -m tools.make_chats play.txt --output chats/

Then:    python transformer_tpu.py --initial_weights DIR --dataset chat \\
             --data_dir chats --train_data train.jsonl \\
             --validation_data held_out.jsonl
"""

import itertools
import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from language.data.text import read_documents, split_documents
from tpu_utils.base.errors import InputError, run_script
from tpu_utils.base.new_folder import write_together
from tpu_utils.options.fields import Range
from tpu_utils.options.tool_arguments import parse_options

SHORTEST, LONGEST = 8, 80  # characters of a line
ASKED = "What comes after: {line}"


@dataclass(frozen=True)
class ChatsConfig:
    """What to read and what to write."""

    text: Annotated[Path, tyro.conf.Positional]
    """A UTF-8 text file, or a folder of them."""
    output: Path
    """Output folder: train.jsonl, and held_out.jsonl from the last tenth of the text."""
    most: Annotated[int, Range("[1, inf)")] = 4000
    """Conversations to train on, at most."""
    seed: int = 0
    """Seed of the choice of lines."""


def chats_of(documents: list[bytes], most: int, seed: int) -> list[dict]:
    """Pairs of lines, chosen by the seed, in the form of language/data/chat.py."""
    pairs = []
    for document in documents:
        lines = [line.strip() for line in document.decode().splitlines()]
        pairs += [pair for pair in itertools.pairwise(lines) if all(is_asked(line) for line in pair)]
    chosen = random.Random(seed).sample(pairs, min(most, len(pairs)))
    asked = [({"role": "user", "content": ASKED.format(line=line)}, answer) for line, answer in chosen]
    return [{"messages": [question, {"role": "assistant", "content": answer}]} for question, answer in asked]


def chats_of_parts(text: Path, documents: list[bytes], most: int, seed: int) -> list[list[dict]]:
    """To train on, and held out. Raises InputError where a part of the text has none."""
    parts = zip(split_documents(documents), (most, 200), strict=True)
    found = [chats_of(part, count, seed) for part, count in parts]
    if not all(found):
        raise InputError(f"{text} has no two lines of {SHORTEST} to {LONGEST} characters that follow each other")
    return found


def is_asked(line: str) -> bool:
    return SHORTEST <= len(line) <= LONGEST and not line.endswith(":")  # which is the name of a speaker


def main() -> int:
    config = parse_options(ChatsConfig, __doc__)
    found = chats_of_parts(config.text, read_documents(config.text), config.most, config.seed)
    named = dict(zip(("train.jsonl", "held_out.jsonl"), found, strict=True))
    lines = {name: "".join(json.dumps(chat) + "\n" for chat in chats) for name, chats in named.items()}
    write_together(config.output, {name: text.encode() for name, text in lines.items()})
    for name, chats in named.items():
        print(f"{config.output / name}: {len(chats):,} conversations")
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main))
