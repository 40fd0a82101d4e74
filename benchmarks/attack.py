"""Attack this project's own files and sockets, and see that nothing gets in and nothing is lost.

Run:     python benchmarks/attack.py                 # all of it
         python benchmarks/attack.py --share 0.05    # a twentieth of the mutations
         python benchmarks/attack.py --only wire
Prints:  a table: what was attacked, how often, what became of it. Exit code 1 if anything ran code, crashed, hung,
         wrote outside its folder, took more than twice the memory of what is truly there, or was refused without a
         message.

Everything happens in temporary folders and on loopback. Each attack is a process of its own, so that a crash is seen as
one. A mutation is refused (a checkpoint: passed over for the one before), or harmless: what is read has the names,
shapes and types of what was written. Most mutated files fit their CRC-32: whoever writes one can write the other.
"""

import argparse
import contextlib
import dataclasses
import io
import json
import os
import random
import re
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "tests"))
os.environ.setdefault("PJRT_DEVICE", "CPU")
from processes import Script, run, start, waits  # noqa: E402
from run_files import saved_steps  # noqa: E402

TIME_LIMIT = 1800
HOME = "127.0.0.1"
VALUES = {"config": {"seed": 0}, "evaluation": {"accuracy": 0.5}}
ODD = [None, True, -1, 0, 7, 1.5, 2**31, 2**63, 10**40, "", "x", "../../x", [], {}, [[]], [-1], [2**62, 2**62], "F64"]


class Complaint(Exception):
    """What should not have happened."""


def expect(condition: object, complaint: str) -> None:
    if not condition:
        raise Complaint(complaint)


