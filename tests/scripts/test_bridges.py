"""docs/bridges.md: each script runs as it is on the CPU; patched, it has the same losses in one compiled step."""

import os
import re
import shutil
import subprocess
import sys

import pytest
from processes import ROOT, run

BRIDGES = ROOT / "docs" / "bridges"
NAMES = sorted(path.name for path in BRIDGES.iterdir())
# as on a machine that has no torch_xla: accelerate and Trainer take its device where they find it
WITHOUT_XLA = "import runpy, sys; sys.modules['torch_xla'] = None; runpy.run_path('train.py')"


def losses_of(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^loss ([\d.]+)$", printed, re.M)]


def test_the_page_has_a_row_for_each_and_is_short():
    page = (ROOT / "docs" / "bridges.md").read_text()
    assert re.findall(r"\]\(bridges/(\w+)\)", page) == ["cuda", "nanogpt", "trainer", "accelerate"]
    assert sorted(NAMES) == ["accelerate", "cuda", "nanogpt", "trainer"] and len(page.split()) <= 700


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_patched_script_has_the_losses_of_the_script(name, tmp_path):
    if not shutil.which("patch"):
        pytest.skip("this machine has no patch program, which the page needs")
    shutil.copytree(BRIDGES / name, tmp_path / "bridge")
    script = tmp_path / "bridge" / "train.py"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {
        "CUDA_VISIBLE_DEVICES": ""
    }
    options = dict(text=True, cwd=script.parent, capture_output=True)
    before = subprocess.run([sys.executable, "-c", WITHOUT_XLA], env=environment, **options)
    assert before.returncode == 0, before.stderr
    command = ["patch", "-i", "train.patch"]
    done = subprocess.run(command, **options)
    assert done.returncode == 0 and "fuzz" not in done.stdout, done.stdout
    script.write_text(
        script.read_text() + "\nimport torch_xla.debug.metrics as met\nprint(met.counter_value('UncachedCompile'))\n"
    )
    after = run(script, PJRT_DEVICE="CPU", PYTHONPATH=ROOT)
    assert after.returncode == 0, after.stderr
    expected, found = losses_of(before.stdout), losses_of(after.stdout)
    assert len(found) >= 15 and len(found) == len(expected) - (name == "cuda")  # its short last batch is left out
    within = 1e-4 if name == "trainer" else 2e-6  # Trainer rounds what it logs
    assert max(abs(a - b) for a, b in zip(expected, found, strict=False)) <= within
    assert int(after.stdout.split()[-1]) == 2  # the step; the stack of all losses, once
