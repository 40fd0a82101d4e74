"""Draw what runs left behind: losses, throughput, experts, where time went.

Run:     python -m tools.plot_run runs/first    # writes runs/first/plot.png
         python -m tools.plot_run runs/a runs/b --output compare.png
         python -m tools.plot_run runs/first --script simple_mnist_tpu.py

Expect:  the path of each picture; on stderr what is missing or damaged.
"""

import io
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import matplotlib
import numpy as np
import tyro
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from tpu_utils.base.errors import InputError, run_script
from tpu_utils.base.files import read_json
from tpu_utils.base.writing import write_atomically
from tpu_utils.options.tool_arguments import parse_options
from tpu_utils.record.records import as_numbers, read_curves

matplotlib.rcParams["text.parse_math"] = False  # a folder's name may have a $
matplotlib.rcParams["agg.path.chunksize"] = 10_000  # a million points: a fifth of the memory
COLOURS = dict(start_up="darkgrey", restore="dimgrey", compile="mediumpurple", data_wait="red", step="forestgreen")
COLOURS |= dict(evaluation="steelblue", checkpoint="orange", other="lightgrey")
COLOURS |= dict(kept_work="yellowgreen", restart="hotpink", recompile="rebeccapurple")  # counted by tools.keep_running
COLOURS |= dict(lost_steps="tomato", silence="black", waiting="tan")
SUFFIXES = (".png", ".pdf", ".svg")
MOST_RUNS = 100  # in a picture: its height grows with them
ACCURACIES = [("accuracy", "-"), ("hellaswag_accuracy", "-"), ("mmlu_accuracy", "--"), ("core", ":")]
PANELS = [
    ("loss (nats)", 1.0, [("train", "loss", "-"), ("eval", "test_loss", "--"), ("eval", "validation_loss", "--")]),
    ("accuracy (%)", 100.0, [("eval", name, style) for name, style in ACCURACIES]),
    ("largest load of an expert (1: all alike)", 1.0, [("train", "largest_load", "-")]),
    ("learning rate", 1.0, [("train", "learning_rate", "-")]),
    ("throughput (examples per second)", 1.0, [("train", "examples_per_second", "-")]),
    ("throughput (tokens per second)", 1.0, [("train", "tokens_per_second", "-")]),
]
"""Title, factor, and (kind of record in metrics.jsonl, field, line style) of each curve."""
MIXTURE = ("eval", "tokens_of_experts")
FIELDS = {name: 0 for _, _, curves in PANELS for _, name, _ in curves} | {"loss_floor": 0, MIXTURE[1]: 2}  # dimensions
EVALUATED = dict(marker="D", markersize=6, markerfacecolor="white", zorder=3)  # unlike the dots of the training


@dataclass(frozen=True)
class PlotConfig:
    """What to draw and where to."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN ...")]
    """Run directories."""
    script: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Script that trained the run, an image classifier: the test images that it misreads are drawn too."""
    output: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """A .png, .pdf or .svg file. Without it RUN/plot.png, for several runs plot.png in the current folder."""


@dataclass(frozen=True)
class Run:
    """What is drawn of a run directory. last_step: -1 where nothing was logged. loss_floor: nan where nobody knows it.
    bars: seconds of each phase, of the process that ended the run, and of all attempts of tools.keep_running."""

    folder: Path
    curves: dict[tuple[str, str], tuple[np.ndarray, np.ndarray]]
    last_step: int
    loss_floor: float
    bars: dict[str, dict[str, float]]


def warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr)


def read_run(folder: Path) -> Run:
    """What is missing or damaged is named on stderr and left out. Raises InputError for what is no run directory."""
    if str(folder).startswith("gs:/"):
        raise InputError(f"{folder} is in a bucket; fetch it first: gcloud storage cp -r gs://BUCKET/RUN runs/")
    if not (folder / "config.json").exists():
        near = sorted({str(found.parent) for one in (folder, folder.parent) for found in one.glob("*/config.json")})
        there = f"; there are {', '.join(near[:8])}" if near else "; check the path"
        raise InputError(f"{folder} is no folder with a config.json; expected a run directory{there}")
    read_json(folder / "config.json", "what a training script wrote")  # not drawn; it proves that this is a run
    log = folder / "metrics.jsonl"
    curves = read_curves(log, FIELDS) if log.exists() else {}
    _, floors = curves.pop(("eval", "loss_floor"), ((), [np.nan]))
    last_step = max((int(steps[-1]) for steps, _ in curves.values()), default=-1)
    if not curves:
        warn(f"{log} is missing or holds no lines to draw: this run has logged nothing, or the file was not copied")
    bars, floor = read_summary(folder / "summary.json", last_step)
    return Run(folder, curves, last_step, floor if np.isfinite(floor) else floors[-1], bars)


