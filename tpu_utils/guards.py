"""What keeps a run from going wrong, and what stops it early on purpose."""

import faulthandler
import fcntl
import http.client
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import sys
import threading
import time
import urllib.request
import weakref
from collections.abc import Iterable
from pathlib import Path

import torch
import torch_xla.runtime as xr

from config import InputError
from tpu_utils.checkpoint import write_atomically
from tpu_utils.metrics import Goodput


def gradient_norm(parameters: Iterable[torch.nn.Parameter]) -> torch.Tensor:
    """The norm over all gradients, () float32, inside the compiled step. Not finite if one of their values is not."""
    return torch.stack([(p.grad.float() * p.grad.float()).sum() for p in parameters]).sum().sqrt()


def step_if(finite: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    """optimizer.step(), undone inside the graph unless finite, a () bool tensor on the device.

    Parameters and optimizer state, its step count included, then keep every bit: weight decay and momentum too.
    """
    tensors = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    tensors += [value for parameter in tensors for value in optimizer.state[parameter].values()]
    with torch.no_grad():
        before = [tensor.clone() for tensor in tensors]
        optimizer.step()
        for tensor, old in zip(tensors, before, strict=True):
            tensor.copy_(torch.where(finite, tensor, old))


class StopRequest:
    """The first SIGTERM or SIGINT asks for a checkpoint at the next step boundary; a second one stops at once.

    relay: a file through which a process that only started the replicas passes the signal on to them. It is idempotent
    where forwarding is not: a terminal, or systemd, signals parent and children alike.
    """

    def __init__(self, relay: Path | None = None):
        self._signal: int | None = None
        self._notice: str | None = None
        self._relay = relay
        if threading.current_thread() is threading.main_thread():  # torch_xla.launch runs replicas in other threads
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, self._request)

    def _request(self, number: int, frame) -> None:
        if self._signal and self._relay:
            for child in multiprocessing.active_children():
                child.kill()
            os._exit(128 + number)
        self._signal = number
        if self._relay:
            write_atomically(self._relay, str(number).encode())
        else:
            signal.signal(number, signal.SIG_DFL)

    @property
    def signal(self) -> int | None:
        """Number of the signal that asked to stop, or None. A notice of the metadata server counts as SIGTERM."""
        if self._signal is None and self._relay and self._relay.exists():
            self._signal = int(self._relay.read_text())
        return self._signal or (signal.SIGTERM.value if self._notice else None)

    def watch_metadata(self) -> None:
        """Heed notices of maintenance and preemption in the background: on TPU, or where GCE_METADATA_HOST is set.

        Google's client libraries read the same variable. A server that is silent or absent has no effect.
        """
        if xr.device_type() == "TPU" or os.environ.get("GCE_METADATA_HOST"):
            for key in NOTICES:
                # no reference to self: the thread ends when nobody can ask any more
                arguments = (weakref.ref(self), key)
                threading.Thread(target=_watch_metadata, args=arguments, name=f"metadata {key}", daemon=True).start()

    def notice(self, text: str) -> None:
        """Ask to stop because the machine is about to go."""
        self._notice = self._notice or text
        print(f"notice     {text}: stopping at the next step boundary", flush=True)

    def say(self, number: int, step: int, run_dir: Path | str, silent: bool = False) -> int:
        """Print why the run ended, what was saved and how to go on. Returns the exit code: 143 after SIGTERM, 130
        after SIGINT. number: of the signal, which another process may have got. step: the last one done."""
        reason = f"signal {number}" if self._signal or not self._notice else self._notice
        done = f"saved after step {step}" if step else "before the first step: there was nothing to save"
        if not silent:
            print(f"stopped by {reason}, {done}")
            how = "must" if step else "auto"
            print(f"to go on, repeat the command with --run_dir {run_dir} --resume {how}", flush=True)
        return 128 + number


# key of the VM's metadata -> its values that mean that this machine is about to go. A TPU cannot be migrated alive.
# Source: cloud.google.com/compute/docs/metadata/getting-live-migration-notice and .../instances/create-use-spot.
NOTICES = {
    "maintenance-event": ("TERMINATE_ON_HOST_MAINTENANCE", "MIGRATE_ON_HOST_MAINTENANCE"),
    "preempted": ("TRUE",),
}


