"""README and docs: every fenced command is run here, or stands in a list with the reason why not."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from processes import ROOT, Script, run

import aot_tpu
from tpu_compiler import search

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SHARED = ROOT.parent / "shared" / "data"
NOT_RUN = {  # pattern: reason
    r"gcloud ": "needs a Google Cloud account",
    r"openssl rand": "makes a secret; test_peers.py reads one",
    r".*--peers_secret": "needs a slice of several hosts; test_peers.py has pretended ones",
    r"(until .venv|ln -sf|python3 -m pip install --user uv)": "test_tpu_vm_page.py; uv fetches a Python from GitHub",
    r"until gcloud": "needs a slice of several hosts; test_tpu_vm_page.py pretends one",
    r"eval .*ssh-add": "the reader's own key",
    r"docker ": "needs a container daemon; .ci/build_image builds and runs the image without one",
    r"python3 -m venv": "CI runs both commands of README's first screen as they stand",
    r".*setup_tpu.py --device tpu": "needs a TPU; test_setup_tpu.py has pretended ones",
    r"npm ": "a download; .ci/browser runs it",
    r"python3 (web/serve.py|-m http.server)": "servers that do not end; test_web.py has both",
    r".*benchmarks/web.py": "needs an exported model and Chromium; what it printed stands on the page",
    r".*setup_tpu.py --bucket": "needs a bucket; test_setup_tpu.py answers for one",
    r".*gs://BUCKET": "needs a bucket; test_storage.py runs the scripts against emulators",
    r".*(bucket_emulator.py|STORAGE_EMULATOR_HOST)": "a server and its port; test_storage.py uses both",
    r".*tensorboard --logdir": "a server that does not end; test_pictures.py reads what it would show",
    r".*calibrate_tpu.py": "hours of a TPU, minutes of a CPU; test_calibrate_tpu.py runs it whole",
    r".*simple_mnist_tpu.py --preset production --download": "needs a TPU and a network",
    r".*resnet_cifar_tpu.py --preset": "needs CIFAR-10; test_cifar_data.py has small files of its format",
    r".*Qwen3": "a download from Hugging Face; test_generate_tpu.py and test_prepare_data.py make such folders",
    r".*transformer_tpu.py --initial_weights": "needs a model of Hugging Face; test_fine_tuning.py fine-tunes one",
    r".*generate_tpu.py --run_dir runs/mine --chat": "as above",
    r".*convert_hf.py export runs/(mine|adapters) ": "as above; test_convert_hf.py exports both",
    r".*--compiler newest": "a download of 0.34 GB; test_any_slice.py has it, marked slow",
    r".*aot_tpu.py .*--fit": "16 compiles, minutes; test_aot_tpu.py finds the largest with written answers",
    r".*setup_tpu.py --(aot|json|device cpu)": "test_setup_tpu.py runs the three in one",
    r".*aot_tpu.py hf:.*--mode decode": "two large compiles; test_aot_modules.py decodes with a smaller model",
    r"nice .*any_slice.py": "hours of compiling",
    r".*cluster_tpu.py (run|list|logs|stop|top)": "needs a cluster, or Ray; test_cluster_tpu.py has real nodes",
    r"(.venv/bin/pip|export|ray|TPU_CLUSTER_QUOTA=\S+ ray) ": "as above",
    r".*benchmarks/cluster.py": "minutes of a cluster",
    r".*finetune_demo.py": "ten minutes; what it printed stands on the page",
    r".*--preset production --topology v5litepod-8 --search": "half an hour; what it printed stands on the page",
    r".*transformer_tpu.py --preset production --data_dir": "needs a TPU; test_aot_tpu.py compiles this step",
}
# so that a training takes seconds; what the reader would wait for is measured in docs/benchmarks.md
SHORTER = {
    "simple_mnist_tpu.py": ["--num_epochs=1", "--warmup_steps=2"],
    "distributed_mnist_tpu.py": ["--num_epochs=1", "--warmup_steps=2"],
    "resnet_cifar_tpu.py": ["--num_epochs=1", "--warmup_steps=2", "--global_batch_size=512", "--width=4"],
    "transformer_tpu.py": ["--num_steps=3", "--warmup_steps=1", "--eval_batches=1", "--global_batch_size=8"],
}


def commands_in(page: Path) -> list[str]:
    """The commands of the bash blocks, without comments and line breaks."""
    blocks = re.findall(r"^```bash\n(.*?)^```", page.read_text(), re.M | re.S)
    commands = [""]
    for line in "\n".join(blocks).replace("\\\n", " ").splitlines():
        line = re.sub(r"(^|\s+)#.*", "", line)
        if commands[-1].count("'") % 2:  # a quoted text goes on as it stands
            commands[-1] += "\n" + line
        else:
            commands.append(" ".join(line.split()))
    return [command for command in commands if command]


def is_run(command: str) -> bool:
    return not any(re.match(pattern, command) for pattern in NOT_RUN)


def test_every_reason_is_still_needed_and_every_command_is_understood():
    commands = [command for page in PAGES for command in commands_in(page)]
    assert len(commands) > 50
    for pattern in NOT_RUN:
        assert any(re.match(pattern, command) for command in commands), f"nothing is like {pattern} any more"
    for command in filter(is_run, commands):
        words = [word for word in shlex.split(command) if not re.match(r"[A-Z_]+=", word)]
        assert words[0] in (".venv/bin/python", ".venv/bin/torchrun", "mkdir", "cp"), command
        if words[0].startswith(".venv"):
            assert any((ROOT / word).is_file() for word in words), f"{command}: no such script"


def test_links_lead_somewhere_and_readme_fits():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
    readme = PAGES[0].read_text()
    assert len(readme.splitlines()) <= 200
    for page in PAGES[1:]:
        assert f"docs/{page.name}" in readme, f"{page.name} is not found from README"


def test_a_script_copied_as_readme_says_runs_by_itself(tmp_path):
    copying = [command for command in commands_in(PAGES[0]) if command.startswith(("mkdir", "cp"))]
    assert len(copying) == 2
    names = ("simple_mnist_tpu.py", "config.py", "model_shapes.py", "optim.py", "image_data.py", "mnist_data.py")
    for name in (*names, "dropout.py"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copy(ROOT / "requirements.txt", tmp_path)
    for name in ("tpu_utils", "tpu_compiler"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(" && ".join(copying), shell=True, check=True, cwd=tmp_path)
    copied = Script("simple_mnist_tpu.py", *SHORTER["simple_mnist_tpu.py"], folder=tmp_path / "mine")
    assert copied.wait() == 0, copied.text("err")
    assert (tmp_path / "mine" / "runs").exists()


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """The project in a folder of its own, which the commands of all pages share, in their order."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("*.py", "tpu_utils", "tpu_compiler", "tpu_cluster", "benchmarks"):
        for path in ROOT.glob(name):
            (folder / path.name).symlink_to(path)
    (folder / "input.txt").write_text("To be, or not to be: that is the question.\n" * 400)
    return folder


