"""Train a convolutional network on handwritten digits on many TPU devices.

Two ways, one result:
  spmd   (default) one program over a mesh of all devices, a process per host;
         the compiler inserts the collectives, BatchNorm is over the whole batch
  ddp    a process per device, started by torchrun; DistributedDataParallel
         averages the gradients; BatchNorm is refused

Run:     python distributed_mnist_tpu.py
             all attached TPU chips, or the CPU
         python distributed_mnist_tpu.py --device cpu --num_virtual_devices 8
             SPMD over 8 virtual CPU devices
         python distributed_mnist_tpu.py --shard_parameters
             FSDP: parameters are sharded too
         torchrun --standalone --nproc_per_node=8 distributed_mnist_tpu.py \\
                 --strategy ddp
             a process for each of 8 chips

Pods:    run the same command on all workers:
         gcloud compute tpus tpu-vm ssh NAME --worker=all --command=...

Expect:  the losses of plain PyTorch on one CPU within 3e-7 whichever way
         (22 steps, float32); 96.4 % of 5,000 MNIST test images after 3 epochs
         on 10,000 over 8 devices, simple_mnist_tpu.py has 96.3 %; one train and
         one eval graph. XLA:CPU, torch 2.9.0, torch_xla 2.9.0, seeds 3 and 0.
"""

import math
import os
import shlex
import sys
from functools import partial

from config import DistributedMnistConfig
from image_data import TrainBatches, check_divisible, eval_batches
from mnist_data import check_files, load_dataset
from tpu_compiler.hardware import attached_chips
from tpu_utils.environment import choose_device, command_line
from tpu_utils.errors import InputError, run_script

if __name__ == "__main__":  # before the slow imports: a wrong option or file is answered at once
    config = command_line(DistributedMnistConfig, __doc__, check_files)

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

from optim import gradient_norm, learning_rates, make_optimizer, step_optimizer
from tpu_utils.device import check_model, check_replicated, start_device
from tpu_utils.loader import BatchSharding
from tpu_utils.metrics import DeviceMetrics
from tpu_utils.peers import Peers, meet_hosts, meet_replicas
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


def shard(tensors, mesh: xs.Mesh, over_devices: bool) -> None:
    """Each tensor whole on every device; with over_devices, sharded along its first axis that divides evenly."""
    for tensor in tensors:
        fitting = [axis for axis, size in enumerate(tensor.shape) if size % mesh.size() == 0] if over_devices else []
        sharded = min(fitting, default=None)  # None: too small to shard, one copy each
        xs.mark_sharding(tensor, mesh, tuple("data" if axis == sharded else None for axis in range(tensor.dim())))


def replicate(model: nn.Module, tracing: bool) -> DistributedDataParallel:
    """Same weights on all replicas, and gradients that are averaged as the backward pass produces them.

    tracing: no other replica runs, so nothing may be exchanged.
    """
    check_replicated(model)  # refuses BatchNorm: its statistics would be over a replica's part of the batch
    if not tracing:
        xm.broadcast_master_param(model)
    # init_sync would compare shapes through the host; views of the buckets would be other graphs in steps 1 and 2
    replica = DistributedDataParallel(model, init_sync=False, broadcast_buffers=False, gradient_as_bucket_view=False)
    # DDP's lazy set-up talks to the host inside steps 1 and 2: do it here
    if not tracing:
        # after one step the reducer would agree on new buckets through the host, in the middle of the compiled step 2
        replica.reducer._push_all_rebuilt_params()
        replica.reducer._rebuild_buckets()
        torch_xla.sync()  # the buckets exist now, for step 1 as for all others
    return replica


@torch_xla.compile(full_graph=True, name="train_step")
def train_step(model, optimizer, rates, metrics, images, labels, config):
    """One optimizer step as one graph. images (B, H, W), labels (B,), rates (num_steps,): all on the devices.

    Under SPMD images and labels are the global batch, and so is the mean. Under DDP they are this replica's part: the
    mean over replicas of the means of equal parts is the mean of all.
    """
    with torch.autocast("xla", torch.bfloat16, enabled=config.precision == "bfloat16"):
        logits = model(images)
    loss = F.cross_entropy(logits.float(), labels.long())
    loss.backward()  # SPMD: the compiler, DDP: its hooks, average the gradients over the devices
    mean_loss = over_replicas(loss.detach()) / xr.world_size()
    norm = gradient_norm(model.parameters())
    rate = rates.index_select(0, metrics.step)  # looked up on the devices: nothing but the batch goes up
    # torch's own step, not xm.optimizer_step, which would reduce once more; finite is the same on all devices
    skipped = step_optimizer(optimizer, rate, torch.isfinite(mean_loss + norm), config.on_nonfinite)
    optimizer.zero_grad(set_to_none=True)  # gradients still alive at the end would be outputs of the program
    metrics.record(mean_loss, norm, skipped=skipped)


@torch_xla.compile(full_graph=True, name="eval_step")
def eval_step(model, images, labels, mask, config):
    """(correct, summed loss, examples) of the global batch as a tensor (3,), padding left out by the mask."""
    with torch.no_grad(), torch.autocast("xla", torch.bfloat16, enabled=config.precision == "bfloat16"):
        logits = model(images).float()
        correct = (logits.argmax(1) == labels).float()
        loss = F.cross_entropy(logits, labels.long(), reduction="none")
        return over_replicas(torch.stack([(correct * mask).sum(), (loss * mask).sum(), mask.sum()]))


