"""benchmarks/gpu.py: its rows are well-formed, one that fails or hangs stops no other, and it runs on a CPU."""

import dataclasses
import functools
import json
import os
import time
from pathlib import Path

import numpy as np
import pytest
from processes import QUICKLY_COMPILED, run

from benchmarks import gpu, gpu_programs
from benchmarks.children import reason_in
from language.options.transformer_options import TransformerConfig
from tpu_utils.options.parsing import parse_command_line

TINY = ("benchmarks/gpu.py", "--device", "cpu", "--tiny")
REHEARSED = ("gpt2_8.ours", "gpt2_8.nanogpt", "gpt2_8.jax")


@pytest.mark.parametrize("row", [row for row in gpu.ROWS if not row.startswith("resnet")])
@pytest.mark.parametrize("tiny", [False, True])
def test_the_script_is_asked_for_the_shape_of_the_row(row, tiny, tmp_path):
    task = gpu.Task(row, "cpu", tiny, str(tmp_path), "--remat")
    _, *options = gpu_programs.command_of(task, tmp_path)
    config = parse_command_line(TransformerConfig, "", options)
    assert config.shape == task.shape and config.remat and task.way in gpu.WAYS
    assert config.global_batch_size * config.shape.sequence_length == task.examples
    assert config.deterministic == (task.way != "ours_any_order")


def test_what_a_row_says():
    """6 N + 12 L d T FLOPs of 124,475,904 parameters, three forward passes of a picture, over the peak of the card."""
    task = gpu.Task("gpt2_8.ours", "gpu", False, "", "")
    measured = dict(groups_ms=[50.0, 40.0, 60.0], first_step_seconds=3.0, peak_gib=9.5, reserved_gib=None, said="so")
    row = gpu.row_of(task, "NVIDIA H100 80GB HBM3, 570.1", measured)
    flops = 8192 * (6 * 124_475_904 + 12 * 12 * 768 * 1024)
    assert row["step_ms"] == 50.0 and row["per_second"] == pytest.approx(8192 / 0.05)
    assert row["tflops"] == pytest.approx(flops / 0.05 / 1e12) and row["mfu"] == pytest.approx(flops / 0.05 / 989e12)
    lines = gpu.table([row, gpu.row_of(task, "", {"skipped": "a | b"})]).splitlines()
    assert "| 50.0 (40.0 to 60.0) | 163,840 |" in lines[2] and lines[2].endswith("| 9.50 | - | 3.0 | so |")
    pictures = gpu.row_of(gpu.Task("resnet_256.usual", "gpu", False, "", ""), "NVIDIA H200, 580.1", measured)
    assert pictures["size"] == "256 x 224^2" and pictures["per_second"] == pytest.approx(256 / 0.05)
    assert pictures["mfu"] == pytest.approx(256 * 24.54e9 / 0.05 / 989e12)
    assert lines[3].endswith("| skipped: a / b |") and gpu.row_of(task, "", measured)["mfu"] is None


@pytest.mark.slow
def test_plain_jax_computes_the_loss_of_the_others():
    """Llama's beside transformers', with the same weights, in float32."""
    import jax
    import jax.numpy as jnp
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from benchmarks import other_programs as peers
    from language.options.hf_config import hugging_face_config

    shape = dataclasses.replace(gpu.TINY_SHAPES["llama"], vocab_size=512)  # a padded one is larger than theirs
    parameters = jax.tree.map(lambda x: 20 * x, peers.jax_llama_parameters(shape))  # each has a part in the loss
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**hugging_face_config(shape)))
    names = dict(ln1_weight="input_layernorm", ln2_weight="post_attention_layernorm", out_weight="self_attn.o_proj")
    names |= {f"{name}_weight": f"self_attn.{name}_proj" for name in "qkv"}
    names |= dict(gate="mlp.gate_proj", up="mlp.up_proj", mlp_out="mlp.down_proj")
    weights = {"model.embed_tokens": parameters["tokens"], "model.norm": parameters["final_weight"]}
    weights |= {"lm_head": parameters["tokens" if shape.tied_head else "head"]}
    for i, layer in enumerate(parameters["layers"]):
        weights |= {f"model.layers.{i}.{names[name]}": value.T for name, value in layer.items()}
    state = {f"{name}.weight": torch.from_numpy(np.array(value)) for name, value in weights.items()}
    model.load_state_dict(state)
    tokens = np.random.default_rng(0).integers(shape.vocab_size, size=(2, 17), dtype=np.int32)
    theirs = model(torch.from_numpy(tokens[:, :-1]).long()).logits.flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(theirs, torch.from_numpy(tokens[:, 1:]).long().flatten())
    attention = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="xla")
    with jax.default_device(jax.devices("cpu")[0]):
        found = peers.jax_llama_loss(parameters, tokens, shape, jnp.float32, attention)
    assert float(found) == pytest.approx(expected.item(), rel=1e-4)


