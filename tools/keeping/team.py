"""The hosts that keep one run going: each sees its own script, and host 0 decides for all when an attempt is over.

They talk over the authenticated connections of tpu_utils/remote/wire.py, each with host 0. A host that says nothing for
LOST_SECONDS is lost.
"""

import contextlib
import queue
import signal
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tpu_utils.base.errors import DeviceError
from tpu_utils.remote.wire import Link, Listener, WireError, connect

BEAT_SECONDS = 1.0
LOST_SECONDS = 15.0


class State(NamedTuple):
    """State of the script on one host."""

    code: int | None = None  # its exit code, or minus a signal; None: it runs
    silent: bool = False
    stopping: bool = False  # its host was told to stop


class Verdict(NamedTuple):
    """Why an attempt is over."""

    reason: str
    code: int | None  # with which exit code everybody ends; None: another attempt follows
    silent: bool = False  # the script is stuck since it last logged or saved


def in_words(code: int) -> str:
    names = {number.value: number.name for number in signal.Signals}  # those between SIGRTMIN and SIGRTMAX have none
    return f"exit code {code}" if code >= 0 else f"killed by {names.get(-code, f'signal {-code}')}"


def is_code(value: Any) -> bool:
    """Whether a process can end so: with an exit code, or by a signal; None: it runs."""
    return value is None or (type(value) is int and -signal.SIGRTMAX <= value <= 255)


def judge(states: dict[int, State | None], silent_seconds: float) -> Verdict | None:
    """None: the attempt goes on. states: of each host in it; None for one that is lost."""
    stopping = any(state and state.stopping for state in states.values())
    codes = {index: state.code for index, state in states.items() if state and state.code is not None}

    def over(index: int, why: str, code: int | None = None) -> Verdict:
        name = f"host {index}: " if len(states) > 1 else ""
        return Verdict(name + why, 1 if stopping and code is None else code)

    for index, code in codes.items():
        if code == 2:  # its options are refused: they would be again
            return over(index, "exit code 2", 2)
    if len(codes) == len(states) and (stopping or not any(codes.values())):
        index, code = max(codes.items(), key=lambda item: abs(item[1]))
        return over(index, in_words(code), code if code >= 0 else 128 - code)
    for index, state in states.items():
        if state is None:
            return over(index, "lost")
        if state.code and not stopping:  # told to stop, all save and end, one after the other
            return over(index, in_words(state.code))
    if any(state.silent for state in states.values()):  # who holds the others up cannot be seen from outside
        return Verdict(f"silent for {silent_seconds:.0f} s", 1 if stopping else None, True)
    return None


class Alone:
    """One host."""

    decides = True

    def __init__(self, silent_seconds: float):
        self.silent_seconds = silent_seconds

    def meet(self) -> dict[str, str]:
        """Before an attempt. Variables for the script."""
        return {}

    def exchange(self, own: State) -> Verdict | None:
        return judge({0: own}, self.silent_seconds)

    def tell(self, verdict: Verdict) -> None:
        """The others, what host 0 has decided."""


@dataclass
class First(Alone):
    """Host 0 of several. Raises DeviceError where hosts are missing for too long, OSError where it cannot listen."""

    addresses: list[str]
    port: int
    secret: bytes
    silent_seconds: float
    wait: float  # seconds for all hosts
    elastic: bool  # after that an attempt begins with those that are there
    links: dict[int, Link] = field(default_factory=dict)
    states: dict[int, State | None] = field(default_factory=dict)
    sent: float = 0.0

    def meet(self) -> dict[str, str]:
        allowed = {info[4][0] for address in self.addresses for info in socket.getaddrinfo(address, 0)}
        listener = Listener(self.addresses[0], self.port, len(self.addresses), self.secret, allowed, LOST_SECONDS)
        listener.wait(self.wait)
        missing = listener.missing()
        self.links = listener.links()
        listener.close()
        if missing and not self.elastic:
            names = ", ".join(f"host {index} ({self.addresses[index]})" for index in missing)
            raise DeviceError(f"waited {self.wait:g} s for {names}; start the same command there")
        hosts = [0, *sorted(self.links)]
        self.states = {index: State() for index in hosts}
        for index, link in self.links.items():
            self._send(index, {"hosts": hosts})
            threading.Thread(target=self._listen, args=(index, link, self.states), daemon=True).start()
        return variables(self.addresses, hosts, 0)

    def _send(self, index: int, message: Any) -> None:
        try:
            self.links[index].send(message)
        except WireError:
            self.states[index] = None

    @staticmethod
    def _listen(index: int, link: Link, states: dict[int, State | None]) -> None:
        """In a thread: what this host says, until it is lost or the attempt is over."""
        try:
            while True:
                states[index] = state_in(link.receive(1000))
        except WireError:
            states[index] = None

    def exchange(self, own: State) -> Verdict | None:
        self.states[0] = own
        if (now := time.monotonic()) - self.sent > BEAT_SECONDS:
            self.sent = now
            for index in self.links:
                self._send(index, "beat")
        return judge(dict(self.states), self.silent_seconds)

    def tell(self, verdict: Verdict) -> None:
        for index in self.links:
            self._send(index, list(verdict))  # the other end closes: a close here could overtake the verdict


