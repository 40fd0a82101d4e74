"""Authenticated, bounded connections between the processes of a run, for data alone. Imports nothing of this project.

A message is 8 bytes of length, big-endian, and UTF-8 JSON; the bytes of a tensor follow one another without a frame, as
many as the receiver has asked for. Nothing that arrives is executed. Both ends prove that they know the secret of the
run (HMAC-SHA256 over fresh random numbers of both) before either says anything else.

multiprocessing.connection limits a message and needs no pickle (send_bytes), but has no deadline: a peer that sends a
byte now and then holds recv_bytes() for ever, and one that says nothing holds the accept() of a Listener with a key.
"""

import contextlib
import hashlib
import hmac
import json
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

LONGEST_MESSAGE = 64 * 2**20  # bytes. The largest is the list of all shards of a checkpoint: some MB for 100 devices
LONGEST_GREETING = 1000  # bytes of a message from a caller that is not authenticated yet
GREETING_SECONDS = 10.0  # a greeting that takes longer has failed: nobody can keep a listener busy
MOST_GREETINGS = 64  # at a time; further connections are closed


class WireError(OSError):
    """The other end is gone, too slow, or says what it should not."""


class ProofError(WireError):
    """The other end does not know the secret of this run."""


class Link:
    """One connection to another process. name: of the other end, for messages."""

    def __init__(self, connection: socket.socket, name: str, seconds: float):
        """seconds: how long one message may take to come or go."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # finds a machine that is gone in a minute
        for option, value in ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3)):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        self._socket = connection
        self.name = name
        self.seconds = seconds

    def close(self) -> None:
        self._socket.close()

    def send(self, value: Any) -> None:
        """value: of JSON."""
        content = json.dumps(value).encode()
        assert len(content) <= LONGEST_MESSAGE, f"a message of {len(content):,} bytes"
        self.send_bytes(len(content).to_bytes(8, "big") + content)

    def receive(self, longest: int = LONGEST_MESSAGE) -> Any:
        size = bytearray(8)
        self.receive_into(memoryview(size))
        if (length := int.from_bytes(size, "big")) > longest:
            raise WireError(f"{self.name} announces a message of {length:,} bytes, expected at most {longest:,}")
        content = bytearray(length)
        self.receive_into(memoryview(content))
        try:
            return json.loads(content.decode())
        except (ValueError, RecursionError) as error:
            raise WireError(f"{self.name} sent what is no JSON: {error}") from error

    def send_bytes(self, content) -> None:
        with self._named_errors():
            self._socket.settimeout(self.seconds)
            self._socket.sendall(content)

    def receive_into(self, buffer: memoryview) -> None:
        """Fill the buffer, of bytes."""
        deadline = time.monotonic() + self.seconds
        while buffer:
            with self._named_errors():
                # a deadline for the whole, not for each byte that trickles in
                self._socket.settimeout(max(1e-3, deadline - time.monotonic()))
                count = self._socket.recv_into(buffer)
            if not count:
                raise WireError(f"{self.name} has ended or closed the connection")
            buffer = buffer[count:]

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            raise WireError(f"{self.name} did not answer within {self.seconds:g} s") from error
        except OSError as error:
            raise WireError(f"the connection to {self.name} broke: {error.strerror or error}") from error


def _proof(secret: bytes, side: str, *said: Any) -> str:
    return hmac.new(secret, json.dumps([side, *said]).encode(), hashlib.sha256).hexdigest()


def _field(message: Any, name: str, kind: type) -> Any:
    value = message.get(name) if isinstance(message, dict) else None
    if type(value) is not kind:
        raise WireError(f"a greeting without {name}")
    return value


def _check(proof: str, expected: str) -> None:
    if not hmac.compare_digest(proof.encode(errors="replace"), expected.encode()):
        raise ProofError("the other end does not know this run's secret")


def connect(address: str, port: int, index: int, secret: bytes, name: str, seconds: float) -> Link:
    """An authenticated link to the process that listens there. Raises WireError, ProofError."""
    try:
        connection = socket.create_connection((address, port), timeout=GREETING_SECONDS)
    except OSError as error:
        raise WireError(f"{name} does not listen yet: {error.strerror or error}") from error
    link = Link(connection, name, GREETING_SECONDS)
    try:
        nonce = secrets.token_hex(16)
        link.send({"index": index, "nonce": nonce})
        answer = link.receive(LONGEST_GREETING)
        other = _field(answer, "nonce", str)
        _check(_field(answer, "proof", str), _proof(secret, "listener", index, nonce, other))
        link.send({"proof": _proof(secret, "caller", index, nonce, other)})
        if link.receive(LONGEST_GREETING) != "welcome":
            raise WireError(f"{name} did not welcome this process")
    except BaseException:
        link.close()
        raise
    link.seconds = seconds
    return link


def _greet(link: Link, secret: bytes, count: int) -> int:
    """Authenticate a caller, and return the index of its process."""
    hello = link.receive(LONGEST_GREETING)
    index = _field(hello, "index", int)
    nonce = _field(hello, "nonce", str)
    own = secrets.token_hex(16)
    if not 0 < index < count:
        raise WireError(f"process {index} calls, expected 1 to {count - 1}")
    link.send({"nonce": own, "proof": _proof(secret, "listener", index, nonce, own)})
    _check(_field(link.receive(LONGEST_GREETING), "proof", str), _proof(secret, "caller", index, nonce, own))
    return index


class Listener:
    """Waits, on one address of this machine and never on all, for the other processes of the run.

    allowed: addresses that may call; None for any. Each call is answered in a thread of its own, so that one who says
    nothing keeps nobody waiting. The last call of an index counts: a host that was restarted calls again.
    """

    def __init__(self, address: str, port: int, count: int, secret: bytes, allowed: set[str] | None, seconds: float):
        """Raises OSError when address and port cannot be listened on."""
        family, kind, _, _, endpoint = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        self._socket = socket.socket(family, kind)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind(endpoint)
            self._socket.listen(MOST_GREETINGS)
        except OSError:
            self._socket.close()
            raise
        self.port = self._socket.getsockname()[1]
        self._count = count
        self._secret = secret
        self._allowed = allowed
        self._seconds = seconds
        self._links: dict[int, Link] = {}
        self._lock, self._greetings = threading.Lock(), threading.Semaphore(MOST_GREETINGS)
        self.turned_away: list[str] = []  # why others than the processes of the run were not let in; the first few

    def close(self) -> None:
        self._socket.close()

    def missing(self) -> list[int]:
        with self._lock:
            return [index for index in range(1, self._count) if index not in self._links]

    def wait(self, seconds: float) -> list[Link] | None:
        """The links to processes 1, 2, ..., once all have called. None after so many seconds."""
        deadline = time.monotonic() + seconds
        while self.missing():
            if (left := deadline - time.monotonic()) <= 0:
                return None
            self._socket.settimeout(min(left, 0.1))
            try:
                connection, endpoint = self._socket.accept()
            except (TimeoutError, ConnectionError):  # nobody yet; or gone again before it was accepted
                continue
            caller = endpoint[0].removeprefix("::ffff:")
            if self._allowed is not None and caller not in self._allowed:
                self._turn_away(connection, f"{caller} is no host of this run")
            elif not self._greetings.acquire(blocking=False):
                self._turn_away(connection, f"{caller}: too many calls at once")
            else:
                threading.Thread(target=self._answer, args=(connection, caller), daemon=True).start()
        with self._lock:
            return [self._links[index] for index in range(1, self._count)]

    def links(self) -> dict[int, Link]:
        """Those who have called so far."""
        with self._lock:
            return dict(self._links)

    def _turn_away(self, connection: socket.socket, why: str) -> None:
        if len(self.turned_away) < 5:
            self.turned_away.append(why)
        connection.close()

    def _answer(self, connection: socket.socket, caller: str) -> None:
        try:
            link = Link(connection, f"the caller at {caller}", GREETING_SECONDS)
            index = _greet(link, self._secret, self._count)
            link.send("welcome")
        except OSError as error:  # WireError is one: whoever it was, the run waits for its own
            self._turn_away(connection, f"{caller}: {error}")
            return
        finally:
            self._greetings.release()
        link.name, link.seconds = f"process {index} ({caller})", self._seconds
        with self._lock:
            if before := self._links.get(index):
                before.close()
            self._links[index] = link
