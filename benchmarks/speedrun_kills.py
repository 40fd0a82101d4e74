"""Kill a speedrun in each of its stages, with all that it started; compare its models with those of one never killed.

Run:     python benchmarks/speedrun_kills.py TEXT --work runs/kills --kills 20
Prints:  each kill with the stage that it met; a table of the stages, what each took in the run that was not killed,
         and how many kills met it; then whether weights, tokenizer, shards, conversations and answers are the same.
         Exit code 1 if not, or if a stage was met by none.

Two more moments are told apart from the stages: the samples of pre-training, and the report, which the speedrun writes
after the last stage. "start" is what comes before the first stage. A kill waits until its stage runs, then for a
random part of the stage: at most half of it for the first kill of a stage, nine tenths for the others. Parts are of
CPU-seconds, because other work on the machine changes all others. With --kills above the number of stages the
trainings get what is left.
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from made_tasks import write_task

from benchmarks.children import ROOT, logged, parser_for, unequal_files
from tpu_utils.base.files import read_json

STAGES = ("tokenizer", "shards", "chats", "pretrain", "samples", "evaluate_pretrained", "base", "finetune")
STAGES += ("evaluate_finetuned", "chat", "model")
AIMS = ("start", *STAGES, "report")
"""In the order in which they are met first."""
COMPARED = ("base/*", "model/*", "tokenizer/*", "shards/*.bin", "chats/*")
"""Of shards the tokens: what lies beside them names the tokenizer's folder."""
TICKS = os.sysconf("SC_CLK_TCK")
PRINTED = ("chat", "evaluate_pretrained", "evaluate_finetuned")


class Speedrun:
    """A start of it, whose log is its own."""

    def __init__(self, folder: Path, options: list[str]):
        self.folder, self.log = folder, folder.with_suffix(".log")
        self.began_at = self.log.stat().st_size if self.log.exists() else 0
        command = [sys.executable, "-m", "tools.speedrun", "--run_dir", str(folder), *options]
        with self.log.open("a") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)

    def stage(self) -> str:
        """What it does now, of AIMS."""
        with self.log.open("rb") as log:
            log.seek(self.began_at)
            lines = log.read().decode(errors="replace").splitlines()
        titles = [line for line in lines if line.startswith("stage ") and not line.endswith(": done before")]
        if (self.folder / "stages" / f"{STAGES[-1]}.json").exists():
            return "report"
        name = titles[-1].partition(", ")[2] if titles else "start"
        return "samples" if name == "pretrain" and self.is_sampling() else name

    def is_sampling(self) -> bool:
        """Whether an evaluation has its line, and samples have not."""
        steps = {line["kind"]: line["step"] for line in logged(self.folder / "pretrained")}  # the last of each kind
        return steps.get("eval", 0) > steps.get("sample", 0)

    def cpu_seconds(self) -> float:
        """CPU time of all processes in its session, and of the children that they have waited for."""
        used = 0
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = path.read_text().rpartition(")")[2].split()
            except OSError:
                continue  # ended meanwhile
            if int(fields[3]) == self.process.pid:  # its session
                used += sum(map(int, fields[11:15]))
        return used / TICKS

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        time.sleep(0.2)


def seconds_of(run: Speedrun) -> Counter:
    """CPU-seconds of each stage of a run that goes to its end; of samples, which come several times, the most."""
    seconds, before, last = Counter(), 0.0, ""
    while run.process.poll() is None:
        time.sleep(0.02)
        now, stage = run.cpu_seconds(), run.stage()
        if stage == "samples" != last:
            samples, seconds["samples"] = seconds["samples"], 0.0
        seconds[stage] += max(0.0, now - before)
        if last == "samples" != stage:
            seconds["samples"] = max(samples, seconds["samples"])
        before, last = max(now, before), stage
    if run.process.returncode:
        sys.exit(f"a speedrun failed: {run.log}")
    return seconds


def kill_in(aim: str, part: float, seconds: Counter, folder: Path, options: list[str]) -> str:
    """What the kill met; "its end" where the run was done before. A stage that is over is not waited for."""
    run, since = Speedrun(folder, options), None
    while since is None or (run.stage() == aim and run.cpu_seconds() - since < part * seconds[aim]):
        time.sleep(0.02)
        if run.process.poll() is not None:
            return "its end"
        if since is None and AIMS.index(run.stage()) >= AIMS.index(aim):
            since = run.cpu_seconds()
    met = run.stage()
    run.kill()
    return met


def plan_of(kills: int) -> list[str]:
    """The stage of each kill, in order: each stage once, then the trainings in turn."""
    if kills < len(AIMS):
        sys.exit(f"kills is {kills}; expected {len(AIMS)} or more, one for each stage")
    more = [("pretrain", "finetune")[n % 2] for n in range(kills - len(AIMS))]
    return sorted([*AIMS, *more], key=AIMS.index)


def differences(whole: Path, killed: Path) -> list[str]:
    """Files and answers that are not the same, by name."""
    found = unequal_files(whole, killed, *COMPARED)
    for name in PRINTED:
        one, other = (read_json(folder / "stages" / f"{name}.json", "a marker") for folder in (whole, killed))
        found += [name] if without_seconds(one["printed"]) != without_seconds(other["printed"]) else []
    return found + [name for name in ("report.md", "report.png") if not (killed / name).exists()]


def without_seconds(printed: str) -> list[str]:
    return [line for line in printed.splitlines() if "second" not in line]


def main() -> int:
    parser = parser_for(__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("--work", type=Path, required=True, help="a folder of its own")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    source = random.Random(given.seed)
    plan = plan_of(given.kills)
    given.work.mkdir(parents=True, exist_ok=True)
    tasks = write_task(given.work.resolve() / "piqa", "piqa")
    options = ["--text", str(given.text.resolve()), "--tasks", f"piqa={tasks}", "--depth", "1", "--most_steps", "12"]
    whole, killed = (given.work.resolve() / name for name in ("whole", "killed"))
    if whole.exists() or killed.exists():
        sys.exit(f"{given.work} has the runs of an earlier call; expected a new folder: remove it, or choose another")
    seconds, met = seconds_of(Speedrun(whole, options)), Counter()
    for number, aim in enumerate(plan, 1):
        part = source.uniform(0.0, 0.9 if met[aim] else 0.5)
        found = kill_in(aim, part, seconds, killed, options)
        met[found] += 1
        print(f"kill {number:2}, {part * seconds[aim]:5.2f} CPU-seconds after {aim} began: met {found}", flush=True)
    seconds_of(Speedrun(killed, options))
    print("\n| stage | CPU-seconds | kills |\n|---|---|---|")
    print("\n".join(f"| {aim} | {seconds[aim]:.1f} | {met[aim]} |" for aim in AIMS))
    different, missed = differences(whole, killed), [aim for aim in AIMS if not met[aim]]
    print(f"\n{met.total()} kills; " + (f"none met {', '.join(missed)}" if missed else "each stage was met"))
    print("different: " + ", ".join(different) if different else "the same files and answers, bit for bit")
    return 1 if different or missed else 0


if __name__ == "__main__":
    sys.exit(main())