def peak() -> int:
    """Bytes: the most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# -------------------------------------------------------------------------------------------------------- checkpoints


def make_checkpoints(folder: Path, megabytes: int = 1):
    """Steps 10 and 20 of one run, sharded by two processes, whose files are written as each would."""
    import torch

    from tpu_utils.checkpoint import Checkpoints
    from tpu_utils.checkpoint.sharded_tensors import shards_by_path, shards_of
    from tpu_utils.checkpoint.state import HostCopy, Kind, write_tensors

    checkpoints = Checkpoints(folder, 3, run_id="ours")
    rows = megabytes * 2**20 // 4 // 64 // 2
    for step in (10, 20):
        whole = {"model/bias": torch.full((8,), float(step)), "random/torch": torch.arange(64, dtype=torch.uint8)}
        whole["model/weight"] = torch.full((rows, 64), float(step))
        shards = {(at, 0): torch.full((rows // 2, 64), float(step)) for at in (0, rows // 2)}
        kind = Kind((rows, 64), torch.float32)
        copy = HostCopy(step, VALUES, whole, {"model/sharded": kind}, {"model/sharded": shards})
        aside = folder / f".writing_{step:08d}"
        aside.mkdir(parents=True)
        written = []
        for index, (at, shard) in enumerate(shards.items()):
            name = f"shards_{index:05d}.safetensors"
            part = HostCopy(step, {}, {}, copy.sharded, {"model/sharded": {at: shard}})
            sums = write_tensors(aside / name, shards_of(part))
            written.append({"name": name, "sums": sums, "shards": shards_by_path(part, name)})
        checkpoints._finish(copy, aside, written, {})
    return checkpoints


def mark(folder: Path) -> None:
    """A done marker that fits the files."""
    from tpu_utils.base.writing import checksum_of

    marker = json.loads((folder / "done").read_bytes())
    marker["files"] = {
        path.name: checksum_of(io.BytesIO(path.read_bytes())) for path in folder.iterdir() if path.name != "done"
    }
    (folder / "done").write_text(json.dumps(marker))


def mutated(content: bytes, draw: random.Random) -> bytes:
    """Flipped, truncated, grown, or with a piece from elsewhere; mostly near the front, where headers are."""
    data = bytearray(content)
    for _ in range(draw.randint(1, 4)):
        place = min(int(len(data) * draw.random() ** 4), max(0, len(data) - 1))
        kind = draw.randrange(5)
        if kind == 0 and data:
            data[place] ^= 1 << draw.randrange(8)
        elif kind == 1:
            data[place : place + draw.randrange(9)] = draw.randbytes(draw.randrange(9))
        elif kind == 2:
            del data[place + draw.randrange(64) :]
        elif kind == 3:
            data += draw.randbytes(draw.randrange(99))
        else:
            data[:8] = struct.pack("<Q", draw.choice([0, 1, 2**16, 2**31, 2**63, 2**64 - 1]))
    return bytes(data)


def altered(value: object, draw: random.Random) -> object:
    """JSON with one thing in it replaced, removed, doubled or renamed."""
    if isinstance(value, dict) and value and draw.random() < 0.85:
        key = draw.choice(list(value))
        changed = dict(value)
        what = draw.random()
        if what < 0.12:
            del changed[key]
        elif what < 0.24:
            changed[draw.choice(["__class__", "../../x", "code", "shards", key + "x"])] = changed[key]
        else:
            changed[key] = altered(value[key], draw)
        return changed
    if isinstance(value, list) and value and draw.random() < 0.85:
        changed = list(value)
        place = draw.randrange(len(value))
        if draw.random() < 0.2:
            changed.insert(place, changed[place])
        else:
            changed[place] = altered(value[place], draw)
        return changed
    if isinstance(value, int) and draw.random() < 0.5:
        return value + draw.choice([-1, 1, 4, 2**32, -(2**40)])
    return draw.choice(ODD)


def change_header(content: bytes, draw: random.Random) -> bytes:
    """A file of safetensors whose header says something else."""
    length = int.from_bytes(content[:8], "little")
    header = json.dumps(altered(json.loads(content[8 : 8 + length]), draw)).encode()
    return len(header).to_bytes(8, "little") + header + content[8 + length :]


def read_all(folder: Path) -> tuple[int, dict]:
    """The step that is resumed, and shape and type of every tensor in it, all of them read."""
    from tpu_utils.checkpoint.loading import CheckpointReader

    saved = CheckpointReader(folder, run_id="ours").load_for_resume("must")
    files = saved.files()
    found = {path: files.read(path) for path in saved.entries}
    saved.value("config", dict), saved.value("evaluation", dict)
    return saved.step, {path: (tuple(tensor.shape), tensor.dtype) for path, tensor in found.items()}


def attack_checkpoints(count: int, draw: random.Random, folder: Path) -> str:
    """Bytes and JSON of every file of the newest checkpoint."""
    from tpu_utils.base.errors import CheckpointError

    intact = folder / "intact"
    checkpoints = make_checkpoints(intact, megabytes=4)
    names = sorted(path.name for path in checkpoints.path(20).iterdir())
    _, kinds = read_all(checkpoints.folder)
    outcomes = {"fell back": 0, "harmless": 0, "refused": 0}
    size = sum(path.stat().st_size for path in checkpoints.path(20).iterdir())
    before = peak()
    target = Path(tempfile.mkdtemp(dir=folder)) / "checkpoints"
    for number in range(count):
        shutil.copytree(intact, target)
        victim = target / "step_00000020" / draw.choice(names)
        content, how = victim.read_bytes(), draw.randrange(3)
        if how == 0 or (how == 1 and victim.suffix not in (".json", ".safetensors") and victim.name != "done"):
            victim.write_bytes(mutated(content, draw))
        elif victim.suffix == ".safetensors":
            victim.write_bytes(change_header(content, draw))
        else:
            victim.write_text(json.dumps(altered(json.loads(content), draw)))
        if victim.name != "done" and draw.random() < 0.8:
            with contextlib.suppress(ValueError, AttributeError):
                mark(target / "step_00000020")
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            try:
                step, found = read_all(target)
            except CheckpointError as error:
                expect("\n" not in str(error) and len(str(error)) > 30, f"{number}: {error!r}")
                outcomes["refused"] += 1
            else:
                if step == 10:
                    expect("step_00000020" in said.getvalue(), f"{number}: passed over without a word")
                expect(step == 10 or found == kinds, f"{number}: {victim.name} gave other tensors")
                outcomes["fell back" if step == 10 else "harmless"] += 1
        shutil.rmtree(target)
    grown = peak() - before
    # Twice its size is ours: a file and its altered copy, then what is read of it. A header may ask for 2**40 bytes.
    expect(grown < 4 * size, f"memory grew by {grown:,} bytes for a checkpoint of {size:,}")
    return ", ".join(f"{number} {name}" for name, number in outcomes.items()) + f"; memory + {grown / size:.1f} x"


def attack_old_pickles(count: int, draw: random.Random, folder: Path) -> str:
    """A folder in the old format, whose pickle makes a folder when it is opened."""
    from tpu_utils.base.errors import CheckpointError

    owned = folder / "owned"
    code = b"cos\nmkdir\n(V" + str(owned).encode() + b"\ntR."  # what a pickle of os.mkdir looks like
    for _ in range(count):
        target = Path(tempfile.mkdtemp(dir=folder)) / "checkpoints"
        checkpoints = make_checkpoints(target)
        place = checkpoints.path(20) / draw.choice(["state.pt", ".metadata", "__0_0.distcp", "state.safetensors"])
        place.write_bytes(code)
        mark(checkpoints.path(20))
        with contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(CheckpointError):
            read_all(target)
        expect(not owned.exists(), f"{place.name} ran code")
        shutil.rmtree(target)
    return "nothing was unpickled"


def attack_folders(count: int, draw: random.Random, folder: Path) -> str:
    """Links, FIFOs, odd names, swapped and copied steps; and a save after each, which prunes."""
    from tpu_utils.base.errors import CheckpointError

    precious = folder / "precious"
    precious.mkdir()
    (precious / "thesis").write_text("years of work")
    for number in range(count):
        target = Path(tempfile.mkdtemp(dir=folder)) / "checkpoints"
        checkpoints = make_checkpoints(target)
        checkpoints.keep = draw.choice([1, 2])
        newest = checkpoints.path(20)
        what = draw.randrange(8)
        if what == 0:
            checkpoints.path(draw.choice([5, 15, 99])).symlink_to(precious)
        elif what == 1:
            victim = draw.choice(sorted(newest.iterdir()))
            victim.unlink()
            draw.choice([os.mkfifo, lambda path: path.symlink_to("/dev/zero"), os.mkdir])(victim)
        elif what == 2:
            shutil.copytree(newest, checkpoints.path(99))
        elif what == 3:
            newest.rename(target / "aside")
            checkpoints.path(10).rename(newest)
            (target / "aside").rename(checkpoints.path(10))
        elif what == 4:
            for name in ("abcdefgh", "1", "00000020 (copy)", "\u0661" * 8):
                shutil.copytree(newest, target / f"step_{name}")
        elif what == 5:
            marker = json.loads((newest / "done").read_bytes())
            (newest / "done").write_text(json.dumps({**marker, "run": "theirs"}))
        else:
            victim = draw.choice(sorted(newest.glob("*.safetensors")))
            victim.write_bytes(victim.read_bytes()[:-1])
        with contextlib.redirect_stderr(io.StringIO()):
            try:
                step, _ = read_all(target)
                expect(what != 3, f"{number}: swapped folders were resumed from")
                checkpoints.save(step + 1, {}, VALUES)
                good, _ = read_all(target)
                expect(good == step + 1, f"{number}: {good} is resumed after a save of {step + 1}")
            except CheckpointError as error:
                expect(what == 3, f"{number}: {error}")
        expect((precious / "thesis").exists(), "pruning followed a link")
    return "what is good was kept, nothing outside was touched"


# -------------------------------------------------------------------------------------------------- bucket and network


def attack_bucket(count: int, draw: random.Random, folder: Path) -> str:
    """Listings with names that lead elsewhere, in front of the run's own code that fetches them."""
    from config import MnistConfig
    from tpu_utils.base.errors import CheckpointError, InputError
    from tpu_utils.checkpoint.loading import CheckpointReader
    from tpu_utils.remote import storage

    class Blob:
        generation, crc32c = 1, None

        def __init__(self, name: str, content: bytes):
            self.name, self.content, self.size = name, content, len(content)

    true = make_checkpoints(folder / "true")
    files = {f"checkpoints/{p.parent.name}/{p.name}": p.read_bytes() for p in true.folder.rglob("*") if p.is_file()}
    files |= {"config.json": b'{"run_id": "ours"}', "metrics.jsonl": b'{"step": 1}\n'}
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    pieces = ["..", ".", "", "/", "etc", "x.py", "step_00000020", "done", "checkpoints", "\\", "\n"]
    pieces += [str(folder / "owned")]
    pieces += ["tensorboard", "state.json", "\u0661" * 8, "C:", "~", "%2e%2e", "x" * 300, "config.json", "lock"]
    blobs: list[Blob] = []
    storage.connect = lambda url: (None, "run/")
    storage.list_objects = lambda bucket, prefix, seconds: [blob for blob in blobs if blob.name.startswith(prefix)]
    storage.download = lambda blob, path: (
        path.parent.mkdir(parents=True, exist_ok=True),
        path.write_bytes(blob.content),
    )
    expected = {Path(name) for name in files}
    for number in range(count):
        blobs[:] = [Blob(f"run/{name}", content) for name, content in files.items()]
        for _ in range(draw.randint(1, 5)):
            name = "/".join(draw.choice(pieces) for _ in range(draw.randint(1, 5)))
            start = draw.choice(["run/", "run/checkpoints/", "run/checkpoints/step_00000020/", "run"])
            blobs.insert(draw.randrange(len(blobs)), Blob(start + name, b"import os; os.abort()"))
        if draw.random() < 0.3:
            marker = json.loads(files["checkpoints/step_00000020/done"])
            marker["files"]["/".join(draw.choice(pieces) for _ in range(3))] = {"bytes": 21, "crc32": 0}
            blobs.append(Blob("run/checkpoints/step_00000020/done", json.dumps(marker).encode()))
        shutil.rmtree(folder / "cache", ignore_errors=True)
        config = MnistConfig(run_dir="gs://bucket/run", resume="must")
        run_dir = storage.working_folder(config.run_dir)
        run_dir.mkdir(parents=True)
        before = {path for path in folder.rglob("*") if not path.is_relative_to(run_dir)}
        with contextlib.redirect_stderr(io.StringIO()):
            try:
                mirror = storage.Mirror(config.run_dir, config.resume, run_dir)
                CheckpointReader(run_dir / "checkpoints", mirror=mirror, run_id="ours").load("must")
            except (InputError, CheckpointError) as error:
                expect(len(str(error)) > 30, f"{number}: {error!r}")
        after = {path for path in folder.rglob("*") if not path.is_relative_to(run_dir)}
        expect(after == before, f"{number}: written outside: {sorted(after - before)[:3]}")
        inside = {path.relative_to(run_dir) for path in run_dir.rglob("*") if path.is_file()}
        expect(inside <= expected, f"{number}: fetched {sorted(inside - expected)[:3]}")
    return "nothing was written outside, nothing but a run's own names was fetched"


