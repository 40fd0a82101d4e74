"""The fastest way to run a step on a slice, and the cheapest slice: settings tried one after the other.

Every candidate is compiled for real, none is guessed. Ranked is the time per example (or token) of a step: the
compiler's estimate, what rules.py adds for operations without one, and the lower bound of communication. So one with
more collectives than it can hide looks better than it is.
"""

import dataclasses
import math
import re
import shlex
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tpu_compiler.hardware import GENERATIONS, GIB, parse_topology
from tpu_compiler.report import Report
from tpu_compiler.rules import RULE
from tpu_compiler.search import OutOfTimeError, ScriptError, compile_script, with_option

BETTER = 0.999
"""What is not at least this much faster replaces nothing."""
COMPILER_OPTIONS = ("xla_tpu_scoped_vmem_limit_kib=32768", "xla_tpu_scoped_vmem_limit_kib=65536")
"""On-chip memory that one fusion may use; 16384 by default."""
LABEL = f"compiler estimate, {RULE}, and the lower bound of communication; not measured"
Compile = Callable[[list[str], float], Report]
"""(options, seconds it may take) -> report. Raises ScriptError."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """One setting: what it changes of the script's own, the options that say so, and what came of it."""

    changes: dict[str, Any]
    options: list[str]
    report: Report | None = None
    said: str = ""  # why there is no report

    @property
    def fits(self) -> bool:
        return self.report is not None and self.report.fits and bool(self.report.estimated_ms)

    @property
    def words(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.changes.items()) or "as given"


def step_ms(r: Report) -> float:
    """Milliseconds of a step: estimate, operations counted by rule, and the least that communication takes."""
    between_slices = getattr(r, "slice_lower_bound_ms", None) or 0.0
    return (r.estimated_ms or 0.0) + r.ruled_ms + r.communication_lower_bound_ms + between_slices


def examples_per_step(r: Report) -> float:
    """1.0 where the script does not say."""
    return r.estimated_per_second * r.estimated_ms / 1e3 if r.estimated_per_second and r.estimated_ms else 1.0


def ms_per_example(r: Report) -> float:
    return step_ms(r) / examples_per_step(r)


def with_change(options: Sequence[str], name: str, value: Any) -> list[str]:
    """options with a field of the script set to value."""
    kept = with_option(with_option(options, name, None), f"no_{name}", None)
    if isinstance(value, bool):
        return [*kept, f"--{name}" if value else f"--no_{name}"]
    return [*kept, f"--{name}={value}"]


