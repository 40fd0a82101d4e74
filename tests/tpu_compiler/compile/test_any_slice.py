"""Slices of any size: more devices than a process can have, several slices, TPU7x and a newer compiler."""

import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from processes import ROOT, run
from reports import a_report
from test_aot_tpu import compiled

import aot_tpu
from tpu_compiler.compile import compiling, newest
from tpu_compiler.compile.traced import Traced
from tpu_compiler.decide import search
from tpu_compiler.estimate import reading, schedule
from tpu_compiler.estimate.report import Report, format_report, format_table
from tpu_compiler.module import programs as modules
from tpu_utils.base.errors import InputError
from tpu_utils.base.hardware import parse_topology
from tpu_utils.options import virtual_slice

TINY = ROOT / "tests" / "tiny_training.py"
LLAMA = "--dataset=tokens --model_size=llama_tiny --precision=bfloat16 --attention=flash --scan_layers --remat".split()
LLAMA += ["--sequence_length=256"]
SMALL = "--num_layers=1 --embedding_dim=256 --num_heads=2 --sequence_length=16 --global_batch_size=128".split()
OTHERS = [
    ("transformer_tpu.py", ("--mesh=8x4x2", "--gradient_accumulation_steps=2", "--dropout=0.1", *SMALL)),
    ("resnet_cifar_tpu.py", ("--preset=distributed",)),
    ("distributed_mnist_tpu.py", ("--preset=production", "--global_batch_size=1280", "--shard_parameters")),
    ("ddp_mnist_tpu.py", ("--preset=production", "--global_batch_size=1280")),
]
# python -c TRACED N FILE SCRIPT ...: the program that the script traces, with eight virtual devices for more than N
TRACED = """
import sys
from pathlib import Path
import tpu_compiler.ask, tpu_compiler.of_script
import tpu_utils.options.virtual_slice

def only_traced(traced, *_, **__):
    Path(file).write_bytes(traced.hlo)
    print(traced.roles, traced.donated, traced.shardings, traced.partitions, traced.replicas)
    sys.exit()

most, file, *sys.argv = sys.argv[1:]
tpu_utils.options.virtual_slice.MOST_VIRTUAL_DEVICES = int(most)
tpu_compiler.ask.ask_compiler = only_traced
tpu_compiler.of_script.run(sys.argv)
"""


def traced(most, *arguments):
    """(serialized program, what is said of its inputs and devices) of a script, without asking the compiler."""
    with tempfile.NamedTemporaryFile() as file:
        done = run("-c", TRACED, most, file.name, *arguments, PYTHONPATH=ROOT)
        assert done.returncode == 0, done.stderr
        return Path(file.name).read_bytes(), done.stdout.splitlines()[-1]


# ------------------------------------------------------------------------------------------------- devices of a slice
@pytest.mark.parametrize(
    "script, options",
    [
        (TINY, ("--shard_parameters",)),
        (ROOT / "transformer_tpu.py", ("--mesh=8x8x1", "--global_batch_size=128", *LLAMA)),
        (TINY, ("--strategy", "ddp")),
        *(pytest.param(ROOT / name, options, marks=pytest.mark.slow) for name, options in OTHERS),
    ],
)
def test_eight_virtual_devices_trace_the_program_of_as_many_as_there_are(script, options):
    """Operation by operation, and its inputs: what 64 virtual devices trace for 64 chips."""
    (real, inputs), (few, same) = (traced(most, script, *options, "--compile_for", "v5e:8x8") for most in (64, 8))
    assert real and real == few and inputs == same
    assert inputs.endswith("1 64" if "ddp" in (script.stem + " ".join(options)) else "64 1")
    if "--remat" in options:  # what a backward pass computes again stands under its lines, one in Python under its own
        again = rb"llama\.py_\d+ %bin <Llama backward>"
        written = rb"flash_attention\.py_\d+ in <Llama backward backward>"
        for scope in (again % b"", again % b"backward ", written):
            assert re.search(scope, real), scope