def attack_wire(count: int, draw: random.Random, folder: Path) -> str:
    """Strangers on the port while hosts wait, and a host of the run that says what it should not."""
    from tpu_utils.base.errors import TrainingError
    from tpu_utils.remote import wire
    from tpu_utils.remote.meeting import LinkedPeers, Meeting

    def frame(content: bytes) -> bytes:
        return struct.pack(">Q", len(content)) + content

    secret = draw.randbytes(32)
    hello = frame(json.dumps({"index": 1, "nonce": "0" * 32}).encode())
    base = hello + frame(json.dumps({"proof": "0" * 64}).encode())
    before = peak()
    listener = wire.Listener(HOME, 0, 2, secret, {HOME}, 60.0)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(listener.wait, TIME_LIMIT)
        for _ in range(count):
            with contextlib.suppress(OSError), socket.create_connection((HOME, listener.port), timeout=60) as stranger:
                stranger.sendall(mutated(base, draw))
                stranger.shutdown(socket.SHUT_WR)
                while stranger.recv(4096):
                    pass
        expect(listener.missing() == [1], "a stranger was let in")
        own = wire.connect(HOME, listener.port, 1, secret, "process 0", 60.0)
        (link,) = waiting.result()
    listener.close()
    talk = [{"value": 1}, {"error": "SaveError", "message": "x"}, [1, 2], 7]
    refused = 0
    for _ in range(count):
        one, two = socket.socketpair()
        link._socket, own._socket = one, two
        peers = LinkedPeers(1, Meeting([HOME] * 2, secret), [own])
        content = json.dumps(altered(draw.choice(talk), draw)).encode()
        said = frame(content) if draw.random() < 0.5 else mutated(frame(content), draw)
        one.sendall(said)
        one.close()
        try:
            how = draw.choice(["gather", "largest", "from_first"])
            getattr(peers, how)(None if how == "from_first" else 1)
        except (wire.WireError, TrainingError, ValueError):
            refused += 1
        two.close()
    grown = peak() - before
    expect(grown < 2 * wire.LONGEST_MESSAGE, f"memory grew by {grown:,} bytes")
    return f"no stranger got in; of {count} answers to a host {refused} were refused, the others are of the right form"