def read_summary(path: Path, last_step: int) -> tuple[dict[str, dict[str, float]], float]:
    """bars and loss_floor, as in Run: none where the run has not come to its end, or has gone on. Raises InputError."""
    if not path.exists():
        return {"": {}}, np.nan
    expected = "what a run writes at its end; delete it to draw the run as unfinished"
    found = read_json(path, expected)
    try:
        steps, floor = (float(as_numbers(found.get(name), 0)) for name in ("steps", "loss_floor"))
        again = found.get("keep_running") or {}
        bars = {"": seconds_in(found, "goodput")}
        if lost := seconds_in(again, "lost_seconds"):
            attempts, whole = (float(as_numbers(again.get(name), 0)) for name in ("attempts", "seconds"))
            bars[f"all {attempts:.0f} attempts"] = {"kept_work": max(0.0, whole - sum(lost.values())), **lost}
    except ValueError as error:
        raise InputError(f"{path}: {error}; expected {expected}") from error
    if steps < last_step:
        warn(f"{path} is of step {steps:.0f}, but the run is at {last_step}: left out")
        return {"": {}}, np.nan
    return bars, floor


def seconds_in(found: object, name: str) -> dict[str, float]:
    """Seconds of each phase. Raises ValueError."""
    seconds = found.get(name) or {} if isinstance(found, dict) else found
    if not isinstance(seconds, dict) or not (as_numbers([*seconds.values()], 1) >= 0).all():
        raise ValueError(f"{name} is {seconds!r:.60}, not the seconds of each phase")
    return {phase: float(value) for phase, value in seconds.items()}


def draw_curves(axes, runs: list[Run], colours, scale: float, curves) -> None:
    for run, colour in zip(runs, colours, strict=True):
        for kind, name, style in curves:
            steps, values = run.curves.get((kind, name), ((), np.empty(0)))
            few = np.isfinite(values).sum() <= 30  # a marker for each, and a single value stays visible
            marker = (EVALUATED if style == "--" else dict(marker="o", markersize=3.5)) if few else {}
            if len(steps):
                axes.plot(steps, values * scale, style, color=colour, linewidth=1.5, label=name, **marker)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.xaxis.get_major_locator().set_params(integer=True, nbins=6)
    axes.grid(alpha=0.3)


def explain_loss(axes, runs: list[Run]) -> None:
    """Floors, legend, and a logarithmic scale where the losses need one."""
    styles = [Line2D([], [], color="0.3", linestyle="-", label="training")]
    if {"test_loss", "validation_loss"} & {line.get_label() for line in axes.lines}:
        styles.append(Line2D([], [], color="0.3", linestyle="--", label="evaluation", **EVALUATED))
    for floor in sorted({run.loss_floor for run in runs if np.isfinite(run.loss_floor)}):
        label = f"floor {floor:.4f}: no model can do better"
        styles.append(axes.axhline(floor, color="black", linestyle=":", label=label))
    axes.legend(handles=styles, fontsize=9)
    _, low, _, high = axes.dataLim.extents
    if 0 < 20 * low < high:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 1e4 * low else (1,)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())


