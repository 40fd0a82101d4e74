"""Examples read one by one by worker processes: the same batches whenever they are read, or one message."""

import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from examples import Noisy, Stream, negated, read_hugging_face
from processes import ROOT, waits
from run_files import assert_identical, in_process, state_in, summary_in
from small_models import Normed
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler
from torchvision.datasets import FakeData
from torchvision.transforms import Compose, PILToTensor, RandomCrop

import simple_mnist_tpu
from config import MnistConfig
from images.arrays import TrainBatches
from images.examples import ExampleBatches, ExampleDataset, as_pair
from tpu_utils.base.errors import InputError, TrainingError

CONFIG = MnistConfig(global_batch_size=8, num_epochs=2, seed=3)


def a_set(train=None, test=None, num_classes=5, **options) -> ExampleDataset:
    return ExampleDataset("mine", train or Noisy(), test or Noisy(), num_classes, num_workers=1, **options)


def test_batches_are_a_pure_function_of_seed_and_step():
    state = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    data = a_set()
    whole, again = ExampleBatches(data, CONFIG), ExampleBatches(data, CONFIG)
    assert (whole.steps_per_epoch, whole.num_steps) == (3, 6)
    batches = [whole.batch(index) for index in range(6)]
    for index in (4, 5):  # resumed there
        for part, expected in zip(again.batch(index), batches[index], strict=True):
            np.testing.assert_array_equal(part, expected)
    halves = [ExampleBatches(data, CONFIG, part, 2).batch(4) for part in (0, 1)]
    for place, expected in enumerate(batches[4]):
        np.testing.assert_array_equal(np.stack([half[place] for half in halves], 1).reshape(expected.shape), expected)
    images, labels = batches[0]
    ids = TrainBatches(data, CONFIG).ids(0)
    assert images.dtype == np.float32 and labels.dtype == np.int32 and labels.tolist() == (ids % 5).tolist()
    drawn = images[:, 0, 0, 0] - ids
    assert (drawn > 0).all() and (drawn < 3).all() and len(set(drawn)) == 8
    assert not set(drawn) & {v for b in batches[3:] for v in b[0][:, 0, 0, 0] - b[0][:, 0, 0, 0].round()}
    after = torch.get_rng_state(), np.random.get_state()[1], random.getstate()
    assert torch.equal(state[0], after[0]) and (state[1] == after[1]).all() and state[2] == after[2]


@pytest.mark.parametrize(
    "kind", ["loader", *(pytest.param(k, marks=pytest.mark.slow) for k in ("dataset", "hugging_face"))]
)
def test_a_run_on_what_others_read_resumes_bit_identical(tmp_path, monkeypatch, kind):
    crop = Compose([PILToTensor(), RandomCrop(8)])
    train, test = FakeData(64, (3, 12, 12), 5, crop), FakeData(40, (3, 8, 8), 5, PILToTensor(), random_offset=999)
    read = as_pair
    if kind == "loader":
        train = DataLoader(train, batch_size=32, shuffle=True, num_workers=1)
    if kind == "hugging_face":
        datasets = pytest.importorskip("datasets")
        columns = [
            datasets.Dataset.from_dict({"img": [np.asarray(i) for i, _ in d], "label": [t for _, t in d]})
            for d in (train, test)
        ]
        train, test, read = *columns, read_hugging_face
    data = ExampleDataset("fake", train, test, 5, read, num_workers=1)
    monkeypatch.setattr(simple_mnist_tpu, "load_dataset", lambda config: data)
    monkeypatch.setattr(simple_mnist_tpu, "TrainBatches", ExampleBatches)
    monkeypatch.setattr(simple_mnist_tpu, "ConvNet", Normed)
    options = ["--global_batch_size=16", "--num_epochs=2", "--max_shift=0", "--warmup_steps=2", "--no_tensorboard"]
    options += ["--save_every=3", "--keep_checkpoints=9", "--eval_batch_size=32"]
    assert in_process(*options, "--run_dir", tmp_path / "run") == 0
    run, again = (tmp_path / name / "checkpoints" for name in ("run", "again"))
    shutil.copytree(run / "step_00000003", again / "step_00000003")
    assert in_process(*options, "--run_dir", tmp_path / "again", "--resume=must") == 0
    assert_identical(*(state_in(folder / "step_00000008") for folder in (run, again)))
    assert summary_in(tmp_path / "run")["host_to_device_uploads_per_step"] == 0


def pair(image=None, label=1):
    return (np.zeros((3, 8, 8), np.float32) if image is None else image), label


@pytest.mark.parametrize(
    "examples, said",
    [
        (Stream(), "mine: train is Stream, which has no length or no .i.; .* a stream cannot be resumed"),
        (DataLoader(Stream()), "mine: train is Stream"),
        (DataLoader(Noisy(), sampler=WeightedRandomSampler([1.0] * 30, 30)), "a sampler of its own, WeightedRandomS"),
        (DataLoader(Noisy(), collate_fn=list), "the DataLoader has a collate_fn of its own"),
        (DataLoader(Noisy(), batch_size=None), "batches of its own"),
        (iter([pair()]), "train is list_iterator, which has no length"),
        ([], "mine: train has no example"),
        ([{"img": 0, "label": 1}], r"an example is a dict of \['img', 'label'\]; .* give read="),
        ([pair(label=1.5)], "labels are float64; expected integers, or num_classes None"),
        ([pair(np.array(["a"]))], "mine: train images is of <U1; expected numbers"),
    ],
)
def test_what_cannot_be_resumed_or_read_is_refused_at_once(examples, said):
    with pytest.raises(InputError, match=said):
        ExampleDataset("mine", examples, Noisy(), num_classes=5)


