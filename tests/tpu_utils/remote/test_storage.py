"""gs:// run directories: the real client library against emulators, which fail as networks and services do."""

import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest
import torch
from bucket_emulator import FAULTS, BucketEmulator
from google.api_core import exceptions as api_exceptions
from processes import free_port, start, waits
from run_files import assert_identical, in_process, numbers, part_of_state, read_lines, reader_of, state_in
from test_checkpoint import FILES
from test_peers import together

from config import MnistConfig
from tpu_utils.base.errors import InputError, PassingError, SaveError
from tpu_utils.base.process import Peers
from tpu_utils.base.restarts import memory_folder
from tpu_utils.checkpoint import Checkpoints
from tpu_utils.checkpoint.loading import CheckpointReader
from tpu_utils.checkpoint.memory import MemoryCheckpoints
from tpu_utils.device import graphs_compiled
from tpu_utils.options.parsing import parse_command_line
from tpu_utils.record.run_dir import open_run_dir
from tpu_utils.remote import storage
from tpu_utils.remote.storage import Mirror

OPTIONS = ["--num_epochs", "2", "--log_every", "7", "--save_every", "10", "--channels", "4", "--hidden_dim", "16"]
OPTIONS += ["--no_tensorboard"]
LAST = 44
"""Steps of a run with these options."""


@pytest.fixture(scope="module")
def emulator():
    with BucketEmulator() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture(scope="module")
def foreign_url():
    """gcp-storage-emulator. It keeps no preconditions, but shares no misunderstanding with ours."""
    port = free_port()
    options = ["start", "--host", "127.0.0.1", "--port", str(port), "-M", "--default-bucket", "runs", "-q"]
    process = subprocess.Popen([sys.executable, "-m", "gcp_storage_emulator", *options], stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    while process.poll() is None:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(url, timeout=5)
            break
        time.sleep(0.05)
    yield url
    process.kill()


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """machine("a") makes this process and its children work on another, empty machine."""

    def change(name: str) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))

    change("first")
    return change


@pytest.fixture
def bucket(emulator, machine, monkeypatch):
    """The emulator, as what the client library talks to: nothing fails until .plan says otherwise."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", emulator.url)
    monkeypatch.setattr(storage, "REQUEST_SECONDS", 10.0)  # a loaded machine is no fault
    monkeypatch.setattr(storage, "CHUNK_BYTES", 2**20)
    monkeypatch.setattr(storage, "LOG_SECONDS", 0.5)
    limits, quick = storage.limits, dict(initial=0.05, maximum=0.5)
    monkeypatch.setattr(
        storage, "limits", lambda s: (found := limits(s)) | {"retry": found["retry"].with_delay(**quick)}
    )
    emulator.injected.clear()
    yield emulator
    emulator.plan = nothing_fails


def nothing_fails(method: str, path: str) -> None:
    pass


def every(n: int):
    """A plan under which every n-th request fails, in one way after the other."""
    count, lock = 0, threading.Lock()

    def plan(method: str, path: str) -> str | None:
        nonlocal count
        with lock:
            count += 1
            return FAULTS[count // n % len(FAULTS)] if count % n == 0 else None

    return plan


def changes(bucket: BucketEmulator, folder: str) -> list[list]:
    """Every change in gs://runs/folder so far, in order: ["put", name, size] or ["delete", name]."""
    found = [change for change in list(bucket.history) if change[1].startswith(f"{folder}/")]
    return [[kind, name.removeprefix(f"{folder}/"), *size] for kind, name, *size in found]


def marked_steps(bucket: BucketEmulator, folder: str) -> list[int]:
    """Steps whose done marker is in the bucket in the end. Asserts that one is never there without the files."""
    there = set()
    for kind, name, *_ in changes(bucket, folder):
        at, _, file = name.rpartition("/")
        (there.add if kind == "put" else there.discard)(name)
        if f"{at}/done" in there:
            assert f"{at}/state.json" in there, "a marker stands beside a checkpoint without its file"
            assert file in FILES and (kind == "delete" or file == "done"), "changed under its marker"
    return sorted(int(name[17:25]) for name in there if name.endswith("/done"))


