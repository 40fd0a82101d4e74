"""gs:// run directories: the real client library against emulator processes, behind a faulty network."""

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
from faulty_proxy import FAULTS, FaultyProxy
from google.api_core import exceptions as api_exceptions
from processes import ROOT, free_port, run, start, waits
from run_files import assert_identical, in_process, numbers, read_lines, reader_of, state_in
from test_checkpoint import FILES
from test_peers import together

import simple_mnist_tpu
import transformer_tpu
from config import MnistConfig
from language.options.transformer_options import TransformerConfig
from tpu_utils.base.errors import InputError, PassingError, SaveError, run_script
from tpu_utils.base.process import Peers
from tpu_utils.base.restarts import memory_folder
from tpu_utils.checkpoint import Checkpoints
from tpu_utils.checkpoint.loading import CheckpointReader
from tpu_utils.checkpoint.memory import MemoryCheckpoints
from tpu_utils.checkpoint.state import HostCopy, kind_of
from tpu_utils.device import graphs_compiled
from tpu_utils.options.parsing import parse_command_line
from tpu_utils.record.run_dir import open_run_dir
from tpu_utils.remote import storage
from tpu_utils.remote.storage import Mirror

OPTIONS = ["--num_epochs", "2", "--log_every", "7", "--save_every", "10", "--channels", "4", "--hidden_dim", "16"]
LAST = 44
"""Steps of a run with these options."""


@pytest.fixture(scope="module")
def emulator():
    """Port of tests/bucket_emulator.py."""
    command = [sys.executable, ROOT / "tests" / "bucket_emulator.py"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    yield int(process.stdout.readline())
    process.kill()


@pytest.fixture(scope="module")
def foreign_emulator():
    """Port of gcp-storage-emulator. It keeps no preconditions, but shares no misunderstanding with ours."""
    port = free_port()
    options = ["start", "--host", "127.0.0.1", "--port", str(port), "-M", "--default-bucket", "runs", "-q"]
    process = subprocess.Popen([sys.executable, "-m", "gcp_storage_emulator", *options], stderr=subprocess.DEVNULL)
    while process.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5)
            break
        except OSError:
            time.sleep(0.05)
    yield port
    process.kill()


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """machine("a") makes this process and its children work on another, empty machine."""

    def change(name: str) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))

    change("first")
    return change


@pytest.fixture
def proxy(emulator, machine, monkeypatch):
    """What the client library talks to: passes everything on until .plan says otherwise."""
    yield from through_proxy(emulator, monkeypatch)


def through_proxy(port, monkeypatch):
    proxy = FaultyProxy(port, stall_seconds=1.0)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.url)
    monkeypatch.setattr(storage, "REQUEST_SECONDS", 10.0)  # a loaded machine is no fault
    monkeypatch.setattr(storage, "CHUNK_BYTES", 2**20)
    monkeypatch.setattr(storage, "LOG_SECONDS", 0.5)
    limits, quick = storage.limits, dict(initial=0.05, maximum=0.5)
    monkeypatch.setattr(
        storage, "limits", lambda s: (found := limits(s)) | {"retry": found["retry"].with_delay(**quick)}
    )
    yield proxy
    proxy.close()


