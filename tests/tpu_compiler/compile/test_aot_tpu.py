"""Asks the TPU compiler for real: each compile runs tiny_training.py or a training script in its own process."""

import dataclasses
import functools
import io
import json
import re
import shlex
import tempfile
import warnings
from base64 import b64encode
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from jax.extend.mlir import ir
from processes import QUICKLY_COMPILED, ROOT, Script, run
from reports import a_report

import aot_tpu
import config
from benchmarks import budgets
from config import DdpMnistConfig, DistributedMnistConfig, ImageConfig, MnistConfig
from images.cifar_config import CifarConfig
from language.options.transformer_options import TransformerConfig
from tools.generate import GenerateConfig
from tpu_compiler import answer, ask
from tpu_compiler.compile import tracing
from tpu_compiler.decide import search
from tpu_compiler.estimate import reading
from tpu_compiler.estimate.report import (
    COMMUNICATION_LABEL,
    ERROR,
    LABEL,
    PLAN_ERROR,
    PLANNED,
    ROOFLINE,
    Report,
    format_report,
)
from tpu_utils.base.errors import InputError, run_script
from tpu_utils.base.hardware import GENERATIONS, parse_topology
from tpu_utils.options import virtual_slice
from tpu_utils.options.compiler_flags import set_flags, torch_xla_flags
from tpu_utils.options.environment import choose_device
from tpu_utils.options.parsing import parse_command_line, presets_of
from tpu_utils.options.train_config import TrainConfig

TINY = ROOT / "tests" / "tiny_training.py"


@functools.cache
def compiled(script, *options, **variables):
    """The files that a compile leaves: {"report.json": ..., "program.txt": ..., ...}."""
    with tempfile.TemporaryDirectory() as folder:
        done = run(script, *options, AOT_TPU_OUTPUT=folder, **variables)
        assert Path(folder, "report.json").exists(), done.stderr
        files = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    files["report.json"] = Report(**json.loads(files["report.json"]))
    assert done.returncode == files["report.json"].exit_code
    return files


@functools.cache
def executed_hlo(script, *options, devices=1):
    """The text of the program that the step really was, before optimization, as the XLA CPU client received it."""
    with tempfile.TemporaryDirectory() as folder:
        flags = f"{QUICKLY_COMPILED} --xla_dump_to={folder}"  # flags of which no script asks XLA, in a cold process
        done = run(script, *options, PJRT_DEVICE="CPU", CPU_NUM_DEVICES=str(devices), XLA_FLAGS=flags)
        assert done.returncode == 0, done.stderr
        (dump,) = Path(folder).glob("*train_step*.before_optimizations.txt")
        return dump.read_text()


def same_names(hlo_text):
    """HLO text without the module's name, notes about source lines and the numbers in names.

    An input that says it is replicated and one that says nothing (a placeholder) are the same to the compiler.
    """
    text = re.sub(r", (metadata|backend_config|frontend_attributes)=\{[^{}]*\}", "", hlo_text)
    text = re.sub(r"(parameter\(\d+\)), sharding=\{replicated\}", r"\1", text)
    names = {}
    body = "\n".join(text.splitlines()[1:]).strip()
    return re.sub(r"%[\w.\-]+", lambda match: names.setdefault(match[0], f"%n{len(names)}"), body)


def assert_compiles_what_runs(files, executed):
    from jaxlib._jax import HloModule

    traced = HloModule.from_serialized_hlo_module_proto(files["traced.hlo.pb"]).to_string()
    assert same_names(traced) == same_names(executed)
    donors = re.search(r"buffer_donor=\{(.*?\)) \}", executed.splitlines()[0])[1]
    donated = json.loads(files["inputs.json"])["donated"]
    assert [i for i, d in enumerate(donated) if d] == [int(i) for i in re.findall(r"\((\d+), \{\}\)", donors)]


# ------------------------------------------------------------------------------------------------------------- slices
@pytest.mark.parametrize(
    "name, compiler_name, devices",
    [
        ("v5litepod-8", "v5e:2x4", 8),
        ("v5e-16", "v5e:4x4", 16),
        ("v5e:4x4", "v5e:4x4", 16),
        ("v4-8", "v4:2x2x1", 4),
        ("v5p:2x2x2", "v5p:2x2x2", 8),
        ("v6e-256", "v6e:16x16", 256),
        ("2xv5litepod-16", "v5e:4x4", 32),
        ("v5p-8192", "v5p:16x16x16", 4096),
        ("tpu7x-2", "tpu7x:1x1x1", 2),
        ("2xTPU7x-16", "tpu7x:2x2x2", 32),
        ("v5p-10", "slice of 10 cores; expected one of 8, 16", 0),
        ("v5p-9", "nearest is v5p-8", 0),
        ("v6e:3x3", "nearest is v6e:2x4", 0),
        ("v5litpod-8", "did you mean v5litepod-8?", 0),
        ("v9-8", "expected a TPU slice such as v5litepod-8", 0),
        ("", "not understood", 0),
    ],
)
def test_a_name_is_a_slice_or_refused(name, compiler_name, devices):
    if not devices:
        with pytest.raises(ValueError, match=compiler_name):
            parse_topology(name)
        return
    topology = parse_topology(name)
    assert (topology.compiler_name, topology.num_devices) == (compiler_name, devices)


