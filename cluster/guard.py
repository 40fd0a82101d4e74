"""Stands between Ray's worker and the script: python -m cluster.guard STATUS_FD FOLDER COMMAND...

The script must not outlive its place: others may get its chips at once. So this process kills it when the worker dies,
which closes this process's standard input; and the kernel kills it when this process dies (restarts.end_with). The exit
code, or minus the signal, is written to STATUS_FD. FOLDER is removed at the end; empty: nothing is.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from functools import partial

from tpu_utils.base.restarts import end_with


def before_the_script(guard: int) -> None:
    """In the child before exec: it ends with the guard, and takes the signals again that Ray blocks or we ignore."""
    end_with(guard)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def main(arguments: list[str]) -> int:
    status, folder, *command = arguments
    # a session of its own: what the script starts is reached as a group
    script = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=partial(before_the_script, os.getpid()),
        close_fds=True,
    )

    def signal_all(number: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.killpg(script.pid, number)

    def listen() -> None:
        """One byte is a signal's number; the end of the input means that the worker is gone."""
        while number := os.read(0, 1):
            signal_all(number[0])
        signal_all(signal.SIGKILL)

    threading.Thread(target=listen, daemon=True).start()
    code = script.wait()
    signal_all(signal.SIGKILL)  # what it left behind
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(BrokenPipeError):  # nobody is there to read it
        os.write(int(status), str(code).encode())
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is the client's to handle
    sys.exit(main(sys.argv[1:]))