def blob_of(folder: str, name: str):
    """The client's view of this object of gs://runs/folder."""
    bucket, prefix = storage.connect(f"gs://runs/{folder}")
    return bucket.blob(prefix + name)


def config(folder: str, **fields) -> MnistConfig:
    return MnistConfig(run_dir=f"gs://runs/{folder}", **fields)


def another_process(folder: str, resume: str = "auto") -> tuple[Path, Mirror]:
    """The run directory as another process would get it from the bucket."""
    opened = config(folder, resume=resume)
    run_dir = open_run_dir(opened)
    return run_dir, Mirror(opened.run_dir, opened.resume, run_dir)


def steps_in_bucket(folder: str) -> list[int]:
    return Checkpoints(another_process(folder)[0] / "checkpoints", 9).steps()


def end_state(folder: str) -> tuple[Path, dict]:
    """The run directory as another process would get it from the bucket, and its newest checkpoint."""
    run_dir, mirror = another_process(folder, "must")
    saved = CheckpointReader(run_dir / "checkpoints", mirror=mirror).load_for_resume("must")
    return run_dir, state_in(saved.folder)


# ---------------------------------------------------------------------------------------------------------- by itself
@pytest.mark.parametrize("foreign", [False, True])
def test_what_is_sent_comes_back_on_another_machine_whatever_the_network_does(
    bucket, foreign, request, machine, monkeypatch
):
    if foreign:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", request.getfixturevalue("foreign_url"))
    else:
        monkeypatch.setattr(storage, "REQUEST_SECONDS", 0.7)  # shorter than a stall
        bucket.plan = every(4)
    run_dir, mirror = another_process("round_trip", "never")
    folder = "checkpoints/step_00000007"
    content = {
        "config.json": b"{}",
        "metrics.jsonl": b'{"step": 7}\n' * 99,
        "tensorboard/events.1": os.urandom(999),
        f"{folder}/state.safetensors": os.urandom(9 * 2**20),
        f"{folder}/shards_00001.safetensors": os.urandom(99),
        f"{folder}/done": b"7",
    }
    for name, data in content.items():
        (run_dir / name).parent.mkdir(parents=True, exist_ok=True)
        (run_dir / name).write_bytes(data)
    with mirror:
        mirror.send(run_dir / folder, keep=2)
    machine("second")
    fetched, mirror = another_process("round_trip", "must")
    mirror.fetch(fetched / folder, {Path(name).name: len(data) for name, data in content.items()})
    found = {p.relative_to(fetched).as_posix(): p.read_bytes() for p in fetched.rglob("*") if p.is_file()}
    assert found == {name: data for name, data in content.items() if not name.startswith("tensorboard")}
    if not foreign:
        assert set(bucket.injected) == set(FAULTS)
        puts = [name for kind, name, *_ in changes(bucket, "round_trip") if kind == "put" and name != "writable"]
        assert sorted(puts) == sorted(content), "a request whose answer was lost was repeated, and stored once"
        assert puts[-1] == f"{folder}/done"


def save(folder: str, *steps: int, keep: int = 3) -> None:
    run_dir, mirror = another_process(folder)
    with mirror:
        checkpoints = Checkpoints(run_dir / "checkpoints", keep, mirror=mirror)
        for step in steps:
            checkpoints.save(step, {"weights": torch.full((100,), float(step))}, {"evaluation": {}})


def test_older_checkpoints_are_deleted_and_one_that_is_saved_again_is_replaced_under_no_marker(bucket, machine):
    save("again", 10, 20, 30, keep=2)
    deleted = [name for kind, name, *_ in changes(bucket, "again") if kind == "delete" and "step_" in name]
    assert deleted == [f"checkpoints/step_00000010/{name}" for name in ("done", "state.json", "state.safetensors")]
    machine("second")
    save("again", 30)
    assert marked_steps(bucket, "again") == [20, 30]
    done = [kind for kind, name, *_ in changes(bucket, "again") if name == "checkpoints/step_00000030/done"]
    assert done == ["put", "delete", "put"]