@pytest.mark.parametrize(
    "odd, said",
    [
        (pair(np.zeros((3, 8, 9), np.float32)), r"the image of example 17 is float32 \(3, 8, 9\), that of "),
        (pair(label=5), "the label of example 17 is 5; expected 0 to 4"),
        (pair(label=-1), "train_labels: example 17 has -1"),
        (pair(np.full((3, 8, 8), np.nan, np.float32)), "example 17 has nan"),
    ],
)
def test_an_example_that_does_not_fit_is_named_when_it_is_read(odd, said):
    with pytest.raises(InputError, match=said):
        batches = ExampleBatches(a_set(Noisy(odd)), CONFIG)
        for index in range(3):
            batches.batch(index)


def test_targets_and_sizes_of_examples():
    targets = TensorDataset(torch.rand(20, 4), torch.rand(20, 2))
    data = ExampleDataset("points", targets, targets, num_classes=None)
    images, labels = data.first(3)
    assert images.shape == (3, 4) and labels.shape == (3, 2) and labels.dtype == np.float32
    assert data.description == "points, 4 float32: 20 train, 20 test; read by 2 processes"
    assert data.fingerprint() == ExampleDataset("points", targets, targets, None).fingerprint()
    assert data.fingerprint() != ExampleDataset("points", targets, targets, None, read=negated).fingerprint()
    other_test = ExampleDataset("points", targets, TensorDataset(*(tensor[:19] for tensor in targets.tensors)), None)
    assert other_test.fingerprint() % 2**32 == data.fingerprint() % 2**32 != data.fingerprint()
    assert other_test.fingerprint() != data.fingerprint()
    np.testing.assert_array_equal(data.test_images, targets.tensors[0].numpy())
    with pytest.raises(InputError, match="num_workers is 0; expected 1 or more"):
        ExampleDataset("points", targets, targets, None, num_workers=0)


STOPPED = """
from processes import ROOT, waits
from examples import Noisy

if __name__ == "__main__":
    import simple_mnist_tpu as script
    from config import MnistConfig
    from images.examples import ExampleBatches, ExampleDataset
    from small_models import Normed
    from tpu_utils.base.errors import run_script
    from tpu_utils.options.parsing import parse_command_line

    script.load_dataset = lambda config: ExampleDataset("mine", Noisy(count=64), Noisy(), 5, num_workers=1)
    script.TrainBatches, script.ConvNet = ExampleBatches, Normed
    sys.exit(run_script(lambda: script.train(parse_command_line(MnistConfig, "", sys.argv[1:]))))
"""


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["readers start", "steps"])
def test_a_stop_of_the_whole_process_group_is_a_stop_and_leaves_nobody_behind(tmp_path, moment):
    """As Ctrl-C in a terminal, timeout and systemd stop a run: the processes that read examples get the signal too."""
    found_in = [str(ROOT), str(ROOT / "tests")]
    (tmp_path / "mine.py").write_text(f"import sys\nsys.path[:0] = {found_in}\n{STOPPED}")
    options = ["--device=cpu", "--global_batch_size=16", "--num_epochs=100000", "--warmup_steps=0", "--no_tensorboard"]
    command = [sys.executable, tmp_path / "mine.py", *options, "--save_every=5", f"--run_dir={tmp_path / 'run'}"]
    run = subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    sign = "run/config.json" if moment == "readers start" else "run/checkpoints/*/done"
    waits(lambda: run.poll() is not None or list(tmp_path.glob(sign)))
    os.killpg(run.pid, signal.SIGTERM)
    out, err = run.communicate(timeout=300)
    assert run.returncode == 143, (out, err)
    assert "stopped by SIGTERM" in out and "error" not in err
    assert ("saved after step" in out) == bool(list(tmp_path.glob("run/checkpoints/*/done")))
    waits(lambda: not subprocess.run(["pgrep", "-g", str(run.pid)], capture_output=True).stdout, 60)


class Dying(Noisy):
    """Its reader ends as the kernel ends one whose /dev/shm is full, or the machine's memory."""

    def __init__(self, number):
        super().__init__()
        self.number = number

    def __getitem__(self, index):
        if multiprocessing.parent_process():
            os.kill(os.getpid(), self.number)
        return super().__getitem__(index)


@pytest.mark.parametrize("number", [signal.SIGBUS, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_a_reader_that_dies_is_one_message_with_the_remedy(number):
    said = r"that reads mine: train has died: DataLoader worker .* /dev/shm, which has [\d,]+ MiB, .*--shm-size"
    with pytest.raises(TrainingError, match=said):
        ExampleBatches(a_set(Dying(number)), CONFIG).batch(0)


def test_where_no_reader_can_start_it_is_the_same_message(monkeypatch):
    """A full, read-only or missing /dev/shm was "[Errno 28] No space left on device", without a place."""
    name = staticmethod(lambda: "/" + "x" * 300)  # Linux refuses it, as it does where there is no room
    monkeypatch.setattr(multiprocessing.synchronize.SemLock, "_make_name", name)
    with pytest.raises(TrainingError, match=r"that reads mine: train has died: .*Invalid argument; .* /dev/shm, which"):
        ExampleBatches(a_set(), CONFIG).batch(0)


def test_a_test_set_keeps_no_files_open():
    """Each batch of a worker came with two open files, and a test set of 40,000 examples with more than are allowed."""
    opened, limits = len(list(Path("/proc/self/fd").iterdir())), resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (opened + 40, limits[1]))
        assert len(a_set(test=Noisy(count=64 * 40)).test_images) == 2560
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
