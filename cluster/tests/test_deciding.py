"""Who starts next, on which chips: python -m cluster's queue without Ray."""

import json
import os
import shutil
import subprocess
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster import client
from cluster.deciding import Host, Place, Request, candidates, decide
from cluster.driver import Spec, arguments_for
from cluster.folder import check_folder, digest_of
from cluster.host import HostProcess, device_variables
from cluster.turns import PROTOCOL, SETTLE_SECONDS, SILENT_SECONDS, Turns
from tpu_utils.base.errors import InputError, PassingError
from tpu_utils.base.hardware import GENERATIONS
from tpu_utils.remote.hosts import settle_hosts

pytestmark = pytest.mark.skipif(
    find_spec("ray") is None, reason="LOUD: Ray is not installed: pip install -r cluster/requirements.txt"
)
TWO = [Host("a", 4), Host("b", 4)]
SLICE = [Host(f"s{i}", 4, "v5litepod-16", "one", i, f"10.0.0.{i}") for i in range(4)]


def wants(name: str, chips: int, since: float = 0.0, **more) -> Request:
    return Request(name, more.pop("user", name), chips, since=since, **more)


def places(text: str) -> list[Place]:
    """a:01 b:3 is chips 0 and 1 of host a, and chip 3 of b."""
    return [Place(node, tuple(map(int, chips))) for node, chips in (place.split(":") for place in text.split())]


BUSY = {"p": "a:01", "q": "b:012"}
LARGE, SMALL, ONE = wants("large", 4), wants("small", 2, 1), wants("one", 1, 2)
WHOLE = wants("whole", 4, hosts=4, kind="v5litepod-16")


@pytest.mark.parametrize(
    "hosts, busy, waiting, started",
    [
        (  # neighbours share a host: chips 1 and 2 are none
            *(TWO, {}, [wants("x", 2), wants("y", 2, 1), wants("z", 1, 2), wants("w", 2, 3)]),
            {"x": "a:01", "y": "a:23", "z": "b:0", "w": "b:23"},
        ),
        # large waits for host a, which has more free; small then for b, where one would delay it
        (TWO, BUSY, [LARGE, SMALL, ONE], {}),
        (TWO, BUSY, [LARGE, ONE], {"one": "b:3"}),
        (TWO, {"q": "b:012"}, [LARGE, SMALL, ONE], {"large": "a:0123"}),
        (TWO[:1], {}, [wants("early", 4), wants("late", 4, 5, priority=1)], {"late": "a:0123"}),
        # a slice is taken whole or not at all, and small runs do not creep into it
        (SLICE, {}, [WHOLE], {"whole": "s0:0123 s1:0123 s2:0123 s3:0123"}),
        (SLICE, {"p": "s2:0"}, [WHOLE, SMALL], {}),
        (SLICE[:3], {}, [WHOLE], {}),
        (SLICE, {}, [wants("x", 4, hosts=4, kind="v6e-16")], {}),
        # nodes to avoid are left out while there are others
        (TWO, {}, [wants("x", 2, avoid=("a",))], {"x": "b:01"}),
        (TWO[:1], {}, [wants("x", 2, avoid=("a",))], {"x": "a:01"}),
    ],
)
def test_who_starts_and_where(hosts, busy, waiting, started):
    running = {name: (name, places(text)) for name, text in busy.items()}
    assert decide(hosts, running, waiting, {}) == {name: places(text) for name, text in started.items()}


def test_a_quota_holds_its_user_alone():
    waiting = [wants("x", 4, user="alice"), wants("y", 2, 1, user="alice"), wants("z", 2, 2, user="bob")]
    assert set(decide(TWO, {}, waiting, {"alice": 4, "*": 2})) == {"x", "z"}


