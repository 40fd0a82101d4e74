"""What the processes of a run say to each other, and what a stranger on the network can do: nothing."""

import contextlib
import json
import os
import shlex
import socket
import struct
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import free_port

from tpu_utils.base.errors import CheckpointError, DeviceError, InputError, SaveError, TrainingError
from tpu_utils.base.process import Peers
from tpu_utils.checkpoint import Checkpoints
from tpu_utils.remote import meeting as peers_module
from tpu_utils.remote import wire
from tpu_utils.remote.hosts import read_secret
from tpu_utils.remote.meeting import Meeting, meet_replicas, wait_for_peers
from tpu_utils.remote.wire import Link, Listener, WireError

SECRET = b"a secret of the run's own"
HOME = "127.0.0.1"


@contextlib.contextmanager
def together(count: int, secret: bytes = SECRET, secrets: dict | None = None, seconds: float = 60.0):
    """run(function): what function(peers) returned for each of so many processes, here threads, in order."""
    port = free_port()

    def meet(index: int) -> Peers:
        return wait_for_peers(index, [HOME] * count, seconds, port, (secrets or {}).get(index, secret))

    with ThreadPoolExecutor(count) as pool:
        met = list(pool.map(meet, range(count)))
        yield lambda function: list(pool.map(function, met))


def outcome(function, *arguments):
    try:
        return function(*arguments)
    except Exception as error:
        return error


def test_three_processes_agree():
    with together(3) as run:
        assert run(lambda p: (p.index, p.count)) == [(0, 3), (1, 3), (2, 3)]
        assert run(lambda p: p.gather({"from": p.index})) == [[{"from": 0}, {"from": 1}, {"from": 2}]] * 3
        assert run(lambda p: p.largest(p.index * 15)) == [30] * 3
        assert run(lambda p: p.from_first(lambda: [p.index, None, "\u00fc"])) == [[0, None, "\u00fc"]] * 3
        assert run(lambda p: p.with_own_links().gather(p.index)) == [[0, 1, 2]] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.uint64])
def test_tensors_come_bit_by_bit(dtype):
    values = torch.arange(6).reshape(2, 3).to(dtype)

    def receive(peers):
        tensor = values.clone() if peers.index == 0 else torch.zeros(2, 3, dtype=dtype)
        peers.tensor_from_first(tensor)
        return tensor

    with together(3) as run:
        for tensor in run(receive):
            assert torch.equal(tensor.view(torch.uint8), values.view(torch.uint8))
        assert run(lambda p: p.tensor_from_first(torch.zeros(0))) == [None] * 3


def fails(error: Exception):
    raise error


def test_an_error_of_any_process_is_raised_on_all():
    with together(3) as run:
        for error in (SaveError("full"), InputError("input"), OSError("gone")):
            for found in run(lambda p, e=error: outcome(p.on_all, lambda: fails(e) if p.index == 1 else None)):
                assert (type(found), str(found)) == (type(error), f"process 1: {error}")
        assert run(lambda p: p.on_all(lambda: None)) == [None] * 3


def test_an_error_of_the_first_process_is_raised_on_all_by_its_name():
    with together(2) as run:
        for error in (InputError("input"), CheckpointError("checkpoint"), TrainingError("training")):
            for found in run(lambda p, e=error: outcome(p.from_first, lambda: fails(e))):
                assert (type(found), str(found)) == (type(error), str(error))
        first, second = run(lambda p: outcome(p.from_first, lambda: fails(ZeroDivisionError("zero"))))
        assert type(first) is ZeroDivisionError
        assert type(second) is TrainingError and str(second) == "process 0: ZeroDivisionError: zero"


NOT_AN_ERROR = [dict(error="run_script", message=""), dict(error="Output", message=""), dict(error=[], message={})]
NOT_AN_ANSWER = [None, [], "text", {"value": 1, "error": "InputError"}, {"message": ""}]


@pytest.mark.parametrize(
    "said, kind", [*((said, TrainingError) for said in NOT_AN_ERROR), *((said, WireError) for said in NOT_AN_ANSWER)]
)
def test_an_error_by_another_name_is_only_told_and_an_answer_of_another_form_refused(said, kind):
    with together(2) as run:
        found = run(lambda p: p._from_hub(said) if p.index == 0 else outcome(p.from_first, None))[1]
        assert type(found) is kind and "process 0" in str(found)
        assert type(run(lambda p: p._from_hub(said) if p.index == 0 else outcome(p.gather, 1))[1]) is WireError


def test_a_process_that_is_gone_is_told_at_once():
    with together(2) as run:
        run(lambda p: p._links[0].close() if p.index == 1 else None)
        (found, _) = run(lambda p: outcome(p.gather, 1) if p.index == 0 else None)
        assert type(found) is WireError and "process 1 (127.0.0.1) has ended or closed the connection" in str(found)