def over_replicas(value: torch.Tensor) -> torch.Tensor:
    """The sum over DDP replicas, on the devices. Under SPMD there is one replica, and the value is whole already."""
    return xm.all_reduce(xm.REDUCE_SUM, value, pin_layout=False) if xr.world_size() > 1 else value


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


def join_devices(config: DistributedMnistConfig) -> None:
    """One program for all devices, or one replica among those that torchrun has started."""
    if config.strategy == "spmd":
        xr.use_spmd()
        return
    if config.compile_for:  # trace what replica 0 of all devices of the slice would run
        xm.set_replication(torch_xla.device(), xm.get_xla_supported_devices())
    if dist.is_torchelastic_launched():
        dist.init_process_group("xla", init_method="xla://")
    else:  # a replica alone: xla:// would listen on all addresses for others
        ordinal, count = xr.global_ordinal(), xr.world_size()
        dist.init_process_group("xla", store=dist.HashStore(), rank=ordinal, world_size=count)


def train(config: DistributedMnistConfig, hosts: Peers | None = None) -> int:
    """hosts: the processes of an SPMD run, one per host. None: this one alone. DDP finds its replicas itself."""
    spmd, tracing = config.strategy == "spmd", bool(config.compile_for)
    with Run(config) as run:  # clock, watchdog, stop signals; on leaving, all is on disk
        device = start_device(config, join=partial(join_devices, config))
        num_devices = xr.global_runtime_device_count() if spmd else xr.world_size()
        check_divisible(config, num_devices)
        if spmd:  # a host reads the rows of its own devices
            mesh = xs.Mesh(np.arange(num_devices), (num_devices,), ("data",))
            peers, sharding = hosts or Peers(), BatchSharding(mesh, ("data",))
            part, num_parts = sharding.part, sharding.num_parts
        else:  # a replica reads its own rows
            part, num_parts, sharding = xr.global_ordinal(), num_devices, None
            alone = tracing or num_parts == 1
            peers = Peers() if alone else meet_replicas(part, num_parts, config.peers_timeout)
        dataset = load_dataset(config)
        batches = TrainBatches(dataset, config, part, num_parts)  # a pure function of seed and step
        build_model = partial(ConvNet, dataset.image_size, config.channels, config.hidden_dim)
        flops = check_model(build_model, *dataset.first(2), dataset.num_classes)  # per example, for the MFU
        sizes = dict(examples=config.global_batch_size, flops=flops)
        # makes and locks the run directory; with --resume reads its newest checkpoint
        found = dataset.fingerprint(), dataset.description
        run.open(device, batches.num_steps, *found, **sizes, peers=peers, sharding=sharding)
        copies = "sharded parameters" if config.shard_parameters else "a copy of the parameters"
        each = f"each with {config.global_batch_size // num_devices} examples and {copies}"
        run.print(f"parallel   {config.strategy} over {num_devices} devices, {each}")

        model = build_model().to(device)
        optimizer = make_optimizer(config, model.parameters())  # with its state: born in step 1, it recompiles step 2
        schedule = learning_rates(config, batches.num_steps)
        rates = schedule.to(device)
        metrics = DeviceMetrics(["loss", "gradient_norm"], config.log_every, device)
        if spmd:
            for parameter in model.parameters():  # its optimizer state is sharded the same way
                shard([parameter, *optimizer.state[parameter].values()], mesh, config.shard_parameters)
            shard([rates, *model.buffers(), *metrics.state_dict().values()], mesh, over_devices=False)
        run.restore(model=model, optimizer=optimizer, metrics=metrics)  # what checkpoints hold; filled when resuming
        trained = model if spmd else replicate(model, tracing)
        if tracing:  # ask the TPU compiler about the first step instead of training
            first_batch = run.upload(batches.batch(0))
            return run.compile_for(train_step, trained, optimizer, rates, metrics, *first_batch, config)
        eval_size = math.ceil(config.eval_batch_size / num_devices) * num_devices  # the mask takes care of the rest
        test_set = eval_batches(dataset.test_images, dataset.test_labels, eval_size)
        test_batches = [run.upload([rows[part::num_parts] for rows in batch]) for batch in test_set]

        for step, (images, labels) in run.steps(batches):  # from the first one not yet done; uploads run ahead
            with run.one_graph("train", step, images, labels):  # a second graph stops the run here, and says why
                train_step(trained, optimizer, rates, metrics, images, labels, config)
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


def check_launched(config: DistributedMnistConfig) -> None:
    """Raises InputError unless each device of this host has its process, which is torchrun's to start."""
    if choose_device(config) == "cpu":
        found = max(int(os.environ.get(name, 1)) for name in ("CPU_NUM_DEVICES", "WORLD_SIZE"))
        if found > 1 and not config.compile_for:
            raise InputError(
                f"strategy ddp has {found} virtual CPU devices, but the XLA CPU client cannot run collectives between "
                "replicas; use --strategy spmd for many virtual devices, or one device"
            )
        return
    num_devices = sum(chip.devices_per_chip for chip in attached_chips())
    if num_devices > 1 and not dist.is_torchelastic_launched():
        raise InputError(
            f"strategy ddp needs a process for each of this host's {num_devices} devices, found one; start it with\n"
            f"  torchrun --standalone --nproc_per_node={num_devices} {shlex.join(sys.argv)}"
        )


def main(config: DistributedMnistConfig) -> int:
    if config.strategy == "spmd":
        return train(config, meet_hosts(config))
    check_launched(config)
    return train(config)


if __name__ == "__main__":
    sys.exit(run_script(lambda: main(config)))