def test_goals_have_a_verdict():
    def row(name, step_ms, peak_gib=5.0, mfu=0.4):
        return dict(row=name, step_ms=step_ms, peak_gib=peak_gib, mfu=mfu)

    rows = [row("gpt2_8.ours", 16.0, 5.4), row("gpt2_8.nanogpt", 20.0), row("gpt2_32.ours", 52.0, 9.0, 0.51)]
    rows += [row("gpt2_32.nanogpt", 60.0, 8.0), dict(row="llama_4.ours", skipped="so")]
    rows += [row("llama_4.hugging_face", 9.0), row("resnet_256.ours", 9.0, None), row("resnet_256.usual", 9.0, None)]
    assert [line.partition("goal       ")[2] for line in gpu.verdicts(rows)] == [
        "gpt2_8: at most 0.8 of nanoGPT's way: 0.80, met",
        "gpt2_8: at most 15 ms a step: 16.00, NOT met",
        "gpt2_32: at most 0.85 of nanoGPT's way: 0.87, NOT met",
        "gpt2_32: MFU of at least 0.5: 0.51, met",
        "llama_4: at most 0.95 of Hugging Face's: not measured",
        "resnet_256: at most 1.0 of the usual loop: 1.00, met",
        "gpt2_8: at most 1.1 of the least memory: 1.08, met",
        "gpt2_32: at most 1.1 of the least memory: 1.12, NOT met",
        "llama_4: at most 1.1 of the least memory: not measured",
        "resnet_256: at most 1.1 of the least memory: not measured",
    ]
    assert {f"{task}.ours" for task, *_ in gpu.GOALS} <= set(gpu.ROWS)


def test_a_row_for_which_no_time_is_left_says_so(monkeypatch, capsys):
    asked = []

    def run_row(task, environment, limit):
        asked.append((task.row, limit))
        return {"skipped": "tried"}

    monkeypatch.setattr(gpu, "run_row", run_row)
    monkeypatch.setattr(gpu, "read_card", lambda: "")
    for limit in ("0", "480"):
        monkeypatch.setattr("sys.argv", ["gpu.py", "--rows", "gpt2_8.jax", "--all_limit", limit])
        assert gpu.main() == 1
    said = capsys.readouterr().out
    assert "no time left of 0 s; ask for it by --rows" in said and "goal       gpt2_8: " in said
    assert [row for row, _ in asked] == ["gpt2_8.jax"] and 0 < asked[0][1] <= 300


def test_the_reason_is_the_last_exception():
    errors = "Traceback\n  File\ntorch.OutOfMemoryError: CUDA out of memory. Tried\n  a hint\nanother hint\n"
    assert reason_in(errors).startswith("torch.OutOfMemoryError: CUDA")
    assert reason_in("warning\nerror: torch finds no GPU\n") == "error: torch finds no GPU"
    assert reason_in("\u256d\u2500\n\u2502 invalid choice 'gpu' \u2502\n\u2570\u2500\u256f\n") == "invalid choice 'gpu'"
    assert reason_in("something\n\n") == "something" and reason_in("") == ""


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
        "gpt2_8.hugging_face": "echo '[noise'",
    }
    shell = "import os, sys; os.execlp('sh', 'sh', '-c', sys.argv[1])"
    monkeypatch.setattr(gpu, "command_of", lambda task: ["-c", shell, commands[task.row]])
    tasks = [gpu.Task(row, "cpu", True, str(tmp_path), "") for row in commands]
    results = {task.row: gpu.run_row(task, dict(os.environ), 3.0) for task in tasks}
    assert results["gpt2_8.jax"]["loss"] == 1.0
    assert results["gpt2_8.nanogpt"]["skipped"] == "ValueError: too large"
    assert "Expecting value" in results["gpt2_8.hugging_face"]["skipped"]
    assert results["gpt2_8.ours"]["skipped"] == "killed after 3 s"
    assert "ValueError: too large" in capsys.readouterr().err
    process = int(started.read_text())
    while is_running(process):  # the signal is sent; it dies when it is next run
        time.sleep(0.01)


def test_a_rehearsal_on_the_cpu(tmp_path, monkeypatch, capsys):
    """Ours is what the test environment has: torch_xla. Each program is forked, where a user's is a start."""

    def run_row(task, environment, limit):
        done = run(*gpu.command_of(task), **environment)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    monkeypatch.setattr(gpu, "run_row", run_row)
    monkeypatch.setattr("sys.argv", [*TINY, "--rows", *REHEARSED, "--out", str(tmp_path / "out.json")])
    assert gpu.main() == 0
    said = capsys.readouterr().out
    first, *lines = said.splitlines()
    assert "torch 2" in first
    printed = {row["row"]: row for row in map(json.loads, lines[: len(REHEARSED)])}
    assert list(printed.values()) == json.loads((tmp_path / "out.json").read_text())["rows"]
    for row in printed.values():
        assert len(row["groups_ms"]) == 3 and row["step_ms"] > 0, row
        assert 0 < row["loss"] < 7 and row["first_step_seconds"] > 0
    assert said.count("\n| gpt2 | 2 x 64 |") == 3


@pytest.mark.slow
def test_every_other_program(tmp_path):
    """One row of each model and way, as other rows have only another batch. Whatever is not installed is skipped; what
    is, runs."""
    programs = {(row.partition("_")[0], row.partition(".")[2]): row for row in reversed(gpu.ROWS)}
    wanted = [row for row in gpu.ROWS if row in programs.values() and row not in REHEARSED]
    asked = ("--rows", *wanted, "--limit", "600", "--all_limit", "3600", "--out", tmp_path / "out.json")
    done = run(*TINY, *asked, timeout=3600, XLA_FLAGS=QUICKLY_COMPILED)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row["row"] for row in rows] == wanted
    for row in rows:
        if "skipped" in row:
            assert "ModuleNotFoundError" in row["skipped"], row
        else:
            assert row["first_step_seconds"] > 0, row


def test_a_row_that_is_not_there_is_refused():
    done = run("benchmarks/gpu.py", "--rows", "gpt3*")
    assert done.returncode == 2 and "expected some of gpt2_8.ours, " in done.stderr