def test_a_ddp_step_with_two_backward_passes_is_traced_for_a_slice(tmp_path):
    """Each pass averages gradients of its own; no replica is there that could agree on buckets in between."""
    text = (ROOT / "ddp_mnist_tpu.py").read_text()
    backward = "    loss.backward()"
    assert text.count(backward) == 1
    reduced = []
    for number in (1, 2):
        copy = tmp_path / f"passes_{number}.py"
        more = "\n    replica(images).square().mean().backward()" * (number - 1)
        copy.write_text(text.replace(backward, backward + more))
        program, inputs = traced(8, copy, "--compile_for=v5litepod-4")
        assert inputs.endswith("1 4")
        reduced.append(program.count(b"all-reduce"))
    assert reduced[1] > reduced[0]


def test_a_slice_of_512_devices_and_what_goes_between_its_two_halves():
    """Without --shard_parameters gradients alone are exchanged: within a slice, then a part of them with the other."""
    options = ("--placeholders", "--global_batch_size", "512", "--compile_for", "2xv5litepod-256")
    files = compiled(TINY, *options)
    r = files["report.json"]
    assert (r.devices, r.program, r.fits) == (512, "SPMD over 512 devices", True)
    gradients = 8 * 128 * 128 * 4 + 5 * 128 * 4
    assert list(r.slice_transfers) == ["all-reduce"] and 0 < r.slice_transfers["all-reduce"]["bytes"] <= gradients
    assert r.slice_transfers["all-reduce"]["sent_bytes"] == r.slice_transfers["all-reduce"]["bytes"]  # 2 (n - 1) / n
    assert r.slice_lower_bound_ms == pytest.approx(r.slice_transfers["all-reduce"]["bytes"] / 3.125e6)
    text = format_report(r)
    assert re.search(r"between slices +a device sends \d+ all-reduce \(0\.\d MB\)", text)
    assert "at least 0.0" in text and "data center network's 3.125 GB/s a device, not measured" in text
    assert "2xv5litepod-256: between slices a device sends 0." in format_table([r])
    unknown = dataclasses.replace(r, network_gb_per_s=None)
    assert "speed is not published: give it with --dcn_gb_per_s" in format_report(unknown)


@pytest.mark.parametrize(
    "kind, target, share",
    [
        ("ALL_REDUCE", '"{1,2,3,4}x{0:3}"', 1.5),
        ("ALL_GATHER", "{{100000,200000},{100001,200001}}", 1.0),
        ("REDUCE_SCATTER", '"{1:4}x{0:3}"', 0.75),
        ("ONE_TO_ONE", '"{1,2}x{0:3}"', 1.0),
    ],
)
def test_what_a_device_sends_to_other_slices(kind, target, share):
    """Forms of the compiler's text for four slices: all of them, pairs of devices, ranges."""
    attributes = f'_xla_megascale_target={target},_xla_megascale_transfer_type="{kind}"'
    line = f"send(%x, %t), channel_id=1, is_host_transfer=true, frontend_attributes={{{attributes}}}"
    body = f" (x: f32[]) -> f32[] {{\n  %s = (f32[128,32]{{1,0}}, u32[], token[]) {line}\n}}\n"
    found = reading.read_slice_transfers(reading.parse_program(f"ENTRY %main{body}%unused{body}"), num_slices=4)
    size = 128 * 32 * 4
    assert found == {kind.lower().replace("_", "-"): {"count": 1, "bytes": size, "sent_bytes": share * size}}


SPARSE_CORE = """
%called (p: bf16[4096,1024]) -> bf16[32768,1024] {
  %p = bf16[4096,1024]{1,0} parameter(0)
  ROOT %g = bf16[32768,1024]{1,0} all-gather(%p), replica_groups=mesh['a'=2,'b'=8,'c'=3] {'a','b':(2)4}, dimensions={0}
}, execution_thread="sparsecore"
%async_computation (q: bf16[4096,1024]) -> bf16[32768,1024] {
  %q = bf16[4096,1024]{1,0} parameter(0)
  ROOT %c = bf16[32768,1024]{1,0} custom-call(%q), custom_call_target="TODO(b/1)", called_computations={%called}
}, execution_thread="sparsecore"
ENTRY %main (x: bf16[4096,1024]) -> bf16[32768,1024] {
  %x = bf16[4096,1024]{1,0} parameter(0)
  %call-start = ((), (), (s32[8192]{0:T(1024)})) async-start(), calls=%async_computation
  %before = f32[8192]{0} fusion(%x), kind=kLoop, calls=%f, backend_config={"estimated_cycles":"2000000"}
  %call-update = ((bf16[4096,1024]{1,0}), bf16[32768,1024]{1,0}, ()) async-update(%call-start, %x)
  %beside = f32[8192]{0} fusion(%x), kind=kLoop, calls=%f, backend_config={"estimated_cycles":"BESIDE"}
  ROOT %call-done = bf16[32768,1024]{1,0} async-done(%call-update)
}
"""


