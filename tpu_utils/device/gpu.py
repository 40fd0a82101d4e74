"""One NVIDIA GPU under the torch.compile backend. Imported where there is one.

A step is replayed as one CUDA graph, uploads go beside the steps, and calls that wait for the GPU are counted.
"""

import functools
import warnings
from collections.abc import Callable

import torch

from tpu_utils.base.errors import first_line

WAITS = "called a synchronizing CUDA operation"
"""How torch's warning begins (c10/cuda/CUDAFunctions.cpp)."""


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


class Replayed:
    """What a compiler made of one graph, with its kernels recorded once and then started by one call.

    inductor's own way (triton.cudagraphs) leaves out a graph that writes to its inputs, as a training step does to its
    weights, unless each of them was marked before. Here no input is asked for: one that lies where it lay is read and
    written there, and one that has moved, as each batch does, is copied to a place of its own before the replay and
    back after it.
    """

    def __init__(self, run: Callable):
        self._run, self._can_record = run, True
        self._places: list[int] = []
        self._graph: torch.cuda.CUDAGraph | None = None
        self._copies: dict[int, torch.Tensor] = {}
        """By number, of inputs that have moved."""

    def __call__(self, *inputs):
        if not self._can_record or not all(isinstance(value, torch.Tensor) and value.is_cuda for value in inputs):
            return self._run(*inputs)
        places = [tensor.data_ptr() for tensor in inputs]
        if not self._places:  # the first call makes and tunes kernels
            self._places = places
            return self._run(*inputs)
        moved = [i for i, place in enumerate(places) if place != self._places[i] and i not in self._copies]
        if moved or self._graph is None:
            self._copies |= {i: inputs[i].detach().clone() for i in moved}
            self._places = places
            if not self._record([self._copies.get(i, tensor) for i, tensor in enumerate(inputs)]):
                return self._run(*inputs)
        with torch.no_grad():
            for i, copy in self._copies.items():
                copy.copy_(inputs[i])
            self._graph.replay()
            for i, copy in self._copies.items():
                inputs[i].copy_(copy)
        return [out.clone() if isinstance(out, torch.Tensor) else out for out in self._outputs]

    def _record(self, inputs: list[torch.Tensor]) -> bool:
        """Nothing is computed. False where the graph does what cannot be recorded: it then runs kernel by kernel."""
        self._graph, before = None, waits().count
        graph = torch.cuda.CUDAGraph()
        try:
            # thread_local: the loader's thread may take memory meanwhile
            with torch.cuda.graph(graph, pool=_memory_pool(), capture_error_mode="thread_local"):
                self._outputs = self._run(*inputs)
        except RuntimeError as error:
            print(f"cuda graph not recorded, kernels are started one by one: {first_line(error)}", flush=True)
            self._can_record = False
            return False
        finally:
            waits().count = before
        self._graph = graph
        return True
