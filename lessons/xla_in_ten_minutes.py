# %% [markdown]
# # XLA in ten minutes
# For somebody who knows PyTorch and no XLA. Each rule of training on a TPU is broken here, counted, and mended.
#
# No TPU is needed: this runs in two minutes on a laptop. Counts are torch_xla's own and do not depend on the device.
# Seconds are those of the machine that ran this page, and no figure here was measured on a TPU. The last part asks the
# real TPU compiler, which runs without a TPU.
#
# In a checkout of this project, with its requirements: `.venv/bin/python lessons/xla_in_ten_minutes.py`, or open the
# notebook in Jupyter. On Colab, *The first hour on Colab and Kaggle* says how to get both.

# %%
import os
import sys
import time
from contextlib import contextmanager
from itertools import count
from pathlib import Path

ROOT = Path.cwd() if Path("tpu_utils").is_dir() else Path.cwd().parent
sys.path.insert(0, str(ROOT))
os.environ["PJRT_DEVICE"] = "CPU"

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
from torch import nn

print(torch.__version__.split("+")[0], torch_xla.__version__, torch_xla.device())

# %% [markdown]
# torch_xla counts what it does. We look at four counts: programs **compiled**, programs **run**, tensors sent **up** to
# the device, and tensors read **down** from it.

# %%
COUNTERS = {"compiled": "CompileTime", "runs": "ExecuteTime"}
COUNTERS |= {"up": "TransferToDeviceTime", "down": "TransferFromDeviceTime"}
table = {}  # for the picture at the end


def counts():
    torch_xla.sync()  # whatever waits is computed, so that it is not counted for what comes next
    xm.wait_device_ops()
    return {name: (met.metric_data(metric) or (0,))[0] for name, metric in COUNTERS.items()}


@contextmanager
def counted(title):
    before = counts()
    yield
    after = counts()
    table[title] = {name: after[name] - before[name] for name in after}
    print(f"{title}:", ", ".join(f"{name} {count}" for name, count in table[title].items()))


# %% [markdown]
# ## 1. Tensors are lazy
# An operation on a device tensor computes nothing. It writes itself down. What is written down is the **graph**:

# %%
a = torch.ones(4, 8).to("xla")
b = torch.ones(8, 2).to("xla")

with counted("three operations, nobody asks"):
    y = torch.relu(a @ b).sum()
    graph = torch_xla._XLAC._get_xla_tensors_text([y])  # private; XLA_SAVE_TENSORS_FILE is the public way
    del y  # nobody will ever know
print(graph)

# %% [markdown]
# Nothing was compiled, nothing ran: `y` was never needed. Somebody who needs it, here `.item()`, makes torch_xla turn
# the graph into a program for the device (**compile**) and run it:

# %%
with counted("the value is asked for"):
    print(torch.relu(a @ b).sum().item())
with counted("the same again"):
    print(torch.relu(a @ b).sum().item())

# %% [markdown]
# The second time the graph was the same, so the program was there already. **A graph is compiled once for each
# different graph.** Everything below is about keeping it the same, and about not asking.
#
# ## 2. One step, one program
# Forward pass, backward pass and update together are one graph. `torch_xla.compile(full_graph=True)` says so, and
# refuses anything that would split it.

# %%
torch.manual_seed(0)
images = torch.randn(512, 256)
labels = torch.randint(10, (512,))


widths = count(400)


def new_model(width=None, momentum=0.0):
    """Each one is a little wider than the one before, so that no program of an earlier cell fits it."""
    torch.manual_seed(0)
    width = width or next(widths)
    model = nn.Sequential(nn.Linear(256, width), nn.ReLU(), nn.Linear(width, 10)).to("xla")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    torch_xla.sync()
    return model, optimizer


def update(model, optimizer, images, labels):
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


step = torch_xla.compile(update, full_graph=True)
model, optimizer = new_model()
x, y = images.to("xla"), labels.to("xla")
seconds = []
with counted("20 steps"):
    for _ in range(20):
        start = time.perf_counter()
        loss = step(model, optimizer, x, y)
        xm.wait_device_ops()  # only for this clock: a loop must not wait
        seconds.append(time.perf_counter() - start)

