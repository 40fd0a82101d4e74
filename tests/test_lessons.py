"""lessons/: the plain loop has the losses of simple_mnist_tpu.py; each notebook runs whole and is the one committed."""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
from processes import QUICKLY_COMPILED, ROOT, Script, run, waits
from run_files import read_lines

import aot_tpu
from lessons import notebooks

PLAIN = ROOT / "lessons" / "plain_mnist_tpu.py"
AS_PLAIN = ["--optimizer=sgd", "--max_shift=0", "--num_epochs=2", "--learning_rate=0.05", "--scheduler=constant"]
AS_PLAIN += ["--warmup_steps=0", "--weight_decay=0", "--log_every=1", "--no_tensorboard", "--device=cpu"]
AS_PLAIN += ["--channels=4", "--hidden_dim=16"]


@pytest.mark.slow
def test_the_plain_loop_has_the_losses_of_the_simple_script(tmp_path):
    """Bit for bit, in training and evaluation, though it is killed after an epoch and started again. With few
    channels and epochs, which takes seconds."""
    variables = {"PJRT_DEVICE": "CPU", "XLA_FLAGS": QUICKLY_COMPILED}
    few = {" = 32, hidden_dim: int = 128": " = 4, hidden_dim: int = 16", " = 0, 10, 64,": " = 0, 2, 64,"}
    text = PLAIN.read_text()
    for old, new in few.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    (tmp_path / "plain.py").write_text(text)
    killed = Script(tmp_path / "plain.py", folder=tmp_path, **variables)
    waits(lambda: "epoch 1" in killed.text("out"), alive=killed)  # its checkpoint may be there or not
    killed.kill()
    killed.wait()
    again = Script(tmp_path / "plain.py", folder=tmp_path, **variables)
    assert again.wait() == 0, again.text("err")
    said = killed.text("out") + again.text("out")
    assert "graphs 2 on CPU" in said  # one for training, one for evaluation
    losses = {int(step): [*map(float, row.split())] for step, row in re.findall(r"^step (\d+)  (.*)$", said, re.M)}
    evaluations = {22 * int(epoch): float(loss) for epoch, loss in re.findall(r"^epoch (\d+) .* (\S+)$", said, re.M)}
    ours = run("simple_mnist_tpu.py", *AS_PLAIN, f"--run_dir={tmp_path / 'run'}")
    assert ours.returncode == 0, ours.stderr
    records = read_lines(tmp_path / "run")
    expected = {record["step"]: record["loss"] for record in records if record["kind"] == "train"}
    assert len(losses) == 2 and len(expected) == 44
    for last, found in losses.items():  # after a restart the first line has zeros for steps before it
        steps = range(last - len(found) + 1, last + 1)
        assert all(loss == expected[step] or loss == 0.0 for step, loss in zip(steps, found, strict=True))
    assert evaluations == {r["step"]: r["test_loss"] for r in records if r["kind"] == "eval"}


def outputs_of(cells: list[dict]) -> list[str]:
    """What each cell of a notebook prints. Numbers with a point are left out: clocks, and losses' last digits."""
    found = []
    for cell in cells:
        texts = ["".join(output.get("text", ["picture"])) for output in cell.get("outputs", ())]
        found.append(re.sub(r"[\d,]*\.\d+(e-?\d+)?|\b\d+ s\b|\| \d+ +\|$|\s+", " ", "".join(texts), flags=re.M))
    return found


def committed(name: str) -> list[dict]:
    return json.loads((notebooks.FOLDER / f"{name}.ipynb").read_text())["cells"]


@pytest.mark.parametrize("name", notebooks.LESSONS)
def test_the_notebook_has_the_cells_of_its_lesson_is_small_and_has_pictures(name):
    text = (notebooks.FOLDER / f"{name}.ipynb").read_text()
    assert len(text) < 300_000 and "image/png" in text
    notebook = json.loads(text)
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in notebook["cells"]]
    assert cells == [(cell.kind, cell.text) for cell in notebooks.read_cells(notebooks.FOLDER / f"{name}.py")]
    assert notebook["nbformat"] == 4 and len({cell["id"] for cell in notebook["cells"]}) == len(cells)
    printed = " ".join(outputs_of(notebook["cells"]))
    assert len(printed) > 300 and not re.search(r"/(work|root|home|tmp)/", printed)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one_device_to_many", "xla_in_ten_minutes"])