def test_the_best_checkpoint_stays_in_the_bucket_until_a_better_one_is_there(bucket, machine):
    """Also on a machine that has no more of it than its marker."""
    for name, saves in [("first", [(10, 10), (20, 10)]), ("second", [(30, 10), (40, 10)]), ("third", [(50, 50)])]:
        machine(name)
        run_dir, mirror = another_process("best")
        with mirror:
            checkpoints = Checkpoints(run_dir / "checkpoints", 1, mirror=mirror)
            for step, best in saves:
                checkpoints.write(checkpoints.copy(step, {}, {}, best=best))
                checkpoints.wait()
                assert marked_steps(bucket, "best") == sorted({best, step})


def leave_out_the_marker(folder: str, tmp_path: Path) -> None:
    blob_of(folder, "checkpoints/step_00000020/done").delete()


def change_bytes(folder: str, tmp_path: Path) -> None:
    blob_of(folder, "checkpoints/step_00000020/state.safetensors").upload_from_string(b"other bytes")


def name_a_file_elsewhere(folder: str, tmp_path: Path) -> None:
    blob = blob_of(folder, "checkpoints/step_00000020/done")
    marker = json.loads(blob.download_as_bytes())
    marker["files"]["../../../owned.py"] = marker["files"]["state.json"]
    blob.upload_from_string(json.dumps(marker))


def put_elsewhere(folder: str, tmp_path: Path) -> None:
    """Whoever may write to the bucket would run code here: `...//abs/path.py` was once imported at --resume."""
    outside = "../../owned ..//owned /{place}/owned //{place}/owned a/../../../owned state.json/../../owned".split()
    outside += ["..", ".", "", "state.json/", "\\owned", "x" * 300, "a\nb"]
    sent = 0
    for name in outside:
        for place in ("checkpoints/step_00000020/", "checkpoints/", ""):
            with contextlib.suppress(Exception):  # names that the service itself refuses
                blob = blob_of(folder, f"{place}{name.format(place=tmp_path)}")
                blob.upload_from_string(b"raise SystemExit('code ran')", retry=None)
                sent += 1
    assert sent > 2 * len(outside)


@pytest.mark.parametrize(
    "change, step, said",
    [
        (leave_out_the_marker, 10, ""),
        (change_bytes, 10, "step_00000020"),
        (name_a_file_elsewhere, 10, "its done marker names the file '../../../owned.py'"),
        (put_elsewhere, 20, ""),
    ],
)
def test_what_somebody_else_changed_is_named_and_not_used(bucket, machine, tmp_path, capsys, change, step, said):
    folder = change.__name__
    save(folder, 10, 20)
    change(folder, tmp_path)
    before = set(tmp_path.rglob("*"))
    machine("second")
    run_dir, state = end_state(folder)
    assert state["step"] == step and said in capsys.readouterr().err
    assert {path for path in tmp_path.rglob("*") if not path.is_relative_to(tmp_path / "second")} == before
    assert {path.name for path in run_dir.rglob("*") if path.is_file()} - {"lock"} == {*FILES}
    save(folder, 20)
    assert end_state(folder)[1]["step"] == 20, "it is written again"


@pytest.mark.parametrize("size", [10**5, 9 * 2**20], ids=["at_once", "in_chunks"])
def test_bytes_altered_on_their_way_are_sent_and_fetched_again(bucket, machine, size):
    name, content, altered = "checkpoints/step_00000010", os.urandom(size), []

    def plan(method, path):
        """Alter the first piece of every file's content that goes up, and the first answer with content."""
        kind = next((k for k in ("uploadType=multipart", "upload_id", "alt=media") if k in path), None)
        if kind and [method, kind] not in altered:
            altered.append([method, kind])
            return "alter"
        return None

    run_dir, mirror = another_process(f"altered_{size}")
    (run_dir / name).mkdir(parents=True)
    (run_dir / name / "state.safetensors").write_bytes(content)
    (run_dir / name / "done").write_bytes(os.urandom(10**4))
    bucket.plan = plan
    with mirror:
        mirror.send(run_dir / name, keep=1)
    machine("second")
    run_dir, mirror = another_process(f"altered_{size}", "must")
    altered.clear()
    mirror.fetch(run_dir / name, {"state.safetensors": size})
    assert altered == [["GET", "alt=media"]] and (run_dir / name / "state.safetensors").read_bytes() == content