figure, axes = plt.subplots(figsize=(6, 2.5))
axes.bar(range(1, 21), [1e3 * one for one in seconds])
axes.set(xlabel="step", xticks=(1, 5, 10, 15, 20), ylabel="ms", yscale="log")
axes.set_title("step 1 compiles; on a TPU that takes seconds to minutes")

# %% [markdown]
# ## 3. A shape that changes is another program
# 100 examples in batches of 32 leave a **last batch** of 4. Each shape is compiled:

# %%
batches = [(images[i : min(i + 32, 100)], labels[i : min(i + 32, 100)]) for i in range(0, 100, 32)]
print("batch sizes", [len(one) for one, _ in batches])
sent = [(one.to("xla"), its_labels.to("xla")) for one, its_labels in batches]
model, optimizer = new_model()
with counted("the last batch is short"):
    for batch in sent:
        step(model, optimizer, *batch)
model, optimizer = new_model()
with counted("four sizes that come as they come"):
    for size in (24, 40, 56, 72):
        step(model, optimizer, images[:size].to("xla"), labels[:size].to("xla"))

# %% [markdown]
# **Mend it.** In training leave the short batch out, or fill it up with labels of -100, which `cross_entropy` skips. In
# evaluation every example must count once, so fill the batch up and let a mask leave the filling out:

# %%
model, optimizer = new_model()
with counted("mended: no short batch"):
    for batch in sent[:-1]:
        step(model, optimizer, *batch)


@torch_xla.compile(full_graph=True)
def evaluate(model, images, labels, mask):
    with torch.no_grad():
        losses = F.cross_entropy(model(images), labels, reduction="none")
        return torch.stack([(losses * mask).sum(), mask.sum()])


with counted("mended: filled up, with a mask"):
    sums = torch.zeros(2)
    for one, its_labels in batches:
        missing = 32 - len(one)
        mask = torch.cat([torch.ones(len(one)), torch.zeros(missing)])
        filled = F.pad(one, (0, 0, 0, missing)), F.pad(its_labels, (0, missing)), mask
        sums += evaluate(model, *[tensor.to("xla") for tensor in filled]).cpu()
with torch.no_grad():
    expected = F.cross_entropy(model.cpu()(images[:100]), labels[:100])
print(f"mean loss of 100 examples: {sums[0] / sums[1]:.4f} with mask, {expected:.4f} by PyTorch on the host")

# %% [markdown]
# Four runs, one program, and the mean is that of the 100 examples. What this project says when you forget: put
# `@one_graph` on the step, and a second program is an error.

# %%
from tpu_utils.base.errors import RecompileError
from tpu_utils.step.graphs import one_graph


def message_of(function, *batches, momentum=0.0):
    """Calls the function under @one_graph with a model and these batches, and prints what stops it."""
    guarded = one_graph(function)
    model_and_optimizer = new_model(momentum=momentum)
    try:
        for batch in batches:
            guarded(*model_and_optimizer, *batch)
        print("nothing to say")
    except RecompileError as error:
        print("RecompileError:", str(error).replace(f"{ROOT}{os.sep}", ""))
    torch_xla.sync()


message_of(update, sent[0], sent[1], sent[3])

# %% [markdown]
# ## 4. `.item()` makes the host wait
# The host only describes work, so it can describe the next step, and read the next batch, while the device computes.
# `.item()` ends that: the host stands still until the number is there. Here a batch comes from a pretended disk that
# takes as long as a step (`sleep`):

# %%
large = torch.randn(2048, 256).to("xla"), torch.randint(10, (2048,)).to("xla")


def train(steps, read):
    """Seconds since the start at which the host begins each step, and the losses."""
    model, optimizer = new_model(width=512)
    step(model, optimizer, *large)  # compiles
    xm.wait_device_ops()
    start = time.perf_counter()
    for _ in range(5):
        step(model, optimizer, *large)
    xm.wait_device_ops()
    disk_seconds = (time.perf_counter() - start) / 5
    start, begun, losses = time.perf_counter(), [], []
    for _ in range(steps):
        begun.append(time.perf_counter() - start)
        time.sleep(disk_seconds)  # a batch comes from the disk
        loss = step(model, optimizer, *large)
        losses.append(loss.item() if read else loss)
    losses = losses if read else torch.stack(losses).tolist()  # one read, at the end
    begun.append(time.perf_counter() - start)
    return begun, losses


with counted("20 steps, .item() in each"):
    waiting, read_losses = train(20, read=True)
