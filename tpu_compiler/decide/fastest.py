"""The fastest way to run a step on a slice: settings tried one after the other.

Where a compile takes longer than WORTH_A_PLAN, each candidate is planned first, in seconds: what does not fit by its
plan, or is slower by roofline by more than a prediction's error, is not compiled. What is compiled is ranked by time
per example (or token): the predicted step, and of communication what the schedule cannot hide. Programs of others took
LOW to HIGH of their estimate, so settings within EQUAL of each other are called equal, and the one found first is kept.
One exception: where one option alone is changed, what is common is off by the same, and only the parts that changed can
mislead.
"""

import dataclasses
import math
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

from tpu_compiler.compile.planned import DEFAULT_KIB
from tpu_compiler.decide.search import OutOfTimeError, ScriptError, with_option
from tpu_compiler.estimate.report import Report
from tpu_compiler.estimate.rules import RULE
from tpu_utils.base.hardware import GIB, parse_topology

LOW, HIGH = 0.83, 1.07
"""Clock of seven published programs over their estimate with flash kernels by rule: docs/published.md."""
EQUAL = 0.15
"""Settings whose times differ by less than this share are equal."""
WORTH = 0.001
"""The share by which the time of a setting must be shorter in any case."""
LONG = 16384
"""Tokens of a sequence from which on it is tried to share it over devices."""
COMPILER_OPTIONS = tuple(f"xla_tpu_scoped_vmem_limit_kib={kib}" for kib in (32768, 65536, 98304))
"""On-chip memory that one fusion may use. v5e has 16384 by itself, v6e DEFAULT_KIB; there 98304 was the fastest by the
clock."""
WHOLE_LAYERS = (0, 4, 8, 16, 24)
"""Values of --remat_all_but; the script refuses those that are more than its layers."""
FIELDS = ("attention", "compiler_options", "gradient_accumulation_steps", "remat", "remat_keep", "remat_all_but")
FIELDS += ("offload", "loss_parts", "mesh", "shard_parameters", "windowed_einsum", "scan_layers", "global_batch_size")
"""All that candidates() may try."""
WITHOUT_BATCH = tuple(name for name in FIELDS if name != "global_batch_size")
KEPT = ("inputs", "attention", "projections", "residual", "products")
"""Values of --remat_keep, each with those before it."""
WITH_REMAT = ("remat_keep", "remat_all_but", "offload")
"""Without effect beside --no_remat, so the script refuses them."""
OF_A_LAYER = ("scan_layers", "remat", "remat_keep", "remat_all_but")
"""Tried last: a large model's loop is asked about in seconds, its layers unrolled in minutes. What gains in a loop may
lose without it, because a loop stacks what it keeps, so all that is kept is tried again."""
LABEL = f"predicted, {RULE}, and of communication what the schedule cannot hide; not measured"
WORTH_A_PLAN = 60.0
"""Seconds of a compile from which on a plan comes first."""
PLANNED_MORE = 1.02
"""A plan's memory over the compiled program's, at most: of four programs of 8B."""
Compile = Callable[..., Report]
"""(options, seconds=it may take) -> report. Raises ScriptError."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """One setting: its changes to the script's own settings, as options too, and the compiler's report."""

    changes: dict[str, Any]
    options: list[str]
    report: Report | None = None
    said: str = ""  # why there is no report

    @property
    def fits(self) -> bool:
        return self.report is not None and self.report.fits and bool(self.report.predicted_ms)

    @property
    def words(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.changes.items()) or "as given"


def step_ms(r: Report) -> float:
    """Milliseconds of a step: the predicted one, and what no operation hides of communication."""
    return r.predicted_ms_all_hidden or 0.0


def examples_per_step(r: Report) -> float:
    """Examples (or tokens) of a step; 1.0 where the script does not say."""
    return r.predicted_per_second * r.predicted_ms / 1e3 if r.predicted_per_second and r.predicted_ms else 1.0


def ms_per_example(r: Report) -> float:
    return step_ms(r) / examples_per_step(r)


def parts_per_example(r: Report) -> tuple[float, ...]:
    """What ms_per_example is the sum of: estimate, by rule, communication and host transfers that nothing hides."""
    hidden = (r.estimated_ms or 0.0) + r.ruled_ms
    return tuple(part / examples_per_step(r) for part in (r.estimated_ms or 0.0, r.ruled_ms, step_ms(r) - hidden))


def is_better(trial: "Trial", other: "Trial") -> bool:
    """Whether a setting is faster than another by more than the error of a prediction, or for a reason: one option was
    changed, and what became shorter outweighs what became longer, however far off each of them is."""
    if not (trial.fits and other.fits):
        return trial.fits
    now, then = ms_per_example(trial.report), ms_per_example(other.report)
    parts = zip(parts_per_example(trial.report), parts_per_example(other.report), strict=True)
    changes = [before - after for after, before in parts]
    gain, loss = sum(c for c in changes if c > 0), -sum(c for c in changes if c < 0)
    explained = differs_in_one(trial, other) and LOW * gain > HIGH * loss
    return now < then * (1 - (WORTH if explained else EQUAL))


def differs_in_one(trial: "Trial", other: "Trial") -> bool:
    """Whether one option was changed; WITH_REMAT come and go with remat."""
    names = {n for n in trial.changes.keys() | other.changes.keys() if trial.changes.get(n) != other.changes.get(n)}
    return len(names - set(WITH_REMAT) if "remat" in names else names) == 1


def with_change(options: Sequence[str], name: str, value: Any) -> list[str]:
    """options with a field of the script set to value."""
    kept = with_option(with_option(options, name, None), f"no_{name}", None)
    if name == "remat" and not value:
        for other in WITH_REMAT:
            kept = with_option(kept, other, None)
    if isinstance(value, bool):
        return [*kept, f"--{name}" if value else f"--no_{name}"]
    return [*kept, f"--{name}={value}"]


def candidates(settings: dict, devices: int, generation: str) -> list[tuple[str, list]]:
    """Fields of the script that are worth trying, with their values, in the order in which they are tried.
    generation: of the chips; what it has by itself is not tried again."""
    found: list[tuple[str, list]] = []
    if settings.get("attention") in ("plain", "flash"):
        found.append(("attention", ["plain", "flash"]))
    if isinstance(settings.get("compiler_options"), str):
        own = settings["compiler_options"]
        names = {word.lstrip("-").partition("=")[0] for word in own.split()}
        more = [option for option in COMPILER_OPTIONS if option.partition("=")[0] not in names]
        if generation == "v6e":
            more = [option for option in more if not option.endswith(f"={DEFAULT_KIB}")]
        found.append(("compiler_options", [own, *(f"{own} {option}".strip() for option in more)]))
    parts, batch = settings.get("gradient_accumulation_steps"), settings.get("global_batch_size")
    if isinstance(parts, int) and isinstance(batch, int):
        counts = [parts // 2, parts // 4, parts, parts * 2]
        found.append(
            ("gradient_accumulation_steps", [n for n in counts if (n and batch % (n * devices) == 0) or n == parts])
        )
    if isinstance(settings.get("remat"), bool):
        found.append(("remat", [False, True]))
    if "remat_keep" in settings:
        found.append(("remat_keep", list(KEPT)))
    if "remat_all_but" in settings:
        found.append(("remat_all_but", list(WHOLE_LAYERS)))
    if "offload" in settings:
        found.append(("offload", ["nothing", "attention", "projections"]))
    if "loss_parts" in settings:
        found.append(("loss_parts", [1, 8]))
    if devices > 1 and re.fullmatch(r"auto|\d+(x\d+){2,4}", str(settings.get("mesh"))):
        half = devices // 2
        meshes = [(devices, 1, 1), (1, devices, 1), (2, half, 1), (half, 2, 1), (half, 1, 2)]
        if (settings.get("sequence_length") or 0) >= LONG:  # the fourth axis shares sequences
            meshes += [(1, devices // n, 1, n) for n in sorted({2, 4, 8, devices})]
        experts = settings.get("num_experts") or 0  # the fifth one shares them
        meshes += [(1, devices // n, 1, 1, n) for n in sorted({2, 4, 8, devices}) if experts and experts % n == 0]
        found.append(("mesh", list(dict.fromkeys("x".join(map(str, m)) for m in meshes if math.prod(m) == devices))))
    if devices > 1 and isinstance(settings.get("shard_parameters"), bool):
        found.append(("shard_parameters", [False, True]))
    if settings.get("windowed_einsum") is True:
        found.append(("windowed_einsum", [False]))
    if isinstance(settings.get("scan_layers"), bool):
        found.append(("scan_layers", [False, True]))
    if isinstance(batch, int):
        found.append(("global_batch_size", [batch, batch * 2, batch * 4, *([batch // 2] if batch % 2 == 0 else [])]))
    return found


def needs_as_much(setting: dict, other: dict) -> bool:
    """Whether setting needs no less memory than other: equal but for fewer accumulation steps or parts of the loss, no
    remat, more kept by it, more layers whole, more batch."""
    more = {"gradient_accumulation_steps": -1, "remat": -1, "global_batch_size": 1}  # sign of the effect on memory
    more |= {"remat_all_but": 1, "loss_parts": -1, "remat_keep": 1}
    setting, other = ({n: KEPT.index(v) if v in KEPT else v for n, v in s.items()} for s in (setting, other))
    return all(
        setting.get(name) == other.get(name)
        or (name in more and more[name] * setting.get(name, 0) >= more[name] * other.get(name, 0))
        for name in setting.keys() | other.keys()
    )


class Search:
    """The trials on one slice. Deterministic, but for the time that compiles take."""

    def __init__(
        self,
        compile_it: Compile,
        options: Sequence[str],
        say: Callable[[str], None],
        seconds: float,
        plan_it: Compile | None = None,
    ):
        self.compile_it = compile_it
        self.plan_it = plan_it
        self.plans: dict[str, Report] = {}
        self.options = list(options)
        self.say = say
        self.seconds = seconds
        self.trials: list[Trial] = []
        self.best: Trial | None = None
        self.nearest: Trial | None = None  # before anything fits: what needs least memory
        self.spent = self.longest = 0.0  # seconds of compiling; a cached answer counts its original time
        self.ended = ""

    def run(self, only: Sequence[str] = WITHOUT_BATCH) -> Trial | None:
        """The fastest setting that fits, or None. Coordinate descent: changes one field of `only` of the best setting
        (before one fits, of that with the least memory) at a time, until a round improves nothing or the time is over;
        OF_A_LAYER last. Raises ScriptError if the script itself fails."""
        first = self.attempt({}, {})
        if first.report is None:
            raise ScriptError(f"the script's own setting: {first.said}", 2 if "refused" in first.said else 1)
        settings, devices = first.report.settings, first.report.devices
        generation = parse_topology(first.report.topology).generation
        tried = [(name, values) for name, values in candidates(settings, devices, generation) if name in only]
        if not tried:
            self.ended = f"on {devices} device(s) the script has none of the options to try: {', '.join(only)}"
        in_a_loop = [(name, values) for name, values in tried if name != "scan_layers"]
        of_a_layer = sorted([t for t in tried if t[0] in OF_A_LAYER], key=lambda t: OF_A_LAYER.index(t[0]))
        for fields in (in_a_loop, of_a_layer):
            while not self.ended and self.improve(fields, settings):
                pass
        return self.best

    def improve(self, tried: Sequence[tuple[str, list]], settings: dict) -> bool:
        """Whether one round over these fields found something better."""
        before = self.base
        for name, values in tried:
            for value in values:
                changes = (self.base.changes if self.base else {}) | {name: value}
                if not changes.get("remat", settings.get("remat")):
                    changes = {n: v for n, v in changes.items() if n not in WITH_REMAT}
                changes = {n: v for n, v in changes.items() if settings.get(n) != v}
                if not self.ended and all(changes != trial.changes for trial in self.trials):
                    self.attempt(changes, settings)
        return self.base is not before

    @property
    def base(self) -> Trial | None:
        return self.best or self.nearest

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
                if why := self.planned_out(options):
                    took, trial = time.monotonic() - start, dataclasses.replace(trial, said=f"not compiled: {why}")
                else:
                    report = self.compile_it(options, seconds=max(1.0, self.seconds - self.spent))
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
        if trial.fits and (self.best is None or is_better(trial, self.best)):
            self.best = trial
        elif self.best is None and trial.report and trial.report.memory:
            self.nearest = min(self.nearest or trial, trial, key=lambda t: t.report.peak_bytes)
        self.say(f"{self.spent / 60:5.1f} of {self.seconds / 60:.3g} min  {self.line(trial)}")
        return trial

    def planned_out(self, options: list[str]) -> str:
        """Why these options are not worth minutes, by their plan; "" if they are, or if a compile is short."""
        if self.plan_it is None or self.best is None or self.longest < WORTH_A_PLAN:
            return ""
        plan, best = self.plan(options), self.plan(self.best.options)
        if plan.peak_bytes > PLANNED_MORE * plan.limit_bytes:
            return f"its plan has {plan.memory_text}"
        if plan.predicted_ms and best.predicted_ms:
            slower = ms_per_example(plan) / ms_per_example(best) - 1
            if slower > EQUAL:
                return f"{slower:.0%} slower than the best by roofline"
        return ""

    def plan(self, options: list[str]) -> Report:
        key = " ".join(options)
        if key not in self.plans:
            self.plans[key] = self.plan_it(options, seconds=max(1.0, self.seconds - self.spent))
        return self.plans[key]

    def ruled_out(self, changes: dict, settings: dict) -> str:
        """Why this setting cannot fit, without compiling it; "" if it must be compiled."""
        now = settings | changes
        for trial in self.trials:
            if trial.report is None or not trial.report.memory:
                continue
            then, r = settings | trial.changes, trial.report
            if not r.fits and needs_as_much(now, then):
                return f"{trial.words} does not fit, and it needs no less"
            unrolled = now != then and {n: v for n, v in now.items() if then.get(n) != v}.keys() == {"scan_layers"}
            if unrolled and r.peak_bytes > (1 + EQUAL) * r.limit_bytes:
                return f"{trial.words} needs {r.peak_bytes / GIB:.1f} GiB, and it about as much"
        return ""

    def line(self, trial: Trial) -> str:
        r = trial.report
        if r is None:
            return f"{trial.words}: {trial.said}"
        kept = ", kept from an earlier search" if r.from_cache else ""
        if not trial.fits:
            return f"{trial.words}: does not fit, {r.memory_text}{kept}"
        best = "" if trial is not self.best else ", the best so far"
        return f"{trial.words}: {step_ms(r):.4g} ms, {r.peak_bytes / GIB:.2f} GiB, {r.asked_seconds:.0f} s{kept}{best}"
