"""Several compiles of a training script, each in a process of its own: a process can only look like one slice."""

import dataclasses
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tpu_compiler.compile.cache import cache_of_environment, question_key, state_of, watched
from tpu_compiler.compile.planned import PLAN_VARIABLE
from tpu_compiler.estimate.report import Report
from tpu_utils.base.hardware import GIB, parse_topology
from tpu_utils.base.restarts import ends_with_this
from tpu_utils.base.writing import write_atomically
from tpu_utils.options.fields import nearest

OUTPUT_VARIABLE = "AOT_TPU_OUTPUT"  # a folder: compile_for writes its files there and prints nothing


class ScriptError(RuntimeError):
    """The script did not come as far as its first step. exit_code is 2 when it refused its options. is_said: it has
    printed why itself."""

    def __init__(self, message: str, exit_code: int, is_said: bool = False):
        super().__init__(message)
        self.exit_code, self.is_said = exit_code, is_said


class OutOfTimeError(ScriptError):
    """The script was stopped before the compiler had answered."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a script answered to a question, as the cache keeps it."""

    report: Report | None  # None: it was stopped after so many seconds
    seconds: float
    watched: dict[str, str]  # state of the files and folders that it names


def option_name(option: str) -> str:
    """The field that --a-field, --a_field or --a_field=value sets."""
    return option.removeprefix("--").split("=")[0].replace("-", "_")


def with_option(options: Sequence[str], name: str, value: str | None) -> list[str]:
    """options with --name (or --na-me) set to value, or taken out when value is None."""
    kept, dropping = [], False
    for option in options:
        if option.startswith("--"):
            dropping = option_name(option) == name  # and the value after it, if it has one
        if not dropping:
            kept.append(option)
    return kept if value is None else [*kept, f"--{name}", value]