def test_a_lesson_runs_and_prints_what_its_notebook_shows(name, tmp_path):
    folder = tmp_path / "made"
    done = run("-m", "lessons.notebooks", name, "--output", folder, cold=True, XLA_FLAGS="")
    assert done.returncode == 0, done.stderr
    assert outputs_of(json.loads((folder / f"{name}.ipynb").read_text())["cells"]) == outputs_of(committed(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a_model_that_answers", "what_it_will_cost"])
def test_a_lesson_of_commands_prints_what_its_notebook_shows(name, monkeypatch):
    """Its cells start other processes and load no torch: they are run here, and the scripts are forked."""
    real = subprocess.run

    def forked(command, cwd=None, env=None, **options):
        if command[0] != sys.executable:
            return real(command, cwd=cwd, env=env, **options)
        changed = {name: value for name, value in env.items() if os.environ.get(name) != value}
        if not command[1].endswith("aot_tpu.py"):
            return run(*command[1:], folder=cwd or Path.cwd(), **changed)
        monkeypatch.chdir(cwd)  # the processes in which it asks are forked
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
            code = aot_tpu.main(command[2:])
        return subprocess.CompletedProcess(command, code, out.getvalue(), err.getvalue())

    monkeypatch.chdir(notebooks.FOLDER)
    monkeypatch.setattr(subprocess, "run", forked)
    path = notebooks.FOLDER / f"{name}.py"
    found, expected = (
        outputs_of(cells) for cells in (notebooks.run_cells(notebooks.read_cells(path), path), committed(name))
    )
    if name == "a_model_that_answers":  # another CPU rounds otherwise, and a model so small then says something else
        right = [int(re.search(r"(\d+) of 10 answers are what", " ".join(one))[1]) for one in (found, expected)]
        assert min(right) >= 4 and len(found) == len(expected)
    else:
        assert found == expected


def test_a_lesson_that_fails_says_the_line_of_its_file(tmp_path):
    path = tmp_path / "wrong.py"
    path.write_text("# %% [markdown]\n# # Wrong\n\n# %%\n\n\nx = 1\nx / 0\n")
    with pytest.raises(ZeroDivisionError) as caught:
        notebooks.run_cells(notebooks.read_cells(path), path)
    assert caught.traceback[-1].lineno + 1 == 8


def test_an_unknown_lesson_is_refused():
    done = run("-m", "lessons.notebooks", "nothing")
    assert done.returncode == 2 and "nothing is no lesson; expected of a_model_that_answers" in done.stderr


FIRST_HOUR = notebooks.FOLDER / "first_hour_on_colab_and_kaggle.py"
AS_SHOWN, SHORTER = '"--num_epochs", "6"', '"--num_epochs", "3", "--channels", "4"'


@pytest.mark.slow
@pytest.mark.parametrize(
    "place, variables",
    [
        ("Colab", {"COLAB_RELEASE_TAG": "release-colab_2026"}),
        ("Kaggle", {"KAGGLE_KERNEL_RUN_TYPE": "Interactive", "COLAB_RELEASE_TAG": "made from"}),
        ("a machine of your own", {}),
    ],
)
def test_the_first_hour_in_pretended_surroundings(place, variables, tmp_path, monkeypatch):
    """Its folders are in tmp_path, git and pip are pretended; the doctor, trainings, kill and resumption are real. On a
    machine of your own it prints what its notebook shows."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setitem(sys.modules, "google.colab", types.ModuleType("google.colab"))
    mounted = []
    drive = types.SimpleNamespace(mount=lambda folder: (mounted.append(folder), Path(folder).mkdir(parents=True)))
    monkeypatch.setattr(sys.modules["google.colab"], "drive", drive, raising=False)
    commands, real, start = [], subprocess.run, subprocess.Popen

    def pretended(command, **options):
        """Nothing is fetched or installed; the checkout is one of links. The doctor is forked, as trainings are."""
        if command[1:2] == ["setup_tpu.py"]:
            return run(*command[1:], folder=options["cwd"])
        if command[0] != "git" and command[1:2] != ["-m"]:
            return real(command, **options)
        commands.append(" ".join(command))
        if command[0] == "git":
            clone = Path(command[-1])
            clone.mkdir(parents=True)
            for path in ROOT.iterdir():
                if not path.name.startswith("."):
                    (clone / path.name).symlink_to(path)

    def forked(command, **options):
        if "--run_dir" not in command:
            return start(command, **options)
        return Script(*command[1:], folder=options["cwd"], output=Path(options["stdout"].name))

    monkeypatch.setattr(subprocess, "run", pretended)
    monkeypatch.setattr(subprocess, "Popen", forked)
    if place == "Kaggle":  # the output of an earlier notebook
        earlier = tmp_path / "kaggle" / "input" / "notebook" / "runs" / "earlier"
        earlier.mkdir(parents=True)
        (earlier / "metrics.jsonl").write_text("")
    cells = notebooks.read_cells(FIRST_HOUR)
    if place in ("Colab", "Kaggle"):
        folders = re.compile(r'"/(content|kaggle|tmp)\b')
        assert sum(AS_SHOWN in cell.text for cell in cells) == 1
        texts = [folders.sub(rf'"{tmp_path}/\1', cell.text).replace(AS_SHOWN, SHORTER) for cell in cells]
        cells = [cell._replace(text=text) for cell, text in zip(cells, texts, strict=True)]
    made = notebooks.run_cells(cells, FIRST_HOUR)
    said = "".join("".join(output.get("text", "")) for cell in made for output in cell.get("outputs", ()))
    assert said.startswith(f"on {place}: ") and "those of the first, to the last bit" in said, said
    assert "brought back second: its newest checkpoint is step_00000044" in said
    if place not in ("Colab", "Kaggle"):
        assert not commands and outputs_of(made) == outputs_of(committed(FIRST_HOUR.stem))
        return
    assert len(commands) == 4 and commands[0].startswith("git clone --quiet GIT_URL")
    assert commands[3].endswith("tpu-examples/requirements.txt") and "--override" in commands[3]
    kept = {"Colab": "content/drive/MyDrive/runs", "Kaggle": "kaggle/working/runs"}[place]
    assert (tmp_path / kept / "second" / "checkpoints").is_dir()
    assert not list((tmp_path / kept).rglob("*.copying"))
    if place == "Colab":
        assert mounted == [f"{tmp_path}/content/drive"]
    else:
        assert not mounted and (tmp_path / kept / "earlier" / "metrics.jsonl").exists()
    assert ("distributed_mnist_tpu.py" in said) == (place == "Kaggle")
