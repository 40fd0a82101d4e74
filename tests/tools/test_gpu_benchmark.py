"""benchmarks/gpu.py: its rows are well-formed, one that fails or hangs stops no other, and it runs on a CPU."""

import json
import os
import time
from pathlib import Path

import pytest
from processes import run

from benchmarks import gpu, gpu_ours
from language.options.transformer_options import TransformerConfig
from tpu_utils.options.parsing import parse_command_line

TINY = ("benchmarks/gpu.py", "--device", "cpu", "--tiny")


def task_of(row, folder):
    return gpu.Task(row, "cpu", True, str(folder), "")


def test_a_row_names_a_case_and_a_way(tmp_path):
    assert gpu.CASES.keys() == gpu.TINY_CASES.keys()
    for row in gpu.ROWS:
        task = task_of(row, tmp_path)
        assert task.case is gpu.TINY_CASES[row.partition(".")[0]] and task.way in gpu.WAYS
    llama = gpu.CASES["llama"].shape
    assert (llama.num_layers, llama.num_heads, llama.num_kv_heads, llama.head_dim) == (8, 32, 8, 64)
    assert (llama.embedding_dim, llama.mlp_dim, llama.vocab_size, llama.tied_head) == (2048, 8192, 128256, True)


@pytest.mark.parametrize("case", [name for name, case in gpu.CASES.items() if case.shape])
@pytest.mark.parametrize("tiny", [False, True])
def test_the_script_is_asked_for_the_shape_of_the_case(case, tiny, tmp_path):
    task = gpu.Task(f"{case}.ours", "cpu", tiny, str(tmp_path), "--remat")
    _, *options = gpu_ours.command_of(task, tmp_path)
    config = parse_command_line(TransformerConfig, "", options)
    assert config.shape == task.case.shape and config.remat
    assert config.global_batch_size * config.shape.sequence_length == task.case.count


def test_what_a_row_says():
    """6 N + 12 L d T FLOPs of 124,475,904 parameters, over the peak of the card."""
    task = gpu.Task("gpt2_8.ours", "gpu", False, "", "")
    measured = dict(groups_ms=[50.0, 40.0, 60.0], first_step_seconds=3.0, peak_gib=9.5, reserved_gib=None, said="so")
    row = gpu.row_of(task, gpu.Card("NVIDIA H100 80GB HBM3", "1", 80.0), measured)
    flops = 8192 * (6 * 124_475_904 + 12 * 12 * 768 * 1024)
    assert row["step_ms"] == 50.0 and row["tokens_per_second"] == pytest.approx(8192 / 0.05)
    assert row["tflops"] == pytest.approx(flops / 0.05 / 1e12) and row["mfu"] == pytest.approx(flops / 0.05 / 989e12)
    skipped = gpu.row_of(task, gpu.Card(), {"skipped": "a | b"})
    lines = gpu.table([row, skipped]).splitlines()
    assert "| 50.0 (40.0 to 60.0) | 163,840 tokens |" in lines[2] and lines[2].endswith("| 9.50 | - | 3.0 | so |")
    assert lines[3].endswith("| skipped: a / b |")


def test_the_reason_is_the_last_exception():
    errors = "Traceback\n  File\ntorch.OutOfMemoryError: CUDA out of memory. Tried\n  a hint\nanother hint\n"
    assert gpu.reason_in(errors).startswith("torch.OutOfMemoryError: CUDA")
    assert gpu.reason_in("warning\nerror: torch finds no GPU\n") == "error: torch finds no GPU"
    assert (
        gpu.reason_in("\u256d\u2500\n\u2502 invalid choice 'gpu' \u2502\n\u2570\u2500\u256f\n")
        == "invalid choice 'gpu'"
    )
    assert gpu.reason_in("something\n\n") == "something" and gpu.reason_in("") == ""