def candidates(settings: dict, devices: int, vary_batch: bool) -> list[tuple[str, list]]:
    """Fields of the script that are worth trying, with their values, in the order in which they are tried."""
    found: list[tuple[str, list]] = []
    if settings.get("attention") in ("plain", "flash"):
        found.append(("attention", ["plain", "flash"]))
    if isinstance(settings.get("compiler_options"), str):
        own = settings["compiler_options"]
        names = {word.lstrip("-").partition("=")[0] for word in own.split()}
        more = [option for option in COMPILER_OPTIONS if option.partition("=")[0] not in names]
        found.append(("compiler_options", [own, *(f"{own} {option}".strip() for option in more)]))
    parts, batch = settings.get("gradient_accumulation_steps"), settings.get("global_batch_size")
    if isinstance(parts, int) and isinstance(batch, int):
        counts = [parts // 2, parts // 4, parts, parts * 2]
        found.append(
            ("gradient_accumulation_steps", [n for n in counts if (n and batch % (n * devices) == 0) or n == parts])
        )
    if isinstance(settings.get("remat"), bool):
        found.append(("remat", [False, True]))
    if devices > 1 and re.fullmatch(r"auto|\d+x\d+x\d+", str(settings.get("mesh"))):
        half = devices // 2
        meshes = [(devices, 1, 1), (1, devices, 1), (2, half, 1), (half, 2, 1), (half, 1, 2)]
        found.append(("mesh", list(dict.fromkeys("x".join(map(str, m)) for m in meshes if math.prod(m) == devices))))
    if devices > 1 and settings.get("strategy") != "ddp" and isinstance(settings.get("shard_parameters"), bool):
        found.append(("shard_parameters", [False, True]))
    if settings.get("windowed_einsum") is True:
        found.append(("windowed_einsum", [False]))
    if isinstance(settings.get("scan_layers"), bool):
        found.append(("scan_layers", [False, True]))
    if vary_batch and isinstance(batch, int):
        found.append(("global_batch_size", [batch, batch * 2, batch * 4, *([batch // 2] if batch % 2 == 0 else [])]))
    return found


def needs_as_much(setting: dict, other: dict) -> bool:
    """Whether a setting needs at least the memory of another: the same, but for more at a time or more that is kept."""
    more = {"gradient_accumulation_steps": -1, "remat": -1, "global_batch_size": 1}
    return all(
        setting.get(name) == other.get(name)
        or (name in more and more[name] * setting.get(name, 0) >= more[name] * other.get(name, 0))
        for name in setting.keys() | other.keys()
    )


class Search:
    """The trials on one slice. Deterministic, but for the time that compiles take."""

    def __init__(self, compile_it: Compile, options: Sequence[str], say: Callable[[str], None], seconds: float):
        self.compile_it, self.options, self.say, self.seconds = compile_it, list(options), say, seconds
        self.trials: list[Trial] = []
        self.best: Trial | None = None
        self.spent = self.longest = 0.0  # seconds of compiling; what is kept counts as it did then
        self.ended = ""

    def run(self, vary_batch: bool = False) -> Trial | None:
        """The fastest setting that fits, None when none does. One field at a time from the best so far, until a whole
        round changes nothing or the time is over. Raises ScriptError where the script itself fails."""
        first = self.attempt({}, {})
        if first.report is None:
            raise ScriptError(f"the script's own setting: {first.said}", 2 if "refused" in first.said else 1)
        settings, devices = first.report.settings, first.report.devices
        while not self.ended:
            before = self.best
            for name, values in candidates(settings, devices, vary_batch):
                for value in values:
                    changes = (self.best.changes if self.best else {}) | {name: value}
                    changes = {n: v for n, v in changes.items() if settings.get(n) != v}
                    if not self.ended and all(changes != trial.changes for trial in self.trials):
                        self.attempt(changes, settings)
            if self.best is before:
                break
        return self.best

    def attempt(self, changes: dict, settings: dict) -> Trial:
        options = self.options
        for name, value in changes.items():
            options = with_change(options, name, value)
        trial = Trial(changes, options)
        if why := self.ruled_out(changes, settings):
            trial = dataclasses.replace(trial, said=f"not compiled: {why}")
        elif self.trials and self.seconds - self.spent < self.longest:
            self.ended = f"the {self.seconds / 60:.3g} minutes are over; --minutes gives it more, and goes on from here"
            return trial
        else:
            start = time.monotonic()
            try:
                report = self.compile_it(options, max(1.0, self.seconds - self.spent))
                took = report.asked_seconds if report.from_cache else time.monotonic() - start
                trial = dataclasses.replace(trial, report=report, said=report.reason)
            except OutOfTimeError as error:
                took, trial = time.monotonic() - start, dataclasses.replace(trial, said=str(error))
            except ScriptError as error:
                took = time.monotonic() - start
                trial = dataclasses.replace(trial, said=f"refused: {error}" if error.exit_code == 2 else str(error))
            self.spent += took
            self.longest = max(self.longest, took)
        self.trials.append(trial)
        is_better = trial.fits and (
            self.best is None or ms_per_example(trial.report) < BETTER * ms_per_example(self.best.report)
        )
        self.best = trial if is_better else self.best
        self.say(f"{self.spent / 60:5.1f} of {self.seconds / 60:.3g} min  {self.line(trial)}")
        return trial

    def ruled_out(self, changes: dict, settings: dict) -> str:
        """Why it need not be compiled; empty when it must."""
        now = settings | changes
        for trial in self.trials:
            if trial.report is None or not trial.report.memory:
                continue
            then, r = settings | trial.changes, trial.report
            if not r.fits and needs_as_much(now, then):
                return f"{trial.words} does not fit, and it needs no less"
            same = {n: v for n, v in now.items() if n != "gradient_accumulation_steps"}
            parts, parts_then = now.get("gradient_accumulation_steps"), then.get("gradient_accumulation_steps")
            if parts and parts_then and parts < parts_then and all(then.get(n) == v for n, v in same.items()):
                activations = r.memory.get("activations", 0)
                guess = sum(r.memory.values()) + 0.7 * activations * (parts_then / parts - 1)
                if guess > r.limit_bytes:
                    return f"{guess / GIB:.1f} GiB or more by the activations of {trial.words}"
        return ""

    def line(self, trial: Trial) -> str:
        r = trial.report
        if r is None:
            return f"{trial.words}: {trial.said}"
        kept = ", kept from an earlier search" if r.from_cache else ""
        if not trial.fits:
            return f"{trial.words}: does not fit, {r.peak_bytes / GIB:.2f} of {r.limit_bytes / GIB:.2f} GiB{kept}"
        best = "" if trial is not self.best else ", the best so far"
        return f"{trial.words}: {step_ms(r):.4g} ms, {r.peak_bytes / GIB:.2f} GiB, {r.asked_seconds:.0f} s{kept}{best}"


def format_trials(trials: Sequence[Trial], best: Trial | None) -> str:
    """The table of what was tried, the fastest first."""
    tried = [trial for trial in trials if trial.report is not None]
    tried.sort(key=lambda t: (not t.fits, ms_per_example(t.report) if t.fits else 0.0))
    unit = tried[0].report.unit if tried else "examples"
    rows = [["setting", "ms a step", "estimate", "by rule", "comm. >=", f"{unit}/s", "MFU", "GiB", "compile s"]]
    for trial in tried:
        r = trial.report
        row = [trial.words + (" <- best" if trial is best else "")]
        if trial.fits:
            seconds = step_ms(r) / 1e3
            peak = r.devices * parse_topology(r.topology).hardware.bf16_tflops * 1e12
            mfu = f"{r.model_flops / seconds / peak:.1%}" if r.model_flops else "-"
            row += [f"{step_ms(r):.4g}", f"{r.estimated_ms:.4g}", f"{r.ruled_ms:.3g}"]
            row += [f"{r.communication_lower_bound_ms:.3g}", f"{examples_per_step(r) / seconds:,.0f}", mfu]
        else:
            row += ["does not fit" if r.peak_bytes > r.limit_bytes else "does not compile", *["-"] * 5]
        rows.append([*row, f"{r.peak_bytes / GIB:.2f}", f"{r.asked_seconds:.0f}"])
    rows.insert(1, ["---"] * len(rows[0]))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in rows]
    lines += [f"{trial.words}: {trial.said}" for trial in trials if trial.report is None]
    return "\n".join([*lines, f"ms a step, {unit}/s, MFU: {LABEL}"])


def command_of(script: str, trial: Trial) -> str:
    return shlex.join(["python", script, *trial.options])


def parse_prices(texts: Sequence[str]) -> dict[str, float]:
    """['v5e=1.20', 'v6e=2.70'] -> {generation: price of a chip for an hour}. Raises ValueError for anything else."""
    prices = {}
    for text in texts:
        name, _, number = text.partition("=")
        try:
            price = float(number)
        except ValueError:
            price = math.nan
        if name not in GENERATIONS or not 0 < price < math.inf:
            raise ValueError(
                f"--price is {text!r:.60}; expected a chip's price for an hour, such as v5e=1.20, with one of "
                f"{', '.join(GENERATIONS)}"
            )
        prices[name] = price
    return prices


def parse_tokens(text: str) -> float:
    """'10e9' -> 1e10. Raises ValueError for what is no number above 0."""
    try:
        count = float(text)
    except ValueError:
        count = math.nan
    if not 0 < count < math.inf:
        raise ValueError(f"--tokens is {text!r:.60}; expected how many the run is to see, such as 10e9")
    return count


def format_slices(best: dict[str, Trial | None], tokens: float | None, prices: dict[str, float]) -> str:
    """The slices side by side, the cheapest first where prices are given, else the fastest."""
    found = []
    for name, trial in best.items():
        if trial is not None:
            topology, r = parse_topology(name), trial.report
            rate = examples_per_step(r) / (step_ms(r) / 1e3)
            chips = topology.num_devices // topology.hardware.devices_per_chip
            hours = tokens / rate / 3600 if tokens else None
            price = prices.get(topology.generation)
            cost = hours * chips * price if hours and price else None
            found.append((cost if cost is not None else hours or 1 / rate, name, chips, rate, hours, cost, trial, r))
    if not found:
        return "no setting fits on any of these slices"
    found.sort(key=lambda row: row[:2])
    unit = found[0][-1].unit
    header = ["slice", "chips", f"{unit}/s", *(["hours"] if tokens else [])]
    rows = [header + (["cost"] if prices and tokens else []) + ["setting"]]
    for _, name, chips, rate, hours, cost, trial, _ in found:
        row = [name, str(chips), f"{rate:,.0f}"] + ([f"{hours:,.2f}"] if tokens else [])
        rows.append([*row, *([f"{cost:,.2f}"] if cost is not None else []), trial.words])
    rows.insert(1, ["---"] * len(rows[0]))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in rows]
    lines += [f"{name}: no setting fits" for name, trial in best.items() if trial is None]
    if tokens:
        said = ", ".join(f"{name} {price:g}" for name, price in prices.items())
        steps = "for steps alone, without start, evaluation and checkpoints"
        lines.append(f"hours{' and cost' if prices else ''} of {tokens:.4g} {unit}, {steps}"
                     + (f"; a chip for an hour: {said}" if prices else ""))  # fmt: skip
    return "\n".join([*lines, f"{unit}/s: {LABEL}"])


def decide(
    script: str,
    topologies: Sequence[str],
    options: Sequence[str],
    say: Callable[[str], None],
    minutes: float,
    vary_batch: bool,
    tokens: float | None,
    prices: dict[str, float],
) -> int:
    """Search on each slice and print what was tried, the slices side by side and, last, the command to run.

    Returns the exit code: 0 when some setting fits, 1 when none does. Raises ValueError for what cannot be answered.
    """
    if not 0 < minutes < math.inf:
        raise ValueError(f"--minutes is {minutes}; expected more than 0")
    chips = {name: parse_topology(name).generation for name in topologies}
    if missing := sorted(set(chips.values()) - prices.keys()) if prices else []:
        raise ValueError(
            f"--price says nothing of {', '.join(missing)}; expected the price of each kind of chip asked for"
        )
    if prices and not tokens:
        raise ValueError(
            "--price is given without --tokens; expected how many the run is to see, such as --tokens 10e9"
        )
    best, left = {}, minutes * 60
    for place, topology in enumerate(topologies):
        say(f"{topology}: searching; each line is one setting, in milliseconds a step")
        ask = partial(ask_script, script, topology)
        found = Search(ask, options, say, left / (len(topologies) - place))
        best[topology] = found.run(vary_batch)
        left -= found.spent
        fresh = [trial.report for trial in found.trials if trial.report and not trial.report.from_cache]
        ended = f"; {found.ended}" if found.ended else ""
        say(f"{topology}: {len(found.trials)} settings, {len(fresh)} compiled now{ended}")
        say(format_trials(found.trials, best[topology]))
    fitting = {name: trial for name, trial in best.items() if trial}
    if len(topologies) > 1 or tokens:
        say(format_slices(best, tokens, prices))
    for name, trial in fitting.items():
        say(f"{name}:" if len(fitting) > 1 else "to run it:")
        say(command_of(script, trial))
    return 0 if fitting else 1


def ask_script(script: str, topology: str, options: Sequence[str], seconds: float) -> Report:
    return compile_script(script, topology, options, seconds=seconds)
