"""A mixture of experts: which experts each token chooses, and the product of each expert with the tokens it got.

All shapes are fixed, whatever the router decides. The rows of the tokens are put in the order of their experts, into
slots. Without a capacity nothing is dropped: an expert has as many blocks of slots as it needs, and there are blocks
enough for every choice. With a capacity each expert has so many slots in every sequence, and a token that finds none is
dropped. Rows move by gathers alone, in both passes: slots know their tokens, and tokens their slots.

Shape suffixes: B batch, T time, D width, X experts, J experts of a token, E width of an expert; N tokens of a device,
S slots.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from language.models.routers import arange_like, full_like_scalar, one_hot_mask, route
from language.models.routing import slots_of_capacity
from language.xla.loops import BATCH, from_local, loop_in_graph, sum_over, to_local
from tpu_utils.device import DEVICE_TYPE, IS_XLA, get_global_mesh, mark_sharding_with_gradients, register

GROUPS = ("data", "fsdp")  # devices whose tokens are routed together along "expert", where nothing is dropped
ALL = (*GROUPS, "context", "expert")


def exclusive_cumsum(values_GX) -> torch.Tensor:
    """Sums of the values of lower numbers along the last axis."""
    here = arange_like(values_GX.shape[-1], values_GX)
    return torch.where(here[None] < here[:, None], values_GX[..., None, :], 0.0).sum(-1)


def ranks(taken_GNX) -> torch.Tensor:
    """How many rows of an expert come before each, (G, N, X) float32, of 0 and 1.

    As products: a cumsum is slow on a TPU. Sums of 128 are exact in bfloat16, in which a TPU multiplies.
    """
    G, N, X = taken_GNX.shape
    chunks = F.pad(taken_GNX, (0, 0, 0, -N % 128)).view(G, -1, 128, X)
    within, sums = arange_like(128, chunks), chunks.sum(2)
    inside = torch.einsum("ij,gcjx->gcix", (within[None] < within[:, None]).float(), chunks)
    here = arange_like(chunks.shape[1], chunks)
    earlier = torch.einsum("ij,gjx->gix", (here[None] < here[:, None]).float(), sums)
    return (inside + earlier[:, :, None]).flatten(1, 2)[:, :N]


class Slots(NamedTuple):
    """Where the rows of a device lie, all int32; with several groups (sequences) one after the other."""

    token_S: torch.Tensor
    """The token of each slot; an empty one has any."""
    pair_S: torch.Tensor
    """Its place in (N, J)."""
    is_used_S: torch.Tensor
    slot_NJ: torch.Tensor
    is_kept_NJ: torch.Tensor
    """0: of an expert that lies elsewhere, or dropped."""
    of_experts: torch.Tensor
    """The expert of each block of slots; without blocks how many slots each expert has."""


def block_size(pairs: int, num_experts: int) -> int:
    """Slots of a block: a quarter of an even share, so that an eighth of the rows is padding; 512 at most."""
    return 1 << max(0, min(9, int(pairs / num_experts / 4).bit_length() - 1))


def in_order(experts_GNJ, num_experts: int):
    """(G, N J) int32: the pairs of a token and one of its experts in the order of experts, each as token * J2 + which,
    where J2 is the power of two from J on. By one sort of a number each. Raises ValueError above 32 bits."""
    (_, N, J), like = experts_GNJ.shape, experts_GNJ
    J2, N2 = 1 << (J - 1).bit_length(), 1 << (N - 1).bit_length()
    if (num_experts + 1) * N2 * J2 > 1 << 31 or N2 * J2 > 1 << 24:
        raise ValueError(
            f"{N} tokens of {J} experts on a device, and {num_experts} experts; expected fewer: 32-bit numbers"
        )
    place = arange_like(N, like)[:, None] * full_like_scalar(J2, like) + arange_like(J, like)
    ordered = (experts_GNJ * full_like_scalar(N2 * J2, like).int() + place.int()).flatten(1).sort(-1).values
    return ordered & full_like_scalar(N2 * J2 - 1, like).int()


def assign(experts_GNJ, num_experts: int, capacity: int, block: int) -> Slots:
    """experts: below num_experts, else they lie elsewhere. capacity: slots of an expert in each group. 0: they lie
    in blocks of this size, each of one expert; with a size of 0 one after the other."""
    (G, N, J), X, like = experts_GNJ.shape, num_experts, experts_GNJ
    chosen = one_hot_mask(experts_GNJ, X)  # (G, N, J, X)
    taken = chosen.float().sum(2)
    counts, rank, first = taken.sum(1), ranks(taken), exclusive_cumsum(taken.sum(1))
    group, pairs = arange_like(G, like)[:, None], N * min(J, X)
    # begins: first slot of each expert. start: first of the sorted pairs in each block; left: pairs from there on
    if capacity:
        begins = (arange_like(X, like) + group * full_like_scalar(X, like)) * full_like_scalar(capacity, like)
        start = first.view(-1)
        left = counts.view(-1)
        of_experts = counts.view(-1)
        block = capacity
    elif not block:  # G is 1
        begins = first
        start = full_like_scalar(0, like)
        left = counts.sum(1)
        of_experts = counts.view(-1)
        block = pairs
    else:  # G is 1
        size = full_like_scalar(block, like)
        blocks = ((counts + full_like_scalar(block - 1, like)) / size).floor()
        begins = exclusive_cumsum(blocks) * size
        number = arange_like((pairs + min(pairs, X) * (block - 1)) // block, like)
        of_experts = (exclusive_cumsum(blocks) + blocks <= number[:, None]).float().sum(-1)
        of_experts = torch.minimum(of_experts, full_like_scalar(X - 1, like))  # also for unused blocks at the end
        own = one_hot_mask(of_experts, X)
        here = number * size - torch.where(own, begins, 0.0).sum(-1)  # rows of the expert before the block
        start, left = torch.where(own, first, 0.0).sum(-1) + here, torch.where(own, counts, 0.0).sum(-1) - here
    within, J2 = arange_like(block, like), 1 << (J - 1).bit_length()
    at = torch.maximum(start[:, None] + within, full_like_scalar(0, like)).minimum(full_like_scalar(N * J - 1, like))
    at = at.view(G, -1) + group * full_like_scalar(N * J, like)
    place_GS = in_order(experts_GNJ, X).flatten().index_select(0, at.int().flatten()).view(G, -1)
    which = place_GS & full_like_scalar(J2 - 1, like).int()
    token = (place_GS - which).float() / full_like_scalar(J2, like) + group * full_like_scalar(N, like)
    slot = torch.where(chosen, (begins.view(-1, 1, X) + rank)[:, :, None], 0.0).sum(-1)
    has_slot = chosen & (rank < full_like_scalar(capacity, like))[:, :, None] if capacity else chosen
    kept = has_slot.float().sum(-1)
    found = token.flatten(), (token * full_like_scalar(J, like) + which).flatten(), (within < left[:, None]).flatten()
    found += (slot * kept).view(-1, J), kept.view(-1, J), of_experts
    return Slots(*(x.int() for x in found))


def on_each_device(function: Callable, arguments: list, results: list):
    """function's outputs. Each device of the global mesh runs it on its shards; without a mesh it is simply called.

    arguments: (tensor, its partition spec). results: (partition spec, mesh axes along which devices have summands).
    """
    mesh = get_global_mesh()
    if mesh is None:
        return function(*(tensor for tensor, _ in arguments))
    outputs, found = function(*(to_local(tensor, mesh, spec) for tensor, spec in arguments)), []
    for value, (spec, summands) in zip(outputs, results, strict=True):
        spec = (*spec, *(None,) * (value.dim() - len(spec)))
        in_parts = any(mesh.shape()[axis] > 1 for axis in summands)
        found.append(sum_over(summands, value, mesh, spec) if in_parts else from_local(value, mesh, spec))
    return found


class Layout(NamedTuple):
    """Over which mesh axes tokens and slots are sharded while rows move, and along which their sums are in parts."""

    tokens: tuple
    slots: tuple
    summed: tuple[str, ...]


GATHERED = Layout((GROUPS, "context"), (ALL,), ("expert",))
"""Nothing is dropped: devices along "expert" see all their tokens, and each serves its own experts."""
AT_HOME = Layout((BATCH, None), (BATCH,), ())
"""With a capacity: a device puts its own tokens into slots, which then change places along "expert"."""


def rows_of_slots(y_BTD, layout: Layout, token_S):
    """(S, D): the row of each slot's token."""

    def rows(y, token_S):
        return [y.flatten(0, 1).index_select(0, token_S)]

    arguments = [(y_BTD, (*layout.tokens, None)), (token_S, layout.slots)]
    return on_each_device(rows, arguments, [(layout.slots, ())])[0]