sizes = st.sampled_from([1, 2, 4, 8])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(sizes, st.sampled_from("abc"), st.integers(0, 2), st.booleans()), max_size=12),
    st.lists(sizes, min_size=1, max_size=4),
    st.dictionaries(st.sampled_from("abc*"), st.integers(0, 20)),
    st.randoms(use_true_random=False),
)
def test_whatever_is_asked_no_chip_is_given_twice_and_everybody_has_a_turn(asked, chips, quota, random):
    """A whole life of the queue: runs end in any order, small ones keep coming, and each that can ever fit starts."""
    hosts = [Host(f"h{i}", size) for i, size in enumerate(chips)] + SLICE
    there = {(host.node, chip) for host in hosts for chip in range(host.chips)}
    requests = {}
    for i, (size, user, priority, is_slice) in enumerate(asked):
        more = dict(chips=4, hosts=4, kind="v5litepod-16") if is_slice else dict(chips=size)
        requests[f"r{i}"] = Request(f"r{i}", user, priority=priority, since=i, **more)
    limits = {user: quota.get(user, quota.get("*", 10**6)) for user in "abcd"}
    can = {name for name, r in requests.items() if candidates(r, hosts) and r.all_chips <= limits[r.user]}
    waiting, held, had = dict(requests), {}, set()
    for moment in range(400):
        running = {name: (requests[name].user, found) for name, found in held.items()}
        for name, found in decide(hosts, running, waiting.values(), quota).items():
            request = waiting.pop(name)
            assert [len(place.chips) for place in found] == [request.chips] * request.hosts
            held[name] = found
            had.add(name)
        taken = [(p.node, chip) for found in held.values() for p in found for chip in p.chips]
        assert len(taken) == len(set(taken)) and there.issuperset(taken)
        for user in "abc":
            assert sum(requests[name].all_chips for name in held if requests[name].user == user) <= limits[user]
        for name in [name for name in held if random.random() < 0.4 or moment > 300]:
            del held[name]
        if moment < 60:  # newcomers that would fit at once, for ever
            newcomer = Request(f"n{moment}", "d", 1, since=100 + moment)
            requests[newcomer.name] = waiting[newcomer.name] = newcomer
        elif can <= had:
            break
    assert can <= had


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


def test_the_queue_forgets_the_silent_and_learns_again_after_a_restart(tmp_path):
    clock, state = Clock(), tmp_path / "state.json"
    turns = Turns(lambda: TWO, state, clock=clock)
    x, y = vars(wants("x", 4)), vars(wants("y", 8))
    first = turns.ask(PROTOCOL, x)
    assert first == {"places": [["a", (0, 1, 2, 3)]]} == turns.ask(PROTOCOL, x)
    assert "no live host or slice" in turns.ask(PROTOCOL, y)["waits"]
    turns.release("y")
    again = Turns(lambda: TWO, state, restarted=True, clock=clock)
    z = vars(wants("z", 4, 5.0))
    assert "restarted" in again.ask(PROTOCOL, z)["waits"]  # x has not said yet what it has
    assert again.ask(PROTOCOL, x, first["places"]) == first
    clock.now += SETTLE_SECONDS
    assert again.ask(PROTOCOL, z) == {"places": [["b", (0, 1, 2, 3)]]}
    clock.now += SILENT_SECONDS + 1
    assert again.ask(PROTOCOL, vars(wants("w", 4, 9.0)))["places"][0][0] == "a"
    assert "given to another run after it had been silent" in again.ask(PROTOCOL, x, first["places"])["lost"]
    what = [(event["what"], event["name"]) for event in json.loads(state.read_text())["events"]]
    assert ("lost", "x") in what and ("runs on", "x") in what
    assert "version" in again.ask(PROTOCOL + 1, x)["refused"]


def test_quotas_are_read_again_and_a_damaged_file_leaves_them(tmp_path):
    quota = tmp_path / "quota.json"
    quota.write_text('{"*": 4}')
    turns = Turns(lambda: TWO, tmp_path / "state.json", str(quota), clock=Clock())
    large = vars(wants("x", 4, hosts=2, user="u", kind="v5litepod-8"))
    assert "u may have 4 chips at a time, and asks for 8" in turns.ask(PROTOCOL, large)["refused"]
    quota.write_text("{damaged")
    assert "refused" in turns.ask(PROTOCOL, large) and "cannot be read" in turns.state()["quota_problem"]
    quota.write_text('{"*": -1}')
    assert turns.read_quota() == {"*": 4} and "expected chips by user" in turns.quota_problem
    quota.write_text('{"*": 16}')
    assert "waits" in turns.ask(PROTOCOL, large) and not turns.state()["quota_problem"]


