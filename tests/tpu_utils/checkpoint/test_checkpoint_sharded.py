"""State that is sharded over devices: saved from one mesh, loaded on another; damage, foreign content, processes."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from processes import free_port, run, start
from run_files import mark, reader_of
from test_checkpoint import alter, as_link, truncate

from tpu_utils.base.errors import DamagedCheckpoint
from tpu_utils.checkpoint import Checkpoints, tensor_reading
from tpu_utils.checkpoint.saved import read_checkpoint

SCRIPT = "tests/sharded_state.py"
SHARDED = ("all", "some", "other", "uneven")
FILES = ["done", "shards_00000.safetensors", "state.json", "state.safetensors"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of step 7 by eight devices, data 2 x fsdp 2 x tensor 2."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    result = run(SCRIPT, "save", folder, "8", "2x2x2")
    assert result.returncode == 0, result.stderr
    assert "graphs 0" in result.stdout, "nothing is gathered: what is sharded goes to the host as it is"
    return folder


@pytest.fixture
def checkpoints(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "checkpoints")
    return Checkpoints(tmp_path / "checkpoints", 3)


def assert_identical_on(devices: int, mesh: str, folder: Path) -> None:
    result = run(SCRIPT, "load", folder, devices, mesh)
    assert (result.returncode, result.stdout) == (0, "graphs 0\nidentical\n"), result.stderr


@pytest.mark.parametrize("devices, mesh", [(8, "8x1x1"), (4, "1x2x2"), (1, "1x1x1")])
def test_loaded_on_another_mesh_or_device_count_it_is_bit_identical(saved, devices, mesh):
    assert_identical_on(devices, mesh, saved)


def test_saved_on_one_device_and_loaded_on_eight(tmp_path):
    assert run(SCRIPT, "save", tmp_path, "1", "1x1x1").returncode == 0
    assert not [*tmp_path.glob("*/shards*")]
    assert_identical_on(8, "2x2x2", tmp_path)


def test_it_is_whole_where_there_is_no_mesh(saved):
    """As the tools read it; and every value is on disk once, not once for each equal copy."""
    assert sorted(path.name for path in (saved / "step_00000007").iterdir()) == FILES
    found = reader_of(Checkpoints(saved, 3)).load_for_resume("must")
    model, optimizer = found.part("model"), found.part("optimizer")
    assert model["some"].dtype == torch.bfloat16 and model["uneven"].shape == (5, 3)
    for name, tensor in model.items():
        assert tensor.device.type == "cpu" and torch.equal(tensor, optimizer[f"0/{name}"]) and tensor.any()
    sharded = {path for path, entry in found.entries.items() if entry.shards}
    assert sharded == {f"{part}/{name}" for part in ("model", "optimizer/0") for name in SHARDED}
    written = sum((saved / "step_00000007" / file).stat().st_size for file in FILES if "safetensors" in file)
    values = sum(entry.kind.num_bytes for entry in found.entries.values())
    assert values < written < values + 16_000


def as_step_9(checkpoints: Checkpoints, change=lambda tensors: None) -> Path:
    """A copy of the checkpoint, as one of step 9 with a changed index. Its marker fits: who writes one writes both."""
    folder = Path(shutil.copytree(checkpoints.path(7), checkpoints.path(9)))
    for name in ("state.json", "done"):
        content = json.loads((folder / name).read_text()) | {"step": 9}
        if name == "state.json":
            change(content["tensors"])
        (folder / name).write_text(json.dumps(content))
    mark(folder)
    return folder


@pytest.mark.parametrize("damage", [truncate, alter, Path.unlink, as_link])
def test_a_damaged_file_is_named_and_the_checkpoint_before_is_used(checkpoints, damage, capsys):
    damage(as_step_9(checkpoints) / "shards_00000.safetensors")
    assert reader_of(checkpoints).load_for_resume("must").step == 7
    assert re.search(r"step_00000009 is damaged: .*shards_00000\.safetensors", capsys.readouterr().err)


def shards_of(tensors, name="model/all"):
    return tensors[name]["shards"]


INDEX_CHANGES = {
    "a shard elsewhere": lambda t: shards_of(t)[0].update(file="../../elsewhere.safetensors"),
    "an absolute file": lambda t: shards_of(t)[0].update(file="/etc/hosts"),
    "a shard less": lambda t: shards_of(t).pop(),
    "a shard twice": lambda t: shards_of(t).append(shards_of(t)[0]),
    "shards that overlap": lambda t: shards_of(t)[1].update(offsets=[1, 0]),
    "a huge shape": lambda t: t["model/all"].update(shape=[2**61, 8]),
    "a shape beyond numbers": lambda t: t["model/all"].update(shape=[10**40, 8]),
    "a negative shape": lambda t: t["model/all"].update(shape=[-16, 8]),
    "a shape of another length": lambda t: t["model/all"].update(shape=[128]),
    "another type": lambda t: t["model/all"].update(dtype="F64"),
    "an unknown type": lambda t: t["model/all"].update(dtype="torch.float32"),
    "an unknown key": lambda t: t["model/all"].update(code="print()"),
    "a tensor more": lambda t: t.update({"model/more": t["model/all"]}),
    "a tensor less": lambda t: t.pop("model/all"),
    "no shards": lambda t: t["model/all"].update(shards=[]),
    "whole": lambda t: t["model/all"].pop("shards"),
    "no object": lambda t: t.update({"model/all": None}),
}


@pytest.mark.parametrize("change", INDEX_CHANGES)
def test_an_index_that_does_not_fit_its_files_is_passed_over(checkpoints, change, capsys):
    as_step_9(checkpoints, INDEX_CHANGES[change])
    assert reader_of(checkpoints).load_for_resume("must").step == 7
    assert "step_00000009 is damaged" in capsys.readouterr().err


def rewrite(path, change):
    """The file of safetensors with another header, its tensors as they were."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    text = change(header)
    text = (json.dumps(header) if text is None else text).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


