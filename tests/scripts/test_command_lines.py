"""--help, a wrong option, a wrong file: answered before torch is imported, in 80 columns, with the nearest name."""

import ast
import functools
import re
import subprocess
import sys

import pytest
from processes import ROOT, run

SCRIPTS = ["simple_mnist_tpu.py", "distributed_mnist_tpu.py", "ddp_mnist_tpu.py"]
SCRIPTS += ["resnet_cifar_tpu.py", "transformer_tpu.py"]
TOOLS = [
    "tools.generate",
    "tools.convert_llmc",
    "tools.convert_hf",
    "browser.export",
    "browser.onnx_generate",
    "cluster",
    "tools.prepare_data",
    "tools.plot_run",
    "aot_tpu.py",
    "setup_tpu.py",
    "tools.calibrate",
    "config.py",
]
# importing any of these is an error: no clock is asked
WITHOUT_TORCH = """
import runpy, sys
HEAVY = "torch", "torch_xla", "jax", "torchvision", "sklearn"
for name in list(sys.modules):  # imported by the process that this one was forked from
    if name.split(".")[0] in HEAVY:
        del sys.modules[name]
class Refuse:
    def find_spec(name, path, target=None):
        if name in HEAVY:
            raise RuntimeError(f"{name} is imported, which takes seconds")
sys.meta_path.insert(0, Refuse)
sys.argv = sys.argv[1:]
sys.path.insert(0, ".")
if sys.argv[0].endswith(".py"):
    runpy.run_path(sys.argv[0], run_name="__main__")
else:
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


@functools.cache
def answer(*arguments):
    return run("-c", WITHOUT_TORCH, *arguments)


def test_the_guard_notices():
    assert "torch is imported" in run("-c", WITHOUT_TORCH, "simple_mnist_tpu.py", "--num_epochs=1").stderr


@pytest.mark.parametrize("script", SCRIPTS + TOOLS)
def test_help_is_answered_without_torch_and_fits_80_columns(script):
    done = answer(script, "--help")
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "WARNING" not in done.stderr
    if script in SCRIPTS:
        tree = ast.parse((ROOT / script).read_text())
        assert all(line in done.stdout for line in ast.get_docstring(tree).splitlines()), "the header is the help"
        assert re.findall(r"─ (.*) options ─", done.stdout)[:5] == ["run", "data", "optimizer", "speed", "log"]


@pytest.mark.parametrize("script", [*SCRIPTS, "tools.generate", "tools.prepare_data", "tools.plot_run"])
def test_every_option_has_a_sentence(script):
    text = answer(script, "--help", *["all"] * (script in SCRIPTS)).stdout
    entries = re.split(r"\n│ (?=--)", text)[1:]
    assert len(entries) >= 2
    for entry in entries:
        words = " ".join(re.sub(r"[│╰╯╭─]", " ", entry.split("╰")[0]).split())
        explained = re.sub(r"^(--\S+,? ?)+(\{.*?\}|[A-Z|]+(?: \[[^]]*\])?)? ?", "", words)
        assert re.match(r"\S.*\.( \((default|required|optional).*\))?$", explained), words


@pytest.mark.parametrize(
    "arguments, code, said",
    [
        (["simple_mnist_tpu.py", "--learnin_rate", "1"], 2, "--learning_rate"),
        (["transformer_tpu.py", "--modelsize", "124M"], 2, "--model_size"),
        (
            ["simple_mnist_tpu.py", "--learning_rate", "-1"],
            2,
            "learning_rate is -1.0; expected 0 < learning_rate <= 3e38",
        ),
        (["simple_mnist_tpu.py", "--dataset", "mnist", "--data_dir", "no"], 2, "no/MNIST/raw/train-images"),
        (["distributed_mnist_tpu.py", "--preset", "production", "--dataset", "digits"], 1, "add --device cpu"),
        (["transformer_tpu.py", "--dataset=text", "--train_data=no.txt"], 2, "no.txt: no such file"),
        (
            ["transformer_tpu.py", "--dataset=tokens", "--train_data=no_*", "--validation_data=no_*"],
            2,
            "matches no file",
        ),
        (["tools.generate", "--run_dir", "no"], 2, "no holds no complete checkpoint"),
        (["tools.generate", "--llmc", "no.bin"], 2, "no.bin: no such file"),
        (["tools.convert_llmc", "describe", "no.bin"], 2, "no.bin: no such file"),
        (["tools.convert_hf", "import", "no", "x"], 2, "no: No such file or directory; expected a folder"),
        (["tools.convert_hf", "export", "tests", "x", "bf61"], 2, "did you mean bf16?"),
        (["browser.export", "no", "x"], 2, "no: No such file or directory; expected a folder"),
        (["browser.export", "tests", "docs"], 2, "docs is there already and is no export"),
        (["browser.onnx_generate", "--onnx", "no"], 2, "no/model.json: no such file"),
        (["tools.prepare_data", "no.txt", "--output", "x"], 2, "no.txt: no such file"),
        (["tools.plot_run", "no"], 2, "no is no folder with a config.json"),
        (["tools.calibrate", "--device", "tpu"], 1, "found no TPU chip on this machine"),
        (["aot_tpu.py", "no.py", "--topology", "v5litepod-1"], 2, "no such script: no.py"),
        (["aot_tpu.py", "language/models/llama.py", "--topology", "v5litepod-1"], 2, "llama.py:NAME"),
        (["aot_tpu.py", "simple_mnist_tpu.py", "--topology", "v5litepod-9"], 2, "nearest is v5litepod-8"),
    ],
)
def test_mistakes_are_answered_without_torch(arguments, code, said):
    done = answer(*arguments)
    assert done.returncode == code and said in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_a_tool_shows_the_traceback_that_is_asked_for():
    done = answer("tools.prepare_data", "no.txt", "--output", "x", "--debug")
    assert done.returncode and "Traceback" in done.stderr and "no.txt: no such file" in done.stderr


def test_prepare_data_and_plot_run_never_need_torch(tmp_path):
    (tmp_path / "in.txt").write_text("words and words\n" * 50)
    done = answer("tools.prepare_data", tmp_path / "in.txt", "--output", tmp_path / "out")
    assert done.returncode == 0 and (tmp_path / "out_train_000000.bin").exists(), done.stderr
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "step": 1, "loss": 2.0}\n')
    done = answer("tools.plot_run", tmp_path)
    assert done.returncode == 0 and (tmp_path / "plot.png").exists(), done.stderr


def test_a_tool_says_nothing_but_its_answer(tmp_path):
    """No warning of torch_xla's about a device that nobody asked for."""
    (tmp_path / "checkpoints").mkdir()
    done = run("tools.convert_llmc", "export", tmp_path, tmp_path / "x.bin", cold=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and done.stderr.startswith("error: ")


@pytest.mark.parametrize("command", [pytest.param("setup_tpu.py --device cpu", marks=pytest.mark.slow), "config.py"])
def test_a_reader_that_stops_early_is_no_error(command):
    shell = f"{sys.executable} {command} | head -1"
    done = subprocess.run(["bash", "-c", shell], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert len(done.stdout.splitlines()) == 1 and done.stderr == ""
