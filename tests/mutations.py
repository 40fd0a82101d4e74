"""Damage for files from outside: seeded, so that every run of the tests sees the same."""

import contextlib
import copy
import json
import os
import resource
import signal
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from tpu_utils.base.errors import InputError

DEEP = "[" * 100_000
NOT_JSON = [b"", b"\xff\xfe\x00", DEEP.encode(), b'{"a":' * 100_000, b"\0" * 50, b"{", b"nul", b'"\xed\xa0\x80"']
NO_OBJECT = [b"null", b"7", b"[]", b'"x"', b"true", b"NaN", b"[[]]"]
VALUES = [None, True, "7", "", 7.5, -1, 10**30, -(10**30), 0, [], {}, [1], {"a": 1}, "\ud800"]
VALUES += [float("nan"), float("inf"), -float("inf"), 1e308, -1e308, 1e-320, 1e39]


def mutated(content: bytes, count: int, seed: int = 0) -> Iterator[bytes]:
    """count damaged copies: bytes changed, left out, put in or repeated, words of extreme value, truncated, longer."""
    random = np.random.default_rng(seed)
    words = [0, 1, 255, 65535, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1]
    for number in range(count):
        found = bytearray(content)
        for _ in range(1 + int(random.integers(3))):
            at = int(random.integers(len(found) + 1))
            size = int(random.integers(1, 9))
            kind = (number + int(random.integers(2))) % 8
            if kind == 0:
                found[at : at + 1] = random.bytes(1)
            elif kind == 1:
                found[at : at + size] = b""
            elif kind == 2:
                found[at:at] = random.bytes(size)
            elif kind == 3:
                found[at:at] = found[at : at + 50 * size]
            elif kind == 4:
                width, end = int(random.choice([2, 4, 8])), str(random.choice(["little", "big"]))
                found[at : at + width] = (words[random.integers(len(words))] % 2 ** (8 * width)).to_bytes(width, end)
            elif kind == 5 and at < len(found):
                found[at] ^= 1 << int(random.integers(8))
            elif kind == 6:
                del found[at:]
            else:
                found += random.bytes(size)
        yield bytes(found)


def mutated_json(value: dict, count: int, seed: int = 0) -> Iterator[bytes]:
    """count copies of an object as JSON: a field replaced or left out, the whole replaced, or bytes damaged."""
    random = np.random.default_rng(seed)
    for number, damaged in enumerate(mutated(json.dumps(value).encode(), count, seed)):
        if number % 4 == 0:
            yield damaged
        elif number % 16 == 1:
            others = NOT_JSON + NO_OBJECT
            yield others[random.integers(len(others))]
        else:
            changed = copy.deepcopy(value)
            inner = changed
            while True:
                name = list(inner)[random.integers(len(inner))]
                if not (isinstance(inner[name], dict) and inner[name]) or random.integers(2):
                    break
                inner = inner[name]
            if number % 4 == 3:
                del inner[name]
            else:
                inner[name] = VALUES[random.integers(len(VALUES))]
            yield json.dumps(changed).encode()


@contextlib.contextmanager
def no_hang(seconds: float = 20):
    """Fails what waits for ever, as opening a FIFO does: a limit that only a hang meets."""

    def stop(*_):
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def refusals(path: Path, contents: Iterable[bytes], read: Callable[[], object], named: str = "") -> int:
    """How many contents of a file read() refuses by an InputError that names it; any other error is a crash. named:
    what messages call the file, where it is not its name."""
    refused = 0
    for content in contents:
        path.write_bytes(content)
        with no_hang():
            try:
                read()
            except InputError as error:
                assert (named or path.name) in str(error), error
                refused += 1
    return refused


@contextlib.contextmanager
def at_most(num_bytes: int):
    """Fails when Python and numpy held more than this at once inside the block, beside what they held before."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= num_bytes, f"{peak:,} bytes at once; expected {num_bytes:,} at most"


def make_irregular(path: Path, kind: str) -> Path:
    """A FIFO, a folder, or links to a device or to nothing, in place of a file."""
    path.unlink(missing_ok=True)
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to({"character device": "/dev/null", "nothing": path.parent / "nothing"}[kind])
    return path


@contextlib.contextmanager
def a_full_disk():
    """No file of this process grows beyond 100 kB."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