with counted("mended: 20 steps, losses read at the end"):
    ahead, late_losses = train(20, read=False)
print("the same losses:", read_losses == late_losses)

figure, axes = plt.subplots(figsize=(6, 2.5))
axes.step(waiting, range(21), where="post", label=f".item() in each step: {waiting[-1]:.2f} s")
axes.step(ahead, range(21), where="post", label=f"read at the end: {ahead[-1]:.2f} s")
axes.set(xlabel="seconds", ylabel="step", title="when the host begins each step (this machine's CPU)")
axes.legend()

# %% [markdown]
# 20 reads became one. With `.item()`, the disk and the device work one after the other; without, at the same time.
# (`DeviceMetrics` of this project keeps the losses in one tensor on the device, and `run.log` reads them by log line.)
#
# Inside the compiled step, a read is refused:

# %%


def update_that_reads(model, optimizer, images, labels):
    loss = update(model, optimizer, images, labels)
    return loss.item()


message_of(update_that_reads, (x, y))

# %% [markdown]
# ## 5. `print` is a read too
# Printing a tensor needs its value. A shape is known without:

# %%
with counted("print(tensor)"):
    z = (x * 2).sum()
    print(z)
with counted("mended: print its shape and dtype"):
    z = (x * 3).sum()
    print(tuple(z.shape), z.dtype)
    del z


def update_that_prints(model, optimizer, images, labels):
    loss = F.cross_entropy(model(images), labels)
    print(loss)
    loss.backward()


message_of(update_that_prints, (x, y))

# %% [markdown]
# ## 6. `if` on a tensor is a read, and two programs
# Python has to know which way to go. `torch.where` computes both and chooses on the device:

# %%
values = [torch.full((4,), value).to("xla") for value in (0.25, 2.0, 0.5, 4.0)]
with counted("if on a tensor"):
    total = torch.zeros(()).to("xla")
    for value in values:
        if value.mean() > 1:
            total = total + value.sum().log()
        else:
            total = total + value.sum()
    branched = total.item()
    del total
with counted("mended: torch.where"):
    total = torch.zeros(()).to("xla")
    for value in values:
        total = total + torch.where(value.mean() > 1, value.sum().log(), value.sum())
    chosen = total.item()
    del total
print(f"the same sum: {branched:.4f} {chosen:.4f}")


def update_with_if(model, optimizer, images, labels):
    loss = F.cross_entropy(model(images), labels)
    if loss > 1:
        loss = loss / 2
    loss.backward()


message_of(update_with_if, (x, y))

# %% [markdown]
# ## 7. Boolean masks and `nonzero` have no shape
# How many elements `x[mask]` has is known after it was computed. A program has one shape, so torch_xla reads the mask,
# counts on the host, and each other count is another program:

# %%
narrow = images[:, :200].to("xla")  # of another shape, or programs of the first part would fit the second
thresholds = [torch.full((1,), value).to("xla") for value in (0.0, 0.5, 1.0, 1.5, 2.0)]
with counted("x[mask], five masks"):
    by_mask = [x[x > threshold].sum().item() for threshold in thresholds]
with counted("nonzero, five masks"):
    by_place = []
    for threshold in thresholds:
        rows, columns = (narrow > threshold).nonzero(as_tuple=True)
        by_place.append(narrow[rows, columns].sum().item())
with counted("mended: torch.where, five masks"):
    by_where = [torch.where(x > threshold, x, 0.0).sum().item() for threshold in thresholds]
print("by mask ", [f"{one:.1f}" for one in by_mask])
print("by where", [f"{one:.1f}" for one in by_where])


def update_with_mask(model, optimizer, images, labels):
    logits = model(images)
    logits[logits > 0].mean().backward()


message_of(update_with_mask, (x, y))

# %% [markdown]
# ## 8. Optimizer state that is born in step 1
# Momentum does not exist before the first step. So step 2 has more inputs than step 1, and is another program. With a
# large model that is a second compile of minutes:

# %%
model, optimizer = new_model(momentum=0.9)
with counted("momentum is born in step 1"):
    for _ in range(5):
        step(model, optimizer, x, y)
model, optimizer = new_model(momentum=0.9)
for parameter in model.parameters():
    optimizer.state[parameter]["momentum_buffer"] = torch.zeros(parameter.shape).to("xla")
