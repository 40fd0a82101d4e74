"""aot_tpu.py --hlo: programs that jax wrote (tests/jax_program.py), held against what jax says of them itself."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax_program import BATCH, LENGTH, WIDTH
from jaxlib._jax import HloModule
from mutations import mutated
from processes import ROOT, run

import aot_tpu
from tpu_compiler import given
from tpu_compiler.decide import search
from tpu_compiler.estimate.report import GIVEN_PLAN_ERROR, PLANNED, ROOFLINE, Report
from tpu_compiler.given_program import check_flags, read_program
from tpu_utils.base.errors import InputError
from tpu_utils.base.hardware import GIB
from tpu_utils.options.virtual_slice import COMPILER_VARIABLE

FORMS = ("shardy.mlir", "shardy.txt", "exported.bin", "portable.bytecode", "gspmd.mlir")


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("programs")
    done = run(ROOT / "tests" / "jax_program.py", folder, "v6e-8")
    assert done.returncode == 0, done.stderr
    return folder


def ask(capsys, *arguments) -> Report:
    assert aot_tpu.main([*map(str, arguments), "--json", "--no_cache"]) == 0
    return Report(**json.loads(capsys.readouterr().out)[0])


def test_each_form_is_the_same_program(programs):
    """Its inputs, what it overwrites, its operations and their shapes; so one of them is compiled for all."""

    def said(form):
        traced = read_program(programs / form)
        text = HloModule.from_serialized_hlo_module_proto(traced.hlo).to_string()
        return traced.partitions, traced.shardy, traced.donated, sorted(re.findall(r" = (.*?[a-z])\(", text))

    expected = said("shardy.mlir")
    assert expected[:2] == (8, True) and len(expected[3]) > 50
    assert all(said(form) == expected for form in FORMS if form != "gspmd.mlir")


@pytest.mark.parametrize("form, partitioner", [("shardy.mlir", "Shardy"), ("gspmd.mlir", "GSPMD")])
def test_memory_is_what_jax_says_itself(programs, forked, monkeypatch, capsys, tmp_path, form, partitioner):
    monkeypatch.setenv("AOT_TPU_CACHE", str(tmp_path))
    question = ["--hlo", str(programs / form), "--topology", "v6e-8"]
    assert aot_tpu.main([*question, "--json"]) == 0
    r = Report(**json.loads(capsys.readouterr().out)[0])
    stats = json.loads((programs / "memory.json").read_text())
    assert r.devices == 8 and r.fits and set(r.collectives) == {"all-gather", "all-reduce", "reduce-scatter"}
    assert r.memory["inputs"] == stats["argument_size_in_bytes"]
    assert stats["alias_size_in_bytes"] and "4 of 5 inputs are overwritten (donated)" in r.notes
    assert r.memory["program"] == stats["generated_code_size_in_bytes"]
    assert r.memory["activations"] == pytest.approx(stats["temp_size_in_bytes"], abs=4096)  # the tuple of results
    assert r.predicted_ms > 0
    assert any(kind.startswith("product ") for kind, _ in r.costliest_operations)
    if form == "shardy.mlir":  # with debug_info
        assert any(line.startswith("jax_program.py:") for line, _ in r.costliest_lines), r.costliest_lines
    assert aot_tpu.main(question) == 0  # what is kept of the compile, for people
    said = capsys.readouterr().out
    assert aot_tpu.main([*question, "--plan", "--json"]) == 0  # plans are held against plans
    plan = Report(**json.loads(capsys.readouterr().out)[0])
    assert plan.reason == PLANNED and not plan.from_cache and plan.estimate_label == ROOFLINE
    for words in ("compiles and fits (SPMD over 8 devices)", "predicted step", "costliest kinds"):
        assert words in said
    assert f"sharded by {partitioner}" in said


@pytest.mark.slow
@pytest.mark.parametrize("form", ["alone.mlir", "alone.txt"])
def test_one_device_overwrites_what_the_program_says(programs, forked, capsys, form):
    r = ask(capsys, "--hlo", programs / form, "--topology", "v6e-1", "--plan")
    assert r.devices == 1 and not r.collectives and "4 of 5 inputs are overwritten (donated)" in r.notes
    assert r.memory["inputs"] == 4 * 12 * WIDTH**2 + 4 * BATCH * LENGTH * WIDTH


def test_kernels_that_the_compiler_cannot_read_are_refused_before_minutes_of_compile(forked, capsys, tmp_path):
    """jax without a TPU writes its newest version of them; a plan compiles none."""
    file = tmp_path / "splash.mlir"
    done = run(ROOT / "tests" / "splash_program.py", file, JAX_PLATFORMS="cpu")
    assert done.returncode == 0, done.stderr
    question = ["--hlo", str(file), "--topology", "v6e-1", "--no_cache"]
    assert aot_tpu.main(question) == 1
    said = capsys.readouterr().out
    assert "does not compile" in said and "kernels of version 8, and libtpu 0.0.21 reads 7 at most" in said
    assert ask(capsys, *question[:-1], "--plan").predicted_ms > 0.1


PLAIN = """module { func.func public @main(%x: tensor<1024x1024xf32>) -> tensor<1024x1024xf32> {
  %y = stablehlo.dot_general %x, %x, contracting_dims = [1] x [0] :
    (tensor<1024x1024xf32>, tensor<1024x1024xf32>) -> tensor<1024x1024xf32>
  return %y : tensor<1024x1024xf32> } }"""


PINNED = '{mhlo.memory_kind = "pinned_host"}'


def test_a_program_needs_no_attributes(forked, capsys, tmp_path):
    (tmp_path / "plain.mlir").write_text(PLAIN)
    assert aot_tpu.main(["--hlo", f"{tmp_path}/plain.mlir", "--topology", "v6e-1", "--plan", "--json"]) == 0
    (report,) = json.loads(capsys.readouterr().out)
    assert report["memory"]["inputs"] == 4 << 20 == pytest.approx(report["memory"]["activations"], abs=4096)


SUMMED = """
module @m attributes {mhlo.num_partitions = 8 : i32} {
  func.func private @layer(%x: tensor<8x8xf32>) -> tensor<8x8xf32> {
    %0 = "stablehlo.all_reduce"(%x) <{
      channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
      replica_groups = dense<[[0, 1, 2, 3, 4, 5, 6, 7]]> : tensor<1x8xi64>, use_global_device_ids
    }> ({
      ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %s = stablehlo.add %a, %b : tensor<f32>
      stablehlo.return %s : tensor<f32>
    }) : (tensor<8x8xf32>) -> tensor<8x8xf32>
    return %0 : tensor<8x8xf32>
  }
  func.func public @main(%x: tensor<8x8xf32>) -> tensor<8x8xf32> {
    %0 = call @layer(%x) : (tensor<8x8xf32>) -> tensor<8x8xf32>
    %1 = stablehlo.tanh %0 : tensor<8x8xf32>
    %2 = call @layer(%1) : (tensor<8x8xf32>) -> tensor<8x8xf32>
    return %2 : tensor<8x8xf32>
  }
}
"""


def test_each_collective_has_a_channel_of_its_own(tmp_path):
    """jax.shard_map writes all on channel 1: of eight all-reduces one was counted, and none waited for."""

    def channels(hlo: bytes) -> list[str]:
        text = HloModule.from_serialized_hlo_module_proto(hlo).to_string()
        return re.findall(r" all-reduce\(.*channel_id=(\d+)", text)

    (tmp_path / "summed.mlir").write_text(SUMMED)
    hlo = read_program(tmp_path / "summed.mlir").hlo
    first, second = channels(hlo)
    assert first != second
    text = (
        HloModule.from_serialized_hlo_module_proto(hlo)
        .to_string()
        .replace(f"channel_id={second}", f"channel_id={first}")
    )
    text = text.replace("HloModule m,", "HloModule m, num_partitions=8,")
    (tmp_path / "summed.txt").write_text("// a comment\n\n" + text)
    read = read_program(tmp_path / "summed.txt")
    assert len({*channels(read.hlo)}) == 2 and read.partitions == 8, "its header counts behind a comment too"


def test_what_cannot_be_asked(programs, forked, capsys, tmp_path):
    empty, junk, private = tmp_path / "empty", tmp_path / "junk", tmp_path / "private.mlir"
    empty.write_bytes(b"")
    junk.write_bytes(bytes(range(256)) * 64)
    private.write_text("module { func.func private @main() }")  # without a body, which breaks jax's own conversion
    dynamic = tmp_path / "dynamic.mlir"
    dynamic.write_text("module { func.func @main(%a: tensor<?xf32>) -> tensor<?xf32> { return %a : tensor<?xf32> } }")
    host = tmp_path / "host.mlir"
    host.write_text(PLAIN.replace("%x: tensor<1024x1024xf32>", f"%x: tensor<1024x1024xf32> {PINNED}"))
    for path, words, slice_name in (
        (host, 'an argument of main lies in "pinned_host"', "v6e-1"),
        (tmp_path, "is a folder", "v6e-8"),
        (tmp_path / "absent", "no such file", "v6e-8"),
        (empty, "is empty", "v6e-8"),
        (junk, "cannot be read", "v6e-8"),
        (Path(__file__), "cannot be read", "v6e-8"),
        (private, "no function main with a body", "v6e-8"),
        (dynamic, "shapes that are not fixed", "v6e-8"),
        (programs / "callback.mlir", "calls the host while it runs", "v6e-8"),
        (programs / "optimized.txt", "was optimized already", "v6e-8"),
        (programs / "shardy.mlir", "is a program for 8 devices, and v6e-4 has 4", "v6e-4"),
    ):
        assert aot_tpu.main(["--hlo", str(path), "--topology", slice_name]) == 2
        said = capsys.readouterr().err
        assert words in said and str(path) in said and said.count("error: ") == 1 and "Traceback" not in said, said


def test_the_flags_of_libtpu_are_said_and_none_is_passed_over(programs, capfd, monkeypatch):
    question = ["--hlo", str(programs / "shardy.mlir"), "--topology", "v6e-8", "--plan"]
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_scoped_vmem_limit_kib=65536")
    assert aot_tpu.main([*question, "--compiler_options", "--xla_enable_async_all_gather=true"]) == 0
    said = capfd.readouterr().out
    assert "--xla_tpu_scoped_vmem_limit_kib=65536 --xla_enable_async_all_gather=true" in said
    assert GIVEN_PLAN_ERROR in said and "costliest kinds" in said and "costliest lines" in said
    assert "--compiler_options xla_jf_spmd_threshold_for_windowed_einsum_mib=1000000 is for nowhere" in said
    both = ["--compiler_options", "--xla_enable_async_all_gather=true", "--compiler_options=xla_tpu_enable_x=1"]
    assert given.take_flags([*question, *both]) == (f"{both[1]} xla_tpu_enable_x=1", question)
    for flags in ("flags.txt", "xla_enable_async_all_gather=true", "--xla_enable_async_all_gather=true,--xla_b=1"):
        monkeypatch.setenv("LIBTPU_INIT_ARGS", flags)
        assert aot_tpu.main(question) == 2
        assert f"LIBTPU_INIT_ARGS has {flags}; expected --NAME=VALUE" in capfd.readouterr().err
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_scoped_vmem_limit_kb=1")
    assert aot_tpu.main(question) == 2
    assert "did you mean xla_tpu_scoped_vmem_limit_kib?" in capfd.readouterr().err


def test_flags_of_a_newer_compiler_are_those_that_it_has(monkeypatch, tmp_path):
    """A mistyped one ended its process, and the answer with exit code 1."""
    library = tmp_path / "lib" / "python3.11" / "site-packages" / "libtpu" / "libtpu.so"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"\0xla_of_a_newer_one\0")
    monkeypatch.setenv(COMPILER_VARIABLE, str(tmp_path))
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_of_a_newer_one=1")
    check_flags()
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_of_a_newer_on=1")
    with pytest.raises(InputError, match=r"does not have.*did you mean xla_of_a_newer_one\?"):
        check_flags()


def test_a_reader_that_has_enough_is_no_error():
    reader, output = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "aot_tpu.py", "--help"], cwd=ROOT, stdout=output, stderr=subprocess.PIPE)
    os.close(output)
    assert (done.returncode, done.stderr) == (0, b"")


def test_wrong_usage(programs, capsys, monkeypatch):
    path = str(programs / "shardy.mlir")
    for more, words in (
        (["--fit", "batch"], "--fit is for scripts"),
        (["--mesh", "1x8x1"], "--mesh 1x8x1 beside it has no effect"),
        (
            ["--compiler_option", "xla_a=1"],
            "--compiler_option xla_a=1 beside it has no effect; did you mean --compiler_options?",
        ),
        (["--vary_batch"], "--vary_batch has no effect without --search"),
        (["--plam"], "--plam beside it has no effect; did you mean --plan?"),
        (["--compiler_options", "xla"], "compiler_options has 'xla'; expected NAME=VALUE"),
        (["simple_mnist_tpu.py"], "beside it has no effect"),
        (["--tokens", "1e9"], "--tokens has no effect with --hlo"),
        (["--price", "v6e=2.7"], "--price has no effect with --hlo"),
        (["--batch_per_device", "8"], "--batch_per_device is for a script at one setting"),
    ):
        assert aot_tpu.main([*more, "--hlo", path, "--topology", "v6e-8"]) == 2
        assert words in capsys.readouterr().err
    assert aot_tpu.main(["--topology", "v6e-8"]) == 2
    assert "nothing to ask about" in capsys.readouterr().err
    monkeypatch.setattr(given, "MOST_BYTES", 100)
    assert aot_tpu.main(["--hlo", path, "--topology", "v6e-8"]) == 2
    assert "make arrays that it holds as constants arguments" in capsys.readouterr().err


def updates_in_a_loop(rows):
    """StableHLO of a step that scans 8 layers and keeps their inputs, over rows x 1,024 tokens."""

    def loss(weights, hidden):
        hidden, _ = jax.lax.scan(lambda h, w: (h + jax.nn.gelu(h @ w[0]) @ w[1], None), hidden, weights)
        return jnp.mean(hidden.astype(jnp.float32) ** 2)

    def step(weights, hidden):
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights, hidden))

    shapes = [(8, 2048, 4096), (8, 4096, 2048), (rows * 1024, 2048)]
    up, down, hidden = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
    traced = jax.jit(step, donate_argnums=0).trace((up, down), hidden)
    return traced.lower(lowering_platforms=("tpu",)).as_text()


@pytest.mark.slow
def test_memory_of_what_fits_leads_to_what_the_compiler_refuses(forked, capsys, tmp_path):
    """On one line over the batch: the sum of inputs and the compiler's temporaries would be far above what it says."""
    gib = {}
    for rows in (10, 20, 80):
        (tmp_path / f"{rows}.mlir").write_text(updates_in_a_loop(rows))
        code = aot_tpu.main(["--hlo", str(tmp_path / f"{rows}.mlir"), "--topology", "v5e-1", "--json", "--no_cache"])
        r = Report(**json.loads(capsys.readouterr().out)[0])
        assert (code, r.compiles, r.fits) == ((0, True, True) if rows < 80 else (1, False, False)), r.reason
        gib[rows] = (r.peak_bytes - r.memory.get("program", 0)) / GIB
    assert gib[80] == pytest.approx(gib[20] + (gib[20] - gib[10]) * 60 / 10, rel=0.02), gib