# ----------------------------------------------------------------------------------------------------- reading programs
def test_bytes_as_laid_out_in_tiles():
    assert reading.shape_bytes("f32[3,200]{1,0:T(8,128)}") == [8 * 256 * 4]
    assert reading.shape_bytes("f32[3,200]{0,1:T(8,128)}") == [128 * 200 * 4]
    assert reading.shape_bytes("(bf16[16,128]{1,0:T(8,128)(2,1)S(1)}, f32[]{:T(128)})") == [4096, 4]
    assert reading.shape_bytes("f32[3,200]{1,0:T(8,128)}", padded=False) == [2400]


@pytest.mark.parametrize(
    "scope, line, module",
    [
        ("backward in <Net>.9/xla__scan/call.17/a.py_40 in <Net backward>.8/gpt.py_57 in <b.3>.2", "gpt.py:57", "b.3"),
        ("x.py_1/xla__scan/call.6/a.py_5 backward.2", "a.py:5 backward", ""),
    ],
)
def test_the_innermost_scope_counts(scope, line, module):
    """A loop in the graph, or a backward pass in Python, opens scopes inside others."""
    text = f'  ROOT %f = f32[8]{{0}} fusion(%x), kind=kLoop, calls=%g, metadata={{op_name="{scope}/aten__mul"}}\n'
    (operation,) = reading.parse_program(f"ENTRY %main (x: f32[8]) -> f32[8] {{\n{text}}}\n")["ENTRY"]
    assert (reading.source_of(operation), reading.module_of(operation)) == (line, module)


def test_lines_of_jax_are_found_in_the_tables_of_a_newer_compiler():
    text = """HloModule m

FileNames
1 "/home/you/model.py"
2 "/home/you/train.py"

FileLocations
1 {file_name_id=2 function_name_id=1 line=3 end_line=3 column=0 end_column=9}
2 {file_name_id=1 function_name_id=2 line=57 end_line=57 column=4 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=1}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %f = f32[8]{0} negate(%x), metadata={op_name="jit(step)/transpose(jvp())/neg" stack_frame_id=2}
  ROOT %g = f32[8]{0} negate(%f), metadata={op_name="jit(step)/neg" stack_frame_id=9}
}
"""
    operations = reading.parse_program(reading.with_source_lines(text))["ENTRY"]
    unknown = "added by the compiler"
    assert [reading.source_of(o) for o in operations] == [unknown, "model.py:57 backward", unknown]


# ---------------------------------------------------------------------------------------------------- the real compiler
def test_one_device():
    r = compiled(TINY, "--compile_for", "v5litepod-1")["report.json"]
    weights = 8 * 128 * 128 * 4 + 5 * 128 * 4
    assert r.compiles and r.fits and r.exit_code == 0 and not r.collectives
    assert r.memory["parameters"] == pytest.approx(weights, rel=0.05)  # tiles round the biases up
    assert r.memory["optimizer_state"] == pytest.approx(2 * weights, rel=0.05)
    assert sum(r.memory.values()) == r.peak_bytes < r.limit_bytes
    assert 0.7 < r.flops_ratio < 1.1
    assert "alone, not measured; excludes flash kernels" in r.estimate_label
    assert r.predicted_ms == r.predicted_ms_all_hidden == r.predicted_ms_nothing_hidden == r.estimated_ms + r.ruled_ms
    source = TINY.read_text().splitlines()
    lines = {line.split(":")[1] for line, _ in r.costliest_lines}
    for mark in ("down(torch.nn", "# UPDATE"):  # forward, backward and optimizer: each under the line that caused it
        number = next(i for i, text in enumerate(source, 1) if mark in text)
        assert any(line.split()[0] == str(number) for line in lines), r.costliest_lines
    assert any(line.endswith(" backward") for line in lines)
    modules = dict(r.costliest_modules)
    assert modules.keys() >= {"up", "up backward", "down", "down backward"}
    assert sum(modules.values()) < r.estimated_ms and modules["down backward"] > modules["down"]
    sizes = [size for size, *_ in r.largest_results]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] == 128 * 512 * 4, r.largest_results  # a matrix's gradient


def test_a_script_says_what_was_measured_on_such_a_chip(tmp_path):
    """Else the error of published steps."""
    machine = {"chip": "v5e", "num_devices": 1, "versions": {"libtpu": "0.0.21"}}
    (tmp_path / "calibration").mkdir()
    file = tmp_path / "calibration" / "calibration.json"
    file.write_text(json.dumps({"format": 2, "machine": machine, "ratios": {"a": 1.1}}))
    done = Script(TINY, "--compile_for", "v5litepod-1", folder=tmp_path)
    assert done.wait() == 0, done.text("err")
    said, before = done.text("out"), format_report(compiled(TINY, "--compile_for", "v5litepod-1")["report.json"])
    assert ERROR in before and "calibration  " not in before
    assert ERROR not in said and "calibration        measured on v5e: 1.10 x the predicted step (n = 1)" in said