with counted("mended: it is there before"):
    for _ in range(5):
        step(model, optimizer, x, y)

message_of(update, (x, y), (x, y), momentum=0.9)

# %% [markdown]
# ## 9. A learning rate that is a Python number
# torch_xla sends a number up as a small tensor, each new value again. But 0 and 1 are special: they become constants of
# the program. A warm-up that begins at 0, or a decay that ends there, is another program:

# %%


def update_at_rate(model, optimizer, images, labels, rate):
    F.cross_entropy(model(images), labels).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(rate * parameter.grad)
            parameter.grad = None


rates = [0.3, 0.25, 0.2, 0.15, 0.0]
step_at_rate = torch_xla.compile(update_at_rate, full_graph=True)
model, optimizer = new_model()
with counted("5 rates as Python numbers, the last is 0"):
    for rate in rates:
        step_at_rate(model, optimizer, x, y, rate)


@torch_xla.compile(full_graph=True)
def step_by_table(model, optimizer, images, labels, rate_table, number):
    update_at_rate(model, optimizer, images, labels, rate_table.index_select(0, number))
    number.add_(1)  # the step counts itself, on the device


model, optimizer = new_model()
rate_table, number = torch.tensor(rates).to("xla"), torch.zeros(1, dtype=torch.int64).to("xla")
with counted("mended: a table on the device"):
    for _ in rates:
        step_by_table(model, optimizer, x, y, rate_table, number)

message_of(update_at_rate, *[(x, y, rate) for rate in rates])

# %% [markdown]
# ## 10. What compiled again, went up and came down, in one picture

# %%
PAIRS = [
    ("last batch", "the last batch is short", "mended: no short batch"),
    ("if", "if on a tensor", "mended: torch.where"),
    ("x[mask]", "x[mask], five masks", "mended: torch.where, five masks"),
    ("nonzero", "nonzero, five masks", "mended: torch.where, five masks"),
    ("momentum", "momentum is born in step 1", "mended: it is there before"),
    ("rate", "5 rates as Python numbers, the last is 0", "mended: a table on the device"),
]
figure, panels = plt.subplots(1, 3, figsize=(9, 2.6), sharey=True)
for axes, counter in zip(panels, ("compiled", "up", "down"), strict=True):
    for place, (_, broken, mended) in enumerate(PAIRS):
        axes.barh(place - 0.2, table[broken][counter], 0.35, color="tab:red")
        axes.barh(place + 0.2, table[mended][counter], 0.35, color="tab:green")
    axes.set(title=counter, yticks=range(len(PAIRS)), yticklabels=[name for name, *_ in PAIRS])
panels[0].invert_yaxis()
figure.suptitle("red: broken, green: mended", y=1.05)

# %% [markdown]
# ## 11. Widths of 128, asked of the TPU compiler
# A TPU keeps an array in tiles of 8 x 128 (sublanes x lanes) and multiplies 128 x 128 at a time (v5e). A width of 129
# takes the room of 256, and more cycles. libtpu has the whole compiler of a TPU and needs none to compile, so it can
# be asked: a layer without bias from a width to the same width, 8,192 rows, bfloat16, on one v5e.

# %%
import importlib.util

HAS_COMPILER = importlib.util.find_spec("libtpu") is not None
WIDTHS = (100, 120, 128, 129)
if HAS_COMPILER:
    from tpu_compiler.answer import ask_compiler
    from tpu_compiler.compile.tracing import trace_step


def ask(function, layer, rows):
    """(thousand cycles of the chip by the compiler's own estimate, bytes of the weights in its memory)"""
    layer, rows = layer.to("xla"), rows.to("xla")
    report, _ = ask_compiler(trace_step(function, layer, rows, owners=(layer,)), "v5litepod-1", examples=len(rows))
    return report.estimated_ms * 1500, report.memory["parameters"]  # 1.5 GHz


def ask_layer(width, dtype):
    layer = nn.Linear(width, width, bias=False).to(dtype)
    return ask(lambda layer, rows: layer(rows), layer, torch.zeros(8192, width, dtype=dtype))


