"""State that is sharded over devices: saved from one mesh, loaded on another; damage, foreign content, processes."""

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from processes import free_port, run, start
from test_checkpoint import Payload, alter, truncate
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from tpu_utils.checkpoint import Checkpoints, DamagedCheckpoint, read_checkpoint
from tpu_utils.errors import CheckpointError
from tpu_utils.files import crc32_of

SCRIPT = "tests/sharded_state.py"
FILES = [".metadata", "__0_0.distcp", "done", "state.pt"]


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
    assert sorted(path.name for path in (tmp_path / "step_00000007").iterdir()) == ["done", "state.pt"]
    result = run(SCRIPT, "load", tmp_path, "8", "2x2x2")
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["graphs", "0", "identical"]


def test_it_is_whole_where_there_is_no_mesh(saved):
    """As generate_tpu.py and convert_llmc.py read it; and every value is on disk once, not once for each equal copy."""
    assert sorted(path.name for path in (saved / "step_00000007").iterdir()) == FILES
    state = Checkpoints(saved, 3).load_for_resume("must")
    model, optimizer = state["model"], state["optimizer"][0]
    assert model["some"].dtype == torch.bfloat16 and model["uneven"].shape == (5, 3)
    for name, tensor in model.items():
        assert tensor.device.type == "cpu" and torch.equal(tensor, optimizer[name]) and tensor.any()
    left = Checkpoints(saved, 3).load_for_resume("must", whole=False)["model"]
    assert {name for name, tensor in left.items() if tensor.is_meta} == {"all", "some", "other", "uneven"}
    assert left["all"].shape == (16, 8)


@pytest.mark.parametrize("name", [name for name in FILES if name != "done"])
@pytest.mark.parametrize("damage", [truncate, alter, Path.unlink])
def test_a_damaged_file_is_named_and_the_checkpoint_before_is_used(checkpoints, name, damage, capsys):
    shutil.copytree(checkpoints.path(7), checkpoints.path(9))
    damage(checkpoints.path(9) / name)
    with pytest.raises(DamagedCheckpoint, match=rf"step_00000009.*{name}"):
        read_checkpoint(checkpoints.path(9), whole=False)
    assert checkpoints.load_for_resume("must")["step"] == 7
    assert name in capsys.readouterr().err


def mark(folder):
    """A done marker that fits the files, as anyone can write it."""
    sums = {p.name: {"bytes": p.stat().st_size, "crc32": crc32_of(p)} for p in folder.iterdir() if p.name != "done"}
    (folder / "done").write_text(json.dumps({"step": 7, **sums.pop("state.pt"), "cut": sums}))


def zeros_like(tensors):
    return {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items()}


def with_payload(metadata, target):
    metadata.planner_data = Payload(target)


def with_pickled_object(metadata, target):
    """DCP would unpickle the bytes of an entry that says it is no tensor."""
    metadata.state_dict_metadata["model/all"] = BytesStorageMetadata()


def with_file_elsewhere(metadata, target):
    next(iter(metadata.storage_data.values())).relative_path = "../../elsewhere"


def with_a_part_missing(metadata, target):
    metadata.state_dict_metadata["model/all"].chunks.pop()


@pytest.mark.parametrize("change", [with_payload, with_pickled_object, with_file_elsewhere, with_a_part_missing])
@pytest.mark.parametrize("whole", [True, False])
def test_a_foreign_index_is_refused_and_nothing_of_it_is_run(checkpoints, tmp_path, change, whole):
    folder = checkpoints.path(7)
    metadata = pickle.loads((folder / ".metadata").read_bytes())  # of this test's own making
    change(metadata, tmp_path / "owned")
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    mark(folder)
    with pytest.raises(CheckpointError, match="nothing of it was run"):
        state = checkpoints.load_for_resume("must", whole)
        checkpoints.restore(state, {"model": zeros_like(state["model"])})
    assert not (tmp_path / "owned").exists()


def test_a_part_with_code_in_it_is_refused_and_not_run(checkpoints, tmp_path):
    folder = checkpoints.path(7)
    content = pickle.dumps(Payload(tmp_path / "owned"))
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.offset, info.length = 0, len(content)
    (folder / "__0_0.distcp").write_bytes(content)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    mark(folder)
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoints.load_for_resume("must")
    assert not (tmp_path / "owned").exists()


def test_another_model_is_refused_before_anything_changes(checkpoints):
    state = checkpoints.load_for_resume("must", whole=False)
    targets = zeros_like(state["model"])
    targets["all"] = torch.zeros(8, 16)
    with pytest.raises(CheckpointError, match=r"model/all is float32\[8, 16\], was float32\[16, 8\]"):
        checkpoints.restore(state, {"model": targets})
    del targets["all"]
    with pytest.raises(CheckpointError, match=r"model/all is absent, was float32\[16, 8\]"):
        checkpoints.restore(state, {"model": targets})
    assert not any(tensor.any() for tensor in targets.values())


def test_what_the_planner_loses_is_never_marked_as_done(tmp_path):
    """torch_xla 2.9's SPMDSavePlanner takes equal parts for duplicates of each other and drops them all."""
    result = run(SCRIPT, "save_equal_parts", tmp_path / "checkpoints", "8", "2x2x2")
    assert result.returncode == 1 and "the shards of model/some hold 0 values, expected 128" in result.stderr, (
        result.stderr
    )
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
    assert names == [".metadata", "__0_0.distcp", "__1_0.distcp", "done", "state.pt"]
    result = run(SCRIPT, "load", tmp_path / "shared", "8", "2x2x2")
    assert result.returncode == 0 and "identical" in result.stdout, result.stderr
    alter(tmp_path / "shared" / "step_00000007" / "__1_0.distcp")
    with pytest.raises(DamagedCheckpoint, match=r"__1_0\.distcp"):
        read_checkpoint(tmp_path / "shared" / "step_00000007")


def test_hosts_without_a_common_folder_are_told_and_nothing_is_marked(tmp_path):
    for error, code in save_by_two([tmp_path / "a", tmp_path / "b"]):
        assert code == 1 and "needs a --run_dir that all of them share" in error, error
    assert not list(tmp_path.glob("*/*/done"))