# ---------------------------------------------------------------------------------------------------------- data files


def attack_data_files(count: int, draw: random.Random, folder: Path) -> str:
    """metrics.jsonl at a resume, HellaSwag and token files, and whole run folders that tools.plot_run draws."""
    import numpy as np

    from language.data.llmc_files import (
        MultipleChoice,
        open_token_shard,
        read_hellaswag,
        write_hellaswag,
        write_token_shard,
    )
    from tools import plot_run
    from tpu_utils.base.errors import InputError
    from tpu_utils.record.log import RunLog

    lines = [{"kind": "train", "step": step, "loss": 2.0 / step, "step_seconds": 0.1} for step in range(1, 9)]
    log = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    context, endings = np.arange(3), [np.arange(size) for size in (1, 2, 1, 3)]
    asked = [MultipleChoice(index, 2, context, endings) for index in range(4)]
    write_hellaswag(folder / "questions.bin", asked)
    write_token_shard(folder / "tokens.bin", np.arange(99))
    questions, tokens = ((folder / name).read_bytes() for name in ("questions.bin", "tokens.bin"))
    refused = 0
    for number in range(count):
        run_dir, said = Path(tempfile.mkdtemp(dir=folder)), io.StringIO()
        changed = [altered(line, draw) if draw.random() < 0.3 else line for line in lines]
        damaged = b"".join(json.dumps(line).encode() + b"\n" for line in changed)
        (run_dir / "metrics.jsonl").write_bytes(draw.choice([mutated(log, draw), damaged, b"[" * 10**5 + b"\n" + log]))
        (run_dir / "config.json").write_text(json.dumps(altered({"preset": "x", "seed": 0, "num_epochs": 3}, draw)))
        (run_dir / "questions.bin").write_bytes(mutated(questions, draw))
        (run_dir / "tokens.bin").write_bytes(mutated(tokens, draw))
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            for attempt in (
                lambda place=run_dir: plot_run.plot([plot_run.read_run(place)]),
                lambda place=run_dir: read_hellaswag(place / "questions.bin", 100),
                lambda place=run_dir: open_token_shard(place / "tokens.bin", 100),
                lambda place=run_dir: RunLog(place, 5, 8, tensorboard=False).__exit__(None),
            ):
                try:
                    attempt()
                except InputError as error:
                    expect(len(str(error)) > 30, f"{number}: {error!r}")
                    refused += 1
        kept = (run_dir / "metrics.jsonl").read_bytes().splitlines()
        expect(all(json.loads(line)["step"] <= 5 for line in kept), f"{number}: lines after the checkpoint were kept")
        shutil.rmtree(run_dir)
    return f"{refused} of {4 * count} were refused in one message, the others read"