def test_compiles_what_runs_on_one_device():
    assert_compiles_what_runs(compiled(TINY, "--compile_for", "v5litepod-1"), executed_hlo(TINY))


def test_compiles_what_runs_on_a_mesh():
    files = compiled(TINY, "--compile_for", "v5litepod-8", "--shard_parameters")
    assert_compiles_what_runs(files, executed_hlo(TINY, "--shard_parameters", devices=8))
    collectives = files["report.json"].collectives
    weights = 8 * 128 * 128 * 4
    assert collectives["all-gather"]["bytes"] >= weights / 4  # the compiler gathers part of it as bfloat16
    assert collectives["reduce-scatter"]["bytes"] >= weights / 2
    assert files["report.json"].memory["parameters"] == pytest.approx(weights / 8, rel=0.2)


def test_a_program_of_ours_given_as_hlo_has_the_same_answer(tmp_path, capfd, monkeypatch):
    """As XLA dumps it on a CPU, with torch_xla's options of the compiler."""
    slice_name = "v5litepod-8"
    ours = compiled(TINY, "--compile_for", slice_name, "--shard_parameters")["report.json"]
    (tmp_path / "dump.txt").write_text(executed_hlo(TINY, "--shard_parameters", devices=8))
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "")
    set_flags(torch_xla_flags(parse_topology(slice_name).generation))
    assert aot_tpu.main(["--hlo", str(tmp_path / "dump.txt"), "--topology", slice_name, "--json"]) == 0
    r = Report(**json.loads(capfd.readouterr().out)[0])
    assert (r.peak_bytes, r.compiler_peak_bytes, r.flops) == (ours.peak_bytes, ours.compiler_peak_bytes, ours.flops)
    assert r.collectives == ours.collectives
    assert r.predicted_ms == pytest.approx(ours.predicted_ms) and r.ruled_ms == pytest.approx(ours.ruled_ms)


def test_placeholders_give_the_same_program():
    files = compiled(TINY, "--compile_for", "v5litepod-8", "--shard_parameters", "--placeholders")
    assert_compiles_what_runs(files, executed_hlo(TINY, "--shard_parameters", devices=8))


def test_state_that_an_optimizer_has_not_created_yet_is_counted_and_said():
    """As with the state there, but that torch's own count of steps is (); sharded as the parameters are."""
    options = ("--compile_for", "v5litepod-8", "--shard_parameters", "--placeholders")
    expected = compiled(TINY, *options)["report.json"]
    with tempfile.TemporaryDirectory() as folder:
        done = run(TINY, *options, "--without_state", AOT_TPU_OUTPUT=folder)
        found = Report(**json.loads(Path(folder, "report.json").read_text()))
    assert found.memory["parameters"] == expected.memory["parameters"]
    assert found.memory["optimizer_state"] == pytest.approx(expected.memory["optimizer_state"], rel=0.03)
    assert found.estimated_ms == pytest.approx(expected.estimated_ms, rel=0.03)
    assert "warning: AdamW has no state yet; the report counts the 12 tensors" in done.stderr, done.stderr
    assert "make_optimizer" in done.stderr


OPTIMIZERS = [
    *(torch.optim.Adam, torch.optim.RMSprop, torch.optim.NAdam, torch.optim.Adagrad, torch.optim.SGD),
    partial(torch.optim.SGD, momentum=0.9),
    partial(torch.optim.AdamW, lr=torch.tensor(0.5), amsgrad=True),
    partial(torch.optim.Adam, decoupled_weight_decay=True),
]


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_the_state_created_is_that_of_a_first_step(make):
    def shapes(optimizer):
        states = [state for state in optimizer.state.values() if state]
        return [{name: (v.shape, v.dtype) for name, v in s.items() if isinstance(v, torch.Tensor)} for s in states]

    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    before = [parameter.clone() for parameter in model.parameters()]
    (weight, bias), more = model[0].parameters(), list(model[1].parameters())
    twin, real = (make([{"params": [weight, *more]}, {"params": [bias], "weight_decay": 0.1}]) for _ in range(2))
    assert len(tracing.create_state(twin)) == (0 if make is torch.optim.Adagrad else sum(map(len, shapes(twin))))
    assert all(map(torch.equal, model.parameters(), before)) and tracing.create_state(twin) == []
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    real.step()
    assert shapes(twin) == shapes(real)


def test_state_that_cannot_be_worked_out_is_refused():
    with pytest.raises(InputError, match=r"LBFGS has no state yet, and what its first step creates.*make_optimizer"):
        ask.prime(torch.optim.LBFGS(torch.nn.Linear(2, 2).parameters()))