def test_the_command_for_all_workers_is_this_one_again(tmp_path, monkeypatch):
    """Its folder, its Python and its words, through gcloud's shell and the worker's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", "--run_dir", "it's two words"])
    for python, expected in ((str(tmp_path / ".venv/bin/python"), ".venv/bin/python"), ("/usr/bin/python3",) * 2):
        monkeypatch.setattr(sys, "executable", python)
        line = str(peers_module._missing(0, Meeting([HOME, HOME]), [1], 2, "")).splitlines()[-1]
        (command,) = [word for word in shlex.split(line) if word.startswith("--command=")]
        words = shlex.split(command.removeprefix("--command="))
        assert words == ["cd", str(tmp_path), "&&", expected, "train.py", "--run_dir", "it's two words"]


# ---------------------------------------------------------------------------------------------------------- strangers
@pytest.fixture
def listener():
    """Waits for one process, in a thread: (listener, function that returns its links)."""
    made = Listener(HOME, 0, 2, SECRET, {HOME}, 60.0)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(made.wait, 60.0)
        yield made, waiting.result
        made.close()


def stranger(port: int) -> socket.socket:
    return socket.create_connection((HOME, port), timeout=30)


def frame(content: bytes) -> bytes:
    return struct.pack(">Q", len(content)) + content


def hello(**changes) -> bytes:
    return frame(json.dumps({"index": 1, "nonce": "0" * 32} | changes).encode())


def closed(connection: socket.socket) -> bool:
    """Whether the other end has closed it. Reads whatever comes before."""
    try:
        while connection.recv(4096):
            pass
    except ConnectionError:
        pass
    return True


RUDE = {
    "nothing": b"",
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "a huge length": struct.pack(">Q", 2**63) + b"{}",
    "a length of 1001": frame(b"[" * 1001),
    "not UTF-8": frame(b"\xff\xfe"),
    "deep": frame(b"[" * 1000),
    "a list": frame(b"[]"),
    "no nonce": hello(nonce=None),
    "no proof": hello() + frame(b"{}"),
    "a wrong proof": hello() + frame(b'{"proof": "00"}'),
    "a proof that is no text": hello() + frame(b'{"proof": "\\ud800"}'),
    "a proof not ASCII": hello() + frame('{"proof": "\u00fc"}'.encode()),
}


@pytest.mark.parametrize("said", RUDE)
def test_who_does_not_prove_himself_is_not_let_in_and_the_run_still_meets(listener, said):
    made, links = listener
    connection = stranger(made.port)
    with contextlib.suppress(OSError):  # it may have been turned away before it has said all
        connection.sendall(RUDE[said])
        connection.shutdown(socket.SHUT_WR)
    assert closed(connection) and made.missing() == [1]
    own = wire.connect(HOME, made.port, 1, SECRET, "process 0", 60.0)
    (link,) = links()
    link.send("hello")
    assert own.receive() == "hello"


def test_silent_callers_keep_nobody_waiting(listener):
    made, links = listener
    with contextlib.ExitStack() as silent:
        for _ in range(wire.MOST_GREETINGS - 1):
            silent.enter_context(stranger(made.port))
        wire.connect(HOME, made.port, 1, SECRET, "process 0", 60.0)
        assert len(links()) == 1


def test_a_caller_from_elsewhere_is_turned_away_unheard(listener):
    made, links = listener
    made._allowed = {"192.0.2.1"}
    assert closed(stranger(made.port)) and made.turned_away == ["127.0.0.1 is no host of this run"]
    made._allowed = {HOME}
    wire.connect(HOME, made.port, 1, SECRET, "process 0", 60.0)
    assert len(links()) == 1


def test_only_the_hosts_own_address_is_listened_on_and_only_until_they_have_met():
    made = Listener(HOME, 0, 2, SECRET, None, 60.0)
    port = f":{made.port:04X}"
    lines = [line.split() for kind in ("tcp", "tcp6") for line in Path("/proc/net", kind).read_text().splitlines()[1:]]
    assert {line[1] for line in lines if line[3] == "0A" and line[1].endswith(port)} == {f"0100007F{port}"}
    made.close()
    with pytest.raises(ConnectionRefusedError):
        stranger(made.port)


def test_a_false_process_0_learns_nothing_and_is_not_believed():
    """Someone listens on host 0's port first: the host calls, asks for a proof and goes."""

    def pretend():
        connection, _ = server.accept()
        hello = json.loads(connection.recv(4096)[8:])
        connection.sendall(frame(json.dumps({"nonce": "1" * 32, "proof": "2" * 64}).encode()))
        return hello, connection.recv(4096)

    with socket.create_server((HOME, 0)) as server, ThreadPoolExecutor(1) as pool:
        pretending = pool.submit(pretend)
        with pytest.raises(DeviceError, match="does not know the secret of this run; give all hosts the same"):
            wait_for_peers(1, [HOME, HOME], 60.0, server.getsockname()[1], SECRET)
        hello, heard = pretending.result()
    assert hello.keys() == {"index", "nonce"} and heard == b""


