"""Train a convolutional network on handwritten digits, a process per TPU device.

Each process has the whole model and reads its own part of every batch.
  DistributedDataParallel averages the gradients.
  BatchNorm is refused: its statistics would be those of a part.
  distributed_mnist_tpu.py does the same with one program for all devices.

Run:     torchrun --standalone --nproc_per_node=8 ddp_mnist_tpu.py
             a process for each of 8 chips
         python ddp_mnist_tpu.py
             one device needs no launcher

Expect:  the losses of plain PyTorch on one CPU within 3e-7 (22 steps,
         float32), with 1 and 8 replicas; one train and one eval graph.
         XLA:CPU, torch 2.9.0, torch_xla 2.9.0, seed 3.
"""

import sys
from functools import partial

from config import DdpMnistConfig
from images.arrays import TrainBatches, check_divisible, eval_batches
from images.mnist import check_files, load_dataset
from tpu_utils.base.errors import run_script
from tpu_utils.options.environment import command_line

if __name__ == "__main__":  # before the slow imports: a wrong option or file is answered at once
    config = command_line(DdpMnistConfig, __doc__, check_files)

import torch
import torch.nn.functional as F
from torch import nn

from tpu_utils.device import DEVICE_TYPE, global_ordinal, send, world_size
from tpu_utils.record.metrics import DeviceMetrics, labels_that_count
from tpu_utils.run import Run
from tpu_utils.step.graphs import one_graph
from tpu_utils.step.optim import gradient_norm, learning_rates, make_optimizer, step_optimizer
from tpu_utils.step.replicas import check_launched, join_replicas, mean_over_replicas, over_replicas, replicate
from tpu_utils.trial.checks import check_model


class ConvNet(nn.Module):
    """Three convolutions and two linear layers: images (B, H, W) uint8 -> logits (B, 10).

    Strided convolutions instead of max-pooling, whose backward pass (select-and-scatter) is slow on XLA:CPU.
    """

    def __init__(self, image_size: int, channels: int, hidden_dim: int):
        super().__init__()
        self.conv1 = nn.Conv2d(1, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1)
        self.conv3 = nn.Conv2d(2 * channels, 2 * channels, 3, stride=2, padding=1)
        self.hidden = nn.Linear(2 * channels * (image_size // 4) ** 2, hidden_dim)
        self.head = nn.Linear(hidden_dim, 10)

    def forward(self, images):
        x = images.unsqueeze(1).float() / 85 - 1  # uint8 0..255 to -1..2
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = F.relu(self.conv3(x))
        x = F.relu(self.hidden(x.flatten(1)))
        return self.head(x)


def build_model(config: DdpMnistConfig, dataset) -> nn.Module:
    return ConvNet(dataset.image_size, config.channels, config.hidden_dim)


@one_graph  # torch_xla.compile(full_graph=True); a second graph stops the run and says what changed
def train_step(replica, optimizer, rates, metrics, images, labels, config):
    """One optimizer step as one graph. images (b, H, W), labels (b,), rates (num_steps,): all on the device.

    images and labels are this replica's part of the batch.
    """
    with torch.autocast(DEVICE_TYPE, torch.bfloat16, enabled=config.precision == "bfloat16"):
        logits = replica(images)
    losses = F.cross_entropy(logits.float(), labels.long(), reduction="none")
    # over the labels of a replica on average: its own count would weigh them otherwise where some are ignored
    loss = losses.sum() / mean_over_replicas(labels_that_count(labels).sum())
    loss.backward()  # DDP's hooks average the gradients over the replicas
    mean_loss = mean_over_replicas(loss.detach())
    norm = gradient_norm(replica.parameters())
    rate = rates.index_select(0, metrics.step)  # looked up on the device: nothing but the batch goes up
    # not xm.optimizer_step, which would all-reduce the gradients again; finite is the same on all devices
    skipped = step_optimizer(optimizer, rate, torch.isfinite(mean_loss + norm), config.on_nonfinite)
    optimizer.zero_grad(set_to_none=True)  # gradients still alive at the end would be outputs of the program
    metrics.record(mean_loss, norm, skipped=skipped)


@one_graph
def eval_step(model, images, labels, mask, config):
    """(correct, summed loss, examples) of the global batch as a tensor (3,), padding left out by the mask."""
    with torch.no_grad(), torch.autocast(DEVICE_TYPE, torch.bfloat16, enabled=config.precision == "bfloat16"):
        logits = model(images).float()
        correct = (logits.argmax(1) == labels).float()
        loss = F.cross_entropy(logits, labels.long(), reduction="none")
        counted = labels_that_count(labels, mask)  # 0 for padding
        return over_replicas(torch.stack([(correct * counted).sum(), (loss * counted).sum(), counted.sum()]))


def evaluate(model, test_batches, run: Run) -> dict[str, float]:
    """Accuracy and mean loss in nats over the test set, every example counted once."""
    model.eval()  # dropout off, BatchNorm by its running statistics
    with run.phase("evaluation"):
        sums = [eval_step(model, *batch, run.config) for batch in test_batches]
        # the first read: all batches are dispatched by now
        correct, loss, count = sum(one.cpu().double() for one in sums).tolist()
    model.train()
    return dict(accuracy=correct / count, test_loss=loss / count)


def train(config: DdpMnistConfig) -> int:
    # this process is one replica of those that torchrun has started
    with Run(config, train_step, eval_step, join=partial(join_replicas, config)) as run:  # leaving it, all is on disk
        ordinal, num_replicas = global_ordinal(), world_size()
        check_divisible(config, num_replicas)
        dataset = load_dataset(config)
        batches = TrainBatches(dataset, config, ordinal, num_replicas)  # a pure function of seed and step
        model = build_model(config, dataset)
        # makes and locks the run directory; with --resume reads its newest checkpoint
        run.open(batches, dataset, check_model(model, dataset, evaluate, run))
        run.print(f"parallel   {num_replicas} replicas, each with {config.global_batch_size // num_replicas} examples")
        model.to(run.device)
        # create its state now: state that step 1 creates makes step 2 a different program
        optimizer = make_optimizer(config, model.parameters())
        schedule = learning_rates(config, batches.num_steps)
        rates = schedule.to(run.device)
        metrics = DeviceMetrics(["loss", "gradient_norm"], config.log_every, run.device)
        run.track(model=model, optimizer=optimizer, metrics=metrics)  # what checkpoints hold; filled when resuming
        replica = replicate(model, tracing=bool(config.compile_for))
        test_set = eval_batches(dataset, config.eval_batch_size, num_replicas, ordinal, num_replicas)
        test_batches = [send(batch, run.device) for batch in test_set]

        for step, (images, labels) in run.steps(batches):  # from the first one not yet done; uploads run ahead
            train_step(replica, optimizer, rates, metrics, images, labels, config)
            if run.log_due(step):  # reads the metrics of all steps since the last line
                run.log(step, learning_rate=schedule[step - 1].item())
            if step % batches.steps_per_epoch == 0:
                run.log_evaluation(step, **evaluate(model, test_batches, run))
            if run.save_due(step):  # every save_every steps, at the end, and before a stop
                run.save(step)  # waits for the copy to the host; the disk is written behind the next steps
        return run.finish()


if __name__ == "__main__":
    sys.exit(run_script(lambda: check_launched(config) or train(config)))
