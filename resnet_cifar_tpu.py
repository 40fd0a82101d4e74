"""Train a ResNet with BatchNorm on colour pictures, over all TPU devices.

One program over a mesh; BatchNorm's statistics are over the global batch.

Run:     python resnet_cifar_tpu.py
             quick_test: pictures of stripes, no download, no TPU needed
         python resnet_cifar_tpu.py --preset production --data_dir DIR
             CIFAR-10's binary files on a TPU VM; --download fetches them
         python resnet_cifar_tpu.py --device cpu --num_virtual_devices 8
             the same over 8 virtual CPU devices

Expect:  quick_test: 90.97 % of 2,048 test pictures: the best possible, since
         the labels of the others are wrong. It takes a minute or two. One
         graph for training, one for evaluation.
         Losses on 1 and 8 devices are 4e-6 apart at most (11 steps, float32).
         XLA:CPU, 2 cores, torch 2.9.0, torch_xla 2.9.0, seed 0.
"""

import sys
from functools import partial

from images.arrays import TrainBatches, check_divisible, eval_batches, random_flip, random_shift
from images.cifar import check_files, load_dataset
from images.cifar_config import CifarConfig
from tpu_utils.base.errors import run_script
from tpu_utils.options.environment import command_line, meet_hosts

if __name__ == "__main__":  # before the slow imports: a wrong option or file is answered at once
    config = command_line(CifarConfig, __doc__, check_files)

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from tpu_utils.base.process import Peers
from tpu_utils.device import DEVICE_TYPE, BatchSharding, Mesh, device_count, send, use_spmd
from tpu_utils.record.metrics import DeviceMetrics, labels_that_count
from tpu_utils.run import Run
from tpu_utils.step.graphs import one_graph
from tpu_utils.step.optim import gradient_norm, learning_rates, make_optimizer, step_optimizer
from tpu_utils.trial.checks import check_model


class Block(nn.Module):
    """Residual block of two convolutions: (B, C_in, H, W) -> (B, C_out, H / stride, W / stride)."""

    def __init__(self, channels_in: int, channels_out: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels_out)
        nn.init.zeros_(self.norm2.weight)  # zero-init: at first the residual branch adds 0
        self.shortcut = nn.Sequential()
        if stride != 1 or channels_in != channels_out:
            convolution = nn.Conv2d(channels_in, channels_out, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(channels_out))

    def forward(self, x):
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """ResNet for small pictures, He et al. 2015, section 4.2: images (B, 3, H, W) uint8 -> logits (B, classes)."""

    def __init__(self, depth: int, width: int, num_classes: int):
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        blocks, channels = [], width
        for stage in range(3):
            for number in range((depth - 2) // 6):
                blocks.append(Block(channels, width * 2**stage, stride=2 if stage and not number else 1))
                channels = width * 2**stage
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, num_classes)

    def forward(self, images):
        x = images.float() / 64 - 2  # uint8 0..255 to -2..2
        x = self.blocks(F.relu(self.norm(self.conv(x))))
        return self.head(x.mean((2, 3)))


def build_model(config: CifarConfig, dataset) -> nn.Module:
    return ResNet(config.depth, config.width, dataset.num_classes)


@one_graph  # torch_xla.compile(full_graph=True); a second graph stops the run and says what changed
def train_step(model, optimizer, rates, metrics, images, labels, config):
    """One optimizer step as one graph. images (B, 3, H, W), labels (B,), rates (num_steps,): all on the devices.

    images and labels are the global batch: the mean and BatchNorm's statistics are over all devices.
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


def augment(images, draw, config: CifarConfig):
    images = random_shift(images, draw, config.max_shift) if config.max_shift else images
    return random_flip(images, draw) if config.flip else images


def train(config: CifarConfig, hosts: Peers | None = None) -> int:
    """hosts: the processes of this run, one for each host. None: this one alone."""
    with Run(config, train_step, eval_step, hosts=hosts, join=use_spmd) as run:  # leaving it, all is on disk
        num_devices = device_count()
        check_divisible(config, num_devices)
        mesh = Mesh(np.arange(num_devices), (num_devices,), ("data",))
        sharding = BatchSharding(mesh, ("data",))
        part = sharding.part, sharding.num_parts  # a host reads the rows of its own devices
        dataset = load_dataset(config)
        batches = TrainBatches(dataset, config, *part, partial(augment, config=config))
        model = build_model(config, dataset)
        # makes and locks the run directory; with --resume reads its newest checkpoint
        run.open(batches, dataset, check_model(model, dataset, evaluate, run), sharding)
        run.print(f"parallel   {num_devices} devices, each with {config.global_batch_size // num_devices} examples")
        model.to(run.device)
        # create its state now: state that step 1 creates makes step 2 a different program
        optimizer = make_optimizer(config, model.parameters())
        schedule = learning_rates(config, batches.num_steps)
        rates = schedule.to(run.device)
        metrics = DeviceMetrics(["loss", "gradient_norm"], config.log_every, run.device)
        # what checkpoints hold, whole on every device; filled when resuming
        run.track(model=model, optimizer=optimizer, metrics=metrics)
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
