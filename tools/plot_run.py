"""Draw what runs left behind: losses, throughput, experts, where time went.

Run:     python -m tools.plot_run runs/first
             writes runs/first/plot.png
         python -m tools.plot_run runs/a runs/b runs/c --output compare.png
             several runs in one picture
         python -m tools.plot_run runs/first --script simple_mnist_tpu.py
             also the test images that the run misreads

Expect:  the path of each picture written; with --script a second one,
         *_misread.png, for each run. A run may be unfinished or resumed; what
         is missing or damaged is named on stderr. A picture that cannot be
         drawn costs no other one; the exit code is 2 then.
"""

import io
import math
import os
import sys
from array import array
from dataclasses import dataclass, field
from importlib import util
from inspect import signature
from pathlib import Path
from typing import Annotated

import matplotlib
import numpy as np
import tyro

from tpu_utils.base.errors import InputError, run_script
from tpu_utils.base.files import read_json, write_atomically
from tpu_utils.record.records import DamagedLines, read_records

matplotlib.use("Agg")  # no display on a TPU VM
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

matplotlib.rcParams["agg.path.chunksize"] = 10_000  # a million points: a fifth of the memory
PHASE_COLOURS = {
    "start_up": "#9d9d9d",
    "restore": "#5e5e5e",
    "compile": "#8c6bb1",
    "data_wait": "#d7301f",
    "step": "#2b8a3e",
    "evaluation": "#2b7bba",
    "checkpoint": "#f0a202",
    "other": "#d9d9d9",
    # over all attempts, as tools.keep_running counts them
    "kept_work": "#74c476",
    "restart": "#e377c2",
    "recompile": "#54278f",
    "lost_steps": "#fb6a4a",
    "silence": "#252525",
    "waiting": "#c6a15b",
}
SUFFIXES = (".png", ".pdf", ".svg")
MOST_RUNS = 100  # in a picture: its height grows with them
MOST_ROWS = 128  # experts drawn: more are too thin to be told apart
LARGEST = 1e300  # value drawn: above it matplotlib's arithmetic overflows
LOSSES = [("train", "loss", "-"), ("eval", "test_loss", "--"), ("eval", "validation_loss", "--")]
"""(kind of record in metrics.jsonl, field, line style), as in PANELS."""
ACCURACIES = [("accuracy", "-"), ("hellaswag_accuracy", "-"), ("mmlu_accuracy", "--"), ("core", ":")]
PANELS = [
    ("accuracy (%)", [("eval", name, style) for name, style in ACCURACIES], 100.0),
    ("largest load of an expert (1: all alike)", [("train", "largest_load", "-")], 1.0),
    ("learning rate", [("train", "learning_rate", "-")], 1.0),
    ("throughput (examples per second)", [("train", "examples_per_second", "-")], 1.0),
    ("throughput (tokens per second)", [("train", "tokens_per_second", "-")], 1.0),
]
"""Title, curves and scale of each."""
DRAWN = {(kind, name) for curves in (LOSSES, *(curves for _, curves, _ in PANELS)) for kind, name, _ in curves}
EVALUATED = dict(marker="D", markersize=6, markerfacecolor="white", zorder=3)
"""Marker of evaluation values, which tells a single one from the dots of the training."""


@dataclass(frozen=True)
class PlotConfig:
    """What to draw and where to."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN [RUN ...]")]
    """Run directories."""
    script: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Script that trained the runs, for image classifiers: the test images that each run misreads are drawn too."""
    output: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """A .png, .pdf or .svg file. Without it RUN/plot.png, for several runs plot.png in the current folder."""
    debug: bool = False
    """Show the traceback of an error instead of its message alone."""


@dataclass(frozen=True)
class Log:
    """What is drawn of metrics.jsonl. curves: by kind and field, the steps in order, each once, and the values. loads:
    of a mixture of experts, by the step of an evaluation, what loads_of() gives; all of one shape, in order."""

    curves: dict[tuple[str, str], tuple[np.ndarray, np.ndarray]]
    loads: dict[int, np.ndarray] = field(default_factory=dict)
    num_lines: int = 0
    last_step: int = 0
    loss_floor: float | None = None


