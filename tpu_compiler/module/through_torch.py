"""--through torch: a module's step as ATen operations, lowered to StableHLO by torchax, without torch_xla.

make_fx records the forward pass, autograd's backward pass and the optimizer's update, functionalized and decomposed.
torchax has a JAX function for each ATen operation, and jax lowers the whole to one program. The child process of
modules.compile_module; it runs under any torch from 2.9 on. Every private interface that this needs is in this file.
"""

import contextlib
import dataclasses
import functools
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # Python puts a script's own folder there
    sys.modules["torch_xla"] = None  # as if it were not installed: transformers would import it

import torch
from torch._decomp import core_aten_decompositions
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.flop_counter import FlopCounterMode

from tpu_utils.options.virtual_slice import quiet_libtpu

if __name__ == "__main__":
    quiet_libtpu()  # before jax: it must not look for a TPU
# torchax 0.0.13 names overloads of named tensors in its tables, and torch 2.13 has none: its import would fail
NAMED = """all.dimname all.dimname_out index_add.dimname index_copy.dimname index_copy_.dimname
    index_fill.Dimname_Scalar
    index_fill.Dimname_Tensor index_fill_.Dimname_Scalar index_fill_.Dimname_Tensor norm.names_ScalarOpt_dim
    norm.names_ScalarOpt_dim_dtype norm.names_dtype_out norm.names_out prod.dim_Dimname std.correction_names
    std.correction_names_out std.names_dim std.names_out std_mean.correction_names std_mean.names_dim unbind.Dimname"""
for packet, overload in (name.split(".") for name in NAMED.split()):
    if overload not in getattr(torch.ops.aten, packet).overloads():
        setattr(getattr(torch.ops.aten, packet), overload, f"{packet}.{overload}")

import jax
from torchax.decompositions import DECOMPOSITIONS
from torchax.export import JaxInterpreter
from torchax.ops import jaten  # noqa: F401  it fills all_aten_ops
from torchax.ops.mappings import t2j_dtype
from torchax.ops.ops_registry import all_aten_ops

from tpu_compiler.answer import ask_compiler, hand_over
from tpu_compiler.compile.cache import cache_of_environment
from tpu_compiler.compile.traced import Traced
from tpu_compiler.module import kv_cache
from tpu_compiler.module.arguments import meta_inputs, model_flops, prepare, settings_of, sizes_of
from tpu_compiler.module.axes import Axes, axes_of_all, batch_axes, check_axes, mesh_sizes
from tpu_compiler.module.loss import choose_loss
from tpu_compiler.module.model import build, place_of, step_aside
from tpu_compiler.module.programs import Question, question_of_child
from tpu_utils.base.errors import InputError, first_line, run_script
from tpu_utils.base.hardware import Topology, parse_topology
from tpu_utils.options.compiler_flags import set_flags, torch_xla_flags
from tpu_utils.options.train_config import TrainConfig
from tpu_utils.step.optim import make_optimizer, step_optimizer

ATEN = torch.ops.aten


def main() -> int:
    question, level, compile_for = question_of_child()
    step_aside()
    topology = parse_topology(compile_for)
    set_flags(torch_xla_flags(topology.generation))  # both ways ask with the same options
    return answer(question, level, topology)


def answer(question: Question, level: str, topology: Topology) -> int:
    notes = [f"through torch {torch.__version__}, torchax {version('torchax')}, jax {jax.__version__}: no torch_xla"]
    model = build(question, notes)
    args, kwargs = meta_inputs(question, model)
    mesh = mesh_sizes(question, topology)
    of_cache = {}
    args, kwargs, length = prepare(question, level, model, args, kwargs, notes)
    if level == "balanced" and question.mode == "train":
        notes.append('bfloat16: torch.autocast("cpu"), float32 weights; its list keeps fewer operations in float32')
    sizes = sizes_of(question, args, kwargs)
    start = time.monotonic()
    if question.mode == "decode":
        of_cache = in_words(question, lambda: become_decoding(question, model, kwargs, length, mesh, notes))
    graph, inputs, roles, axes, flops = in_words(
        question, lambda: record(question, level, model, args, kwargs, mesh, notes, of_cache)
    )
    hlo, seed = lower(question, graph, inputs, mesh, axes)
    roles += ("inputs",) * seed
    is_cache = [name in of_cache for name in (*dict(model.named_parameters()), *dict(model.named_buffers()))]
    is_cache += [False] * (len(roles) - len(is_cache))
    traced = Traced(
        hlo=hlo,
        roles=roles,
        donated=tuple(c or (question.mode == "train" and r != "inputs") for c, r in zip(is_cache, roles, strict=True)),
        shardings=("",) * len(roles),  # in the program already
        partitions=topology.num_devices,
        seconds=time.monotonic() - start,
    )
    sizes |= dict(model_flops=model_flops(flops, question, model, notes), settings=settings_of(question))
    result, text = ask_compiler(traced, topology, cache=cache_of_environment(), **sizes)
    if question.mode == "decode":
        held, over = [model.get_buffer(name) for name in of_cache], next(iter(of_cache.values()))
        result = kv_cache.with_cache(result, model, held, over, mesh, kwargs["tokens"], length, sizes["model_flops"])
    return hand_over(traced, dataclasses.replace(result, level=level, notes=[*notes, *result.notes]), text)


