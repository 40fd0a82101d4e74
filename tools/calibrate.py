"""How far are predicted steps from the clock, on the TPU that is attached?
What to run first on a TPU VM, as one command.

Run:     python -m tools.calibrate                  # whatever is attached
         python -m tools.calibrate --device cpu     # rehearsal without a TPU
         python -m tools.calibrate --only 'peak *'  # some measurements, by name
Expect:  a line for each measurement; then, in --output, calibration.json,
         report.md (tables, and what to attach to a report) and calibration.png.
         Stopped anywhere, the same command goes on where it was; what failed is
         tried again. aot_tpu.py reads the calibration.
Exit:    0 all measured, or impossible here and said so; 1 something failed;
         2 wrong usage; 130 stopped by Ctrl-C.

It runs the doctor, asks the compiler about each preset's step and then runs it,
times matrix products, memory and collectives, and tries the promises of README
on the device itself. Where torch_xla is not installed it tries the scripts on
torch's own compiler instead: docs/torchtpu.md. This process never touches the
device: a chip belongs to one process, so each measurement has a process of its
own.
"""

import shutil
import sys
import time
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import Any

from tools.on_chip.bench import MISSING, Bench, Cannot, find_machine, hold, last_object, version_of
from tools.on_chip.chip_peaks import PEAKS, peak
from tools.on_chip.findings import report_text, save_picture
from tools.on_chip.promises import PROMISES
from tools.on_chip.steps import STEPS, estimate, run_step, write_mnist
from tools.on_chip.torch_compile_backend import TORCH_COMPILE
from tpu_compiler.estimate.calibration import CALIBRATION
from tpu_utils.base.errors import TrainingError, run_script
from tpu_utils.base.files import read_json
from tpu_utils.base.writing import write_atomically
from tpu_utils.options.tool_arguments import make_parser


def doctor(bench: Bench) -> dict[str, Any]:
    said = last_object(
        bench.child(
            "doctor", ["setup_tpu.py", "--json", "--time_limit=300", f"--device={bench.machine.device}"], (0, 1)
        )
    )
    failed = [f"{check['name']}: {check['finding']}" for check in said["checks"] if check["status"] == "fail"]
    hold(not failed, "; ".join(failed))
    return said["counts"]


def has_xla() -> bool:
    return version_of("torch_xla") != MISSING


def measurements_named(only: Sequence[str]) -> list[tuple[str, Callable[[Bench], dict[str, Any]]]]:
    """(name, function) in the order they are made; without torch_xla others. only: patterns as of a shell."""
    if not has_xla():
        found = [(f"road {name}", measure) for name, measure in TORCH_COMPILE.items()]
    else:
        found = [("doctor", doctor)]
        for step in STEPS:
            found.append((f"estimate {step.name}", partial(estimate, step=step)))
            found.append((f"step {step.name}", partial(run_step, step=step)))
        found += [(f"peak {kind}", partial(peak, kind=kind)) for kind in PEAKS]
        found += [(f"promise {name}", measure) for name, measure in PROMISES.items()]
    return [(name, measure) for name, measure in found if any(fnmatchcase(name, pattern) for pattern in only)]


def in_short(figures: dict[str, Any]) -> str:
    """One line of text: the numbers among figures, and the milliseconds of figures that are given for each size."""
    sizes = [f"{size}: {f['ms']:.3g} ms" for size, f in figures.items() if isinstance(f, dict) and "ms" in f]
    return ", ".join(sizes + [f"{name} {f:.4g}" for name, f in figures.items() if type(f) in (int, float)])


def measure_all(bench: Bench, only: Sequence[str] = ("*",)) -> None:
    """Make each missing measurement and write it to disk at once. One that failed before is tried again."""
    measurements = measurements_named(only)
    for number, (name, measure) in enumerate(measurements, 1):
        place = f"{number:2}/{len(measurements)}"
        before = bench.measurements.get(name, {})
        if before.get("status") in ("done", "cannot"):
            print(f"{place} {before['status']:7} {name:38} (before)", flush=True)
            continue
        began = time.monotonic()
        try:
            record = {"status": "done", "figures": measure(bench)}
            text = in_short(record["figures"])
        except Cannot as reason:
            record, text = {"status": "cannot", "reason": str(reason)}, str(reason)
        except Exception as error:  # whatever it is, it is this measurement's finding, and the next one is still made
            text = str(error) if isinstance(error, TrainingError) else f"{type(error).__name__}: {error}"
            record = {"status": "failed", "reason": text[:600]}
        bench.record(name, record | {"seconds": time.monotonic() - began})
        shutil.rmtree(bench.runs, ignore_errors=True)
        print(f"{place} {record['status']:7} {name:38} {shorten(text, 100)}", flush=True)


def calibrate(device: str, folder: Path, time_limit: float, root: Path, only: Sequence[str] = ("*",)) -> int:
    """Returns the exit code. root: the root of the file system; the tests give another one."""
    machine = find_machine(device, root)
    bench = Bench(machine, folder, time_limit)
    where = f"{machine.slice or machine.chip}, devices: {machine.num_devices}"
    if machine.device == "cpu":
        where = f"a CPU, devices: {machine.num_devices}; a rehearsal, predicting for {machine.slice or 'no slice'}"
    print(f"machine    {where}; torch_xla {machine.versions['torch_xla']}, commit {machine.commit}", flush=True)
    write_mnist(folder / "mnist")
    measure_all(bench, only)
    content = read_json(bench.file, "a calibration", 1 << 24)
    text = report_text(content)
    write_atomically(folder / "report.md", text.encode())
    files = [bench.file, folder / "report.md"]
    if has_xla():  # else there is nothing to draw
        files.append(folder / "calibration.png")
        save_picture(content, files[-1])
    print(text)
    failed = [name for name, record in bench.measurements.items() if record["status"] == "failed"]
    print(f"written    {', '.join(map(str, files))}")
    if failed:
        print(f"failed     {len(failed)}: {', '.join(failed)}; the same command tries them again")
    return 1 if failed else 0


def main() -> int:
    parser = make_parser("tools.calibrate", __doc__)
    parser.add_argument("--device", choices=("auto", "tpu", "cpu"), default="auto", help="what is measured")
    parser.add_argument("--output", type=Path, default=CALIBRATION.parent, help="folder of what it writes")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="NAME", help="measurements, as 'peak *'")
    parser.add_argument("--time_limit", type=float, default=3600, metavar="SECONDS", help="for each process")
    options = parser.parse_args()
    if not options.time_limit > 0:  # nan is not
        parser.error(f"--time_limit {options.time_limit:g}: expected more than 0 seconds")
    if not measurements_named(options.only):
        said = f"--only {' '.join(options.only)}: no measurement has such a name"
        parser.error(f"{said}; expected such as doctor, 'step *', 'estimate *', 'peak *', 'promise *', 'road *'")
    try:
        return calibrate(options.device, options.output.absolute(), options.time_limit, Path("/"), options.only)
    except KeyboardInterrupt:
        print("stopped    the same command goes on from here", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(run_script(main))
