"""The training step of a program of vlasenkoalexey's tpu_performance_autoresearch_wiki, traced for 8 TPUs and not run.

Run:     python benchmarks/wiki_step.py FOLDER FILE --batch_size=4 --seqlen=8192 --use_splash=True ...
         Needs requirements-dev.txt.
Writes:  FILE, StableHLO for aot_tpu.py --hlo FILE --topology v6e-8.

FOLDER has train.py and model/, which are run as they stand, with the options of train.py, up to its first step: until
there its parameters have shapes and shardings, and no values. Two things differ. Where it asks for tokamax's kernels
of attention it gets jax's, and for tokamax's loss in blocks one with the same blocks, because tokamax needs a later jax
than libtpu 0.0.21 goes with.
"""

import ast
import contextlib
import os
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
os.environ.pop("USE_TOKAMAX_SPLASH", None)

import jax
import jax.ad_checkpoint  # the programs take it from jax
import jax.numpy as jnp
import optax
import transformers
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

ROWS, COLUMNS = 1024, 2048
"""Tokens and words of a block of the loss, as their compiled programs had them."""
CONFIGS = {
    "Qwen/Qwen3-8B": transformers.Qwen3Config(intermediate_size=12288, num_hidden_layers=36, num_key_value_heads=8),
    "meta-llama/Meta-Llama-3-8B": transformers.LlamaConfig(
        vocab_size=128256, intermediate_size=14336, num_key_value_heads=8
    ),
}
"""What else these models have is what the classes begin with, but for numbers that no plan reads."""


class Traced(Exception):
    """Its text is the traced step; main() went no further."""


def without_values(model: type[nnx.Module], rotary: type[nnx.Module]) -> Any:
    """A constructor of the model whose parameters have shapes alone. The table of angles is no parameter: it stays."""

    def construct(config: Any, *, rngs: nnx.Rngs, **options: Any) -> nnx.Module:
        made = nnx.eval_shape(lambda: model(config, rngs=nnx.Rngs(0), **options))
        made.model.rotary_emb = rotary(config)
        return made

    return construct