def become_decoding(
    question: Question, model: torch.nn.Module, inputs: dict, length: int, mesh: dict, notes: list
) -> dict[str, Axes]:
    """Make the model's forward its decoding step, (tokens, position) -> tokens, whose cache it has as buffers. Returns
    the axes of each of them, by its name."""
    kv_cache.attend_in_groups(model, notes)
    cache = kv_cache.cache_of(model, length)
    forward = model.forward
    tensors = {}
    with FakeTensorMode():  # autocast, which models turn off inside, does not know the device of tensors without memory
        named = (*model.named_parameters(), *model.named_buffers())
        state = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in named}
        given = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in inputs.items()}
        called = functools.partial(torch.func.functional_call, model, state, ())
        kv_cache.decode_forward(lambda **keywords: called(keywords), cache, **given)  # creates the cache's tensors
    for number, tensor in enumerate(kv_cache.tensors_of(cache)):
        tensors[f"cache_{number}"] = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        model.register_buffer(f"cache_{number}", tensors[f"cache_{number}"], persistent=False)

    def step(tokens, position):
        for number, layer in enumerate(cache.layers):
            layer.keys, layer.values = (model.get_buffer(f"cache_{2 * number + i}") for i in range(2))
        return kv_cache.decode_forward(forward, cache, tokens, position)[:, -1].argmax(-1)

    model.forward = step
    axes = kv_cache.cache_axes(question, mesh, model, tensors["cache_0"].shape[1])
    if mesh:
        check_axes(mesh, tensors["cache_0"].shape, axes, "the key-value cache")
    return dict.fromkeys(tensors, axes)


def in_words(question: Question, run: Callable):
    """run(), whose error becomes an InputError about the module."""
    try:
        return run()
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"{question.target} cannot be exported: {type(error).__name__}: {first_line(error)} {place_of(error)}"
        ) from error


def record(
    question: Question,
    level: str,
    model: torch.nn.Module,
    args: list,
    kwargs: dict,
    mesh: dict,
    notes: list,
    of_cache: dict[str, Axes] | None = None,
) -> tuple:
    """(graph of ATen operations, its inputs, the role of each, the axes of the mesh over which each is sharded, FLOPs
    of the forward pass). Nothing has memory. of_cache: of become_decoding()."""
    mode, of_cache = FakeTensorMode(), of_cache or {}
    of_inputs, of_parameters = axes_of_all(question, mesh, model, args, kwargs, notes)

    def fake(tensor):
        with mode:
            return torch.empty(tensor.shape, dtype=tensor.dtype) if isinstance(tensor, torch.Tensor) else tensor

    names, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    config = TrainConfig(optimizer=question.optimizer, compile_for=question.compile_for)
    trainable = [name for name, p in names.items() if p.requires_grad]
    if question.mode == "train" and not trainable:
        raise InputError(f"{question.target} has no parameter to train; expected --mode forward")
    forward = functional_forward(model, cast=level == "balanced" and question.mode == "train")
    state = [fake(p) for p in names.values()], [fake(b) for b in buffers.values()]
    given = [fake(a) for a in args], {name: fake(a) for name, a in kwargs.items()}
    counting = {ATEN._scaled_dot_product_flash_attention_for_cpu: attention_flops}
    with mode, torch.no_grad(), FlopCounterMode(display=False, custom_mapping=counting) as counter:
        output = forward(*state, *given)

    def evaluate(weights, held, moments, args, kwargs, rate, targets):
        with torch.no_grad():
            found = [leaf for leaf in tree_leaves(forward(weights, held, args, kwargs)) if torch.is_tensor(leaf)]
        return found + [tensor for name, tensor in zip(buffers, held, strict=True) if name in of_cache]

    step, targets = evaluate, None
    moments, of_moments = [], []
    if question.mode == "train":
        with mode:
            loss, targets = choose_loss(question, output, kwargs, "cpu", notes)
            template = make_optimizer(config, [state[0][list(names).index(name)] for name in trainable])
        moments = [value for values in template.state.values() for value in values.values()]
        for name, values in zip(trainable, template.state.values(), strict=True):
            of_moments += [of_parameters[name] if v.shape == names[name].shape else {} for v in values.values()]
        step = training_step(forward, list(names.values()), loss, config, template)
    rate = fake(torch.empty(1, device="meta"))
    graph, inputs = functional(mode, step, (*state, moments, *given, rate, targets))
    roles = ("parameters",) * len(names)
    roles += tuple("inputs" if name in of_cache else "parameters" for name in buffers)
    roles += ("optimizer_state",) * len(moments)
    roles += ("inputs",) * (len(inputs) - len(roles))
    of_buffers = [of_cache.get(name, {}) for name in buffers]
    axes = [*of_parameters.values(), *of_buffers, *of_moments, *of_inputs.values(), {}]  # the last: the rate
    if torch.is_tensor(targets):
        axes.append(batch_axes(mesh))
        check_axes(mesh, targets.shape, axes[-1], "the targets")
    return graph, inputs, roles, axes, counter.get_total_flops()