def test_a_permanent_failure_is_loud_tells_no_secret_and_keeps_the_earlier_checkpoint(
    bucket, machine, monkeypatch, capsys
):
    monkeypatch.setattr(storage, "RETRY_SECONDS", 0.5)
    run_dir, mirror = another_process("permanent")
    bucket.plan = lambda method, path: "503" if method == "PUT" else None  # chunks of large files
    said = "checkpoint step_00000020 could not be uploaded to gs://runs/permanent.* that were complete there still are"
    with pytest.raises(SaveError, match=said), mirror:
        checkpoints = Checkpoints(run_dir / "checkpoints", 3, mirror=mirror)
        checkpoints.save(10, {})
        checkpoints.save(20, {"big": torch.rand(9 * 2**18)})
        checkpoints.save(30, {})
    error = capsys.readouterr().err
    assert "status 503" in error and "secret" not in error
    machine("second")
    bucket.plan = nothing_fails
    assert steps_in_bucket("permanent") == [10]


def test_the_address_of_an_upload_is_not_told():
    error = api_exceptions.BadRequest("PUT https://host/o?uploadType=resumable&upload_id=AHm-b_0+secret%3A: Bad\nmore")
    said = "400 PUT https://host/o?uploadType=resumable&upload_id=...: Bad"
    assert storage.reason(error, "gs://runs/a") == said, "whoever has it may upload"


def test_what_this_machine_had_before_is_gone_but_for_its_lock(bucket):
    run_dir, _ = another_process("stale")
    (run_dir / "checkpoints" / "step_00000099").mkdir(parents=True)
    for name in ("checkpoints/step_00000099/done", "metrics.jsonl", "lock"):
        (run_dir / name).write_text("of a run that the bucket does not have")
    run_dir, mirror = another_process("stale")
    mirror.upload_logs()
    assert [path.name for path in run_dir.iterdir()] == ["lock"]
    assert not any(name.startswith("stale/") for name in bucket.objects)


def test_a_second_process_on_the_same_directory_is_found_out(bucket, machine):
    run_dir, mirror = another_process("shared")
    (run_dir / "metrics.jsonl").write_text("mine\n")
    mirror.upload_logs()
    machine("second")
    elsewhere, second_mirror = another_process("shared")
    assert (elsewhere / "metrics.jsonl").read_text() == "mine\n"
    (elsewhere / "metrics.jsonl").write_text("theirs\n")
    second_mirror.upload_logs()
    (run_dir / "metrics.jsonl").write_text("mine\nmine\n")
    with pytest.raises(SaveError, match=r"gs://runs/shared/metrics.jsonl was changed by something else"):
        mirror.upload_logs()
    assert (another_process("shared")[0] / "metrics.jsonl").read_text() == "theirs\n"


def test_an_interrupted_log_upload_does_not_end_the_run(bucket, monkeypatch, capsys):
    monkeypatch.setattr(storage, "RETRY_SECONDS", 0.1)
    run_dir, mirror = another_process("logs")
    (run_dir / "config.json").write_text("{}")
    bucket.plan = lambda method, path: "503" if "upload" in path else None
    said = []
    with mirror:
        waits(lambda: said.append(capsys.readouterr().err) or "its log files could not be uploaded" in "".join(said))
        bucket.plan = nothing_fails
    with pytest.raises(InputError, match="gs://runs/logs already holds a run; choose another, or continue it with"):
        open_run_dir(config("logs"))


# ------------------------------------------------------------------------------------------------------ several hosts
ROWS = torch.arange(12.0).reshape(6, 2)


@pytest.fixture
def hosts(bucket):
    """hosts(folder, action): what action(checkpoints, index) returned, or raised, on each of three hosts of a run."""
    with together(3) as meet:
        yield lambda folder, action: meet(lambda peers: on_host(folder, action, peers))


def on_host(folder: str, action, peers: Peers):
    opened = config(folder, resume="auto")
    run_dir = Path(peers.from_first(lambda: str(open_run_dir(opened))))
    try:
        with Mirror(opened.run_dir, opened.resume, run_dir, peers) as mirror:
            return action(Checkpoints(mirror.folder / "checkpoints", 2, peers, mirror), peers.index)
    except (SaveError, InputError, PassingError) as error:
        return error


