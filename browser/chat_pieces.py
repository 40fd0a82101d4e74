"""A format of conversations as data: what stands around each message, for a page that has no Jinja. Imports no torch.

model.json has it as "chat"; page/format.js builds the same tokens of it. Pieces are tokens (numbers) and texts. Texts
that follow each other are encoded as one, but an answer is encoded by itself:
    format  its name in language/data/chat.py, where all formats stand
    begin   pieces in front of a conversation
    system, user, assistant   {"before": pieces, "after": pieces}, around a message
    place   where a message of the system goes: "own", "first" or "last": behind what stands before that user's text
    lead    text that begins every answer
    answer  pieces in front of the answer that is to come
    strip   roles whose messages lose white space at both ends
    stops   tokens that end an answer
    words   tokens that no text may hold: it could end an answer
"""

from typing import Any

from language.data.chat import (
    ENDED,
    ROLES,
    STRIPPED,
    begin_of_chat,
    end_of_answer,
    header,
    separator_of,
    special_tokens,
    stop_tokens,
)
from language.data.tokenizer import Tokenizer
from tpu_utils.base.errors import InputError

MOST_PIECES = 16
LONGEST_PIECE = 100
MOST_STOPS = 1000
SYSTEM_PLACES = {"gemma": "first", "mistral": "last"}


def pieces_of(format: str, tokenizer: Tokenizer) -> dict[str, Any]:
    """What model.json says of a format. Raises InputError for a tokenizer that has not its tokens."""
    special, end = special_tokens(format, tokenizer), end_of_answer(format, tokenizer)
    begin = begin_of_chat(format, tokenizer)

    def around(role: str) -> dict[str, list]:
        ends = [end] if role == "assistant" or format in ENDED else []
        return {"before": kept(header(role, format, special, last=False)), "after": kept([*ends, separator_of(format)])}

    place = SYSTEM_PLACES.get(format, "own")
    merged = {} if place == "own" else {"system": {"before": [], "after": ["\n\n"]}}
    stripped = [role for role in ROLES if place == "own" or role != "system"] if format in STRIPPED else []
    return dict(
        format=format,
        begin=[] if begin is None else [begin],
        **{role: around(role) for role in ROLES} | merged,
        place=place,
        lead=" " if format in ("plain", "mistral") else "",
        answer=kept(header("assistant", format, special, last=True)),
        strip=["assistant"] if format == "mistral" else stripped,
        stops=sorted(tokenizer.stops | stop_tokens(format, tokenizer)),
        words=sorted({*special.values(), tokenizer.end}),
    )


def kept(pieces: list[int | str]) -> list[int | str]:
    return [piece for piece in pieces if piece != ""]


def check_pieces(chat: Any, vocab_size: int) -> None:
    """Raises ValueError, "part is ..; expected ..", unless a foreign model.json has what pieces_of() makes."""

    def check(is_right: bool, name: str, expected: str) -> None:
        if not is_right:
            raise ValueError(f"chat{name} is {value!r:.80}; expected {expected}")

    def is_token(piece: Any) -> bool:
        return type(piece) is int and 0 <= piece < vocab_size

    def is_text(piece: Any) -> bool:
        is_short = isinstance(piece, str) and len(piece) <= LONGEST_PIECE
        return is_short and not any("\ud800" <= letter <= "\udfff" for letter in piece)

    def are_pieces(value: Any) -> bool:
        are_few = isinstance(value, list) and len(value) <= MOST_PIECES
        return are_few and all(is_token(piece) or is_text(piece) for piece in value)

    value = chat
    check(isinstance(chat, dict), "", "an object, or null")
    expected = f"at most {MOST_PIECES} texts and tokens of the vocabulary"
    for name in ("begin", "answer"):
        value = chat.get(name)
        check(are_pieces(value), f".{name}", expected)
    for name in ROLES:
        value = chat.get(name)
        is_pair = isinstance(value, dict) and are_pieces(value.get("before")) and are_pieces(value.get("after"))
        check(is_pair, f".{name}", f"before and after, {expected}")
    value = chat.get("strip")
    check(isinstance(value, list) and len(value) <= 3 and all(r in ROLES for r in value), ".strip", "names of roles")
    value = chat.get("place")
    check(value in ("own", "first", "last"), ".place", "own, first or last")
    for name in ("format", "lead"):
        value = chat.get(name)
        check(is_text(value), f".{name}", f"a text of at most {LONGEST_PIECE} characters")
    for name in ("stops", "words"):
        value = chat.get(name)
        is_list = isinstance(value, list) and 1 <= len(value) <= MOST_STOPS
        check(is_list and all(map(is_token, value)), f".{name}", f"1 to {MOST_STOPS} tokens of the vocabulary")


def prompt_of(chat: dict[str, Any], messages: list[dict[str, str]], tokenizer: Tokenizer) -> list[int]:
    """The tokens that an answer follows. messages: one of the system or none, then user and assistant in turn.

    Raises InputError for text in which the tokenizer sees a token of the format."""
    parts: list[tuple[int | str, bool]] = [(piece, False) for piece in chat["begin"]]  # (piece, encoded by itself)
    merged = chat["place"] != "own" and messages[0]["role"] == "system"
    system = [*chat["system"]["before"], messages[0]["content"], *chat["system"]["after"]] if merged else []
    messages = messages[merged:]
    users = [number for number, message in enumerate(messages) if message["role"] == "user"]
    at = users[0 if chat["place"] == "first" else -1]
    for number, message in enumerate(messages):
        role, content = message["role"], message["content"]
        content = content.strip() if role in chat["strip"] else content
        parts += [(piece, False) for piece in (*chat[role]["before"], *(system if number == at else ()))]
        parts.append((chat["lead"] + content, True) if role == "assistant" else (content, False))
        parts += [(piece, False) for piece in chat[role]["after"]]
    parts += [(piece, False) for piece in chat["answer"]]
    tokens, text = [], ""
    for piece, alone in [*parts, ("", True)]:
        if isinstance(piece, str) and not alone:
            text += piece
            continue
        tokens += encode(chat, text, tokenizer) if text else []
        tokens += [piece] if isinstance(piece, int) else encode(chat, piece, tokenizer)
        text = ""
    return tokens


def encode(chat: dict[str, Any], text: str, tokenizer: Tokenizer) -> list[int]:
    found = tokenizer.encode(text)
    if wrong := [token for token in found if token in chat["words"]]:
        name = tokenizer.decode(wrong[:1])
        raise InputError(f"a text holds {name}, which is a token of the format; take it out of the text")
    return found