def run_script(command: Sequence[str], variables: dict[str, str], seconds: float | None = None) -> int:
    """Exit code of `python COMMAND` with these environment variables. What it prints on stdout is dropped.

    Raises subprocess.TimeoutExpired when it had to be stopped after so many seconds.
    """
    above = [str(Path(__file__).resolve().parents[2]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = os.environ | variables | {"PYTHONPATH": os.pathsep.join(path for path in above if path)}
    environment.pop("XLA_USE_SPMD", None)  # xr.use_spmd() of this process leaves it there
    command = [sys.executable, *command]
    quiet = dict(env=environment, stdout=subprocess.DEVNULL)
    return subprocess.run(command, **quiet, timeout=seconds, **ends_with_this()).returncode


def compile_script(
    script: str,
    topology: str,
    options: Sequence[str],
    program_dir: str | None = None,
    seconds: float | None = None,
    planned: bool = False,
    afresh: bool = False,
) -> Report:
    """compile_afresh(), or its report from the cache. With program_dir the script traces again, because a cached report
    has no program text; the compile itself may still come from the cache. planned: not compiled, in seconds, unless a
    compile is kept; a command that only plans (--plan) takes none. afresh: not from the cache. Raises OutOfTimeError
    when it takes more than so many seconds."""
    cache = cache_of_environment()
    only_plans = bool(os.environ.get(PLAN_VARIABLE))
    planned |= only_plans
    key = question_key(script, topology, options) if cache and not (program_dir or afresh or only_plans) else None
    kept = cache.read(key, Answer) if key else None
    if kept and all(state_of(text) == state for text, state in kept.watched.items()):
        if kept.report:
            return dataclasses.replace(kept.report, from_cache=True)
        if seconds and seconds <= 1.05 * kept.seconds:
            raise OutOfTimeError(f"{script} for {topology} did not come to an answer in {kept.seconds:.0f} s before", 1)
    start = time.monotonic()
    try:
        report, text = compile_afresh(script, topology, options, seconds, planned)
    except subprocess.TimeoutExpired as error:
        if key:
            cache.write(key, Answer(None, seconds, watched({}, options)))
        raise OutOfTimeError(f"{script} for {topology} did not come to an answer in {seconds:.0f} s", 1) from error
    report = dataclasses.replace(report, asked_seconds=time.monotonic() - start)
    if key and report.memory and not planned:  # a refusal for another reason than memory is not kept
        cache.write(key, Answer(report, report.asked_seconds, watched(report.settings, options)))
    if program_dir and text:
        Path(program_dir).mkdir(parents=True, exist_ok=True)
        name = f"{Path(script).stem}_{topology.replace(':', '_')}.txt"
        write_atomically(Path(program_dir, name), text.encode())
    return report


def compile_afresh(
    script: str, topology: str, options: Sequence[str], seconds: float | None, planned: bool
) -> tuple[Report, str]:
    """Run a training script up to its first step for one slice: (report, program text). Raises ScriptError when it does
    not get there, and subprocess.TimeoutExpired when it takes more than so many seconds."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["-m", "tpu_compiler.of_script", script, *with_option(options, "compile_for", topology)]
        asked = {PLAN_VARIABLE: "1"} if planned else {}
        code = run_script(command, {OUTPUT_VARIABLE: folder} | asked, seconds)
        written = Path(folder, "report.json")
        if not written.exists():
            if code < 0:
                cause = f"was killed by signal {-code} (9 is out of host memory, 6 an abort in the compiler)"
            elif code == 0:
                raise ScriptError(
                    f"{script} ended without asking to compile a step; expected a training script, or {script}:NAME of "
                    "a class or a function in it that returns a module",
                    2,
                )
            else:
                cause = f"ended with code {code} before its first step; its own message is above"
            raise ScriptError(f"{script} for {topology} {cause}", 2 if code == 2 else 1, is_said=code == 2)
        known = {field.name for field in dataclasses.fields(Report)}  # another commit's report may have others
        report = Report(**{name: v for name, v in json.loads(written.read_text()).items() if name in known})
        if report.topology != topology:
            raise ScriptError(
                f"{script} was asked for {topology} and compiled for {report.topology}: expected a script that takes "
                "its slice from --compile_for",
                2,
            )
        return report, Path(folder, "program.txt").read_text()


def batch_increment(r: Report) -> int:
    """Batch increment that keeps the batch divisible over devices and accumulation steps."""
    return math.gcd(r.settings["global_batch_size"], r.devices * r.settings.get("gradient_accumulation_steps", 1))


def fit(
    script: str, topology: str, field: str, options: Sequence[str], say: Callable[[str], None] = print
) -> tuple[int, Report | None]:
    """The largest value of an integer option that fits, and its report; (0, None) when no value does.

    Doubles or halves from the script's own value, then bisects; a batch moves by batch_increment. Each try is said, and
    planned, in seconds. The answer is compiled, and if it then does not fit, the one below. A value that the script
    refuses, such as a batch larger than the data set, does not fit.
    """
    first = compile_script(script, topology, options, planned=True)
    value = first.settings.get(field)
    if not isinstance(value, int) or value < 1:
        numbers = [name for name, v in first.settings.items() if type(v) is int and name != "layers"]  # of the model
        meant = nearest(field, numbers) or f"; expected one of {', '.join(numbers)}"
        raise ScriptError(f"--fit {field}: not a number of {script}{meant}", 2)
    tried = {value: first}

    def fits(value: int) -> bool:
        try:
            if value not in tried:
                given = with_option(options, field, str(value))
                tried[value] = compile_script(script, topology, given, planned=True)
        except ScriptError as error:
            if error.exit_code != 2:
                raise
            say(f"{field} {value:>7}: refused by {script}, see above")
            return False
        r = tried[value]
        verdict = "fits" if r.fits else "does not fit"
        say(f"{field} {value:>7}: {verdict}, {r.memory_text}, {r.compile_seconds:.0f} s")
        return r.fits

    unit = batch_increment(first) if field == "global_batch_size" else 1
    low, high = 0, value
    while fits(high):
        low, high = high, high * 2
    while high - low > unit:
        middle = (low + high) // 2 // unit * unit
        low, high = (middle, high) if fits(middle) else (low, middle)
    if low and high not in tried:
        say(f"{field} {high} is refused by {script}, not for its memory")
    while low:
        best = compile_script(script, topology, with_option(options, field, str(low)))
        if best.fits:
            return low, best
        say(f"{field} {low:>7}: compiled, it needs {best.memory_text}")
        low -= unit
    return 0, None


def memory_savers(r: Report) -> list[tuple[str, str]]:
    """(what it does, option to add): the script's own options that take memory off a device and are not yet in use."""
    found, settings = [], r.settings
    if settings.get("remat") is False:
        found.append(("recompute activations in the backward pass", "--remat"))
    elif settings.get("offload") == "nothing":
        found.append(("what that keeps in the host's memory", "--offload=products"))
    if settings.get("loss_parts") == 1:
        found.append(("logits of an eighth of the vocabulary", "--loss_parts=8"))
    if settings.get("int8") is False:
        found.append(("matrices in int8", "--int8"))
    if settings.get("devices") == "one" and parse_topology(r.topology).num_devices > 1:
        found.append(("share heads and MLP over the slice", "--devices=all"))
    if accumulation_steps := settings.get("gradient_accumulation_steps"):
        found.append(("accumulate more, smaller batches", f"--gradient_accumulation_steps={2 * accumulation_steps}"))
    if settings.get("shard_parameters") is False and r.devices > 1:
        found.append(("shard parameters and optimizer state", "--shard_parameters"))
    mesh = re.fullmatch(r"(\d+)x(\d+)x(\d+)", str(settings.get("mesh")))
    if mesh and int(mesh[1]) > 1:
        found.append(("shard parameters and optimizer state", f"--mesh=1x{int(mesh[1]) * int(mesh[2])}x{mesh[3]}"))
    return found


def suggest(r: Report, script: str, options: Sequence[str]) -> str:
    """Text: changes that could make the step fit, and whether they do, by the memory alone."""
    lines = [f"over the limit by {r.over_bytes / GIB:.2f} GiB; what could help:"]

    def attempt(name: str, changed: Sequence[str]) -> bool:
        try:
            other = compile_script(script, r.topology, changed, planned=True)
        except ScriptError as error:
            lines.append(f"  {name:<34} not possible: {error}")
            return False
        verdict = "fits" if other.fits else "does not fit"
        lines.append(f"  {name:<34} {verdict}, {other.memory_text}")
        return other.fits

    batch, scale = r.settings.get("global_batch_size"), r.memory.get("activations", 0)
    if batch and scale:
        room = 0.95 * r.limit_bytes - (r.peak_bytes - scale)
        unit = batch_increment(r)
        guess = int(batch * room / scale) // unit * unit  # activations grow with the batch
        while unit <= guess < batch:
            if attempt(f"--global_batch_size {guess}", with_option(options, "global_batch_size", str(guess))):
                break
            guess = guess // 2 // unit * unit
    for what, option in memory_savers(r):
        attempt(f"{what} ({option})", [*with_option(options, option_name(option), None), option])
    return "\n".join(lines)
