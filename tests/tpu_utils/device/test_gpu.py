"""What a GPU has of its own, as far as a CPU can show it: the bookkeeping of replayed steps, the table, the choice."""

import warnings
import weakref

import pytest
import torch
from torch._inductor import config as inductor

from config import MnistConfig
from tpu_utils.base import gpus
from tpu_utils.base.errors import DeviceError, InputError
from tpu_utils.base.gpus import GPUS, gpu_named, gpu_or_cpu, has_gpu
from tpu_utils.device import dynamo
from tpu_utils.device.gpu import WAITS, Replayed, WaitCount
from tpu_utils.options.environment import choose_device


class Step:
    """weights += batch; gives their sum. Recorded as by CUDA graphs: nothing is computed then, and a replay reads and
    writes where the inputs lay."""

    def __init__(self):
        self.recorded = 0
        self.outputs = []
        self.call = Replayed(self.run, self.record)

    def run(self, weights, batch):
        weights += batch
        return [weights.sum()]

    def record(self, run, inputs):
        assert not any(output() is not None for output in self.outputs), "the pool's memory is still in use"
        self.recorded += 1
        outputs = run(*[tensor.clone() for tensor in inputs])
        held = self.outputs = [weakref.ref(output) for output in outputs]

        def replay():
            for output, new in zip(held, run(*inputs), strict=True):
                output().copy_(new)

        return replay, outputs


def test_replayed_steps_are_those_of_the_step():
    """Each batch lies elsewhere, or where the one before lay; the weights lie elsewhere after a resumption."""
    step, weights, batch = Step(), torch.zeros(3), torch.ones(3)
    assert [step.call(weights, batch)[0].item() for _ in range(3)] == [3, 6, 9]
    elsewhere = weights.clone()
    batches = [torch.full((3,), float(i)) for i in range(1, 6)]
    sums = [step.call(elsewhere, batch)[0] for batch in batches]
    assert torch.stack(sums).tolist() == [12, 18, 27, 39, 54]  # no output lies where the next one does
    assert weights.tolist() == [3] * 3 and elsewhere.tolist() == [18] * 3
    assert [batch[0].item() for batch in batches] == [1, 2, 3, 4, 5] and step.recorded <= 3


def test_a_step_that_cannot_be_recorded_runs_kernel_by_kernel(capsys):
    def refuses(run, inputs):
        raise RuntimeError("operation not permitted when stream is capturing")

    step, weights = Step(), torch.zeros(3)
    call = Replayed(step.run, refuses)
    sums = [call(weights, torch.ones(3))[0].item() for _ in range(4)]
    assert sums == [3.0, 6.0, 9.0, 12.0]
    assert capsys.readouterr().out.count("cuda graph none: kernels are started one by one, as operation not") == 1


def test_inductor_gets_the_settings_that_this_torch_has(monkeypatch):
    """torch 2.9 and 2.11 lack some, and inductor refuses a name that it does not know."""
    asked = {}
    monkeypatch.setattr(dynamo, "lookup_backend", lambda name: lambda *_, config_patches: asked.update(config_patches))
    monkeypatch.setattr(dynamo, "compiler", "inductor")
    dynamo._compile_graph("cpu", torch.fx.symbolic_trace(torch.nn.Identity()), [])
    assert set(inductor.get_config_copy()) >= set(asked) >= {"fallback_random", "shape_padding"}


def test_what_waits_for_the_gpu_is_counted_and_other_warnings_are_shown(monkeypatch):
    """torch warns of each wait, in the words of c10/cuda/CUDAFunctions.cpp (2.11, 2.12 and 2.14)."""
    shown = []
    with warnings.catch_warnings():
        monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
        monkeypatch.setattr(warnings, "showwarning", lambda message, *rest, **named: shown.append(str(message)))
        waits = WaitCount()
        for _ in range(2):
            warnings.warn(f"{WAITS} (Triggered internally at CUDAFunctions.cpp)", UserWarning, stacklevel=1)
        warnings.warn("something else", UserWarning, stacklevel=1)
    assert waits.count == 2 and shown == ["something else"]


GIVEN_NAMES = {
    2250: ["NVIDIA B200"],
    989: ["NVIDIA H200", "NVIDIA H100 80GB HBM3"],
    835: ["NVIDIA H200 NVL", "NVIDIA H100 NVL"],
    756: ["NVIDIA H100 PCIe"],
    312: ["NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe"],
    165.2: ["NVIDIA GeForce RTX 4090"],
    121: ["NVIDIA L4"],
    None: ["Tesla T4"],
}
# L40S is no L4, a laptop's card has less, and a part of a card has a part of its peak
WITHOUT_FIGURES = ["NVIDIA L40S", "NVIDIA GeForce GTX 1080", "", "NVIDIA GeForce RTX 4090 Laptop GPU"]
WITHOUT_FIGURES += ["NVIDIA GeForce RTX 4090 D", "NVIDIA A100-SXM-64GB", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"]


def test_gpus_by_the_name_that_the_driver_gives():
    for tflops, names in GIVEN_NAMES.items():
        assert [gpu_named(name).bf16_tflops for name in names] == [tflops] * len(names), names
    assert not [name for name in WITHOUT_FIGURES if gpu_named(name)]
    assert all(gpu.source for gpu in GPUS) and len({gpu.name for gpu in GPUS}) == len(GPUS)


def test_a_gpu_is_there_where_its_driver_shows_one(tmp_path):
    assert not has_gpu({}, tmp_path)
    (tmp_path / "nvidiactl").touch()
    assert not has_gpu({}, tmp_path)
    (tmp_path / "nvidia0").touch()
    assert has_gpu({}, tmp_path) and has_gpu({"CUDA_VISIBLE_DEVICES": "0"}, tmp_path)
    assert not has_gpu({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) and not has_gpu({"CUDA_VISIBLE_DEVICES": "-1"}, tmp_path)


@pytest.mark.parametrize(
    "options, said", [(dict(device="gpu"), "device is gpu"), (dict(compile="eager"), "compile is")]
)
def test_torch_xla_has_no_gpu_and_its_own_compiler(options, said):
    with pytest.raises(InputError, match=f"{said}.*, but torch_xla is installed, .* requirements-compile.txt"):
        choose_device(MnistConfig(**options))


@pytest.mark.parametrize(
    "chosen, gpu, cuda, expected",
    [
        ("auto", True, True, "gpu"),
        ("auto", True, False, "cpu"),  # a machine with a GPU and torch's CPU build
        ("auto", False, True, "cpu"),
        ("gpu", True, True, "gpu"),
        ("gpu", True, False, "built without CUDA"),
        ("gpu", False, True, "no driver shows an NVIDIA GPU"),
    ],
)
def test_the_gpu_is_taken_where_driver_and_torch_have_it(chosen, gpu, cuda, expected, monkeypatch):
    monkeypatch.setattr(gpus, "find_spec", lambda name: None)  # no torch_xla
    monkeypatch.setattr(gpus, "has_gpu", lambda environment: gpu)
    monkeypatch.setattr(gpus, "cuda_version", lambda: "13.0" * cuda)
    if expected in ("gpu", "cpu"):
        assert gpu_or_cpu(chosen, "auto", {}) == expected
        return
    with pytest.raises(DeviceError, match=expected):
        gpu_or_cpu(chosen, "auto", {})


def test_the_cuda_of_torch():
    """That of requirements.txt has one, on Linux."""
    assert gpus.cuda_version() == (torch.version.cuda or "")