@pytest.mark.parametrize("beside, counted, waits", [(0, 0, True), (2 * 10**6, 2 * 10**6, False), (2**63 - 1, 0, True)])
def test_what_the_newest_compiler_gives_to_the_sparse_core_is_read(beside, counted, waits):
    """Its text for TPU7x: a collective in a custom call of another core, which begins when an update brings the data;
    groups as axes of a mesh; and the largest number where there is no estimate."""
    computations = reading.parse_program(SPARSE_CORE.replace("BESIDE", str(beside)))
    cycles, unpriced = reading.read_cycles(computations)
    assert sum(cycles.values()) == 2 * 10**6 + counted and unpriced["fusion"] == (beside == 2**63 - 1)
    size, topology = 32768 * 1024 * 2, parse_topology("tpu7x-8")
    assert reading.read_collectives(computations, 48) == {
        "all-gather": dict(count=1, bytes=size, sent_bytes=size * 7 / 8)
    }
    bound = size * 7 / 8 / topology.hardware.link_gb_per_s / 1e6
    assert schedule.exposed_ms(computations, topology, 48) == pytest.approx(bound if waits else 0.0, abs=1e-4)


def test_the_first_axis_of_a_mesh_spans_the_slices(monkeypatch):
    """Devices are counted as PyTorch/XLA counts them, so data parallelism in front is what crosses between slices."""
    virtual_slice.quiet_libtpu()
    for name in ("2xv5litepod-16", "v5litepod-16", "4xv5litepod-256"):
        topology = parse_topology(name)
        devices = compiling.compile_only_devices(topology)
        assert [d.id for d in devices] == sorted(d.id for d in devices) and len(devices) == topology.num_devices
        slices = [getattr(device, "slice_index", 0) for device in devices]
        assert slices == sorted(slices) and len(set(slices)) == topology.num_slices


def test_a_chip_that_only_a_newer_compiler_knows():
    with pytest.raises(ValueError, match=r"libtpu 0.0.21 cannot compile for TPU7x; ask a newer .*--compiler newest"):
        virtual_slice.traceable_topology("tpu7x-8")
    assert virtual_slice.traceable_topology("tpu7x-8", newest=True).num_devices == 8
    for command in (("simple_mnist_tpu.py", "--compile_for"), ("aot_tpu.py", "simple_mnist_tpu.py", "--topology")):
        done = run(*command, "tpu7x-8")
        assert done.returncode == 2 and "--compiler newest" in done.stderr and "Traceback" not in done.stderr


# ------------------------------------------------------------------------------------------------- the newest compiler
# stands for the Python of the newer environment: it answers with what the test has put beside it
FAKE_PYTHON = """#!/bin/sh
folder=$(dirname "$0")/..
echo "$TPU_LIBRARY_PATH" > "$folder/seen"; cp "$3/request.json" "$folder"
[ -f "$folder/answer.json" ] || { echo no such chip >&2; exit 3; }
cp "$folder/answer.json" "$folder/program.txt" "$3"
"""


@pytest.fixture
def fake_environment(tmp_path):
    """A folder as make_environment leaves it. Its compiler answers with answer.json and program.txt of that folder."""
    folder = tmp_path / "newest"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").write_text(FAKE_PYTHON)
    (folder / "bin" / "python").chmod(0o755)
    (folder / newest.VERSIONS).write_text('{"jax": "0.10.2", "libtpu": "0.0.52"}')
    return folder


