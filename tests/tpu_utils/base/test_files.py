"""Files from outside: what is opened, how far it is read, what is said of the rest."""

import json
import os
import socket

import pytest
from mutations import NO_OBJECT, NOT_JSON, a_full_disk, at_most, make_irregular, mutated_json, no_hang, refusals

from tpu_utils.base.errors import InputError
from tpu_utils.base.files import lines_of, open_regular, parse_json, read_json
from tpu_utils.base.writing import write_atomically


@pytest.mark.parametrize("kind", ["FIFO", "folder", "character device", "nothing"])
def test_only_a_regular_file_is_opened(tmp_path, kind):
    path = make_irregular(tmp_path / "x", kind)
    said = "no such file; expected a thing" if kind == "nothing" else f"is a {kind}; expected a thing"
    with no_hang(), pytest.raises(InputError, match=f"{path}.*{said}"):
        open_regular(path, "a thing")


def test_a_socket_and_names_that_cannot_be_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as place:
        place.bind("s")
        with pytest.raises(InputError, match="s is a socket"):
            open_regular(tmp_path / "s", "a thing")
    (tmp_path / "loop").symlink_to("loop")
    for name in ("n" * 300, "loop", "s/x", "/proc/self/mem"):  # the last one says so when it is read
        with pytest.raises(InputError, match=r"cannot be read: .*; expected a thing"):
            open_regular(tmp_path / name, "a thing")


def test_a_pointer_of_git_lfs_is_named(tmp_path):
    """Its text was trained on; a tokenizer and weights were called damaged."""
    path = tmp_path / "a.txt"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
    with pytest.raises(InputError, match="is a pointer that Git LFS left in its place; expected a text; run git lfs"):
        open_regular(path, "a text")


def test_a_link_is_followed(tmp_path):
    (tmp_path / "x").write_bytes(b"content")
    (tmp_path / "link").symlink_to("x")
    with open_regular(tmp_path / "link", "a thing") as file:
        assert file.read() == b"content"


def test_a_line_that_is_too_long_is_skipped(tmp_path):
    path = tmp_path / "x"
    for content, found in (
        (b"ab\nabcdefgh\nc\n", [b"ab\n", b"\n", b"c\n"]),
        (b"a\r\nabc\nabcd\nabcde", [b"a\r\n", b"\n", b"\n", b""]),
        (b"abcd", [b""]),
        (b"a\n\nabc", [b"a\n", b"\n", b"abc"]),
        (b"", []),
    ):
        path.write_bytes(content)
        with path.open("rb") as file:
            assert list(lines_of(file, 4)) == found


def test_json_is_an_object_or_refused(tmp_path):
    path = tmp_path / "x.json"
    for content in [*NOT_JSON, *NO_OBJECT]:
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"x.json .*; expected .*a thing"):
            read_json(path, "a thing")
    path.write_bytes(b" " * 300 + b"{}")
    assert read_json(path, "a thing") == {}
    with at_most(100_000), pytest.raises(InputError, match="has 302 bytes; expected 301 at most, a thing"):
        read_json(path, "a thing", 301)


def test_no_damage_of_json_is_a_crash(tmp_path):
    value = {"seed": 0, "rate": 1e-3, "name": "x", "inner": {"a": [1, 2], "b": None}}
    path = tmp_path / "x.json"
    assert 50 < refusals(path, mutated_json(value, 500), lambda: read_json(path, "a thing").keys()) < 450
    assert parse_json(json.dumps(value).encode()) == value


@pytest.mark.parametrize("put", [os.mkfifo, lambda aside: aside.symlink_to("other")])
def test_what_lies_in_the_way_of_a_write_is_not_followed(tmp_path, put):
    """Whoever made the folder may have put a FIFO or a link at the name that a file is written under first."""
    (tmp_path / "other").write_bytes(b"untouched")
    put(tmp_path / "x.writing")
    with no_hang():
        write_atomically(tmp_path / "x", b"new")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"x": b"new", "other": b"untouched"}


def test_a_byte_order_mark_is_passed_over():
    """As editors of Windows write it. Only in front, and once."""
    mark = b"\xef\xbb\xbf"
    assert parse_json(mark + b'{"a": "\xef\xbb\xbfb"}') == {"a": "\ufeffb"}
    for content in (mark * 2 + b"{}", b"{}" + mark, mark):
        with pytest.raises(ValueError):
            parse_json(content)


@pytest.mark.parametrize("in_parts", [False, True])
def test_a_write_without_room_leaves_nothing_and_says_of_what(tmp_path, in_parts):
    path = tmp_path / "x"
    write_atomically(path, b"old")
    parts = [b"." * 2**18] * 8
    with a_full_disk(), pytest.raises(OSError, match=r"File too large: '.*/x'"):
        write_atomically(path, parts if in_parts else b"".join(parts))
    assert [each.name for each in tmp_path.iterdir()] == ["x"] and path.read_bytes() == b"old"


def test_parts_that_end_in_an_error_leave_nothing(tmp_path):
    def parts():
        yield b"first"
        raise InputError("the second one is wrong")

    with pytest.raises(InputError):
        write_atomically(tmp_path / "x", parts())
    assert not [*tmp_path.iterdir()]
