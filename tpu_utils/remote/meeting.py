"""The processes of one run: how the hosts of a slice meet before the TPU starts, and what they agree on later.

They talk through process 0, in JSON and in the bytes of tensors (wire.py), and never through the devices.
"""

import contextlib
import json
import os
import secrets
import shlex
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tpu_utils.base import errors
from tpu_utils.base.errors import DeviceError, InputError, TrainingError
from tpu_utils.base.process import Peers
from tpu_utils.remote.wire import Link, Listener, ProofError, WireError, connect

ANSWER_SECONDS = 1800.0  # how long a process waits for a message: its sender may be busy with a save or a compile
TRANSFER_SECONDS = 86400.0
"""The same while a checkpoint moves. A process that ends is noticed at once, a dead machine by keepalive."""


@dataclass
class Meeting:
    """Where the processes of a run meet, and how they know each other."""

    addresses: list[str]  # addresses of processes 0, 1, ...; process 0 listens
    secret: bytes = b""
    port: int = 0  # to listen on; 0: any
    anyone: bool = False  # whether a caller may have another address than these; it has to know the secret in any case


def wait_for_peers(index: int, addresses: list[str], seconds: float, port: int = 12356, secret: bytes = b"") -> Peers:
    """Meet the other hosts before the TPU is started: its start waits for missing hosts for ever, without a message.
    Host 0 listens on its own address in the slice, to the slice's addresses alone. Raises DeviceError naming the hosts
    that are missing."""
    count = len(addresses)
    if count == 1:
        return Peers()
    known = "a secret" if secret else "no secret (docs/many_devices.md)"
    print(
        f"host       {index} of {count}, waiting up to {seconds:g} s for the others at {addresses[0]}:{port}, "
        f"with {known}",
        flush=True,
    )
    meeting = Meeting(addresses, secret, port)
    return LinkedPeers(index, meeting, _meet(index, meeting, seconds, port))


def meet_replicas(index: int, count: int, seconds: float) -> Peers:
    """The processes that torchrun has started, one for each device. Process 0 tells the others where it listens, and a
    secret made for this run, through torchrun's own store: on one machine nothing but loopback is listened on."""
    store = dist.distributed_c10d._get_default_store()
    if index == 0:
        address = "127.0.0.1" if os.environ.get("GROUP_WORLD_SIZE", "1") == "1" else os.environ["MASTER_ADDR"]
        meeting = Meeting([address] * count, secrets.token_bytes(32), anyone=True)
        listener = _listen(meeting, 0)
        store.set("peers", json.dumps({"address": address, "port": listener.port, "secret": meeting.secret.hex()}))
        return LinkedPeers(0, meeting, _gather_links(listener, meeting, seconds))
    found = json.loads(store.get("peers"))
    meeting = Meeting([found["address"]] * count, bytes.fromhex(found["secret"]), anyone=True)
    return LinkedPeers(index, meeting, _meet(index, meeting, seconds, found["port"]))


def _meet(index: int, meeting: Meeting, seconds: float, port: int) -> list[Link]:
    """Process 0: the links to all others. Any other process: the one to process 0."""
    deadline, found = time.monotonic() + seconds, "no answer"
    if index == 0:
        _wait_for_names(meeting, deadline, seconds)
        return _gather_links(_listen(meeting, port), meeting, max(1.0, round(deadline - time.monotonic())))
    while True:
        try:
            link = connect(meeting.addresses[0], port, index, meeting.secret, "process 0", ANSWER_SECONDS)
            break
        except ProofError as error:
            raise DeviceError(
                f"{meeting.addresses[0]}:{port} does not know the secret of this run; give all hosts the same "
                "--peers_secret, and see which program listens there"
            ) from error
        except WireError as error:
            found = str(error)
        if time.monotonic() > deadline:
            raise _missing(index, meeting, [0], seconds, found)
        time.sleep(0.1)
    link.seconds = max(1.0, deadline - time.monotonic()) + 10  # host 0 may have started to wait a little later
    try:
        missing = link.receive()  # [] once all are there
    except WireError as error:
        raise _missing(index, meeting, [0], seconds, str(error)) from error
    if missing != []:
        others = range(1, len(meeting.addresses))
        named = [i for i in others if i in missing] if type(missing) is list else []
        raise _missing(index, meeting, named, seconds, "host 0 has not heard of them")
    link.seconds = ANSWER_SECONDS
    return [link]


def _wait_for_names(meeting: Meeting, deadline: float, seconds: float) -> None:
    """Wait until the names of all hosts resolve: only these may call. A Kubernetes pod has its name once it runs."""
    for index, address in enumerate(meeting.addresses):
        while True:
            try:
                socket.getaddrinfo(address, 0)
                break
            except socket.gaierror as error:
                if time.monotonic() > deadline:
                    raise _missing(0, meeting, [index], seconds, f"no such name: {error.strerror}") from error
            time.sleep(0.5)


def _listen(meeting: Meeting, port: int, index: int = 0, count: int = 0) -> Listener:
    """index: of this process. count: of processes with it and its callers; 0: all."""
    own = meeting.addresses[index]
    try:
        allowed = (
            None if meeting.anyone else {info[4][0] for a in meeting.addresses for info in socket.getaddrinfo(a, 0)}
        )
        return Listener(own, port, count or len(meeting.addresses), meeting.secret, allowed, ANSWER_SECONDS)
    except OSError as error:
        raise DeviceError(
            f"this host cannot listen on {own}:{port}, its own address in the slice: {error.strerror or error}; is "
            "another run waiting there, or the address that of another machine? (in a container: --net=host)"
        ) from error


