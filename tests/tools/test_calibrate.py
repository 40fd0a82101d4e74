"""calibrate_tpu.py: on a pretended v5e whose children answer with written times; whole on the CPU, with two kills."""

import contextlib
import dataclasses
import io
import json
import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from metadata_server import metadata_server
from mutations import mutated_json, refusals
from processes import ROOT, environment_with, waits
from reports import a_report as any_report
from run_files import configured
from test_device import fake_pci

import aot_tpu
from config import DistributedMnistConfig, MnistConfig
from images.cifar_config import CifarConfig
from language.options.transformer_options import TransformerConfig
from tools import calibrate
from tools.on_chip import bench, findings
from tools.on_chip.bench import find_machine
from tools.on_chip.chip_peaks import PEAKS, least_sent
from tools.on_chip.steps import STEPS
from tpu_compiler.estimate.calibration import read_calibration
from tpu_utils.base.errors import DeviceError, InputError, TrainingError, run_script
from tpu_utils.base.versions import TESTED_VERSIONS
from tpu_utils.options.parsing import presets_of

GIB = 2**30
COLLECTIVES = PEAKS.keys() - {"product", "copy"}
# what a pretended v5litepod-8 answers: (predicted ms, measured ms) by a word of the options; nothing here was measured
TIMES = {
    "--attention=flash": (60.0, 84.0),
    "--num_heads=6": (61.8, 67.98),
    "--model_size=350M": (385.0, 454.3),
    "--scan_layers": (140.0, 165.2),
    "--gradient_accumulation_steps=1": (73.9, 88.68),
    "--vocab_size=50257": (590.0, 649.0),
    "": (0.06, 1.2),
}
CONFIGS = {
    "simple_mnist_tpu.py": MnistConfig,
    "distributed_mnist_tpu.py": DistributedMnistConfig,
    "resnet_cifar_tpu.py": CifarConfig,
    "transformer_tpu.py": TransformerConfig,
}
V5E = ("0x1ae0", "0x0063")
DONE = "checkpoints/step_00000060/done"
MEASURED = "measured on v5e: 1.18 x the predicted step (n = 6), from 1.10 to 1.40, on 8 devices, collectives included"


a_report = partial(any_report, topology="v5litepod-8")


def option(command: list[str], name: str, default: str = "") -> str:
    return next((word.partition("=")[2] for word in reversed(command) if word.startswith(f"--{name}=")), default)


class Pretended:
    """A child process on the pretended VM: leaves the files that its command would leave."""

    def __init__(self, command: list[str], out: Path, err: Path, changes: dict[str, str]):
        self.code, self.command, self.err, text = 0, command, err, ""
        estimated, self.ms = next(times for word, times in TIMES.items() if not word or word in command)
        err.write_text("")
        if command[0] == "setup_tpu.py":
            text = json.dumps({"checks": [], "counts": {"ok": 20, "warn": 0, "fail": 0, "skip": 2}})
        elif option(command, "compile_for"):
            assert option(command, "compile_for") == "v5litepod-8"
            Path(changes["AOT_TPU_OUTPUT"], "report.json").write_text(json.dumps(self.report(estimated)))
        elif "tools.on_chip.chip_peaks" in command:
            figures = {"product": {"tflops": 177.3}, "copy": {"gb_per_s": 737.1}}.get(command[2], {})
            figures = dict(ms=2.0, ms_low=1.9, ms_high=2.2, host_ms=0.5, compile_seconds=1.0, **figures)
            text = json.dumps(dict.fromkeys(option(command, "sizes").split(","), figures))
        elif "xplane" in command[-1]:
            text = json.dumps({"planes": ["/device:TPU:0", "/host:CPU"], "steps": [10, 11, 12]})
        else:
            self.train(Path(option(command, "run_dir")))
            text = "7\n"  # reads from the device
        out.write_text(text)

    def report(self, estimated: float) -> dict:
        if "--preset=distributed" in self.command and "transformer_tpu.py" in self.command:
            self.code = 1
            return dataclasses.asdict(
                a_report(devices=8, fits=False, compiles=False, reason="needs 20.00 of 15.75 GiB")
            )
        # a fifth of the predicted step has no price of the compiler's
        times = dict(estimated_ms=0.8 * estimated, ruled_ms=0.2 * estimated, estimated_mfu=0.5)
        return dataclasses.asdict(a_report(devices=8, peak_bytes=5 * GIB, **times).with_prediction())

    def train(self, run_dir: Path) -> None:
        timed = dict(kind="train", step_seconds=self.ms / 1e3, mfu=0.3, host_seconds=1e-5, data_wait_seconds=0.0)
        lines = [dict(timed, loss=2.5 - 0.01 * step, step=step) for step in range(1, 61)]
        lines[3]["step_seconds"] *= 2  # a slow interval, which is no median
        lines.append(dict(kind="checkpoint", step=60, wait_seconds=0.5))
        summary = dict(steps=60, train_graphs=1, host_to_device_uploads_per_step=0.0, hbm_peak_bytes=6 * GIB)
        summary |= dict(goodput=dict(start_up=12.0, restore=3.0, compile=30.0, checkpoint=0.6), test_accuracy=342 / 360)
        for name, content in {
            "metrics.jsonl": "\n".join(map(json.dumps, lines)),
            "summary.json": json.dumps(summary),
            DONE: '{"files": {"state.safetensors": {"bytes": 8}}}',
            "tensorboard/plugins/profile/now/vm.xplane.pb": "",
        }.items():
            (run_dir / name).parent.mkdir(parents=True, exist_ok=True)
            (run_dir / name).write_text(content)

    def fail(self, said: str) -> None:
        self.code = 1
        self.err.write_text(said)

    def wait(self, timeout: float | None = None) -> int:
        return self.code

    def poll(self) -> None:
        return None

    def kill(self) -> None:
        pass