@pytest.mark.parametrize(
    "given, attempt, expected",
    [
        ([], 0, ["--run_dir", "gs://b/r/n"]),
        (["--run-dir=x"], 0, ["--run-dir=x"]),
        (
            ["--run_dir", "x", "--no_download", "--resume", "never", "--seed=1"],
            *(1, ["--run_dir", "x", "--no_download", "--seed=1", "--resume", "auto"]),
        ),
        (["--resume=must"], 2, ["--run_dir", "gs://b/r/n", "--resume", "auto"]),
    ],
)
def test_a_script_is_given_a_run_directory_and_goes_on_after_a_fault(given, attempt, expected):
    assert arguments_for(Spec({"name": "n"}, "s.py", given, "gs://b/r/"), attempt) == expected
    assert arguments_for(Spec({"name": "n"}, "s.py", given), attempt) == given  # --plain


@pytest.mark.parametrize(
    "chips, on_bus, kind, own, bounds",
    [
        ((0,), ["v5e"] * 4, "v5litepod-16", "v5litepod-1", "1,1,1"),
        ((2, 3), ["v5p"] * 4, "v5p-8", "v5p-4", "1,2,1"),  # counts cores
        ((4, 5, 6, 7), ["v5e"] * 8, "v5litepod-8", "v5litepod-4", "2,2,1"),
    ],
)
def test_the_scripts_understand_a_part_of_a_host(chips, on_bus, kind, own, bounds):
    """What tpu_utils/remote/hosts.py makes of it, with all chips of the machine on the bus: one host, no metadata."""
    told = device_variables(chips, len(on_bus), True, kind, 0, ["10.0.0.7"])
    assert told["TPU_VISIBLE_CHIPS"] == ",".join(map(str, chips)) and "PJRT_DEVICE" not in told
    assert (told["TPU_ACCELERATOR_TYPE"], told["TPU_CHIPS_PER_PROCESS_BOUNDS"]) == (own, bounds)
    assert settle_hosts([GENERATIONS[family] for family in on_bus], told) == (0, ["localhost"])


def test_a_whole_slice_is_told_as_its_metadata_tells_it():
    assert device_variables((0, 1, 2, 3), 4, True, "v5p-8", 0, ["h"]) == {}  # of one host: as it finds itself
    whole = device_variables((0, 1, 2, 3), 4, True, "v5litepod-16", 2, ["a", "b", "c", "d"])
    assert whole == {"TPU_WORKER_ID": "2", "TPU_WORKER_HOSTNAMES": "a,b,c,d", "TPU_ACCELERATOR_TYPE": "v5litepod-16"}


def job(status: str, code: int | None = None, name: str = "k", user: str = "u") -> SimpleNamespace:
    """As Ray describes one."""
    about = dict(submission_id=name, metadata={"user": user}, driver_exit_code=code)
    return SimpleNamespace(status=SimpleNamespace(value=status), **about)


def connected(jobs) -> client.Cluster:
    """Without a cluster. jobs: in place of Ray's client."""
    made = client.Cluster.__new__(client.Cluster)
    made.jobs = jobs
    return made


def test_the_exit_code_is_that_of_the_script():
    ends = [("SUCCEEDED", 0), ("FAILED", 2), ("FAILED", -9), ("FAILED", None), ("STOPPED", None)]
    assert [client.exit_code(job(*end)) for end in ends] == [0, 2, 1, 1, 143]


def test_a_long_log_is_followed_once_from_end_to_end(monkeypatch):
    """Every message once cost the whole log so far: 20 MB never ended. The connection breaks once."""
    lines = ["2026-11-23 02:50:36,712\tINFO job_manager.py\n", "Running entrypoint for job k: x\n"]
    lines += [f"step {step}\n" for step in range(20_000)]
    states, read, said = ["RUNNING", "FAILED"], [], []

    async def tail(name):
        for start in range(0, len(lines), 10):  # as Ray sends them
            if len(states) == 2 and start > 5_000:
                raise RuntimeError("WebSocket connection closed unexpectedly")
            yield "".join(lines[start : start + 10])

    jobs = Mock(tail_job_logs=tail, get_job_info=lambda name: job(states.pop(0), 7))
    jobs.get_job_logs.return_value = "".join(lines)
    without_preface = client.without_preface
    monkeypatch.setattr(client, "without_preface", lambda text: read.append(len(text)) or without_preface(text))
    assert connected(jobs).follow("k", said.append) == 7
    assert "".join(said) == "".join(lines[2:])
    assert sum(read) < 2 * sum(map(len, lines))
    jobs.get_job_info = Mock(side_effect=ConnectionError("refused"))
    with pytest.raises(PassingError, match="the cluster's head is gone: refused; the run is lost with it"):
        connected(jobs).follow("k", said.append)


