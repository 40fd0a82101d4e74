"""Kill a speedrun at random moments, with all that it started; compare its model with that of one never killed.

Run:     python benchmarks/speedrun_kills.py TEXT --work runs/kills --kills 20
Prints:  each kill with the stage that it met, then whether weights and answers are the same. Exit code 1 if not.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHORTEST = 2.0  # seconds before a kill; the longest grows until the end is reached


def start(text: Path, folder: Path, options: list[str]) -> subprocess.Popen:
    command = [sys.executable, "-m", "tools.speedrun", "--text", str(text), "--run_dir", str(folder), *options]
    with folder.with_suffix(".log").open("a") as log:
        return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)


def stage_of(folder: Path) -> str:
    """The stage that runs: the last one that the log names."""
    titles = [line for line in folder.with_suffix(".log").read_text().splitlines() if line.startswith("stage ")]
    return titles[-1].partition(", ")[2].partition(":")[0] if titles else "before the first"


def finish(text: Path, folder: Path, options: list[str]) -> None:
    if start(text, folder, options).wait():
        sys.exit(f"a speedrun failed: {folder.with_suffix('.log')}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--longest", type=float, default=40.0, help="seconds before a kill, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--depth", type=int, default=1)
    parser.add_argument("--most_steps", type=int, default=8)
    given = parser.parse_args()
    options = ["--depth", str(given.depth), "--most_steps", str(given.most_steps)]
    whole, killed = (given.work.resolve() / name for name in ("whole", "killed"))
    given.work.mkdir(parents=True, exist_ok=True)
    text = given.text.resolve()
    finish(text, whole, options)
    source, met = random.Random(given.seed), Counter()
    while met.total() < given.kills:
        child, wait = start(text, killed, options), source.uniform(SHORTEST, given.longest)
        try:
            child.wait(wait)
            print("the speedrun ended before all kills: give more --most_steps", flush=True)
            break
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            time.sleep(0.2)
        stage = stage_of(killed)
        met[stage] += 1
        print(f"kill {met.total():2} after {wait:5.1f} s: {stage}", flush=True)
    finish(text, killed, options)
    names = ("base/model.safetensors", "model/model.safetensors", "tokenizer/tokenizer.json")
    different = [name for name in names if (whole / name).read_bytes() != (killed / name).read_bytes()]
    print(f"{met.total()} kills: {', '.join(f'{stage} {count}' for stage, count in met.items())}")
    print("different: " + ", ".join(different) if different else "the same weights and tokenizer, bit for bit")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