def is_running(process: int) -> bool:
    status = Path(f"/proc/{process}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_row_that_fails_or_hangs_stops_no_other(tmp_path, monkeypatch, capsys):
    """What the hanging one has started is killed with it."""
    started = tmp_path / "started"
    commands = {
        "gpt2_8.ours": f"sleep 1000 & echo $! >{started}.part; mv {started}.part {started}; wait",
        "gpt2_8.nanogpt": "echo 'ValueError: too large' >&2; exit 1",
        "gpt2_8.jax": "echo noise; echo '{\"loss\": 1.0}'",
    }
    monkeypatch.setattr(gpu, "command_of", lambda task: ["sh", "-c", commands[task.row]])
    tasks = [task_of(row, tmp_path) for row in commands]
    results = {task.row: result for task, result in gpu.run_wave(tasks, dict(os.environ), 3.0)}
    assert results["gpt2_8.jax"]["loss"] == 1.0
    assert results["gpt2_8.nanogpt"]["skipped"] == "ValueError: too large"
    assert results["gpt2_8.ours"]["skipped"] == "not compiled after 3 s"
    assert "ValueError: too large" in capsys.readouterr().err
    process = int(started.read_text())
    while is_running(process):  # the signal is sent; it dies when it is next run
        time.sleep(0.01)


def test_programs_wait_for_each_other_and_for_memory(tmp_path, monkeypatch):
    """No one goes on before all have stopped, and then one at a time."""
    log = tmp_path / "log"
    command = (
        f"echo begin >>{log}; sleep WAIT; kill -STOP $$; echo on >>{log}; sleep 0.3; echo end >>{log}; echo '{{}}'"
    )
    waits = {"gpt2_8.ours": "0", "gpt2_8.jax": "1"}
    monkeypatch.setattr(gpu, "command_of", lambda task: ["sh", "-c", command.replace("WAIT", waits[task.row])])
    results = [result for _, result in gpu.run_wave([task_of(row, tmp_path) for row in waits], dict(os.environ), 60.0)]
    assert results == [{}, {}]
    assert log.read_text().split() == ["begin", "begin", "on", "end", "on", "end"]
    taken = gpu.ROWS["llama.ours"] + gpu.ROWS["gpt2_8.ours"] + 2 * gpu.GIB_OUTSIDE
    waves = gpu.waves_of(["gpt2_8.ours", "llama.ours", "gpt2_8.jax"], 9, taken, False)
    assert waves == [["llama.ours", "gpt2_8.ours"], ["gpt2_8.jax"]]


def test_a_rehearsal_on_the_cpu(tmp_path):
    """Ours is what the test environment has: torch_xla. Without optax the row of JAX says so."""
    rows = ("gpt2_8.ours", "gpt2_8.nanogpt", "gpt2_8.jax")
    done = run(*TINY, "--jobs", "1", "--rows", *rows, "--out", tmp_path / "out.json", timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    first, *lines = done.stdout.splitlines()
    assert "torch 2" in first
    printed = {row["row"]: row for row in map(json.loads, lines[: len(rows)])}
    assert list(printed.values()) == json.loads((tmp_path / "out.json").read_text())["rows"]
    for name in ("gpt2_8.ours", "gpt2_8.nanogpt"):
        assert len(printed[name]["groups_ms"]) == 3 and printed[name]["step_ms"] > 0, printed[name]
        assert 0 < printed[name]["loss"] < 7 and printed[name]["first_step_seconds"] > 0
    jax = printed["gpt2_8.jax"]
    assert "optax" in jax.get("skipped", "optax")
    assert done.stdout.count("\n| tiny GPT | 2 x 64 |") == 3


@pytest.mark.slow
def test_all_rows(tmp_path):
    """Whatever is not installed is skipped; what is, runs."""
    done = run(*TINY, "--jobs", "2", "--limit", "600", "--out", tmp_path / "out.json", timeout=3600)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert {row["row"] for row in rows} == gpu.ROWS.keys()
    for row in rows:
        if "skipped" in row:
            assert "ModuleNotFoundError" in row["skipped"], row
        else:
            assert row["first_step_seconds"] > 0, row


def test_a_row_that_is_not_there_is_refused():
    done = run("benchmarks/gpu.py", "--rows", "gpt3*")
    assert done.returncode == 2 and "expected some of gpt2_8.ours, " in done.stderr
    listed = run("benchmarks/gpu.py", "--list", "--rows", "llama.*,resnet.ours")
    assert listed.stdout.split() == ["llama.ours", "llama.hugging_face", "resnet.ours"]
