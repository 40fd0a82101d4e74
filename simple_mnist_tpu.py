"""Train a convolutional network on handwritten digits on one TPU device.

Run:     python simple_mnist_tpu.py                                                   # quick_test, no download
         python simple_mnist_tpu.py --preset production --data_dir DIR                # MNIST on a TPU VM
         python simple_mnist_tpu.py --preset production --data_dir DIR --device cpu   # the same recipe without a TPU

Expect:  quick_test: 99.4 to 99.7 % on the held-out fifth, 25 to 31 s. production: 98.9 % on 5,000 test digits from
         10,000 others. One graph for training, one for evaluation (XLA:CPU, 2 cores, torch_xla 2.9.0).
"""

import copy
import dataclasses
import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
import torch_xla
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from config import MnistConfig, learning_rates, make_optimizer, num_steps_of, parse_command_line
from data import ImageDataset, TrainBatches, eval_batches, load_dataset
from tpu_utils import (
    Checkpoints,
    CompileWatch,
    DeviceLoader,
    DeviceMetrics,
    Goodput,
    Mirror,
    Profile,
    RunLock,
    RunLog,
    Speed,
    StopRequest,
    check_finite,
    check_same_run,
    finite_means,
    gradient_norm,
    load_model,
    load_part,
    log_misread,
    log_summary,
    open_run_dir,
    peak_flops,
    print_banner,
    print_summary,
    process_age,
    random_state,
    run_script,
    set_random_state,
    start_device,
    step_if,
    watch_for_stalls,
    write_atomically,
)


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
        x = images.unsqueeze(1).float() / 85 - 1  # uint8 to -1..2: about zero mean, unit variance
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = F.relu(self.conv3(x))
        x = F.relu(self.hidden(x.flatten(1)))
        return self.head(x)


@torch_xla.compile(full_graph=True, name="train_step")
def train_step(model, optimizer, rates, metrics, images, labels, precision, skip_nonfinite=False):
    """One optimizer step as one graph. rates (num_steps,) is indexed on the device: nothing but the batch goes up."""
    optimizer.zero_grad(set_to_none=True)  # gradients still alive at the end would be outputs of the program
    with torch.autocast("xla", torch.bfloat16, enabled=precision == "bfloat16"):
        logits = model(images)
    loss = F.cross_entropy(logits.float(), labels.long())
    loss.backward()
    for group in optimizer.param_groups:
        group["lr"] = rates.index_select(0, metrics.step)
    norm = gradient_norm(model.parameters())
    finite = torch.isfinite(loss + norm)
    if skip_nonfinite:
        step_if(finite, optimizer)
    else:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    metrics.record(loss, norm, skipped=~finite if skip_nonfinite else None)


@torch_xla.compile(full_graph=True, name="eval_step")
def eval_step(model, images, labels, mask, precision):
    """(correct, summed loss, examples) of this batch as a tensor (3,), padding left out by the mask."""
    with torch.no_grad(), torch.autocast("xla", torch.bfloat16, enabled=precision == "bfloat16"):
        logits = model(images).float()
        correct = (logits.argmax(1) == labels).float()
        loss = F.cross_entropy(logits, labels.long(), reduction="none")
        return torch.stack([(correct * mask).sum(), (loss * mask).sum(), mask.sum()])


def evaluate(model, test_batches, precision, graphs, goodput, step) -> tuple[float, float]:
    """(accuracy, mean loss in nats) over the test set, every example counted once."""
    sums = []
    for batch in test_batches:
        with goodput.phase("evaluation" if graphs.compiled("eval") else "compile"):
            sums.append(eval_step(model, *batch, precision))
        graphs.check("eval", step, batch)
    correct, loss, count = sum(one.cpu().double() for one in sums).tolist()  # read only after all are under way
    return correct / count, loss / count


