"""What python -m cluster costs, and eight runs of three users on a pretended cluster of 2 hosts x 4 chips.

Run:     python benchmarks/cluster_overhead.py [--only overhead,timeline,faults] [--picture cluster/timeline.png]
Prints:  seconds from the command to the first training step and per step, beside plain python script.py; the timeline
         of eight runs; seconds until a run that was killed is placed again, and until its next checkpoint.
Real nodes of Ray on this machine; virtual devices of the CPU.
"""

import argparse
import json
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

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "cluster" / "tests"))

from ray_nodes import ROOT, Nodes  # the same pretended cluster as in the tests

TRAIN = ["transformer_tpu.py", "--num_steps=80", "--warmup_steps=1", "--eval_batches=1", "--global_batch_size=8"]
TRAIN += ["--log_every=1", "--save_every=100"]
MNIST = ["--num_epochs=4", "--warmup_steps=2", "--device=cpu"]
LANGUAGE = ["--num_steps=30", "--warmup_steps=1", "--eval_batches=1", "--global_batch_size=8"]
RUNS = [  # user, chips, script and options, in the order of submission
    ("alice", 4, ["distributed_mnist_tpu.py", *MNIST]),
    ("alice", 2, ["transformer_tpu.py", *LANGUAGE]),
    ("bob", 1, ["simple_mnist_tpu.py", *MNIST]),
    ("bob", 4, ["distributed_mnist_tpu.py", *MNIST]),
    ("carol", 2, ["transformer_tpu.py", *LANGUAGE]),
    ("carol", 1, ["simple_mnist_tpu.py", *MNIST]),
    ("alice", 1, ["simple_mnist_tpu.py", *MNIST]),
    ("carol", 4, ["transformer_tpu.py", *LANGUAGE]),
]
COLOURS = {"alice": "#4c72b0", "bob": "#dd8452", "carol": "#55a868"}


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
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step_seconds"] for line in lines if line["kind"] == "train"]
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


def timeline(nodes: Nodes, folder: Path, picture: Path) -> None:
    clients = []
    for number, (user, chips, words) in enumerate(RUNS):
        options = ["--name", f"run{number + 1}", "--user", user, "--chips", chips, "--storage", folder, "--no_check"]
        clients.append(nodes.start("run", words[0], *options, "--detach", "--", *words[1:]))
    for client in clients:
        _, said = client.communicate()
        assert client.returncode == 0, said
    nodes.wait_for(lambda: len(ends(nodes)) == len(RUNS), seconds=1200)
    events = [event for event in nodes.state()["events"] if event["name"].startswith("run")]
    rows, zero = {}, events[0]["time"]
    for event in events:
        row = rows.setdefault(event["name"], {"user": event["user"]})
        row[event["what"]] = event["time"] - zero
        if event["what"] == "starts":
            row["places"] = event["places"]
    print("| run | user | chips | waited, s | ran, s |\n|---|---|---|---|---|")
    for name, row in rows.items():
        chips = sum(len(chips) for _, chips in row["places"])
        waited, ran = row["starts"] - row["waits"], row["ends"] - row["starts"]
        print(f"| {name} | {row['user']} | {chips} | {waited:.1f} | {ran:.1f} |")
    busy = sum((row["ends"] - row["starts"]) * sum(len(c) for _, c in row["places"]) for row in rows.values())
    print(f"chips in use {100 * busy / (8 * max(row['ends'] for row in rows.values())):.0f} % of {8} chips' time")
    draw(rows, picture)


def ends(nodes: Nodes) -> list[dict]:
    return [e for e in nodes.state()["events"] if e["what"] == "ends" and e["name"].startswith("run")]


def draw(rows: dict[str, dict], picture: Path) -> None:
    """Above who has which chip, below how long each run waited and ran."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    nodes = sorted({node for row in rows.values() for node, _ in row["places"]})
    for name, row in rows.items():
        width = row["ends"] - row["starts"]
        for node, chips in row["places"]:
            bottom = 4 * nodes.index(node) + min(chips)
            box = dict(color=COLOURS[row["user"]], edgecolor="white", linewidth=1.5, align="edge")
            above.barh(bottom, width, height=len(chips), left=row["starts"], **box)
            middle = row["starts"] + width / 2, bottom + len(chips) / 2
            above.text(*middle, name, ha="center", va="center", color="white", fontsize=8)
    above.set(yticks=[i + 0.5 for i in range(8)], yticklabels=[f"host {i // 4} chip {i % 4}" for i in range(8)])
    above.set_ylim(8, 0)
    above.axhline(4, color="black", linewidth=0.8)
    for place, (name, row) in enumerate(sorted(rows.items())):
        below.barh(place, row["starts"] - row["waits"], left=row["waits"], color="#dddddd")
        below.barh(place, row["ends"] - row["starts"], left=row["starts"], color=COLOURS[row["user"]])
        below.text(row["waits"], place, f" {name}", va="center", fontsize=8)
    below.set(yticks=[], xlabel="seconds", ylabel="waits (grey), runs")
    below.invert_yaxis()
    handles = [above.barh(0, 0, color=colour, label=user) for user, colour in COLOURS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=8)
    above.set_title("eight runs of three users on 2 hosts x 4 virtual chips", fontsize=10)
    figure.savefig(picture, dpi=100)
    print(f"picture    {picture}")


def faults(nodes: Nodes, folder: Path) -> None:
    """kill -9 in training, of each thing that can die."""
    words = ["transformer_tpu.py", "--num_steps=100", "--warmup_steps=1", "--eval_batches=1", "--save_every=2"]
    options = ["--name", "killed", "--chips", 2, "--storage", folder, "--no_check", "--retries", 9, "--detach"]
    assert nodes.run("run", words[0], *options, "--", *words[1:], "--global_batch_size=8").returncode == 0

    def step() -> int:
        done = sorted((folder / "killed" / "checkpoints").glob("step_*/done"))
        return int(done[-1].parent.name.split("_")[1]) if done else 0

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
    parser.add_argument("--only", default="overhead,timeline,faults")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--picture", type=Path, default=ROOT / "cluster" / "timeline.png")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="cluster_"))
    nodes = Nodes()
    try:
        nodes.add_all({"a": dict(chips=4), "b": dict(chips=4)})
        for name in arguments.only.split(","):
            if name == "overhead":
                overhead(nodes, folder / "overhead", arguments.repeats)
            elif name == "timeline":
                timeline(nodes, folder / "timeline", arguments.picture)
            elif name == "faults":
                faults(nodes, folder / "faults")
            else:
                parser.error(f"--only {name}: expected overhead, timeline or faults")
    finally:
        nodes.close()
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