@dataclass(frozen=True)
class Summary:
    """What is drawn of summary.json. goodput: the seconds of each phase. kept: by cause, of all attempts, where
    tools.keep_running has started the run more than once."""

    steps: int
    loss_floor: float | None
    goodput: dict[str, float] = field(default_factory=dict)
    attempts: int = 1
    kept: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """What a run directory says. summary is None when the run has not come to its end."""

    folder: Path
    log: Log
    summary: Summary | None

    @property
    def loss_floor(self) -> float | None:
        """Best possible loss in nats, of synthetic data; None where nobody knows it, or the run has not said it yet."""
        known = self.summary and self.summary.loss_floor
        return self.log.loss_floor if known is None else known

    def curve(self, kind: str, name: str) -> tuple[np.ndarray, np.ndarray]:
        """(steps, values) of a field; what was not finite is nan: a gap in the curve."""
        return self.log.curves.get((kind, name), (np.empty(0, int), np.empty(0)))


def warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr)


def number(found: object) -> float:
    """A value of a run's files; nan for null, not finite, or beyond LARGEST. Raises ValueError for what is none."""
    if found is None:
        return math.nan
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise ValueError(f"{found!r:.60} is no number")
    return float(found) if -LARGEST <= found <= LARGEST else math.nan


def loads_of(tokens: object, shape: tuple[int, ...] | None) -> np.ndarray:
    """(layers, experts) float32: how many tokens chose each expert, in even shares. Raises ValueError for what is no
    table of a run, and for one of another shape than that of an earlier line."""
    rows = tokens if isinstance(tokens, list) else []
    if not rows or any(not isinstance(row, list) or not row or len(row) != len(rows[0]) for row in rows):
        raise ValueError(f"{tokens!r:.60} is no table")
    table = np.array([[number(value) for value in row] for row in rows])
    if not (table >= 0).all() or table.shape != (shape or table.shape):
        raise ValueError(f"{tokens!r:.60} is no table of numbers of tokens, or another layout than before")
    share = table.mean(1, keepdims=True)
    return np.divide(table, share, out=np.zeros_like(table), where=share > 0).astype(np.float32)


def read_log(path: Path) -> Log:
    """What metrics.jsonl has of curves and loads; what is missing or damaged is named on stderr and left out.

    Only what is drawn is kept, 16 bytes a value of a curve, however long the file. A later line replaces one of the
    same step.
    """
    if not path.exists():
        warn(f"{path} is missing: this run has logged nothing yet, or the file was not copied with it")
        return Log({})
    columns = {key: (array("q"), array("d")) for key in DRAWN}
    damaged = DamagedLines(path)
    num_lines = 0
    last_step = 0
    loss_floor = math.nan
    loads, shape = {}, None
    for place, _, record in read_records(path):
        try:
            if record is None:
                raise ValueError("it is no line of a run")
            kind, step = record["kind"], record["step"]
            values = {name: number(record[name]) for name in record if (kind, name) in DRAWN}
            floor = number(record.get("loss_floor"))
            if kind == "eval" and "tokens_of_experts" in record:
                loads[step] = loads_of(record["tokens_of_experts"], shape)
                shape = loads[step].shape
        except ValueError:
            damaged.add(place)
            continue
        for name, value in values.items():
            columns[kind, name][0].append(step)
            columns[kind, name][1].append(value)
        num_lines, last_step = num_lines + 1, max(last_step, step)
        loss_floor = loss_floor if math.isnan(floor) else floor
    damaged.warn()
    if not num_lines:
        warn(f"{path} holds no lines: the run has not come to its first log line")
    curves = {}
    for key, column in columns.items():
        steps, values = (np.asarray(part)[::-1] for part in column)
        steps, last = np.unique(steps, return_index=True)
        if len(steps):
            curves[key] = steps, values[last]
    loads = dict(sorted(loads.items()))
    return Log(curves, loads, num_lines, last_step, None if math.isnan(loss_floor) else loss_floor)