class Vm:
    """A pretended VM with 8 chips. child: who answers for a child process; started: the commands of all."""

    def __init__(self, root: Path):
        self.root, self.folder = root, root / "calibration"
        self.started, self.child = [], Pretended

    def start(self, command, *others):
        self.started.append(command)
        return self.child(command, *others)

    def calibrate(self) -> int:
        return calibrate.calibrate("auto", self.folder, 60, self.root)

    def content(self) -> dict:
        return json.loads((self.folder / "calibration.json").read_text())


def test_a_child_finds_scripts_and_modules(tmp_path, monkeypatch):
    """Other tests here have pretended children."""
    monkeypatch.chdir(tmp_path)
    find = "import importlib.util as u; assert u.find_spec('tools.on_chip.chip_peaks')"
    for command in (["setup_tpu.py", "--help"], ["-c", find]):
        assert bench.start_child(command, tmp_path / "out", tmp_path / "err", {}).wait(300) == 0, command


def pci_tree(root: Path, *devices) -> Path:
    (root / "sys/bus/pci/devices").mkdir(parents=True)
    fake_pci(root / "sys/bus/pci/devices", *devices)
    return root


@contextlib.contextmanager
def metadata_of(kind: str, hosts: int):
    """A metadata server of a slice, where this process looks for it."""
    workers = ",".join(f"name:{index}:10.0.0.{index + 1}" for index in range(hosts))
    said = f"ACCELERATOR_TYPE: '{kind}'\nWORKER_ID: '0'\n"
    pages = dict(tpu_env=said, worker_network_endpoints=workers)
    with metadata_server(**pages) as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("GCE_METADATA_HOST", server.host)
        for name in ("TPU_SKIP_MDS_QUERY", "TPU_ACCELERATOR_TYPE", "TPU_WORKER_HOSTNAMES", "TPU_WORKER_ID"):
            patch.delenv(name, raising=False)
        yield patch