def write(folder: Path, *names: str) -> Path:
    """A folder with these files."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")
    return folder


def test_a_large_working_folder_is_refused_with_the_largest_named(tmp_path):
    large = ("weights/w.bin", "runs/x/big", ".venv/lib/big", "secret/big")
    write(tmp_path, "script.py", *large)
    (tmp_path / ".gitignore").write_text("/secret/\n")
    for name in large:
        os.truncate(tmp_path / name, 10 << 30)  # sparse
    with pytest.raises(ValueError, match=r"holds 10,240 MiB, expected code: at most 64 MiB; largest: weights/ 10,240"):
        check_folder(tmp_path)
    (tmp_path / "weights/w.bin").unlink()
    assert check_folder(tmp_path).files == [tmp_path / ".gitignore", tmp_path / "script.py"]


def by_ray(folder) -> set[str]:
    """What Ray puts into the package that it uploads, and unpacks on a host."""
    from ray._private.runtime_env.packaging import _zip_files

    made = Path(tempfile.mkdtemp(dir=folder.parent))
    check_folder(folder).copy(made / "package" / "code")
    _zip_files(str(made / "package"), [], str(made / "package.zip"), include_gitignore=True)
    with zipfile.ZipFile(made / "package.zip") as package:
        package.extractall(made / "unpacked")
    unpacked = made / "unpacked" / "code"
    assert digest_of(unpacked) == digest_of(made / "package" / "code")
    return {str(path.relative_to(unpacked)) for path in unpacked.rglob("*") if path.is_file()}


def test_what_is_ignored_or_secret_stays_here(tmp_path):
    """A byte order mark once switched the first pattern off, .git/info/exclude was not read, keys went up."""
    keys = ("keys/id_rsa", "keys/x.pem", ".env")
    folder = write(tmp_path / "code", "script.py", "first/a", "second/b", "odd [name]!/c", "by user", *keys)
    for name in (".rayignore", ".gitignore"):
        (folder / name).write_text("\ufeff/first/\n/odd*/\n", encoding="utf-8")
        with pytest.raises(ValueError, match=rf"{name} begins with a byte order mark, expected plain UTF-8; save it"):
            check_folder(folder)
    (folder / ".rayignore").unlink()
    (folder / ".gitignore").write_text("/first/\n/odd*/\n")
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    (folder / ".git" / "info" / "exclude").write_text("/second/\nby user\n")
    assert by_ray(folder) == {"script.py", ".gitignore"}
    assert check_folder(folder).secrets == [".env", "keys/id_rsa", "keys/x.pem"]


@pytest.mark.parametrize("target", ["../elsewhere", "../elsewhere/key", ".", ".."])
def test_a_link_that_leaves_the_folder_is_refused_by_name(tmp_path, target):
    write(tmp_path, "elsewhere/key")
    folder = write(tmp_path / "code", "inner/script.py")
    (folder / "again").symlink_to("inner")
    assert by_ray(folder) == {"inner/script.py", "again/script.py"}
    (folder / "linked").symlink_to(target)
    with pytest.raises(ValueError, match=rf"{folder}/linked is a link to .*, whose files would be uploaded"):
        check_folder(folder)
    (folder / ".rayignore").write_text("/linked\n")
    assert by_ray(folder) == {"inner/script.py", "again/script.py", ".rayignore"}


def test_a_link_shows_no_secret_and_nothing_that_is_left_out(tmp_path):
    """A link within the folder to .env or .git/config was uploaded under its own name."""
    write(tmp_path, ".env", "script.py", "Server.PEM")
    (tmp_path / "settings").symlink_to(".env")
    assert by_ray(tmp_path) == {"script.py"}
    assert check_folder(tmp_path).secrets == [".env", "Server.PEM"]
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    for target in (".git", ".git/config"):
        (tmp_path / "repository").symlink_to(target)
        with pytest.raises(ValueError, match=f"repository is a link to {tmp_path}/{target}, .*expected links"):
            check_folder(tmp_path)
        (tmp_path / "repository").unlink()


def test_a_folder_of_somebody_elses_runs_nothing_here(tmp_path):
    """Git runs what core.fsmonitor of a work tree's own configuration names."""
    folder = write(tmp_path / "code", "script.py")
    for words in (["init", "-q"], ["add", "script.py"], ["config", "core.fsmonitor", f"touch {tmp_path}/ran; false"]):
        subprocess.run(["git", *words], cwd=folder, check=True)
    check_folder(folder)
    assert not (tmp_path / "ran").exists()


