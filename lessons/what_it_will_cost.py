# %% [markdown]
# # What it will cost
# A module of your own, asked of the real TPU compiler before you pay for a TPU: does it fit, how long is a step, what
# holds it up, what does a training cost, and how far can you believe it. libtpu contains the whole compiler and needs
# no TPU. **Nothing here was measured on a TPU**; where clocks appear, others measured and published them.

# %%
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path.cwd() if Path("tpu_utils").is_dir() else Path.cwd().parent
WORK = Path(tempfile.mkdtemp())
HAS_COMPILER = importlib.util.find_spec("libtpu") is not None

import matplotlib.pyplot as plt
import numpy as np

print("libtpu is installed" if HAS_COMPILER else "libtpu is not installed: questions to the compiler are skipped")

# %% [markdown]
# ## Your module
# Any file with a `torch.nn.Module` in it. Nothing in it has to know of XLA. This one tags each word of a sentence:

# %%
MODULE = """
import torch
from torch import nn


class Tagger(nn.Module):
    # ids (B, T) -> logits (B, T, tags)
    def __init__(self, vocabulary=8192, width=1024, tags=20):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.mix = nn.Linear(2 * width, width)
        self.head = nn.Linear(width, tags)

    def forward(self, ids):
        x = self.embedding(ids)
        before = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)  # the word before
        x = x + torch.relu(self.mix(torch.cat([x, before], -1)))
        x = x + self.down(torch.relu(self.up(x)))
        return self.head(x)
"""
(WORK / "my_model.py").write_text(MODULE)


def ask(*options):
    """What aot_tpu.py says, by default of a training step with AdamW; None where there is no compiler."""
    print("$ python aot_tpu.py", *(word.replace(f"{ROOT}{os.sep}", "") for word in options))
    if not HAS_COMPILER:
        return None
    command = [sys.executable, str(ROOT / "aot_tpu.py"), *options, "--cache", str(WORK / "cache")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=WORK, env=environment, capture_output=True, text=True)
    if done.returncode > 1 or "error: " in done.stderr:  # 1 alone: it does not fit
        raise RuntimeError(done.stderr)
    return re.sub(r"^  took .*\n", "", done.stdout, flags=re.M)  # how long that was depends on this machine


# %% [markdown]
# ## One question
# 64 sentences of 128 words a step, on one chip of v5e:

# %%
V5E = ["my_model.py:Tagger", "--inputs", "ids=int32[64,128]", "--topology", "v5litepod-1"]
print(ask(*V5E))

# %% [markdown]
# Read it from the top:
#
# - **compiles and fits**: the compiler made the program, and its memory is below the chip's. These are facts.
# - **predicted step**: the compiler's own cost model, summed over its schedule. It is a prediction.
# - **MFU**: the share of the chip's peak that your model's arithmetic uses.
# - **costliest modules**: where to look first.
#
# ## Does a larger batch fit, and does it pay?
# The same by machine: `--json`. Three batches, the last one out of proportion: there `--plan` asks for memory alone,
# which takes seconds where a compile takes half a minute:

# %%
BATCHES = (64, 256, 4096)
rows = []
for batch in BATCHES:
    answer = ask(*V5E[:2], f"ids=int32[{batch},128]", *V5E[3:], "--json", *["--plan"] * (batch == 4096))
    if answer:
        (report,) = json.loads(answer)
        rows.append((batch, report["peak_bytes"] / 2**30, report["limit_bytes"] / 2**30, report["fits"]))
        rows[-1] += (report["predicted_ms"], report["predicted_mfu"]) if report["fits"] else (None, None)
        time = f"{rows[-1][4]:.2f} ms" if report["fits"] else "no time, because it has no place"
        print(f"  {rows[-1][1]:7.2f} of {rows[-1][2]:.2f} GiB, fits: {report['fits']}, {time}")

if rows:
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 2.6))
    names = [str(batch) for batch, *_ in rows]
    colours = ["tab:green" if fits else "tab:red" for *_, fits, _, _ in rows]
    left.bar(names, [peak for _, peak, *_ in rows], color=colours)
    left.axhline(rows[0][2], color="k", linestyle=":")
    left.set(xlabel="sentences", title="GiB on the chip; dotted: what it has", yscale="log")
    right.bar(names, [100 * (mfu or 0) for *_, mfu in rows], color=colours)
    right.set(xlabel="sentences", title="predicted MFU, %")