def save_rows(*steps: int):
    def action(checkpoints: Checkpoints, index: int) -> None:
        for step in steps:
            checkpoints.write(part_of_state(step, index, 3, ROWS, index == 0))
            checkpoints.wait()

    return action


def load_rows(checkpoints: Checkpoints, index: int) -> tuple[int, list[str]]:
    """The step, and the files this host has fetched for its rows. Asserts that these are right."""
    saved, part = reader_of(checkpoints).load_for_resume("must"), torch.empty(2, 2)
    saved.files().read_into(part, "model/rows", (2 * index, 0))
    assert torch.equal(part, ROWS[2 * index : 2 * index + 2] + saved.step)
    return saved.step, sorted(path.name for path in saved.folder.iterdir())


def test_each_host_uploads_its_own_part_and_fetches_what_it_needs(hosts, bucket, machine):
    assert hosts("pod", save_rows(3, 6, 9)) == [None] * 3
    for step in (3, 6, 9):
        puts = [name for kind, name, *_ in changes(bucket, "pod") if kind == "put" and f"_{step:08d}/" in name]
        names = [name.rpartition("/")[2] for name in puts]
        assert sorted(names) == sorted([*FILES, *(f"shards_0000{i}.safetensors" for i in range(3))])
        assert names[-1] == "done", "a part came after the marker"
    assert steps_in_bucket("pod") == [6, 9]
    machine("second")  # three other hosts
    (first, _), *others = hosts("pod", load_rows)
    assert first == 9 and others == [(9, [f"shards_0000{index}.safetensors"]) for index in (1, 2)]
    state = end_state("pod")[1]  # by one host alone
    assert torch.equal(state["model/rows"], ROWS + 9) and torch.equal(state["model/whole"], torch.ones(5) + 9)


@pytest.mark.parametrize("lost", [0, 2])
def test_what_the_hosts_have_in_memory_goes_into_the_bucket(hosts, bucket, machine, tmp_path, lost):
    """With a machine lost: its memory, and its working folder. Its part is with the next one."""
    folder = f"in_memory_{lost}"
    url = f"gs://runs/{folder}"
    for index in range(3):
        (tmp_path / f"memory_{index}").mkdir()

    def memory_of(checkpoints: Checkpoints, index: int) -> MemoryCheckpoints:
        checkpoints.run_id = "ours"
        return MemoryCheckpoints(url, str(tmp_path / f"memory_{index}"), checkpoints)

    def save(checkpoints: Checkpoints, index: int) -> None:
        memory = memory_of(checkpoints, index)
        memory.run_id = f"ours.{memory.token}"
        if index == 0:
            line = json.dumps(dict(kind="checkpoint", step=9, memory=memory.token))
            (checkpoints.folder.parent / "metrics.jsonl").write_text(line + "\n")
        memory.write(part_of_state(9, index, 3, ROWS, True))
        memory.wait()

    assert hosts(folder, save) == [None] * 3
    assert f"{folder}/metrics.jsonl" in bucket.objects and not marked_steps(bucket, folder)
    machine("second")
    shutil.rmtree(memory_folder(url, str(tmp_path / f"memory_{lost}")))
    assert hosts(folder, lambda c, index: memory_of(c, index).bring_to_disk()) == [9] * 3
    assert marked_steps(bucket, folder) == [9] and not list(tmp_path.glob("memory_*/*/*"))
    machine("third")
    assert [step for step, _ in hosts(folder, load_rows)] == [9] * 3


@pytest.mark.parametrize(
    "said", ["process 2: shards_00002.safetensors could not be uploaded to gs://runs/part: no answer", "is absent in"]
)
def test_a_part_that_does_not_arrive_leaves_the_checkpoints_before(hosts, machine, monkeypatch, said):
    assert hosts("part", save_rows(3)) == [None] * 3
    upload = Mirror._upload

    def fails(mirror, path):
        if path.name != "shards_00002.safetensors":
            upload(mirror, path)
        elif "no answer" in said:
            raise OSError("no answer")

    with monkeypatch.context() as patched:
        patched.setattr(Mirror, "_upload", fails)
        for error in hosts("part", save_rows(6)):
            assert isinstance(error, SaveError) and said in str(error)
    machine("second")
    assert [step for step, _ in hosts("part", load_rows)] == [3] * 3