def test_replicas_reduce_each_gradient_once():
    r = compiled(TINY, "--compile_for", "v5litepod-8", "--strategy", "ddp")["report.json"]
    assert r.program == "8 replicas" and r.devices == 8
    assert list(r.collectives) == ["all-reduce"]
    assert r.collectives["all-reduce"]["bytes"] == pytest.approx(8 * 128 * 128 * 4 + 5 * 128 * 4, rel=0.01)


@pytest.mark.slow
def test_over_the_limit_with_the_compilers_figures():
    batch = 2**23  # (batch, 512) float32 between the layers
    options = ("--compile_for", "v5litepod-1", "--placeholders", "--global_batch_size", str(batch))
    r = compiled(TINY, *options)["report.json"]
    assert not r.compiles and not r.fits and r.exit_code == 1
    assert re.search(r"Ran out of memory in memory space hbm. Used [\d.]+G of 15.75G hbm. Exceeded", r.reason)
    assert r.over_bytes > 0 and r.memory["inputs"] == pytest.approx(batch * 128 * 4, rel=0.01)


@pytest.mark.slow
def test_arguments_alone_over_the_limit():
    """The compiler lets this pass: its own check leaves the arguments out."""
    r = compiled(TINY, "--compile_for", "v5litepod-1", "--placeholders", "--width", "14336")["report.json"]
    assert not r.fits and r.over_bytes > 0 and r.memory["parameters"] >= 8 * 14336**2 * 4


def assert_compiles_what_a_script_runs(files: dict, name: str, *options: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        script = executed_hlo(ROOT / name, *options, "--run_dir", f"{folder}/run", "--device", "cpu")
    assert_compiles_what_runs(files, script)


def test_compiles_what_a_training_script_runs(tmp_path):
    """Its trace alone: convolutions take the TPU's compiler seconds."""
    options = ("--num_epochs=1", "--warmup_steps=5", "--channels=4", "--hidden_dim=23")
    traced("simple_mnist_tpu.py", "v5litepod-1", *options, AOT_TPU_OUTPUT=tmp_path)
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert_compiles_what_a_script_runs(files, "simple_mnist_tpu.py", *options)


@pytest.mark.slow
def test_compiles_what_a_scanned_and_accumulated_step_runs():
    """torch_xla's scan traces its body with tensors of its own, which must not become inputs of the program."""
    options = ("--gradient_accumulation_steps=4", "--scan_layers", "--num_steps=2", "--warmup_steps=1")
    options += ("--embedding_dim=32", "--sequence_length=16", "--global_batch_size=8")
    files = compiled(ROOT / "transformer_tpu.py", "--compile_for", "v5litepod-1", *options)
    assert_compiles_what_a_script_runs(files, "transformer_tpu.py", *options)
    r = files["report.json"]
    assert r.memory["inputs"] < r.memory["parameters"] and r.loops and r.flops_ratio is None


def planned_on_eight(*options) -> Report:
    """A plan has the whole program, and takes none of the seconds of its machine code."""
    asked = (ROOT / "transformer_tpu.py", "--compile_for", "v5litepod-8", *options)
    return compiled(*asked, AOT_TPU_PLAN="1")["report.json"]


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--scan_layers", "--remat"]])
def test_accumulated_gradients_are_reduced_once_a_step(more):
    """In float32, by as many all-reduces as one part alone would have, not once in each of the 4 parts."""
    options = ("--mesh=8x1x1", "--gradient_accumulation_steps=4", "--num_layers=1", "--sequence_length=128")
    options += ("--vocab_size=64", "--precision=bfloat16", *more)
    r = planned_on_eight(*options)
    assert list(r.collectives) == ["all-reduce"] and r.collectives["all-reduce"]["count"] < 4
    assert r.collectives["all-reduce"]["bytes"] == pytest.approx(r.memory["parameters"], rel=0.1)


@pytest.mark.slow
def test_a_transformer_is_sharded_as_its_table_says():
    """Parameters and optimizer state alike, also where the traced step only reads them before it replaces them."""
    options = ("--mesh=2x4x1", "--num_layers=1", "--num_heads=4", "--embedding_dim=512", "--sequence_length=128")
    report = planned_on_eight(*options)
    assert report.notes == ["layers 1, width 512, vocabulary 64, batch 32, mesh 2x4x1"]  # what no size of a model says
    memory = report.memory
    weights = 12 * 512**2 * 4 / 4
    assert memory["parameters"] == pytest.approx(weights, rel=0.1)
    assert memory["optimizer_state"] == pytest.approx(2 * weights, rel=0.1)


@pytest.mark.slow
def test_muon_reduces_no_product_over_devices():
    """They exchange matrices, so that each is whole on one of them; what is reduced is smaller than one matrix."""
    options = ("--mesh=1x8x1", "--optimizer=muon", "--num_layers=1", "--num_heads=4", "--embedding_dim=512")
    options += ("--sequence_length=128", "--vocab_size=64", "--precision=bfloat16")
    r = planned_on_eight(*options)
    weights = 12 * 512**2
    assert r.collectives["all-reduce"]["bytes"] < 512**2
    assert r.collectives["all-to-all"]["bytes"] > weights * 2  # momentum in bfloat16, once or more


@pytest.mark.slow
def test_slots_of_a_mixture_change_places_once_there_and_once_back():
    """In both passes, and the router's weight of each slot. What a product reads next is sent in bfloat16, to which a
    TPU rounds its inputs."""
    options = ("--model_size=mixtral_tiny", "--mesh=1x1x1x1x8", "--expert_capacity=1.0", "--num_layers=1")
    options += ("--embedding_dim=128", "--num_heads=4", "--sequence_length=128", "--global_batch_size=8")
    r = planned_on_eight(*options)
    slots = 8 * (128 * 2 // 8)  # a device has one sequence: experts, each with its even share of 2 choices a token
    num_bytes = slots * 128 * (2 + 2 + 4 + 4) + slots * 4 * 2
    assert (r.collectives["all-to-all"]["count"], r.collectives["all-to-all"]["bytes"]) == (6, num_bytes)
    assert set(r.collectives) == {"all-to-all", "all-reduce"}  # no gather of tokens or of experts


# ------------------------------------------------------------------------------------------------------------- presets
# every preset of every script, for the slice it is meant for: rows called "SCRIPT PRESET"
ROWS = {row.name: row for row in budgets.read_rows()}
PRESETS = [name for name in ROWS if re.fullmatch(r"\w+_tpu\.py \w+", name)]
QUICK = "tests/tiny_training.py, FSDP, v5litepod-8"  # the others are compiled where their trace has changed


def test_no_preset_is_left_out():
    kinds = {MnistConfig: "simple_mnist", DistributedMnistConfig: "distributed_mnist"}
    kinds |= {DdpMnistConfig: "ddp_mnist", CifarConfig: "resnet_cifar"}
    kinds |= {TransformerConfig: "transformer"}
    ours = {kind for kind in vars(config).values() if isinstance(kind, type) and issubclass(kind, TrainConfig)}
    assert ours - {TrainConfig, ImageConfig} <= kinds.keys()
    assert {name.rpartition(":")[2] for name in config.CONFIGURATIONS} == {kind.__name__ for kind in kinds}
    expected = {f"{name}_tpu.py {preset}" for kind, name in kinds.items() for preset in presets_of(kind)}
    assert set(PRESETS) == expected


def compile_row(row):
    script = shlex.split(row.ask)[0]
    if script.endswith(".py") and not row.planned:
        return compiled(ROOT / script, "--compile_for", row.slice, *row.options)["report.json"]
    return Report(**json.loads(run("aot_tpu.py", *row.command, "--json").stdout)[0])  # a module, or planned


def test_a_script_compiles_for_its_slice_as_in_the_budget():
    report = compile_row(ROWS[QUICK])
    assert_is_in_budget(report, ROWS[QUICK])
    assert any(line.startswith("tiny_training.py:") for line, _ in report.costliest_lines)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ROWS if name != QUICK and (name in PRESETS or ROWS[name].fast)])
