"""Reads the fields of a configuration class: types, marks (metadata of Annotated), docstrings. Imports nothing of ours.

A subclass of your own is read the same way: it redeclares or adds fields, and registers nothing.
"""

import ast
import dataclasses
import difflib
import functools
import inspect
import re
import sys
import textwrap
import types
from collections.abc import Iterable
from itertools import pairwise
from numbers import Integral, Real
from typing import Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

FREE = "may differ between a run and its resumption without changing a single bit of what it computes"
"""A mark. Fields that set how the work is divided over devices have it too: with those, results agree to about 1e-7."""
SUPPORTED = "bool, int, float, str, Literal[...], one of these | None, or a tuple of these such as tuple[int, ...]"


@dataclasses.dataclass(frozen=True)
class Range:
    """A mark: the numbers a field may have, as an interval: "[1, inf)" is 1 or more, "(0, 1]" above 0 and up to 1."""

    interval: str

    def __contains__(self, value: float) -> bool:
        low, high = (float(bound) for bound in self.interval[1:-1].split(","))
        above = value >= low if self.interval[0] == "[" else value > low
        return above and (value <= high if self.interval[-1] == "]" else value < high)

    def __str__(self) -> str:
        low, high = (bound.strip() for bound in self.interval[1:-1].split(","))
        if high == "inf":
            return f"{low} or more" if self.interval[0] == "[" else f"a finite number above {low}"
        return f"{low} {'<=' if self.interval[0] == '[' else '<'} x {'<=' if self.interval[-1] == ']' else '<'} {high}"


class NoEffect:
    """A mark: the field has no effect while `other` has one of `values`; without values: any but "" and None."""

    def __init__(self, other: str, *values: Any):
        self.other, self.values = other, values

    def __contains__(self, value: Any) -> bool:
        return value in self.values if self.values else value not in ("", None)


class Seldom:
    """A mark: --help leaves the field out while it, and each of the fields `beside`, has its default."""

    def __init__(self, *beside: str):
        self.beside = beside


@functools.cache
def hints_of(kind: type) -> dict[str, Any]:
    """The type of every field with its marks, also where annotations are text (from __future__ import annotations)."""
    return get_type_hints(kind, include_extras=True)


@functools.cache
def declaring(kind: type) -> dict[str, type]:
    """For each field the class that declares it: of several, the first in the MRO, whose default is the field's."""
    nearest_last = reversed(kind.__mro__)
    declared = {name: base for base in nearest_last for name in inspect.get_annotations(base)}
    return {field.name: declared[field.name] for field in dataclasses.fields(kind)}


def plain(hint: Any) -> Any:
    """The type without its marks."""
    return get_args(hint)[0] if hasattr(hint, "__metadata__") else hint


@functools.cache
def marks(kind: type, name: str) -> tuple:
    """The metadata of a field in Annotated[type, ...]. A field redeclared without Annotated keeps its parent's."""
    for base in kind.__mro__:
        if name in inspect.get_annotations(base) and hasattr(hint := hints_of(base)[name], "__metadata__"):
            return hint.__metadata__
    return ()


def no_effect(config: Any, name: str) -> NoEffect | None:
    """The mark by which a field has no effect in this configuration; None where it has one."""
    found = (mark for mark in marks(type(config), name) if isinstance(mark, NoEffect))
    return next((mark for mark in found if getattr(config, mark.other, None) in mark), None)


def field_doc(kind: type, name: str) -> str:
    """The docstring below a field. A field redeclared without one keeps its parent's."""
    return next((docs[name] for base in kind.__mro__ if name in (docs := field_docs(base))), "")


@functools.cache
def field_docs(kind: type) -> dict[str, str]:
    """The string below each field of a class, from its source; empty where there is none to be had."""
    try:
        (written,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    except (OSError, TypeError, SyntaxError):  # typed into a prompt, or with less indentation inside a function
        return {}
    pairs = [(one.target.id, after) for one, after in pairwise(written.body) if isinstance(one, ast.AnnAssign)]
    docs = [(name, after.value) for name, after in pairs if isinstance(after, ast.Expr)]
    return {name: " ".join(doc.value.split()) for name, doc in docs if isinstance(doc, ast.Constant)}


def is_supported(kind: Any) -> bool:
    """Whether a command line and JSON can both hold values of this type."""
    inner = get_args(kind)
    if get_origin(kind) is Literal:
        return all(isinstance(one, str | int) for one in inner)
    if get_origin(kind) in (Union, types.UnionType):
        return all(one is types.NoneType or is_supported(one) for one in inner)
    if get_origin(kind) is tuple:
        return all(one is Ellipsis or one in (bool, int, float, str) for one in inner)
    return kind in (bool, int, float, str)


def fits(value: Any, kind: Any) -> bool:
    """Whether a value is of a supported type. numpy's numbers are numbers, and a bool is none."""
    inner = get_args(kind)
    if get_origin(kind) is Literal:
        return value in inner
    if get_origin(kind) in (Union, types.UnionType):
        return any(fits(value, one) for one in inner)
    if get_origin(kind) is tuple:
        if not isinstance(value, tuple):
            return False
        inner = (inner[0],) * len(value) if inner[1:] == (Ellipsis,) else inner
        return len(value) == len(inner) and all(map(fits, value, inner))
    if kind in (int, float):
        if kind is float and isinstance(value, int) and abs(value) > sys.float_info.max:  # an int of JSON
            return False
        return isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    return isinstance(value, kind)


def type_name(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    return str(kind) if get_args(kind) else kind.__name__


def values_in(value: Any) -> tuple:
    """The items of a tuple, or (value,); () for None."""
    return value if isinstance(value, tuple) else () if value is None else (value,)


def check_values(config: Any) -> list[str]:
    """Values of another type, bytes that are no text, and numbers outside the bounds of their field, as sentences."""
    problems = []
    for name in (field.name for field in dataclasses.fields(config)):
        value, kind = getattr(config, name), plain(hints_of(type(config))[name])
        bounds = next((mark for mark in marks(type(config), name) if isinstance(mark, Range)), None)
        if not fits(value, kind):
            problems.append(f"{name} is {value!r:.60}; expected {type_name(kind)}")
        elif any(isinstance(text, str) and re.search("[\ud800-\udfff]", text) for text in values_in(value)):
            problems.append(f"{name} is {value!r:.60}; expected UTF-8 text")  # non-UTF-8 bytes of the command line
        elif bounds and not all(number in bounds for number in values_in(value)):
            problems.append(f"{name} is {value}; expected {bounds}".replace(" x ", f" {name} "))
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
