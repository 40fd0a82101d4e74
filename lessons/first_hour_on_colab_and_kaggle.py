# %% [markdown]
# # The first hour on Colab and Kaggle
# Find the chip, install what matches it, ask the doctor, train, keep the run where it outlives the session, and go on
# after the session was taken away. On Colab choose a TPU under *Runtime, Change runtime type*; on Kaggle choose *TPU VM
# v5e-8*, with internet, under *Session options*. Then run the cells from top to bottom.
#
# **This has not run there.** Tests run these cells in pretended surroundings: the variables of each place, its folders,
# a Drive. What you see below was printed on a machine without TPU, where the same cells train on the CPU.

# %%
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

GIT_URL = "GIT_URL"  # the address of this repository

if os.environ.get("KAGGLE_KERNEL_RUN_TYPE"):
    WHERE, WORK, KEPT = "Kaggle", Path("/tmp/first_hour"), Path("/kaggle/working/runs")  # Save Version keeps this
elif os.environ.get("COLAB_RELEASE_TAG"):
    WHERE, WORK, KEPT = "Colab", Path("/content/first_hour"), Path("/content/drive/MyDrive/runs")
else:
    WORK = Path(tempfile.mkdtemp())
    WHERE, KEPT = "a machine of your own", WORK / "kept"
CHIPS = [*Path("/dev").glob("accel*"), *Path("/dev/vfio").glob("[0-9]*")]
DEVICE = "tpu" if CHIPS else "cpu"
print(f"on {WHERE}: {len(CHIPS)} TPU chips, so --device {DEVICE}; Python {sys.version_info[0]}.{sys.version_info[1]}")


def sh(*words, **options):
    """Runs a command, and stops here if it fails."""
    print("$", " ".join(map(str, words)))
    subprocess.run(list(map(str, words)), check=True, **options)


# %% [markdown]
# ## Install what matches
# torch, torch_xla, libtpu and jax must be of one set. What is preinstalled there is of another, or of none, so the
# project gets an environment of its own beside it, and the notebook's own Python imports none of them: **a chip belongs
# to one process**. On Colab libtpu 0.0.21 has no package for Python 3.13, and 0.0.21.1 takes its place.

# %%
if WHERE == "a machine of your own":
    CHECKOUT, PYTHON = Path.cwd() if Path("tpu_utils").is_dir() else Path.cwd().parent, sys.executable
else:
    CHECKOUT = WORK / "tpu-examples"
    PYTHON = CHECKOUT / ".venv" / "bin" / "python"
    if not CHECKOUT.exists():
        sh("git", "clone", "--quiet", GIT_URL, CHECKOUT)
    if not PYTHON.exists():
        sh(sys.executable, "-m", "pip", "install", "--quiet", "uv")
        sh(sys.executable, "-m", "uv", "venv", "--quiet", CHECKOUT / ".venv")
    override = WORK / "override.txt"
    override.write_text("libtpu==0.0.21.1\n" if sys.version_info >= (3, 13) else "")
    install = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", PYTHON, "--override", override]
    sh(*install, "-r", CHECKOUT / "requirements.txt")
print("ready: the project and its environment")

# %% [markdown]
# ## Ask the doctor
# It looks at versions, chips, who holds them, memory, and does a small piece of work on the device. `fail` lines say
# what to do; `warn` may stay.

# %%
doctor = subprocess.run(
    [str(PYTHON), "setup_tpu.py", "--device", DEVICE, "--json"], cwd=CHECKOUT, capture_output=True, text=True
)
report = json.loads(doctor.stdout)
for check in report["checks"]:
    if check["status"] == "fail":
        print(check["status"], check["name"], check["finding"], "\n     fix:", check["fix"])
print("the doctor says:", "in order" if report["ok"] else "not in order: mend what failed, then go on")

# %% [markdown]
# ## Keep the run where it outlives the session
# The session's disk goes with the session. A run needs locks and renames, which a mounted Drive does not promise, so
# the run stays on the disk, and whole files are copied: checkpoints before the log, so that the copy's log reaches as
# far as its checkpoints. A checkpoint that was copied by half has no file `done` and is not used.

# %%
RUNS = WORK / "runs"
RUNS.mkdir(parents=True, exist_ok=True)
if WHERE == "Colab":
    from google.colab import drive

    drive.mount("/content/drive")
for found in sorted(Path("/kaggle/input").glob("*/runs")) if WHERE == "Kaggle" else []:
    shutil.copytree(found, KEPT, dirs_exist_ok=True)  # the output of an earlier notebook, added as input
KEPT.mkdir(parents=True, exist_ok=True)


