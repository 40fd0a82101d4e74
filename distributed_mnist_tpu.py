"""Train a convolutional network on handwritten digits on many TPU devices.

One SPMD program over a mesh of all devices, with a process for each host.
  The compiler inserts the collectives; BatchNorm is over the whole batch.
  ddp_mnist_tpu.py does the same with a process for each device.

Run:     python distributed_mnist_tpu.py
             all attached TPU chips, or the CPU
         python distributed_mnist_tpu.py --device cpu --num_virtual_devices 8
             8 virtual CPU devices
         python distributed_mnist_tpu.py --shard_parameters
             FSDP: parameters are sharded too

Pods:    run the same command on all workers:
         gcloud compute tpus tpu-vm ssh NAME --worker=all --command=...

Expect:  the losses of plain PyTorch on one CPU within 3e-7 (22 steps,
         float32); 96.4 % of 5,000 MNIST test images after 3 epochs on 10,000
         over 8 devices, simple_mnist_tpu.py has 96.3 %; one train and one
         eval graph. XLA:CPU, torch 2.9.0, torch_xla 2.9.0, seeds 3 and 0.
"""

import sys

from config import DistributedMnistConfig
from images.arrays import TrainBatches, check_divisible, eval_batches
from images.mnist import check_files, load_dataset
from tpu_utils.base.errors import run_script
from tpu_utils.options.environment import command_line, meet_hosts

if __name__ == "__main__":  # before the slow imports: a wrong option or file is answered at once
    config = command_line(DistributedMnistConfig, __doc__, check_files)

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from tpu_utils.base.process import Peers
from tpu_utils.device import DEVICE_TYPE, BatchSharding, Mesh, device_count, mark_sharding, send, use_spmd
from tpu_utils.record.metrics import DeviceMetrics, labels_that_count
from tpu_utils.run import Run
from tpu_utils.step.graphs import one_graph
from tpu_utils.step.optim import gradient_norm, learning_rates, make_optimizer, step_optimizer
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


def build_model(config: DistributedMnistConfig, dataset) -> nn.Module:
    return ConvNet(dataset.image_size, config.channels, config.hidden_dim)


def shard(tensors, mesh: Mesh) -> None:
    """Shard each tensor along its first axis that the devices divide evenly."""
    for tensor in tensors:
        fitting = [axis for axis, size in enumerate(tensor.shape) if tensor.numel() and size % mesh.size() == 0]
        sharded = min(fitting, default=None)  # None: replicated
        mark_sharding(tensor, mesh, tuple("data" if axis == sharded else None for axis in range(tensor.dim())))


@one_graph  # torch_xla.compile(full_graph=True); a second graph stops the run and says what changed
def train_step(model, optimizer, rates, metrics, images, labels, config):
    """One optimizer step as one graph. images (B, H, W), labels (B,), rates (num_steps,): all on the devices.

    images and labels are the global batch, and the mean is over all of it: the compiler inserts the all-reduce.
    """
    with torch.autocast(DEVICE_TYPE, torch.bfloat16, enabled=config.precision == "bfloat16"):
        logits = model(images)
    loss = F.cross_entropy(logits.float(), labels.long())
    loss.backward()
    norm = gradient_norm(model.parameters())
    rate = rates.index_select(0, metrics.step)  # looked up on the devices: nothing but the batch goes up
    skipped = step_optimizer(optimizer, rate, torch.isfinite(loss + norm), config.on_nonfinite)
    optimizer.zero_grad(set_to_none=True)  # gradients still alive at the end would be outputs of the program
    metrics.record(loss, norm, skipped=skipped)


@one_graph
def eval_step(model, images, labels, mask, config):
    """(correct, summed loss, examples) of the global batch as a tensor (3,), padding left out by the mask."""
    with torch.no_grad(), torch.autocast(DEVICE_TYPE, torch.bfloat16, enabled=config.precision == "bfloat16"):
        logits = model(images).float()
        correct = (logits.argmax(1) == labels).float()
        loss = F.cross_entropy(logits, labels.long(), reduction="none")
        counted = labels_that_count(labels, mask)  # 0 for padding
        return torch.stack([(correct * counted).sum(), (loss * counted).sum(), counted.sum()])


def evaluate(model, test_batches, run: Run) -> dict[str, float]:
    """Accuracy and mean loss in nats over the test set, every example counted once."""
    model.eval()  # dropout off, BatchNorm by its running statistics
    with run.phase("evaluation"):
        sums = [eval_step(model, *batch, run.config) for batch in test_batches]
        # the first read: all batches are dispatched by now
        correct, loss, count = sum(one.cpu().double() for one in sums).tolist()
    model.train()
    return dict(accuracy=correct / count, test_loss=loss / count)


def train(config: DistributedMnistConfig, hosts: Peers | None = None) -> int:
    """hosts: the processes of this run, one for each host. None: this one alone."""
    with Run(config, train_step, eval_step, hosts=hosts, join=use_spmd) as run:  # leaving it, all is on disk
        num_devices = device_count()
        check_divisible(config, num_devices)
        mesh = Mesh(np.arange(num_devices), (num_devices,), ("data",))
        sharding = BatchSharding(mesh, ("data",))
        part = sharding.part, sharding.num_parts  # a host reads the rows of its own devices
        dataset = load_dataset(config)
        batches = TrainBatches(dataset, config, *part)  # a pure function of seed and step
        model = build_model(config, dataset)
        # makes and locks the run directory; with --resume reads its newest checkpoint
        run.open(batches, dataset, check_model(model, dataset, evaluate, run), sharding)
        rows = config.global_batch_size // num_devices
        copies = "sharded" if config.shard_parameters else "a copy of the"
        run.print(f"parallel   {num_devices} devices, each with {rows} examples, {copies} parameters")
        model.to(run.device)
        # create its state now: state that step 1 creates makes step 2 a different program
        optimizer = make_optimizer(config, model.parameters())
        schedule = learning_rates(config, batches.num_steps)
        rates = schedule.to(run.device)
        metrics = DeviceMetrics(["loss", "gradient_norm"], config.log_every, run.device)
        if config.shard_parameters:  # run.track() replicates what is not sharded
            for parameter in model.parameters():  # its optimizer state is sharded the same way
                shard([parameter, *optimizer.state[parameter].values()], mesh)
        run.track(model=model, optimizer=optimizer, metrics=metrics)  # what checkpoints hold; filled when resuming
        test_set = eval_batches(dataset, config.eval_batch_size, num_devices, *part)
        test_batches = [send(batch, run.device, sharding) for batch in test_set]

        for step, (images, labels) in run.steps(batches):  # from the first one not yet done; uploads run ahead
            train_step(model, optimizer, rates, metrics, images, labels, config)
            if run.log_due(step):  # reads the metrics of all steps since the last line
                run.log(step, learning_rate=schedule[step - 1].item())
            if step % batches.steps_per_epoch == 0:
                run.log_evaluation(step, **evaluate(model, test_batches, run))
            if run.save_due(step):  # every save_every steps, at the end, and before a stop
                run.save(step)  # waits for the copy to the host; the disk is written behind the next steps
        return run.finish()


if __name__ == "__main__":
    sys.exit(run_script(lambda: train(config, meet_hosts(config))))
