"""Copies of a script with other models, losses and labels, trained beside plain PyTorch, killed and resumed.

Run:     python benchmarks/copies.py                        # all kinds, one device of torch_xla
         python benchmarks/copies.py --devices 4            # copies of distributed_mnist_tpu.py instead
         python benchmarks/copies.py --replicas 4           # of ddp_mnist_tpu.py, on one and, as one program, on four
         python benchmarks/copies.py --python VENV/bin/python   # a Python without torch_xla: torch.compile
Writes:  docs/results/copies.csv, in place of the rows of the same setting and kinds; refused: with the message

A kind is an entry of RIGHT or MEANT in tests/scripts/test_wrong_copies.py. Each is written to a folder as a script of
its own and run as users run it: 20 steps, and two evaluations of 45 examples in batches of 16. Plain PyTorch runs the
same model and step eagerly on the CPU from the same first weights, and evaluates the 45 in one batch. A second run is
killed (kill -9) in step 13 and goes on from its checkpoint of step 9: its metrics must be those of the first to the
last digit.
"""

import contextlib
import csv
import json
import os
import re
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "scripts")]
os.environ["OMP_NUM_THREADS"] = "1"  # of such small models more threads wait more than they work
import numpy as np  # noqa: E402
import torch  # noqa: E402
from processes import run  # noqa: E402
from safetensors.torch import load_model  # noqa: E402
from test_wrong_copies import COUNTS, MEANT, RIGHT, TRAINED, dataset_of  # noqa: E402

from benchmarks.children import as_csv, logged, parser_for  # noqa: E402
from images.arrays import ImageDataset, TrainBatches, sent  # noqa: E402
from tpu_utils.base.writing import write_atomically  # noqa: E402
from tpu_utils.options.parsing import parse_command_line  # noqa: E402

TABLE = ROOT / "docs" / "results" / "copies.csv"
COLUMNS = ("setting", "kind", "of a loss", "of an evaluation", "killed and resumed")
"""The largest difference of the numbers, relative to the expected one."""
OPTIONS = "--device=cpu --num_epochs=2 --max_shift=0 --no_tensorboard --eval_batch_size=16 --global_batch_size=16 \
--log_every=1 --save_every=9 --keep_checkpoints=9 --warmup_steps=1 --weight_decay=0 --shard_parameters".split()
ADAM = "rates, decay and betas of groups"
"""The one kind with AdamW: it makes differences of 1e-7 in a gradient near 0 a different sign of a first step."""
KINDS = RIGHT | MEANT
DRAWS = ("dropout", "autoencoder whose code is drawn", "diffusion", "stochastic depth", "two passes that agree")
DRAWS += ("mixup by a Beta distribution", "an energy sampled by Langevin")
"""Kinds whose numbers come from the device's own generator: plain PyTorch draws others."""
OPTIMIZER = "        optimizer = make_optimizer(config, model.parameters())\n"
TRACKED = "optimizer=optimizer, metrics=metrics)"
IN_A_RUN = [
    ("        dataset = load_dataset(config)\n", '        dataset = load_arrays("mine", config.data_dir)\n'),
    ("from images.arrays import ", "from images.array_files import load_arrays\nfrom images.arrays import "),
    (
        "        model.to(run.device)\n",
        '        save_model(model, f"{config.data_dir}/first.safetensors")\n        model.to(run.device)\n',
    ),
    ("import sys\n", "import os\nimport sys\n\nfrom safetensors.torch import save_model\n"),
    (
        "            if run.log_due(step):",
        '            if step == 13 and "KILLED_IN_13" in os.environ:\n'
        '                while not os.path.exists(f"{config.run_dir}/checkpoints/step_00000009/done"):\n'
        "                    pass  # it is written behind the steps\n"
        "                os.kill(os.getpid(), 9)\n"
        "            if run.log_due(step):",
    ),
]
CRITIC = [
    (
        OPTIMIZER,
        f"{OPTIMIZER}        critic = more_of_the_step(config)[0].to(run.device)\n"
        "        of_critic = make_optimizer(config, critic.parameters())\n",
    ),
    ("train_step(replica, optimizer", "train_step(replica, critic, of_critic, optimizer"),
    (TRACKED, f"critic=critic, of_critic=of_critic, {TRACKED}"),
]


AS_ONE_REPLICA = [  # ddp_mnist_tpu.py in the words of simple_mnist_tpu.py, which the edits are of
    ("def train_step(replica, ", "def train_step(model, "),
    ("        logits = replica(images)\n", "        logits = model(images)\n"),
    ("gradient_norm(replica.parameters())", "gradient_norm(model.parameters())"),
    ("    loss.backward()  # DDP's hooks average the gradients over the replicas\n", "    loss.backward()\n"),
]
MEAN_OF_LABELS = """\
    losses = F.cross_entropy(logits.float(), labels.long(), reduction="none")
    # over the labels of a replica on average: its own count would weigh them otherwise where some are ignored
    loss = losses.sum() / mean_over_replicas(labels_that_count(labels).sum())
"""
OVER_REPLICAS = f"        return over_replicas({COUNTS.strip().removeprefix('return ')})\n"