# %% [markdown]
# Here a word of 256 sentences costs more than one of 64: a larger batch does not always pay, so ask.
# `aot_tpu.py SCRIPT --fit global_batch_size` looks for the largest that fits.
#
# ## What holds it up: the roofline
# A chip multiplies so fast, and reads its memory so fast. Whichever takes longer is the least that a step can take.
# `--picture` draws where the predicted step stands:

# %%
answer = ask(*V5E, "--picture", "roofline.png", "--json")
if answer:
    (report,) = json.loads(answer)
    figure, axes = plt.subplots(figsize=(14, 6))
    axes.imshow(plt.imread(WORK / "roofline.png"))
    axes.axis("off")

# %% [markdown]
# ## Let it search
# For a script, `--search` changes one option at a time and keeps what fits and is faster: attention, mesh, on-chip
# memory, recomputation, micro-batches. For GPT-2 124M on eight chips that takes half an hour; here is what one found:
# `python aot_tpu.py transformer_tpu.py --preset production --topology v5litepod-8 --search`

# %%
import csv

with (ROOT / "docs" / "results" / "search.csv").open() as file:
    tried = list(csv.DictReader(file))
figure, axes = plt.subplots(figsize=(7, 2.4))
left = np.zeros(len(tried))
for part in ("estimate", "by rule", "comm. not hidden"):
    values = np.array([float(row[part]) for row in tried])
    axes.barh(range(len(tried)), values, left=left, label=part)
    left += values
axes.set_yticks(range(len(tried)), [row["setting"].replace(" compiler_options=", "\n") for row in tried])
axes.set(xlabel="predicted milliseconds of a step")
axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
for row in tried:
    print(f"{row['ms a step']:>6} ms, MFU {row['MFU']}, {row['GiB']} GiB: {row['setting']}")

# %% [markdown]
# ## Dollars
# Steps x milliseconds x price. The price is yours; $1.20 for a v5e chip and hour is an example.

# %%
words, price = 1_000_000_000, 1.20
for batch, _, _, fits, milliseconds, _ in rows:
    if fits:
        hours = words / (batch * 128) * milliseconds / 3.6e6
        print(f"a billion words, {batch:3} sentences a step: {hours:5.2f} hours, ${hours * price:.2f}")

# %% [markdown]
# Start, compile, evaluation, checkpoints, and waiting for data are not in it.
#
# ## What to believe
# The prediction was held against clocks that others published, of their programs, at shapes that we compiled. All of
# them, from the table of this project:

# %%
with (ROOT / "docs" / "results" / "published.csv").open() as file:
    table = list(csv.DictReader(file))
points = [(row["what"], float(row["predicted ms"]), float(row["clock ms"])) for row in table if row["predicted ms"]]
ratios = np.array([clock / predicted for _, predicted, clock in points])
print(f"{len(points)} clocks; clock / predicted:")
print(f"    from {ratios.min():.2f} to {ratios.max():.2f}, median {np.median(ratios):.2f}")
figure, axes = plt.subplots(figsize=(5, 3.2))
axes.loglog([predicted for _, predicted, _ in points], [clock for _, _, clock in points], "o", markersize=4)
limits = [min(one for _, *pair in points for one in pair), max(one for _, *pair in points for one in pair)]
axes.plot(limits, limits, "k:", linewidth=1)
axes.set(xlabel="predicted, ms", ylabel="published clock, ms", title="on the line: as predicted")
worst = sorted(points, key=lambda point: abs(np.log(point[2] / point[1])))[-3:]
for what, predicted, clock in worst:
    print(f"  far off: {clock / predicted:.2f} x  {what}")

# %% [markdown]
# So: believe memory, collectives and "does not compile". Believe a ratio of two predictions of one program (with and
# without an option) more than a number. Believe milliseconds of a whole training step to about a third, and do not
# believe those of a program that only moves memory: they are about twice too long. [Predicted and
# published](../docs/published.md) has each row's source. Once you have a chip, `python -m tools.calibrate` measures how
# far it is off on yours.