@contextlib.contextmanager
def pretended_vm(root: Path):
    vm = Vm(pci_tree(root, *[V5E] * 8))
    with metadata_of("v5litepod-8", 1) as patch:
        patch.setattr(bench, "start_child", vm.start)
        yield vm


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A VM that was calibrated, and what was printed."""
    with pretended_vm(tmp_path_factory.mktemp("measured")) as vm, contextlib.redirect_stdout(io.StringIO()) as said:
        assert vm.calibrate() == 0, said.getvalue()
    return vm, said.getvalue()


@pytest.fixture
def vm(tmp_path, monkeypatch):
    """One that was not, without the seconds of the picture."""
    monkeypatch.setattr(calibrate, "save_picture", lambda *_: None)
    with pretended_vm(tmp_path) as vm:
        yield vm


def test_a_pretended_v5e_is_measured_whole(measured):
    vm, said = measured
    found = vm.content()
    assert (found["machine"]["chip"], found["machine"]["slice"]) == ("v5e", "v5litepod-8")
    assert "machine    v5litepod-8, devices: 8; torch_xla 2.9.0" in said
    step = found["measurements"]["step gpt2 124M"]["figures"]
    assert step["ms"] == pytest.approx(88.68) and step["ms_high"] == pytest.approx(2 * 88.68)
    assert found["ratios"]["gpt2 124M"] == pytest.approx(1.2)
    assert "simple_mnist quick_test" not in found["ratios"], "a step below 1 ms says nothing of the compiler"
    last = found["measurements"]["step transformer distributed"]
    assert last["status"] == "cannot" and "does not fit v5litepod-8: needs 20.00 of 15.75 GiB" in last["reason"]
    product = found["measurements"]["peak product"]["figures"]["8192"]
    assert product["of_published"] == pytest.approx(0.9)
    bound = {kind: found["measurements"][f"peak {kind}"]["figures"]["256"]["bound_ms"] for kind in COLLECTIVES}
    links, size = 200e6, 256 * 2**20  # bytes a millisecond, bytes
    assert bound["all-reduce"] == pytest.approx(2 * 7 / 8 * size / links)
    assert bound["all-gather"] == pytest.approx(7 / 8 * size / links + 2 * size / 819e6), "and a copy of the result"
    assert bound["reduce-scatter"] == pytest.approx(7 / 8 * size / links)
    assert bound["collective-permute"] == pytest.approx(size / 8 / links)
    assert found["measurements"]["promise resume"]["figures"]["restore_seconds"] == 3.0
    assert {r["status"] for name, r in found["measurements"].items() if name.startswith("promise")} == {"done"}
    page = (vm.folder / "report.md").read_text()
    rows = {cells[1]: cells for line in page.splitlines() if len(cells := [c.strip() for c in line.split("|")]) > 5}
    expected = ["73.900", "88.68 (88.68 to 177.36)", "1.20", "5.000", "6.000", "40.0%", "30.0%", "12.0", "30.0", "0.6"]
    assert rows["gpt2 124M"][2:-1] == expected
    assert f"\n{MEASURED}; of steps predicted to take 1 ms or more.\n" in page
    assert 'open an issue called "Calibration of v5litepod-8, torch_xla 2.9.0' in page and page in said
    assert not (vm.folder / "runs").exists(), "checkpoints of gigabytes are not left behind"


def test_every_preset_is_measured_and_every_option_is_one_of_its_script(measured):
    given = {(step.script, (re.findall(r"--preset=(\w+)", step.options) or ["quick_test"])[0]) for step in STEPS}
    assert given == {(script, preset) for script, config in CONFIGS.items() for preset in presets_of(config)}
    for command in measured[0].started:
        place = next((place for place, word in enumerate(command) if word in CONFIGS), None)
        if place is not None:
            configured(CONFIGS[command[place]], command[place + 1 :])


def test_the_picture_shows_every_step_and_share(measured):
    vm, _ = measured
    left, right = findings.draw(vm.content()).axes
    points = {line.get_label(): line.get_xydata()[0].tolist() for line in left.lines}
    assert points["gpt2 124M"] == pytest.approx([73.9, 88.68])
    assert len(points) == len(STEPS)  # the diagonal, and all but the one that does not fit
    labels, widths = [t.get_text() for t in right.get_yticklabels()], [p.get_width() for p in right.patches]
    assert [widths[labels.index(name)] for name in ("product 8192", "copy 256 MiB")] == pytest.approx([90, 90])
    assert (vm.folder / "calibration.png").read_bytes().startswith(b"\x89PNG")


class Troubled(Pretended):
    """Two commands fail, and two promises are not kept."""

    def __init__(self, command, out, err, changes):
        super().__init__(command, out, err, changes)
        if "--attention=flash" in command and not option(command, "compile_for"):
            self.fail("warning: other things\nerror: the kernels do not lower\n")
        if "--num_heads=6" in command and option(command, "compile_for"):
            self.fail("error: too many heads\n")
            Path(changes["AOT_TPU_OUTPUT"], "report.json").unlink()

    def train(self, run_dir):
        super().train(run_dir)
        if "--resume=auto" in self.command:
            (run_dir / DONE).write_text('{"files": {"state.safetensors": {"bytes": 8, "crc32": 2}}}')
        if self.command[0] == "-c" and "--num_steps=40" in self.command:
            summary = json.loads((run_dir / "summary.json").read_text())
            (run_dir / "summary.json").write_text(json.dumps(summary | {"train_graphs": 2}))


def test_what_failed_is_recorded_and_tried_again_and_the_rest_goes_on(vm, capsys):
    """Also where it was stopped: what is measured stays."""

    def stopped(*arguments):
        if len(vm.started) == 9:
            raise KeyboardInterrupt
        return Troubled(*arguments)

    vm.child = stopped
    with pytest.raises(KeyboardInterrupt):
        vm.calibrate()
    before = vm.content()["measurements"]
    assert len(before) == 8
    vm.child = Troubled
    assert vm.calibrate() == 1
    after = vm.content()["measurements"]
    assert {name: after[name] for name in before} == before
    failed = {name: record["reason"] for name, record in after.items() if record["status"] == "failed"}
    command = "transformer_tpu.py ended with 1: error: "
    assert failed.pop("step gpt2 124M flash").startswith(command + "the kernels do not lower")
    assert "ended with 1: error: too many heads" in failed.pop("estimate gpt2 124M heads of 128")
    assert command + "the kernels do not lower" in failed.pop("promise flash")
    assert failed.pop("promise resume") == "not kept: the last checkpoints differ"
    assert failed.pop("promise no_reads") == "not kept: 2 graphs and 0.0 uploads a step, expected 1 and 0"
    assert not failed
    page = (vm.folder / "report.md").read_text()
    assert "Failed:\n- step gpt2 124M flash: transformer_tpu.py ended" in page
    assert "| gpt2 124M flash " in page, "its estimate is there"
    for started in (9, 0):  # a step, an estimate, and the runs of three promises
        vm.child, vm.started = Pretended, []
        capsys.readouterr()
        assert vm.calibrate() == 0 and len(vm.started) == started
    lines = re.findall(r"^ ?\d+/\d+ .*", capsys.readouterr().out, re.M)
    assert lines and all("(before)" in line for line in lines), "also what cannot be measured here"


def test_losses_that_differ_are_a_promise_not_kept():
    assert bench.compare([1.0, 2.0], [1.0, 2.005], 1e-2)["largest_difference"] == pytest.approx(5e-3)
    with pytest.raises(TrainingError, match=r"not kept: 2 losses differ by up to .*, expected 1e-05"):
        bench.compare([1.0, 2.0], [1.0, 2.005], 1e-5)


def test_another_machine_begins_anew(tmp_path, capsys):
    machine = bench.Machine("tpu", "v5e", "v5litepod-8", 8, {"libtpu": "0.0.21"}, "one")
    bench.Bench(machine, tmp_path, 60).record("doctor", {"status": "done"})
    assert bench.Bench(machine, tmp_path, 60).measurements == {"doctor": {"status": "done"}}
    assert bench.Bench(dataclasses.replace(machine, commit="another"), tmp_path, 60).measurements == {}
    assert len(list(tmp_path.glob("calibration_before_*.json"))) == 1
    assert "another chip, version or commit" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--output=/dev/null"], "/dev/null cannot be written: Not a directory; name another --output"),
        (["--time_limit=0"], "--time_limit 0: expected more than 0 seconds"),
        (["--time_limit=nan"], "--time_limit nan: expected more than 0 seconds"),
    ],
)
def test_bad_options_are_refused_in_one_message(monkeypatch, tmp_path, capsys, arguments, said):
    monkeypatch.setattr(sys, "argv", ["tools.calibrate", "--device=cpu", f"--output={tmp_path}", *arguments])
    with contextlib.suppress(SystemExit):  # by argparse, with 2
        assert run_script(calibrate.main) == 2
    assert said in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------- which machine it is
@pytest.mark.parametrize(
    "chips, named, slice_name, devices",
    [
        ([V5E], "", "v5litepod-1", 1),
        ([V5E] * 4, "v5litepod-4", "v5litepod-4", 4),
        ([("0x1ae0", "0x005e")] * 4, "", "v4-8", 4),
        ([("0x1ae0", "0x006f")] * 8, "", "v6e-8", 8),
        ([V5E] * 2, "", "", 2),
        ([("0x1ae0", "0x0076")] * 4, "", "", 8),
    ],
)
def test_which_slice_this_is_by_the_environment(tmp_path, monkeypatch, chips, named, slice_name, devices):
    pci_tree(tmp_path, *chips)
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "localhost")
    monkeypatch.delenv("TPU_WORKER_ID", raising=False)
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", named)
    machine = find_machine("auto", tmp_path)
    assert (machine.slice, machine.num_devices, machine.device) == (slice_name, devices, "tpu")


def test_another_machine_than_a_whole_slice_of_one_host_is_refused(tmp_path):
    with pytest.raises(DeviceError, match=r"found no TPU chip on this machine; .* rehearse with --device cpu"):
        find_machine("tpu", tmp_path)
    pci_tree(tmp_path, *[V5E] * 8)
    with metadata_of("v5litepod-16", 2), pytest.raises(InputError, match=r"which has 2 hosts; expected a slice of one"):
        find_machine("auto", tmp_path)


@pytest.mark.parametrize(
    "device, variables, message",
    [
        (
            "auto",
            {"TPU_ACCELERATOR_TYPE": "v5litepod-4"},
            r"has 8 chips of v5litepod-4, .* expected a slice of one host",
        ),
        ("auto", {"TPU_VISIBLE_CHIPS": "0"}, r"TPU_VISIBLE_CHIPS is '0': .* a part of the 8 chips here; .* unset it"),
        ("cpu", {"CPU_NUM_DEVICES": "many"}, r"CPU_NUM_DEVICES is 'many'; expected a number from 1 to 127"),
    ],
)
def test_what_would_measure_another_machine_than_it_names_is_refused(tmp_path, monkeypatch, device, variables, message):
    for name, value in (variables | {"TPU_SKIP_MDS_QUERY": "1"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=message):
        find_machine(device, pci_tree(tmp_path, *[V5E] * 8))


def test_the_bound_is_the_compilers():
    """Against the reports of libtpu 0.0.21 on the collectives of chip_peaks --sizes 256, for v5litepod-4."""
    milliseconds = {"all-reduce": 2.013, "all-gather": 1.007, "collective-permute": 0.336}
    for kind, expected in milliseconds.items():
        assert least_sent(kind, 256, 4) / 200 / 1e6 == pytest.approx(expected, abs=1e-3)


# ---------------------------------------------------------------------------------------- aot_tpu.py with a calibration
def test_a_report_of_the_compiler_says_what_was_measured(measured, monkeypatch, capsys):
    vm, _ = measured
    kept = any_report(estimated_ms=73.9, versions={"libtpu": TESTED_VERSIONS["libtpu"]}).with_prediction()
    monkeypatch.setattr(aot_tpu, "compile_script", lambda _, name, *__: dataclasses.replace(kept, topology=name))
    command = ["simple_mnist_tpu.py", "--topology", "v5litepod-1"]
    monkeypatch.chdir(vm.root)
    (vm.root / "simple_mnist_tpu.py").touch()
    assert aot_tpu.main(command) == 0, "found where tools.calibrate leaves it"
    assert f"  calibration        {MEASURED}\n" in capsys.readouterr().out
    assert aot_tpu.main([*command[:2], "v6e-1,v5litepod-1", f"--calibration={vm.folder}/calibration.json"]) == 0
    table = capsys.readouterr().out
    assert f"\nv5litepod-1: {MEASURED}\n" in table and "v6e-1: measured" not in table
    assert aot_tpu.main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["calibration"] == MEASURED
    capsys.readouterr()
    foreign = [("no.json", None, "no such file"), ("half.json", '{"format": 1', "cannot be read as JSON")]
    foreign += [("list.json", "[1]", "holds list"), ("package.json", '{"name": "x"}', "is not a calibration")]
    for name, content, why in foreign:
        if content:
            (vm.root / name).write_text(content)
        assert aot_tpu.main([*command, f"--calibration={name}"]) == 2
        err = capsys.readouterr().err
        assert len(err.splitlines()) == 1 and err.startswith(f"error: {name}") and why in err
        assert "a calibration of tools.calibrate" in err
    (vm.folder / "calibration.json").write_text("{")
    assert aot_tpu.main(command) == 2, "one that is there by default is not passed over"
    assert "error: calibration/calibration.json cannot be read as JSON" in capsys.readouterr().err


def test_a_calibration_is_read_or_refused(tmp_path):
    machine = {"chip": "v5e", "num_devices": 1, "versions": {"libtpu": "0.0.21"}}
    good = {"format": 2, "machine": machine, "ratios": {"a": 1.1, "b": 1.3}}
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps(good))
    found = read_calibration(path)
    assert found.sentence("v5e", "0.0.21") == "measured on v5e: 1.20 x the predicted step (n = 2), from 1.10 to 1.30"
    assert found.sentence("v5e", "0.0.17").endswith("to 1.30, with libtpu 0.0.21")
    assert found.sentence("v6e", "0.0.21") == ""
    path.write_text(json.dumps(good | {"format": 1}))
    with pytest.raises(InputError, match=r"against the compiler's estimate alone, .*; run tools\.calibrate again"):
        read_calibration(path)
    assert refusals(path, mutated_json(good, 200), lambda: read_calibration(path).sentence("v5e", "0.0.21")) > 50


# ------------------------------------------------------------------------------------------------ on the CPU, whole
def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.exhaustive
def test_a_rehearsal_on_the_cpu_killed_twice(tmp_path):
    named = ["doctor", "* simple_mnist quick_test", "step gpt2 124M", "peak collective-permute"]
    named += ["promise flash", "promise resume", "promise spmd"]
    command = [sys.executable, "-m", "tools.calibrate", "--device=cpu", f"--output={tmp_path}", "--only", *named]
    settings = dict(cwd=ROOT, env=environment_with({"CPU_NUM_DEVICES": 4}), text=True)
    path = tmp_path / "calibration.json"

    def done() -> dict:
        return json.loads(path.read_text())["measurements"] if path.exists() else {}

    before = {}
    for count in (2, 5):  # in the first steps, and between peaks and promises
        process = subprocess.Popen(command, **settings, stdout=subprocess.DEVNULL)
        waits(lambda count=count, process=process: len(done()) >= count or process.poll() is not None, 1800)
        assert process.poll() is None, "it ended by itself"
        waits(lambda process=process: children_of(process.pid))
        children = children_of(process.pid)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        waits(lambda children=children: not any(Path(f"/proc/{child}/exe").exists() for child in children), 20)
        assert {name: record for name, record in done().items() if name in before} == before
        before = done()
    last = subprocess.run(command, **settings, stdout=subprocess.PIPE, timeout=3600)
    assert last.returncode == 0, last.stdout
    found = done()
    assert {name: found[name] for name in before} == before
    assert json.loads(path.read_text())["ratios"] == {}, "a CPU's time says nothing of a prediction for a TPU"
    cannot = {name: record["reason"] for name, record in found.items() if record["status"] == "cannot"}
    assert cannot["promise flash"] == "the flash kernels run on TPU only"
    assert cannot["step gpt2 124M"] == "too large for a rehearsal on a CPU"
    assert found["promise resume"]["figures"]["restore_seconds"] > 0
    assert found["promise spmd"]["figures"]["largest_difference"] <= 1e-5
    assert found["peak collective-permute"]["figures"]["1"]["ms"] > 0
    assert "A rehearsal: predictions are for a TPU" in (tmp_path / "report.md").read_text()