def copy_of(kind: str, script: Path, in_a_run: bool) -> str:
    """The text of a script with the edits of a kind."""
    text, edits = script.read_text(), [*KINDS[kind][1]]
    if script.name.startswith("ddp"):
        changed = {old for old, _ in edits}
        first = AS_ONE_REPLICA + [(MEAN_OF_LABELS, TRAINED)] * (TRAINED in changed)
        first += [(OVER_REPLICAS, COUNTS)] * any(COUNTS in old for old in changed)
        edits = [*first, *edits]
    for old, new in edits + (IN_A_RUN if in_a_run else []):
        assert old in text, (kind, old)
        text = text.replace(old, new)
    if in_a_run and "optimizer_of" in text:
        text = text.replace("make_optimizer(config, model.parameters())", "optimizer_of(config, model)")
    if in_a_run and "more_of_the_step" in text:
        for old, new in CRITIC:  # train() of one script has no replica
            text = text.replace(old, new)
    return text


def write_copy(folder: Path, kind: str, script: Path) -> ImageDataset:
    """mine.py and its data in folder; what is trained on."""
    folder.mkdir()
    (folder / "mine.py").write_text(copy_of(kind, script, True))
    train, test = dataset_of(KINDS[kind][0], 165), dataset_of(KINDS[kind][0], 45)
    dataset = ImageDataset("mine", train.train_images, train.train_labels, test.train_images, test.train_labels)
    for field in ("train_images", "train_labels", "test_images", "test_labels"):
        np.save(folder / f"{field}.npy", getattr(dataset, field))
    return dataset


def rate_options(kind: str) -> list[str]:
    return ["--learning_rate=3e-3"] if kind == ADAM else ["--optimizer=sgd", "--learning_rate=0.02"]


def run_copy(kind: str, folder: Path, arguments, *more: str, **environment: str) -> subprocess.CompletedProcess:
    options = [option for option in OPTIONS if arguments.devices > 1 or "shard" not in option]
    options += rate_options(kind)
    options += [f"--num_virtual_devices={arguments.devices}"] * (arguments.devices > 1)
    command = [folder / "mine.py", f"--data_dir={folder}", *options, *more]
    if arguments.python is None:
        return run(*command, folder=folder, PYTHONPATH=ROOT, **environment)
    variables = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    return subprocess.run([arguments.python, *command], env=variables, capture_output=True, text=True, cwd=folder)


def metrics_of(run_dir: Path, kind: str) -> dict[int, dict[str, float]]:
    """{step: fields} of metrics.jsonl; fields that tell the time are left out. kind: train or eval."""
    fields = {line["step"]: line for line in logged(run_dir) if line["kind"] == kind}
    timed = ("time", "seconds", "per_second", "step_seconds", "mfu", "per_step")  # uploads are counted from step 2 on
    return {
        step: {name: value for name, value in line.items() if isinstance(value, float) and not name.endswith(timed)}
        for step, line in fields.items()
    }


def in_plain_pytorch(folder: Path, kind: str, dataset: ImageDataset) -> tuple[list[float], list[dict[str, float]]]:
    """Losses of the steps, and the evaluations after each epoch, of the step as it is written."""
    copied = types.ModuleType("copied")
    exec(compile(copy_of(kind, ROOT / "simple_mnist_tpu.py", False), "copied", "exec"), vars(copied))
    options = [option for option in OPTIONS if "shard" not in option] + rate_options(kind)
    config = parse_command_line(copied.MnistConfig, "", options)
    copied.train_step.watch = copied.eval_step.watch = SimpleNamespace(is_plain=True)
    torch.manual_seed(config.seed)
    batches, model = TrainBatches(dataset, config), copied.build_model(config, dataset)
    load_model(model, folder / "first.safetensors")
    more = copied.more_of_the_step(config) if "more_of_the_step" in vars(copied) else ()
    if "optimizer_of" in vars(copied):
        optimizer = copied.optimizer_of(config, model)
    else:
        optimizer = copied.make_optimizer(config, model.parameters())
    rates = copied.learning_rates(config, batches.num_steps)
    metrics = copied.DeviceMetrics(["loss", "gradient_norm"], batches.num_steps, torch.device("cpu"))
    images, labels = map(torch.from_numpy, (dataset.test_images, sent(dataset.test_labels, labels=True)))
    of_run = SimpleNamespace(config=config, phase=lambda _: contextlib.nullcontext())
    evaluations = []
    for index in range(batches.num_steps):
        batch = [torch.from_numpy(array) for array in batches.batch(index)]
        copied.train_step(model, *more, optimizer, rates, metrics, *batch, config)
        if (index + 1) % batches.steps_per_epoch == 0:
            evaluations.append(copied.evaluate(model, [(images, labels, torch.ones(len(labels)))], of_run))
    return metrics.read(0, batches.num_steps)["loss"].tolist(), evaluations


def refusal(stderr: str) -> str:
    """The last message, without the folder of the copy."""
    said = stderr.strip().splitlines()[-1]
    return "refused: " + re.sub(r"^[\w.]*[Ee]rror: |/[^ ]*/", "", said)


