"""What the fields of a configuration class say of themselves: types, marks, sentences. Imports nothing of this project.

A class of somebody's own is read the same way: it redeclares a field, or adds one, and registers nothing.
"""

import argparse
import ast
import dataclasses
import difflib
import functools
import inspect
import re
import sys
import textwrap
import types
from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from typing import Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

SUPPORTED = "bool, int, float, str, Literal[...], one of these | None, or a tuple of these such as tuple[int, ...]"


@functools.cache
def hints_of(kind: type) -> dict[str, Any]:
    """The type of every field with its marks, also where annotations are text (from __future__ import annotations)."""
    return get_type_hints(kind, include_extras=True)


@functools.cache
def declaring(kind: type) -> dict[str, type]:
    """Every field, and the class that declares it; of several the nearest to this one, whose default is the field's."""
    nearest_last = reversed(kind.__mro__)
    declared = {name: base for base in nearest_last for name in inspect.get_annotations(base)}
    return {field.name: declared[field.name] for field in dataclasses.fields(kind)}


def plain(hint: Any) -> Any:
    """The type without its marks."""
    return get_args(hint)[0] if hasattr(hint, "__metadata__") else hint


@functools.cache
def marks(kind: type, name: str) -> tuple:
    """What stands beside a field's type in Annotated[type, ...]. One that is redeclared without keeps its parent's."""
    for base in kind.__mro__:
        if name in inspect.get_annotations(base) and hasattr(hint := hints_of(base)[name], "__metadata__"):
            return hint.__metadata__
    return ()


def field_doc(kind: type, name: str) -> str:
    """The sentence below a field. One that is redeclared without keeps its parent's."""
    return next((docs[name] for base in kind.__mro__ if name in (docs := field_docs(base))), "")


@functools.cache
def field_docs(kind: type) -> dict[str, str]:
    """The string below each field of a class, from its source; empty where there is none to be had."""
    try:
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    except (OSError, TypeError):  # typed into a prompt
        return {}
    pairs = zip(body.body, body.body[1:], strict=False)
    return {
        field.target.id: " ".join(doc.value.value.split())
        for field, doc in pairs
        if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant)
    }


def is_supported(kind: Any) -> bool:
    """Whether a command line and JSON can both hold values of this type."""
    parts = get_args(kind)
    if get_origin(kind) is Literal:
        return all(isinstance(part, str | int) for part in parts)
    if get_origin(kind) in (Union, types.UnionType):
        return all(part is types.NoneType or is_supported(part) for part in parts)
    if get_origin(kind) is tuple:
        return all(part is Ellipsis or part in (bool, int, float, str) for part in parts)
    return kind in (bool, int, float, str)


def fits(value: Any, kind: Any) -> bool:
    """Whether a value is of a supported type. numpy's numbers are numbers, and a bool is none."""
    parts = get_args(kind)
    if get_origin(kind) is Literal:
        return value in parts
    if get_origin(kind) in (Union, types.UnionType):
        return any(value is None if part is types.NoneType else fits(value, part) for part in parts)
    if get_origin(kind) is tuple:
        if not isinstance(value, tuple):
            return False
        parts = (parts[0],) * len(value) if parts[1:] == (Ellipsis,) else parts
        return len(value) == len(parts) and all(map(fits, value, parts))
    if kind in (int, float):
        if kind is float and isinstance(value, int) and abs(value) > sys.float_info.max:  # of JSON
            return False
        return isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    return isinstance(value, kind)


def type_name(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    return str(kind) if get_args(kind) else kind.__name__


def values_in(value: Any) -> tuple:
    """What a tuple holds, or the value itself; of None nothing."""
    return value if isinstance(value, tuple) else () if value is None else (value,)


def check_types(config: Any) -> list[str]:
    """Fields with a value of another type, or with bytes that are no text, as sentences."""
    problems = []
    for name, hint in ((field.name, hints_of(type(config))[field.name]) for field in dataclasses.fields(config)):
        value, kind = getattr(config, name), plain(hint)
        if not fits(value, kind):
            problems.append(f"{name} is {value!r:.60}; expected {type_name(kind)}")
        elif any(isinstance(text, str) and re.search("[\ud800-\udfff]", text) for text in values_in(value)):
            problems.append(f"{name} is {value!r:.60}; expected UTF-8 text")  # bytes of the command line, escaped
    return problems


@functools.cache
def check_class(kind: type) -> tuple[str, ...]:
    """What is wrong with a configuration class itself, as sentences: what Python would pass over in silence."""
    problems, names = [], {field.name for field in dataclasses.fields(kind)}
    for base in kind.__mro__:
        declared = [n for n in inspect.get_annotations(base) if get_origin(hints_of(base)[n]) is not ClassVar]
        if declared and "__dataclass_fields__" not in vars(base):
            problems.append(
                f"class {base.__name__} declares {', '.join(declared)} but is no dataclass; expected "
                "@dataclass(frozen=True) on the line above it"
            )
        problems += [
            f"class {base.__name__} sets {name} without a type, which dataclasses pass over; expected "
            f"{name}: {type_name(plain(hints_of(base)[name]))} = {vars(base)[name]!r:.60}"
            for name in names & vars(base).keys() - inspect.get_annotations(base).keys()
        ]
    for field in dataclasses.fields(kind):
        where, hint = f"class {declaring(kind)[field.name].__name__}: {field.name}", plain(hints_of(kind)[field.name])
        if not is_supported(hint):
            problems.append(f"{where} is of type {type_name(hint)}; expected {SUPPORTED}")
        elif field.default is dataclasses.MISSING:
            problems.append(f"{where} has no default; expected one: --help shows it")
    return tuple(problems)


def nearest(name: str, names: Iterable[str]) -> str:
    """'; did you mean X?' where one of the names is near."""
    found = difflib.get_close_matches(name, list(names), n=1)
    return f"; did you mean {found[0]}?" if found else ""


def parse_arguments(parser: argparse.ArgumentParser, arguments: Sequence[str], hint: str = "") -> argparse.Namespace:
    """What the parser understands. An unknown argument ends the process with exit code 2, the name that is nearest, and
    the hint."""
    given, unknown = parser.parse_known_args(arguments)
    if unknown:
        names = [f"--{name}" for name in vars(given)]
        parser.error(f"unknown argument {unknown[0]}{nearest(unknown[0].partition('=')[0], names)}{hint}")
    return given
