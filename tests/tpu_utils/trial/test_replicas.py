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
from tpu_utils.record.metrics import DeviceMetrics, labels_that_count
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


def weighted(logits, labels):
    losses = F.cross_entropy(logits, labels, WEIGHTS, reduction="sum")
    return losses / mean_over_replicas(WEIGHTS[labels.clamp(min=0)].mul(labels >= 0).sum())


def counted(logits, labels):
    losses = F.cross_entropy(logits, labels, reduction="none")
    return losses.sum() / mean_over_replicas(labels_that_count(labels).sum())


APART = "gradients that are .* of their size apart: a mean over a replica's part"
# name: (whether labels are ignored, the loss, what is said)
LOSSES = {
    "a mean of as many labels": (False, F.cross_entropy, None),
    "over the labels of a replica on average": (True, counted, None),
    "over the weights of a replica on average": (True, weighted, None),
    "times the number of replicas over the sum": (
        True,
        lambda logits, labels: (
            F.cross_entropy(logits, labels, reduction="sum") / over_replicas((labels >= 0).sum().float()) * world_size()
        ),
        None,
    ),
    "a mean over the labels of this replica": (True, F.cross_entropy, APART),
    "a mean by the weights of this replica": (False, lambda x, y: F.cross_entropy(x, y, WEIGHTS), APART),
    "a sum": (False, lambda x, y: F.cross_entropy(x, y, reduction="sum"), APART),
    "over the sum of all": (
        True,
        lambda x, y: F.cross_entropy(x, y, reduction="sum") / over_replicas((y >= 0).sum().float()),
        APART,
    ),
}


def finish(replica, optimizer, rates, metrics, loss):
    """A step after its forward pass."""
    loss.backward()
    mean_loss, norm = mean_over_replicas(loss.detach()), gradient_norm(replica.parameters())
    step_optimizer(optimizer, rates, torch.isfinite(mean_loss + norm), "stop")
    optimizer.zero_grad(set_to_none=True)
    metrics.record(mean_loss, norm)


def try_step(loss, ignored=False, body=None, couples=False, **others):
    """What a script does with a step of DDP before it compiles it. loss: a function of replica, images, labels and
    others: a critic."""

    @one_graph(couples_examples=couples)
    def train_step(replica, optimizer, rates, metrics, images, labels, config, critic=None):
        others = [critic] if critic else []
        finish(replica, optimizer, rates, metrics, loss(replica, images.float(), labels.long(), *others))

    torch.manual_seed(0)
    config, model = MnistConfig(optimizer="sgd"), nn.Sequential(body or nn.Linear(6, 5))
    host = torch.device("cpu")
    images, labels = torch.randn(12, 6), torch.randint(5, (12,))
    if ignored:
        labels[[1, 3, 5, 8]] = -100
    optimizer, metrics = make_optimizer(config, model.parameters()), DeviceMetrics(["loss", "norm"], 4, host)

    def evaluate(model, batches, run):
        sums = torch.zeros(2)
        for images, labels, mask in batches:
            losses = F.cross_entropy(model(images.float()), labels.long(), reduction="none")
            counted = labels_that_count(labels, mask)
            sums += torch.stack([(losses * counted).sum(), counted.sum()])
        return {"score": (sums[0] / sums[1]).item()}

    plain = SimpleNamespace(config=config, device=host, in_plain_pytorch=contextlib.nullcontext)
    plain.examples = (images[:11], labels[:11]), evaluate, model, 0
    batch, rates = [images, labels], torch.tensor([0.1])
    arguments = (DistributedDataParallel(model), optimizer, rates, metrics, *batch, config, *others.values())
    unsaved = Unsaved(Tracked(dict(model=model, optimizer=optimizer, metrics=metrics, **others)))
    check_training(plain, train_step, arguments, {}, batch, unsaved)


@pytest.mark.parametrize("name", LOSSES)
def test_parts_of_a_batch_give_the_gradients_of_the_whole(name, capsys):
    ignored, loss, said = LOSSES[name]
    with pytest.raises(InputError, match=said) if said else contextlib.nullcontext():
        try_step(lambda replica, images, labels: loss(replica(images), labels), ignored)
    assert said or "check" not in capsys.readouterr().out
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
