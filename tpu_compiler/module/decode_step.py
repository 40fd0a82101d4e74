"""--mode decode: one decoding step with a key-value cache, for causal models of Hugging Face transformers."""

import dataclasses

import torch
import torch_xla
import torch_xla.distributed.spmd as xs

from tpu_compiler.answer import ask_compiler, hand_over
from tpu_compiler.compile.cache import cache_of_environment
from tpu_compiler.compile.tracing import settle, trace_step
from tpu_compiler.module.arguments import model_flops, settings_of
from tpu_compiler.module.inputs import mark
from tpu_compiler.module.kv_cache import attend_in_groups, cache_axes, cache_of, decode_forward, tensors_of, with_cache
from tpu_compiler.module.probing import in_words, probe
from tpu_compiler.module.programs import Question
from tpu_utils.base.hardware import Topology


@torch_xla.compile(full_graph=True, name="decode_step")
def decode_step(model, cache, tokens, position):
    with torch.no_grad():
        return decode_forward(model, cache, tokens, position)[:, -1].argmax(-1)


def answer_decode(
    question: Question, level: str, topology: Topology, model: torch.nn.Module, inputs: dict, length: int, notes: list
) -> int:
    attend_in_groups(model, notes)
    cache = cache_of(model, length)
    _, counted = probe(question, lambda: decode_forward(model, cache, **inputs))  # creates the cache's tensors
    flops = model_flops(counted, question, notes)
    held, mesh = tensors_of(cache), xs.get_global_mesh()
    sizes = dict(zip(mesh.axis_names, mesh.mesh_shape, strict=True)) if mesh else {}
    axes = cache_axes(question, sizes, model, held[0].shape[1])
    for tensor in held if mesh else ():
        mark(mesh, tensor, axes, "the key-value cache")
    settle()
    owners = (torch.nn.ModuleList([model]), held)  # else the mark is lost: the cache once lay whole on each device
    traced = in_words(question, lambda: trace_step(decode_step, model, cache, **inputs, owners=owners))
    result, text = ask_compiler(
        traced,
        topology,
        examples=inputs["tokens"].shape[0],
        unit="tokens",
        model_flops=flops,
        settings=settings_of(question),
        cache=cache_of_environment(),
    )
    result = with_cache(result, model, held, axes, sizes, inputs["tokens"], length, flops)
    return hand_over(traced, dataclasses.replace(result, level=level, notes=[*notes, *result.notes]), text)
