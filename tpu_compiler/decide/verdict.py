"""What a search came to: a table of the settings, the slices with what a run costs on them, the command to run."""

import contextlib
import math
import shlex
from collections.abc import Callable, Sequence
from functools import partial

from tpu_compiler.decide.fastest import (
    EQUAL,
    FIELDS,
    LABEL,
    WITHOUT_BATCH,
    Search,
    Trial,
    examples_per_step,
    is_better,
    ms_per_example,
    step_ms,
)
from tpu_compiler.decide.search import compile_script, option_name
from tpu_compiler.estimate.report import ERROR, PLAN_ERROR, PLANNED, ROOFLINE, Report, markdown
from tpu_utils.base.hardware import GENERATIONS, GIB, parse_topology


def above_zero(text: str) -> float | None:
    """The finite number above 0 that a text is; None for another text."""
    with contextlib.suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    return None


def parse_prices(texts: Sequence[str], topologies: Sequence[str]) -> dict[str, float]:
    """['v5e=1.20', 'v6e=2.70'] -> {generation: price of a chip for an hour}. Raises ValueError for anything else, and
    where there are prices, and none for a chip of these slices."""
    prices = {}
    for text in texts:
        name, _, number = text.partition("=")
        if name not in GENERATIONS or not (price := above_zero(number)):
            raise ValueError(
                f"--price is {text!r:.60}; expected a chip's price for an hour, such as v5e=1.20, with one of "
                f"{', '.join(GENERATIONS)}"
            )
        prices[name] = price
    chips = {parse_topology(name).generation for name in topologies}
    if prices and (missing := sorted(chips - prices.keys())):
        raise ValueError(
            f"--price says nothing of {', '.join(missing)}; expected the price of each kind of chip asked for"
        )
    return prices


def parse_tokens(text: str) -> float:
    """'10e9' -> 1e10. Raises ValueError for what is no number above 0."""
    if not (count := above_zero(text)):
        raise ValueError(f"--tokens is {text!r:.60}; expected how many the run is to see, such as 10e9")
    return count


def parse_only(text: str | None, vary_batch: bool, planned: bool = False) -> tuple[str, ...]:
    """'mesh,remat' -> the fields that a search may change; None: all. Raises ValueError for what it never changes.

    planned: not compiler_options, because a plan has no price for on-chip memory.
    """
    fields = FIELDS if vary_batch else WITHOUT_BATCH
    known = tuple(name for name in fields if not (planned and name == "compiler_options"))
    names = known if text is None else tuple(text.split(","))
    if unknown := [name for name in names if name not in known]:
        more = "" if vary_batch else "; with --vary_batch also global_batch_size"
        raise ValueError(f"--only says {unknown[0]!r:.60}; expected of {', '.join(known)}, with commas between{more}")
    return names


def search_slices(
    script: str,
    topologies: Sequence[str],
    options: Sequence[str],
    say: Callable[[str], None],
    only: Sequence[str],
    minutes: float,
    planned: bool,
) -> dict[str, Trial | None]:
    """The best setting of each slice, None where none fits; what was tried is said. only: the fields that may change.
    minutes: for all slices together. planned: settings are not compiled. Raises ValueError for wrong usage."""
    if not 0 < minutes < math.inf:
        raise ValueError(f"--minutes is {minutes}; expected more than 0")
    best, left = {}, minutes * 60
    for place, topology in enumerate(topologies):
        say(f"{topology}: searching; each line is one setting, in milliseconds a step")
        # a kept compile would not do as a plan: its price is another than a roofline's
        plan = partial(compile_script, script, topology, planned=True, afresh=True)
        ask = plan if planned else partial(compile_script, script, topology)
        found = Search(ask, options, say, left / (len(topologies) - place), None if planned else plan)
        best[topology] = found.run(only)
        left -= found.spent
        fresh = [trial.report for trial in found.trials if trial.report and not trial.report.from_cache]
        ended = f"; {found.ended}" if found.ended else ""
        done = "planned" if planned else "compiled"
        say(f"{topology}: {len(found.trials)} settings, {len(fresh)} {done} now{ended}")
        say(format_trials(found.trials, best[topology]))
    return best


