"""Attack this project's own files and sockets, and see that nothing gets in and nothing is lost.

Run:     python benchmarks/attack.py                 # all of it
         python benchmarks/attack.py --share 0.05    # a twentieth of the mutations
         python benchmarks/attack.py --only wire
Prints:  a table: what was attacked, how often, what became of it. Exit code 1 if anything ran code, crashed, hung,
         wrote outside its folder, took over four times the memory of what is truly there, or was refused without a
         message.

Everything happens in temporary folders and on loopback. Each attack is a process of its own, so that a crash is seen as
one. A mutation is refused (a checkpoint: passed over for the one before), or harmless: what is read has the names,
shapes and types of what was written. Most mutated files fit their CRC-32: whoever writes one can write the other.
"""

import argparse
import contextlib
import io
import itertools
import json
import os
import random
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
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
os.environ.setdefault("PJRT_DEVICE", "CPU")
import torch
from mutations import mutated
from processes import Script, run, start, waits
from run_files import mark, saved_steps

from benchmarks.children import ROOT, parser_for

# what one attack alone needs is imported there: memory that an import frees would hide what another attack takes
from tpu_utils.base.errors import CheckpointError, InputError, TrainingError
from tpu_utils.checkpoint import Checkpoints
from tpu_utils.checkpoint.loading import CheckpointReader
from tpu_utils.checkpoint.state import HostCopy, Kind
from tpu_utils.remote import wire
from tpu_utils.remote.meeting import LinkedPeers, Meeting

TIME_LIMIT = 1800
HOME = "127.0.0.1"
VALUES = {"config": {"seed": 0}, "evaluation": {"accuracy": 0.5}}
ODD = [None, True, -1, 0, 7, 1.5, 2**31, 2**63, 10**40, "", "x", "../../x", [], {}, [[]], [-1], [2**62, 2**62], "F64"]


def damaged(content: bytes, draw: random.Random) -> bytes:
    """Mostly near the front, where headers are."""
    front = draw.choice([len(content), int(len(content) * draw.random() ** 4) + 16])
    made = mutated(content[:front], 8, draw.randrange(2**32))
    return next(itertools.islice(made, draw.randrange(8), None)) + content[front:]  # one copy in memory at a time


def peak() -> int:
    """Bytes: the most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# -------------------------------------------------------------------------------------------------------- checkpoints


def make_checkpoints(folder: Path, megabytes: int = 1):
    """Steps 10 and 20 of one run, one of whose tensors is sharded."""
    checkpoints = Checkpoints(folder, 3, run_id="ours")
    rows = megabytes * 2**20 // 4 // 64 // 2
    for step in (10, 20):
        whole = {"model/bias": torch.full((8,), float(step)), "random/torch": torch.arange(64, dtype=torch.uint8)}
        whole["model/weight"] = torch.full((rows, 64), float(step))
        shards = {(at, 0): torch.full((rows // 2, 64), float(step)) for at in (0, rows // 2)}
        kind = Kind((rows, 64), torch.float32)
        checkpoints.write(HostCopy(step, VALUES, whole, {"model/sharded": kind}, {"model/sharded": shards}))
        checkpoints.wait()
    return checkpoints


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
    saved = CheckpointReader(folder, run_id="ours").load_for_resume("must")
    files = saved.files()
    found = {path: files.read(path) for path in saved.entries}
    saved.value("config", dict), saved.value("evaluation", dict)
    return saved.step, {path: (tuple(tensor.shape), tensor.dtype) for path, tensor in found.items()}


def attack_checkpoints(count: int, draw: random.Random, folder: Path) -> str:
    """Bytes and JSON of every file of the newest checkpoint."""
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
            victim.write_bytes(damaged(content, draw))
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
                assert "\n" not in str(error) and len(str(error)) > 30, f"{number}: {error!r}"
                outcomes["refused"] += 1
            else:
                if step == 10:
                    assert "step_00000020" in said.getvalue(), f"{number}: passed over without a word"
                assert step == 10 or found == kinds, f"{number}: {victim.name} gave other tensors"
                outcomes["fell back" if step == 10 else "harmless"] += 1
        shutil.rmtree(target)
    grown = peak() - before
    # Twice its size is ours: a file and its altered copy, then what is read of it. A header may ask for 2**40 bytes.
    assert grown < 4 * size, f"memory grew by {grown:,} bytes for a checkpoint of {size:,}"
    return ", ".join(f"{number} {name}" for name, number in outcomes.items()) + f"; memory + {grown / size:.1f} x"


def attack_folders(count: int, draw: random.Random, folder: Path) -> str:
    """Links, FIFOs, odd names, swapped and copied steps; and a save after each, which prunes."""
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
                assert what != 3, f"{number}: swapped folders were resumed from"
                checkpoints.save(step + 1, {}, VALUES)
                good, _ = read_all(target)
                assert good == step + 1, f"{number}: {good} is resumed after a save of {step + 1}"
            except CheckpointError as error:
                assert what == 3, f"{number}: {error}"
        assert (precious / "thesis").exists(), "pruning followed a link"
    return "what is good was kept, nothing outside was touched"


# -------------------------------------------------------------------------------------------------- bucket and network


def attack_bucket(count: int, draw: random.Random, folder: Path) -> str:
    """Listings with names that lead elsewhere, in front of the run's own code that fetches them."""

    from config import MnistConfig
    from tpu_utils.remote import storage

    class Blob:
        generation, crc32c = 1, None

        def __init__(self, name: str, content: bytes):
            self.name, self.content, self.size = name, content, len(content)

    true = make_checkpoints(folder / "true")
    files = {f"checkpoints/{p.parent.name}/{p.name}": p.read_bytes() for p in true.folder.rglob("*") if p.is_file()}
    files |= {"config.json": b'{"run_id": "ours"}', "metrics.jsonl": b'{"step": 1}\n'}
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    pieces = ["..", ".", "", "/", "etc", "x.py", "step_00000020", "done", "checkpoints", "\\", "\n", f"{folder}/owned"]
    pieces += ["tensorboard", "state.json", "\u0661" * 8, "C:", "~", "%2e%2e", "x" * 300, "config.json", "lock"]
    blobs: list[Blob] = []
    storage.connect = lambda url: (None, "run/")
    storage.list_objects = lambda bucket, prefix, seconds: {
        blob.name.removeprefix(prefix): blob for blob in blobs if blob.name.startswith(prefix)
    }
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
                assert len(str(error)) > 30, f"{number}: {error!r}"
        after = {path for path in folder.rglob("*") if not path.is_relative_to(run_dir)}
        assert after == before, f"{number}: written outside: {sorted(after - before)[:3]}"
        inside = {path.relative_to(run_dir) for path in run_dir.rglob("*") if path.is_file()}
        assert inside <= expected, f"{number}: fetched {sorted(inside - expected)[:3]}"
    return "nothing was written outside, nothing but a run's own names was fetched"