def data_dir(command: str) -> Path:
    folder = SHARED / ("text" if "transformer_tpu.py" in command else "mnist")
    if not folder.exists():
        pytest.skip("the real data is not beside this checkout (../shared/data)")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_run(page, checkout, monkeypatch, capsys):
    def forked(command, variables, seconds=None):
        done = Script(*command, folder=checkout, **variables)
        assert done.wait() in (0, 1, 2), done.text("err")
        return done.returncode

    monkeypatch.setattr(search, "run_script", forked)
    monkeypatch.chdir(checkout)
    for command in filter(is_run, commands_in(page)):
        if command.startswith(("mkdir", "cp")):
            continue  # above
        variables, words = {}, shlex.split(command)
        words = [str(data_dir(command)) if word == "DIR" else word for word in words]
        while re.match(r"[A-Z_]+=", words[0]):
            name, _, value = words.pop(0).partition("=")
            variables[name] = value
        launcher, *words = words
        script = next(word for word in words if word.endswith(".py"))
        if script == "aot_tpu.py":
            assert aot_tpu.main(words[1:]) == 0, f"{command}: {capsys.readouterr().err}"
            continue
        if "--compile_for" not in words and "--help" not in words:
            words += SHORTER.get(script, [])
        if launcher.endswith("torchrun"):
            done = run("-m", "torch.distributed.run", *words, PYTHONPATH=checkout)
            code, said = done.returncode, done.stderr
        else:
            process = Script(*words, folder=checkout, **variables)
            code, said = process.wait(), process.text("err")
        # the doctor warns of a machine without a TPU, and fails where this Python is not in order
        assert code == 0, f"{command}: {said}"
