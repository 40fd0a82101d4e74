"""A picture of what bounds a step on each slice: roofline, compute, memory and links, and scaling over chips."""

import io
import math
from collections.abc import Sequence
from pathlib import Path

from tpu_compiler.decide.fastest import examples_per_step, step_ms
from tpu_compiler.estimate.report import Report
from tpu_utils.base.hardware import parse_topology
from tpu_utils.base.writing import write_atomically

COLOURS = {"compute": "#2b8a3e", "memory": "#2b7bba", "links": "#d7301f", "predicted": "#9d9d9d"}
LABELS = {
    "compute": "FLOPs over the peak of the matrix units",
    "memory": "bytes moved over memory bandwidth",
    "links": "bytes sent over link bandwidth",
    "predicted": "predicted: compiler estimate, and operations counted by rule",
}


def check_picture(path: Path) -> None:
    """Raises ValueError before anything is compiled for a picture that could not be written."""
    if path.suffix != ".png":
        raise ValueError(f"--picture is {str(path)!r:.80}; expected the name of a PNG file, such as slices.png")
    if not path.parent.is_dir():
        raise ValueError(f"--picture is {str(path)!r:.80}, but there is no folder {path.parent}; make it first")


def bounds(r: Report) -> dict[str, float]:
    """Milliseconds of a step that each resource of a device needs at its published peak, and the predicted step."""
    return {
        "compute": r.compute_ms,
        "memory": r.memory_ms,
        "links": r.communication_lower_bound_ms + (r.slice_lower_bound_ms or 0.0),
        "predicted": r.predicted_ms or 0.0,
    }


def efficiencies(reports: Sequence[Report]) -> dict[str, list[tuple[int, float]]]:
    """{generation: [(devices, examples a second of a device over those on the smallest slice of the list)]}."""
    rates: dict[str, list[tuple[int, float]]] = {}
    for r in sorted(reports, key=lambda r: r.devices):
        rate = examples_per_step(r) / step_ms(r) / r.devices
        rates.setdefault(parse_topology(r.topology).generation, []).append((r.devices, rate))
    return {name: [(n, rate / points[0][1]) for n, rate in points] for name, points in rates.items()}


def draw(reports: Sequence[Report], path: Path) -> None:
    """Write the picture of the steps that compile. Raises ValueError when none does, OSError."""
    reports = [r for r in reports if r.compiles and r.predicted_ms]
    if not reports:
        raise ValueError("--picture: nothing compiles, so there is nothing to draw")
    scaling = {name: points for name, points in efficiencies(reports).items() if len(points) > 1}
    from matplotlib.figure import Figure  # only when a picture is drawn

    height = max(4.6, 2.2 + 0.6 * len(reports))
    figure = Figure(figsize=(5.6 * (2 + bool(scaling)), height), layout="constrained")
    panels = figure.subplots(1, 2 + bool(scaling))
    draw_roofline(panels[0], reports)
    draw_bounds(panels[1], reports)
    if scaling:
        draw_scaling(panels[2], scaling)
    figure.legend(*panels[1].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8)
    figure.suptitle("Predicted by the TPU compiler and published peaks, nothing measured", fontsize=11)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=110)
    write_atomically(path, content.getvalue())


def draw_roofline(axes, reports: Sequence[Report]) -> None:
    colours: dict[str, str] = {}
    points = [(r.flops_per_device / max(r.moved_bytes, 1), r.flops_per_device / r.predicted_ms / 1e9) for r in reports]
    hardware = {parse_topology(r.topology).generation: parse_topology(r.topology).hardware for r in reports}
    ridges = [chip.bf16_tflops * 1e3 / chip.memory_gb_per_s for chip in hardware.values()]
    low = min(*ridges, *(x for x, _ in points)) / 4
    high = max(*ridges, *(x for x, _ in points)) * 8
    for (kind, chip), ridge in zip(hardware.items(), ridges, strict=True):
        peak, bandwidth = (x / chip.devices_per_chip for x in (chip.bf16_tflops, chip.memory_gb_per_s))
        label = f"{kind}: {peak:g} TFLOP/s, {bandwidth:g} GB/s"
        colours[kind] = f"C{len(colours)}"
        axes.plot([low, ridge, high], [low * bandwidth / 1e3, peak, peak], color=colours[kind], label=label)
    for marker, r, (x, y) in zip("os^Dv<>P" * len(reports), reports, points, strict=False):
        colour = colours[parse_topology(r.topology).generation]
        axes.plot([x], [y], marker, color=colour, markeredgecolor="black", label=r.topology, linestyle="none")
    axes.set(xscale="log", yscale="log", xlabel="FLOPs per byte of memory traffic", ylabel="TFLOP/s of a device")
    axes.set_title("roofline", fontsize=10)
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8, loc="lower right")


def draw_bounds(axes, reports: Sequence[Report]) -> None:
    width = 0.8 / len(COLOURS)
    times = [bounds(r) for r in reports]
    longest = max(max(found.values()) for found in times)
    for index, (name, colour) in enumerate(COLOURS.items()):
        places = [place + (index - 1.5) * width for place in range(len(reports))]
        axes.barh(places, [found[name] for found in times], width * 0.92, color=colour, label=LABELS[name])
        for place, found in zip(places, times, strict=True):
            axes.text(found[name] + 0.01 * longest, place, f"{found[name]:.3g}", va="center", fontsize=7)
    axes.set_yticks(range(len(reports)), [r.topology for r in reports])
    axes.set_ylim(len(reports) - 0.5, -0.5)
    axes.set_xlim(0, longest * 1.12)
    axes.set_xlabel("milliseconds of a step")
    axes.set_title("what each resource needs, and the predicted step", fontsize=10)


def draw_scaling(axes, scaling: dict[str, list[tuple[int, float]]]) -> None:
    counts = sorted({n for points in scaling.values() for n, _ in points})
    for index, (name, points) in enumerate(scaling.items()):
        axes.plot([n for n, _ in points], [100 * e for _, e in points], "o-", color=f"C{index}", label=name)
        beside = dict(xytext=(0, 6 if index % 2 == 0 else -14), textcoords="offset points", ha="center", fontsize=8)
        for n, e in points[1:]:
            axes.annotate(f"{e:.0%}", (n, 100 * e), **beside)
    axes.axhline(100, color="black", linewidth=0.8, linestyle=":")
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(n) for n in counts])
    top = max(100 * e for points in scaling.values() for _, e in points)
    axes.set_ylim(0, math.ceil(top / 10) * 10 + 15)
    axes.set(xlabel="devices", ylabel="rate of a device, % of the smallest slice")
    axes.set_title("efficiency, with communication that nothing hides", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="lower left")