def conclude(
    script: str,
    best: dict[str, Trial | None],
    say: Callable[[str], None],
    prices: dict[str, float],
    tokens: float | None,
) -> list[Report]:
    """Say the slices side by side and, last, the command to run. Returns the reports of the settings that fit."""
    tokens = tokens or (1e9 if prices else None)
    fitting = {name: trial for name, trial in best.items() if trial}
    if len(best) > 1 or tokens:
        say(format_slices(best, tokens, prices))
    for name, trial in fitting.items():
        from_scratch = "model_config" in map(option_name, trial.options)
        hint = " (to fine-tune, --initial_weights FOLDER in place of --model_config)" if from_scratch else ""
        say(f"{name if len(fitting) > 1 else 'to run it'}{hint}:")
        say(command_of(script, trial))
    return [trial.report for trial in fitting.values()]


def format_trials(trials: Sequence[Trial], best: Trial | None) -> str:
    """The table of what was tried, the fastest first. "equal": no other one is better than it."""
    tried = [trial for trial in trials if trial.report is not None]
    tried.sort(key=lambda t: (not t.fits, ms_per_example(t.report) if t.fits else 0.0))
    unit = tried[0].report.unit if tried else "examples"
    rows = [["setting", "ms a step", "estimate", "by rule", "comm. not hidden", "ms, nothing hidden", f"{unit}/s"]]
    rows[0] += ["MFU", "GiB", "compile s"]
    for trial in tried:
        r = trial.report
        equal = trial.fits and not any(is_better(other, trial) for other in tried)
        row = [trial.words + (" <- best" if trial is best else " (equal)" if equal else "")]
        if trial.fits:
            ms, mfu = step_ms(r), r.mfu_at(step_ms(r))
            row += [f"{ms:.4g}", f"{r.estimated_ms:.4g}", f"{r.ruled_ms:.3g}", f"{ms - r.predicted_ms:.3g}"]
            row += [f"{r.predicted_ms_nothing_hidden:.4g}", f"{examples_per_step(r) / ms * 1e3:,.0f}"]
            row += [f"{mfu:.1%}" if mfu else "-"]
        else:
            row += ["does not fit" if r.over_bytes else "does not compile", *["-"] * 6]
        rows.append([*row, f"{r.peak_bytes / GIB:.2f}", f"{r.asked_seconds:.0f}"])
    lines = markdown(rows)
    lines += [f"{trial.words}: {trial.said}" for trial in trials if trial.report is None]
    planned = any(trial.report.reason == PLANNED for trial in tried)
    lines += [f"ms a step, {unit}/s, MFU: {ROOFLINE if planned else LABEL}; equal: within {EQUAL:.0%}"]
    return "\n".join([*lines, f"accuracy: {PLAN_ERROR if planned else ERROR}"])


def command_of(script: str, trial: Trial) -> str:
    return shlex.join([".venv/bin/python", script, *trial.options])


def format_slices(best: dict[str, Trial | None], tokens: float | None, prices: dict[str, float]) -> str:
    """The slices side by side, the cheapest first where prices are given, else the fastest."""
    found = []
    for name, trial in best.items():
        if trial is not None:
            topology, r = parse_topology(name), trial.report
            rate = examples_per_step(r) / (step_ms(r) / 1e3)
            hours = tokens / rate / 3600 if tokens else None
            price = prices.get(topology.generation)
            cost = hours * topology.num_chips * price if hours and price else None
            row = [name, str(topology.num_chips), f"{rate:,.0f}"]
            row += [f"{value:,.2f}" for value in (hours, cost) if value is not None]
            found.append((cost if cost is not None else 1 / rate, [*row, trial.words]))
    if not found:
        return "no setting fits on any of these slices"
    unit = next(trial.report.unit for trial in best.values() if trial)
    header = ["slice", "chips", f"{unit}/s", *["hours"] * bool(tokens), *["cost"] * bool(tokens and prices), "setting"]
    lines = markdown([header, *(row for _, row in sorted(found))])
    lines += [f"{name}: no setting fits" for name, trial in best.items() if trial is None]
    if tokens:
        said = ", ".join(f"{name} {price:g}" for name, price in prices.items())
        steps = "for steps alone, without start, evaluation and checkpoints"
        prices_text = f"; a chip for an hour: {said}" if prices else ""
        lines.append(f"hours{' and cost' if prices else ''} of {tokens:.4g} {unit}, {steps}{prices_text}")
    return "\n".join([*lines, f"{unit}/s: {LABEL}"])