def functional_forward(model: torch.nn.Module, cast: bool) -> Callable:
    """forward(parameters, buffers, args, kwargs) -> output. cast: by autocast to bfloat16."""
    own = [*model.parameters(), *model.buffers()]
    # each module once: functional_call puts a wrong tensor back into one with two names, such as T5's embedding
    holders = {
        f"{name}.{inner}".lstrip("."): id(tensor)
        for name, module in model.named_modules()
        for inner, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    }

    def forward(weights: list, held: list, args: list, kwargs: dict):
        values = dict(zip(map(id, own), (*weights, *held), strict=True))
        tensors = {name: values[tensor] for name, tensor in holders.items()}
        with bias_last(), torch.autocast("cpu", torch.bfloat16, enabled=cast):
            return torch.func.functional_call(model, tensors, tuple(args), kwargs, tie_weights=False)

    return forward


def training_step(
    forward: Callable, parameters: list, loss: Callable, config: TrainConfig, template: torch.optim.Optimizer
) -> Callable:
    """The step -> (loss, parameters, buffers, moments). template: an optimizer whose state has the names of moments."""

    def train(weights, held, moments, args, kwargs, rate, targets):
        weights = [w.detach().requires_grad_(p.requires_grad) for w, p in zip(weights, parameters, strict=True)]
        chosen = [weight for weight in weights if weight.requires_grad]
        value = loss(forward(weights, held, args, kwargs), targets)
        for weight, gradient in zip(chosen, torch.autograd.grad(value, chosen, allow_unused=True), strict=True):
            weight.grad = gradient
        optimizer = make_optimizer(config, chosen)
        states = iter(moments)
        for weight, old in zip(chosen, template.state.values(), strict=True):
            optimizer.state[weight] = {name: next(states) for name in old}
        step_optimizer(optimizer, rate, None, "stop")
        return value.detach(), [w.detach() for w in weights], held, moments

    return train


@contextlib.contextmanager
def bias_last() -> Iterator[None]:
    """Linear layers add their bias after the result has the input's dimensions again, as torch does for torch_xla: with
    the bias between them the compiler does not make product and reshape one, and copies the result."""
    real = torch.nn.functional.linear

    def linear(x, weight, bias=None):
        if bias is None or x.dim() < 3:
            return real(x, weight, bias)
        y = real(x.flatten(0, -2), weight).unflatten(0, x.shape[:-1])
        return y + bias.to(y.dtype)

    torch.nn.functional.linear = linear
    try:
        yield
    finally:
        torch.nn.functional.linear = real