@pytest.fixture
def ask(fake_environment, monkeypatch, capsys):
    """ask("v5e-1,tpu7x-2"): (exit code, output) of aot_tpu.py --compiler newest, without the seconds of starts."""
    changes = {"TPU_LIBRARY_PATH": "/old"}
    monkeypatch.setattr(search, "run_script", lambda command, files, _: run(*command, **files, **changes).returncode)
    options = ["--compiler", "newest", "--compiler_dir", str(fake_environment), "--placeholders"]

    def main(topologies):
        return aot_tpu.main([str(TINY), "--topology", topologies, *options]), capsys.readouterr().out

    return main


ANSWER = dict.fromkeys(
    ("peak_bytes", "argument_bytes", "output_bytes", "temporary_bytes", "program_bytes", "flops", "seconds"), 3 * 2**30
)


def test_both_answers_side_by_side(fake_environment, ask):
    (fake_environment / "answer.json").write_text(json.dumps(ANSWER))
    (fake_environment / "program.txt").write_text(
        "ENTRY %main (x: f32[]) -> f32[] {\n  %x = f32[64,128]{1,0} parameter(0)\n"
        '  ROOT %f = f32[8]{0} fusion(%x), kind=kLoop, calls=%g, backend_config={"estimated_cycles":"3000000"}\n}\n'
    )
    code, said = ask("v5litepod-1,tpu7x-2")
    assert code == 0 and virtual_slice.COMPILER_VARIABLE not in os.environ
    first, second = said.split("\n\n")
    assert re.search(r"v5litepod-1 +\| libtpu 0.0.21, jax 0.7.1 +\| libtpu 0.0.52, jax 0.10.2 +\|", first)
    assert re.search(r"fits +\| yes +\| yes", first)
    assert re.search(r"GiB of limit +\| 0.00 of 15.75 +\| 13.50 of 15.75", first)
    assert re.search(r"predicted ms +\| 0\.\d+ +\| 2.000 +\|", first)
    assert re.search(r"tpu7x-2 +\| libtpu 0.0.52, jax 0.10.2 +\|", second) and "of 94.74" in second
    request = json.loads((fake_environment / "request.json").read_text())
    assert request["topology"] == "tpu7x:1x1x1" and request["chips_per_host"] == [1, 1, 1]
    assert len(request["donated"]) == len(request["shardings"]) and request["partitions"] == 2
    assert (fake_environment / "seen").read_text() == "\n"  # torch_xla's import sets it to its own libtpu


def test_a_module_too_is_asked_of_every_compiler_that_knows_the_chip(fake_environment, monkeypatch, capsys):
    """It was compiled by the installed one alone, for TPU7x too, and the answer did not say so."""
    asked = []

    def answer(script, topology, command, place):
        compiler = os.environ[virtual_slice.COMPILER_VARIABLE]
        asked.append((topology, compiler, command[-1], place))
        said = dict(level=command[-1].removeprefix("--at="), notes=["a loss"], reason="no")
        versions = {"libtpu": "0.0.52" if compiler else "0.0.21"}
        return a_report(topology=topology, compiles=False, fits=False, versions=versions, **said)

    monkeypatch.setattr(modules, "compile_script", answer)
    programs, new = fake_environment.with_name("programs"), str(fake_environment)
    command = ["torch.nn:Identity", "--inputs", "float32[8]", "--topology", "v5e-1,tpu7x-2", "--program", str(programs)]
    command += ["--compiler", "newest", "--compiler_dir", new]
    assert aot_tpu.main([*command, "--level", "conservative,balanced"]) == 1
    levels = ("conservative", "balanced")
    places = {"": programs, new: programs / "newest"}
    pairs = (("v5e-1", ""), ("v5e-1", new), ("tpu7x-2", new))
    assert asked == [(t, c, f"--at={level}", str(places[c] / level)) for t, c in pairs for level in levels]
    first, second = capsys.readouterr().out.split("\n\n")
    assert re.search(r"v5e-1 +\| libtpu 0.0.21, jax \?, conservative +\|.*libtpu 0.0.52, jax \?, balanced +\|", first)
    assert re.search(r"tpu7x-2 +\| libtpu 0.0.52, jax \?, conservative +\|", second) and "balanced: a loss" in second
    monkeypatch.setattr(aot_tpu, "make_environment", lambda *_: pytest.fail("made before the question was read"))
    assert aot_tpu.main([*command, "--level", "none"]) == 2