def test_another_number_of_hosts_goes_on_where_the_first_stopped(bucket, machine):
    """Rows of four hosts are read by two, and written again under no marker."""

    def action(count, *steps):
        def save_as_host(checkpoints, index):
            size, rows = 8 // count, torch.arange(16.0).reshape(8, 2)
            if saved := reader_of(checkpoints).load_for_resume("auto"):
                found = torch.empty(size, 2)
                saved.files().read_into(found, "model/rows", (index * size, 0))
                assert torch.equal(found, rows[index * size :][:size] + saved.step)
            for step in steps:
                checkpoints.write(part_of_state(step, index, count, rows, index == 0))
                checkpoints.wait()

        return save_as_host

    for number, (count, steps) in enumerate(((4, (3, 6)), (2, (6, 9)), (4, (12,)), (4, ()))):
        machine(f"machine_{number}")
        with together(count) as meet:
            save_as_host = action(count, *steps)
            assert meet(lambda peers, f=save_as_host: on_host("counts", f, peers)) == [None] * count
    assert marked_steps(bucket, "counts") == steps_in_bucket("counts") == [9, 12]
    done = [kind for kind, name, *_ in changes(bucket, "counts") if name == "checkpoints/step_00000006/done"]
    assert done == ["put", "delete", "put", "delete"]


def test_a_part_that_changed_after_it_was_checked_is_refused(hosts, machine):
    assert hosts("changed", save_rows(3)) == [None] * 3
    machine("second")

    def action(checkpoints, index):
        saved = reader_of(checkpoints).load_for_resume("must")
        if index == 2:
            blob = blob_of("changed", "checkpoints/step_00000003/shards_00002.safetensors")
            content = bytearray(blob.download_as_bytes())
            content[-1] ^= 64
            blob.upload_from_string(bytes(content))
            saved.files().read_into(torch.empty(2, 2), "model/rows", (4, 0))

    found = hosts("changed", action)
    assert isinstance(found[2], PassingError) and "has changed in the bucket since it was checked" in str(found[2])


def test_a_long_transfer_of_one_host_is_waited_for(bucket, machine, monkeypatch):
    with together(3) as meet:
        assert meet(lambda peers: on_host("slow", save_rows(3), peers)) == [None] * 3
    machine("second")
    monkeypatch.setattr("tpu_utils.remote.meeting.ANSWER_SECONDS", 1.0)
    fetch = Mirror.fetch

    def slow(mirror, folder, files):
        if mirror._index == 0:
            time.sleep(2)
        fetch(mirror, folder, files)

    monkeypatch.setattr(Mirror, "fetch", slow)
    with together(3) as meet:
        assert [step for step, _ in meet(lambda peers: on_host("slow", load_rows, peers))] == [3] * 3


def test_room_is_needed_for_the_own_part_alone_and_on_every_host(hosts, monkeypatch):
    monkeypatch.setattr("tpu_utils.checkpoint.has_room", lambda folder, size: "process_2" not in str(folder))
    for error in hosts("room", lambda checkpoints, index: checkpoints.copy(3, {"model": {"weight": torch.ones(5)}})):
        assert isinstance(error, SaveError) and "needs" in str(error) and "process_2" in str(error)


def test_a_host_that_cannot_reach_the_bucket_is_named_on_all(hosts, monkeypatch):
    connect, calls = storage.connect, []

    def refused(url):
        calls.append(url)
        if len(calls) == 4:  # the first host checks the bucket and lists it, then the second and third list it
            raise OSError("no route to host")
        return connect(url)

    monkeypatch.setattr(storage, "connect", refused)
    for error in hosts("unreachable", save_rows(3)):
        assert isinstance(error, PassingError) and "process " in str(error) and "no route to host" in str(error)