def copy_file(path, target):
    """Whole or not at all: a copy under another name is renamed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f"{target.name}.copying")
    shutil.copyfile(path, aside)
    aside.replace(target)


def keep(name):
    """Copies what is new of a run: finished checkpoints, `done` last, and then its other files."""
    run = RUNS / name
    for done in sorted(run.glob("checkpoints/*/done")):
        target = KEPT / done.parent.relative_to(RUNS)
        if not (target / "done").exists():
            try:
                for path in sorted(done.parent.iterdir(), key=lambda path: path.name == "done"):
                    copy_file(path, target / path.name)
            except FileNotFoundError:
                pass  # the run keeps few checkpoints, and has deleted this one meanwhile
    for path in run.iterdir():
        if path.is_file() and path.name != "lock":
            copy_file(path, KEPT / name / path.name)


def bring_back(name):
    """Copies a kept run to the disk of this session, if there is one and none here."""
    if (KEPT / name).exists() and not (RUNS / name).exists():
        shutil.copytree(KEPT / name, RUNS / name)
        steps = sorted(path.parent.name for path in (RUNS / name).glob("checkpoints/*/done"))
        print(f"brought back {name}: its newest checkpoint is {steps[-1] if steps else 'none'}")


# %% [markdown]
# ## Train
# On a TPU: MNIST, all chips of the host. Without: the 1,797 digits that need no download. `--resume auto` begins anew
# or goes on; it is the same command.

# %%
SCRIPT = "distributed_mnist_tpu.py" if WHERE == "Kaggle" else "simple_mnist_tpu.py"
OPTIONS = ["--preset", "production", "--download"] if CHIPS else ["--num_epochs", "6", "--save_every", "22"]


def train(name, seconds=60, until=None):
    """Trains, and keeps what is new every so many seconds. until: a step whose checkpoint ends the session: kill -9."""
    bring_back(name)
    command = [PYTHON, SCRIPT, *OPTIONS, "--device", DEVICE, "--no_tensorboard", "--run_dir", RUNS / name]
    print("$ python", *command[1:-1], name, "--resume auto")
    with (WORK / "log.txt").open("w") as log:
        command = [*map(str, command), "--resume", "auto"]
        process = subprocess.Popen(command, cwd=CHECKOUT, stdout=log, stderr=subprocess.STDOUT)
        last = time.monotonic()
        while process.poll() is None:
            time.sleep(0.1)
            if until and (RUNS / name / "checkpoints" / f"step_{until:08}" / "done").exists():
                keep(name)
                process.send_signal(signal.SIGKILL)
            elif time.monotonic() - last > seconds and (RUNS / name).exists():
                keep(name)
                last = time.monotonic()
    if process.wait() not in (0, -signal.SIGKILL):
        raise RuntimeError((WORK / "log.txt").read_text())
    keep(name)
    return (WORK / "log.txt").read_text()


log = train("first")
print(*[line for line in log.splitlines() if line.startswith(("device", "resumed", "result", "graphs"))], sep="\n")

# %% [markdown]
# ## The session is taken away
# It happens without a word, so here it is done on purpose: `kill -9` in the middle of a second run, and then its folder
# is deleted, as the session's disk would be. Only the kept copy is left. The same command goes on from there.

# %%
train("second", until=44 if not CHIPS else None)
shutil.rmtree(RUNS / "second")
log = train("second")
print(*[line for line in log.splitlines() if line.startswith(("device", "resumed", "result", "graphs"))], sep="\n")


def losses(name):
    lines = [json.loads(line) for line in (KEPT / name / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if line["kind"] == "train"}


first, second = losses("first"), losses("second")
print(f"{len(second)} steps were logged; losses of the run that lost its machine are", end=" ")
print("those of the first, to the last bit" if first == second else "not those of the first")

# %%
import matplotlib.pyplot as plt

figure, axes = plt.subplots(figsize=(6, 2.5))
axes.plot(first.keys(), first.values(), linewidth=5, alpha=0.3, label="never stopped")
axes.plot(second.keys(), second.values(), label="its machine was taken away")
axes.set(xlabel="step", ylabel="loss", yscale="log")
axes.legend()

# %% [markdown]
# ## Next
# On Kaggle, *Save Version* keeps `/kaggle/working`; add that output to the next notebook as input, and the cells above
# find it. A bucket needs none of this: `--run_dir gs://BUCKET/runs/first` saves there itself ([Colab, Kaggle,
# GKE](../docs/colab_kaggle_gke.md)). Your own model and data: [make it yours](../docs/make_it_yours.md).