def read_summary(path: Path) -> Summary | None:
    """Raises InputError when it is there, but not as a run writes it."""
    if not path.exists():
        return None
    found = read_json(path, "what a run writes at its end; delete it to draw the run as unfinished")
    steps, again = found.get("steps", 0), found.get("keep_running") or {}
    try:
        if type(steps) is not int:
            raise ValueError(f"steps is {steps!r:.60}, no whole number")
        goodput = seconds_by_phase(found.get("goodput") or {}, "goodput")
        if not isinstance(again, dict) or type(again.get("attempts", 1)) is not int:
            raise ValueError(f"keep_running is {again!r:.60}, no object with attempts")
        lost = seconds_by_phase(again.get("lost_seconds") or {}, "lost_seconds")
        whole = number(again.get("seconds", sum(lost.values())))
        kept = {"kept_work": max(0.0, whole - sum(lost.values())), **lost} if lost else {}
        floor = number(found.get("loss_floor"))
    except ValueError as error:
        raise InputError(
            f"{path}: {error}; expected what a run writes at its end; delete it to draw the run as unfinished"
        ) from error
    return Summary(steps, None if math.isnan(floor) else floor, goodput, again.get("attempts", 1), kept)


def seconds_by_phase(seconds: object, name: str) -> dict[str, float]:
    """Raises ValueError for what is no object of finite seconds."""
    if not isinstance(seconds, dict):
        raise ValueError(f"{name} is {seconds!r:.60}, no object")
    found = {}
    for phase, value in seconds.items():
        known = phase if phase in PHASE_COLOURS else "unknown"
        found[known] = found.get(known, 0.0) + number(value)
    if not all(value >= 0 for value in found.values()):
        raise ValueError(f"{name} has seconds below 0, or not finite")
    return found


def read_run(folder: Path) -> Run:
    """Raises InputError when the folder is no run directory, or its files are not what a run writes."""
    if str(folder).startswith("gs:/"):
        raise InputError(f"{folder} is in a bucket; fetch it first: gcloud storage cp -r gs://BUCKET/RUN runs/")
    if not folder.is_dir():
        others = sorted(path.parent.name for path in folder.parent.glob("*/config.json"))
        there = f"; runs in {folder.parent}: {', '.join(others[:8])}" if others else ""
        raise InputError(f"{folder} is not there, or no folder; expected a run directory{there}")
    if not (folder / "config.json").exists():
        inside = sorted(str(path.parent) for path in folder.glob("*/config.json"))
        hint = f"; there are runs in it: {' '.join(inside[:8])}" if inside else "; check the path"
        raise InputError(f"{folder} holds no config.json; expected a run directory{hint}")
    read_json(folder / "config.json", "what a training script wrote")  # not drawn; it proves that this is a run
    log, summary = read_log(folder / "metrics.jsonl"), read_summary(folder / "summary.json")
    if summary and summary.steps < log.last_step:
        warn(f"{folder}/summary.json is of step {summary.steps}, but the run is at {log.last_step}: left out")
        summary = None
    return Run(folder, log, summary)