# ----------------------------------------------------------------------------------------------------------- bad input
@pytest.mark.parametrize(
    "url", ["gs://runs", "gs://runs/", "gs://RUNS/a", "gs://runs/a//b", "gs://runs/../b", "gs:/runs/a", "s3://runs/a"]
)
def test_addresses_that_cannot_be_meant_are_refused(url):
    with pytest.raises(InputError, match=r"expected a local folder or gs://BUCKET/FOLDER"):
        MnistConfig(run_dir=url)


NOT_ANSWERED = {"STORAGE_EMULATOR_HOST": "http://127.0.0.1:9"}


@pytest.mark.parametrize(
    "folder, environment, code, said",
    [
        ("rusn/a", {}, 2, "bucket rusn does not exist; check the name"),
        ("forbidden/a", {}, 2, "may not list, create, read and delete objects in bucket forbidden"),
        ("runs/a", NOT_ANSWERED, 1, "from Cloud Storage; check the network"),  # may pass: services give up on 2
        ("runs/a", {"STORAGE_EMULATOR_HOST": None}, 2, "run gcloud auth application-default login"),
        ("runs/a", {"XDG_CACHE_HOME": "/dev/null"}, 2, "room for the checkpoints in XDG_CACHE_HOME"),
        ("runs/none", {}, 2, "gs://runs/none holds no complete checkpoint to go on from; check --run_dir"),
    ],
)
def test_what_is_wrong_with_a_bucket_is_said_before_anything_is_compiled(
    bucket, tmp_path, monkeypatch, capsys, folder, environment, code, said
):
    monkeypatch.setattr(storage, "START_SECONDS", 1.0 if code == 1 else 30.0)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "no_such_key.json"))
    for name, value in environment.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name)
    graphs = graphs_compiled()
    resume = "must" if folder == "runs/none" else "never"
    assert in_process(*OPTIONS, "--run_dir", f"gs://{folder}", "--resume", resume) == code
    error = capsys.readouterr().err
    assert error.startswith("error: ") and said in error and "Traceback" not in error and error.count("\n") == 1
    assert graphs_compiled() == graphs and not (tmp_path / "first").exists()


@pytest.mark.parametrize(
    "content, said", [(b'{"pre', "cannot be read as JSON"), (b" " * 2**21, "expected 1,048,576 at")]
)
def test_options_in_a_bucket_that_cannot_be_read_are_named(bucket, content, said):
    blob_of("options", "config.json").upload_from_string(content)
    argv = ["--run_dir", "gs://runs/options/", "--resume", "auto"]
    with pytest.raises(InputError, match=f"gs://runs/options/config.json .*{said}"):
        parse_command_line(MnistConfig, "", argv)
    blob_of("options", "config.json").delete()
    assert parse_command_line(MnistConfig, "", argv).options_from == ""


# ------------------------------------------------------------------------------------------------------------ training
def test_a_local_run_needs_no_client_library(uninterrupted, monkeypatch):
    monkeypatch.setitem(sys.modules, "google.cloud", None)  # importing it is an ImportError
    spec = importlib.util.spec_from_file_location("storage_again", storage.__file__)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert in_process(*OPTIONS, "--run_dir", uninterrupted, "--resume", "must") == 0


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("local") / "run"
    assert in_process(*OPTIONS, "--run_dir", run_dir) == 0
    return run_dir


def assert_same_as_local(folder: str, uninterrupted: Path, bucket: BucketEmulator) -> None:
    run_dir, state = end_state(folder)
    assert_identical(state, state_in(uninterrupted / f"checkpoints/step_{LAST:08d}"))
    found, expected = numbers(run_dir), numbers(uninterrupted)
    stops = [line for line in found if line["kind"] == "checkpoint" and line not in expected]  # saved there as well
    assert [line for line in found if line not in stops] == expected
    lines = [(line["kind"], line["step"]) for line in read_lines(run_dir)]
    assert len(lines) == len(set(lines)), "every line once"
    assert marked_steps(bucket, folder) == [30, 40, LAST]
    assert {f"{folder}/{name}" for name in ("config.json", "metrics.jsonl", "summary.json")} <= bucket.objects.keys()