def draw_experts(axes, run: Run) -> None:
    """Blue where few tokens chose an expert, red where many, white for an even share. Each expert is a row and each
    evaluation a column, which begins at the one before."""
    steps, tokens = run.curves[MIXTURE]
    _, layers, experts = tokens.shape
    mean = tokens.mean(2, keepdims=True)
    shares = (tokens / np.where(mean > 0, mean, 1)).reshape(len(steps), -1)
    x, y = [min(0, steps[0] - 1), *steps], np.arange(layers * experts + 1) / experts
    drawn = axes.pcolormesh(x, y, shares.T, cmap="RdBu_r", vmin=0.0, vmax=2.0, rasterized=True)
    drawn.sticky_edges.x.clear()  # else all panels, which share these steps, would end at the last marker
    axes.set(ylim=(layers, 0), yticks=range(0, layers, -(-layers // 8)), ylabel=f"layer, {experts} experts each")
    axes.figure.colorbar(drawn, ax=axes, extend="max", ticks=[0, 0.5, 1, 1.5, 2], pad=0.01)


def draw_goodput(axes, rows: list[tuple[str, dict[str, float]]]) -> None:
    for row, (_, seconds) in enumerate(rows):
        total, left = sum(seconds.values()), 0.0
        axes.text(101, row, f"{total:,.0f} s" if total else "goes on", va="center", fontsize=9)
        for phase, value in seconds.items() if total else ():
            share = 100 * value / total
            axes.barh(row, share, left=left, color=COLOURS.get(phase, "black"), label=phase, height=0.6)
            if share >= 6:
                axes.text(left + share / 2, row, f"{share:.0f} %", ha="center", va="center", fontsize=8)
            left += share
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.set(ylim=(len(rows) - 0.4, -0.6), xlim=(0, 112), xticks=range(0, 101, 20), xlabel="share of wall time (%)")
    axes.set_title("where the time went (a run: of the process that ended it)", loc="left", fontsize=11)
    present = {bar.get_label() for bar in axes.containers}
    handles = [Patch(color=COLOURS[name], label=name.replace("_", " ")) for name in COLOURS if name in present]
    axes.figure.legend(handles=handles, loc="outside lower center", ncols=7, fontsize=9, frameon=False)


def plot(runs: list[Run]) -> Figure:
    """One figure of all runs: the loss, what else there is in two columns, and below where the time went."""
    common = os.path.commonpath([run.folder.resolve().parent for run in runs])
    paths = [os.path.relpath(run.folder.resolve(), common)[-40:] for run in runs]
    names = ["".join(letter if letter.isprintable() else "?" for letter in path) for path in paths]
    many = matplotlib.colormaps["turbo"](np.linspace(0.05, 0.95, len(runs)))
    colours = many if len(runs) > 10 else matplotlib.colormaps["tab10"].colors[: len(runs)]
    there = {key for run in runs for key in run.curves} | {("train", "loss")}
    panels = [panel for panel in PANELS if there & {(kind, name) for kind, name, _ in panel[2]}]
    mixtures = [(run, name) for run, name in zip(runs, names, strict=True) if MIXTURE in run.curves]
    rows = [(title or name, part) for run, name in zip(runs, names, strict=True) for title, part in run.bars.items()]
    titles = [title for title, _, _ in panels] + [f"tokens of experts (1: even share), {name}" for _, name in mixtures]
    cells = [0] * (len(titles) % 2) + list(range(len(titles)))  # of an odd number the loss takes the whole first row
    mosaic = [cells[place : place + 2] for place in range(0, len(cells), 2)] + [["time", "time"]]
    heights = [3.4] * (len(mosaic) - 1) + [1.1 + 0.32 * len(rows)]
    figure = Figure(figsize=(12, sum(heights) + 0.35 + 0.12 * (len(runs) + 1)), layout="constrained")
    axes = figure.subplot_mosaic(mosaic, height_ratios=heights)
    for place, title in enumerate(titles):
        axes[place].set_title(title, loc="left", fontsize=11)
        axes[place].set_xlabel("step")
        if place:
            axes[place].sharex(axes[0])
    for place, (title, scale, curves) in enumerate(panels):
        draw_curves(axes[place], runs, colours, scale, curves)
        if title.startswith("throughput"):
            axes[place].set_ylim(0, 1.08 * max(1e-9, axes[place].dataLim.y1))
    explain_loss(axes[0], runs)
    for place, (run, _) in enumerate(mixtures, len(panels)):
        draw_experts(axes[place], run)
    draw_goodput(axes["time"], rows)
    states = ["" if run.bars[""] else f" (unfinished, step {run.last_step:,})" for run in runs]
    labels = zip(names, states, colours, strict=True)
    handles = [Line2D([], [], color=colour, linewidth=4, label=name + state) for name, state, colour in labels]
    figure.legend(handles=handles, loc="outside upper left", ncols=min(2, len(runs)), fontsize=10, frameon=False)
    return figure


def save(figure: Figure, path: Path) -> None:
    content = io.BytesIO()
    figure.savefig(content, format=path.suffix[1:], dpi=110)
    write_atomically(path, content.getvalue())


def main() -> int:
    config = parse_options(PlotConfig, __doc__)
    folders = list({folder.resolve(): folder for folder in config.runs}.values())  # a run given twice is drawn once
    most = 1 if config.script else MOST_RUNS
    if not 1 <= len(folders) <= most:
        raise InputError(f"{len(folders)} runs were named; expected 1 to {most} in one picture, for example runs/first")
    output = config.output or (folders[0] / "plot.png" if len(folders) == 1 else Path("plot.png"))
    if output.suffix not in SUFFIXES:
        raise InputError(f"output is {output}; expected a name that ends with one of {', '.join(SUFFIXES)}")
    if config.output and not output.parent.is_dir():
        raise InputError(f"the folder of output {output} is not there; make it first: mkdir -p {output.parent}")
    runs = [read_run(folder) for folder in folders]
    if not any(run.curves for run in runs):
        raise InputError(f"there is nothing to draw in {', '.join(map(str, folders))}; wait for a first log line")
    save(plot(runs), output)
    print(output)
    if config.script:
        from images.misread import draw_misread  # only here: it imports torch

        misread = output.with_name(f"{output.stem}_misread.png")
        save(draw_misread(config.script, folders[0]), misread)
        print(misread)
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main))
