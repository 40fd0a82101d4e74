"""One NVIDIA GPU under the torch.compile backend. Imported where there is one.

A step is replayed as one CUDA graph, uploads go beside the steps, and calls that wait for the GPU are counted.
"""

import functools
import os
import warnings
from collections.abc import Callable

import torch

from tpu_utils.base.errors import first_line

INDUCTOR = {
    # of 64: the same kernels of a whole step of GPT-2 124M in a quarter less time (torch 2.11)
    "max_fusion_buffer_group_pairwise_attempts": 12,
    # numbers drawn in a step are those that eager PyTorch would draw
    "fallback_random": True,
    # SDPA without dropout gives its seed as a tensor () of the host; inductor takes it for one of the GPU. In a graph
    # with a backward pass the next () int64 would lie there, and Triton refuses it (torch 2.11)
    "allow_buffer_reuse": False,
    # sums over rows and columns in one kernel: gradients of stacked layer norms are not written (issue 193061 of
    # pytorch/pytorch). Those of GPT-2 124M were 17 times too long: the comparison of the first call found it
    "triton.mix_order_reduction": False,
    # a weight's gradient would wait for its optimizer: products of all layers, and what they read, until the end
    "reorder_for_locality": False,
    # a search that finds nothing: the same code of a whole step of GPT-2 124M without it (torch 2.13, which has it)
    "loop_reindexing_after_fusion": False,
}
"""Settings of inductor, on the CPU too. Those that a torch does not have are left out."""
WAITS = "called a synchronizing CUDA operation"
"""How torch's warning begins (c10/cuda/CUDAFunctions.cpp)."""


def prepare(deterministic: bool) -> None:
    """Settings of this process. deterministic: kernels give the same bits each time."""
    waits()  # counts from here
    torch.backends.cudnn.allow_tf32 = False  # float32 convolutions are float32, as products are
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else torch refuses matrix products
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # which would cost time


class WaitCount:
    """Calls that waited for the GPU, such as .item() and .cpu(). torch warns of each; here it is counted instead."""

    def __init__(self):
        self.count = 0
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype", UserWarning)
        warnings.filterwarnings("ignore", "TensorFloat32 tensor cores", UserWarning)  # --matmul_precision high
        torch.cuda.set_sync_debug_mode("warn")
        warnings.filterwarnings("always", WAITS, UserWarning)
        show = warnings.showwarning

        def count_or_show(message, *rest, **named):
            if str(message).startswith(WAITS):
                self.count += 1
            else:
                show(message, *rest, **named)

        warnings.showwarning = count_or_show


waits = functools.cache(WaitCount)


@functools.cache
def _upload_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()


def upload(tensors: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Copies on the device of tensors of the host, made while the steps before run. No call waits for them."""
    steps, uploads = torch.cuda.current_stream(device), _upload_stream()
    with torch.cuda.stream(uploads):
        sent = [tensor.pin_memory().to(device, non_blocking=True) for tensor in tensors]
    steps.wait_stream(uploads)
    for tensor in sent:
        tensor.record_stream(steps)  # its memory is not taken again before the step that reads it is done
    return sent


@functools.cache
def _memory_pool() -> tuple[int, int]:
    """One for all graphs: none needs after its replay what it computed on the way."""
    return torch.cuda.graph_pool_handle()


def record(run: Callable, inputs: list[torch.Tensor]) -> tuple[Callable[[], None], list]:
    """(what starts the kernels of run(*inputs) in one call, its outputs, which that call fills). Computes nothing.

    Raises RuntimeError where run does what cannot be recorded, such as a wait for the GPU.
    """
    graph, before = torch.cuda.CUDAGraph(), waits().count
    try:
        # thread_local: the loader's thread may take memory meanwhile
        with torch.cuda.graph(graph, pool=_memory_pool(), capture_error_mode="thread_local"):
            outputs = run(*inputs)
    finally:
        waits().count = before
    return graph.replay, outputs


class Replayed:
    """What a compiler made of one graph, with its kernels recorded once and then started by one call.

    inductor's own way (triton.cudagraphs) leaves out a graph that writes to its inputs, as a training step does to its
    weights ("mutated inputs (36 instances)" of a GPT-2 of one layer), unless each of them was marked before. Here no
    input is asked for: one that lies where it lay is read and written there, and one that has moved, as each batch
    does, is copied to a place of its own before the replay and back after it.
    """

    def __init__(self, run: Callable, record: Callable = record):
        self._run = run
        self._record: Callable | None = record
        """None: it cannot be recorded."""
        self._places: list[int] = []
        self._replay: Callable[[], None] | None = None
        self._outputs: list = []
        self._copies: dict[int, torch.Tensor] = {}
        """By number, of inputs that have moved."""

    def __call__(self, *inputs: torch.Tensor) -> list:
        if self._record is None:
            return self._run(*inputs)
        places = [tensor.data_ptr() for tensor in inputs]
        if not self._places:  # the first call makes and tunes kernels
            self._places = places
            return self._run(*inputs)
        moved = [i for i, place in enumerate(places) if place != self._places[i] and i not in self._copies]
        if moved or self._replay is None:
            self._copies |= {i: inputs[i].detach().clone() for i in moved}
            if self._replay:
                _memory_pool.cache_clear()  # a pool whose last graph has gone takes no other (create_or_incref_pool)
            self._places = places
            self._replay = None
            self._outputs = []  # or its memory would stay
            try:
                held = [self._copies.get(i, tensor) for i, tensor in enumerate(inputs)]
                self._replay, self._outputs = self._record(self._run, held)
            except RuntimeError as error:
                print(f"cuda graph none: kernels are started one by one, as {first_line(error)}", flush=True)
                self._record = None
                return self._run(*inputs)
        with torch.no_grad():
            for i, copy in self._copies.items():
                copy.copy_(inputs[i])
            self._replay()
            for i, copy in self._copies.items():
                inputs[i].copy_(copy)
        return [out.clone() if isinstance(out, torch.Tensor) else out for out in self._outputs]