@pytest.mark.slow
def test_killed_and_stopped_in_mid_upload_a_run_goes_on_from_an_empty_machine_under_faults(
    uninterrupted, bucket, machine, monkeypatch, capsys
):
    place = ["--run_dir", "gs://runs/killed"]
    uploading, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def hold_back_second_checkpoint(method: str, path: str) -> None:
        """Its file follows metrics.jsonl, once the first checkpoint is there: the request waits for go_on."""
        is_first_there = "uploadType" in path and marked_steps(bucket, "killed") == [10]
        if is_first_there and changes(bucket, "killed")[-1][1] == "metrics.jsonl":
            uploading.set()
            go_on.wait(600)

    bucket.plan = hold_back_second_checkpoint
    as_here = {"XLA_FLAGS": os.environ["XLA_FLAGS"]}  # bit for bit what this process computes
    process = start("tests/bucket_worker.py", "simple_mnist_tpu.py", *OPTIONS, *place, **as_here)
    waits(uploading.is_set, alive=process)
    process.kill()
    process.wait()
    go_on.set()  # the request in flight may still arrive: it is the file, never its marker
    assert marked_steps(bucket, "killed") == [10]

    machine("second")
    uploading.clear(), go_on.clear()

    def stop_in_mid_upload():
        assert uploading.wait(600)
        os.kill(os.getpid(), signal.SIGTERM)
        before_its_time.append(ended.wait(1.5))  # the bucket has not got what a stopped run says is saved
        go_on.set()

    before_its_time: list[bool] = []
    stopper = threading.Thread(target=stop_in_mid_upload)
    stopper.start()
    assert in_process(*OPTIONS, *place, "--resume", "must") == 143
    ended.set()
    stopper.join()
    assert before_its_time == [False]
    output = capsys.readouterr().out
    stopped = int(re.search(r"saved after step (\d+)", output)[1])
    assert "resumed    after step 10" in output and marked_steps(bucket, "killed")[-1] == stopped
    assert "repeat the command with --run_dir gs://runs/killed --resume must" in output

    machine("third")
    with monkeypatch.context() as impatient:
        impatient.setattr(storage, "REQUEST_SECONDS", 0.7)
        bucket.plan = every(5)
        assert in_process(*place, "--resume", "must", "--tensorboard") == 0
    output = capsys.readouterr().out
    assert "options    from gs://runs/killed/config.json" in output and "run        gs://runs/killed" in output
    assert f"resumed    after step {stopped} of {LAST}" in output and set(bucket.injected) == set(FAULTS)
    bucket.plan = nothing_fails
    assert any("events.out.tfevents" in name for name in bucket.objects)

    machine("fourth")
    assert_same_as_local("killed", uninterrupted, bucket)
    before = [change for change in changes(bucket, "killed") if change[1] != "writable"]
    assert in_process(*place, "--resume", "must") == 0
    assert capsys.readouterr().out.endswith(f"\nfinished   step {LAST} of {LAST} was reached before; nothing to do\n")
    assert [change for change in changes(bucket, "killed") if change[1] != "writable"] == before


@pytest.mark.slow
def test_two_hosts_train_in_one_bucket_each_in_a_folder_of_its_own(bucket, tmp_path):
    place = ["--run_dir=gs://runs/two_hosts"]
    first = "--num_layers=1 --embedding_dim=16 --num_heads=2 --sequence_length=16 --vocab_size=16 --warmup_steps=1"
    first += " --num_steps=4 --save_every=2 --log_every=2 --eval_every=4 --eval_batches=1 --global_batch_size=4"
    first += " --no_tensorboard --scheduler=constant --device=cpu"
    for round, given in enumerate((first.split(), ["--resume=must", "--num_steps=6"])):
        port = free_port()
        places = [dict(XDG_CACHE_HOME=tmp_path / f"{round}_{index}") for index in range(2)]
        hosts = [start("tests/transformer_hosts.py", i, 2, port, *given, *place, **at) for i, at in enumerate(places)]
        outputs = [host.communicate() for host in hosts]
        assert [host.returncode for host in hosts] == [0, 0], outputs
    assert "resumed    after step 4 of 6" in outputs[0][0] and "step " not in outputs[1][0]
    assert marked_steps(bucket, "two_hosts") == [2, 4, 6]