def attention_flops(query, key, value, *_, **__) -> int:
    """From three shapes. torch's counter does not know the fused attention of the CPU: ViT's had none."""
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def functional(mode: FakeTensorMode, step: Callable, arguments: tuple) -> tuple:
    """(the step as a graph that changes no input in place, the tensors that it takes)."""
    leaves, layout = tree_flatten(arguments)
    places = [place for place, leaf in enumerate(leaves) if torch.is_tensor(leaf)]
    decompositions = core_aten_decompositions() | DECOMPOSITIONS
    decompositions = {op: how for op, how in decompositions.items() if op not in BERNOULLI}  # torchax's calls itself

    def flat(*tensors):
        values = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            values[place] = tensor
        return tree_leaves(step(*tree_unflatten(values, layout)))

    inputs = [leaves[place] for place in places]
    with mode:  # twice: functionalize refuses requires_grad_(), and once recorded there is none
        recorded = make_fx(flat, decomposition_table=decompositions)(*inputs)
        graph = make_fx(torch.func.functionalize(recorded, remove="mutations_and_views"), decompositions)(*inputs)
    for node in reversed(graph.graph.nodes):
        # copied back into an input, which is an output already; torch 2.13 also records a mark for its profiler
        written_back = node.target is ATEN.copy_.default and not node.users
        if written_back or getattr(node.target, "namespace", "") == "profiler":
            graph.graph.erase_node(node)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph, inputs


def convolution_backward(gradient, x, weight, bias_sizes, *how):
    """Gradients of x, weight and bias; None where the mask, the last of how, says that one is not wanted."""
    *how, mask = how
    convolution = all_aten_ops[ATEN.convolution].func
    _, backward = jax.vjp(lambda x, weight: convolution(x, weight, None, *how), x, weight)
    bias = gradient.sum((0, *range(2, gradient.ndim)))
    return tuple(value if wanted else None for value, wanted in zip((*backward(gradient), bias), mask, strict=True))


def max_pool_backward(gradient, x, kernel, stride, padding, dilation, ceil_mode, indices):
    pool = all_aten_ops[ATEN.max_pool2d_with_indices].func
    _, backward = jax.vjp(lambda x: pool(x, kernel, stride, padding, dilation, ceil_mode)[0], x)
    return backward(gradient)[0]


def var_mean(x, axes=None, correction=1, keepdim=False):
    """By mean and mean of squares, which are one pass. torchax's variance is a second one, for which the compiler
    computes the convolution that makes x again."""
    axes, wide = tuple(axes or range(x.ndim)), x.astype("float32")
    count = math.prod(x.shape[axis] for axis in axes)
    mean, squares = (values.mean(axes, keepdims=keepdim) for values in (wide, wide * wide))
    variance = (squares - mean * mean) * (count / (count - correction))
    return variance.astype(x.dtype), mean.astype(x.dtype)


def layer_norm(x, shape, weight, bias, eps):
    """In float32, as torch does."""
    wide = x.astype("float32")
    variance, mean = var_mean(wide, range(x.ndim - len(shape), x.ndim), 0, True)
    scale = jax.lax.rsqrt(variance + eps)
    y = (wide - mean) * scale
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias).astype(x.dtype), mean, scale


def gelu(x, approximate="none"):
    return jax.nn.gelu(x) if approximate == "tanh" else x * 0.5 * (1 + jax.lax.erf(x * 0.5**0.5))


def embedding(weight, places, *_):
    return weight.at[places].get(mode="promise_in_bounds")


def one_a_row(x, axis, index):
    """Where index, one place a row, points to in x. None if it is another kind of index."""
    if (*x.shape[:axis], 1, *x.shape[axis + 1 :]) != index.shape:
        return None
    return jax.lax.broadcasted_iota(index.dtype, x.shape, axis) == index


def gather(x, axis, index, sparse_grad=False):
    chosen = one_a_row(x, axis % x.ndim, index)
    if chosen is None:
        return all_aten_ops[ATEN.gather].func(x, axis, index)
    return jax.numpy.where(chosen, x, 0).sum(axis, keepdims=True)


def scatter(x, axis, index, value):
    chosen = one_a_row(x, axis % x.ndim, index)
    if chosen is None:
        return all_aten_ops[ATEN.scatter.value].func(x, axis, index, value)
    return jax.numpy.where(chosen, value, x)


