"""Text for three readers: a shell, YAML, and Kubernetes, which replaces $(NAME) in a container's words.

Whatever a word holds, it arrives as it was given (tests/test_manifests.py). Imports nothing of this project.
"""

import re
import shlex
from collections.abc import Sequence

PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9./_-]*")
"""Strings that every version of YAML reads as strings, except NO_STRINGS; all others are quoted. PyYAML would leave
1e-3 and 0o7 unquoted, which the parser of Kubernetes reads as numbers, and then refuses the whole file."""
NO_STRINGS = {"true", "false", "null", "yes", "no", "on", "off", "y", "n"}


def shell_word(word: str) -> str:
    """The word as bash reads it back. One that holds what is not printable is written $'...', so it stays one line.

    In bytes of UTF-8, whatever the locale; \\x takes at most two digits, so a digit that follows is not read with it.
    """
    if word.isprintable():
        return shlex.quote(word)
    escapes = {"\\": r"\\", "'": r"\'", "\n": r"\n", "\t": r"\t"}
    bytes_of = (escapes.get(c) or (c if c.isprintable() else "".join(f"\\x{b:02x}" for b in c.encode())) for c in word)
    return f"$'{''.join(bytes_of)}'"


def shell_line(words: Sequence[str]) -> str:
    return " ".join(map(shell_word, words))


def for_kubernetes(word: str) -> str:
    """So that nothing is replaced: $(HOME) would become a variable of the container, and $$ is read as one $."""
    return word.replace("$", "$$")


def yaml_word(value: str | int | bool) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value)
    if PLAIN.fullmatch(value) and value.lower() not in NO_STRINGS:
        return value
    escapes = {"\\": r"\\", '"': r"\"", "\n": r"\n", "\t": r"\t"}
    return '"' + "".join(escapes.get(c) or (c if c.isprintable() else f"\\U{ord(c):08x}") for c in value) + '"'


def yaml_text(value: dict | list | str | int | bool, indent: int = 0) -> str:
    """Block style, a line for each value. Dictionaries hold no empty dictionary or list."""
    lines, margin = [], " " * indent
    if isinstance(value, dict):
        for key, inner in value.items():
            nested = isinstance(inner, dict | list)
            lines.append(f"{margin}{yaml_word(key)}:" + ("" if nested else f" {yaml_word(inner)}"))
            lines += [yaml_text(inner, indent + 2)] if nested else []
    elif isinstance(value, list):
        for inner in value:
            lines.append(f"{margin}- {yaml_text(inner, indent + 2).lstrip(' ')}")
    else:
        return yaml_word(value)
    return "\n".join(lines)