def test_what_the_newer_compiler_refuses_is_its_answer(fake_environment, ask):
    words = "the total memory required for HLO temporaries (600.00G) exceeds available HBM (94.74G)."
    (fake_environment / "answer.json").write_text(json.dumps({"error": f"RESOURCE_EXHAUSTED: Ran out, {words}"}))
    (fake_environment / "program.txt").write_text("")
    code, said = ask("tpu7x-2")
    assert code == 1 and "does not fit" in said and "RESOURCE_EXHAUSTED" in said and "600.0" in said
    (fake_environment / "answer.json").write_text(json.dumps({"error": "INTERNAL: custom call 'xla.sdy.*'"}))
    assert "lower it with jax_use_shardy_partitioner=False" in ask("tpu7x-2")[1]


@pytest.mark.parametrize("broken, message", [("silent", "ended with code 3"), ("none", "does not start")])
def test_a_newer_compiler_that_gives_no_answer(fake_environment, broken, message):
    if broken == "none":
        (fake_environment / "bin" / "python").unlink()
    with pytest.raises(newest.NewestError, match=message):
        newest.compile_there(fake_environment / "bin" / "python", Traced(b"", (), (), ()), parse_topology("tpu7x-8"))


@pytest.fixture
def install(monkeypatch, tmp_path):
    """What is said while an environment is made. Its packages come once there is tmp_path/network."""
    said = []

    def install(folder):
        assert len(said) == 1 and "libtpu==0.0.52" in said[0] and str(tmp_path) in said[0] and " GB" in said[0]
        (folder / "bin").mkdir()
        if not (tmp_path / "network").exists():
            raise newest.NewestError("no network")
        (folder / newest.VERSIONS).write_text('{"jax": "0.10.2", "libtpu": "0.0.52"}')

    monkeypatch.setattr(newest, "_install", install)
    monkeypatch.setattr(newest, "index_says", lambda folder: "the index")
    return said


def test_an_environment_is_made_once_said_before_and_all_or_nothing(install, tmp_path, monkeypatch):
    """And closed to others, whatever the umask."""
    made = tmp_path / "made"
    with pytest.raises(newest.NewestError):
        newest.make_environment(made, install.append)
    assert not made.exists()
    (tmp_path / "network").write_text("")
    install.clear()
    before = os.umask(0)
    try:
        for _ in range(2):
            assert newest.make_environment(made, install.append) == made
        assert os.umask(0) == 0
    finally:
        os.umask(before)
    assert len(install) == 2 and install[1] == "the index"
    assert [(made / name).stat().st_mode & 0o022 for name in ("", "bin", newest.VERSIONS)] == [0, 0, 0]
    (made / newest.VERSIONS).write_text('{"jax": []}')
    with pytest.raises(InputError, match="expected versions of jax and libtpu"):
        newest.make_environment(made, install.append)
    monkeypatch.setattr(newest, "NEEDED_GIB", 1e9)
    with pytest.raises(InputError, match=r"GiB free; expected"):
        newest.make_environment(tmp_path / "other", install.append)


@pytest.mark.parametrize(
    "answer, expected",
    [
        ("libtpu (0.0.52)\nAvailable versions: 0.0.52, 0.0.51", r"2026-11-25, and is the newest now"),
        ("libtpu (0.0.53)\nAvailable versions: 0.0.53, 0.0.52", r"2026-11-25; the newest now is 0.0.53, not tried"),
        ("", "what is the newest now, pip does not say"),
    ],
)
def test_it_is_said_when_the_package_index_has_moved_on(fake_environment, answer, expected, monkeypatch):
    (fake_environment / "pins.txt").write_text("# the newest on 2026-11-25\njax==0.10.2\nlibtpu==0.0.52\n")
    monkeypatch.setattr(newest, "REQUIREMENTS", fake_environment / "pins.txt")
    (fake_environment / "bin" / "python").write_text(f"#!/bin/sh\necho '{answer}'\n")
    said = newest.index_says(fake_environment)
    assert re.search(expected, said) and said.startswith("libtpu==0.0.52 of pins.txt")


