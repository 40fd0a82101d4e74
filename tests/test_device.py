"""The device of a run: chips on the bus, refusals, exit codes."""

import pytest
import torch_xla.runtime as xr
from processes import run

from config import MnistConfig
from tpu_compiler.hardware import attached_chips
from tpu_utils.device import start_device
from tpu_utils.errors import DeviceError, InputError, TrainingError, run_script


def fake_pci(root, *devices):
    for number, (vendor, device) in enumerate(devices):
        folder = root / f"0000:00:{number:02x}.0"
        folder.mkdir()
        (folder / "vendor").write_text(vendor + "\n")
        (folder / "device").write_text(device + "\n")


def test_chips_are_found_on_the_pci_bus(tmp_path):
    fake_pci(tmp_path, ("0x1ae0", "0x0063"), ("0x8086", "0x0063"), ("0x1ae0", "0x0042"), ("0x1ae0", "0x0063"))
    assert [chip.name for chip in attached_chips(tmp_path)] == ["v5e", "v5e"]  # 0x0042 is Google's network card
    assert attached_chips(tmp_path / "absent") == []


def test_a_preset_made_for_tpu_refuses_another_device():
    with pytest.raises(DeviceError, match=r"preset production runs on tpu, but .* add --device cpu"):
        start_device(MnistConfig(preset="production", device="tpu"))


def test_a_runtime_that_started_another_device_is_noticed(monkeypatch):
    monkeypatch.setattr(xr, "device_type", lambda: "NEURON")
    with pytest.raises(DeviceError, match="asked for device cpu, the runtime started neuron"):
        start_device(MnistConfig(device="cpu"))


def test_exit_codes_and_messages(capsys, monkeypatch):
    def fail(error):
        raise error

    monkeypatch.setattr("sys.argv", ["script"])
    assert run_script(lambda: 143) == 143
    assert run_script(lambda: fail(InputError("bad value"))) == 2
    assert run_script(lambda: fail(TrainingError("went wrong"))) == 1
    assert capsys.readouterr().err == "error: bad value\nerror: went wrong\n"
    monkeypatch.setattr("sys.argv", ["script", "--debug"])
    with pytest.raises(InputError):
        run_script(lambda: fail(InputError("bad value")))


ON_A_TPU = """
import torch, torch_xla, torch_xla.runtime as xr
from tpu_utils.device import device_memory
xr.use_spmd()
torch.ones(3).to(torch_xla.device())
xr.device_type = lambda: "TPU"
print(device_memory(torch_xla.device()))
"""


def test_memory_is_not_asked_for_under_spmd_where_torch_xla_would_raise():
    """Its check of the virtual device stands before any question to the client, so the CPU's answers like a TPU's."""
    done = run("-c", ON_A_TPU, PJRT_DEVICE="CPU", CPU_NUM_DEVICES=2)
    assert done.stdout == "None\n", done.stderr
