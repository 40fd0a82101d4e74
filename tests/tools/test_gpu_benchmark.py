"""benchmarks/gpu.py: its rows are well-formed, one that fails or hangs stops no other, and it runs on a CPU."""

import functools
import json
import os
import time
from pathlib import Path

import numpy as np
import pytest
from processes import QUICKLY_COMPILED, run

from benchmarks import children, gpu, gpu_programs
from language.options.transformer_options import TransformerConfig
from tpu_utils.options.parsing import parse_command_line

TINY = ("benchmarks/gpu.py", "--device", "cpu", "--tiny")
REHEARSED = ("gpt2_8.ours", "gpt2_8.nanogpt", "gpt2_8.jax")


@pytest.mark.parametrize("row, tiny", [("gpt2_8.ours", True), ("gpt2_32.ours_any_order", False)])
def test_the_script_is_asked_for_the_shape_of_the_row(row, tiny, tmp_path):
    task = gpu.Task(row, "cpu", tiny, str(tmp_path))
    _, *options = gpu_programs.command_of(task, tmp_path)
    config = parse_command_line(TransformerConfig, "", options)
    assert config.shape == task.shape
    assert config.global_batch_size * config.shape.sequence_length == task.tokens
    assert config.deterministic == (task.way != "ours_any_order")


def test_what_a_row_says():
    """6 N + 12 L d T FLOPs of 124,475,904 parameters, over the peak of the card."""
    task = gpu.Task("gpt2_8.ours", "gpu", False, "")
    measured = dict(groups_ms=[50.0, 40.0, 60.0], first_step_seconds=3.0, peak_gib=9.5, reserved_gib=None, said="so")
    row = gpu.row_of(task, "NVIDIA H100 80GB HBM3, 570.1", measured)
    flops = 8192 * (6 * 124_475_904 + 12 * 12 * 768 * 1024)
    assert row["step_ms"] == 50.0 and row["per_second"] == pytest.approx(8192 / 0.05)
    assert row["tflops"] == pytest.approx(flops / 0.05 / 1e12) and row["mfu"] == pytest.approx(flops / 0.05 / 989e12)
    assert gpu.row_of(task, "", measured)["mfu"] is None
    lines = gpu.table([row, gpu.row_of(task, "", {"skipped": "a | b"})]).splitlines()
    said, skipped = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:])
    assert said[:4] == ["8 x 1,024", "this project", "50.0 (40.0 to 60.0)", "163,840"]
    assert said[-4:] == ["9.50", "-", "3.0", "so"] and skipped[-1] == "skipped: a / b"


@pytest.mark.slow
def test_plain_jax_computes_the_loss_of_the_others():
    """Beside PyTorch's modules with the same weights, in float32."""
    import jax
    import jax.numpy as jnp
    import torch

    from benchmarks import other_programs as peers

    parameters = jax.tree.map(lambda x: 20 * x, peers.jax_gpt_parameters(gpu.TINY))  # each has a part in the loss
    named = {"tokens.weight": "tokens", "positions.weight": "positions", "head.weight": "tokens"}
    named |= {f"final_ln.{kind}": f"final_{kind}" for kind in ("weight", "bias")}
    state = {name: parameters[ours] for name, ours in named.items()}
    for i, layer in enumerate(parameters["layers"]):
        for name, value in layer.items():
            module, _, kind = name.replace("out_", "attention_out_", name.startswith("out")).rpartition("_")
            state[f"blocks.{i}.{module}.{kind}"] = value.T
    model = peers.StraightGPT(gpu.TINY)
    model.load_state_dict({name: torch.from_numpy(np.array(value)) for name, value in state.items()})
    tokens = np.random.default_rng(0).integers(gpu.TINY.vocab_size, size=(2, 17), dtype=np.int32)
    theirs = model(torch.from_numpy(tokens[:, :-1]).long()).flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(theirs, torch.from_numpy(tokens[:, 1:]).long().flatten())
    attention = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="xla")
    with jax.default_device(jax.devices("cpu")[0]):
        for way in (attention, peers.jax_attention):
            found = peers.jax_gpt_loss(parameters, tokens, gpu.TINY.num_heads, jnp.float32, way)
            assert float(found) == pytest.approx(expected.item(), rel=1e-4)