def attack_wire(count: int, draw: random.Random, folder: Path) -> str:
    """Strangers on the port while hosts wait, and a host of the run that says what it should not."""

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
                stranger.sendall(damaged(base, draw))
                stranger.shutdown(socket.SHUT_WR)
                while stranger.recv(4096):
                    pass
        assert listener.missing() == [1], "a stranger was let in"
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
        said = frame(content) if draw.random() < 0.5 else damaged(frame(content), draw)
        one.sendall(said)
        one.close()
        try:
            how = draw.choice(["gather", "largest", "from_first"])
            getattr(peers, how)(None if how == "from_first" else 1)
        except (wire.WireError, TrainingError, ValueError):
            refused += 1
        two.close()
    grown = peak() - before
    assert grown < 2 * wire.LONGEST_MESSAGE, f"memory grew by {grown:,} bytes"
    return f"no stranger got in; of {count} answers to a host {refused} were refused, the others are of the right form"


# ---------------------------------------------------------------------------------------------------------- data files


def attack_data_files(count: int, draw: random.Random, folder: Path) -> str:
    """metrics.jsonl at a resume, HellaSwag and token files, and whole run folders that tools.plot_run draws."""
    import numpy as np

    from language.data import llmc_files
    from tools import plot_run
    from tpu_utils.record.log import RunLog

    lines = [{"kind": "train", "step": step, "loss": 2.0 / step, "step_seconds": 0.1} for step in range(1, 9)]
    log = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    context, endings = np.arange(3), [np.arange(size) for size in (1, 2, 1, 3)]
    asked = [llmc_files.MultipleChoice(index, 2, context, endings) for index in range(4)]
    llmc_files.write_hellaswag(folder / "questions.bin", asked)
    llmc_files.write_token_shard(folder / "tokens.bin", np.arange(99))
    questions, tokens = ((folder / name).read_bytes() for name in ("questions.bin", "tokens.bin"))
    refused = 0
    for number in range(count):
        run_dir, said = Path(tempfile.mkdtemp(dir=folder)), io.StringIO()
        some = [altered(line, draw) if draw.random() < 0.3 else line for line in lines]
        changed = b"".join(json.dumps(line).encode() + b"\n" for line in some)
        (run_dir / "metrics.jsonl").write_bytes(draw.choice([damaged(log, draw), changed, b"[" * 10**5 + b"\n" + log]))
        (run_dir / "config.json").write_text(json.dumps(altered({"preset": "x", "seed": 0, "num_epochs": 3}, draw)))
        (run_dir / "questions.bin").write_bytes(damaged(questions, draw))
        (run_dir / "tokens.bin").write_bytes(damaged(tokens, draw))
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            for attempt in (
                lambda place=run_dir: plot_run.plot([plot_run.read_run(place)]),
                lambda place=run_dir: llmc_files.read_hellaswag(place / "questions.bin", 100),
                lambda place=run_dir: llmc_files.open_token_shard(place / "tokens.bin", 100),
                lambda place=run_dir: RunLog(place, 5, 8, tensorboard=False).__exit__(None),
            ):
                try:
                    attempt()
                except InputError as error:
                    assert len(str(error)) > 30, f"{number}: {error!r}"
                    refused += 1
        kept = (run_dir / "metrics.jsonl").read_bytes().splitlines()
        assert all(json.loads(line)["step"] <= 5 for line in kept), f"{number}: lines after the checkpoint were kept"
        shutil.rmtree(run_dir)
    return f"{refused} of {4 * count} were refused in one message, the others read"


