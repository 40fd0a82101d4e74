"""What a calibration says: tables, a picture, and the text to attach to a report. Reads calibration.json alone."""

import re
from pathlib import Path
from typing import Any

from tools.on_chip.bench import steps_in
from tpu_compiler.estimate.calibration import SHORTEST_MS, Calibration, is_held_up
from tpu_compiler.estimate.report import markdown
from tpu_utils.base.hardware import GIB

ATTACH = """\
To report this, open an issue called "Calibration of {where}, torch_xla {torch_xla}, libtpu {libtpu}, commit {commit}",
paste this page, and attach calibration.json, calibration.png and, where something failed, the folder logs."""


def figure(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def table(header: str, rows: list[list[str]]) -> list[str]:
    """Lines of a Markdown table, aligned; none without rows. header: names divided by |."""
    return [*markdown([[name.strip() for name in header.split("|")], *rows]), ""] if rows else []


def step_rows(measurements: dict[str, Any], ratios: bool) -> list[list[str]]:
    rows = []
    for name, asked, found in steps_in(measurements):
        predicted, ms = asked.get("predicted_ms"), found.get("ms")
        memory, used = asked.get("peak_bytes"), found.get("hbm_peak_bytes")
        spread = f"{ms:.2f} ({found['ms_low']:.2f} to {found['ms_high']:.2f})" if found else "-"
        rows.append([name, figure(predicted, ".3f"), spread])
        compared = f"{ms / predicted:.2f}" if ratios and ms and predicted else "-"
        rows[-1].append("host" if compared != "-" and is_held_up(found) else compared)
        rows[-1] += [figure(memory and memory / GIB, ".3f"), figure(used and used / GIB, ".3f")]
        rows[-1] += [figure(asked.get("predicted_mfu"), ".1%"), figure(found.get("mfu"), ".1%")]
        rows[-1] += [figure(found.get(f"{phase}_seconds"), ".1f") for phase in ("start_up", "compile", "checkpoint")]
    return rows


def peak_rows(measurements: dict[str, Any]) -> list[list[str]]:
    rows = []
    for name, record in measurements.items():
        if not name.startswith("peak ") or "figures" not in record:
            continue
        for size, found in record["figures"].items():
            rate = f"{found['tflops']:.3g} TFLOP/s" if "tflops" in found else "-"
            rate = f"{found['gb_per_s']:.3g} GB/s" if "gb_per_s" in found else rate
            spread = f"{found['ms']:.3f} ({found['ms_low']:.3f} to {found['ms_high']:.3f})"
            bound = found.get("bound_ms")
            rows.append([name[5:], size if "tflops" in found else f"{size} MiB", spread, rate])
            rows[-1].append(figure(found.get("of_published"), ".1%"))
            rows[-1] += [figure(bound, ".3f"), figure(bound and found["ms"] / bound, ".2f")]
    return rows


def promise_rows(measurements: dict[str, Any]) -> list[list[str]]:
    rows = []
    for name, record in measurements.items():
        if name.startswith(("promise ", "road ", "doctor")) and record["status"] == "done":
            numbers = {n: v for n, v in record["figures"].items() if isinstance(v, int | float)}
            rows.append([name.removeprefix("promise "), "; ".join(f"{n} {v:.4g}" for n, v in numbers.items())])
    return rows


def report_text(content: dict[str, Any]) -> str:
    """The page report.md of a calibration.json."""
    machine, measurements, ratios = content["machine"], content["measurements"], content["ratios"]
    versions, on_tpu = machine["versions"], machine["device"] == "tpu"
    where = machine["slice"] or machine["chip"] if on_tpu else "a CPU"
    lines = [f"# Calibration of {where}", ""]
    lines.append(", ".join(f"{name} {text}" for name, text in versions.items()) + f"; commit {machine['commit']};")
    lines += [f"devices: {machine['num_devices']}.", ""]
    if on_tpu:
        chip, libtpu = machine["chip"], versions["libtpu"]
        said = Calibration(chip, libtpu, machine["num_devices"], ratios).sentence(chip, libtpu)
        said = said and f"{said}; of steps predicted to take {SHORTEST_MS:g} ms or more."
        lines += [said or f"Nothing compares: no step predicted to take {SHORTEST_MS:g} ms or more was measured.", ""]
    else:
        lines += ["A rehearsal: predictions are for a TPU, times are this CPU's, and no ratio is made of them.", ""]
    header = "step | predicted ms | measured ms (range) | x pred. | pred. GiB | peak GiB | pred. MFU | MFU"
    lines += table(f"{header} | start-up s | compile s | save s", step_rows(measurements, on_tpu))
    known = (
        'Peak GiB is known where a step runs on one device: under SPMD torch_xla does not tell it. x pred. "host": '
        "such a step waits for its host or its data, and nothing is compared."
    )
    lines += [known, ""] if on_tpu else []
    header = "alone | size | ms (range) | rate | of published | bound ms | x bound"
    lines += table(header, peak_rows(measurements))
    lines += table("promise kept | figures", promise_rows(measurements))
    for status, title in (("cannot", "Not measured, and why:"), ("failed", "Failed:")):
        names: dict[str, dict[str, None]] = {}  # by reason, each once and in order
        for name, record in measurements.items():
            if record["status"] == status:
                name = name if status == "failed" else re.sub("^(estimate|step) ", "", name)
                names.setdefault(record["reason"], {})[name] = None
        lines += [title, *(f"- {', '.join(some)}: {reason}" for reason, some in names.items()), ""] if names else []
    return "\n".join([*lines, ATTACH.format(where=where, commit=machine["commit"], **versions), ""])


def draw(content: dict[str, Any]):
    """The figure: prediction and clock, the chip alone against what is published, collectives against their bound."""
    from matplotlib.figure import Figure  # needs no display; only here: it takes a second

    machine, measurements = content["machine"], content["measurements"]
    drawing = Figure(figsize=(16, 5.5), layout="constrained")
    left, right = drawing.subplots(1, 2, width_ratios=(3, 2))
    points = [(n, a["predicted_ms"], m["ms"]) for n, a, m in steps_in(measurements) if m and a.get("predicted_ms")]
    for number, (name, predicted, ms) in enumerate(points):
        left.plot([predicted], [ms], "os^"[number // 10], label=name)  # matplotlib has ten colours
    if points:
        ends = [min(min(e, m) for _, e, m in points) / 2, max(max(e, m) for _, e, m in points) * 2]
        left.plot(ends, ends, "--", color="#9d9d9d", label="clock = prediction")
        left.set(xscale="log", yscale="log")
        left.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))  # beside the points, not on them
    clock = "measured ms" if machine["device"] == "tpu" else "ms on a CPU: a rehearsal"
    left.set(xlabel=f"predicted ms ({machine['slice'] or 'no slice'})", ylabel=clock)
    left.set_title("a step: predicted by the compiler, and the clock", loc="left")
    shares = {}
    for name, record in measurements.items():
        for size, found in (record.get("figures") or {}).items() if name.startswith("peak ") else ():
            share = found.get("of_published") or (found.get("bound_ms") and found["bound_ms"] / found["ms"])
            if share:
                shares[f"{name[5:]} {size}" + ("" if "tflops" in found else " MiB")] = share
    right.set_title("the chip alone" if shares else "nothing is published of this device", loc="left")
    if not shares:
        right.set_axis_off()
    right.barh(list(shares), [100 * share for share in shares.values()], color="#2b7bba")
    right.invert_yaxis()
    right.set(xlabel="% of the published peak, or of the links' speed")
    return drawing


def save_picture(content: dict[str, Any], path: Path) -> None:
    from tools.plot_run import save  # only here: it imports matplotlib

    save(draw(content), path)
