# %% [markdown]
# # From one device to many
# A step that runs on one device runs on eight: you say where tensors lie, and the compiler inserts what the devices
# must tell each other. Here it is done by hand, with torch_xla alone, on eight virtual devices of this machine's CPU.
# Virtual devices show what is computed and sent where; they are no faster than one. No figure here was measured on a
# TPU. Read *XLA in ten minutes* first.

# %%
import importlib.util
import os
import sys
from pathlib import Path

ROOT = Path.cwd() if Path("tpu_utils").is_dir() else Path.cwd().parent
sys.path.insert(0, str(ROOT))
os.environ["PJRT_DEVICE"] = "CPU"
os.environ["CPU_NUM_DEVICES"] = "8"  # on a TPU VM the chips are simply there

import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.nn.functional as F
import torch_xla
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from sklearn.datasets import load_digits
from torch import nn

xr.use_spmd()  # before anything is on a device: from here on, one process drives all devices as one
DEVICES = xr.global_runtime_device_count()
print(DEVICES, "devices,", xr.global_device_count(), "of them as torch sees it")

# %% [markdown]
# ## A mesh, and tensors that lie on it
# A **mesh** is an array of devices with named axes. A tensor's sharding names, for each of its axes, the axis of the
# mesh it is divided over; `None` is none. We colour each element of an 8 x 8 matrix by the devices that hold it:

# %%
row = xs.Mesh(np.arange(8), (8,), ("data",))
square = xs.Mesh(np.arange(8), (4, 2), ("data", "model"))
PLACES = {
    "('data', None): by rows": (row, ("data", None)),
    "(None, 'data'): by columns": (row, (None, "data")),
    "('data', 'model') on 4 x 2": (square, ("data", "model")),
    "(None, None): on all": (row, (None, None)),
}


def holders(mesh, places):
    """(8, 8): the first device that holds each element; and the shape of what device 0 holds."""
    matrix = xs.mark_sharding(torch.arange(64.0).view(8, 8).to("xla"), mesh, places)
    first = np.full((8, 8), -1)
    shards = matrix.local_shards
    for shard in reversed(shards):
        values = shard.data.numpy().astype(int).ravel()
        first.ravel()[values] = int(shard.shard_device.rpartition(":")[2])
    return first, tuple(shards[0].data.shape)


figure, panels = plt.subplots(1, 4, figsize=(11, 2.7))
for axes, (title, place) in zip(panels, PLACES.items(), strict=True):
    first, shape = holders(*place)
    print(f"{title:28} device 0 holds {shape} of (8, 8)")
    axes.imshow(first, cmap="tab10", vmin=0, vmax=9)
    for device in range(8):
        places = np.argwhere(first == device)
        if len(places):
            axes.text(*places.mean(0)[::-1], str(device), ha="center", va="center", color="white")
    axes.set(title=title.replace(": ", "\n"), xticks=[], yticks=[])
panels[3].set_xlabel("each device has a copy")

# %% [markdown]
# ## What devices tell each other
# Three messages are enough, the **collectives**. Nobody calls them: they are what a different place of the result
# needs. Eight numbers, one on each device:

# %%


def shards_of(tensor):
    return [shard.data.flatten().tolist() for shard in tensor.local_shards]


def placed(tensor, *places, mesh=row):
    return xs.mark_sharding(tensor, mesh, places)


numbers = placed(torch.arange(1.0, 9.0).to("xla"), "data")
print("before          ", shards_of(numbers))
print("all-reduce: the sum, on all             ", shards_of(placed(numbers.sum()[None].clone(), None)))
print("all-gather: all of it, on all, device 0 ", shards_of(placed(numbers * 1, None))[0])
table = placed((torch.arange(1.0, 9.0)[:, None] * torch.arange(8.0)).to("xla"), "data", None)
print("reduce-scatter: column sums, one on each", shards_of(placed(table.sum(0), "data")))

# %% [markdown]
# (A reduce-scatter is an all-reduce of which each device keeps its part.)
#
# ## One step, three places
# A training step as for one device: nothing in it knows of devices. Reference is PyTorch on the host. Then the same
# step on eight devices:
#
# - **data parallel**: the batch is divided, each device has all parameters;
# - **FSDP**: parameters and momentum are divided too;
# - **tensor parallel**: on the 4 x 2 mesh, the batch over 4, the hidden layer over 2.

# %%
images, labels = load_digits(return_X_y=True)
images = torch.from_numpy(images[:1024]).float() / 16
labels = torch.from_numpy(labels[:1024])
BATCH, STEPS, RATE, MOMENTUM = 128, 20, 0.1, 0.9


def new_state():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 16))
    return model, [torch.zeros_like(parameter, requires_grad=False) for parameter in model.parameters()]


def update(model, velocities, images, labels):
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    with torch.no_grad():
        for parameter, velocity in zip(model.parameters(), velocities, strict=True):
            velocity.mul_(MOMENTUM).add_(parameter.grad)
            parameter.sub_(RATE * velocity)
            parameter.grad = None
    return loss.detach()


def batch(number):
    start = number * BATCH % len(images)
    return images[start : start + BATCH], labels[start : start + BATCH]


model, velocities = new_state()
reference = [update(model, velocities, *batch(number)).item() for number in range(STEPS)]
print("PyTorch on the host, losses", [f"{loss:.4f}" for loss in reference[:3]], "...", f"{reference[-1]:.4f}")

