"""All layers of a model as one loop in the graph: --scan_layers.

Shape suffixes: B batch, T time, D embedding width; L layers.
"""

import torch

from language.xla.loops import loop_in_graph
from language.xla.remat import backward_layer, forward_layer, on_device
from language.xla.saved_activations import SavedActivations


def last_first(layers: list[dict]) -> tuple[list[dict], list[torch.Tensor]]:
    """(parameters of each layer by name, those of all layers stacked), layers and names from the last to the first.

    PyTorch/XLA numbers the inputs of a program so that they then have the order of its outputs. The compiler writes the
    n-th output of a size over the n-th input of that size that may be overwritten, and copies it if it is read later.
    """
    layers = [dict(reversed(w.items())) for w in reversed(layers)]
    return layers, [torch.stack([w[name] for w in layers]) for name in layers[0]]


class ScannedLayers(torch.autograd.Function):
    """All layers as one loop in the graph, whose size is that of one layer.

    torch_xla's scan with gradients traces a layer by AOTAutograd, which decomposes einsum: its loops take 1.6 times the
    cycles (GPT-2 124M, v5e, libtpu 0.0.21's estimate). Here both loops are traced like the rest of the step. The
    backward loop runs a layer again and takes its gradients; unused results of that run are not in the program.
    Attention scores are recomputed: writing them into a stacked tensor takes longer.
    """

    @staticmethod
    def forward(ctx, run, execution, x_BTD, *stacked):
        """stacked: (L, ...) each, the last layer first."""
        ctx.run, ctx.execution, ctx.needed = run, execution, (True, *ctx.needs_input_grad[3:])

        def one_layer(carry, values):
            if not any(ctx.needs_input_grad):
                out, *routing = run(*carry, values)
                ctx.given = len(routing)
                return [out], routing
            (out, *routing), kept = forward_layer(run, execution, ctx.needed, *carry, *values)
            ctx.offloaded, ctx.given = kept.offloaded, len(routing)
            return [out], [*routing, *kept.values]

        (out,), found = loop_in_graph(one_layer, [x_BTD], list(stacked), reverse=True)
        ctx.save_for_backward(*stacked, *found[ctx.given :])
        return out, *(routing.flip(0) for routing in found[: ctx.given])

    @staticmethod
    def backward(ctx, grad, *of_routing):
        tensors, count, given = ctx.saved_tensors, len(ctx.needed) - 1, ctx.given

        def one_layer(carry, rows):
            grads, rows = [*carry, *rows[:given]], rows[given:]
            kept = SavedActivations(ctx.execution, on_device(rows[count:], ctx.offloaded))
            grad_x, gradients = backward_layer(ctx.run, ctx.execution, ctx.needed, grads, rows[:count], kept)
            return [grad_x], gradients

        of_routing = [grad.flip(0) for grad in of_routing]
        (grad,), found = loop_in_graph(one_layer, [grad], [*of_routing, *tensors])
        found = iter(found)
        return None, None, grad, *(next(found) if is_needed else None for is_needed in ctx.needed[1:])
