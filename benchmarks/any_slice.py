"""What the TPU compiler predicts from 8 to 512 chips: docs/results/any_slice.csv and a picture. Nothing runs.

Run:     nice python benchmarks/any_slice.py DIR [MODEL ...]
             compiles what is not yet in DIR, one at a time (2 to 10 minutes
             each on 2 cores), then prints the table and writes DIR/any_slice.csv
             and DIR/any_slice.png
"""

import argparse
import csv
import io
import json
import re
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from matplotlib.figure import Figure

from tpu_compiler.estimate.report import Report
from tpu_utils.base.files import write_atomically
from tpu_utils.base.hardware import GIB, parse_topology

ROOT = Path(__file__).resolve().parent.parent
SLICES = ("v5litepod-8", "v5litepod-256", "v5p-1024")
GPT2 = "--preset production --gradient_accumulation_steps 1 --scan_layers --remat --model_size {}"
LLAMA = (
    "--dataset tokens --precision bfloat16 --scan_layers --remat --attention flash --sequence_length 2048 "
    "--model_size llama3_8B"
)
# name: (options, sequences a chip)
MODELS = {name: (GPT2.format(name), 8) for name in ("124M", "350M", "774M", "1558M")} | {"Llama 8B": (LLAMA, 2)}


def command(model: str, topology: str) -> list[str]:
    options, sequences = MODELS[model]
    batch = sequences * parse_topology(topology).num_devices
    return ["transformer_tpu.py", "--topology", topology, *options.split(), "--global_batch_size", str(batch)]


def asked(model: str, topology: str, folder: Path) -> Report | None:
    """The report, from the folder or from the compiler. None: the script ended before its first step."""
    file = folder / f"{re.sub(r'[^A-Za-z0-9]', '', model)}_{topology}.json"
    if not file.exists():
        print("python aot_tpu.py", *command(model, topology), file=sys.stderr, flush=True)
        line = [sys.executable, "aot_tpu.py", *command(model, topology), "--json"]
        done = subprocess.run(line, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        if not done.stdout.strip():
            return None
        write_atomically(file, done.stdout.encode())
    return Report(**json.loads(file.read_text())[0])


def table(reports: dict[tuple[str, str], Report]) -> str:
    """The table as CSV."""
    head = "model,slice,mesh,fits,GiB a chip,predicted ms,MFU,all hidden ms,nothing hidden ms,compile s".split(",")
    lines = [head]
    for (model, topology), r in reports.items():
        memory = f"{r.peak_bytes / GIB:.2f} of {r.limit_bytes / GIB:.2f}" if r.peak_bytes else ""
        row = [model, topology, r.settings.get("mesh", ""), "yes" if r.fits else "no", memory]
        if r.compiles:
            row += [f"{r.predicted_ms:.0f}", f"{r.predicted_mfu:.1%}"]
            row += [f"{r.predicted_ms_all_hidden:.0f}", f"{r.predicted_ms_nothing_hidden:.0f}"]
        else:
            row += [""] * 4
        lines.append([*row, f"{r.compile_seconds:.0f}"])
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(lines)
    return file.getvalue()


def commands(models: list[str]) -> str:
    """The command behind each row of the table; the batch grows with the slice."""
    lines = []
    for model in models:
        options, sequences = MODELS[model]
        line = f"aot_tpu.py transformer_tpu.py --topology SLICE {options} --global_batch_size CHIPSx{sequences}"
        lines.append(f"{model}: python {line}")
    return "\n".join(lines)


def picture(reports: dict[tuple[str, str], Report], file: Path) -> None:
    """The predicted step, and communication beside it, for each model and slice that fits."""
    models = [model for model in MODELS if any(name == model and r.compiles for (name, _), r in reports.items())]
    figure = Figure(figsize=(11, 2.6 * len(models)), layout="constrained")
    for number, model in enumerate(models):
        rows = [(topology, r) for (name, topology), r in reports.items() if name == model and r.compiles]
        names = [f"{t}\n{r.devices} chips, {r.settings.get('mesh', '-')}" for t, r in rows]
        left, right = (figure.add_subplot(len(models), 2, 2 * number + side) for side in (1, 2))
        left.barh(names, [r.predicted_ms for _, r in rows], color="tab:blue", label="predicted step")
        whole = [r.predicted_ms_nothing_hidden - r.predicted_ms for _, r in rows]
        exposed = [r.predicted_ms_all_hidden - r.predicted_ms for _, r in rows]
        left.barh(names, whole, color="tab:red", height=0.35, label="communication, lower bound")
        left.barh(names, exposed, color="black", height=0.1, label="of it what no operation hides")
        left.set(title=f"{model}: ms a step", xlabel="ms")
        left.legend(fontsize=7)
        right.barh(names, [r.peak_bytes / GIB for _, r in rows], color="tab:green")
        right.barh(names, [r.limit_bytes / GIB for _, r in rows], fill=False, edgecolor="black")
        right.set(title=f"{model}: GiB a chip, of its limit", xlabel="GiB")
        for axes in (left, right):
            axes.tick_params(labelsize=7)
            axes.invert_yaxis()
    figure.suptitle("Predicted by the TPU compiler, nothing measured", fontsize=10)
    figure.savefig(file, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("models", nargs="*", help=f"some of {', '.join(MODELS)}; default: all")
    arguments = parser.parse_args()
    if unknown := set(arguments.models) - set(MODELS):
        parser.error(f"no such model: {', '.join(sorted(unknown))}; expected some of {', '.join(MODELS)}")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    reports = {}
    for model in arguments.models or MODELS:
        for topology in SLICES:
            if report := asked(model, topology, arguments.folder):
                reports[model, topology] = report
    print(table(reports), commands(arguments.models or list(MODELS)), sep="\n")
    write_atomically(arguments.folder / "any_slice.csv", table(reports).encode())
    picture(reports, arguments.folder / "any_slice.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
