"""Values that stay on the device until they are read, and where the seconds of a run go."""

import time

import numpy as np
import pytest
import torch
import torch_xla
from run_files import to_host

from tpu_utils.base.process import Goodput
from tpu_utils.device import graphs_compiled, transfers_from_device
from tpu_utils.record.metrics import DeviceMetrics, finite_means, first_not_finite


@pytest.fixture(scope="module")
def device():
    return torch_xla.device()


def test_metrics_keep_the_last_steps_on_the_device(device):
    metrics = DeviceMetrics(["loss", "norm"], 4, device)
    graphs, reads = graphs_compiled(), transfers_from_device()
    sources = [torch.tensor([float(i), 10.0 * i]).to(device) for i in range(1, 7)]
    for source in sources:
        with torch_xla.compile(full_graph=True, name="record"):
            metrics.record(source[0], source[1])
    assert transfers_from_device() == reads and graphs_compiled() == graphs + 1
    values = metrics.read(2, 6)
    np.testing.assert_array_equal(values["loss"], [3, 4, 5, 6])
    np.testing.assert_array_equal(values["norm"], [30, 40, 50, 60])
    assert transfers_from_device() == reads + 1
    other = DeviceMetrics(["loss", "norm"], 4, device)
    other.load_state_dict(to_host(metrics.state_dict()))
    np.testing.assert_array_equal(other.read(4, 6)["loss"], [5, 6])


def test_means_are_over_the_steps_that_were_not_skipped():
    values = {"loss": np.array([1.0, 2.0, 3.0]), "gradient_norm": np.array([np.inf, 4.0, 6.0])}
    assert finite_means(values) == {"loss": 2.5, "gradient_norm": 5.0, "largest_gradient_norm": 6.0}
    assert np.isnan(list(finite_means({"gradient_norm": np.array([np.nan])}).values())).all()


def test_goodput_sums_to_wall_time(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    goodput = Goodput(time.perf_counter() - 6.0)
    clock[0] += 1
    with goodput.phase("restore"):  # only a resumed run has it
        clock[0] += 7
    goodput.enter("step")
    clock[0] += 2
    with goodput.phase("evaluation"):
        clock[0] += 5
        with goodput.phase("data_wait"):
            clock[0] += 3
        clock[0] += 0.5
    clock[0] += 4
    assert goodput.total() == 6 + 1 + 7 + 2 + 5 + 3 + 0.5 + 4 == sum(goodput.seconds.values())
    seconds = {name: seconds for name, seconds in goodput.seconds.items() if seconds}
    assert seconds == {"start_up": 7, "restore": 7, "step": 6, "evaluation": 5.5, "data_wait": 3}


def test_the_first_step_that_is_not_finite_is_found():
    good, bad = np.array([1.0, 2.0, 3.0, 4.0]), np.array([1.0, 2.0, np.nan, np.inf])
    assert first_not_finite({"loss": good}) is first_not_finite({"loss": good[:0]}) is None
    assert first_not_finite({"loss": good, "gradient_norm": bad}) == 2