# %%
# where each parameter lies: 256 x 64, 256, 16 x 256, 16; and on which mesh
WAYS = {
    "data parallel": (row, [(None, None), (None,), (None, None), (None,)]),
    "FSDP": (row, [("data", None), ("data",), ("data", None), ("data",)]),
    "tensor parallel": (square, [("model", None), ("model",), (None, "model"), (None,)]),
}


def on_devices(mesh, places):
    """(model, velocities) with every tensor at its place, and the batch's sharding."""
    model, velocities = new_state()
    model.to("xla")
    velocities = [velocity.to("xla") for velocity in velocities]
    for parameter, velocity, place in zip(model.parameters(), velocities, places, strict=True):
        xs.mark_sharding(parameter, mesh, place)
        xs.mark_sharding(velocity, mesh, place)
    return model, velocities


def send(mesh, images, labels):
    images, labels = images.to("xla"), labels.to("xla")
    xs.mark_sharding(images, mesh, ("data", None))
    xs.mark_sharding(labels, mesh, ("data",))
    return images, labels


def bytes_on_a_device(tensors):
    """Most bytes that one device holds of these tensors."""
    held = dict.fromkeys(range(DEVICES), 0)
    for tensor in tensors:
        for shard in xs.wrap_if_sharded(tensor).local_shards:
            held[int(shard.shard_device.rpartition(":")[2])] += shard.data.nbytes
    return max(held.values())


losses, held = {}, {}
for name, (mesh, places) in WAYS.items():
    step = torch_xla.compile(update, full_graph=True, name=name)
    model, velocities = on_devices(mesh, places)
    torch_xla.sync()
    found = [step(model, velocities, *send(mesh, *batch(number))) for number in range(STEPS)]
    losses[name] = [loss.item() for loss in found]
    held[name] = bytes_on_a_device([*model.parameters(), *velocities])
    largest = max(abs(a / b - 1) for a, b in zip(losses[name], reference, strict=True))
    within = "within 1e-5" if largest < 1e-5 else "NOT within 1e-5"
    print(f"{name:16} last loss {losses[name][-1]:.4f}, {within} of PyTorch's; {held[name]:,} bytes on a device")

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 2.6))
left.plot(reference, "k", linewidth=4, alpha=0.3, label="PyTorch on the host")
for style, (name, found) in zip(("-", "--", ":"), losses.items(), strict=True):
    left.plot(found, style, label=name)
left.set(xlabel="step", title="loss")
left.legend(loc="lower left", fontsize=8)
right.bar(held.keys(), [one / 1024 for one in held.values()])
right.set(ylabel="KiB on a device", title="parameters and momentum")

# %% [markdown]
# The mean in the loss is over the global batch, so nothing has to be averaged by hand, and the learning rate stays.
#
# ## Read the collectives from the program
# The TPU compiler divides the program, and what it inserted stands in the text. It needs no TPU. The same three steps,
# for the eight chips of a v5litepod-8:

# %%
if importlib.util.find_spec("libtpu"):
    from tpu_compiler.answer import ask_compiler
    from tpu_compiler.compile.tracing import trace_step

    def ask(name, size):
        """(report, program) of a step of so many examples."""
        mesh, places = WAYS[name]
        model, velocities = on_devices(mesh, places)
        arguments = model, velocities, *send(mesh, images[:size], labels[:size])
        return ask_compiler(trace_step(update, *arguments, owners=(model,)), "v5litepod-8", examples=size)

    sent = {}
    for name in WAYS:
        report, program = ask(name, BATCH)
        sent[name] = {kind: found["bytes"] for kind, found in report.collectives.items()}
        print(f"{name}: {sum(sent[name].values()):,.0f} bytes")
        for kind, found in report.collectives.items():
            print(f"    {found['count']:.0f} {kind}, {found['bytes']:,.0f} bytes")
        if name == "data parallel":
            line = next(line for line in program.splitlines() if " all-reduce(" in line)
            print("    in the program:", line.strip()[:110], "...")
    for name in ("data parallel", "tensor parallel"):
        report, _ = ask(name, 2 * BATCH)
        total = sum(found["bytes"] for found in report.collectives.values())
        print(f"{name}, twice the batch: {total:,.0f} bytes")
    kinds = sorted({kind for found in sent.values() for kind in found})
    figure, axes = plt.subplots(figsize=(7, 2.4))
    start = dict.fromkeys(sent, 0)
    for kind in kinds:
        sizes = [sent[name].get(kind, 0) / 1024 for name in sent]
        axes.barh(list(sent), sizes, left=list(start.values()), label=kind)
        start = {name: begin + size for (name, begin), size in zip(start.items(), sizes, strict=True)}
    axes.set(xlabel="KiB", title="collectives of one step")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
else:
    print("skipped: libtpu is not installed here; pip install 'torch_xla[tpu]==2.9.0' brings it")

# %% [markdown]
# - Data parallel: the gradients of all parameters are summed over the devices. The bytes do not depend on the batch.
# - FSDP gathers what a layer needs when it needs it. It keeps an eighth, and sends more: it pays where a model does not
#   fit otherwise.
# - Tensor parallel sums activations too, which grow with the batch (2,048 bytes for 128 examples more), and half of the
#   gradients.
#
# ## Next
# `distributed_mnist_tpu.py` is this, with checkpoints, evaluation and refusals; `transformer_tpu.py --mesh 2x2x2` has
# all three at once. On several hosts the same program runs in each host's process, and a host sends its own rows. [Many
# devices](../docs/many_devices.md) has the commands.
