"""resnet_cifar_tpu.py: BatchNorm and colour, held to plain PyTorch at one device and at eight."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from processes import run
from run_files import losses_in, read_lines, state_in, summary_in

import resnet_cifar_tpu as script
from images.arrays import TrainBatches
from images.cifar import FOLDER, TEST_FILES, TRAIN_FILES, load_dataset
from images.cifar_config import CifarConfig
from images.made import make_stripes
from images.misread import find_misread
from tpu_utils.base.errors import InputError
from tpu_utils.checkpoint.loading import CheckpointReader
from tpu_utils.options.parsing import parse_command_line
from tpu_utils.step.optim import learning_rates

NUM_STEPS = 11
SMALL = ["--depth=8", "--width=4", "--global_batch_size=96", "--dataset=cifar10", "--num_epochs=1", "--warmup_steps=2"]
SMALL += ["--learning_rate=0.1", "--log_every=1", "--prefetch_batches=1", "--eval_batch_size=100"]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> list[str]:
    """Options for a few stripes as CIFAR-10's files."""
    folder, data = tmp_path_factory.mktemp("stripes"), make_stripes(NUM_STEPS * 96, 256)
    (folder / FOLDER).mkdir()
    parts = [
        *((data.train_images[i::5], data.train_labels[i::5]) for i in range(5)),
        (data.test_images, data.test_labels),
    ]
    for name, (images, labels) in zip(TRAIN_FILES + TEST_FILES, parts, strict=True):
        records = np.column_stack([labels, images.reshape(len(labels), -1)])
        (folder / FOLDER / name).write_bytes(records.astype(np.uint8))
    return [*SMALL, f"--data_dir={folder}"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, pictures):
    """{devices: run directory}"""
    folder = tmp_path_factory.mktemp("resnet")

    def train(devices):
        options = ["--device=cpu", f"--num_virtual_devices={devices}", f"--run_dir={folder / str(devices)}"]
        done = run("resnet_cifar_tpu.py", *pictures, *options)
        assert done.returncode == 0, done.stderr
        return folder / str(devices)

    with ThreadPoolExecutor(2) as pool:
        return dict(zip((1, 8), pool.map(train, (1, 8)), strict=True))


@pytest.fixture(scope="module")
def plain(pictures):
    """(losses, model) of a loop that shares nothing with the script but the model, the batches and the schedule."""
    config = parse_command_line(CifarConfig, "", pictures)
    data = load_dataset(config)
    torch.manual_seed(config.seed)
    model = script.ResNet(config.depth, config.width, data.num_classes)
    settings = dict(momentum=config.momentum, weight_decay=config.weight_decay)
    optimizer = torch.optim.SGD(model.parameters(), config.learning_rate, **settings)
    rates, losses = learning_rates(config, NUM_STEPS), []
    batches = TrainBatches(data, config, augment=partial(script.augment, config=config))
    for step in range(NUM_STEPS):
        images, labels = map(torch.from_numpy, batches.batch(step))
        optimizer.param_groups[0]["lr"] = rates[step].item()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels.long())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.eval(), data


def test_losses_are_the_same_at_any_device_count_and_those_of_plain_pytorch(runs, plain):
    """BatchNorm hands the rounding of one example on to all others, and where the input of a ReLU is 0 but for that,
    its sign decides: against other kernels, PyTorch's own, 1e-5 holds for the first steps alone."""
    losses, (one, eight) = plain[0], (np.array(losses_in(run_dir)) for run_dir in runs.values())
    assert losses[-1] < 0.95 * losses[0], "a curve that does not move proves nothing"
    assert np.abs(one / eight - 1).max() < 1e-5
    for found in (one, eight):
        apart = np.abs(found / losses - 1)
        assert apart[:4].max() < 1e-5 and apart.max() < 1e-4, apart


def test_running_statistics_are_of_the_global_batch_and_an_evaluation_uses_them(runs, plain):
    _, model, data = plain
    statistics = {name: value.clone() for name, value in model.named_buffers()}
    for run_dir in runs.values():
        state = state_in(run_dir / "checkpoints" / f"step_{NUM_STEPS:08d}")
        assert state["model/norm.num_batches_tracked"] == NUM_STEPS
        for name, value in statistics.items():
            torch.testing.assert_close(state[f"model/{name}"], value, rtol=1e-2, atol=1e-3)
        model.load_state_dict({name: state[f"model/{name}"] for name in model.state_dict()})
        with torch.no_grad():
            logits = model(torch.from_numpy(data.test_images))
        summary, labels = summary_in(run_dir), torch.from_numpy(data.test_labels).long()
        right = (logits.argmax(1) == labels).double().mean().item()
        assert summary["test_accuracy"] == pytest.approx(right, abs=1.5 / len(labels))
        assert summary["test_loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-5)


def test_one_graph_no_uploads_and_a_picture_in_colour(runs, plain):
    for run_dir in runs.values():
        summary = summary_in(run_dir)
        assert (summary["train_graphs"], summary["eval_graphs"]) == (1, 1)
        assert summary["host_to_device_uploads_per_step"] == 0
        assert len([line for line in read_lines(run_dir) if line["kind"] == "eval"]) == 1
    model, data = script.ResNet(8, 4, 10), plain[2]
    model.load_state_dict(CheckpointReader(run_dir / "checkpoints").load("must").part("model"))
    found = find_misread(model, data, NUM_STEPS)
    assert found.images.shape[1:] == (3, 32, 32) and found.num_tested == 256
    wrong = round((1 - summary["test_accuracy"]) * 256)
    assert found.num_misread == pytest.approx(wrong, abs=1), "computed again, on the host"


@pytest.mark.parametrize("depth", [9, 13, 21])
def test_a_depth_that_no_such_network_has_is_refused(depth):
    with pytest.raises(InputError, match=rf"depth is {depth}; expected 6 n \+ 2; the nearest: \d+ or \d+"):
        CifarConfig(depth=depth)
    assert len(list(script.ResNet(8, 4, 10).blocks)) == 3 and len(list(script.ResNet(20, 4, 10).blocks)) == 9