def sums_of_tokens(x_SD, T: int, layout: Layout, slots: Slots):
    """(B, T, D): of each token the sum of the rows in its slots."""

    def by_sequence(x_N):
        return x_N.unflatten(0, (-1, T // context_size(layout)))

    def sums(x, slot_NJ, kept_NJ):
        parts = []
        for slot_N, kept_N in zip(slot_NJ.t(), kept_NJ.bool().t(), strict=True):
            # in their last shape before they are float32: the cast would be a pass over memory of its own
            rows = by_sequence(x.index_select(0, slot_N)).float()
            # where: a slot that no kernel wrote may hold anything
            parts.append(torch.where(by_sequence(kept_N)[..., None], rows, 0.0))
        return [sum(parts).to(x.dtype)]

    arguments = [(x, (*layout.slots, None)) for x in (x_SD, slots.slot_NJ, slots.is_kept_NJ)]
    return on_each_device(sums, arguments, [(layout.tokens, layout.summed)])[0]


class NotSaved:
    """In place of a Function's context."""

    def save_for_backward(self, *tensors) -> None:
        pass


def apply(function: type[torch.autograd.Function], *arguments):
    """function.apply(). Without torch_xla its forward pass, which autograd differentiates: operations.py."""
    return function.apply(*arguments) if IS_XLA else function.forward(NotSaved(), *arguments)


class Rows(torch.autograd.Function):
    """(S, D): of y (B, T, D) the row of each slot's token."""

    @staticmethod
    def forward(ctx, y_BTD, layout: Layout, *slots):
        ctx.layout, ctx.T = layout, y_BTD.shape[1]
        ctx.save_for_backward(*slots)
        return rows_of_slots(y_BTD, layout, slots[0])

    @staticmethod
    def backward(ctx, grad_SD):
        slots = ctx.saved_tensors
        return sums_of_tokens(grad_SD, ctx.T, ctx.layout, Slots(*slots)), None, *(None for _ in slots)


class Combined(torch.autograd.Function):
    """(B, T, D): the sum of what a token's experts gave, y (S, D): Rows transposed. An empty slot's gradient is that of
    any token, and meets a weight of 0."""

    @staticmethod
    def forward(ctx, y_SD, T: int, layout: Layout, *slots):
        ctx.layout, ctx.count = layout, len(slots)
        ctx.save_for_backward(slots[0])
        return sums_of_tokens(y_SD, T, layout, Slots(*slots))

    @staticmethod
    def backward(ctx, grad_BTD):
        return rows_of_slots(grad_BTD, ctx.layout, *ctx.saved_tensors), None, None, *(None for _ in range(ctx.count))


class WeightsOfSlots(torch.autograd.Function):
    """(S, 1) float32: the weights (B, T, J) in the order of the slots, 0 of an empty one."""

    @staticmethod
    def forward(ctx, weights_BTJ, layout: Layout, *slots):
        ctx.layout, ctx.T = layout, weights_BTJ.shape[1]
        ctx.save_for_backward(*slots)

        def weights(weights, pair_S, used_S):
            return [(weights.flatten().index_select(0, pair_S) * used_S)[:, None]]

        arguments = [(weights_BTJ, (*layout.tokens, None)), *((x, layout.slots) for x in slots[1:3])]
        return on_each_device(weights, arguments, [(layout.slots, ())])[0]

    @staticmethod
    def backward(ctx, grad_S1):
        slots, layout = Slots(*ctx.saved_tensors), ctx.layout

        def gradients(grad, slot_NJ, kept_NJ):
            found = grad.flatten().index_select(0, slot_NJ.flatten()).view(kept_NJ.shape)
            found = torch.where(kept_NJ.bool(), found, 0.0)
            return [found.unflatten(0, (-1, ctx.T // context_size(layout)))]

        arguments = [(x, (*layout.slots, None)) for x in (grad_S1, slots.slot_NJ, slots.is_kept_NJ)]
        return on_each_device(gradients, arguments, [(layout.tokens, layout.summed)])[0], None, *(None for _ in slots)


def context_size(layout: Layout) -> int:
    mesh = get_global_mesh()
    return 1 if mesh is None or layout.tokens[1] is None else mesh.shape()["context"]


def on_this_device(value):
    """A value that each device makes for itself, inside of on_each_device()."""
    mesh = get_global_mesh()
    return value if mesh is None else to_local(value, mesh, (None,) * value.dim())


def in_loops(x) -> bool:
    """Whether XLA computes it, which has a loop of products in place of a batch of them."""
    return IS_XLA and x.device.type == DEVICE_TYPE


def grouped(rows_SI, weights_XOI, block_experts, transposed: bool, kernels: tuple[int, int] | None):
    """(S, O): each block of rows times the weights of its expert; transposed: of (S, O), (S, I). kernels: those of
    expert_kernels.py, by the share of name() there; block_experts are then the rows of each expert."""
    if kernels:
        from language.xla import expert_kernels  # only here: they are jax's, through torch_xla

        return expert_kernels.run(expert_kernels.product, (transposed, kernels), rows_SI, weights_XOI, block_experts)
    blocks = rows_SI.unflatten(0, (len(block_experts), -1))
    if not in_loops(rows_SI):
        own = weights_XOI[block_experts.long()]
        return (blocks @ (own if transposed else own.transpose(1, 2))).flatten(0, 1)

    def one_block(carry, values):
        rows, expert = values
        own = carry[0].index_select(0, expert)[0]
        return carry, [rows @ (own if transposed else own.t())]

    rows = [blocks, block_experts[:, None]]
    return loop_in_graph(one_block, [weights_XOI], rows, to_local=on_this_device)[1][0].flatten(0, 1)


def slice_added(sums, part, at):
    begin, part = [at, at.zeros_like(), at.zeros_like()], part.reshape([1, *part.shape().sizes])
    return sums.dynamic_update_slice(sums.dynamic_slice(begin, part.shape().sizes) + part, begin)


add_slice = register("add_slice", slice_added)
"""(sums (X, O, I), part (O, I), at ()): the sums with part added to one of X."""


def grouped_gradient(grad_SO, rows_SI, X: int, block_experts, kernels: tuple[int, int] | None):
    """Gradient of the weights, (X, O, I) float32: for each of X experts the sum of grad^T rows over its blocks."""
    if kernels:
        from language.xla import expert_kernels  # only here: they are jax's, through torch_xla

        return expert_kernels.run(expert_kernels.gradient, (False, kernels), grad_SO, rows_SI, block_experts)
    grads, rows = (x.unflatten(0, (len(block_experts), -1)) for x in (grad_SO, rows_SI))
    sums = on_this_device(torch.zeros(X, grads.shape[-1], rows.shape[-1], device=rows.device))
    if not in_loops(rows):
        return sums.index_add(0, block_experts, (grads.transpose(1, 2) @ rows).float())

    def one_block(carry, values):
        grad, row, expert = values
        return [add_slice(carry[0], (grad.t() @ row).float(), expert[0])], []

    return loop_in_graph(one_block, [sums], [grads, rows, block_experts[:, None]], to_local=on_this_device)[0][0]


def blocks_of_matrix(block_experts, n: int, count: int, kernels: tuple[int, int] | None):
    """block_experts as grouped() takes them for the n-th matrix, where each expert has `count`, one after the other."""
    if count == 1:
        return block_experts
    if kernels:  # the others have no rows
        return torch.stack(
            [block_experts if i == n else torch.zeros_like(block_experts) for i in range(count)], 1
        ).flatten()
    return (block_experts * full_like_scalar(count, block_experts) + arange_like(count, block_experts)[n]).int()


class GroupedProduct(torch.autograd.Function):
    """A tuple of (S, O): rows (S, I) times the weights of each slot's expert, (X, O, I), or N of them, (X, N, O, I).
    split: which of the two, "outputs" or "inputs", is sharded over the mesh axis "tensor". Each of the N is a product
    of its own: columns of a common one would be copied, forward and backward, and are the largest arrays of a layer."""

    @staticmethod
    def forward(ctx, rows_SI, weights, block_experts, split: str, kernels: tuple[int, int] | None):
        ctx.split, ctx.kernels, N = split, kernels, weights.shape[1:-2].numel()
        ctx.save_for_backward(rows_SI, weights, block_experts)

        def products(rows, weights, blocks):
            flat = weights.flatten(0, -3)
            return [grouped(rows, flat, blocks_of_matrix(blocks, n, N, kernels), False, kernels) for n in range(N)]

        of_rows, of_weights, of_outputs = specs(split, weights.dim())
        arguments = [(rows_SI, of_rows), (weights, of_weights), (block_experts, (ALL,))]
        results = [(of_outputs, ("tensor",) if split == "inputs" else ())] * N
        return tuple(on_each_device(products, arguments, results))

    @staticmethod
    def backward(ctx, *grads):
        rows_SI, weights, block_experts = ctx.saved_tensors
        of_rows, of_weights, of_outputs = specs(ctx.split, weights.dim())
        (needs_rows, needs_weights), N, kernels = ctx.needs_input_grad[:2], len(grads), ctx.kernels

        def gradients(rows, weights, blocks, *grads):
            flat, found = weights.flatten(0, -3), []
            if needs_rows:
                of_each = (blocks_of_matrix(blocks, n, N, kernels) for n in range(N))
                found.append(sum(grouped(g, flat, at, True, kernels) for g, at in zip(grads, of_each, strict=True)))
            if needs_weights:
                found += [grouped_gradient(grad, rows, len(weights), blocks, kernels) for grad in grads]
            return found

        arguments = [(rows_SI, of_rows), (weights, of_weights), (block_experts, (ALL,))]
        arguments += [(grad, of_outputs) for grad in grads]
        results = [(of_rows, ("tensor",) if ctx.split == "outputs" else ())] if needs_rows else []
        results += [((of_weights[0], *of_weights[-2:]), (*GROUPS, "context"))] * N if needs_weights else []
        found = on_each_device(gradients, arguments, results)
        of_rows = found.pop(0) if needs_rows else None
        found = [gradient.to(weights.dtype) for gradient in found]  # before they are stacked
        return of_rows, torch.stack(found, 1).view(weights.shape) if found else None, None, None, None


def specs(split: str, dims: int) -> tuple[tuple, tuple, tuple]:
    """Partition specs of rows (S, I), weights (X, ..., O, I) of so many dimensions, and outputs (S, O)."""
    outputs, inputs = ("tensor", None) if split == "outputs" else (None, "tensor")
    return (ALL, inputs), ("expert", *(None,) * (dims - 3), outputs, inputs), (ALL, outputs)


def local_experts(experts, first, count: int):
    """Numbers among the experts of a device, from `first` on; count for those of others."""
    own, end = experts - first, full_like_scalar(count, experts).int()
    return torch.where((own >= torch.zeros_like(own)) & (own < end), own, end)


def mixture(y_BTD, w, shape, activation: Callable, capacity: float = 0.0, kernels: bool = False):
    """(what the experts of each token give, (B, T, D); routing of route()). w: a layer's parameters by name. capacity:
    of an expert in each sequence, in even shares; 0: as much as it is given. kernels: those of
    expert_kernels.py, on a TPU."""
    weights, experts, routing = route(y_BTD, w["router_weight"], shape.experts_per_token, shape.normalised_experts)
    gate_up, out = w["expert_gate_up_weight"], w["expert_out_weight"]
    if capacity:
        num_slots = slots_of_capacity(shape, y_BTD.shape[1], capacity)
        return mixture_with_capacity(y_BTD, weights, experts, gate_up, out, num_slots, activation), routing
    mesh = get_global_mesh()
    share = 1 if mesh is None else mesh.shape()["expert"]
    X = shape.num_experts // share
    # the first expert of each device
    firsts = torch.arange(0, shape.num_experts, X, dtype=torch.float32, device=y_BTD.device).int()

    def slots_of(experts, first):
        experts = local_experts(experts, first, X) if share > 1 else experts
        experts = experts.view(1, -1, experts.shape[-1])
        pairs = experts.shape[1] * min(shape.experts_per_token, X)
        return assign(experts, X, 0, 0 if kernels else block_size(pairs, X))

    arguments = [(experts, (*GATHERED.tokens, None)), (firsts, ("expert",))]
    slots = on_each_device(slots_of, arguments, [((ALL,), ())] * len(Slots._fields))
    J = shape.experts_per_token
    used = (J, min(J, X) * share) if kernels else None
    rows = apply(Rows, y_BTD, GATHERED, *slots)
    gate, up = apply(GroupedProduct, rows, gate_up, slots[-1], "outputs", used)
    hidden = weighted(activation(gate) * up, apply(WeightsOfSlots, weights, GATHERED, *slots))
    (y_SD,) = apply(GroupedProduct, hidden, out, slots[-1], "inputs", used)
    return apply(Combined, y_SD, y_BTD.shape[1], GATHERED, *slots), routing


def weighted(hidden, weights):
    """Between the two products of an expert, of which the second is linear: the gradient of the weights then needs no
    output of the experts, which a layer would compute again."""
    return (hidden * weights).to(hidden.dtype)


def mixture_with_capacity(y_BTD, weights, experts, gate_up, out, C: int, activation: Callable):
    """(B, T, D). The slots of a sequence go to the devices of their experts and back: an all-to-all each."""
    X, mesh = len(gate_up), get_global_mesh()

    def placed(x_BXCD, *axes):
        return x_BXCD if mesh is None else mark_sharding_with_gradients(x_BXCD, mesh, (*axes, None, None))

    def slots_of(experts):
        return assign(experts, X, C, 0)

    slots = on_each_device(slots_of, [(experts, (BATCH, None, None))], [((BATCH,), ())] * len(Slots._fields))
    rows = apply(Rows, y_BTD, AT_HOME, *slots).view(len(y_BTD), X, C, -1)
    rows = placed(placed(rows, BATCH, None), GROUPS, "expert")
    weights = apply(WeightsOfSlots, weights, AT_HOME, *slots).view(len(y_BTD), X, C, 1)
    weights = placed(placed(weights, BATCH, None), GROUPS, "expert")
    gate, up = torch.einsum("bxcd,xged->bxcge", rows, gate_up).unbind(3)  # both at once: halves of it would be copies
    y = torch.einsum("bxce,xde->bxcd", weighted(activation(gate) * up, weights), out)
    y = placed(placed(y, GROUPS, "expert"), BATCH, None)
    return apply(Combined, y.flatten(0, 2), y_BTD.shape[1], AT_HOME, *slots)