# ------------------------------------------------------------------------------------- a neighbour, and others' folders

NOBODY = 65534  # another user of the machine; to become one takes root
AS_NOBODY = """
import os, sys
from contextlib import suppress
from pathlib import Path
os.setgroups([]), os.setgid(65534), os.setuid(65534)
for place in map(Path, sys.argv[2:]):
    for folder in (place, *place.parents):  # rename one, and make another in its place, as far up as needed
        with suppress(OSError):
            place.mkdir(parents=True, exist_ok=True)
            (place / "planted").write_text("theirs")
            break
        if folder == Path(sys.argv[1]):
            break
        with suppress(OSError):
            folder.rename(folder.with_name("away"))
"""


def attack_neighbour(count: int, draw: random.Random, folder: Path) -> str:
    """Another user of the machine writes where it can: below the folder of Ray's, in a compile cache."""
    if os.geteuid() != 0:
        return "SKIPPED: only root can be another user"
    from cluster.probe import open_to_others
    from tpu_compiler.compile.cache import Cache
    from tpu_utils.base.errors import InputError

    folder.chmod(0o755)
    places, closed = [], []
    for number in range(count):
        outer = folder / str(number)
        inner = outer / draw.choice(["ray/session", "mine/ray/session"])
        inner.mkdir(parents=True)
        inner.chmod(0o777)
        inner.parents[1].chmod(draw.choice([0o700, 0o755, 0o777, 0o1777]))
        inner.parent.chmod(draw.choice([0o700, 0o755, 0o777, 0o711]))
        outer.chmod(draw.choice([0o700, 0o755, 0o777, 0o750, 0o701]))
        os.chown(outer, draw.choice([0, 0, NOBODY]), 0)
        places += [inner]
        closed += [not open_to_others(inner)]
        above = folder / f"above_{number}"
        cache = above / "cache"
        cache.mkdir(parents=True)
        above.chmod(draw.choice([0o755, 0o777, 0o1777]))
        os.chown(above, draw.choice([0, 0, 0, NOBODY]), 0)
        cache.chmod(draw.choice([0o700, 0o755, 0o777, 0o770, 0o707]))
        os.chown(cache, draw.choice([0, 0, NOBODY]), 0)
        try:
            Cache(cache)
            closed += [True]
        except InputError:
            closed += [False]
        places += [cache]
    subprocess.run([sys.executable, "-c", AS_NOBODY, folder, *places], check=True)
    written = [(place / "planted").exists() for place in places]
    for place, is_closed, got_in in zip(places, closed, written, strict=True):
        expect(not (is_closed and got_in), f"{place} was taken for closed, and another user wrote there")
    expect(any(closed) and any(written), "no folder was closed, or none open")
    return f"{sum(written)} of {len(places)} folders could be written by another user; all of those were refused"


def attack_options_of_a_folder(count: int, draw: random.Random, folder: Path) -> str:
    """config.json of a foreign run directory with options for libtpu, some of which name files."""
    from config import MnistConfig
    from tpu_utils.base.errors import InputError
    from tpu_utils.options.compiler_flags import parse_compiler_options
    from tpu_utils.options.parsing import parse_command_line

    harmful = ["xla_jf_dump_to", "flagfile", "xla_dump_to", "xla_tpu_enable_x_dump_to", "tpu_log_dir", "fromenv"]
    usual = ["xla_tpu_scoped_vmem_limit_kib=32768", "--xla_tpu_enable_async_collective_fusion=true"]
    values = ["../elsewhere", "/etc/passwd", "true", "1", "1\t--flagfile=/etc/passwd", "x,--flagfile=/etc/passwd"]
    refused = 0
    for _ in range(count):
        words = draw.sample(usual, draw.randrange(3))
        if draw.random() < 0.8:
            words += [f"{draw.choice(['', '--', '-', '----'])}{draw.choice(harmful)}={draw.choice(values)}"]
        draw.shuffle(words)
        text = draw.choice([" ", "  ", "\t", "\n", "\v", "\x1c", "\u2003", ","]).join(words)
        content = {"preset": "quick_test", "num_epochs": 7, "run_id": "ours", "data_crc32": 1, "compiler_options": text}
        (folder / "config.json").write_text(json.dumps(content))
        try:
            found = parse_command_line(MnistConfig, "", [f"--run_dir={folder}", "--resume=must"]).compiler_options
            taken = parse_compiler_options(found).keys() & set(harmful)
            expect(not taken, f"{taken} was taken from {text!r}")
        except InputError as error:
            expect("compiler_options" in str(error), f"refused for another reason: {error}")
            refused += 1
    expect(count < 50 or 0 < refused < count, f"{refused} of {count} were refused")
    return f"{refused} of {count} were refused, no option that names a file was taken"