def names_of(runs: list[Run]) -> list[str]:
    """A name for each run: the folder's, with as many parents as it takes to tell them apart."""
    paths = [run.folder.resolve().parts for run in runs]
    for depth in range(1, max(map(len, paths)) + 1):
        names = ["/".join(path[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            break
    return names


def as_text(name: str) -> str:
    """A name as matplotlib can draw it: it takes what stands between two $ for a formula."""
    short = name if len(name) <= 40 else f"...{name[-37:]}"
    return "".join(letter if letter.isprintable() else "?" for letter in short).replace("$", r"\$")


def draw_curves(axes, runs, colours, title, curves, scale=1.0) -> None:
    """curves: (kind, field, line style) each, drawn for every run that has it."""
    for run, colour in zip(runs, colours, strict=True):
        for kind, name, style in curves:
            steps, values = run.curve(kind, name)
            few = np.isfinite(values).sum() <= 30  # a marker for each, and a single value stays visible
            marker = (EVALUATED if style == "--" else dict(marker="o", markersize=3.5)) if few else {}
            if len(steps):
                axes.plot(steps, values * scale, style, color=colour, linewidth=1.5, label=name, **marker)
            if len(steps) == 1:
                near = dict(xytext=(-7, 5), textcoords="offset points", ha="right", fontsize=9, color=colour)
                axes.annotate(f"{values[0] * scale:.4g}", (steps[0], values[0] * scale), **near)
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel("step")
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.xaxis.get_major_locator().set_params(integer=True, nbins=6)
    axes.grid(alpha=0.3)


def draw_loss(axes, runs: list[Run], colours) -> None:
    draw_curves(axes, runs, colours, "loss (nats)", LOSSES)
    styles = [Line2D([], [], color="0.3", linestyle="-", label="training")]
    drawn = {line.get_label() for line in axes.lines}
    if drawn & {"test_loss", "validation_loss"}:
        styles.append(Line2D([], [], color="0.3", linestyle="--", label="evaluation", **EVALUATED))
    floors = {}
    for run, colour in zip(runs, colours, strict=True):
        if run.loss_floor is not None and run.log.num_lines:
            floors.setdefault(run.loss_floor, []).append(colour)
    for floor, of in floors.items():
        colour = of[0] if len(of) < len(runs) else "black"
        axes.axhline(floor, color=colour, linestyle=":", linewidth=1.5, label="loss_floor")
        styles.append(Line2D([], [], color=colour, linestyle=":", label=f"floor {floor:.4f}: no model can do better"))
    values = np.concatenate([line.get_ydata() for line in axes.lines] or [np.ones(1)]).astype(float)
    values = values[np.isfinite(values)]
    decades = np.log10(values.max()) - np.log10(values.min()) if len(values) and values.min() > 0 else 0.0
    if decades > math.log10(20):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades < 4 else (1,)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_title("loss (nats, logarithmic)", loc="left", fontsize=11)
    axes.legend(handles=styles, fontsize=9)


def is_over_steps(run: Run) -> bool:
    """Whether the experts of all layers have room for a row each."""
    return next(iter(run.log.loads.values())).size <= MOST_ROWS


def draw_experts(axes, run: Run, title: str) -> None:
    """Blue where few tokens chose an expert, red where many. Each expert is a row and each evaluation a column, which
    begins at the one before; with more than MOST_ROWS each layer is a row, of the last evaluation."""
    steps, loads = [*run.log.loads], np.stack([*run.log.loads.values()])
    _, layers, experts = loads.shape
    if is_over_steps(run):
        x, y = [0 if steps[0] else -1, *steps], np.arange(layers * experts + 1) / experts
        cells = loads.reshape(len(steps), -1).T
        labels = "step", f"layer, {experts} experts each"
        for layer in range(1, layers):
            axes.axhline(layer, color="black", linewidth=0.8)
    else:
        x = np.arange(experts + 1)
        y = np.arange(layers + 1)
        cells = loads[-1]
        labels = f"expert, at step {steps[-1]:,}", "layer"
    drawn = axes.pcolormesh(x, y, cells, cmap="RdBu_r", vmin=0.0, vmax=2.0, rasterized=True)  # white: the even share
    if is_over_steps(run):
        drawn.sticky_edges.x.clear()  # else all panels, which share these steps, would end at the last marker
    labelled = range(0, layers, -(-layers // 8))
    axes.set_yticks([layer + 0.5 for layer in labelled], [str(layer) for layer in labelled])
    axes.set_ylim(layers, 0)  # the first layer on top
    axes.set_xlabel(labels[0])
    axes.set_ylabel(labels[1])
    axes.set_title(title, loc="left", fontsize=11)
    axes.figure.colorbar(drawn, ax=axes, extend="max", ticks=[0, 0.5, 1, 1.5, 2], pad=0.01)


def draw_goodput(axes, runs: list[Run], names: list[str]) -> None:
    """A bar for each run: the share of each phase in its wall time. One more where there were several attempts."""
    rows = []
    for run, name in zip(runs, names, strict=True):
        rows.append((name, run.summary.goodput if run.summary else {}))
        if run.summary and run.summary.kept:
            rows.append((f"all {run.summary.attempts} attempts", run.summary.kept))
    for row, (_, seconds) in enumerate(rows):
        total, left = sum(seconds.values()), 0.0
        if not total:
            axes.text(1, row, "known when the run has ended", va="center", fontsize=9, color="0.4")
            continue
        for phase, value in seconds.items():
            share = 100 * value / total
            axes.barh(row, share, left=left, color=PHASE_COLOURS.get(phase, "black"), label=phase, height=0.6)
            if share >= 6:
                text = f"{share:.0f} %"
                colour = "black" if phase == "other" else "white"
                axes.text(left + share / 2, row, text, ha="center", va="center", color=colour, fontsize=8)
            left += share
        axes.text(101, row, f"{total:,.0f} s", va="center", fontsize=9)
    if len(rows) > 1:
        axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    else:
        axes.set_yticks([])
    axes.set_ylim(len(rows) - 0.4, -0.6)  # the first run on top
    axes.set_xlim(0, 112)
    axes.set_xticks(range(0, 101, 20))
    axes.set_xlabel("share of wall time (%)")
    axes.set_title("where the time went (a run: of the process that ended it)", loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    present = [phase for phase in PHASE_COLOURS if phase in {bar.get_label() for bar in axes.containers}]
    handles = [Patch(color=PHASE_COLOURS[phase], label=phase.replace("_", " ")) for phase in present]
    axes.figure.legend(handles=handles, loc="outside lower center", ncols=7, fontsize=9, frameon=False)


def plot(runs: list[Run]) -> Figure:
    """One figure of all runs. Panels for which no run has a value are left out."""
    if len(runs) <= 10:
        colours = [matplotlib.colormaps["tab10"](i) for i in range(len(runs))]
    else:
        colours = [matplotlib.colormaps["turbo"](x) for x in np.linspace(0.05, 0.95, len(runs))]
    names = [as_text(name) for name in names_of(runs)]
    panels = [
        (title, curves, scale)
        for title, curves, scale in PANELS
        if any(len(run.curve(kind, name)[0]) for run in runs for kind, name, _ in curves)
    ]
    mixtures = [(run, name) for run, name in zip(runs, names, strict=True) if run.log.loads]
    num_panels = len(panels) + len(mixtures)
    # two columns: the loss, then what there is; the bars take the whole width below
    num_rows = (num_panels + 2) // 2
    bars = 1.1 + 0.32 * sum(1 + bool(run.summary and run.summary.kept) for run in runs)
    legend = 0.35 + 0.24 * math.ceil(len(runs) / 2)
    figure = Figure(figsize=(12, 3.4 * num_rows + bars + legend), layout="constrained")
    grid = figure.add_gridspec(num_rows + 1, 2, height_ratios=[3.4] * num_rows + [bars])
    # an odd number of panels: the loss takes the whole first row
    wide = (num_panels + 1) % 2
    loss = figure.add_subplot(grid[0, :] if wide else grid[0, 0])
    draw_loss(loss, runs, colours)
    for place, (title, curves, scale) in enumerate(panels, 1 + wide):
        axes = figure.add_subplot(grid[place // 2, place % 2], sharex=loss)
        draw_curves(axes, runs, colours, title, curves, scale)
        if title.startswith("throughput"):
            highest = np.nanmax([np.nanmax(line.get_ydata(), initial=0.0) for line in axes.lines], initial=0.0)
            axes.set_ylim(0, 1.08 * highest or 1.0)
            axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        if title.startswith("accuracy"):
            axes.set_ylim(top=min(axes.get_ylim()[1], 100.5))
        if title.startswith("learning"):
            axes.yaxis.set_major_formatter(StrMethodFormatter("{x:.3g}"))
    for place, (run, name) in enumerate(mixtures, 1 + wide + len(panels)):
        axes = figure.add_subplot(grid[place // 2, place % 2], sharex=loss if is_over_steps(run) else None)
        draw_experts(axes, run, f"tokens of experts (1: even share){f', {name}' if len(runs) > 1 else ''}")
    draw_goodput(figure.add_subplot(grid[num_rows, :]), runs, names)
    states = ["" if run.summary else f" (unfinished, step {run.log.last_step:,})" for run in runs]
    labels = [name + state for name, state in zip(names, states, strict=True)]
    handles = [Line2D([], [], color=c, linewidth=4, label=label) for c, label in zip(colours, labels, strict=True)]
    figure.legend(handles=handles, loc="outside upper left", ncols=min(2, len(runs)), fontsize=10, frameon=False)
    return figure


def draw_misread(script: Path, folder: Path) -> Figure:
    """The test images that the last checkpoint of a run misreads. script: what has trained it, with its build_model()
    and load_dataset(). Raises InputError for a run of another script, and for images that cannot be drawn."""
    os.environ.setdefault("PJRT_DEVICE", "CPU")  # nothing runs on a device; left unset, torch_xla warns
    import torch  # only here, as in the script

    from images.misread import find_misread, misread_figure
    from tpu_utils.checkpoint.loading import CheckpointReader
    from tpu_utils.options.stored import resolve_stored

    spec = util.spec_from_file_location("drawn_script", script)
    if spec is None or not script.is_file():
        raise InputError(f"{script}: no such script; expected the one that trained {folder}")
    module = util.module_from_spec(spec)
    sys.path.insert(0, str(script.resolve().parent))
    spec.loader.exec_module(module)
    if not all(hasattr(module, name) for name in ("train", "build_model", "load_dataset")):
        raise InputError(f"{script} has no train(), build_model() and load_dataset(); expected a script for images")
    config = resolve_stored(signature(module.train).parameters["config"].annotation, str(folder), "must")
    saved = CheckpointReader(folder / "checkpoints").load("must")
    dataset = module.load_dataset(config)
    torch.manual_seed(config.seed)
    model = module.build_model(config, dataset)
    model.load_state_dict(saved.part("model"))
    found = find_misread(model, dataset, saved.step)
    print(f"{folder}: {found}")
    if found.images is None:
        raise InputError(
            f"images are {dataset.test_images.shape[1:]}; expected grey (H, W), or of three colours (3, H, W); floats "
            "(H, W) beyond 0 to 1 may be sequences: give pictures as (1, H, W)"
        )
    return misread_figure(found)


def save(figure: Figure, path: Path) -> None:
    content = io.BytesIO()
    figure.savefig(content, format=path.suffix[1:], dpi=110)
    write_atomically(path, content.getvalue())
    print(path)


def main() -> int:
    config = tyro.cli(
        PlotConfig,
        prog="plot_run",
        description=__doc__,
        use_underscores=True,
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    folders = list({folder.resolve(): folder for folder in config.runs}.values())  # a run given twice is drawn once
    if not folders:
        raise InputError("no run was named; expected at least one run directory, for example runs/first")
    if len(folders) > MOST_RUNS:
        raise InputError(f"{len(folders)} runs were named; expected at most {MOST_RUNS} in one picture; draw fewer")
    output = config.output or (folders[0] / "plot.png" if len(folders) == 1 else Path("plot.png"))
    if output.suffix not in SUFFIXES:
        raise InputError(f"output is {output}; expected a name that ends with one of {', '.join(SUFFIXES)}")
    if config.output and not output.parent.is_dir():
        raise InputError(f"the folder of output {output} is not there; make it first: mkdir -p {output.parent}")
    runs = [read_run(folder) for folder in folders]
    if not any(run.log.num_lines for run in runs):
        raise InputError(
            f"there is nothing to draw: no line in {', '.join(str(run.folder / 'metrics.jsonl') for run in runs)}; "
            "wait for a run's first log line"
        )
    save(plot(runs), output)
    not_drawn = []
    for run, name in zip(runs, names_of(runs), strict=True) if config.script else []:
        tag = "" if len(runs) == 1 else "_" + name.replace("/", "_").strip(".")
        path = output.with_name(f"{output.stem}_misread{tag}.png")
        try:
            save(draw_misread(config.script, run.folder), path)
        except (ValueError, TypeError) as error:  # InputError, and what matplotlib says of images it cannot draw
            not_drawn.append(f"{error}; {path} is not drawn")
    if not_drawn:
        raise InputError("\n".join(not_drawn))
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main))