def _gather_links(listener: Listener, meeting: Meeting, seconds: float) -> list[Link]:
    links = listener.wait(seconds)
    missing = listener.missing()
    for link in links or listener.links().values():
        with contextlib.suppress(WireError):  # one that is gone again is found at its first message
            link.send(missing)
    listener.close()
    if links is None:
        raise _missing(0, meeting, missing, seconds, "; ".join(listener.turned_away) or "they did not call")
    return links


def _missing(index: int, meeting: Meeting, missing: list[int], seconds: float, found: str) -> DeviceError:
    names = ", ".join(f"host {i} ({meeting.addresses[i]})" for i in missing)
    command = f"--worker=all --command={shlex.quote(_own_command())}"
    return DeviceError(
        f"host {index} of {len(meeting.addresses)} waited {seconds:g} s for {names}: {found}; start the same command "
        f"on all workers:\n  gcloud compute tpus tpu-vm ssh NAME --zone ZONE {command}"
    )


def _own_command() -> str:
    """What started this process, for the shell of another host: ssh begins in the home folder, without the venv."""
    folder, python = Path.cwd(), Path(sys.executable)  # the venv's own link, not the interpreter behind it
    python = python.relative_to(folder) if python.is_relative_to(folder) else python
    return f"cd {shlex.quote(str(folder))} && {shlex.join([str(python), *sys.argv])}"


def _own_error(name: Any) -> type[Exception] | None:
    """The class of this name in errors.py. None for all else that another process may say."""
    kind = getattr(errors, str(name), None)
    return kind if isinstance(kind, type) and issubclass(kind, InputError | TrainingError) else None


class LinkedPeers(Peers):
    """Several processes, which agree through the hosts' network and never through the devices."""

    def __init__(self, index: int, meeting: Meeting, links: list[Link]):
        self.index = index
        self.count = len(meeting.addresses)
        self._meeting = meeting
        self._links = links

    def with_own_links(self) -> "LinkedPeers":
        listener = _listen(self._meeting, self._meeting.port) if self.index == 0 else None
        port = self.from_first(lambda: listener.port)
        if listener:
            links = _gather_links(listener, self._meeting, ANSWER_SECONDS)
        else:
            links = _meet(self.index, self._meeting, ANSWER_SECONDS, port)
        return LinkedPeers(self.index, self._meeting, links)

    def ring(self) -> tuple[Link, Link]:
        """New connections: to the process after this one, and from the one before. All processes must call it."""
        addresses, secret = self._meeting.addresses, self._meeting.secret
        own_port = self._meeting.port if len(set(addresses)) == self.count else 0  # one machine: no port twice
        listener = _listen(self._meeting, own_port, self.index, 2)
        after, ports = (self.index + 1) % self.count, self.gather(listener.port)
        with ThreadPoolExecutor(1) as pool:  # each answers while it calls
            before = pool.submit(listener.wait, ANSWER_SECONDS)
            try:
                link = connect(addresses[after], ports[after], 1, secret, f"process {after}", ANSWER_SECONDS)
            except OSError:
                listener.close()  # else the thread would wait for its caller
                raise
            links = before.result()
        listener.close()
        if not links:
            raise WireError(f"the process before process {self.index} did not call within {ANSWER_SECONDS:g} s")
        return link, links[0]

    @contextlib.contextmanager
    def patient(self) -> Iterator[None]:
        before = [link.seconds for link in self._links]
        try:
            for link in self._links:
                link.seconds = TRANSFER_SECONDS
            yield
        finally:
            for link, seconds in zip(self._links, before, strict=True):
                link.seconds = seconds

    def _from_hub(self, value: Any) -> Any:
        """Broadcast the value of process 0."""
        if self.index > 0:
            return self._links[0].receive()
        for link in self._links:
            link.send(value)
        return value

    def gather(self, value: Any) -> list[Any]:
        if self.index > 0:
            self._links[0].send(value)
            values = self._links[0].receive()
        else:
            values = self._from_hub([value, *(link.receive() for link in self._links)])
        if type(values) is not list or len(values) != self.count:
            raise WireError(f"process 0 gave {type(values).__name__}, expected a list of {self.count}")
        return values

    def largest(self, value: int) -> int:
        values = self.gather(value)
        if any(type(each) is not int for each in values):
            raise WireError(f"the processes gave {values}, expected integers")
        return max(values)

    def on_all(self, action: Callable[[], None]) -> None:
        problem = None
        try:
            action()
        except (InputError, TrainingError, OSError, ValueError) as error:
            problem = [type(error).__name__, f"process {self.index}: {error}"]
        for name, message in filter(None, self.gather(problem)):
            raise (_own_error(name) or OSError)(str(message))

    def from_first(self, function: Callable[[], Any]) -> Any:
        if self.index == 0:
            try:
                value = function()
            except Exception as error:  # whatever it is: the others wait to hear
                self._from_hub({"error": type(error).__name__, "message": str(error)})
                raise
            return self._from_hub({"value": value})["value"]
        outcome = self._from_hub(None)
        if type(outcome) is dict and outcome.keys() == {"value"}:
            return outcome["value"]
        if type(outcome) is dict and outcome.keys() == {"error", "message"}:
            if kind := _own_error(outcome["error"]):
                raise kind(str(outcome["message"]))
            raise TrainingError(f"process 0: {outcome['error']}: {outcome['message']}")
        raise WireError("process 0 gave neither a value nor an error")

    def tensor_from_first(self, tensor: torch.Tensor) -> None:
        if not tensor.numel():
            return
        content = memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())
        if self.index > 0:
            self._links[0].receive_into(content)
        for link in self._links if self.index == 0 else []:
            link.send_bytes(content)
