"""Train a convolutional network on handwritten digits on many TPU devices, of one host or of a pod slice.

Two ways, one result:
  spmd  (default) one program over a mesh of all devices; a process per host; the compiler inserts the collectives
  ddp   a process per device; DistributedDataParallel averages the gradients

Run:     python distributed_mnist_tpu.py                                         # all attached TPU chips, or the CPU
         python distributed_mnist_tpu.py --device cpu --num_virtual_devices 8    # SPMD over 8 virtual CPU devices
         python distributed_mnist_tpu.py --shard_parameters                      # FSDP: parameters are sharded too
         python distributed_mnist_tpu.py --strategy ddp                          # through torch_xla.launch
         torchrun --nproc_per_node=8 distributed_mnist_tpu.py --strategy ddp     # the same through torchrun

Pods:    run the same command on all workers (gcloud compute tpus tpu-vm ssh NAME --worker=all --command=...).

Expect:  the losses of plain PyTorch on one CPU within 3e-7 whichever way (22 steps, float32);
         96.4 % on 10,000 MNIST images after 3 epochs over 8 devices, simple_mnist_tpu.py has 96.3 %; one train and
         one eval graph. Measured on the XLA CPU backend, torch 2.9.0, torch_xla 2.9.0, seeds 3 and 0.
"""

import copy
import dataclasses
import json
import math
import os
import signal
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
import torch_xla.distributed.xla_backend  # registers the process group "xla" and init_method "xla://"
import torch_xla.runtime as xr
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

