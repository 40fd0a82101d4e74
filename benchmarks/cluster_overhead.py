"""What python -m cluster costs, on a pretended cluster of 2 hosts x 4 chips.

Run:     python benchmarks/cluster_overhead.py [--only overhead,faults]
Prints:  seconds from the command to the first training step and per step, beside plain python script.py;
         seconds until a run that was killed is placed again, and until its next checkpoint.
Real nodes of Ray on this machine; virtual devices of the CPU.
"""

import argparse
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "cluster" / "tests"))

from ray_nodes import ROOT, Nodes  # the same pretended cluster as in the tests
from run_files import read_lines, saved_steps

TRAIN = ["transformer_tpu.py", "--num_steps=80", "--warmup_steps=1", "--eval_batches=1", "--global_batch_size=8"]
TRAIN += ["--log_every=1", "--save_every=100"]


def timed(command: list[str], run_dir: Path, environment: dict[str, str]) -> tuple[float, float, float]:
    """Seconds to the first step's line, milliseconds a step (median of the last half), seconds in all."""
    began = time.monotonic()
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    first, said = 0.0, ""
    for line in process.stdout:
        said += line
        if not first and re.match(r"\s*step\s+1\b", line):
            first = time.monotonic() - began
    assert process.wait() == 0 and first, said
    steps = [line["step_seconds"] for line in read_lines(run_dir) if line["kind"] == "train"]
    return first, 1000 * statistics.median(steps[len(steps) // 2 :]), time.monotonic() - began


def overhead(nodes: Nodes, folder: Path, repeats: int) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    kept |= {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "2"}
    shared = nodes.environment | {"RAY_ADDRESS": nodes.address}
    ways = {
        "python script.py": ([sys.executable, *TRAIN], kept),
        "python -m cluster run, alone": (
            nodes.command("run", TRAIN[0], "--chips=2", "--no_check", "--", *TRAIN[1:]),
            kept,
        ),
        "python -m cluster run, shared": (
            nodes.command("run", TRAIN[0], "--chips=2", "--no_check", f"--storage={folder}", "--", *TRAIN[1:]),
            shared,
        ),
    }
    print("| way | first step after, s | a step, ms | in all, s |\n|---|---|---|---|")
    for number, (name, (command, environment)) in enumerate(ways.items()):
        found = []
        for repeat in range(repeats):
            run_dir = folder / f"{number}_{repeat}"
            found.append(timed([*command, "--run_dir", str(run_dir)], run_dir, environment))
        first, step, whole = (statistics.median(column) for column in zip(*found, strict=True))
        print(f"| `{name}` | {first:.1f} | {step:.1f} | {whole:.1f} |", flush=True)


def faults(nodes: Nodes, folder: Path) -> None:
    """kill -9 in training, of each thing that can die."""
    words = ["transformer_tpu.py", "--num_steps=100", "--warmup_steps=1", "--eval_batches=1", "--save_every=2"]
    options = ["--name", "killed", "--chips", 2, "--storage", folder, "--no_check", "--retries", 9, "--detach"]
    assert nodes.run("run", words[0], *options, "--", *words[1:], "--global_batch_size=8").returncode == 0

    def step() -> int:
        return max(saved_steps(folder / "killed"), default=0)

    def starts() -> int:
        return sum(e["what"] == "starts" and e["name"] == "killed" for e in nodes.state()["events"])

    def pids(text: str) -> list[tuple[str, int]]:
        hosts = [host for host in ("a", "b") if host in nodes.processes]
        return [(host, pid) for host in hosts for pid, args in nodes.children(host).items() if text in args]

    nodes.wait_for(lambda: step() >= 2)
    print("| killed | placed again after, s | next checkpoint after, s |\n|---|---|---|")
    for what in ("script", "worker", "host"):
        before, had = step(), starts()
        host = pids("tpu_cluster_killed_")[0][0]
        if what == "host":
            nodes.kill(host)
        else:
            text = "--run_dir" if what == "script" else "HostProcess"
            os.kill([pid for where, pid in pids(text) if where == host][-1], signal.SIGKILL)
        began = time.monotonic()
        nodes.wait_for(lambda had=had: starts() > had)
        placed = time.monotonic() - began
        nodes.wait_for(lambda before=before: step() > before)
        print(f"| {what} | {placed:.1f} | {time.monotonic() - began:.1f} |", flush=True)
    nodes.run("stop", "killed")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="overhead,faults")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="cluster_"))
    nodes = Nodes()
    try:
        nodes.add_all({"a": dict(chips=4), "b": dict(chips=4)})
        for name in arguments.only.split(","):
            if name == "overhead":
                overhead(nodes, folder / "overhead", arguments.repeats)
            elif name == "faults":
                faults(nodes, folder / "faults")
            else:
                parser.error(f"--only {name}: expected overhead or faults")
    finally:
        nodes.close()
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