def test_goals_have_a_verdict():
    def row(name, step_ms, peak_gib, mfu=0.4):
        return dict(row=name, step_ms=step_ms, peak_gib=peak_gib, mfu=mfu)

    rows = [row("gpt2_8.ours", 16.0, 5.4), row("gpt2_8.nanogpt", 20.0, 5.0), row("gpt2_32.ours", 52.0, 9.0, 0.51)]
    rows += [dict(row="gpt2_32.nanogpt", skipped="so")]
    assert [line.partition("goal       ")[2] for line in gpu.verdicts(rows)] == [
        "gpt2_8: at most 0.8 of nanoGPT's way: 0.80, met",
        "gpt2_8: at most 15 ms a step: 16.00, NOT met",
        "gpt2_32: at most 0.85 of nanoGPT's way: not measured",
        "gpt2_32: MFU of at least 0.5: 0.51, met",
        "gpt2_8: at most 1.1 of the least memory: 1.08, met",
        "gpt2_32: at most 1.1 of the least memory: not measured",
    ]
    assert {f"{task}.ours" for task, *_ in gpu.GOALS} <= set(gpu.ROWS)


def test_a_row_for_which_no_time_is_left_says_so(monkeypatch, capsys):
    limits = []

    def answer_of(*command, limit, **_):
        limits.append(limit)
        raise RuntimeError("tried")

    monkeypatch.setattr(gpu, "answer_of", answer_of)
    monkeypatch.setattr(gpu, "read_card", lambda: "")
    for limit in ("0", "480"):
        monkeypatch.setattr("sys.argv", ["gpu.py", "--rows", "gpt2_8.jax", "--all_limit", limit])
        assert gpu.main() == 1
    said = capsys.readouterr().out
    assert "no time left of 0 s; ask for it by --rows" in said and "goal       gpt2_8: " in said
    assert len(limits) == 1 and 0 < limits[0] <= 300


def is_running(process: int) -> bool:
    status = Path(f"/proc/{process}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize(
    "shell, reason",
    [
        ("echo noise; echo '{\"loss\": 1.0}'", ""),
        ("sleep 1000 & echo $! >$STARTED.part; mv $STARTED.part $STARTED; wait", "killed after 3 s"),
        ("echo 'ValueError: too large' >&2; echo a hint >&2; exit 1", "ValueError: too large"),
        ("echo loading >&2; echo 'error: no GPU' >&2; echo 'error: it ended' >&2; exit 2", "error: no GPU"),
        ("printf '\u256d\u2500\\n\u2502 invalid choice \u2502\\n\u2570\u2500\u256f\\n' >&2; exit 2", "invalid choice"),
        ("exit 7", "exit code 7, and it said nothing"),
    ],
)
def test_a_program_answers_or_says_why_not(shell, reason, tmp_path, monkeypatch):
    """What the hanging one has started is killed with it."""
    started = tmp_path / "started"
    monkeypatch.setattr(children.sys, "executable", "sh")
    settings = dict(limit=3.0 if "killed" in reason else 600.0, env=dict(os.environ, STARTED=str(started)))
    if not reason:
        assert children.answer_of("-c", shell, **settings) == {"loss": 1.0}
        return
    with pytest.raises(RuntimeError) as error:
        children.answer_of("-c", shell, **settings)
    assert str(error.value) == reason
    while started.exists() and is_running(int(started.read_text())):  # the signal is sent; it dies when it is next run
        time.sleep(0.01)


def test_a_rehearsal_on_the_cpu(tmp_path, monkeypatch, capsys):
    """Ours is what the test environment has: torch_xla. Each program is forked, where a user's is a start."""

    def answer_of(*command, env, **_):
        done = run(*command, **env)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    monkeypatch.setattr(gpu, "answer_of", answer_of)
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
    assert said.count("\n| 2 x 64 ") == 3


@pytest.mark.slow
def test_every_other_program(tmp_path):
    """One row of each way that is not rehearsed. What is not installed is skipped; what is, runs."""
    wanted = ("gpt2_8.hugging_face", "gpt2_8.ours_any_order")
    asked = ("--rows", *wanted, "--limit", "600", "--all_limit", "3600", "--out", tmp_path / "out.json")
    done = run(*TINY, *asked, timeout=3600, XLA_FLAGS=QUICKLY_COMPILED)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row["row"] for row in rows] == list(wanted)
    for row in rows:
        assert row.get("first_step_seconds") or "ModuleNotFoundError" in row["skipped"], row


def test_a_row_that_is_not_there_is_refused():
    done = run("benchmarks/gpu.py", "--rows", "gpt3*")
    assert done.returncode == 2 and "expected some of gpt2_8.ours, " in done.stderr
    listed = run("benchmarks/gpu.py", "--list", "--rows", "gpt2_32.*,gpt2_8.jax")
    assert listed.stdout.split() == [n for n in gpu.ROWS if n.startswith("gpt2_32.") or n == "gpt2_8.jax"]