def _watch_metadata(ref: weakref.ref, key: str, wait_seconds: int = 60, pause_seconds: float = 5) -> None:
    """Ask the metadata server for instance/key again and again, each time waiting there for a change."""
    host = os.environ.get("GCE_METADATA_HOST") or "metadata.google.internal"
    url, query = f"http://{host}/computeMetadata/v1/instance/{key}", ""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the server is on the VM's own link
    while ref() is not None:
        started = time.monotonic()
        try:
            request = urllib.request.Request(url + query, headers={"Metadata-Flavor": "Google"})
            with direct.open(request, timeout=wait_seconds + 10) as answer:
                google = answer.headers.get("Metadata-Flavor") == "Google"
                value, etag = answer.read(1000).decode().strip().upper(), answer.headers.get("ETag", "0")
        except (OSError, ValueError, http.client.HTTPException):  # no such server, or not now: nothing to be said
            google, value, etag = False, "", "0"
        stop = ref()
        if stop is not None and google and value in NOTICES[key]:
            stop.notice(f"maintenance notice {key} = {value}")
            return
        del stop
        query = f"?wait_for_change=true&timeout_sec={wait_seconds}&last_etag={etag}" if google else ""
        if time.monotonic() - started < pause_seconds and (not google or value):
            time.sleep(0.2 if google else pause_seconds)


def end_with_parent() -> None:
    """For a process of torch_xla.launch: end when the launcher was killed, instead of going on without it."""
    parent = multiprocessing.parent_process()

    def wait() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    if parent:
        threading.Thread(target=wait, name="end with parent", daemon=True).start()


class RunLock:
    """One run at a time in a run directory: an flock on its file `lock`.

    Held until this object goes; the kernel releases it at any death, so a stale file never blocks. Of the processes of
    one run only the first takes it.
    """

    def acquire(self, run_dir: Path, patience_seconds: float = 2) -> None:
        """Raises InputError naming the holder. patience_seconds: for a holder that was killed and is not yet gone."""
        self._file, deadline = (run_dir / "lock").open("a+"), time.monotonic() + patience_seconds
        while not self._try(run_dir):
            if time.monotonic() > deadline:
                self._file.seek(0)
                holder = self._file.read().strip() or "another process"
                self._file.close()
                raise InputError(
                    f"run_dir {run_dir} is in use by {holder}; expected no other run there; wait for it or stop it, or "
                    "choose another --run_dir"
                )
            time.sleep(0.05)
        self._file.truncate(0)
        self._file.write(f"pid {os.getpid()} on host {socket.gethostname()}\n")
        self._file.flush()

    def _try(self, run_dir: Path) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # the second is what NFS may say
            return False
        except OSError as error:
            print(
                f"warning: run_dir {run_dir} is on a file system without locks ({error.strerror}): a second run there "
                "would not be refused",
                file=sys.stderr,
            )
        return True


STALL_HINTS = {  # by Goodput's phase
    "start_up": "does another process hold the TPU (setup_tpu.py names it)? has the run started on all hosts?",
    "compile": "a large model may compile for long; has the run started on all hosts?",
    "data_wait": "can the data source (--data_dir, its disk or network) still be read?",
    "checkpoint": "can the disk of --run_dir still be written? do the other hosts still run?",
}
OTHER_STALL = "do the other hosts still run (a step waits for all of them)? is the TPU lost or held (setup_tpu.py)?"


def watch_for_stalls(goodput: Goodput, stall_seconds: float) -> None:
    """Print where every thread stands, once per stall, when a run makes no progress for stall_seconds; 0: never.

    Progress is what Goodput sees: a batch read, a step or evaluation batch sent off, a save begun or ended. Start-up
    and compiling may take six times as long. It ends nothing: what the run waits for may still come.
    """
    if stall_seconds > 0:
        # no reference to goodput: the thread ends with the run
        arguments = (weakref.ref(goodput), stall_seconds)
        threading.Thread(target=_watch_for_stalls, args=arguments, name="watchdog", daemon=True).start()


def _watch_for_stalls(ref: weakref.ref, stall_seconds: float) -> None:
    changes, since, told = None, time.monotonic(), False

    def say_over() -> None:
        print(f"stall      over after {time.monotonic() - since:.0f} s", file=sys.stderr, flush=True)

    while (goodput := ref()) is not None:
        now, phase = time.monotonic(), goodput.current
        if goodput.changes != changes:
            if told:
                say_over()
            changes, since, told = goodput.changes, now, False
        del goodput
        limit = stall_seconds * (6 if phase in ("start_up", "compile") else 1)
        if now - since > limit and not told:
            told, hint = True, STALL_HINTS.get(phase, OTHER_STALL)
            text = f"no progress for {limit:g} s in phase {phase}, and the run goes on waiting; check: {hint}"
            print(f"stall      {text} Where every thread stands:", file=sys.stderr, flush=True)
            faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        time.sleep(min(1, stall_seconds / 4))
    if told:  # the run came to its end before this thread looked again
        say_over()
