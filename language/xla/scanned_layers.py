"""All layers of a model as one loop in the graph: --scan_layers.

Shape suffixes: B batch, T time, D embedding width; L layers.
"""

import torch

from language.xla.loops import loop_in_graph
from language.xla.remat import backward_layer, forward_layer, on_device
from language.xla.saved_activations import SavedActivations


class ScannedLayers(torch.autograd.Function):
    """All layers as one loop in the graph, whose size is that of one layer.

    torch_xla's scan with gradients traces a layer by AOTAutograd, which decomposes einsum: its loops take 1.6 times the
    cycles (GPT-2 124M, v5e, libtpu 0.0.21's estimate). Here both loops are traced like the rest of the step. The
    backward loop runs a layer again and takes its gradients; unused results of that run are not in the program.
    Attention scores are recomputed: writing them into a stacked tensor takes longer.
    """

    @staticmethod
    def forward(ctx, run, execution, x_BTD, *stacked):
        """stacked: (L, ...) each."""
        ctx.run, ctx.execution, ctx.needed = run, execution, (True, *ctx.needs_input_grad[3:])

        def one_layer(carry, values):
            if not any(ctx.needs_input_grad):
                out, *routing = run(*carry, values)
                ctx.given = len(routing)
                return [out], routing
            (out, *routing), kept = forward_layer(run, execution, ctx.needed, *carry, *values)
            ctx.offloaded, ctx.given = kept.offloaded, len(routing)
            return [out], [*routing, *kept.values]

        (out,), found = loop_in_graph(one_layer, [x_BTD], list(stacked))
        ctx.save_for_backward(*stacked, *found[ctx.given :])
        return out, *found[: ctx.given]

    @staticmethod
    def backward(ctx, grad, *of_routing):
        tensors, count, given = ctx.saved_tensors, len(ctx.needed) - 1, ctx.given

        def one_layer(carry, rows):
            grads, rows = [*carry, *rows[:given]], rows[given:]
            kept = SavedActivations(ctx.execution, on_device(rows[count:], ctx.offloaded))
            grad_x, gradients = backward_layer(ctx.run, ctx.execution, ctx.needed, grads, rows[:count], kept)
            return [grad_x], gradients

        # A layer's gradients take the place of its weights, or both would lie in memory. Not where a loop around this
        # one reads the weights again: XLA stacks them before that loop, and would copy the stack in each of its turns.
        once = ctx.execution.turns == 1
        over = [given + i for i, is_needed in enumerate(ctx.needed[1:]) if is_needed and once]
        (grad,), found = loop_in_graph(one_layer, [grad], [*of_routing, *tensors], reverse=True, over=over)
        found = iter(found)
        return None, None, grad, *(next(found) if is_needed else None for is_needed in ctx.needed[1:])
