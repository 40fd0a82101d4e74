"""Muon beside AdamW alone, in the pre-training of a speedrun: the same tokens, bits per byte of the held-out text.

Run:     python benchmarks/speedrun_optimizers.py TEXT --work runs/optimizers --depth 2
Prints:  each run, then a table. First the rate of each optimizer is chosen, on a seed of its own: the dial's, then
         twice and four times as much, as long as that is better; where more is worse a half and a quarter. Then come
         the seeds, at the rate that was best. --rates gives one of each, and nothing is tried.

The commands are those that tools.speedrun prints for pre-training, without samples, and evaluated at the end alone.
--most_steps makes both shorter, in the same way. A run that has ended is not repeated.
"""

import argparse
import json
import sys
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "tests"))
from processes import run  # noqa: E402

from tools.speedrun import CHAT_BYTES  # noqa: E402
from tools.speedrunning.dial import Plan, bytes_of, make_plan  # noqa: E402
from tools.speedrunning.one_page import bits_per_byte, tokens_per_byte  # noqa: E402
from tools.speedrunning.stages import stages_of  # noqa: E402
from tpu_utils.base.files import read_json, write_atomically  # noqa: E402

OPTIMIZERS = ("muon", "adamw")
SEED_OF_RATES = 3


def finished(*arguments: str) -> None:
    done = run(*arguments, timeout=86400)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)


class Comparison:
    """Runs of one plan in one folder."""

    def __init__(self, text: Path, work: Path, plan: Plan):
        self.text, self.work, self.plan = text, work, plan
        write_atomically(work / "config.json", json.dumps(plan.model).encode())
        for stage in self.stages("muon", 0):
            if stage.name in ("tokenizer", "shards") and not (work / f"{stage.name}.done").exists():
                finished(*stage.command)
                (work / f"{stage.name}.done").touch()
        self.share = tokens_per_byte(work, text, plan)

    def stages(self, optimizer: str, seed: int) -> list:
        return stages_of(self.plan, self.text, None, self.work, optimizer, seed, [], [])

    def bits(self, optimizer: str, rate: float, seed: int) -> float:
        """Bits per byte of the held-out text at the end of pre-training."""
        run_dir = self.work / f"{optimizer}_{rate:.3g}_{seed}"
        if not (run_dir / "summary.json").exists():
            (stage,) = [stage for stage in self.stages(optimizer, seed) if stage.name == "pretrain"]
            left_out = ("--sample", "--eval_every", "--save_every", "--learning_rate", "--run_dir")
            options = [word for word in stage.command[1:] if word.startswith("--") and not word.startswith(left_out)]
            options += [f"--learning_rate={rate:.3g}", f"--eval_every={self.plan.steps}"]
            options += [f"--save_every={self.plan.steps}", "--no_tensorboard", f"--run_dir={run_dir}"]
            finished(stage.command[0], *options)
        loss = read_json(run_dir / "summary.json", "the end of a run")["validation_loss"]
        found = bits_per_byte(loss, self.share)
        print(f"{optimizer}, rate {rate:.3g}, seed {seed}: {found:.4f} bits per byte", flush=True)
        return found

    def best_rate(self, optimizer: str) -> tuple[float, dict[float, float]]:
        """(the best, bits of each that was tried)."""
        first = self.plan.learning_rate
        tried = {first: self.bits(optimizer, first, SEED_OF_RATES)}
        for factors in ((2, 4), (0.5, 0.25)):
            for factor in factors if min(tried, key=tried.get) == first else ():
                rate, best = first * factor, min(tried.values())
                tried[rate] = self.bits(optimizer, rate, SEED_OF_RATES)
                if tried[rate] > best:
                    break
        return min(tried, key=tried.get), tried


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--work", type=Path, required=True, help="a folder of its own")
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--most_steps", type=int, default=0)
    parser.add_argument("--rates", type=float, nargs=2, metavar=("MUON", "ADAMW"), help="for all seeds; none is chosen")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    given = parser.parse_args()
    size, work = bytes_of([given.text]), given.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    plan = make_plan(given.depth, size, min(size // 4, CHAT_BYTES), given.most_steps)
    comparison = Comparison(given.text.resolve(), work, plan)
    if given.rates:
        rates = {name: (rate, {}) for name, rate in zip(OPTIMIZERS, given.rates, strict=True)}
    else:
        rates = {name: comparison.best_rate(name) for name in OPTIMIZERS}
    found = {name: [] for name in OPTIMIZERS}
    for seed in given.seeds:  # both optimizers in turn: a comparison that is stopped has pairs
        for name in OPTIMIZERS:
            found[name].append(comparison.bits(name, rates[name][0], seed))
    print(f"\n{plan.parameters:,} parameters, {plan.steps} steps of {plan.rows} x {plan.sequence_length} tokens")
    print("| | rate, of those tried | bits per byte, each seed | mean |\n|---|---|---|---|")
    for name, bits in found.items():
        best, tried = rates[name]
        of_rates = ", ".join(f"{rate:.3g}: {value:.3f}" for rate, value in tried.items()) or "given"
        print(f"| {name} | {best:.3g} ({of_rates}) | {', '.join(f'{b:.4f}' for b in bits)} | {mean(bits):.4f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