def train_flops_per_example(model: nn.Module, image_size: int) -> int:
    """FLOPs of the matrix work in one forward and backward pass, counted by PyTorch on a model without memory."""
    shadow = copy.deepcopy(model).to("meta")
    with FlopCounterMode(display=False) as counter:
        shadow(torch.zeros(1, image_size, image_size, dtype=torch.uint8, device="meta")).sum().backward()
    return counter.get_total_flops()


def train(config: MnistConfig) -> int:
    goodput, stop, graphs, lock = Goodput(process_age()), StopRequest(), CompileWatch(), RunLock()
    watch_for_stalls(goodput, config.stall_seconds)
    device = start_device(config)
    stop.watch_metadata()
    dataset = load_dataset(config)
    steps_per_epoch, num_steps = num_steps_of(config, len(dataset.train_images))
    run_dir = open_run_dir(config, lock)
    mirror = Mirror(config, run_dir)  # uploads what a gs:// directory is to hold
    checkpoints = Checkpoints(run_dir / "checkpoints", config.keep_checkpoints, mirror=mirror)
    print_banner(config, device)
    print_data(dataset, "none: nothing runs" if config.compile_for else config.run_dir or run_dir)

    model = ConvNet(dataset.image_size, config.channels, config.hidden_dim)
    flops = train_flops_per_example(model, dataset.image_size) * config.global_batch_size
    model = model.to(device)
    optimizer = make_optimizer(config, model.parameters())
    schedule = learning_rates(config, num_steps)
    rates = schedule.to(device)
    metrics = DeviceMetrics(["loss", "gradient_norm"], config.log_every, device)
    step_options = (config.precision, config.on_nonfinite == "skip")
    if config.compile_for:  # the first step exactly as below, but compiled for a TPU slice instead of run
        import aot_tpu  # only here: a copy of this script trains without it

        images, labels = (tensor.to(device) for tensor in next(iter(TrainBatches(dataset, config, 0, num_steps))))
        step_args = (model, optimizer, rates, metrics, images, labels, *step_options)
        sizes = dict(examples=config.global_batch_size, model_flops=flops, settings=dataclasses.asdict(config))
        return aot_tpu.compile_for(config.compile_for, train_step, *step_args, **sizes)
    test_set = eval_batches(dataset.test_images, dataset.test_labels, config.eval_batch_size)
    test_batches = [[tensor.to(device) for tensor in batch] for batch in test_set]

    run = {**dataclasses.asdict(config), "data_crc32": dataset.fingerprint()}  # what a checkpoint belongs to
    first_step, best_accuracy, accuracy, test_loss = 0, 0.0, None, None
    saved = checkpoints.load_for_resume(config.resume)
    if saved:
        check_same_run(run, saved["config"])
        load_model(model, saved["model"])
        load_part("optimizer", optimizer, saved)
        load_part("metrics", metrics, saved)
        set_random_state(saved["random"])
        first_step, best_accuracy = saved["step"], saved["best_accuracy"]
        accuracy, test_loss = saved["accuracy"], saved["test_loss"]
        print(f"resumed    after step {first_step} of {num_steps}", flush=True)
    profile = Profile(config, run_dir, first_step, num_steps)
    write_atomically(run_dir / "config.json", json.dumps(run, indent=2).encode())

    stop_signal = stop.signal
    if stop_signal:
        return stop.say(stop_signal, first_step, config.run_dir or run_dir)
    batches = TrainBatches(dataset, config, first_step, num_steps)
    step, logged = first_step, first_step - first_step % config.log_every
    with (
        mirror,  # left last: it waits until all is in the bucket
        checkpoints,
        RunLog(run_dir, first_step, num_steps, config.tensorboard) as log,
        profile,
        DeviceLoader(batches, device, config.prefetch_batches, goodput) as loader,
    ):
        speed = Speed(goodput, loader, config.global_batch_size, flops, peak_flops(num_devices=1))
        goodput.enter("step")
        for step, (images, labels) in enumerate(loader, first_step + 1):
            profile.before_step(step)
            with goodput.phase("compile" if step == first_step + 1 else "step"):
                train_step(model, optimizer, rates, metrics, images, labels, *step_options)
            graphs.check("train", step, (images, labels))
            log.advance()
            if step == first_step + 1:
                speed.start(step)  # without the compile
            if step % config.log_every == 0 or step == num_steps:
                values = metrics.read(logged, step)  # the only read from the device between two log lines
                check_finite(values, logged, checkpoints, config.on_nonfinite)
                checkpoints.check()  # a save that failed behind the steps ends the run here
                fields = dict(learning_rate=schedule[step - 1].item(), skipped_steps=metrics.skipped_steps)
                log.train(step, **finite_means(values), **fields, **speed.measure(step))
                logged = step
            if step % steps_per_epoch == 0:
                with goodput.phase("evaluation"):
                    accuracy, test_loss = evaluate(model, test_batches, config.precision, graphs, goodput, step)
                best_accuracy = max(best_accuracy, accuracy)
                log.evaluation(step, accuracy=accuracy, test_loss=test_loss, best_accuracy=best_accuracy)
            stop_signal = stop.signal
            if stop_signal or step % config.save_every == 0 or step == num_steps:
                # a bad state is never saved
                check_finite(metrics.read(logged, step), logged, checkpoints, config.on_nonfinite)
                state = dict(step=step, config=run, best_accuracy=best_accuracy, accuracy=accuracy, test_loss=test_loss)
                state |= dict(model=model.state_dict(), optimizer=optimizer.state_dict(), metrics=metrics.state_dict())
                with goodput.phase("checkpoint"):
                    on_host = checkpoints.copy(step, {**state, "random": random_state()})
                log.checkpoint(step, wait_seconds=on_host.wait_seconds)  # on disk before the step counts as done
                checkpoints.write(on_host)  # behind the next steps
            if stop_signal:
                break
        with goodput.phase("checkpoint"):
            checkpoints.wait()  # the last one is on disk
        goodput.enter("other")

    if stop_signal:
        return stop.say(stop_signal, step, config.run_dir or run_dir)
    log_misread(config, run_dir, ConvNet(dataset.image_size, config.channels, config.hidden_dim), dataset)
    summary = {
        "steps": num_steps,
        "train_graphs": graphs.compiled("train"),
        "eval_graphs": graphs.compiled("eval"),
        "host_to_device_uploads_per_step": speed.uploads_per_step,  # beside the batch
        "skipped_steps": metrics.skipped_steps,
        "test_accuracy": accuracy,
        "best_accuracy": best_accuracy,
        "test_loss": test_loss,
        "loss_floor": dataset.loss_floor,
        "seconds": goodput.total(),
        "goodput": goodput.seconds,
    }
    write_atomically(run_dir / "summary.json", json.dumps(summary, indent=2).encode())
    log_summary(config, run_dir, summary)
    mirror.upload_logs()
    print_result(summary, dataset)
    return 0


def print_data(dataset: ImageDataset, run_dir: Path | str) -> None:
    size, num_train, num_test = dataset.image_size, len(dataset.train_labels), len(dataset.test_labels)
    print(f"data       {dataset.name}, {size} x {size}: {num_train} train, {num_test} test")
    if dataset.best_accuracy is not None:
        print(f"floor      best possible accuracy {dataset.best_accuracy:.4f}, loss {dataset.loss_floor:.4f}")
    print(f"run        {run_dir}", flush=True)


def print_result(summary: dict, dataset: ImageDataset) -> None:
    best = f" (best possible {dataset.best_accuracy:.4f})" if dataset.best_accuracy is not None else ""
    floor = f" (floor {dataset.loss_floor:.4f})" if dataset.loss_floor is not None else ""
    print(f"test       accuracy {summary['test_accuracy']:.4f}{best}, loss {summary['test_loss']:.4f}{floor}")
    print_summary(summary)


def main() -> int:
    return train(parse_command_line(MnistConfig, __doc__))


if __name__ == "__main__":
    sys.exit(run_script(main))