def attack_others_files(count: int, draw: random.Random, folder: Path) -> str:
    """A compile cache in a folder that holds other things, and is over its limit."""
    from tpu_compiler.compile.cache import Cache

    Record = dataclasses.make_dataclass("Record", ["number"])

    def name() -> str:
        front = draw.choice(["program_", "answer_", "shard_", "aot_tpu_", "aot_tpu", "", "data."])
        middle = "".join(draw.choices("0123456789abcdefg_-", k=draw.choice([3, 8, 39, 40, 41])))
        return front + middle + draw.choice([".json.gz", ".writing", ".json", ".gz", ""])

    kept, others = Cache(folder, most_bytes=500), {}
    own = re.compile(r"(program|answer)_[0-9a-f]{40}\.json\.gz|aot_tpu_\w+\.writing")
    for _ in range(count):
        path = folder / name()
        if not own.fullmatch(path.name) and not path.exists():
            others[path] = draw.randbytes(draw.randrange(200))
            path.write_bytes(others[path])
            os.utime(path, (0, 0))
        kept.write(f"answer_{draw.randbytes(20).hex()}", Record(draw.random()))
    expect(others and all(path.read_bytes() == content for path, content in others.items()), "a file was deleted")
    left = [path for path in folder.iterdir() if path not in others]
    return f"{len(others)} files of others are there, of {count} of its own {len(left)}"


def attack_uploads(count: int, draw: random.Random, folder: Path) -> str:
    """A working folder with links that leave it, secrets, and files that git ignores in one way or another."""
    if not find_spec("ray"):
        return "SKIPPED: Ray is not installed"
    from cluster.folder import check_folder

    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / "data.py").write_text("HUSH")
    refused = 0
    for number in range(count):
        code = folder / "code"
        (code / "inner").mkdir(parents=True)
        (code / "script.py").write_text("print()")
        subprocess.run(["git", "init", "-q", str(code)], check=True)
        for _ in range(draw.randrange(1, 4)):
            place = draw.choice([code, code / "inner"])
            if draw.random() < 0.2:
                target = draw.choice(
                    ["../elsewhere", "../../elsewhere", "../elsewhere/data.py", "..", "script.py", "."]
                )
                with contextlib.suppress(FileExistsError):
                    (place / draw.choice("abc")).symlink_to(target)
            elif draw.random() < 0.5:
                (place / draw.choice([".env", ".env.local", "id_rsa", "x.pem", "y.key", ".netrc"])).write_text("HUSH")
            else:
                ignored = draw.choice([".gitignore", ".git/info/exclude", "inner/.gitignore", ".rayignore"])
                text = draw.choice(["", "\ufeff", "# words\n"]) + draw.choice(["hidden*", "*dd*", "hidden_1"])
                (code / ignored).write_text(text + "\n", encoding="utf-8")
                hidden = code / "inner" if ignored.startswith("inner") else place
                (hidden / "hidden_1").write_text("HUSH")
        copied = folder / f"copy_{number}"
        try:
            check_folder(code).copy(copied)
            sent = [path for path in copied.rglob("*") if path.is_file()]
            expect(not any("HUSH" in path.read_text() for path in sent), f"{[str(path) for path in sent]}")
            expect(copied / "script.py" in sent, "the script was not sent")
            shutil.rmtree(copied)
        except ValueError as error:
            expect(len(str(error)) > 30, repr(error))
            refused += 1
        shutil.rmtree(code)
    return f"{refused} of {count} folders were refused by name, nothing secret was in the others' uploads"


def attack_resubmissions(count: int, draw: random.Random, folder: Path) -> str:
    """A run under the name of an earlier one, whose folder or upload is refused: the earlier record has to stay."""
    if not find_spec("ray"):
        return "SKIPPED: Ray is not installed"
    from cluster.client import Cluster
    from cluster.driver import Spec
    from tpu_utils.base.errors import InputError, PassingError

    class Jobs:
        """Ray's client, as far as submit() uses it."""

        def __init__(self, fails: bool):
            self.calls, self.fails = [], fails

        def list_jobs(self):
            ended = type("Status", (), {"value": "FAILED"})
            return [type("Job", (), {"submission_id": "k", "status": ended, "metadata": {"user": "u"}})]

        def _upload_working_dir_if_needed(self, environment):
            if self.fails:
                raise RuntimeError("the package is too large")

        def _upload_py_modules_if_needed(self, environment):
            self.calls.append("upload")

        def delete_job(self, name):
            self.calls.append("delete")

        def submit_job(self, **settings):
            self.calls.append("submit")

    refused = 0
    for _ in range(count):
        code = folder / "code"
        code.mkdir()
        (code / "script.py").write_text("print()")
        for what in draw.sample(["link", "large", "mark", "fifo", "folder"], draw.randrange(3)):
            if what == "link":
                (code / "linked").symlink_to(folder)
            elif what == "large":
                (code / "large").write_bytes(bytes(3 << 20))
            elif what == "mark":
                (code / ".gitignore").write_text("\ufeffx", encoding="utf-8")
            elif what == "fifo":
                os.mkfifo(code / "fifo")
            else:
                (code / "inner").mkdir()
        cluster = Cluster.__new__(Cluster)
        cluster.jobs, cluster.check_hosts = Jobs(draw.random() < 0.3), lambda: None
        spec = Spec(dict(name="k", user="u", chips=1, hosts=1, kind=""), "script.py", [])
        try:
            cluster.submit(spec, code, 1.0, {})
            expect(cluster.jobs.calls == ["upload", "delete", "submit"], cluster.jobs.calls)
        except (InputError, PassingError):
            expect("delete" not in cluster.jobs.calls, "what was refused has deleted the earlier run")
            refused += 1
        shutil.rmtree(code)
    return f"{refused} of {count} were refused, none of them deleted the earlier run"