# ----------------------------------------------------------------------------------------------------- a run under way

TINY = ["simple_mnist_tpu.py", "--device=cpu", "--num_epochs=200", "--global_batch_size=64", "--channels=4"]
TINY += ["--hidden_dim=16", "--log_every=5", "--save_every=5", "--no_tensorboard"]


def has_lines(run_dir: Path) -> bool:
    return (run_dir / "metrics.jsonl").exists()


def begun(run_dir: Path, condition: Callable = saved_steps) -> Script:
    """A run that came so far that condition(run_dir) holds."""
    script = start(*TINY, f"--run_dir={run_dir}")
    waits(lambda: condition(run_dir), TIME_LIMIT, alive=script)
    return script


def signalled(run_dir: Path, condition: Callable, expected: int, signals: list[int]) -> None:
    """Two signals come within milliseconds."""
    script = begun(run_dir, condition)
    for number in signals:
        script.send_signal(number)
        time.sleep(0.002)
    assert script.wait(TIME_LIMIT) == expected, f"exit code {script.returncode} after {signals}, expected {expected}"
    assert saved_steps(run_dir), f"{signals} saved nothing"


def nobody_reads(run_dir: Path) -> None:
    command = [sys.executable, *TINY, f"--run_dir={run_dir}"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close(), process.stderr.close()
    waits(lambda: max(saved_steps(run_dir), default=0) > 20 or process.poll() is not None, TIME_LIMIT)
    process.send_signal(signal.SIGTERM)
    assert process.wait(TIME_LIMIT) == 143, f"exit code {process.returncode} with closed outputs, expected 143"


def removed_lock(run_dir: Path) -> None:
    script = begun(run_dir)
    (run_dir / "lock").unlink()
    second = run(*TINY, f"--run_dir={run_dir}", "--resume=auto", timeout=TIME_LIMIT)
    script.kill()
    assert script.wait() == -9, "the first run ended by itself"
    assert second.returncode == 2 and "in use" in second.stderr, f"a second run came in: {second.stderr[-300:]}"


def removed_folder(run_dir: Path) -> None:
    script = begun(run_dir)
    run_dir.rename(run_dir.with_name("moved"))
    _, error = script.communicate(TIME_LIMIT)
    assert script.returncode == 1 and "Traceback" not in error, f"exit code {script.returncode}: {error[-300:]}"
    assert not run_dir.exists(), "the folder was made again"


def attack_runs(count: int, draw: random.Random, folder: Path) -> str:
    """A terminal that is lost, signals in a burst, a reader that leaves, a lock and a folder that are removed."""
    lost_terminal = partial(signalled, condition=saved_steps, expected=129, signals=[signal.SIGHUP])
    twice = partial(signalled, condition=has_lines, expected=143, signals=[signal.SIGTERM] * 2)
    scenarios = [lost_terminal, twice, nobody_reads, removed_lock, removed_folder]
    for number in range(count):
        scenarios[number % len(scenarios)](Path(tempfile.mkdtemp(dir=folder)) / "run")
    return "each ended saved, or refused, and said so"


# ---------------------------------------------------------------------------------------------------------------- main

ATTACKS = {  # how often, what
    "checkpoints": (2000, attack_checkpoints),
    "folders": (200, attack_folders),
    "bucket": (500, attack_bucket),
    "wire": (300, attack_wire),
    "data_files": (500, attack_data_files),
    "runs": (5, attack_runs),
}


def one(name: str, count: int, seed: int) -> int:
    """In a process of its own: prints what became of it."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            print(ATTACKS[name][1](count, random.Random(f"{seed} {name}"), Path(folder)))
        except AssertionError as complaint:
            print(complaint)
            return 1
    return 0


def main() -> int:
    parser = parser_for(__doc__)
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
            said = f"FAILED ({done.returncode}): {said}" if done.returncode else said
        except subprocess.TimeoutExpired:
            said = f"FAILED: no end within {TIME_LIMIT} s"
        failed |= said.startswith("FAILED")
        print(f"{name:13} {count:5} {time.monotonic() - started:7.0f}  {said}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