from config import (
    DistributedMnistConfig,
    InputError,
    check_divisible,
    learning_rates,
    make_optimizer,
    num_steps_of,
    parse_command_line,
)
from data import ImageDataset, TrainBatches, eval_batches, load_dataset
from tpu_utils import (
    BatchSharding,
    Checkpoints,
    CompileWatch,
    DeviceLoader,
    DeviceMetrics,
    Goodput,
    Mirror,
    Peers,
    Profile,
    RunLock,
    RunLog,
    Speed,
    StopRequest,
    check_finite,
    check_same_run,
    choose_device,
    end_with_parent,
    finite_means,
    gradient_norm,
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
    tpu_hosts,
    wait_for_peers,
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


def shard(tensors, mesh: xs.Mesh, over_devices: bool) -> None:
    """One copy per device or, with over_devices, a part per device: cut along the first axis that divides evenly."""
    for tensor in tensors:
        fitting = [axis for axis, size in enumerate(tensor.shape) if size % mesh.size() == 0] if over_devices else []
        cut = min(fitting, default=None)  # None: too small to cut, one copy each
        xs.mark_sharding(tensor, mesh, tuple("data" if axis == cut else None for axis in range(tensor.dim())))


def replicate(model: nn.Module, tracing: bool) -> DistributedDataParallel:
    """Same weights on all replicas, and gradients that are averaged as the backward pass produces them.

    tracing: no other replica runs, so nothing may be exchanged.
    """
    if not tracing:
        xm.broadcast_master_param(model)
    # init_sync would compare shapes through the host; views of the buckets would be other graphs in steps 1 and 2
    replica = DistributedDataParallel(model, init_sync=False, broadcast_buffers=False, gradient_as_bucket_view=False)
    if not tracing:
        # after one step the reducer would agree on new buckets through the host, in the middle of the compiled step 2
        replica.reducer._push_all_rebuilt_params()
        replica.reducer._rebuild_buckets()
        torch_xla.sync()  # the buckets exist now, for step 1 as for all others
    return replica


@torch_xla.compile(full_graph=True, name="train_step")
def train_step(model, optimizer, rates, metrics, images, labels, precision, skip_nonfinite=False):
    """One optimizer step as one graph. rates (num_steps,) is indexed on the device: nothing but the batch goes up.

    Under SPMD images and labels are the global batch, and so is the mean. Under DDP they are this replica's part: the
    mean over replicas of the means of equal parts is the mean of all.
    """
    optimizer.zero_grad(set_to_none=True)  # gradients still alive at the end would be outputs of the program
    with torch.autocast("xla", torch.bfloat16, enabled=precision == "bfloat16"):
        logits = model(images)
    loss = F.cross_entropy(logits.float(), labels.long())
    loss.backward()  # SPMD: the compiler, DDP: its hooks, average the gradients over the devices
    for group in optimizer.param_groups:
        group["lr"] = rates.index_select(0, metrics.step)
    mean_loss, norm = over_replicas(loss.detach()) / xr.world_size(), gradient_norm(model.parameters())
    finite = torch.isfinite(mean_loss + norm)  # the same on all devices
    if skip_nonfinite:
        step_if(finite, optimizer)
    else:
        optimizer.step()  # not xm.optimizer_step, which would reduce once more
    optimizer.zero_grad(set_to_none=True)
    metrics.record(mean_loss, norm, skipped=~finite if skip_nonfinite else None)


@torch_xla.compile(full_graph=True, name="eval_step")
def eval_step(model, images, labels, mask, precision):
    """(correct, summed loss, examples) of the global batch as a tensor (3,), padding left out by the mask."""
    with torch.no_grad(), torch.autocast("xla", torch.bfloat16, enabled=precision == "bfloat16"):
        logits = model(images).float()
        correct = (logits.argmax(1) == labels).float()
        loss = F.cross_entropy(logits, labels.long(), reduction="none")
        return over_replicas(torch.stack([(correct * mask).sum(), (loss * mask).sum(), mask.sum()]))


def over_replicas(value: torch.Tensor) -> torch.Tensor:
    """The sum over DDP replicas, on the devices. Under SPMD there is one replica, and the value is whole already."""
    return xm.all_reduce(xm.REDUCE_SUM, value, pin_layout=False) if xr.world_size() > 1 else value


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


def train(config: DistributedMnistConfig, hosts: Peers | None = None, relay: Path | None = None) -> int:
    """hosts: the processes of an SPMD run, one per host. relay: see StopRequest."""
    goodput, stop, lock, spmd = Goodput(process_age()), StopRequest(relay), RunLock(), config.strategy == "spmd"
    watch_for_stalls(goodput, config.stall_seconds)
    dataset = load_dataset(config)
    steps_per_epoch, num_steps = num_steps_of(config, len(dataset.train_images))
    if spmd:
        device, peers = start_device(config, join=xr.use_spmd), hosts
        num_devices = xr.global_runtime_device_count()
        mesh = xs.Mesh(np.arange(num_devices), (num_devices,), ("data",))
        sharding = BatchSharding(mesh, "data")
        part, num_parts = peers.index, peers.count  # a host reads the rows of its own devices
    else:
        device = start_device(config, join=lambda: dist.init_process_group("xla", init_method="xla://"))
        num_devices, mesh, sharding = xr.world_size(), None, None
        part, num_parts = xr.global_ordinal(), num_devices
        several = num_devices > 1 and not config.compile_for
        peers = Peers(part, num_parts, dist.new_group(backend="gloo")) if several else Peers()
    check_divisible(config, num_devices)
    stop.watch_metadata()
    run_dir = peers.from_first(lambda: open_run_dir(config, lock))
    mirror = Mirror(config, run_dir, peers)  # uploads what a gs:// directory is to hold
    checkpoints = Checkpoints(run_dir / "checkpoints", config.keep_checkpoints, peers, mirror)
    if spmd or peers.index == 0:
        print_banner(config, device)
    if peers.index == 0:
        where = "none: nothing runs" if config.compile_for else config.run_dir or run_dir
        print_data(dataset, config, num_devices, where)

    model = ConvNet(dataset.image_size, config.channels, config.hidden_dim)
    flops = train_flops_per_example(model, dataset.image_size) * config.global_batch_size
    run = {**dataclasses.asdict(config), "data_crc32": dataset.fingerprint()}  # what a checkpoint belongs to
    # under SPMD no host needs all of what is cut over devices: each reads its parts in restore()
    saved = peers.from_first(lambda: checkpoints.load_for_resume(config.resume, whole=not spmd))
    if saved:
        check_same_run(run, saved["config"])
    model = model.to(device)
    optimizer = make_optimizer(config, model.parameters())
    schedule = learning_rates(config, num_steps)
    rates = schedule.to(device)
    metrics = DeviceMetrics(["loss", "gradient_norm"], config.log_every, device)
    step_options = (config.precision, config.on_nonfinite == "skip")
    first_step, best_accuracy, accuracy, test_loss = 0, 0.0, None, None
    if spmd:
        for parameter in model.parameters():  # its optimizer state is cut the same way
            shard([parameter, *optimizer.state[parameter].values()], mesh, config.shard_parameters)
        shard([rates, *metrics.state_dict().values()], mesh, over_devices=False)
    if saved:  # into the places just made, whatever devices it was saved from
        targets = dict(model=model.state_dict(keep_vars=True), optimizer=optimizer.state_dict())
        checkpoints.restore(saved, targets | dict(metrics=metrics.state_dict()))
        first_step, best_accuracy = saved["step"], saved["best_accuracy"]
        accuracy, test_loss = saved["accuracy"], saved["test_loss"]
        metrics.read(first_step, first_step)  # how many updates were skipped before
        if peers.index == 0:
            print(f"resumed    after step {first_step} of {num_steps}", flush=True)
    trained = model if spmd else replicate(model, tracing=bool(config.compile_for))
    if saved:
        set_random_state(saved["random"])  # after replicate(), which draws on the generators
    graphs = CompileWatch()

    batches = TrainBatches(dataset, config, first_step, num_steps, part, num_parts)
    if config.compile_for:  # the first step exactly as below, but compiled for a TPU slice instead of run
        import aot_tpu  # only here: a copy of this script trains without it

        images, labels = xm.send_cpu_data_to_device(list(next(iter(batches))), device, sharding)
        step_args = (trained, optimizer, rates, metrics, images, labels, *step_options)
        sizes = dict(examples=config.global_batch_size, model_flops=flops, settings=dataclasses.asdict(config))
        can_shard = spmd and num_devices > 1 and not config.shard_parameters
        knobs = [("divide parameters and optimizer state", ["--shard_parameters"])] if can_shard else []
        return aot_tpu.compile_for(config.compile_for, train_step, *step_args, **sizes, knobs=knobs)
    eval_size = math.ceil(config.eval_batch_size / num_devices) * num_devices  # the mask takes care of the rest
    test_set = eval_batches(dataset.test_images, dataset.test_labels, eval_size)
    test_batches = [
        xm.send_cpu_data_to_device([tensor[part::num_parts] for tensor in batch], device, sharding)
        for batch in test_set
    ]
    profile = Profile(config, run_dir, first_step, num_steps)
    if peers.index == 0:
        write_atomically(run_dir / "config.json", json.dumps(run, indent=2).encode())

    stop_signal = peers.largest(stop.signal or 0)
    if stop_signal:
        return stop.say(stop_signal, first_step, config.run_dir or run_dir, silent=peers.index > 0)
    step, logged = first_step, first_step - first_step % config.log_every
    with (
        mirror,  # left last: it waits until all is in the bucket
        checkpoints,
        RunLog(run_dir, first_step, num_steps, config.tensorboard, silent=peers.index > 0) as log,
        profile,
        DeviceLoader(batches, device, config.prefetch_batches, goodput, sharding) as loader,
    ):
        speed = Speed(goodput, loader, config.global_batch_size, flops, peak_flops(num_devices))
        goodput.enter("step")
        for step, (images, labels) in enumerate(loader, first_step + 1):
            profile.before_step(step)
            with goodput.phase("compile" if step == first_step + 1 else "step"):
                train_step(trained, optimizer, rates, metrics, images, labels, *step_options)
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
            if peers.count == 1 or step % config.log_every == 0:  # all processes stop after the same step
                stop_signal = peers.largest(stop.signal or 0)
            if stop_signal or step % config.save_every == 0 or step == num_steps:
                # a bad state is never saved
                check_finite(metrics.read(logged, step), logged, checkpoints, config.on_nonfinite)
                state = dict(step=step, config=run, best_accuracy=best_accuracy, accuracy=accuracy, test_loss=test_loss)
                state |= dict(model=model.state_dict(), optimizer=optimizer.state_dict(), metrics=metrics.state_dict())
                with goodput.phase("checkpoint"):
                    on_host = checkpoints.copy(step, {**state, "random": random_state()})  # every process, its parts
                log.checkpoint(step, wait_seconds=on_host.wait_seconds)  # on disk before the step counts as done
                checkpoints.write(on_host)  # behind the next steps
            if stop_signal:
                break
        with goodput.phase("checkpoint"):
            checkpoints.wait()  # the last one is on disk
        goodput.enter("other")

    if stop_signal:
        return stop.say(stop_signal, step, config.run_dir or run_dir, silent=peers.index > 0)
    if peers.index > 0:
        return 0
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


def print_data(dataset: ImageDataset, config: DistributedMnistConfig, num_devices: int, run_dir: Path | str) -> None:
    size, num_train, num_test = dataset.image_size, len(dataset.train_labels), len(dataset.test_labels)
    copies = "parameters sharded" if config.shard_parameters else "a copy of the parameters each"
    per_device = config.global_batch_size // num_devices
    print(f"parallel   {config.strategy} over {num_devices} devices, {per_device} examples and {copies}")
    print(f"data       {dataset.name}, {size} x {size}: {num_train} train, {num_test} test")
    if dataset.best_accuracy is not None:
        print(f"floor      best possible accuracy {dataset.best_accuracy:.4f}, loss {dataset.loss_floor:.4f}")
    print(f"run        {run_dir}", flush=True)


def print_result(summary: dict, dataset: ImageDataset) -> None:
    best = f" (best possible {dataset.best_accuracy:.4f})" if dataset.best_accuracy is not None else ""
    floor = f" (floor {dataset.loss_floor:.4f})" if dataset.loss_floor is not None else ""
    print(f"test       accuracy {summary['test_accuracy']:.4f}{best}, loss {summary['test_loss']:.4f}{floor}")
    print_summary(summary)


def replica(index: int, config: DistributedMnistConfig, relay: Path) -> None:
    """One process of a DDP run, started by torch_xla.launch or torchrun."""
    end_with_parent()
    if config.compile_for and index > 0:
        return  # all replicas run the same program; the first one compiles it
    if code := train(config, relay=relay):
        sys.exit(code)  # torch_xla.launch drops what a replica returns, but not what it raises


def main() -> int:
    config = parse_command_line(DistributedMnistConfig, __doc__)
    chosen = choose_device(config)
    host, addresses = tpu_hosts() if chosen == "tpu" else (0, ["localhost"])
    if config.strategy == "spmd":
        return train(config, wait_for_peers(host, addresses, config.peers_timeout))
    num_cpu_devices = int(os.environ.get("CPU_NUM_DEVICES", 1))
    if chosen == "cpu" and num_cpu_devices > 1 and not config.compile_for:
        raise InputError(
            f"strategy ddp has {num_cpu_devices} virtual CPU devices, but the XLA CPU client cannot run collectives "
            "between replicas; use --strategy spmd for many virtual devices, or one device"
        )
    if not dist.is_torchelastic_launched():  # torchrun waits for its own
        wait_for_peers(host, addresses, config.peers_timeout)
    with tempfile.TemporaryDirectory() as folder:
        relay = Path(folder) / "stop_signal"
        StopRequest(relay)
        torch_xla.launch(replica, args=(config, relay))
    return 0


if __name__ == "__mp_main__":  # in the main thread of a process of torch_xla.launch: its parent relays the signals
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
if __name__ == "__main__":
    sys.exit(run_script(main))