def test_every_large_preset_and_headline_program_is_in_budget(name):
    """Headline programs that take less than a minute; benchmarks/budgets.py has the rest. A program that is traced as
    it was for the kept figures is not compiled again: it fitted, or there would be none."""
    if is_traced_as_before(ROWS[name]):
        return
    assert_is_in_budget(compile_row(ROWS[name]), ROWS[name])
    if name in PRESETS:  # until the row is renewed, each run of this test compiles it
        warnings.warn(f"{name} was compiled: benchmarks/budgets.py --renew --only '{name}'", stacklevel=1)


def is_traced_as_before(row) -> bool:
    script = shlex.split(row.ask)[0]
    if not script.endswith(".py") or row.versions != virtual_slice.check_private_interfaces():
        return False
    return traced(script, row.slice, *row.options) == row.traced


def traced(script, slice_name: str, *options: str, **variables: object) -> str:
    """The hash of a script's trace."""
    done = run("tests/traced_step.py", script, "--compile_for", slice_name, *options, PYTHONPATH=ROOT, **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[-1]


def test_the_hash_of_a_trace_knows_no_lines_and_sees_a_change_of_the_step(tmp_path):
    """The kept one is of the step as it is: else each run of the slow tests compiles every preset anew."""
    row = ROWS["simple_mnist_tpu.py quick_test"]
    assert is_traced_as_before(row), f"python benchmarks/budgets.py --renew --only '{row.name}', and other presets"
    copy, text = tmp_path / "simple_mnist_tpu.py", (ROOT / "simple_mnist_tpu.py").read_text()
    of_copy = dataclasses.replace(row, ask=row.ask.replace("simple_mnist_tpu.py", str(copy)))
    copy.write_text(text.replace("\nimport", "\n# a line more\nimport", 1))
    assert is_traced_as_before(of_copy)
    assert text.count("F.relu(") >= 2
    copy.write_text(text.replace("F.relu(", "F.silu(", 1))
    assert not is_traced_as_before(of_copy)


def test_the_hash_of_a_trace_knows_no_lines_of_a_kernel():
    """They have the folder in them: each clone would compile every preset with a kernel anew."""

    def program(file: str, value: int) -> str:
        kernel = f'module {{ "kernel.op"() {{value = {value} : i32}} : () -> () loc("{file}":1:1) }}'
        with ir.Context() as context, io.BytesIO() as body:
            context.allow_unregistered_dialects = True
            ir.Module.parse(kernel).operation.write_bytecode(body)
            return f'backend_config={{"custom_call_config": {{"body": "{b64encode(body.getvalue()).decode()}"}}}}'

    here, there, other = (program(*of) for of in (("/here/a.py", 1), ("/there/b.py", 1), ("/here/a.py", 2)))
    assert here != there and answer.without_lines(here) == answer.without_lines(there) != answer.without_lines(other)


def assert_is_in_budget(r, row):
    assert r.fits and (r.compiles or row.planned), r.reason
    assert r.topology == row.slice and (row.name not in PRESETS or r.settings["preset"] == row.name.split()[-1])
    # a script's language model says how many layers will be compiled
    assert bool(r.settings.get("layers")) == row.ask.startswith("transformer_tpu.py"), r.settings
    # what is to run on several devices talks between them, and nothing else does
    assert bool(r.collectives) == (r.devices > 1)
    moves = budgets.compared(row, dataclasses.asdict(r))
    assert not moves, f"{budgets.table(moves)}\nis it meant? benchmarks/budgets.py --renew --only '{row.name}'"


# --------------------------------------------------------------------------------------------------------- command line
def test_compare_slices(capsys, monkeypatch):
    answer = lambda _, topology, *__: compiled(TINY, "--compile_for", topology)["report.json"]  # noqa: E731
    monkeypatch.setattr(aot_tpu, "compile_script", answer)
    assert aot_tpu.main([str(TINY), "--topology", "v5litepod-1,v6e-1"]) == 0
    said = capsys.readouterr().out
    rows = [line for line in said.splitlines() if line.startswith("| v")]
    assert [row.split()[1] for row in rows] == ["v5litepod-1", "v6e-1"]
    assert LABEL in said and COMMUNICATION_LABEL in said and ERROR in said


def test_a_compile_in_a_process_of_its_own(tmp_path):
    """As a user asks for it, started cold."""
    done = run("aot_tpu.py", TINY, "--topology", "v5litepod-1", "--json", "--program", tmp_path, cold=True)
    assert done.returncode == 0, done.stderr
    (report,) = json.loads(done.stdout)
    text = (tmp_path / "tiny_training_v5litepod-1.txt").read_bytes()
    assert report["fits"] and text.startswith(b"HloModule")
    assert text == compiled(TINY, "--compile_for", "v5litepod-1")["program.txt"], "same input, same program"


def test_a_plan_has_the_memory_of_the_whole_compile(forked, capsys):
    code = aot_tpu.main([str(TINY), "--topology", "v5litepod-8", "--json", "--plan", "--no_cache", "--width", "1024"])
    alone = Report(**json.loads(capsys.readouterr().out)[0])
    whole = compiled(TINY, "--compile_for", "v5litepod-8", "--width", "1024")["report.json"]
    assert code == 0 and alone.fits and not alone.compiles and whole.compiles
    assert alone.collectives == whole.collectives
    assert alone.predicted_ms == pytest.approx(whole.predicted_ms, rel=0.2)
    for name in ("parameters", "optimizer_state", "inputs"):
        assert alone.memory[name] == pytest.approx(whole.memory[name], rel=0.01, abs=2**16), name
    assert alone.memory["activations"] == pytest.approx(whole.memory["activations"], rel=0.1, abs=2**20)
    assert alone.memory["program"] >= whole.memory["program"]
    assert not Path(tempfile.gettempdir(), "dump").exists() and search.PLAN_VARIABLE not in aot_tpu.os.environ


def test_a_plan_says_what_does_not_fit(forked, capsys):
    options = ["--plan", "--", "--placeholders", "--global_batch_size", str(2**23)]  # behind --: the script's
    assert aot_tpu.main([str(TINY), "--topology", "v5litepod-1", *options]) == 1
    said = capsys.readouterr().out
    assert said.startswith("v5litepod-1: does not fit (one device)") and re.search(r"GiB, over by [\d.]+ GiB", said)
    assert PLANNED in said and "step by roofline" in said and "predicted" not in said
    assert aot_tpu.main([str(TINY), "--topology", "v5litepod-1,v6e-1", "--plan"]) == 0
    said = capsys.readouterr().out
    assert ROOFLINE in said and PLAN_ERROR in said and ERROR not in said and LABEL not in said


FIT = [  # devices, parts, the script's own batch, the largest that memory alone says fits, the largest that compiles
    *((1, 1, 8, largest, largest) for largest in (1, 3, 8, 13, 64)),
    (1, 1, 8, 13, 11),  # the program itself is estimated where memory alone is asked
    *((8, 4, 48, largest, largest) for largest in (16, 48, 112)),  # as 2 x 2 x 2: multiples of 16, and 48 is none of 32
]


@pytest.mark.parametrize("devices, parts, own, most, largest", FIT)
def test_fit_finds_the_largest_and_compiles_that_alone(monkeypatch, devices, parts, own, most, largest):
    compiles, said, step = [], [], 16 if parts > 1 else 1

    def compile_script(script, topology, options, planned=False):
        size = int(options[-1]) if options else own
        assert size % step == 0
        compiles.extend([] if planned else [size])
        settings = {"global_batch_size": size, "gradient_accumulation_steps": parts}
        return a_report(devices=devices, fits=size <= (most if planned else largest), settings=settings)

    monkeypatch.setattr(search, "compile_script", compile_script)
    value, best = search.fit("script.py", f"v5litepod-{devices}", "global_batch_size", [], said.append)
    assert value == largest and best.fits and len(said) <= 14
    assert compiles == list(range(most, largest - 1, -step))


def test_fit_ends_at_what_the_script_refuses(monkeypatch):
    def compile_script(script, topology, options, planned=False):
        size = int(options[-1]) if options else 8
        if size > 12:
            raise search.ScriptError("the data set has 12 examples", 2)
        return a_report(settings={"global_batch_size": size})

    monkeypatch.setattr(search, "compile_script", compile_script)
    said = []
    assert search.fit("script.py", "v5litepod-1", "global_batch_size", [], said.append)[0] == 12
    assert "16: refused by script.py" in said[1]
    assert said[-1] == "global_batch_size 13 is refused by script.py, not for its memory"
    with pytest.raises(search.ScriptError, match="expected one of global_batch_size"):
        search.fit("script.py", "v5litepod-1", "learning_rate", [])


def test_options_are_replaced():
    options = ["--width", "4", "--global-batch-size=8", "--flag", "--remat"]
    replaced = ["--width", "4", "--flag", "--remat", "--global_batch_size", "16"]
    assert search.with_option(options, "global_batch_size", "16") == replaced
    assert search.with_option(options, "width", None) == options[2:]
    assert search.with_option(options, "flag", None) == [*options[:3], "--remat"]
    assert search.with_option(options, "remat", None) == options[:-1]


@pytest.mark.parametrize("size, experts", [("mixtral_tiny", 8), ("llama_tiny", 0)])
def test_a_question_says_how_many_experts_the_model_has(monkeypatch, size, experts):
    def asked(*_, settings, **__):
        raise InputError(json.dumps(settings))

    mesh = SimpleNamespace(mesh_shape=(1, 2, 1, 1, 4))
    monkeypatch.setattr(ask.xs, "get_global_mesh", lambda: mesh)
    monkeypatch.setattr(ask, "trace_step", lambda *_, **__: None)
    monkeypatch.setattr(ask, "ask_compiler", asked)
    with pytest.raises(InputError) as found:  # the step of a script takes its configuration
        config = TransformerConfig(model_size=size)
        ask.compile_for("v5litepod-8", print, config, examples=1, settings={"mesh": "auto", "num_layers": 2})
    assert json.loads(str(found.value)) == {"mesh": "1x2x1x1x4", "num_layers": 2, "layers": 2, "num_experts": experts}


def test_another_set_of_versions_is_named_before_anything_is_imported(monkeypatch, capsys):
    monkeypatch.setattr(virtual_slice, "TESTED_VERSIONS", {"torch_xla": "2.9.0", "jax": "0.9.9", "libtpu": "0.0.21"})
    with pytest.raises(RuntimeError, match=r"jax 0\.9\.9 \(found 0\.7\.1\)"):
        virtual_slice.check_private_interfaces()
    assert run_script(lambda: choose_device(MnistConfig(compile_for="v5litepod-1"))) == 2
    assert capsys.readouterr().err.count("found 0.7.1") == 1


@pytest.mark.parametrize(
    "kind, options, report, offered",
    [
        (
            TransformerConfig,
            ["--global_batch_size=8", "--num_layers=1", "--mesh=4x1x1"],
            dict(devices=4),
            ["--remat", "--loss_parts=8", "--gradient_accumulation_steps=2", "--mesh=1x4x1"],
        ),
        (
            TransformerConfig,
            ["--global_batch_size=8", "--num_layers=1", "--remat"],
            {},
            ["--offload=products", "--loss_parts=8", "--gradient_accumulation_steps=2"],
        ),
        (DistributedMnistConfig, [], dict(devices=4), ["--shard_parameters"]),
        (DistributedMnistConfig, [], {}, []),
        (DdpMnistConfig, [], dict(devices=4), []),
    ],
)
def test_options_that_save_memory_are_those_of_the_script(kind, options, report, offered):
    """What is offered is not in use yet, and the script takes it."""
    config = parse_command_line(kind, "", options)
    found = search.memory_savers(a_report(**report, settings=dataclasses.asdict(config)))
    assert [option for _, option in found] == offered
    replaced = [option for option in options if not option.startswith("--mesh")]
    parse_command_line(kind, "", [*replaced, *offered])


def test_what_saves_memory_in_a_generation():
    config = GenerateConfig(hf="x", context=16, compile_for="v5litepod-4")
    found = search.memory_savers(a_report(topology="v5litepod-4", settings=dataclasses.asdict(config)))
    assert [option for _, option in found] == ["--int8", "--devices=all"]


@pytest.mark.slow
def test_a_transformer_over_the_limit_says_what_would_help():
    """A v5e of 128 KiB; what would help is asked for a real one, in processes of its own. They plan; the
    compiles are of test_what_would_help_is_compiled."""
    smaller = "import sys, dataclasses, tpu_utils.base.hardware as h, tpu_compiler.of_script as it; "
    smaller += "h.GENERATIONS['v5e'] = dataclasses.replace(h.GENERATIONS['v5e'], limit_gib=2**-13); "
    smaller += "sys.exit(it.run(sys.argv[1:]))"
    tiny = "--num_layers 1 --embedding_dim 32 --num_heads 2 --sequence_length 16 --global_batch_size 8".split()
    words = ("-c", smaller, ROOT / "transformer_tpu.py", "--compile_for", "v5litepod-4", "--mesh", "4x1x1", *tiny)
    done = run(*words, AOT_TPU_PLAN="1")
    assert done.returncode == 1, done.stderr
    for option in ("--remat", "--gradient_accumulation_steps=2", "--mesh=1x4x1"):
        assert re.search(rf"\({option}\) +fits, 0\.\d\d of 15\.75 GiB", done.stdout), done.stdout


def test_a_v4_chip_is_one_device():
    """The compiler's own description has two devices in a v4 chip; a real one has one (megacore)."""
    r = compiled(TINY, "--compile_for", "v4-8", "--strategy", "ddp")["report.json"]
    assert (r.devices, r.program) == (4, "4 replicas") and r.limit_bytes == int(30.75 * 2**30)
    assert GENERATIONS["v4"].hbm_gib == 32


def test_the_script_in_the_docs_is_one_of_your_own(forked, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    page = (ROOT / "docs" / "ask_the_compiler.md").read_text()
    (text,) = re.findall(r"```python\n(import argparse.*?)```", page, re.S)
    script = tmp_path / "own.py"
    script.write_text(text)
    report = search.compile_script(str(script), "v6e-4", [])
    assert (report.topology, report.program, report.fits) == ("v6e-4", "one device, 3 of the slice idle", True)
    assert report.memory["parameters"] > 784 * 10 * 4


def test_a_script_that_compiles_for_another_slice_is_wrong_usage(tmp_path):
    report = compiled(TINY, "--compile_for", "v5litepod-1")["report.json"]
    (tmp_path / "report.json").write_text(json.dumps(dataclasses.asdict(report)))
    script = tmp_path / "own.py"
    script.write_text(f"import os, shutil; shutil.copy('{tmp_path}/report.json', os.environ['AOT_TPU_OUTPUT'])")
    with pytest.raises(search.ScriptError, match="was asked for v6e-1 and compiled for v5litepod-1") as caught:
        search.compile_script(str(script), "v6e-1", [])
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    "command, message",
    [
        (["tpu_utils/step/optim.py"], "optim.py ended without asking to compile a step"),
        ([str(TINY), "--global_batch_size", "9"], "error: global_batch_size (9) must be divisible by 8\n"),
        ([str(TINY), "--fit", "global_batch"], "not a number of"),
        ([str(TINY), "--minutes", "3"], "--minutes has no effect without --search"),
        ([str(TINY), "--minutes", "0"], "--minutes has no effect without --search"),
        ([str(TINY), "--batch_per_device", "8", "--global-batch-size=8"], "both say the batch; leave one out"),
    ],
)
def test_a_script_that_does_not_come_to_its_step_is_wrong_usage(forked, capsys, command, message):
    assert aot_tpu.main([*command, "--topology", "v5litepod-1"]) == 2
    said = capsys.readouterr().err
    assert message in said and len(re.findall("error: ", said)) == 1


def test_a_command_without_a_slice_is_one_message(capsys):
    for command, said in (
        (["simple_mnist_tpu.py"], "error: --topology is missing; name a slice, such as v6e-8\n"),
        (["simple_mnist_tpu.py", "--topolgy", "v6e-8"], "error: --topolgy is no option; did you mean --topology?\n"),
    ):
        assert aot_tpu.main(command) == 2
        assert capsys.readouterr().err == said


@pytest.mark.slow
def test_what_would_help_is_compiled():
    done = run(TINY, "--compile_for", "v5litepod-8", "--placeholders", "--global_batch_size", 2**26)
    assert done.returncode == 1
    assert re.search(r"--global_batch_size \d+ +fits", done.stdout)
    assert re.search(r"shard parameters and optimizer state \(--shard_parameters\) +", done.stdout)
