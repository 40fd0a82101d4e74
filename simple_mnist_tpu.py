"""Train a convolutional network on handwritten digits on one TPU device.

Run:     python simple_mnist_tpu.py
             quick_test: 1,797 real digits, no download, no TPU needed
         python simple_mnist_tpu.py --preset production --data_dir DIR
             MNIST on a TPU VM; the same without a TPU: add --device cpu

Expect:  quick_test: 99.4 to 99.7 % on the held-out fifth, in 25 s.
         production: 98.9 % on 5,000 test digits from 10,000 others.
         One graph for training, one for evaluation.
         XLA:CPU, 2 cores, torch 2.9.0, torch_xla 2.9.0, seeds 0 to 2.
"""

import sys
from functools import partial

from config import MnistConfig
from image_data import TrainBatches, eval_batches
from mnist_data import check_files, load_dataset
from tpu_utils.environment import command_line

if __name__ == "__main__":  # before the slow imports: a wrong option or file is answered at once
    config = command_line(MnistConfig, __doc__, check_files)

import torch
import torch.nn.functional as F
import torch_xla
from torch import nn

from optim import gradient_norm, learning_rates, make_optimizer, step_optimizer
from tpu_utils.device import check_model, start_device
from tpu_utils.errors import run_script
from tpu_utils.metrics import DeviceMetrics
from tpu_utils.pictures import log_misread
from tpu_utils.run import Run


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


@torch_xla.compile(full_graph=True, name="train_step")
def train_step(model, optimizer, rates, metrics, images, labels, config):
    """One optimizer step as one graph. images (B, H, W), labels (B,), rates (num_steps,): all on the device."""
    with torch.autocast("xla", torch.bfloat16, enabled=config.precision == "bfloat16"):
        logits = model(images)
    loss = F.cross_entropy(logits.float(), labels.long())
    loss.backward()
    norm = gradient_norm(model.parameters())
    rate = rates.index_select(0, metrics.step)  # looked up on the device: nothing but the batch goes up
    skipped = step_optimizer(optimizer, rate, torch.isfinite(loss + norm), config.on_nonfinite)  # None: "stop"
    optimizer.zero_grad(set_to_none=True)  # gradients still alive at the end would be outputs of the program
    metrics.record(loss, norm, skipped=skipped)


@torch_xla.compile(full_graph=True, name="eval_step")
def eval_step(model, images, labels, mask, config):
    """(correct, summed loss, examples) of this batch as a tensor (3,), padding left out by the mask."""
    with torch.no_grad(), torch.autocast("xla", torch.bfloat16, enabled=config.precision == "bfloat16"):
        logits = model(images).float()
        correct = (logits.argmax(1) == labels).float()
        loss = F.cross_entropy(logits, labels.long(), reduction="none")
        return torch.stack([(correct * mask).sum(), (loss * mask).sum(), mask.sum()])


def evaluate(model, test_batches, run: Run, step: int) -> tuple[float, float]:
    """(accuracy, mean loss in nats) over the test set, every example counted once."""
    sums = []
    model.eval()  # dropout off, BatchNorm by its running statistics
    with run.phase("evaluation"):
        for batch in test_batches:
            with run.one_graph("eval", step, *batch):
                sums.append(eval_step(model, *batch, run.config))
        # the first read: all batches are dispatched by now
        correct, loss, count = sum(one.cpu().double() for one in sums).tolist()
    model.train()
    return correct / count, loss / count


def train(config: MnistConfig) -> int:
    with Run(config) as run:  # clock, watchdog, stop signals; on leaving, all is on disk
        device = start_device(config)
        dataset = load_dataset(config)
        batches = TrainBatches(dataset, config)  # a pure function of seed and step
        build_model = partial(ConvNet, dataset.image_size, config.channels, config.hidden_dim)
        flops = check_model(build_model, *dataset.first(2), dataset.num_classes)  # per example, for the MFU
        sizes = dict(examples=config.global_batch_size, flops=flops)
        # makes and locks the run directory; with --resume reads its newest checkpoint
        run.open(device, batches.num_steps, dataset.fingerprint(), dataset.description, **sizes)

        model = build_model().to(device)
        optimizer = make_optimizer(config, model.parameters())  # with its state: born in step 1, it recompiles step 2
        schedule = learning_rates(config, batches.num_steps)
        rates = schedule.to(device)
        metrics = DeviceMetrics(["loss", "gradient_norm"], config.log_every, device)
        run.restore(model=model, optimizer=optimizer, metrics=metrics)  # what checkpoints hold; filled when resuming
        if config.compile_for:  # ask the TPU compiler about the first step instead of training
            first_batch = run.upload(batches.batch(0))
            return run.compile_for(train_step, model, optimizer, rates, metrics, *first_batch, config)
        test_set = eval_batches(dataset.test_images, dataset.test_labels, config.eval_batch_size)
        test_batches = [run.upload(batch) for batch in test_set]

        for step, (images, labels) in run.steps(batches):  # from the first one not yet done; uploads run ahead
            with run.one_graph("train", step, images, labels):  # a second graph stops the run here, and says why
                train_step(model, optimizer, rates, metrics, images, labels, config)
            if run.log_due(step):  # reads the metrics of all steps since the last line
                run.log(step, learning_rate=schedule[step - 1].item())
            if step % batches.steps_per_epoch == 0:
                accuracy, loss = evaluate(model, test_batches, run, step)
                best = max(accuracy, run.evaluation.get("best_accuracy", 0.0))
                run.log_evaluation(step, accuracy=accuracy, test_loss=loss, best_accuracy=best)
            if run.save_due(step):  # every save_every steps, at the end, and before a stop
                run.save(step)  # waits for the copy to the host; the disk is written behind the next steps

        log_misread(run, build_model(), dataset)  # on the host, with the weights of the last checkpoint
        last = run.evaluation  # empty when stopped before the first one
        return run.finish(
            test_accuracy=last.get("accuracy"),
            best_accuracy=last.get("best_accuracy"),
            test_loss=last.get("test_loss"),
            loss_floor=dataset.loss_floor,
        )


if __name__ == "__main__":
    sys.exit(run_script(lambda: train(config)))
