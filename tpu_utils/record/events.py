"""TensorBoard's event files: each value is written when it is logged.

torch's SummaryWriter writes in a thread of its own: where the disk is full, that thread dies with a traceback, and the
run that called it ends with its error. Here a disk without room costs the events that come after, and one warning.
"""

import math
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter


class Events:
    """A new event file in folder. Events of earlier files after first_step are hidden: they will be written again."""

    def __init__(self, folder: Path, first_step: int):
        self._folder = folder
        folder.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{time.time():017.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file = (folder / name).open("xb")
        self._records = RecordWriter(self._file)
        start = SessionLog(status=SessionLog.START)
        self._write(Event(file_version="brain.Event:2"), Event(step=first_step + 1, session_log=start))

    def scalars(self, values: dict[str, float], step: int) -> None:
        found = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(Event(step=step, summary=Summary(value=found)))

    def record(self, kind: str, step: int, fields: dict[str, Any]) -> None:
        """Numbers as kind/name; what was written after a prompt as sample/PROMPT."""
        self.scalars({f"{kind}/{name}": v for name, v in fields.items() if isinstance(v, int | float)}, step)
        if kind == "sample":
            from torch.utils.tensorboard.summary import text  # a second of imports

            self._write(Event(step=step, summary=text(f"sample/{fields['prompt']}", fields["text"])))

    def summary(self, config: dict[str, Any], summary: dict[str, Any]) -> None:
        """The options beside the results, and the goodput split in seconds."""
        from torch.utils.tensorboard.summary import hparams  # a second of imports

        numbers = {name: value for name, value in summary.items() if isinstance(value, int | float)}
        results = {f"summary/{name}": value for name, value in numbers.items() if math.isfinite(value)}
        options = {name: v if isinstance(v, bool | int | float | str) else str(v) for name, v in config.items()}
        self._write(*(Event(summary=part) for part in hparams(options, results)))
        goodput = {f"goodput_seconds/{phase}": seconds for phase, seconds in summary["goodput"].items()}
        self.scalars(results | goodput, summary["steps"])

    def close(self) -> None:
        self._file.close()

    def _write(self, *events: Event) -> None:
        if self._file.closed:
            return
        try:
            for event in events:
                event.wall_time = time.time()
                self._records.write(event.SerializeToString())
            self._file.flush()
        except OSError as error:
            print(f"warning: no more events for TensorBoard in {self._folder}: {error.strerror}", file=sys.stderr)
            self._file.raw.close()  # what it holds back is lost: to write it would fail again