def test_an_environment_that_others_can_change_is_not_run(fake_environment):
    """Its folder was closed, and bin within it was not; a link in the place of its lock's file emptied that file."""
    assert newest.make_environment(fake_environment, print) == fake_environment
    (fake_environment / "bin").chmod(0o777)
    with pytest.raises(InputError, match=f"{fake_environment}/bin is another user's, or one can write it; .*delete"):
        newest.make_environment(fake_environment, print)
    thesis = fake_environment.with_name("thesis")
    thesis.write_text("years of work")
    thesis.with_name("other.lock").symlink_to(thesis)
    with pytest.raises(InputError, match="Too many levels of symbolic links"):
        newest.make_environment(thesis.with_name("other"), print)
    assert thesis.read_text() == "years of work"


def test_the_default_folder_belongs_to_the_pins(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(newest, "REQUIREMENTS", tmp_path / "pins.txt")
    with pytest.raises(InputError, match=r"pins.txt is missing"):
        newest.default_folder()
    folders = set()
    for pins in ("jax==1\n", "jax==2\n"):
        (tmp_path / "pins.txt").write_text(pins)
        folders.add(newest.default_folder())
    assert len(folders) == 2 and {folder.parent for folder in folders} == {tmp_path / "tpu_compiler"}


@pytest.fixture(scope="module")
def newest_environment(tmp_path_factory):
    """Options of aot_tpu.py; the first use makes the environment of the pinned versions, from the package index."""
    folder = tmp_path_factory.mktemp("environment") / "newest"
    with pytest.MonkeyPatch.context() as patch:
        for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS"):  # those of this environment's own packages have not these
            patch.delenv(name, raising=False)
        try:
            newest.make_environment(folder, print)
        except newest.NewestError as error:
            pytest.skip(str(error))
    return ("--compiler_dir", folder, "--json", "--compiler")


@pytest.mark.slow
def test_the_newest_compiler_for_real(newest_environment):
    """The pinned pair, and the same figures from the two compilers of what the program fixes."""
    asked = ("--topology", "v5litepod-8,tpu7x-8", *newest_environment, "newest", "--shard_parameters")
    done = run("aot_tpu.py", TINY, *asked)
    assert done.returncode == 0, done.stderr
    reports = [Report(**r) for r in json.loads(done.stdout)]
    expected = [("v5litepod-8", "0.0.21"), ("v5litepod-8", "0.0.52"), ("tpu7x-8", "0.0.52")]
    assert [(r.topology, r.versions["libtpu"]) for r in reports] == expected
    old, new, tpu7x = reports
    assert new.memory["parameters"] == old.memory["parameters"] and tpu7x.devices == 8
    for r in (new, tpu7x):
        assert r.fits and r.estimated_ms and {"all-gather", "reduce-scatter"} <= set(r.collectives)
    for kind in ("all-gather", "reduce-scatter"):  # on TPU7x by the SparseCores
        assert tpu7x.collectives[kind] == new.collectives[kind]


@pytest.mark.slow
def test_a_program_of_a_newer_jax_is_priced_as_the_same_of_ours(newest_environment, tmp_path):
    """It names its kernels and its lines in another way."""
    reports = []
    for place, python in enumerate((sys.executable, newest_environment[1] / "bin" / "python")):
        file = tmp_path / f"{place}.mlir"
        environment = newest.child_environment() | {"JAX_PLATFORMS": "cpu"}
        subprocess.run([python, "tests/splash_program.py", file], cwd=ROOT, env=environment, check=True)
        for compiler in (("--json",), (*newest_environment, "newest_alone")):
            done = run("aot_tpu.py", "--hlo", file, "--topology", "v6e-1", "--plan", "--no_cache", *compiler)
            assert done.returncode == 0, done.stderr
            reports.append(Report(**json.loads(done.stdout)[0]))
    for r in reports:
        assert not r.left_out and r.predicted_ms == pytest.approx(reports[0].predicted_ms, rel=0.05)
        assert any(re.match(r"splash_\w+\.py:\d+", line) for line, _ in r.costliest_lines), r.costliest_lines


@pytest.mark.exhaustive
def test_text_memory_and_cycles_of_a_step_on_every_chip_that_the_pinned_pair_is_for(newest_environment, tmp_path):
    """Flash attention in a transformer's training step. Whoever pins another pair tries it with this."""
    shape = "--num_layers=1 --embedding_dim=256 --num_heads=2 --sequence_length=256 --global_batch_size=8".split()
    asked = ("--topology", "v5e-1,v6e-1,tpu7x-2", *newest_environment, "newest_alone", "--program", tmp_path)
    done = run("aot_tpu.py", "transformer_tpu.py", *asked, "--attention=flash", "--precision=bfloat16", *shape)
    assert done.returncode == 0, done.stderr
    reports = [Report(**r) for r in json.loads(done.stdout)]
    expected = [("v5e-1", 1, "0.0.52"), ("v6e-1", 1, "0.0.52"), ("tpu7x-2", 2, "0.0.52")]
    assert [(r.topology, r.devices, r.versions["libtpu"]) for r in reports] == expected
    for r in reports:
        assert r.fits and 0 < r.compiler_peak_bytes < r.limit_bytes and min(r.memory.values()) > 0
        assert 1e-3 < r.estimated_ms < 10 and r.ruled_ms and 0.5 < r.flops_ratio < 2
    assert set(reports[-1].collectives) == {"all-reduce"}
    for path in sorted((tmp_path / "newest").glob("*.txt")):
        kernels = len(re.findall(r"custom-call\(.*tpu_custom_call", path.read_text()))
        assert kernels == 2, f"{path}: forward, and one for all gradients"


@pytest.mark.exhaustive
def test_a_module_through_torch_is_asked_without_torch_xla(newest_environment, tmp_path):
    """Beside PyTorch/XLA's program of the same step: the same memory of parameters, and as many FLOPs."""
    (tmp_path / "net.py").write_text(
        "import torch\n\n\ndef net():\n"
        "    layers = torch.nn.Conv2d(8, 128, 3), torch.nn.MaxPool2d(2), torch.nn.Dropout(0.1), torch.nn.Flatten()\n"
        "    return torch.nn.Sequential(*layers, torch.nn.Linear(128 * 7 * 7, 256))\n"
    )
    asked = (f"{tmp_path}/net.py:net", "--inputs", "float32[128,8,16,16]", "--topology", "v5e-1", "--no_cache")
    reports = []
    for through in ("torch", "torch_xla"):
        done = run("aot_tpu.py", *asked, *newest_environment, "newest_alone", "--through", through)
        assert done.returncode == 0, done.stderr
        reports += [Report(**r) for r in json.loads(done.stdout)]
    torch_alone, xla = reports
    assert torch_alone.notes[0].endswith("no torch_xla") and "torch_xla" not in torch_alone.versions
    for r in reports:
        assert r.fits and not r.loops and 0.5 < r.flops_ratio < 1.5 and r.estimated_ms
    for part in ("parameters", "optimizer_state"):
        assert torch_alone.memory[part] == pytest.approx(xla.memory[part], rel=0.02)
    assert torch_alone.flops == pytest.approx(xla.flops, rel=0.1)


def test_a_long_compile_says_what_to_expect_and_then_ever_less(monkeypatch, capsys):
    waits = []

    def wait(seconds: float) -> bool:
        """Of the event that ends a compile, after 700 s."""
        waits.append(seconds)
        return sum(waits) > 700

    done = SimpleNamespace(wait=wait, set=lambda: None)
    monkeypatch.setattr(compiling, "threading", SimpleNamespace(Event=lambda: done, Thread=threading.Thread))
    with compiling.progress("compiling for v5e"):
        pass
    said = capsys.readouterr().err.splitlines()
    assert waits == [10, 10, 20, 40, 80, 160, 320, 640] and len(said) == 7
    assert said[0] == "compiling for v5e: GPT-2's 12 layers took two minutes on two quiet cores"  # no option is named
    assert re.fullmatch(r"compiling for v5e: \d+ s", said[1])