def on_replicas(kind: str, folder: Path, num_replicas: int) -> list[float] | str:
    """Losses of the steps of a copy of ddp_mnist_tpu.py on several replicas, which have the same weights at the end;
    or why it is refused."""
    program, steps = ROOT / "tests" / "distributed_replicas.py", 2 * (165 // 16)
    options = [option for option in OPTIONS if "shard" not in option] + rate_options(kind)
    trace = ("trace", folder, num_replicas, steps, folder / "mine.py", f"--data_dir={folder}", *options)
    for arguments in (trace, ("run", folder)):
        done = run(program, *arguments, folder=folder, PYTHONPATH=ROOT)
        if done.returncode:
            return refusal(done.stderr)
    found = json.loads((folder / "curve.json").read_text())
    assert found["weights_apart"] == 0 and all(losses == found["losses"][0] for losses in found["losses"]), found
    return found["losses"][0]


def difference(found: list[float], expected: list[float]) -> float:
    """The largest one, relative to the expected value or to 1e-3."""
    assert len(found) == len(expected), (found, expected)
    return max(abs(one - other) / max(abs(other), 1e-3) for one, other in zip(found, expected, strict=True))


def tried(kind: str, folder: Path, script: Path, arguments) -> list[tuple[str, str, str]]:
    """What the table says of a copy: differences of its losses and evaluations, and of a run that is killed. With
    --replicas first of one replica, then of as many."""
    dataset = write_copy(folder, kind, script)
    count = 1 + (arguments.replicas > 1)
    done = run_copy(kind, folder, arguments, "--run_dir=whole")
    if done.returncode:
        return [(refusal(done.stderr), "", "")] * count
    killed = run_copy(kind, folder, arguments, "--run_dir=killed", KILLED_IN_13="1").returncode
    resumed = run_copy(kind, folder, arguments, "--run_dir=killed", "--resume=must")
    same = all(metrics_of(folder / "whole", k) == metrics_of(folder / "killed", k) for k in ("train", "eval"))
    is_same = killed == -9 and resumed.returncode == 0 and same
    ended = "identical" if is_same else f"DIFFERENT {resumed.stderr[-300:]}"
    traced = on_replicas(kind, folder, arguments.replicas) if count > 1 else []
    if kind in DRAWS:
        return [("draws", "draws", ended), ("draws" if isinstance(traced, list) else traced, "", "")][:count]
    losses, evaluations = in_plain_pytorch(folder, kind, dataset)
    steps = metrics_of(folder / "whole", "train").values()
    found = metrics_of(folder / "whole", "eval").values()
    pairs = [(one[name], other[name]) for one, other in zip(found, evaluations, strict=True) for name in other]
    apart = difference([step["loss"] for step in steps], losses), difference(*zip(*pairs, strict=True))
    rows = [(*(f"{one:.1e}" for one in apart), ended)]
    if isinstance(traced, list) and count > 1:
        said = ", and said to depend on how many there are" * ("the run depends on how many" in done.stdout)
        traced = f"{difference(traced, losses):.1e}{said}"
    return [*rows, (traced, "", "")][:count]


def write_rows(rows: dict[tuple[str, str], tuple[str, str, str]]) -> None:
    """In place of those of the same setting and kind."""
    with contextlib.suppress(FileNotFoundError), TABLE.open(newline="") as file:
        _, *before = csv.reader(file)
        rows = {(setting, kind): tuple(rest) for setting, kind, *rest in before if kind in KINDS} | rows
    kinds = [*KINDS]
    order = sorted(rows, key=lambda one: (one[0], kinds.index(one[1])))
    write_atomically(TABLE, as_csv([COLUMNS, *((*key, *rows[key]) for key in order)]).encode())


def main() -> int:
    parser = parser_for(__doc__)
    parser.add_argument("--only", nargs="*", default=list(KINDS), choices=list(KINDS), metavar="KIND")
    parser.add_argument("--devices", type=int, default=1, help="Virtual devices; more than one: by SPMD.")
    parser.add_argument("--replicas", type=int, default=0, help="By DDP: one replica, then so many as one program.")
    parser.add_argument("--python", help="Python that runs the copies. Default: this one.")
    arguments = parser.parse_args()
    script, setting = "simple_mnist_tpu.py", "torch_xla, one device"
    if arguments.python:
        setting = "torch.compile, CPU"
    if arguments.devices > 1:
        script, setting = "distributed_mnist_tpu.py", f"SPMD, {arguments.devices} devices"
    elif arguments.replicas:
        script, setting = "ddp_mnist_tpu.py", "DDP, 1 replica"
    failed = 0
    with tempfile.TemporaryDirectory() as base:
        for number, kind in enumerate(arguments.only):
            rows = tried(kind, Path(base, str(number)), ROOT / script, arguments)
            settings = [setting, f"DDP, {arguments.replicas} replicas"]
            for where, row in zip(settings, rows, strict=False):
                failed += "DIFFERENT" in row[2]
                print(f"{where}: {kind}: {', '.join(filter(None, row))}", flush=True)
                write_rows({(where, kind): row})
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