@dataclass
class Other(Alone):
    """Any other host of several. It does what host 0 says; where that is lost, it ends its script and waits for it."""

    index: int
    addresses: list[str]
    port: int
    secret: bytes
    wait: float
    elastic: bool  # wait without end, since host 0 may go on without this one until the next start
    sent: float = 0.0
    said: State | None = None
    decides = False

    def meet(self) -> dict[str, str]:
        deadline = time.monotonic() + self.wait
        while True:
            try:
                self.link = connect(self.addresses[0], self.port, self.index, self.secret, "host 0", self.wait)
                hosts = self.link.receive(1 << 20)["hosts"]
                if self.index in hosts and all(type(i) is int and 0 <= i < len(self.addresses) for i in hosts):
                    break
                raise WireError(f"{hosts!r:.50} are no hosts with this one among them")
            except (WireError, TypeError, KeyError) as error:
                if time.monotonic() > deadline and not self.elastic:
                    raise DeviceError(f"waited {self.wait:g} s for host 0 ({self.addresses[0]}): {error}") from error
            time.sleep(0.5)
        self.link.seconds = LOST_SECONDS
        self.heard: queue.SimpleQueue[Verdict] = queue.SimpleQueue()
        threading.Thread(target=self._listen, args=(self.link, self.heard), daemon=True).start()
        return variables(self.addresses, hosts, self.index)

    @staticmethod
    def _listen(link: Link, heard: queue.SimpleQueue) -> None:
        """In a thread: beats, and at the end a verdict."""
        try:
            while (message := link.receive(10_000)) == "beat":
                pass
            heard.put(verdict_in(message))
        except WireError:
            heard.put(Verdict("host 0: lost", None))

    def exchange(self, own: State) -> Verdict | None:
        if (now := time.monotonic()) - self.sent > BEAT_SECONDS or own != self.said:
            self.sent, self.said = now, own
            try:
                self.link.send(list(own))
            except WireError:  # it may have said why before it closed
                with contextlib.suppress(queue.Empty):
                    return self.heard.get(timeout=1.0)
                return Verdict("host 0: lost", None)
        try:
            verdict = self.heard.get_nowait()
        except queue.Empty:
            return None
        self.link.close()
        return verdict


def variables(addresses: list[str], hosts: list[int], own: int) -> dict[str, str]:
    """For a script that is to know of these hosts alone."""
    if len(hosts) == len(addresses):
        return {}
    names = ",".join(addresses[index] for index in hosts)
    return {"TPU_WORKER_ID": str(hosts.index(own)), "TPU_WORKER_HOSTNAMES": names, "TPU_SKIP_MDS_QUERY": "1"}


def state_in(message: Any) -> State:
    """Raises WireError."""
    match message:
        case [code, bool() as silent, bool() as stopping] if is_code(code):
            return State(code, silent, stopping)
    raise WireError(f"{message!r:.50} is no state of a script")


def verdict_in(message: Any) -> Verdict:
    """Raises WireError."""
    match message:
        case [str() as reason, code, bool() as silent] if is_code(code):
            return Verdict(reason, code, silent)
    raise WireError(f"{message!r:.50} is no verdict")
