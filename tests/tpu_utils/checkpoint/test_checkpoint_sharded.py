"""State that is sharded over devices: saved from one mesh, loaded on another; damage, foreign content, processes."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from processes import free_port, run, start
from run_files import mark, reader_of
from test_checkpoint import alter, truncate

from tpu_utils.base.errors import CheckpointError, DamagedCheckpoint
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


@pytest.mark.parametrize("devices, mesh", [(8, "8x1x1"), (4, "1x2x2"), (1, "1x1x1")])
def test_loaded_on_another_mesh_or_device_count_it_is_bit_identical(saved, devices, mesh):
    result = run(SCRIPT, "load", saved, devices, mesh)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["graphs", "0", "identical"]


def test_saved_on_one_device_and_loaded_on_eight(tmp_path):
    assert run(SCRIPT, "save", tmp_path, "1", "1x1x1").returncode == 0
    names = sorted(path.name for path in (tmp_path / "step_00000007").iterdir())
    assert names == ["done", "state.json", "state.safetensors"]
    result = run(SCRIPT, "load", tmp_path, "8", "2x2x2")
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["graphs", "0", "identical"]


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


@pytest.mark.parametrize("name", [name for name in FILES if name != "done"])
@pytest.mark.parametrize("damage", [truncate, alter, Path.unlink])
def test_a_damaged_file_is_named_and_the_checkpoint_before_is_used(checkpoints, name, damage, capsys):
    shutil.copytree(checkpoints.path(7), checkpoints.path(9))
    marker = (checkpoints.path(9) / "done").read_text().replace('"step": 7', '"step": 9')
    (checkpoints.path(9) / "done").write_text(marker)
    damage(checkpoints.path(9) / name)
    with pytest.raises(DamagedCheckpoint, match=rf"step_00000009.*{name}"):
        read_checkpoint(checkpoints.path(9))
    assert reader_of(checkpoints).load_for_resume("must").step == 7
    assert name in capsys.readouterr().err


def zeros_like(tensors):
    return {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items()}


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
    """Its marker fits: whoever can write one file can write both."""
    shutil.copytree(checkpoints.path(7), checkpoints.path(9))
    index = json.loads((checkpoints.path(7) / "state.json").read_text())
    index["step"] = 9
    INDEX_CHANGES[change](index["tensors"])
    (checkpoints.path(9) / "state.json").write_text(json.dumps(index))
    marker = json.loads((checkpoints.path(9) / "done").read_text())
    (checkpoints.path(9) / "done").write_text(json.dumps({**marker, "step": 9}))
    mark(checkpoints.path(9))
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


@pytest.mark.parametrize("change", HEADER_CHANGES)
@pytest.mark.parametrize("file", [name for name in FILES if "safetensors" in name])
def test_a_header_that_does_not_fit_its_file_is_refused_before_memory_is_taken(checkpoints, change, file, monkeypatch):
    folder = checkpoints.path(7)
    rewrite(folder / file, HEADER_CHANGES[change])
    mark(folder)
    real = tensor_reading.safe_open
    opened = lambda path, **how: real(path, **how) if path.name != file else pytest.fail("mapped")  # noqa: E731
    monkeypatch.setattr(tensor_reading, "safe_open", opened)
    with pytest.raises(DamagedCheckpoint, match="step_00000007 is damaged"):
        read_checkpoint(folder)


REFUSED_BY_THE_LIBRARY = {
    "metadata that is a number": lambda h: h.update(__metadata__=5),
    "a name that is no text": lambda h: json.dumps(h).replace(next(n for n in h if n != "__metadata__"), "\\ud800"),
    "a shape whose size wraps": lambda h: first_of(h).update(shape=[2**61, 2**61, 0], data_offsets=[0, 0]),
}


@pytest.mark.parametrize("change", REFUSED_BY_THE_LIBRARY)
def test_what_the_library_will_refuse_is_refused_before_anything_is_resumed(checkpoints, change):
    rewrite(checkpoints.path(7) / "state.safetensors", REFUSED_BY_THE_LIBRARY[change])
    mark(checkpoints.path(7))
    with pytest.raises(DamagedCheckpoint, match="step_00000007 is damaged"):
        read_checkpoint(checkpoints.path(7))


def test_another_model_is_refused_before_anything_changes(checkpoints):
    state = reader_of(checkpoints).load_for_resume("must")
    targets = zeros_like(state.part("model"))
    targets["all"] = torch.zeros(8, 16)
    with pytest.raises(CheckpointError, match=r"model/all is float32\[8, 16\], was float32\[16, 8\]"):
        reader_of(checkpoints).restore(state, {"model": targets})
    del targets["all"]
    with pytest.raises(CheckpointError, match=r"model/all is absent, was float32\[16, 8\]"):
        reader_of(checkpoints).restore(state, {"model": targets})
    assert not any(tensor.any() for tensor in targets.values())


def test_shards_that_nobody_wrote_are_never_marked_as_done(tmp_path):
    result = run(SCRIPT, "save_a_shard_less", tmp_path / "checkpoints", "8", "2x2x2")
    assert result.returncode == 1, result.stderr
    assert re.search(r"the shards of model/\w+ hold \d+ values, expected \d+, each of them once", result.stderr)
    assert Checkpoints(tmp_path / "checkpoints", 3).steps() == []


# ------------------------------------------------------------------------------------------------- several processes
def save_by_two(folders):
    """Two processes that each own half of the shards save to their folder. [(exit code, stderr)]"""
    port = free_port()
    both = [start(SCRIPT, f"save_as_{i}_of_2_at_{port}", folder, 4, "1x2x2") for i, folder in enumerate(folders)]
    return [(process.communicate()[1], process.returncode) for process in both]


def test_two_processes_write_their_own_parts_of_one_checkpoint(tmp_path):
    for error, code in save_by_two([tmp_path / "shared"] * 2):
        assert code == 0, error
    names = sorted(path.name for path in (tmp_path / "shared" / "step_00000007").iterdir())
    assert names == ["done", "shards_00000.safetensors", "shards_00001.safetensors", *FILES[2:]]
    result = run(SCRIPT, "load", tmp_path / "shared", "8", "2x2x2")
    assert result.returncode == 0 and "identical" in result.stdout, result.stderr
    alter(tmp_path / "shared" / "step_00000007" / "shards_00001.safetensors")
    with pytest.raises(DamagedCheckpoint, match=r"shards_00001\.safetensors"):
        read_checkpoint(tmp_path / "shared" / "step_00000007")


def test_hosts_without_a_common_folder_are_told_and_nothing_is_marked(tmp_path):
    for error, code in save_by_two([tmp_path / "a", tmp_path / "b"]):
        assert code == 1 and "needs a --run_dir that all of them share" in error, error
    assert not list(tmp_path.glob("*/*/done"))


def test_two_processes_restore_what_the_first_alone_has_and_read_shards_themselves(saved, tmp_path):
    """The second one's folder has the shards of a shared disk, and not the file of the first process."""
    second = tmp_path / "second"
    shutil.copytree(saved, second)
    (second / "step_00000007" / "state.safetensors").unlink()
    port = free_port()
    both = [start(SCRIPT, f"load_as_{i}_of_2_at_{port}", f, 4, "1x2x2") for i, f in enumerate((saved, second))]
    for process in both:
        out, err = process.communicate()
        assert process.returncode == 0 and "graphs 0\nidentical" in out, out + err