def first_of(header):
    return next(entry for name, entry in header.items() if name != "__metadata__")


HEADER_CHANGES = {
    "huge": lambda h: first_of(h).update(shape=[2**40, 2**40]),
    "beyond the file": lambda h: first_of(h).update(shape=[2**20], data_offsets=[0, 2**22]),
    "overlap": lambda h: h.update({name: first_of(h) for name in h}),
    "a shape whose size wraps": lambda h: first_of(h).update(shape=[2**61, 2**61, 0], data_offsets=[0, 0]),
    "negative": lambda h: first_of(h).update(data_offsets=[-4, 0]),
    "no list": lambda h: first_of(h).update(shape=7),
    "true": lambda h: first_of(h).update(shape=[True]),
    "a float": lambda h: first_of(h).update(shape=[4.0]),
    "unknown key": lambda h: first_of(h).update(byteorder="big"),
    "unknown type": lambda h: first_of(h).update(dtype="F4"),
    "twice": lambda h: json.dumps(h)[:-1] + ', "twice": ' + json.dumps(first_of(h)) + ', "twice": {}}',
    "no object": lambda h: "[]",
    "deep": lambda h: "[" * 100_000,
    "empty": lambda h: "",
}


REFUSED_BY_THE_LIBRARY = {
    "metadata that is a number": lambda h: h.update(__metadata__=5),
    "a name that is no text": lambda h: json.dumps(h).replace(next(n for n in h if n != "__metadata__"), "\\ud800"),
}


@pytest.mark.parametrize("change", HEADER_CHANGES | REFUSED_BY_THE_LIBRARY)
@pytest.mark.parametrize("file", [name for name in FILES if "safetensors" in name])
def test_a_header_that_does_not_fit_its_file_is_refused_before_memory_is_taken(checkpoints, change, file, monkeypatch):
    """What the library refuses it refuses now, not at the first read."""
    folder = checkpoints.path(7)
    rewrite(folder / file, (HEADER_CHANGES | REFUSED_BY_THE_LIBRARY)[change])
    mark(folder)
    real, opened = tensor_reading.safe_open, []
    monkeypatch.setattr(tensor_reading, "safe_open", lambda path, **how: opened.append(path.name) or real(path, **how))
    with pytest.raises(DamagedCheckpoint, match="step_00000007 is damaged"):
        read_checkpoint(folder)
    assert (file in opened) == (change in REFUSED_BY_THE_LIBRARY)


def test_shards_that_nobody_wrote_are_never_marked_as_done(tmp_path):
    result = run(SCRIPT, "save_a_shard_less", tmp_path / "checkpoints", "8", "2x2x2")
    assert result.returncode == 1, result.stderr
    assert re.search(r"the shards of model/\w+ hold \d+ values, expected \d+, each of them once", result.stderr)
    assert Checkpoints(tmp_path / "checkpoints", 3).steps() == []


# ------------------------------------------------------------------------------------------------- several processes
def by_two(action: str, *folders: Path) -> list[tuple[int, str, str]]:
    """(exit code, output, errors) of two processes that each own half of the shards, with a folder each."""
    port = free_port()
    both = [start(SCRIPT, f"{action}_as_{i}_of_2_at_{port}", folder, 4, "1x2x2") for i, folder in enumerate(folders)]
    return [(process.wait(), *process.communicate()) for process in both]


def test_two_processes_write_their_own_parts_of_one_checkpoint(tmp_path):
    shared = tmp_path / "shared"
    assert [code for code, *_ in by_two("save", shared, shared)] == [0, 0]
    names = sorted(path.name for path in (shared / "step_00000007").iterdir())
    assert names == ["done", "shards_00000.safetensors", "shards_00001.safetensors", *FILES[2:]]
    assert_identical_on(8, "2x2x2", shared)


def test_hosts_without_a_common_folder_are_told_and_nothing_is_marked(tmp_path):
    for code, _, error in by_two("save", tmp_path / "a", tmp_path / "b"):
        assert code == 1 and "needs a --run_dir that all of them share" in error, error
    assert not list(tmp_path.glob("*/*/done"))


def test_two_processes_restore_what_the_first_alone_has_and_read_shards_themselves(saved, tmp_path):
    """The second one's folder has the shards of a shared disk, and not the file of the first process."""
    second = tmp_path / "second"
    shutil.copytree(saved, second)
    (second / "step_00000007" / "state.safetensors").unlink()
    for code, out, err in by_two("load", saved, second):
        assert (code, out.endswith("graphs 0\nidentical\n")) == (0, True), out + err