def shape_on(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def place(leaf: Any, sharding: Any = None) -> Any:
    """jax.device_put of what may have no value."""
    return shape_on(leaf, sharding) if isinstance(leaf, jax.ShapeDtypeStruct) else device_put(leaf, sharding)


def adamw(*arguments: Any, **options: Any) -> optax.GradientTransformation:
    """optax.adamw, whose moments lie where their parameters do, and have no values either."""
    made = optimizer(*arguments, **options)

    def init(parameters: Any) -> Any:
        lies = {jax.tree_util.keystr(path): leaf.sharding for path, leaf in with_paths(parameters)}
        everywhere = NamedSharding(next(s.mesh for s in lies.values() if isinstance(s, NamedSharding)), PartitionSpec())

        def placed(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
            names = jax.tree_util.keystr(path)
            return shape_on(leaf, next((s for name, s in lies.items() if names.endswith(name)), everywhere))

        return jax.tree_util.tree_map_with_path(placed, jax.eval_shape(made.init, parameters))

    return optax.GradientTransformation(init, made.update)


def with_paths(tree: Any) -> list:
    return jax.tree_util.tree_flatten_with_path(tree)[0]


def trace(step: Any = None, **options: Any) -> Any:
    """jax.jit, which traces train_step for a TPU when it is called, and raises Traced."""
    if step is None:
        return partial(trace, **options)
    made = jit(step, **options)

    def call(*arguments: Any) -> None:
        mesh = next(leaf.sharding.mesh for _, leaf in with_paths(arguments) if isinstance(leaf.sharding, NamedSharding))
        everywhere = NamedSharding(mesh, PartitionSpec())
        shapes = jax.tree.map(
            lambda leaf: shape_on(leaf, leaf.sharding if isinstance(leaf.sharding, NamedSharding) else everywhere),
            arguments,
        )
        raise Traced(made.trace(*shapes).lower(lowering_platforms=("tpu",)).as_text(debug_info=True))

    return call if getattr(step, "__name__", "") == "train_step" else made


def padded(x: jax.Array, labels: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    rows, columns = -x.shape[0] % ROWS, -w.shape[1] % COLUMNS
    return jnp.pad(x, ((0, rows), (0, 0))), jnp.pad(labels, (0, rows)), jnp.pad(w, ((0, 0), (0, columns)))


def block_of(array: jax.Array, block: Any, size: int, axis: int = 0) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(array, block * size, size, axis)


def picked(labels: jax.Array, block: Any, dtype: Any) -> jax.Array:
    """(rows, COLUMNS): 1 where a row's label is this column of the block."""
    return jax.nn.one_hot(labels - block * COLUMNS, COLUMNS, dtype=dtype)


@jax.custom_vjp
def loss_in_blocks(x: jax.Array, labels: jax.Array, w: jax.Array) -> jax.Array:
    """Sum of cross-entropies of x @ w, (tokens, D) @ (D, words), of which one block exists at a time.

    What fills up the last blocks counts too, which changes the loss and no plan.
    """
    return loss_forward(x, labels, w)[0]


def loss_forward(x: jax.Array, labels: jax.Array, w: jax.Array) -> tuple[jax.Array, tuple]:
    given, (x, labels, w) = (x, labels, w), padded(x, labels, w)

    def rows(i: Any, carry: tuple) -> tuple:
        def columns(j: Any, carry: tuple) -> tuple:
            logits = block_of(x, i, ROWS) @ block_of(w, j, COLUMNS, 1)
            label = (logits * picked(block_of(labels, i, ROWS), j, x.dtype)).sum(-1)
            return jnp.logaddexp(carry[0], jax.nn.logsumexp(logits, -1)), carry[1] + label

        start = (jnp.full(ROWS, -jnp.inf, x.dtype), jnp.zeros(ROWS, x.dtype))
        normalizer, label = jax.lax.fori_loop(0, w.shape[1] // COLUMNS, columns, start)
        every = jax.lax.dynamic_update_slice_in_dim(carry[0], normalizer, i * ROWS, 0)
        return every, carry[1] + (normalizer - label).sum()

    start = (jnp.zeros(len(x), x.dtype), jnp.zeros((), x.dtype))
    normalizers, total = jax.lax.fori_loop(0, len(x) // ROWS, rows, start)
    return total, (*given, normalizers)


def loss_backward(kept: tuple, gradient: jax.Array) -> tuple:
    *given, normalizers = kept
    x, labels, w = padded(*given)

    def rows(i: Any, carry: tuple) -> tuple:
        x_block, normalizer = block_of(x, i, ROWS), block_of(normalizers, i, ROWS)[:, None]

        def columns(j: Any, carry: tuple) -> tuple:
            dx, dw = carry
            w_block = block_of(w, j, COLUMNS, 1)
            d = jnp.exp(x_block @ w_block - normalizer) - picked(block_of(labels, i, ROWS), j, x.dtype)
            added = block_of(dw, j, COLUMNS, 1) + x_block.T @ d
            return dx + d @ w_block.T, jax.lax.dynamic_update_slice_in_dim(dw, added, j * COLUMNS, 1)

        dx, dw = jax.lax.fori_loop(0, w.shape[1] // COLUMNS, columns, (jnp.zeros_like(x_block), carry[1]))
        return jax.lax.dynamic_update_slice_in_dim(carry[0], dx, i * ROWS, 0), dw

    dx, dw = jax.lax.fori_loop(0, len(x) // ROWS, rows, (jnp.zeros_like(x), jnp.zeros(w.shape, x.dtype)))
    x0, _, w0 = given
    return (dx[: len(x0)] * gradient).astype(x0.dtype), None, (dw[:, : w0.shape[1]] * gradient).astype(w0.dtype)


loss_in_blocks.defvjp(loss_forward, loss_backward)
TOKAMAX = SimpleNamespace(
    linear_softmax_cross_entropy_loss=lambda x, labels, w, **_: loss_in_blocks(x, labels, w),
    config=SimpleNamespace(autotuning_cache_miss_fallback=lambda _: contextlib.nullcontext()),
)
device_put, optimizer, jit = jax.device_put, optax.adamw, jax.jit


def main(folder: str, file: str, *options: str) -> None:
    sys.argv, sys.path[:1] = sys.argv[:1], [folder]
    sys.modules["tokamax"] = TOKAMAX
    jax.device_put, optax.adamw, jax.jit = place, adamw, trace
    transformers.AutoConfig.from_pretrained = CONFIGS.get
    model = import_module("model")
    code = next(module for name, module in sys.modules.items() if name.startswith("model.modeling"))
    rotary = next(value for name, value in vars(code).items() if name.endswith("RotaryEmbedding"))
    for name, value in list(vars(code).items()):
        if "ForCausalLM" in name and isinstance(value, type):
            for holder in (code, model):
                setattr(holder, name, without_values(value, rotary))
    words = (option.removeprefix("--").split("=") for option in options)
    given = {name: ast.literal_eval(value) if value[0] in "-0123456789TF" else value for name, value in words}
    try:
        import_module("train").main(use_real_data=False, **given)
    except Traced as traced:
        Path(file).write_text(str(traced))


if __name__ == "__main__":
    main(*sys.argv[1:])
