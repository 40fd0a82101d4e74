"""Tokens per second of exported models in headless Chromium: one thread, and as many as the machine has cores.

Run:     python benchmarks/browser_speed.py exported/gpt exported/llama
Prints:  a table, one line for each model and number of threads: size, seconds to load (fetched from this machine,
         checked, both graphs started), seconds to the first token, tokens per second after it (the best of three), and
         the most memory that the page's process has held.

Needs:   Debian's chromium, npm ci --ignore-scripts --prefix browser/page, and pip install -r requirements-dev.txt.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "browser" / "tests"))

import playwright.sync_api
from chromium import GENERATE, chromium, isolated_server, missing


class Refused(Exception):
    """What the page says of a model that it does not run."""


def renderer_peak() -> int:
    """Bytes: the largest VmHWM of this user's pages in Chromium. Linux."""
    found = [0]
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if b"--type=renderer" in (folder / "cmdline").read_bytes() and is_ours(folder):
                lines = (folder / "status").read_text().splitlines()
                found += [1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM")]
        except OSError:
            continue  # it has ended
    return max(found)


def is_ours(folder: Path) -> bool:
    """Whether the process descends from this one."""
    while folder.name != "0":
        if folder.name == str(os.getpid()):
            return True
        folder = folder.parent / (folder / "stat").read_text().rpartition(")")[2].split()[1]
    return False


def measure(address: str, name: str, threads: int, options: argparse.Namespace) -> dict:
    """Measure one model in a browser of its own, so that the memory is that of this model alone."""
    wanted = dict(numTokens=options.num_tokens, temperature=0, topK=0, topP=1, seed=0)
    with chromium() as browser:
        page = browser.new_page()
        page.goto(address)
        try:
            runs = page.evaluate(GENERATE, [f"models/{name}", options.prompt, [wanted] * 3, threads])
        except playwright.sync_api.Error as error:
            raise Refused(error.message.partition("\n")[0]) from error
        peak = renderer_peak()
    speeds = [(run["count"] - 1) / run["seconds"] for run in runs if run["count"] > 1]
    if not speeds:
        raise SystemExit(f"{name} gave no two tokens; try another --prompt")
    first = min(run["prefillSeconds"] for run in runs)
    return dict(runs[0], speed=max(speeds), first=first, peak=peak)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="written by browser.export")
    parser.add_argument("--num_tokens", type=int, default=100)
    parser.add_argument("--prompt", default="1 2 3", help="bytes and token numbers both read the default")
    options = parser.parse_args()
    if why := missing():
        print(why, file=sys.stderr)
        return 2
    print(f"{'model':24}{'weights':9}{'MB':>8}{'threads':>9}{'load s':>8}{'first s':>9}{'tokens/s':>10}{'page MB':>9}")
    with tempfile.TemporaryDirectory() as scratch:
        for number, folder in enumerate(options.folders):
            model = json.loads((folder / "model.json").read_text())
            size = sum(file["bytes"] for file in model["files"].values()) / 1e6
            (Path(scratch) / f"m{number}").symlink_to(folder.resolve())
            with isolated_server(Path(scratch)) as address:
                for threads in sorted({1, min(8, os.cpu_count() or 1)}):
                    try:
                        found = measure(address, f"m{number}", threads, options)
                    except Refused as error:
                        print(f"{folder.name:24}{model['weights']:9}{size:8.1f}{threads:9}  {error}", flush=True)
                        continue
                    line = f"{folder.name:24}{model['weights']:9}{size:8.1f}{found['threads']:9}{found['load']:8.2f}"
                    print(f"{line}{found['first']:9.3f}{found['speed']:10.1f}{found['peak'] / 1e6:9.0f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
