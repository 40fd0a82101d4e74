"""Train a convolutional network on handwritten digits on one TPU device, with torch and torch_xla alone.

Run:     python lessons/plain_mnist_tpu.py            # in runs/plain; a TPU if there is one, else PJRT_DEVICE=CPU
Expect:  the losses of `simple_mnist_tpu.py --optimizer sgd --max_shift 0 --num_epochs 10 --learning_rate 0.05
         --scheduler constant --warmup_steps 0 --weight_decay 0`, bit for bit. Killed, it goes on at its last epoch.

docs/plain_loop.md says what each line of `Run` replaces of this.
"""

import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import torch_xla
import torch_xla.debug.metrics as met
import torch_xla.runtime as xr
from safetensors.torch import load_file, save_file
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

SEED, EPOCHS, BATCH_SIZE, EVAL_BATCH_SIZE, LEARNING_RATE, MOMENTUM, LOG_EVERY = 0, 10, 64, 512, 0.05, 0.9, 20
CHECKPOINT = Path("runs/plain/checkpoint.safetensors")


class ConvNet(nn.Module):
    """images (B, H, W) uint8 -> logits (B, 10)."""

    def __init__(self, image_size: int, channels: int = 32, hidden_dim: int = 128):
        super().__init__()
        self.conv1 = nn.Conv2d(1, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1)
        self.conv3 = nn.Conv2d(2 * channels, 2 * channels, 3, stride=2, padding=1)
        self.hidden = nn.Linear(2 * channels * (image_size // 4) ** 2, hidden_dim)
        self.head = nn.Linear(hidden_dim, 10)

    def forward(self, images):
        x = images.unsqueeze(1).float() / 85 - 1
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = F.relu(self.conv3(x))
        x = F.relu(self.hidden(x.flatten(1)))
        return self.head(x)


@torch_xla.compile(full_graph=True)  # one program: forward, backward and update
def train_step(model, velocities, rate, losses, images, labels):
    loss = F.cross_entropy(model(images), labels.long())
    loss.backward()
    with torch.no_grad():
        for parameter, velocity in zip(model.parameters(), velocities, strict=True):
            velocity.mul_(MOMENTUM).add_(parameter.grad)
            parameter.sub_(rate * velocity)
            parameter.grad = None  # a gradient that is still alive at the end would be an output of the program
        # losses.append(loss.item()) would wait for the device in every step: they are kept there, and read by log line
        losses.copy_(torch.cat([losses[1:], loss.detach()[None]]))


@torch_xla.compile(full_graph=True)
def eval_step(model, images, labels, mask):
    with torch.no_grad():
        logits = model(images)
        loss = F.cross_entropy(logits, labels.long(), reduction="none")
        return torch.stack([((logits.argmax(1) == labels) * mask).sum(), (loss * mask).sum(), mask.sum()])


def digits():
    """8 x 8 images as uint8, and labels: (training images, labels), (test images, labels)."""
    images, labels = load_digits(return_X_y=True)
    images = np.round(images.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    split = train_test_split(images, labels.astype(np.int32), test_size=0.2, stratify=labels, random_state=0)
    return (split[0], split[2]), (split[1], split[3])


def padded(array):
    """A last batch of another shape would be a second program: it is filled up, and a mask leaves the zeros out."""
    return np.concatenate([array, np.zeros((-len(array) % EVAL_BATCH_SIZE, *array.shape[1:]), array.dtype)])


def save(model: nn.Module, velocities: list[torch.Tensor], epoch: int) -> None:
    state = {"epoch": torch.tensor(epoch), **model.state_dict()}
    state |= {f"velocity.{i}": velocity for i, velocity in enumerate(velocities)}
    aside = CHECKPOINT.with_suffix(".writing")
    CHECKPOINT.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.cpu() for name, tensor in state.items()}, aside)
    aside.replace(CHECKPOINT)  # a kill leaves the old one or the new one, whole


def main() -> int:
    device = torch_xla.device()
    torch.manual_seed(SEED)
    (train_images, train_labels), (test_images, test_labels) = digits()
    model, first_epoch = ConvNet(train_images.shape[-1]), 0
    # made now: state that step 1 makes would make step 2 another program
    velocities = [torch.zeros_like(parameter, requires_grad=False) for parameter in model.parameters()]
    if CHECKPOINT.exists():
        saved = load_file(CHECKPOINT)
        first_epoch = int(saved.pop("epoch"))
        velocities = [saved.pop(f"velocity.{i}") for i in range(len(velocities))]
        model.load_state_dict(saved)
    model.to(device)  # all is filled on the host: what is written into a tensor of the device is an operation
    velocities = [velocity.to(device) for velocity in velocities]
    losses = torch.zeros(LOG_EVERY, device=device)
    rate = torch.full((1,), LEARNING_RATE).to(device)  # a Python number of 0 or 1 would be a constant of the program
    mask = np.ones(len(test_labels), np.float32)
    parts = [np.split(padded(array), -(-len(mask) // EVAL_BATCH_SIZE)) for array in (test_images, test_labels, mask)]
    tests = [[torch.from_numpy(array).to(device) for array in batch] for batch in zip(*parts, strict=True)]
    torch_xla.sync()  # what was made so far is computed, or it would be a part of step 1
    before = met.counter_value("UncachedCompile")
    steps = len(train_images) // BATCH_SIZE  # the short end of an epoch is left out
    for epoch in range(first_epoch, EPOCHS):
        order = np.random.default_rng([SEED, epoch]).permutation(len(train_images))
        for step in range(steps):
            ids = order[step * BATCH_SIZE : (step + 1) * BATCH_SIZE]
            batch = [torch.from_numpy(array[ids]).to(device) for array in (train_images, train_labels)]
            train_step(model, velocities, rate, losses, *batch)
            if (number := epoch * steps + step + 1) % LOG_EVERY == 0:
                print(f"step {number}  " + " ".join(map(repr, losses.cpu().tolist())), flush=True)  # the only read
        sums = [eval_step(model, *batch) for batch in tests]
        correct, loss, count = sum(one.cpu().double() for one in sums).tolist()
        print(f"epoch {epoch + 1}  accuracy {correct / count:.4f}  test_loss {loss / count!r}", flush=True)
        save(model, velocities, epoch + 1)
    print(f"graphs {met.counter_value('UncachedCompile') - before} on {xr.device_type()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