READ_EACH = """
import os, sys
from pathlib import Path
from tpu_compiler.given_program import read_program
from tpu_utils.base.errors import InputError
for path in sorted(Path(sys.argv[1]).iterdir()):
    child = os.fork()
    if not child:
        code = 1
        try:
            read_program(path)
            code = 0
        except InputError:
            code = 2
        finally:
            os._exit(code)
    print(path.name, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def test_a_damaged_program_is_read_or_refused(programs, tmp_path):
    """In processes of their own, as the parsers are C++: damaged bytecode can end one by a signal, a text cannot."""
    for form in FORMS:
        for number, damaged in enumerate(mutated((programs / form).read_bytes(), 8)):
            (tmp_path / f"{number}_{form}").write_bytes(damaged)
    done = subprocess.run([sys.executable, "-c", READ_EACH, tmp_path], cwd=ROOT, capture_output=True, text=True)
    codes = dict(line.split() for line in done.stdout.splitlines())
    assert len(codes) == 8 * len(FORMS), done.stderr
    for name, code in codes.items():
        expected = ("0", "2") if name.endswith((".mlir", ".txt")) else ("0", "2", "-6", "-11")
        assert code in expected, (name, done.stderr)
    assert "2" in codes.values()


def test_a_child_that_dies_is_said_of_the_file(programs, capsys, monkeypatch):
    monkeypatch.setattr(search, "run_script", lambda *_, **__: -6)
    assert aot_tpu.main(["--hlo", str(programs / "exported.bin"), "--topology", "v6e-8", "--no_cache"]) == 1
    said = capsys.readouterr().err
    assert said.count("error: ") == 1 and "exported.bin for v6e-8 was killed by signal 6" in said