OURS = {
    ATEN.convolution_backward.default: convolution_backward,
    ATEN.max_pool2d_with_indices_backward.default: max_pool_backward,
    ATEN.select_copy.int: lambda x, axis, index: jax.lax.index_in_dim(x, index, axis, keepdims=False),
    ATEN.var_mean.correction: var_mean,
    ATEN.native_layer_norm.default: layer_norm,
    ATEN.gelu.default: gelu,
    ATEN.embedding.default: embedding,
    ATEN.gather.default: gather,
    ATEN.scatter.value: scatter,
}
"""Gradients that torchax has no function for, because it leaves gradients to jax: so do these. And where torchax's
function makes a slower program: its select_copy is a gather, which became strided copies of q, k and v; its gelu is an
erfc, two branches where erf is one; its embedding makes NaN of what is out of bounds. Cross entropy is a gather from
all logits, and its gradient a scatter into as many zeros: torch_xla compares each place with the target, and so do
these."""


class Lowering(JaxInterpreter):
    """torchax's interpreter, and what it lacks: gradients, arrays of the graph's own, and random numbers made on the
    device from a seed."""

    key = None

    def get_attr(self, target, args, kwargs):
        value = super().get_attr(target, args, kwargs)
        return jax.numpy.asarray(value.tolist(), t2j_dtype(value.dtype)) if torch.is_tensor(value) else value

    def call_function(self, target, args, kwargs):
        if target in OURS:
            return OURS[target](*args, **kwargs)
        if target in RANDOM:
            shape, dtype = getattr(args[0], "shape", args[0]), getattr(args[0], "dtype", None)
            self.key, bits = jax.lax.rng_bit_generator(self.key, tuple(shape))  # jax.random would make a loop
            uniform = (bits >> 8).astype("float32") * 2.0**-24
            values = uniform < args[1] if target is ATEN.bernoulli.p else uniform
            return values.astype(t2j_dtype(kwargs["dtype"]) if kwargs.get("dtype") else dtype or "float32")
        return super().call_function(target, args, kwargs)


RANDOM = (ATEN.rand.default, ATEN.rand_like.default, ATEN.bernoulli.p)
BERNOULLI = [getattr(op, name) for op in (ATEN.bernoulli, ATEN.bernoulli_) for name in op.overloads()]


def lower(
    question: Question, graph: torch.fx.GraphModule, inputs: list, mesh: dict, axes: list[Axes]
) -> tuple[bytes, bool]:
    """(serialized HloModuleProto, whether its last input is a seed). Raises InputError for an operation not lowered."""
    devices = jax.sharding.AbstractMesh(tuple(mesh.values()), tuple(mesh))

    def placed(tensor: torch.Tensor, axes: Axes) -> jax.sharding.NamedSharding:
        spec = jax.sharding.PartitionSpec(*(axes.get(dimension) for dimension in range(tensor.dim())))
        return jax.sharding.NamedSharding(devices, spec)

    shardings = [placed(tensor, of) for tensor, of in zip(inputs, axes, strict=True)] if mesh else []
    called = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    seed = any(target in RANDOM for target in called)
    for target in called:
        known = target in RANDOM or target in OURS or not isinstance(target, torch._ops.OpOverload)
        if not known and target not in all_aten_ops and target.overloadpacket not in all_aten_ops:
            raise InputError(f"{question.target} uses {target}, for which torchax has no function; ask by torch_xla")

    def run(*arrays):
        lowering = Lowering(graph)
        if seed:
            *arrays, key = arrays
            lowering.key = key
        results = list(lowering.run(*arrays))
        if mesh and question.mode == "train":
            # new weights and moments lie where the old ones do, whose memory they take
            results[1:] = map(jax.lax.with_sharding_constraint, results[1:], shardings)
        return results

    warnings.filterwarnings("ignore", "Explicitly requested dtype int64")  # 32 bits, which are enough for places
    shapes = [jax.ShapeDtypeStruct(tuple(t.shape), t2j_dtype(t.dtype)) for t in inputs]
    shapes += [jax.ShapeDtypeStruct((4,), "uint32")] * seed
    jax.config.update("jax_use_shardy_partitioner", False)  # the compiler is asked with GSPMD's annotations
    replicated = [jax.sharding.NamedSharding(devices, jax.sharding.PartitionSpec())] * seed
    jitted = jax.jit(run, keep_unused=True, in_shardings=(*shardings, *replicated) if mesh else None)
    lowered = in_words(question, lambda: jitted.trace(*shapes).lower(lowering_platforms=("tpu",)))
    return lowered.compiler_ir("hlo").as_serialized_hlo_module_proto(), seed


if __name__ == "__main__":
    sys.exit(run_script(main))
