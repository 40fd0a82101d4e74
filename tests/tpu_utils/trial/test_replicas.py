"""A step of DDP, tried as two replicas on the host: their parts of a batch give the gradients of the whole."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from config import MnistConfig
from tpu_utils import device
from tpu_utils.base.errors import InputError
from tpu_utils.checkpoint.state import Tracked
from tpu_utils.device import world_size
from tpu_utils.record.metrics import DeviceMetrics
from tpu_utils.step.graphs import one_graph
from tpu_utils.step.optim import gradient_norm, make_optimizer, step_optimizer
from tpu_utils.step.replicas import mean_over_replicas, over_replicas
from tpu_utils.trial.first_step import check_training
from tpu_utils.trial.unsaved import Unsaved

WEIGHTS = torch.linspace(0.1, 3, 5)


@pytest.fixture(scope="module", autouse=True)
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def total(logits, labels):
    return F.cross_entropy(logits, labels, reduction="sum")


def counted(labels):
    return (labels >= 0).sum().float()


def weighted(logits, labels):
    losses = F.cross_entropy(logits, labels, WEIGHTS, reduction="sum")
    return losses / mean_over_replicas(WEIGHTS[labels.clamp(min=0)].mul(labels >= 0).sum())


# name: (whether labels are ignored, the loss, whether parts of a batch give the gradients of the whole)
LOSSES = {
    "a mean of as many labels": (False, F.cross_entropy, True),
    "over the labels of a replica on average": (True, lambda x, y: total(x, y) / mean_over_replicas(counted(y)), True),
    "over the weights of a replica on average": (True, weighted, True),
    "replicas over the sum": (True, lambda x, y: world_size() * total(x, y) / over_replicas(counted(y)), True),
    "a mean over the labels of this replica": (True, F.cross_entropy, False),
    "a mean by the weights of this replica": (False, lambda x, y: F.cross_entropy(x, y, WEIGHTS), False),
    "a sum": (False, total, False),
    "over the sum of all": (True, lambda x, y: total(x, y) / over_replicas(counted(y)), False),
}


def try_step(loss, ignored=False, body=None, couples=False, **others):
    """What a script does with a step of DDP before it compiles it. loss: a function of replica, images, labels and
    others: a critic."""

    @one_graph(couples_examples=couples)
    def train_step(replica, optimizer, rates, metrics, images, labels, config, critic=None):
        mine = loss(replica, images.float(), labels.long(), *([critic] if critic else []))
        mine.backward()
        mean_loss, norm = mean_over_replicas(mine.detach()), gradient_norm(replica.parameters())
        step_optimizer(optimizer, rates, torch.isfinite(mean_loss + norm), "stop")
        optimizer.zero_grad(set_to_none=True)
        metrics.record(mean_loss, norm)

    torch.manual_seed(0)
    config, model = MnistConfig(optimizer="sgd"), nn.Sequential(body or nn.Linear(6, 5))
    host = torch.device("cpu")
    images, labels = torch.randn(12, 6), torch.randint(5, (12,))
    if ignored:
        labels[[1, 3, 5, 8]] = -100
    optimizer, metrics = make_optimizer(config, model.parameters()), DeviceMetrics(["loss", "norm"], 4, host)

    plain = SimpleNamespace(config=config, device=host, in_plain_pytorch=contextlib.nullcontext)
    plain.examples = (images[:11], labels[:11]), lambda *_: {}, model, 0
    batch, rates = [images, labels], torch.tensor([0.1])
    arguments = (DistributedDataParallel(model), optimizer, rates, metrics, *batch, config, *others.values())
    unsaved = Unsaved(Tracked(dict(model=model, optimizer=optimizer, metrics=metrics, **others)))
    check_training(plain, train_step, arguments, {}, batch, unsaved)


@pytest.mark.parametrize("name", LOSSES)
def test_parts_of_a_batch_give_the_gradients_of_the_whole(name, capsys):
    ignored, loss, is_right = LOSSES[name]
    said = "gradients that are .* of their size apart: a mean over a replica's part"
    with contextlib.nullcontext() if is_right else pytest.raises(InputError, match=said):
        try_step(lambda replica, images, labels: loss(replica(images), labels), ignored)
    assert not is_right or "check" not in capsys.readouterr().out
    assert device.replica_tried.get() is None and world_size() == 1


def test_a_second_network_that_ddp_does_not_have_is_refused():
    """Its gradients would be those of a replica's part, and each replica would have another one."""

    def loss(replica, images, labels, critic):
        F.cross_entropy(critic(images), labels).backward()
        with torch.no_grad():
            for parameter in critic.parameters():
                parameter.sub_(0.1 * parameter.grad)
        critic.zero_grad(set_to_none=True)
        return F.cross_entropy(replica(images), labels)

    with pytest.raises(InputError, match=r"leaves critic.weight, critic.bias unlike on two replicas"):
        try_step(loss, couples=True, critic=nn.Linear(6, 5))


class Queue(nn.Linear):
    """Keeps the images of its last batch."""

    def __init__(self):
        super().__init__(6, 5)
        self.register_buffer("last", torch.zeros(6))

    def forward(self, images):
        if self.training:
            self.last.copy_(images.mean(0))
        return super().forward(images)


def test_a_buffer_of_each_replica_alone_is_refused():
    with pytest.raises(InputError, match=r"leaves replica\.0\.last unlike on two replicas"):
        try_step(lambda replica, images, labels: F.cross_entropy(replica(images), labels), body=Queue())


def test_examples_coupled_within_a_part_are_said(capsys):
    def loss(replica, images, labels):
        logits = replica(images)
        return F.cross_entropy(logits @ logits.T, torch.arange(len(logits)))

    try_step(loss, couples=True)
    assert "so the run depends on how many there are; distributed_mnist_tpu.py" in capsys.readouterr().out