MAKE_BOMBS = """
import gzip, json, sys
from pathlib import Path
front = json.dumps({"format": 2, "name": sys.argv[2], "texts": {}, "values": {"number": 1.0, "text": ""}}).encode()
for name, part in {"lists": b"[],", "deep": b'[', "objects": b'{"a":', "text": b"", "lines": b"\\n"}.items():
    whole = front[:-2] + b', "x": [' + part * (1 << 26) if part else front + b"\\n" + bytes(3 << 28)
    (Path(sys.argv[1]) / name).write_bytes(gzip.compress(whole, 1))
"""


def attack_cache_entries(count: int, draw: random.Random, folder: Path) -> str:
    """Entries of the compile cache of some 100 KB that ask for gigabytes, and damaged ones."""
    from tpu_compiler.compile.cache import LARGEST_TEXT, Cache

    Record = dataclasses.make_dataclass("Record", [("number", float), ("text", str)])
    kept, name = Cache(folder), "answer_" + "0" * 40
    path = folder / f"{name}.json.gz"
    kept.write(name, Record(1.0, "long" * 2000))
    good, read = path.read_bytes(), 0
    expect(kept.read(name, Record), "a good entry was not read")
    made = folder / "made"
    made.mkdir()
    # elsewhere: what it takes is not counted
    subprocess.run([sys.executable, "-c", MAKE_BOMBS, made, name], check=True)
    before = peak()
    for content in [bomb.read_bytes() for bomb in made.iterdir()] + [mutated(good, draw) for _ in range(count)]:
        path.write_bytes(content)
        found = kept.read(name, Record)
        expect(found is None or len(content) < 1000, "an entry of gigabytes was taken")
        read += found is not None
    grown = peak() - before
    expect(grown < 3 * LARGEST_TEXT, f"memory grew by {grown:,} bytes")
    return f"{count - read} of {count} damaged ones were as good as none; memory + {grown >> 20} MiB"


def attack_tokenizers(count: int, draw: random.Random, folder: Path) -> str:
    """A tokenizer.json of a few hundred bytes whose steps make a letter longer."""
    import tokenizers
    from tokenizers import decoders, models, normalizers

    from language.data.tokenizer import MOST_GROWTH, load_tokenizer, panics_told
    from tpu_utils.base.errors import InputError

    refused, most = 0, 0
    for _ in range(count):
        steps = [
            draw.choice(
                [
                    normalizers.Replace(draw.choice(["a", "", "b"]), "ab"[: draw.randrange(3)] * draw.randrange(1, 9)),
                    normalizers.Prepend("a" * draw.randrange(1, 9)),
                    normalizers.ByteLevel(),
                    normalizers.NFKD(),
                    normalizers.Replace(tokenizers.Regex(draw.choice(["x*", "[ab]", "$"])), "a" * draw.randrange(9)),
                    normalizers.Replace(
                        *draw.choice([("a", "\ufdfa"), ("\u0644", "\ufdfa"), ("\u2c65", "\u023a" * 2)])
                    ),
                    normalizers.Lowercase(),
                    normalizers.NFKC(),
                ]
            )
            for _ in range(draw.randrange(1, 9))
        ]
        made = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1, "<|end|>": 2}, []))
        made.add_special_tokens(["<|end|>"])
        made.normalizer = normalizers.Sequence(steps)
        made.decoder = draw.choice([None, decoders.Sequence([decoders.BPEDecoder(draw.choice(["", "b"]))] * 24)])
        made.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
        try:
            loaded = load_tokenizer(str(folder))
        except InputError:
            refused += 1
            continue
        try:
            with panics_told("the library"):
                grown = max(
                    len(made.normalizer.normalize_str(text)) / len(text) for text in ("a", "ba", "x" * 9, "\u023a")
                )
            grown = max(grown, len(loaded.decode([0] * 9).encode()) / 9)
        except InputError:
            refused += 1
            continue
        expect(grown <= MOST_GROWTH, f"a letter became {grown:,.0f}: {(folder / 'tokenizer.json').read_text()[:2000]}")
        most = max(most, grown)
    expect(0 < refused < count, f"{refused} of {count} were refused")
    return f"{refused} of {count} were refused, the others make text at most {most:.0f} times as long"


# ----------------------------------------------------------------------------------------------------- a run under way

TINY = ["simple_mnist_tpu.py", "--device=cpu", "--num_epochs=200", "--global_batch_size=64", "--channels=4"]
TINY += ["--hidden_dim=16", "--log_every=5", "--save_every=5", "--no_tensorboard"]