def test_a_run_that_cannot_be_uploaded_deletes_nothing(tmp_path, monkeypatch):
    """The record and log of the earlier run under this name were gone before its files were read and sent."""
    (tmp_path / "script.py").write_text("x")
    monkeypatch.setattr(client.Cluster, "check_hosts", lambda self: None)
    spec = Spec(dict(name="k", user="u", chips=1, hosts=1, kind=""), "script.py", [])

    def calls(problem=None) -> list[str]:
        jobs = Mock(**{"list_jobs.return_value": [job("FAILED", 1)]})
        jobs._upload_working_dir_if_needed.side_effect = problem
        said = []
        try:
            connected(jobs).submit(spec, tmp_path, 1, {})
        except (InputError, PassingError) as error:
            said = [str(error)]
        return [name for name, *_ in jobs.method_calls if name in ("delete_job", "submit_job")] + said

    assert calls() == ["delete_job", "submit_job"]
    assert calls(RuntimeError("too large")) == ["the cluster does not take the run: too large"]
    (tmp_path / "gone").symlink_to("script.py")
    copy = shutil.copy
    monkeypatch.setattr(shutil, "copy", lambda path, to: copy(f"{path}_2" if path.name == "gone" else path, to))
    (said,) = calls()
    assert "gone_2 cannot be uploaded: No such file or directory; add it to .rayignore" in said


def test_a_busy_head_is_asked_no_longer_than_that(tmp_path, monkeypatch):
    """A job that still ran was deleted, which Ray refuses: a traceback, and the job stayed in everybody's list."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(client, "PROBE_SECONDS", 0.0)
    node = dict(NodeID="ab", NodeManagerAddress="192.0.2.1", Alive=True)
    monkeypatch.setattr(client.Cluster, "nodes", lambda self: [node])
    busy = Mock(**{"get_job_status.return_value": SimpleNamespace(value="RUNNING")})
    with pytest.raises(PassingError, match="in 0 s the head did not say where its files are; try again"):
        connected(busy).check_hosts()
    assert [name for name, *_ in busy.method_calls] == ["submit_job", "get_job_status", "stop_job"]


def test_only_a_folder_of_ones_own_is_closed_to_others():
    """Ray opens its folder to everybody. One in a folder of mode 700 is closed, unless that can be renamed."""
    from cluster.probe import open_to_others

    outermost = Path(tempfile.mkdtemp(dir="/tmp"))  # pytest's own folder is closed
    place = outermost / "mine" / "ray"
    place.mkdir(parents=True)
    place.chmod(0o777)
    for outer, inner, expected in (
        *((0o755, 0o700, ""), (0o755, 0o755, place), (0o755, 0o711, place)),
        *((0o1777, 0o700, ""), (0o777, 0o700, outermost)),
    ):
        outermost.chmod(outer), place.parent.chmod(inner)
        assert open_to_others(place) == str(expected), (outer, inner)
    (outermost / "link").symlink_to(place)
    assert open_to_others(outermost / "link") == str(outermost / "link")
    if os.geteuid() == 0:
        outermost.chmod(0o755)
        os.chown(outermost, 65534, 65534)
        assert open_to_others(place) == str(outermost)
    shutil.rmtree(outermost)


def test_a_host_runs_only_what_was_submitted(tmp_path, monkeypatch):
    """Whoever could write beside it once put another script in its place while the run waited."""
    made = write(tmp_path / "code", "script.py")
    code = made.rename(tmp_path / f"{digest_of(made)}_1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for changed in ("script.py", "torch.py"):
        write(code, "script.py")
        (code / changed).write_text("theirs")
        said = HostProcess().start("one", "", code.name, ["script.py"], {})
        assert "is not what was submitted" in said and not list(tmp_path.glob("tpu_cluster_one_*"))
