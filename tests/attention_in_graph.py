"""Run by test_context.py: attention on XLA's CPU devices, which may share the sequences.

    PJRT_DEVICE=CPU CPU_NUM_DEVICES=1|4|8 python attention_in_graph.py whole documents window

jax interprets the Pallas kernels, so they are a part of the graph like any other operation. Prints how far flash
attention, and on several devices each way of context_attention.py with plain and with flash attention, is from plain
attention over the whole: the largest difference of the output and of each gradient, relative to the largest value. For
each case asked for: whole, grouped heads; documents, two in the first row, and wider heads; window, documents and a
window of 140 positions, the queries in two parts, as those are whose gradient does not fit on the chip at once.
"""

import re
import sys
from functools import partial

import numpy as np
import torch
import torch_xla
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from jax.experimental import pallas

from language.models.operations import causal_attention
from language.xla import flash_kernels
from language.xla.context_attention import context_parallel
from language.xla.flash_attention import flash_attention
from language.xla.loops import AXES, BATCH
from language.xla.shards import balanced

pallas.pallas_call = partial(pallas.pallas_call, interpret=True)
num_devices = xr.global_runtime_device_count()
ways = [("", causal_attention), ("", flash_attention)]
mesh = None
if num_devices > 1:
    xr.use_spmd()
    mesh = xs.Mesh(np.arange(num_devices), (1, num_devices // 4, 1, 4, 1), AXES)
    xs.set_global_mesh(mesh)
    ways += [(way, attention) for way in ("gather", "ulysses") for attention in (causal_attention, flash_attention)]
T, heads = 1024, (8, 4, 4, 8)  # pieces of 128, a block each
generator = torch.Generator().manual_seed(0)
starts = torch.zeros(2, T, dtype=torch.int32)
starts[0, 450:] = 450
cases = {"whole": (64, None, 0), "documents": (128, starts, 0), "window": (64, starts, 140)}
for K, documents, window in (cases[name] for name in sys.argv[1:]):
    flash_kernels.ON_CHIP = 512 * K // num_devices if window else 1 << 19
    values = [torch.randn(2, T, count, K, generator=generator) for count in heads]
    values[0] /= K**0.5  # the attentions expect q divided by sqrt(K)
    found = []
    for way, attention in ways:
        pieces = 8 if way == "gather" else 1
        order = balanced(torch.arange(T), pieces)
        *inputs, grad = (x[:, order].to(torch_xla.device()) for x in values)
        for x in (*inputs, grad) if mesh else ():
            xs.mark_sharding(x, mesh, (BATCH, "context" if way else None, "tensor", None))
        of_rows = documents if documents is None else documents[:, order].to(torch_xla.device())
        attend = context_parallel(attention, mesh, way) if way else attention
        out, _ = attend(*(x.requires_grad_() * 1 for x in inputs), of_rows, window=window)
        out.backward(grad * 1)  # what lies on the device is marked already
        program = torch_xla._XLAC._get_xla_tensors_hlo([out, *(x.grad for x in inputs)])
        assert not re.search(rf"\[[\d,]*{T},{T}\]", program), "scores of all positions and all others"
        found.append([x.cpu()[:, order.argsort()] for x in (out.detach(), *(x.grad for x in inputs))])
    for other in found[1:]:
        print(*(((x - plain).abs().max() / plain.abs().max()).item() for x, plain in zip(other, found[0], strict=True)))