def begun(run_dir: Path, condition: Callable = saved_steps) -> Script:
    """A run that came so far that condition(run_dir) holds."""
    script = start(*TINY, f"--run_dir={run_dir}")
    waits(lambda: condition(run_dir), TIME_LIMIT, alive=script)
    return script


def lost_terminal(run_dir: Path) -> None:
    script = begun(run_dir)
    script.send_signal(signal.SIGHUP)
    expect(script.wait(TIME_LIMIT) == 129, f"exit code {script.returncode} after SIGHUP, expected 129")


def twice_in_two_milliseconds(run_dir: Path) -> None:
    script = begun(run_dir, lambda folder: (folder / "metrics.jsonl").exists())
    script.send_signal(signal.SIGTERM)
    time.sleep(0.002)
    script.send_signal(signal.SIGTERM)
    expect(script.wait(TIME_LIMIT) == 143, f"exit code {script.returncode} after two SIGTERMs, expected 143")
    expect(saved_steps(run_dir), "two SIGTERMs saved nothing")


def nobody_reads(run_dir: Path) -> None:
    command = [sys.executable, *TINY, f"--run_dir={run_dir}"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close(), process.stderr.close()
    waits(lambda: max(saved_steps(run_dir), default=0) > 20 or process.poll() is not None, TIME_LIMIT)
    process.send_signal(signal.SIGTERM)
    expect(process.wait(TIME_LIMIT) == 143, f"exit code {process.returncode} with closed outputs, expected 143")


def removed_lock(run_dir: Path) -> None:
    script = begun(run_dir)
    (run_dir / "lock").unlink()
    second = run(*TINY, f"--run_dir={run_dir}", "--resume=auto", timeout=TIME_LIMIT)
    script.kill()
    expect(script.wait() == -9, "the first run ended by itself")
    expect(second.returncode == 2 and "in use" in second.stderr, f"a second run came in: {second.stderr[-300:]}")


def removed_folder(run_dir: Path) -> None:
    script = begun(run_dir)
    run_dir.rename(run_dir.with_name("moved"))
    _, error = script.communicate(TIME_LIMIT)
    expect(script.returncode == 1 and "Traceback" not in error, f"exit code {script.returncode}: {error[-300:]}")
    expect(not run_dir.exists(), "the folder was made again")


def attack_runs(count: int, draw: random.Random, folder: Path) -> str:
    """A terminal that is lost, signals in a burst, a reader that leaves, a lock and a folder that are removed."""
    scenarios = [lost_terminal, twice_in_two_milliseconds, nobody_reads, removed_lock, removed_folder]
    for number in range(count):
        scenarios[number % len(scenarios)](Path(tempfile.mkdtemp(dir=folder)) / "run")
    return "each ended saved, or refused, and said so"


# ---------------------------------------------------------------------------------------------------------------- main

ATTACKS = {  # how often, what
    "checkpoints": (2000, attack_checkpoints),
    "old_pickles": (40, attack_old_pickles),
    "folders": (200, attack_folders),
    "bucket": (500, attack_bucket),
    "wire": (300, attack_wire),
    "data_files": (500, attack_data_files),
    "neighbour": (100, attack_neighbour),
    "options": (500, attack_options_of_a_folder),
    "others_files": (200, attack_others_files),
    "uploads": (200, attack_uploads),
    "resubmissions": (200, attack_resubmissions),
    "cache_entries": (200, attack_cache_entries),
    "tokenizers": (500, attack_tokenizers),
    "runs": (5, attack_runs),
}


def one(name: str, count: int, seed: int) -> int:
    """In a process of its own: prints what became of it."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            print(ATTACKS[name][1](count, random.Random(f"{seed} {name}"), Path(folder)))
        except Complaint as complaint:
            print(complaint)
            return 1
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, default=1.0, help="part of the mutations, 0 to 1; at least one of each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=ATTACKS, nargs="+", default=list(ATTACKS))
    parser.add_argument("--inner", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    counts = {name: max(1, round(ATTACKS[name][0] * options.share)) for name in options.only}
    if options.inner:
        return one(*counts.popitem(), options.seed)
    failed = False
    print(f"{'attack':13} {'times':>5} {'seconds':>7}  outcome")
    for name, count in counts.items():
        started = time.monotonic()
        own = ["--inner", "--only", name, f"--share={options.share}", f"--seed={options.seed}"]
        try:
            done = run(__file__, *own, timeout=TIME_LIMIT, cold=True)
            said = done.stdout.strip() if done.returncode in (0, 1) and done.stdout else done.stderr[-2000:]
            bad = done.returncode != 0
            said = f"FAILED ({done.returncode}): {said}" if bad else said
        except subprocess.TimeoutExpired:
            bad, said = True, f"FAILED: no end within {TIME_LIMIT} s"
        failed |= bad
        print(f"{name:13} {count:5} {time.monotonic() - started:7.0f}  {said}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
