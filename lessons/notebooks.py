"""Runs the lessons that are notebooks, and writes what they print and draw into NAME.ipynb beside NAME.py.

Run:     python -m lessons.notebooks                # all of them, each in a process of its own
         python -m lessons.notebooks NAME --output DIR

A lesson is a Python file in the percent format, which Jupyter (by jupytext), VS Code and PyCharm open as a notebook:
"# %%" begins a cell of code, "# %% [markdown]" one of text in comments. It also runs as a script. Cells are run here as
one Python module; a notebook server would need some twenty packages to do the same.
"""

import argparse
import contextlib
import io
import json
import os
import re
import subprocess
import sys
from base64 import b64encode
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).resolve().parent
LESSONS = sorted(path.stem for path in FOLDER.glob("*.py") if path.read_text().startswith("# %%"))


class Cell(NamedTuple):
    """text: its lines, for markdown without the comment signs. line: of the file, where its text begins."""

    kind: str
    text: str
    line: int


def read_cells(path: Path) -> list[Cell]:
    """The cells of a lesson, which begins with one."""
    lines = path.read_text().splitlines()
    starts = [number for number, line in enumerate(lines) if line.startswith("# %%")]
    cells = []
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        kind = "markdown" if "[markdown]" in lines[start] else "code"
        begin = next((i for i in range(start + 1, end) if lines[i]), end)  # behind blank lines
        text = "\n".join(lines[begin:end]).rstrip("\n")
        cells.append(Cell(kind, re.sub(r"^# ?", "", text, flags=re.M) if kind == "markdown" else text, begin))
    return cells


def pictures() -> list[dict[str, Any]]:
    """Outputs for the open figures of matplotlib, which are closed: what Jupyter shows below a cell."""
    if "matplotlib.pyplot" not in sys.modules:
        return []
    plt, found = sys.modules["matplotlib.pyplot"], []
    for number in plt.get_fignums():
        file = io.BytesIO()
        plt.figure(number).savefig(file, format="png", dpi=80, bbox_inches="tight", metadata={"Software": None})
        data = {"image/png": b64encode(file.getvalue()).decode(), "text/plain": ["a figure"]}
        found.append({"output_type": "display_data", "data": data, "metadata": {}})
    plt.close("all")
    return found


def run_cells(cells: list[Cell], path: Path) -> list[dict[str, Any]]:
    """The cells as nbformat 4.5 has them, with their outputs. What a cell raises goes through."""
    made, namespace = [], {"__name__": "__main__"}
    for number, cell in enumerate(cells):
        entry = {"cell_type": cell.kind, "id": f"cell-{number}", "metadata": {}}
        entry["source"] = cell.text.splitlines(keepends=True)
        if cell.kind == "code":
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):  # a line of an error is the line of the file
                exec(compile("\n" * cell.line + cell.text, path, "exec"), namespace)
            lines = printed.getvalue().splitlines(keepends=True)
            outputs = [{"output_type": "stream", "name": "stdout", "text": lines}] * bool(lines) + pictures()
            count = sum(one["cell_type"] == "code" for one in made) + 1
            entry |= {"execution_count": count, "outputs": outputs}
        made.append(entry)
    return made


def build(name: str, output: Path) -> Path:
    """Runs a lesson in its folder, as Jupyter does, and writes its notebook."""
    path = FOLDER / f"{name}.py"
    sys.path[0] = str(FOLDER)
    os.chdir(FOLDER)
    os.environ["MPLBACKEND"] = "agg"
    cells = run_cells(read_cells(path), path)
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    notebook = {"cells": cells, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}
    target = output / f"{name}.ipynb"
    target.write_text(json.dumps(notebook, indent=1, ensure_ascii=True) + "\n")
    return target


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(LESSONS)}; none: all")
    parser.add_argument("--output", type=Path, default=FOLDER, metavar="DIR", help="where the notebooks are written")
    arguments = parser.parse_args()
    output = arguments.output.resolve()
    if unknown := set(arguments.names) - set(LESSONS):
        parser.error(f"{', '.join(sorted(unknown))} is no lesson; expected of {', '.join(LESSONS)}")
    output.mkdir(parents=True, exist_ok=True)  # before two minutes of a lesson, not behind them
    if len(arguments.names) == 1:
        print(build(*arguments.names, output))
        return 0
    for name in arguments.names or LESSONS:  # a device is set up once in a process
        command = [sys.executable, "-m", "lessons.notebooks", name, "--output", str(output)]
        if code := subprocess.run(command, cwd=FOLDER.parent).returncode:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
