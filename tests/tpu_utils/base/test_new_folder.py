"""A folder written aside: whole or not at all, whoever else is there."""

import os
import re
import shutil

import pytest
from mutations import a_full_disk

from tpu_utils.base import new_folder
from tpu_utils.base.errors import InputError, SaveError
from tpu_utils.base.new_folder import write_together, written_aside


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def killed_while_it_writes(target):
    """Leaves what a process leaves that is killed there."""
    if not (child := os.fork()):
        with written_aside(target) as aside:
            (aside / "half").mkdir()
            os._exit(9)  # nothing of it is cleaned up
    assert os.waitpid(child, 0)[1] == 9 << 8


def write(target):
    with written_aside(target) as aside:
        (aside / "file").write_text("whole")


def test_what_a_kill_left_goes_and_what_is_others_stays(tmp_path):
    others = [f".writing_mine{end}" for end in ("", "_2", "_0123456789abcdeg", "_too_0123456789abcdef")]
    for name in others:
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes").write_text("a user's")
    (tmp_path / ".writing_mine_0123456789abcdef").symlink_to(tmp_path / others[0])
    killed_while_it_writes(tmp_path / "mine")
    left = set(names_in(tmp_path)) - {*others, ".writing_mine_0123456789abcdef"}
    assert len(left) == 1 and re.fullmatch(r"\.writing_mine_[0-9a-f]{16}", *left)
    write(tmp_path / "mine")
    assert names_in(tmp_path) == sorted([*others, ".writing_mine_0123456789abcdef", "mine"])
    assert all((tmp_path / name / "notes").exists() for name in others)
    assert names_in(tmp_path / "mine") == ["file"]


def test_of_two_that_write_one_target_the_second_is_refused(tmp_path):
    with written_aside(tmp_path / "mine") as aside:
        with pytest.raises(InputError, match=r"mine is being written by another process; wait for it, or choose"):
            write(tmp_path / "mine")
        assert aside.is_dir()
        write(tmp_path / "other")
    assert names_in(tmp_path) == ["mine", "other"]


def make_folder(path):
    path.mkdir()
    (path / "file").write_text("first")


@pytest.mark.parametrize("make", [make_folder, lambda path: path.touch(), lambda path: path.symlink_to(path.parent)])
def test_a_target_that_came_to_be_meanwhile_is_kept(tmp_path, make):
    said = r"mine cannot take the place of .*; another process may have written it"
    with pytest.raises(InputError, match=said), written_aside(tmp_path / "mine"):
        make(tmp_path / "mine")
    assert names_in(tmp_path) == ["mine"]


ALONE = OSError(28, "No space left on device")


@pytest.mark.parametrize("error", [ALONE, shutil.Error([("a", "b", str(ALONE))]), OSError(122, "Disk quota exceeded")])
def test_a_tmp_path_is_named_with_the_target(tmp_path, error):
    said = "mine cannot be written: (No space left on device|Disk quota exceeded); nothing is left of it; make room"
    with pytest.raises(SaveError, match=said), written_aside(tmp_path / "mine"):
        raise error
    assert not names_in(tmp_path)


def test_files_of_a_folder_that_a_kill_parts_are_no_mixture(tmp_path, monkeypatch):
    write_together(tmp_path / "mine", {"a": b"old", "b": b"old"})
    moved = new_folder.Path.replace
    dies = lambda path, to: 1 / 0 if to.parent == tmp_path / "mine" else moved(path, to)  # noqa: E731
    monkeypatch.setattr(new_folder.Path, "replace", dies)
    with pytest.raises(ZeroDivisionError):
        write_together(tmp_path / "mine", {"a": b"new", "b": b"new"})
    assert names_in(tmp_path / "mine") == ["b"]


def test_of_two_that_write_into_one_folder_the_second_is_refused(tmp_path, monkeypatch):
    """What it put there was taken for the first one's: a tokenizer of the one with the settings of the other."""
    written = new_folder.write_atomically

    def meets_another(path, content):
        monkeypatch.setattr(new_folder, "write_atomically", written)
        with pytest.raises(InputError, match=r"mine is being written by another process; wait for it"):
            write_together(tmp_path / "mine", {"a": b"second", "b": b"second"})
        written(path, content)

    monkeypatch.setattr(new_folder, "write_atomically", meets_another)
    write_together(tmp_path / "mine", {"a": b"first", "b": b"first"})
    assert {path.name: path.read_bytes() for path in (tmp_path / "mine").iterdir()} == {"a": b"first", "b": b"first"}


def test_files_of_a_folder_are_all_written_or_none(tmp_path):
    folder, new = tmp_path / "mine", {"a": b"new", "b": b"new"}
    write_together(folder, {"a": b"old", "c": b"stays"})
    write_together(folder, new)
    for name in ("a", "b"):
        with a_full_disk(), pytest.raises(OSError, match=f"File too large: '.*/{name}'"):
            write_together(folder, {"a": b"newer", "b": b"newer"} | {name: b"." * 2**20})
        with a_full_disk(), pytest.raises(OSError):
            write_together(tmp_path / "other", {"a": b"newer", "b": b"newer"} | {name: b"." * 2**20})
    assert names_in(tmp_path) == ["mine"] and names_in(folder) == ["a", "b", "c"]
    assert {name: (folder / name).read_bytes() for name in new} == new