if HAS_COMPILER:
    cycles, stored = {}, {}
    print("width  thousand cycles  products, those of 128 = 100  bytes of the weight  of that padding")
    for width in WIDTHS:
        cycles[width], stored[width] = ask_layer(width, torch.bfloat16)
        products, padding = 100 * width**2 / 128**2, 1 - 2 * width**2 / stored[width]
        print(f"{width:5}  {cycles[width]:15.1f}  {products:28.0f}  {stored[width]:19,}  {padding:15.0%}")
    figure, panels = plt.subplots(1, 2, figsize=(7, 2.3))
    names = [str(width) for width in WIDTHS]
    panels[0].bar(names, [cycles[width] for width in WIDTHS])
    panels[0].set(xlabel="width", title="thousand cycles (estimate)")
    panels[1].bar(names, [stored[width] / 1024 for width in WIDTHS], label="padding")
    panels[1].bar(names, [2 * width**2 / 1024 for width in WIDTHS], label="needed")
    panels[1].set(xlabel="width", title="KiB of the weight")
    panels[1].legend(loc="upper left")
else:
    print("skipped: libtpu is not installed here; pip install 'torch_xla[tpu]==2.9.0' brings it")

# %% [markdown]
# 128 has 64 % more products than 100 for 18 % more cycles; 129 has 2 % more than 128 for 15 % more cycles, and twice
# the memory. So round widths, vocabularies and heads **up** to a multiple of 128. Cycles are the compiler's own
# estimate, not a measurement; `aot_tpu.py` asks the same for whole scripts.
#
# ## 12. bfloat16
# The multiplier of a TPU takes bfloat16: float32's range with 8 bits of precision instead of 24. It has half the bytes,
# and numbers that are near each other fall together:

# %%
print("1 + 1/256 =", (torch.tensor(1.0, dtype=torch.bfloat16) + 1 / 256).item(), "in bfloat16")
weight = torch.tensor(1.0, dtype=torch.bfloat16)
for _ in range(1000):
    weight += 0.001  # a thousand updates
print("1 + 1000 x 0.001 =", weight.item(), "in bfloat16")

# %% [markdown]
# So a **weight** in bfloat16 does not learn from small updates. Keep weights, optimizer state and loss in float32, and
# give the products bfloat16: that is `torch.autocast`. Losses of 60 steps:

# %%


def losses_with(weights, products, steps=60):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10)).to(weights).to("xla")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.003)

    @torch_xla.compile(full_graph=True)
    def step(images, labels):
        with torch.autocast("xla", torch.bfloat16, enabled=products == torch.bfloat16):
            logits = model(images.to(weights))
        loss = F.cross_entropy(logits.float(), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return [float(one) for one in [step(x, y) for _ in range(steps)]]


figure, axes = plt.subplots(figsize=(6, 2.5))
for name, weights, products, width in (
    ("all float32", torch.float32, torch.float32, 5),
    ("weights float32, products bfloat16", torch.float32, torch.bfloat16, 1.5),
    ("all bfloat16", torch.bfloat16, torch.bfloat16, 1.5),
):
    losses = losses_with(weights, products)
    print(f"{name:35} loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    axes.plot(losses, label=name, linewidth=width)
axes.set(xlabel="step", ylabel="loss", title="SGD at a rate of 0.003")
axes.legend(loc="upper left", bbox_to_anchor=(1, 1))

# %% [markdown]
# (The first two lines lie upon each other.) What all in bfloat16 takes on the chip, estimated for a v5e:

# %%
if HAS_COMPILER:
    for dtype in (torch.float32, torch.bfloat16):
        product, weights = ask_layer(2048, dtype)
        print(f"layer of 2,048, {dtype}: {product:.0f} thousand cycles, {weights / 2**20:.0f} MiB of weights")

# %% [markdown]
# The product takes the same time, because by default a TPU rounds float32 factors to bfloat16 anyway. The bytes are
# half: of what is stored, moved, and kept for the backward pass.
#
# ## What to remember
# - A step is one program. Shapes, Python branches, and which tensors exist must be the same in each step.
# - Ask for values seldom, and outside of the step.
# - What changes from step to step is a tensor on the device.
# - Round up to 128. Products in bfloat16, weights in float32.
#
# `@one_graph` holds these for the function that it marks; a read between steps is named by `Run`, as in the scripts.
# An optimizer of `torch.optim` reads a tensor given as `lr`: write the update, or use `make_optimizer`.
#
# Next: `lessons/plain_mnist_tpu.py`, a whole training with torch and torch_xla alone, and *From one device to many*.
