"""Run by test_operations.py: the ways to compute attention on XLA's CPU devices, on a mesh or without.

    PJRT_DEVICE=CPU CPU_NUM_DEVICES=1|4|8 python flash_in_graph.py

jax interprets the Pallas kernels, so they are a part of the graph like any other operation. Prints how far flash
attention, and attention over one slice of queries, are from plain attention: the largest difference of the output and
of each gradient, relative to the largest value. Three times: as many heads of keys as of queries in one document a row,
heads of 64; half as many, with two documents in the first row, heads of 128; and the same with a window of 140
positions, of rows whose gradient of q does not fit on the chip at once, so that its kernel runs for one part of the
queries after the other.
"""

from functools import partial

import numpy as np
import torch
import torch_xla
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from jax.experimental import pallas

from language.models.operations import causal_attention
from language.xla import flash_kernels
from language.xla.flash_attention import flash_attention
from language.xla.loops import AXES, BATCH

pallas.pallas_call = partial(pallas.pallas_call, interpret=True)
num_devices = xr.global_runtime_device_count()
if num_devices > 1:
    xr.use_spmd()
    sizes = (num_devices // 4, 2, 2)
    xs.set_global_mesh(xs.Mesh(np.arange(num_devices), (*sizes, 1, 1), AXES))
generator = torch.Generator().manual_seed(0)
starts = torch.zeros(2, 384, dtype=torch.int32)
starts[0, 150:] = 150
for T, K, query_heads, documents, window in (  # three blocks of 256, of 128, and of 128 in two parts
    (768, 64, 2, None, 0),
    (384, 128, 4, starts, 0),
    (384, 64, 4, starts, 140),
):
    flash_kernels.ON_CHIP = 256 * K if window else 1 << 19
    values = [torch.randn(2, T, heads, K, generator=generator) for heads in (query_heads, 2, 2, query_heads)]
    values[0] /= K**0.5  # the attentions expect q divided by sqrt(K)
    # where a window begins is as good as where a document does
    seen = documents.maximum(torch.arange(T, dtype=torch.int32) - window + 1) if window else documents
    found = []
    for attention, first in (
        (partial(causal_attention, chunks=4), seen),
        (partial(flash_attention, window=window), documents),
        (partial(causal_attention, chunks=1), seen),
    ):
        *inputs, grad = (x.to(torch_xla.device()) for x in values)
        for x in (*inputs, grad) if num_devices > 1 else ():
            xs.mark_sharding(x, xs.get_global_mesh(), (BATCH, None, "tensor", None))
        first = first if first is None else first.to(torch_xla.device())
        out, _ = attention(*(x.requires_grad_() for x in inputs), first)
        out.backward(grad)
        found.append([x.cpu() for x in (out.detach(), *(x.grad for x in inputs))])
    for other in found[1:]:
        print(*(((x - plain).abs().max() / plain.abs().max()).item() for x, plain in zip(other, found[0], strict=True)))