def every(n: int, faults=FAULTS):
    """A plan under which every n-th request fails, in one way after the other."""
    count, lock = 0, threading.Lock()

    def plan(method: str, path: str) -> str | None:
        nonlocal count
        with lock:
            count += 1
            return faults[count // n % len(faults)] if count % n == 0 else None

    return plan


def changes(emulator: int, folder: str) -> list[list]:
    """Every change in gs://runs/folder so far, in order: ["put", name, size] or ["delete", name]."""
    with urllib.request.urlopen(f"http://127.0.0.1:{emulator}/history") as answer:
        history = json.load(answer)["history"]
    return [[kind, name.removeprefix(f"{folder}/"), *size] for kind, name, *size in history if name.startswith(folder)]


def marked_steps(history: list[list]) -> list[int]:
    """Steps whose done marker is in the bucket in the end. Asserts that one is never there without the files."""
    there = set()
    for kind, name, *_ in history:
        folder, _, file = name.rpartition("/")
        (there.add if kind == "put" else there.discard)(name)
        if f"{folder}/done" in there:
            assert f"{folder}/state.json" in there, "a marker stands beside a checkpoint without its file"
            assert file in FILES and (kind == "delete" or file == "done"), "changed under its marker"
    return sorted(int(name[17:25]) for name in there if name.endswith("/done"))


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
# the foreign emulator refuses what it has already, where the service passes over it: there nothing arrives twice
@pytest.mark.parametrize("which, faults", [("emulator", FAULTS), ("foreign_emulator", ("503",))])
def test_what_is_sent_comes_back_on_another_machine_whatever_the_network_does(
    which, faults, request, machine, monkeypatch
):
    for proxy in through_proxy(request.getfixturevalue(which), monkeypatch):
        monkeypatch.setattr(storage, "REQUEST_SECONDS", 0.7)  # shorter than a stall
        proxy.plan = every(4, faults)
        run_dir, mirror = another_process("round_trip", "never")
        content = {"config.json": b"{}", "metrics.jsonl": b'{"step": 7}\n' * 99}
        content |= {"tensorboard/events.1": os.urandom(999)}
        folder = "checkpoints/step_00000007"
        content |= {f"{folder}/state.safetensors": os.urandom(9 * 2**20), f"{folder}/done": b"7"}
        content |= {f"{folder}/shards_00001.safetensors": os.urandom(99)}
        for name, data in content.items():
            (run_dir / name).parent.mkdir(parents=True, exist_ok=True)
            (run_dir / name).write_bytes(data)
        with mirror:
            mirror.send(run_dir / "checkpoints" / "step_00000007", keep=2)
        assert set(proxy.injected) == set(faults)
        machine("second")
        fetched, mirror = another_process("round_trip", "must")
        mirror.fetch(fetched / folder, {Path(name).name: len(data) for name, data in content.items()})
        found = {p.relative_to(fetched).as_posix(): p.read_bytes() for p in fetched.rglob("*") if p.is_file()}
        assert found == {name: data for name, data in content.items() if not name.startswith("tensorboard")}
        if which == "emulator":
            puts = [name for kind, name, *_ in changes(proxy.upstream_port, "round_trip") if kind == "put"]
            puts = [name for name in puts if name != "writable"]
            assert sorted(puts) == sorted(content), "a request whose answer was lost was repeated, and stored once"
            assert puts[-1] == "checkpoints/step_00000007/done"


def save(folder: str, *steps: int, keep: int = 3) -> None:
    run_dir, mirror = another_process(folder)
    with mirror:
        checkpoints = Checkpoints(run_dir / "checkpoints", keep, mirror=mirror)
        for step in steps:
            checkpoints.save(step, {"weights": torch.full((100,), float(step))}, {"evaluation": {}})


@pytest.mark.parametrize("keep, left", [(1, [30]), (2, [20, 30])])
def test_older_checkpoints_are_deleted_marker_first(proxy, emulator, keep, left):
    save(f"prune_{keep}", 10, 20, 30, keep=keep)
    history = changes(emulator, f"prune_{keep}")
    assert marked_steps(history) == left
    deleted = [name for kind, name, *_ in history if kind == "delete" and "checkpoints" in name]
    assert deleted[:3] == [f"checkpoints/step_00000010/{name}" for name in ("done", "state.json", "state.safetensors")]


def test_the_best_checkpoint_stays_in_the_bucket_until_a_better_one_is_there(proxy, emulator, machine):
    """Also on a machine that has no more of it than its marker."""
    for name, saves in [("first", [(10, 10), (20, 10)]), ("second", [(30, 10), (40, 10)]), ("third", [(50, 50)])]:
        machine(name)
        run_dir, mirror = another_process("best")
        with mirror:
            checkpoints = Checkpoints(run_dir / "checkpoints", 1, mirror=mirror)
            for step, best in saves:
                checkpoints.write(checkpoints.copy(step, {}, {}, best=best))
                checkpoints.wait()
                assert marked_steps(changes(emulator, "best")) == sorted({best, step})
    deleted = [name for kind, name, *_ in changes(emulator, "best") if kind == "delete" and "done" in name]
    assert deleted == [f"checkpoints/step_{step:08d}/done" for step in (20, 30, 10, 40)]


def test_a_step_that_is_saved_again_is_replaced_under_no_marker(proxy, emulator, machine):
    save("again", 10, 20)
    machine("second")
    save("again", 20)
    history = changes(emulator, "again")
    assert marked_steps(history) == [10, 20]
    done = [kind for kind, name, *_ in history if name == "checkpoints/step_00000020/done"]
    assert done == ["put", "delete", "put"]


def test_a_checkpoint_without_its_marker_does_not_count_and_is_written_again(proxy, machine):
    save("cut", 10)
    bucket, prefix = storage.connect("gs://runs/cut")
    bucket.blob(f"{prefix}checkpoints/step_00000020/state.safetensors").upload_from_string(b"up before the end")
    machine("second")
    assert steps_in_bucket("cut") == [10]
    save("cut", 20)
    assert end_state("cut")[1]["step"] == 20


OUTSIDE = "../../owned ..//owned /{place}/owned //{place}/owned a/../../../owned state.json/../../owned".split()
OUTSIDE += ["..", ".", "", "state.json/", "\\owned", "x" * 300, "a\nb"]


def test_an_object_whose_name_leads_elsewhere_is_never_written(proxy, machine, tmp_path):
    """Whoever may write to the bucket would run code here: `...//abs/path.py` was once imported at --resume."""
    save("outside", 10)
    bucket, prefix = storage.connect("gs://runs/outside")
    sent = 0
    for name in OUTSIDE:
        for place in ("checkpoints/step_00000010/", "checkpoints/", ""):
            with contextlib.suppress(Exception):  # names that the service itself refuses
                blob = bucket.blob(f"{prefix}{place}{name.format(place=tmp_path)}")
                blob.upload_from_string(b"raise SystemExit('code ran')", retry=None)
                sent += 1
    assert sent > 2 * len(OUTSIDE)
    before = set(tmp_path.rglob("*"))
    machine("second")
    run_dir, state = end_state("outside")
    assert state["step"] == 10
    assert {path for path in tmp_path.rglob("*") if not path.is_relative_to(tmp_path / "second")} == before
    inside = {path.relative_to(run_dir).as_posix() for path in run_dir.rglob("*") if path.is_file()}
    assert inside - {"lock"} == {f"checkpoints/step_00000010/{file}" for file in FILES}


def names_a_file_elsewhere(content: bytes) -> bytes:
    marker = json.loads(content)
    marker["files"]["../../../owned.py"] = marker["files"]["state.json"]
    return json.dumps(marker).encode()


@pytest.mark.parametrize(
    "file, change, said",
    [
        ("state.safetensors", lambda content: b"other bytes", "step_00000020"),
        ("done", names_a_file_elsewhere, "its done marker names the file '../../../owned.py'"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_fetched(proxy, machine, capsys, file, change, said):
    folder = f"damaged_{file}"
    save(folder, 10, 20)
    bucket, prefix = storage.connect(f"gs://runs/{folder}")
    blob = bucket.blob(f"{prefix}checkpoints/step_00000020/{file}")
    blob.upload_from_string(change(blob.download_as_bytes()))
    machine("second")
    assert end_state(folder)[1]["step"] == 10 and said in capsys.readouterr().err


@pytest.mark.parametrize("size", [10**5, 9 * 2**20], ids=["at_once", "in_chunks"])
def test_bytes_altered_on_their_way_are_sent_and_fetched_again(proxy, emulator, machine, size):
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
    proxy.plan = plan
    with mirror:
        mirror.send(run_dir / name, keep=1)
    machine("second")
    run_dir, mirror = another_process(f"altered_{size}", "must")
    altered.clear()
    mirror.fetch(run_dir / name, {"state.safetensors": size})
    assert "alter" in proxy.injected and altered == [["GET", "alt=media"]]
    assert (run_dir / name / "state.safetensors").read_bytes() == content


def test_a_permanent_failure_is_loud_tells_no_secret_and_keeps_the_earlier_checkpoint(
    proxy, machine, monkeypatch, capsys
):
    monkeypatch.setattr(storage, "RETRY_SECONDS", 0.5)
    run_dir, mirror = another_process("permanent")
    proxy.plan = lambda method, path: "503" if method == "PUT" else None  # chunks of large files
    said = "checkpoint step_00000020 could not be uploaded to gs://runs/permanent"
    with pytest.raises(SaveError, match=said), mirror:
        checkpoints = Checkpoints(run_dir / "checkpoints", 3, mirror=mirror)
        checkpoints.save(10, {})
        checkpoints.save(20, {"big": torch.rand(9 * 2**18)})
        checkpoints.save(30, {})
    error = capsys.readouterr().err
    assert "status 503" in error and "secret" not in error
    machine("second")
    proxy.plan = lambda method, path: None
    assert steps_in_bucket("permanent") == [10]


def test_the_address_of_an_upload_is_not_told():
    error = api_exceptions.BadRequest("PUT https://host/o?uploadType=resumable&upload_id=AHm-b_0+secret%3A: Bad\nmore")
    said = "400 PUT https://host/o?uploadType=resumable&upload_id=...: Bad"
    assert storage.reason(error, "gs://runs/a") == said, "whoever has it may upload"


def test_what_this_machine_had_before_is_gone_but_for_its_lock(proxy):
    run_dir, _ = another_process("stale")
    (run_dir / "checkpoints" / "step_00000099").mkdir(parents=True)
    for name in ("checkpoints/step_00000099/done", "metrics.jsonl", "lock"):
        (run_dir / name).write_text("of a run that the bucket does not have")
    run_dir, mirror = another_process("stale")
    mirror.upload_logs()
    assert [path.name for path in run_dir.iterdir()] == ["lock"] and not storage.list_objects(
        *storage.connect("gs://runs/stale"), seconds=9
    )


def test_a_second_process_on_the_same_directory_is_found_out(proxy, machine):
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


def test_an_interrupted_log_upload_does_not_end_the_run(proxy, monkeypatch, capsys):
    monkeypatch.setattr(storage, "RETRY_SECONDS", 0.1)
    run_dir, mirror = another_process("logs")
    (run_dir / "config.json").write_text("{}")
    proxy.plan = lambda method, path: "503" if "upload" in path else None
    said = []
    with mirror:
        waits(lambda: said.append(capsys.readouterr().err) or "its log files could not be uploaded" in "".join(said))
        proxy.plan = lambda method, path: None
    with pytest.raises(InputError, match="already holds a run"):
        open_run_dir(config("logs"))


# ------------------------------------------------------------------------------------------------------ several hosts
ROWS = torch.arange(12.0).reshape(6, 2)


@pytest.fixture
def hosts(proxy):
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


def copy_of(step: int, index: int, size: int = 2, rows: torch.Tensor = ROWS, everywhere: bool = False) -> HostCopy:
    """So many rows of a matrix, plus the step; and a vector that is whole, on the first host or everywhere."""
    copy = HostCopy(step, {"evaluation": {}}, {"model/whole": torch.ones(5)} if everywhere or index == 0 else {})
    copy.sharded = {"model/rows": kind_of(rows)}
    copy.shards = {"model/rows": {(index * size, 0): rows[index * size :][:size] + step}}
    return copy


def save_rows(*steps: int):
    def action(checkpoints: Checkpoints, index: int) -> None:
        for step in steps:
            checkpoints.write(copy_of(step, index))
            checkpoints.wait()

    return action


def load_rows(checkpoints: Checkpoints, index: int) -> tuple[int, torch.Tensor, list[str]]:
    """The step, this host's rows, and the files it has fetched for them."""
    saved, part = reader_of(checkpoints).load_for_resume("must"), torch.empty(2, 2)
    saved.files().read_into(part, "model/rows", (2 * index, 0))
    return saved.step, part, sorted(path.name for path in saved.folder.iterdir())


def test_each_host_uploads_its_own_part_and_fetches_what_it_needs(hosts, emulator, machine):
    assert hosts("pod", save_rows(3, 6, 9)) == [None] * 3
    history = changes(emulator, "pod")
    for step in (3, 6, 9):
        names = [name.rpartition("/")[2] for kind, name, *_ in history if kind == "put" and f"_{step:08d}/" in name]
        assert sorted(names) == sorted([*FILES, *(f"shards_0000{i}.safetensors" for i in range(3))])
        assert names[-1] == "done", "a part came after the marker"
    assert steps_in_bucket("pod") == [6, 9]
    machine("second")  # three other hosts
    for index, (step, part, fetched) in enumerate(hosts("pod", load_rows)):
        assert step == 9 and torch.equal(part, ROWS[2 * index : 2 * index + 2] + 9)
        assert index == 0 or fetched == [f"shards_0000{index}.safetensors"], "another host's part was fetched"
    state = end_state("pod")[1]  # by one host alone
    assert torch.equal(state["model/rows"], ROWS + 9) and torch.equal(state["model/whole"], torch.ones(5))


@pytest.mark.parametrize("lost", [0, 2])
def test_what_the_hosts_have_in_memory_goes_into_the_bucket(hosts, emulator, machine, tmp_path, lost):
    """With a machine lost: its memory, and its working folder. Its part is with the next one."""
    for index in range(3):
        (tmp_path / f"memory_{index}").mkdir()
    folder = f"in_memory_{lost}"
    url = f"gs://runs/{folder}"

    def memory_of(checkpoints: Checkpoints, index: int) -> MemoryCheckpoints:
        checkpoints.run_id = "ours"
        return MemoryCheckpoints(url, str(tmp_path / f"memory_{index}"), checkpoints)

    def save(checkpoints: Checkpoints, index: int) -> None:
        memory = memory_of(checkpoints, index)
        memory.run_id = f"ours.{memory.token}"
        if index == 0:
            line = json.dumps(dict(kind="checkpoint", step=9, memory=memory.token))
            (checkpoints.folder.parent / "metrics.jsonl").write_text(line + "\n")
        memory.write(copy_of(9, index, everywhere=True))
        memory.wait()

    assert hosts(folder, save) == [None] * 3
    assert any(name == "metrics.jsonl" for _, name, *_ in changes(emulator, folder))
    assert not marked_steps(changes(emulator, folder))
    machine("second")
    shutil.rmtree(memory_folder(url, str(tmp_path / f"memory_{lost}")))
    assert hosts(folder, lambda c, index: memory_of(c, index).bring_to_disk()) == [9] * 3
    assert marked_steps(changes(emulator, folder)) == [9]
    machine("third")
    for index, (step, part, _) in enumerate(hosts(folder, load_rows)):
        assert step == 9 and torch.equal(part, ROWS[2 * index : 2 * index + 2] + 9)
    assert not list(tmp_path.glob("memory_*/*/*"))


def test_a_part_that_does_not_arrive_leaves_the_checkpoints_before(hosts, machine, monkeypatch):
    assert hosts("part", save_rows(3)) == [None] * 3
    upload = Mirror._upload

    def fails(mirror, path):
        if path.name == "shards_00002.safetensors":
            raise OSError("no answer")
        upload(mirror, path)

    with monkeypatch.context() as patched:
        patched.setattr(Mirror, "_upload", fails)
        for error in hosts("part", save_rows(6)):
            said = "process 2: shards_00002.safetensors could not be uploaded to gs://runs/part: no answer"
            assert isinstance(error, SaveError) and said in str(error)
    machine("second")
    assert [step for step, *_ in hosts("part", load_rows)] == [3] * 3


def test_a_checkpoint_that_is_written_again_is_unmarked_before_its_parts_change(hosts, emulator, machine):
    for _ in range(2):
        assert hosts("rewritten", save_rows(3)) == [None] * 3
        machine("second")
    history = [(kind, name.rpartition("/")[2]) for kind, name, *_ in changes(emulator, "rewritten") if "step_" in name]
    first_round, (unmarked, *rest) = history[: len(history) // 2], history[len(history) // 2 :]
    assert unmarked == ("delete", "done") and sorted(rest) == sorted(first_round) and rest[-1] == ("put", "done")


def test_a_part_that_is_gone_before_the_marker_is_missed(hosts, monkeypatch):
    put = Mirror.put

    def lost(mirror, path):
        put(mirror, path)
        if path.name == "shards_00001.safetensors":
            storage.delete_object(mirror._bucket, mirror._prefix + mirror._name(path), None, 9)

    monkeypatch.setattr(Mirror, "put", lost)
    for error in hosts("lost", save_rows(3)):
        assert isinstance(error, SaveError) and "shards_00001.safetensors is absent in the bucket" in str(error)
    assert steps_in_bucket("lost") == []


def test_another_number_of_hosts_goes_on_where_the_first_stopped(emulator, proxy, machine):
    """Rows of four hosts are read by two; what a host fetched does not stay on its disk."""

    def action(count, *steps):
        def save_as_host(checkpoints, index):
            size, rows = 8 // count, torch.arange(16.0).reshape(8, 2)
            if saved := reader_of(checkpoints).load_for_resume("auto"):
                found = torch.empty(size, 2)
                saved.files().read_into(found, "model/rows", (index * size, 0))
                assert torch.equal(found, rows[index * size :][:size] + saved.step)
            for step in steps:
                checkpoints.write(copy_of(step, index, size, rows))
                checkpoints.wait()

        return save_as_host

    for number, (count, steps) in enumerate(((4, (3, 6)), (2, (6, 9)), (4, (12,)), (4, ()))):
        machine(f"machine_{number}")
        with together(count) as meet:
            save_as_host = action(count, *steps)
            assert meet(lambda peers, f=save_as_host: on_host("counts", f, peers)) == [None] * count
    assert steps_in_bucket("counts") == [9, 12]


def test_a_part_that_changed_after_it_was_checked_is_refused(hosts, emulator, machine):
    assert hosts("changed", save_rows(3)) == [None] * 3
    machine("second")

    def action(checkpoints, index):
        saved = reader_of(checkpoints).load_for_resume("must")
        if index == 2:
            bucket, prefix = storage.connect("gs://runs/changed")
            blob = bucket.blob(f"{prefix}checkpoints/step_00000003/shards_00002.safetensors")
            content = bytearray(blob.download_as_bytes())
            content[-1] ^= 64
            blob.upload_from_string(bytes(content))
            saved.files().read_into(torch.empty(2, 2), "model/rows", (4, 0))

    found = hosts("changed", action)
    assert isinstance(found[2], PassingError) and "has changed in the bucket since it was checked" in str(found[2])


def test_a_long_transfer_of_one_host_is_waited_for(proxy, machine, monkeypatch):
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
        assert [step for step, *_ in meet(lambda peers: on_host("slow", load_rows, peers))] == [3] * 3


def test_room_is_needed_for_the_own_part_alone_and_on_every_host(hosts, monkeypatch):
    monkeypatch.setattr("tpu_utils.checkpoint.has_room", lambda folder, size: "process_2" not in str(folder))

    def action(checkpoints, index):
        copy = HostCopy(3, {}, {}, {"model/rows": kind_of(ROWS)}, {"model/rows": {(2 * index, 0): ROWS[:2]}})
        checkpoints._check_own_space(copy)

    for error in hosts("room", action):
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


@pytest.mark.parametrize(
    "url, environment, said",
    [
        ("gs://rusn/a", {}, "bucket rusn does not exist; check the name"),
        ("gs://forbidden/a", {}, "may not list, create, read and delete objects in bucket forbidden"),
        ("gs://runs/a", {"STORAGE_EMULATOR_HOST": "http://127.0.0.1:9"}, "from Cloud Storage; check the network"),
        ("gs://runs/a", {"STORAGE_EMULATOR_HOST": None}, "run gcloud auth application-default login"),
        ("gs://runs/a", {"XDG_CACHE_HOME": "/dev/null"}, "room for the checkpoints in XDG_CACHE_HOME"),
        ("gs://runs/a", {"resume": "must"}, "gs://runs/a holds no complete checkpoint to go on from; check --run_dir"),
    ],
)
def test_what_is_wrong_with_a_bucket_is_said_before_anything_is_compiled(
    proxy, tmp_path, monkeypatch, capsys, url, environment, said
):
    if "network" in said:
        monkeypatch.setattr(storage, "START_SECONDS", 1.0)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "no_such_key.json"))
    resume = environment.pop("resume", "never")
    for name, value in environment.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name)
    graphs = graphs_compiled()
    passing = "network" in said  # a restart may help: services give up on 2
    assert in_process(*OPTIONS, "--run_dir", url, "--resume", resume) == (1 if passing else 2)
    error = capsys.readouterr().err
    assert error.startswith("error: ") and said in error and "Traceback" not in error and error.count("\n") == 1
    assert graphs_compiled() == graphs and not (tmp_path / "first").exists()


@pytest.mark.parametrize(
    "content, said", [(b'{"pre', "cannot be read as JSON"), (b" " * 2**21, "expected 1,048,576 at")]
)
def test_options_in_a_bucket_that_cannot_be_read_are_named(proxy, content, said):
    bucket, prefix = storage.connect("gs://runs/options")
    bucket.blob(f"{prefix}config.json").upload_from_string(content)
    argv = ["--run_dir", "gs://runs/options/", "--resume", "auto"]
    with pytest.raises(InputError, match=f"gs://runs/options/config.json .*{said}"):
        parse_command_line(MnistConfig, "", argv)
    bucket.blob(f"{prefix}config.json").delete()
    assert parse_command_line(MnistConfig, "", argv).options_from == ""


def test_a_finished_or_running_run_is_never_overwritten(proxy):
    run_dir, mirror = another_process("taken")
    (run_dir / "config.json").write_text("{}")
    mirror.upload_logs()
    with pytest.raises(InputError, match="gs://runs/taken already holds a run; choose another, or continue it with"):
        open_run_dir(config("taken"))


# ------------------------------------------------------------------------------------------------------------ training
def test_a_local_run_needs_no_client_library(uninterrupted, monkeypatch):
    monkeypatch.setitem(sys.modules, "google.cloud", None)  # importing it is an ImportError
    spec = importlib.util.spec_from_file_location("storage_again", storage.__file__)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert in_process(*OPTIONS, "--no_tensorboard", "--run_dir", uninterrupted, "--resume", "must") == 0


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("local") / "run"
    assert in_process(*OPTIONS, "--no_tensorboard", "--run_dir", run_dir) == 0
    return run_dir


def assert_same_as_local(folder: str, uninterrupted: Path, emulator: int) -> None:
    run_dir, state = end_state(folder)
    assert_identical(state, state_in(uninterrupted / f"checkpoints/step_{LAST:08d}"))
    found, expected = numbers(run_dir), numbers(uninterrupted)
    stops = [line for line in found if line["kind"] == "checkpoint" and line not in expected]  # saved there as well
    assert [line for line in found if line not in stops] == expected
    lines = [(line["kind"], line["step"]) for line in read_lines(run_dir)]
    assert len(lines) == len(set(lines)), "every line once"
    history = changes(emulator, folder)
    assert marked_steps(history) == [30, 40, LAST]
    there = {name for kind, name, *_ in history if kind == "put"}
    assert {"config.json", "metrics.jsonl", "summary.json"} <= there


def test_a_run_in_a_bucket_under_faults_ends_with_the_bits_of_a_local_one(
    uninterrupted, proxy, emulator, machine, monkeypatch, capsys
):
    monkeypatch.setattr(storage, "REQUEST_SECONDS", 0.7)
    proxy.plan = every(6)
    assert in_process(*OPTIONS, "--run_dir", "gs://runs/faulty") == 0
    assert "run        gs://runs/faulty" in capsys.readouterr().out
    assert set(proxy.injected) == set(FAULTS)
    proxy.plan = lambda method, path: None
    assert any("events.out.tfevents" in name for _, name, *_ in changes(emulator, "faulty"))
    machine("second")
    assert_same_as_local("faulty", uninterrupted, emulator)


def test_killed_and_stopped_in_mid_upload_a_run_goes_on_from_an_empty_machine(
    uninterrupted, proxy, emulator, machine, monkeypatch, capsys
):
    options = [*OPTIONS, "--no_tensorboard", "--run_dir", "gs://runs/killed"]
    uploading, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def hold_back_second_checkpoint(method: str, path: str) -> None:
        """Its file follows metrics.jsonl, once the first checkpoint is there: the request waits for go_on."""
        history = changes(emulator, "killed")
        if "uploadType" in path and marked_steps(history) == [10] and history[-1][1] == "metrics.jsonl":
            uploading.set()
            go_on.wait(600)

    proxy.plan = hold_back_second_checkpoint
    as_here = {"XLA_FLAGS": os.environ["XLA_FLAGS"]}  # bit for bit what this process computes
    process = start("tests/bucket_worker.py", "simple_mnist_tpu.py", *options, **as_here)
    waits(uploading.is_set, alive=process)
    process.kill()
    process.wait()
    go_on.set()  # the request in flight may still arrive: it is the file, never its marker
    assert marked_steps(changes(emulator, "killed")) == [10]

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
    assert in_process(*options, "--resume", "must") == 143
    ended.set()
    stopper.join()
    assert before_its_time == [False]
    output = capsys.readouterr().out
    stopped = int(re.search(r"saved after step (\d+)", output)[1])
    assert "resumed    after step 10" in output and marked_steps(changes(emulator, "killed"))[-1] == stopped
    assert "repeat the command with --run_dir gs://runs/killed --resume must" in output

    machine("third")
    monkeypatch.setattr(storage, "REQUEST_SECONDS", 0.7)
    proxy.plan = every(7)
    assert in_process(*options, "--resume", "must") == 0
    assert f"resumed    after step {stopped}" in capsys.readouterr().out
    proxy.plan = lambda method, path: None
    machine("fourth")
    assert_same_as_local("killed", uninterrupted, emulator)


def test_a_run_that_cannot_upload_fails_with_exit_code_1(proxy, emulator, monkeypatch, capsys):
    monkeypatch.setattr(storage, "RETRY_SECONDS", 0.5)
    proxy.plan = lambda method, path: (
        "503" if "uploadType" in path and marked_steps(changes(emulator, "full")) == [10, 20] else None
    )
    assert in_process(*OPTIONS, "--no_tensorboard", "--run_dir", "gs://runs/full") == 1
    error = capsys.readouterr().err
    assert "error: the checkpoint" in error or "error: its log files" in error
    assert "the checkpoints that were complete there still are" in error and "Traceback" not in error
    proxy.plan = lambda method, path: None
    assert steps_in_bucket("full") == [10, 20]


def test_a_run_whose_working_folder_is_gone_ends_with_exit_code_1_and_goes_on_from_the_bucket(
    uninterrupted, proxy, emulator, monkeypatch, capsys
):
    url, batches_of = "gs://runs/gone", simple_mnist_tpu.TrainBatches

    class Batches(batches_of):
        def batch(self, index):
            if index == 15:
                waits(lambda: marked_steps(changes(emulator, "gone")) == [10])
                storage.working_folder(url).rename(storage.working_folder(url).with_name("moved"))
            return super().batch(index)

    monkeypatch.setattr(simple_mnist_tpu, "TrainBatches", Batches)
    options = [*OPTIONS, "--no_tensorboard", "--run_dir", url]
    assert in_process(*options) == 1
    assert f"error: run_dir {storage.working_folder(url)} is gone: found nothing there" in capsys.readouterr().err
    monkeypatch.setattr(simple_mnist_tpu, "TrainBatches", batches_of)
    assert in_process(*options, "--resume", "must") == 0
    assert "resumed    after step 10" in capsys.readouterr().out
    assert_same_as_local("gone", uninterrupted, emulator)


TRANSFORMER = "--num_layers 1 --embedding_dim 16 --num_heads 2 --sequence_length 16 --vocab_size 16".split()
TRANSFORMER += "--warmup_steps 1 --num_steps 4 --save_every 2 --log_every 2 --eval_every 4 --eval_batches 1".split()
TRANSFORMER += "--global_batch_size 4 --no_tensorboard".split()


def test_a_transformer_run_in_a_bucket(proxy, emulator, machine, monkeypatch, capsys):
    place = ["--run_dir", "gs://runs/transformer"]
    for given in ([*place, *TRANSFORMER], [*place, "--resume", "must"]):
        before = [change for change in changes(emulator, "transformer") if change[1] != "writable"]
        config = parse_command_line(TransformerConfig, "", given)
        assert run_script(lambda config=config: transformer_tpu.train(config)) == 0, capsys.readouterr().err
        machine("second")
    output = capsys.readouterr().out
    assert "options    from gs://runs/transformer/config.json" in output and "resumed    after step 4 of 4" in output
    assert output.endswith("\nfinished   step 4 of 4 was reached before; nothing to do\n")
    assert [change for change in changes(emulator, "transformer") if change[1] != "writable"] == before
    assert marked_steps(changes(emulator, "transformer")) == [2, 4] and end_state("transformer")[1]["step"] == 4


@pytest.mark.slow
def test_a_run_in_a_bucket_goes_on_from_memory(proxy, emulator, tmp_path):
    """Killed, once a line of the log that is in the bucket says so of a checkpoint in memory."""
    memory, url = tmp_path / "memory", "gs://runs/from_memory"
    memory.mkdir()
    options = [*OPTIONS, "--num_epochs=40", "--save_every=1000", "--save_memory_every=5", f"--memory_dir={memory}"]
    options += ["--no_tensorboard", f"--run_dir={url}", "--resume=auto"]
    process = start("tests/bucket_worker.py", "simple_mnist_tpu.py", *options)

    def has_said() -> bool:
        with contextlib.suppress(InputError):  # it was replaced while it was read
            return (storage.read_object(url, "metrics.jsonl", "a log", 1 << 20) or b"").count(b'"memory"') >= 2
        return False

    waits(has_said, alive=process)
    process.kill()
    process.wait()
    ended = run("tests/bucket_worker.py", "simple_mnist_tpu.py", *options)
    (step,) = re.findall(r"memory     held the checkpoint of step (\d+): it is in the run directory now", ended.stdout)
    assert ended.returncode == 0 and f"resumed    after step {step} of 880" in ended.stdout
    assert marked_steps(changes(emulator, "from_memory")) == [int(step), 880] and not list(memory.iterdir())
    lines = [(line["kind"], line["step"]) for line in read_lines(end_state("from_memory")[0])]
    assert len(lines) == len(set(lines)) and ("train", int(step) // 7 * 7) in lines, "every line once"


@pytest.mark.slow
def test_two_hosts_train_in_one_bucket_each_in_a_folder_of_its_own(proxy, emulator, tmp_path):
    place = ["--run_dir=gs://runs/two_hosts"]
    first = [*TRANSFORMER, "--scheduler=constant", "--device=cpu", *place]
    for round, given in enumerate((first, [*place, "--resume=must", "--num_steps=6"])):
        port = free_port()
        places = [dict(XDG_CACHE_HOME=tmp_path / f"{round}_{index}") for index in range(2)]
        hosts = [start("tests/transformer_hosts.py", i, 2, port, *given, **place) for i, place in enumerate(places)]
        outputs = [host.communicate() for host in hosts]
        assert [host.returncode for host in hosts] == [0, 0], outputs
    assert "resumed    after step 4 of 6" in outputs[0][0] and "step " not in outputs[1][0]
    assert marked_steps(changes(emulator, "two_hosts")) == [2, 4, 6]