def test_a_proof_is_of_one_side_one_index_and_one_time(listener):
    """What was heard once opens nothing: not sent back, not for another process, not again."""
    made, links = listener
    one, two = stranger(made.port), stranger(made.port)
    one.sendall(hello(index=1))
    challenge = json.loads(one.recv(4096)[8:])
    two.sendall(hello(index=1, nonce=challenge["nonce"]))  # have the listener compute a proof for us
    proof = json.loads(two.recv(4096)[8:])["proof"]
    one.sendall(frame(json.dumps({"proof": proof}).encode()))
    assert closed(one) and made.missing() == [1]
    made._count = 1
    assert links() == []


def test_the_same_host_called_twice_counts_once(listener):
    """Its first process was killed while the others were still awaited."""
    made, links = listener
    made._count = 3
    first = wire.connect(HOME, made.port, 1, SECRET, "process 0", 60.0)
    while made.missing() != [2]:
        time.sleep(0.01)
    second = wire.connect(HOME, made.port, 1, SECRET, "process 0", 60.0)
    wire.connect(HOME, made.port, 2, SECRET, "process 0", 60.0)
    links()[0].send("hello")
    assert second.receive() == "hello"
    with pytest.raises(WireError):
        first.receive()


@pytest.fixture
def ends():
    """A link to process 1, and the socket at that end."""
    with socket.create_server((HOME, 0)) as server, stranger(server.getsockname()[1]) as theirs:
        link = Link(server.accept()[0], "process 1", 60.0)
        yield link, theirs
        link.close()


@pytest.mark.parametrize("said", [struct.pack(">Q", 2**40), frame(b"{"), frame(b"[" * 100_000), b"\0" * 3, b""])
def test_a_bad_message_after_the_greeting_is_an_error_and_takes_no_memory(ends, said):
    link, theirs = ends
    theirs.sendall(said)
    theirs.close()
    with pytest.raises(WireError, match="process 1"):
        link.receive()


def test_a_message_that_trickles_in_meets_one_deadline_for_all(ends):
    (link, theirs), ended = ends, threading.Event()
    link.seconds = 0.3

    def trickle():
        theirs.sendall(struct.pack(">Q", 100))
        while not ended.wait(0.05):
            theirs.sendall(b" ")

    with ThreadPoolExecutor(1) as pool:
        pool.submit(trickle)
        with pytest.raises(WireError, match=r"did not answer within 0\.3 s"):
            link.receive()
        ended.set()


# ------------------------------------------------------------------------------------------------------------- secret
def test_a_secret_comes_from_a_file_that_nobody_else_may_read(tmp_path):
    file = tmp_path / "secret"
    file.write_bytes(b"0123456789abcdef\n")
    file.chmod(0o600)
    assert read_secret(str(file)) == b"0123456789abcdef"
    file.chmod(0o640)
    with pytest.raises(InputError, match="has mode 640, so others may read it; chmod 600"):
        read_secret(str(file))
    file.chmod(0o600)
    file.write_bytes(b"short\n")
    with pytest.raises(InputError, match="holds 5 bytes, expected at least 16"):
        read_secret(str(file))
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", tmp_path / "absent", tmp_path):
        with pytest.raises(InputError, match="cannot be read"):
            read_secret(str(path))


def test_an_address_of_another_machine_cannot_be_listened_on():
    with pytest.raises(DeviceError, match=r"this host cannot listen on 192\.0\.2\.1:0, its own address in the slice"):
        peers_module._listen(Meeting(["192.0.2.1"] * 2, SECRET), 0)


def test_replicas_meet_on_loopback_with_a_secret_of_their_own(monkeypatch):
    """What torchrun's store holds for them is an address, a port and a secret, as JSON."""
    store = dist.HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")  # this machine's for others; nobody else is asked for
    with ThreadPoolExecutor(3) as pool:
        met = list(pool.map(lambda index: meet_replicas(index, 3, 60.0), range(3)))
        assert list(pool.map(lambda peers: peers.largest(peers.index), met)) == [2, 2, 2]
    said = json.loads(store.get("peers"))
    assert said["address"] == "127.0.0.1" and len(bytes.fromhex(said["secret"])) == 32


def test_a_save_that_failed_on_one_process_is_raised_on_all(tmp_path):
    """The others would go on to the next step, and wait there for it."""
    with together(3) as meet:
        folders = meet(lambda peers: Checkpoints(tmp_path, 1, peers))
        folders[1]._failure = SaveError("the disk of process 1 is full")

        def check(peers):
            return outcome(folders[peers.index].check)

        assert [str(found) for found in meet(check)] == ["the disk of process 1 is full"] * 3
        assert meet(check) == [None] * 3, "said once"
