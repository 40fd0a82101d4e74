"""Train a GPT-2 / GPT-3 language model on a mesh of TPU devices: data, FSDP and tensor parallel.

Run:     python transformer_tpu.py                                      # quick_test: a Markov chain of known entropy
         python transformer_tpu.py --preset development --data_dir DIR  # bytes of DIR/tinyshakespeare.txt
         python transformer_tpu.py --preset production --data_dir DIR   # GPT-2 124M, llm.c token shards, v5litepod-8
         CPU_NUM_DEVICES=8 python transformer_tpu.py --mesh 2x2x2       # eight virtual devices without a TPU

Expect:  quick_test ends at 1.247 nats per token, 2.8 % above the floor of 1.213; one graph for training, one for
         evaluation (XLA:CPU, 2 cores, torch 2.9.0, torch_xla 2.9.0, seed 0).
"""

# Shape suffixes: B batch, T time, S = T + 1, D embedding width, H heads, K head_dim, V padded vocabulary, N = B * T.

import dataclasses
import json
import math
import re
import sys
from functools import partial
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from functorch.compile import default_partition, min_cut_rematerialization_partition
from torch_xla.experimental import scan
from torch_xla.utils.checkpoint import checkpoint

from config import InputError, ModelShape, TransformerConfig, learning_rates, make_optimizer, parse_command_line
from data import SequenceData, load_sequences, read_hellaswag
from tpu_utils import (
    Checkpoints,
    CompileWatch,
    DeviceLoader,
    DeviceMetrics,
    Goodput,
    Mirror,
    Peers,
    Profile,
    RunLock,
    RunLog,
    Speed,
    StopRequest,
    attached_chips,
    check_finite,
    check_same_run,
    choose_device,
    finite_means,
    flash_attention,
    log_sample,
    log_summary,
    open_run_dir,
    peak_flops,
    print_banner,
    print_summary,
    process_age,
    random_state,
    run_script,
    set_random_state,
    start_device,
    step_if,
    tpu_hosts,
    wait_for_peers,
    watch_for_stalls,
    write_atomically,
)

# On a mesh torch_xla 2.9 ties the gradients of a scanned layer to the sharding of its inputs by a jax function that
# needs torchax, and that flax (torch_xla/experimental/scan.py, _backward_shard_alike). The table
# below places every gradient and GPT.keep every activation, so there is nothing left to tie.
scan.shard_as = lambda a, b: (a, b)

# How each axis of a parameter is cut over the mesh (data, fsdp, tensor); None: whole. No match: whole.
# Under "tensor" a device holds some heads and some columns of the MLP; under "fsdp" it holds a part of everything and
# collects the rest of a layer when it gets there.
PARTITION = {
    "token_embedding": ("tensor", "fsdp"),
    "position_embedding": (None, "fsdp"),
    r"qkv_weight\.\d+": (None, "tensor", "fsdp"),
    "qkv_bias": (None, None, "tensor"),
    r"(attention|mlp)_out_weight\.\d+": ("fsdp", "tensor"),
    r"mlp_in_weight\.\d+": ("tensor", "fsdp"),
    "mlp_in_bias": (None, "tensor"),
}
BATCH = ("data", "fsdp")  # the batch axis is cut over both


def parameter_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Every parameter, those of the L layers stacked, in the order of llm.c's weight files."""
    L, D, V, T = shape.num_layers, shape.embedding_dim, shape.padded_vocab_size, shape.sequence_length
    return {
        "token_embedding": (V, D),
        "position_embedding": (T, D),
        "ln1_weight": (L, D),
        "ln1_bias": (L, D),
        "qkv_weight": (L, 3, D, D),
        "qkv_bias": (L, 3, D),
        "attention_out_weight": (L, D, D),
        "attention_out_bias": (L, D),
        "ln2_weight": (L, D),
        "ln2_bias": (L, D),
        "mlp_in_weight": (L, 4 * D, D),
        "mlp_in_bias": (L, 4 * D),
        "mlp_out_weight": (L, D, 4 * D),
        "mlp_out_bias": (L, D),
        "final_ln_weight": (D,),
        "final_ln_bias": (D,),
    }


def is_matrix(name: str) -> bool:
    """Embeddings and weights of linear layers: the only parameters with weight decay."""
    return re.search(r"_(embedding|weight)(\.\d+)?$", name) is not None and "ln" not in name


# Each layer has its own matrices (`qkv_weight.0`): cut out of a stack, their cast and their gradient would each be one
# more pass over memory, where XLA makes them part of the product. The vectors stay stacked: fewer tensors to trace.
# --scan_layers, whose loop wants a stack, pays for that pass.
LAYER_MATRICES = ("qkv_weight", "attention_out_weight", "mlp_in_weight", "mlp_out_weight")
LAYER_VECTORS = ("ln1_weight", "ln1_bias", "qkv_bias", "attention_out_bias")
LAYER_VECTORS += ("ln2_weight", "ln2_bias", "mlp_in_bias", "mlp_out_bias")


def split_layers(stacked: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """From the names and shapes of parameter_shapes to those of GPT's parameters."""
    named = {}
    for name, value in stacked.items():
        parts = {f"{name}.{layer}": part for layer, part in enumerate(value)}
        named |= parts if name in LAYER_MATRICES else {name: value}
    return named


def stack_layers(named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The other way round."""
    parts: dict[str, list[torch.Tensor]] = {}
    for name, value in named.items():
        parts.setdefault(name.split(".")[0], []).append(value)
    return {name: torch.stack(found) if name in LAYER_MATRICES else found[0] for name, found in parts.items()}


class LayerNorm(torch.autograd.Function):
    """Of x (B, T, D): float32 inside one fusion, the dtype of x in memory. E[x^2] - E[x]^2 reads x once.

    The backward pass is written down because autograd's takes more operations, to trace and in the program.
    """

    @staticmethod
    def forward(ctx, x, weight_D, bias_D):
        z = x.float()
        mean = z.mean(-1, keepdim=True)
        scale = torch.rsqrt((z * z).mean(-1, keepdim=True) - mean * mean + 1e-5)
        ctx.save_for_backward(x, mean, scale, weight_D)
        return ((z - mean) * scale * weight_D + bias_D).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        x, mean, scale, weight_D = ctx.saved_tensors
        grad, normal = grad.float(), (x - mean) * scale
        dn = grad * weight_D
        dx = (dn - dn.mean(-1, keepdim=True) - normal * (dn * normal).mean(-1, keepdim=True)) * scale
        return dx.to(x.dtype), (grad * normal).sum((0, 1)), grad.sum((0, 1))


layer_norm = LayerNorm.apply


def row_sums(x_NV, rounded: bool):
    """(N, 1) float32. rounded: as a product with ones, which reads x as bfloat16 on TPU and adds it up in float32; by
    libtpu 0.0.21's estimate for v5e in a third of the time."""
    if not rounded:
        return x_NV.sum(-1, keepdim=True)
    return (x_NV @ torch.ones(x_NV.shape[1], 2, device=x_NV.device))[:, :1]  # by one column XLA makes it a sum again


def cut(x_BTHK, start: int, end: int):
    """Positions start to end; x itself where that is all of it, which torch_xla would trace as two operations."""
    return x_BTHK if end - start == x_BTHK.shape[1] else x_BTHK[:, start:end]


class CausalAttention(torch.autograd.Function):
    """softmax(q k^T) v under the causal mask: float32 inside, the dtype of q in memory.

    Each slice of queries sees only the keys up to its end. What is kept of the scores is e = exp(score - maximum); the
    division by the row sums is done on the output, and in the backward pass on its gradient, which have K values a row
    instead of S. The row sums of p * dp are taken as those of out * grad, which are the same (both: Dao et al. 2022,
    FlashAttention, section 3.1), so the gradient of the scores is elementwise, and XLA fuses it into the product
    before. einsum leaves batch and heads two axes, in a layout of XLA's choice.
    """

    @staticmethod
    def forward(ctx, q_BTHK, k_BTHK, v_BTHK, chunks):
        T, K, dtype = q_BTHK.shape[1], q_BTHK.shape[3], q_BTHK.dtype
        position = torch.arange(T, device=q_BTHK.device)
        v_and_1 = F.pad(v_BTHK, (0, 1), value=1.0).float()
        kept, out, sums = [], [], []
        for start, end in CausalAttention.slices(T, chunks):
            scores = torch.einsum("bthk,bshk->bhts", cut(q_BTHK, start, end), cut(k_BTHK, 0, end)).float()
            scores = scores.masked_fill(position[start:end, None] < position[None, :end], -1e30)
            kept.append((scores - scores.amax(-1, keepdim=True)).exp().to(dtype))
            weighted = torch.einsum("bhts,bshk->bthk", kept[-1].float(), cut(v_and_1, 0, end))
            sums.append(weighted[..., K:])
            out.append((weighted[..., :K] / sums[-1]).to(dtype))
        out, sums = torch.cat(out, 1), torch.cat(sums, 1)
        ctx.save_for_backward(q_BTHK, k_BTHK, v_BTHK, out, sums, *kept)
        return out

    @staticmethod
    def backward(ctx, grad):
        q_BTHK, k_BTHK, v_BTHK, out, sums, *kept = ctx.saved_tensors
        T = q_BTHK.shape[1]
        grad = (grad / sums).to(q_BTHK.dtype)  # bfloat16 with float32 makes float32
        mean = (grad * out.float()).sum(-1, keepdim=True)  # of de under p, (B, T, H, 1)
        dq, dk, dv = [], 0, 0
        for (start, end), e in zip(CausalAttention.slices(T, len(kept)), kept, strict=True):
            whole = (0, 0, 0, 0, 0, T - end)  # keys after the slice get nothing from it
            grad_slice, q_slice = cut(grad, start, end), cut(q_BTHK, start, end)
            dv += F.pad(torch.einsum("bhts,bthk->bshk", e, grad_slice), whole)
            de = torch.einsum("bthk,bshk->bhts", grad_slice, cut(v_BTHK, 0, end))
            ds = ((de - cut(mean, start, end).transpose(1, 2)) * e).to(e.dtype)
            dq.append(torch.einsum("bhts,bshk->bthk", ds, cut(k_BTHK, 0, end)))
            dk += F.pad(torch.einsum("bhts,bthk->bshk", ds, q_slice), whole)
        return torch.cat(dq, 1), dk, dv, None

    @staticmethod
    def slices(T, chunks):
        return [(start, start + T // chunks) for start in range(0, T, T // chunks)]


def causal_attention(q_BTHK, k_BTHK, v_BTHK, chunks: int | None = None):
    """q is divided by sqrt(K) before. 4 slices of queries, 5/8 of the full square of scores, where they stay multiples
    of 128 long; else one."""
    return CausalAttention.apply(q_BTHK, k_BTHK, v_BTHK, chunks or (4 if q_BTHK.shape[1] % 512 == 0 else 1))


class CrossEntropy(torch.autograd.Function):
    """Negative log likelihood of every target, float32; 0 for targets below 0. Padded columns get no probability.

    Logits stay in the compute dtype in memory, and the target is picked by comparison: a gather over a sharded
    vocabulary would bring all logits to every device. As a maximum, which XLA makes part of the product before.
    """

    @staticmethod
    def forward(ctx, logits_NV, target_N, vocab_size):
        column = torch.arange(logits_NV.shape[1], device=logits_NV.device, dtype=torch.int32)
        z = logits_NV.float().masked_fill(column >= vocab_size, -1e30)
        largest = z.amax(-1, keepdim=True)
        rounded = logits_NV.dtype == torch.bfloat16 and ctx.needs_input_grad[0]  # an evaluation is exact
        logsumexp = largest + row_sums((z - largest).exp(), rounded).log()
        picked = z.masked_fill(column != target_N[:, None], -1e30).amax(-1, keepdim=True)
        ctx.save_for_backward(logits_NV, target_N, logsumexp)
        ctx.vocab_size = vocab_size
        return (logsumexp - picked)[:, 0] * (target_N >= 0).float()

    @staticmethod
    def backward(ctx, grad_N):
        logits_NV, target_N, logsumexp = ctx.saved_tensors
        column = torch.arange(logits_NV.shape[1], device=logits_NV.device, dtype=torch.int32)
        p = (logits_NV.float() - logsumexp).exp().masked_fill(column >= ctx.vocab_size, 0.0)
        counted = (target_N >= 0).float() * grad_N
        return ((p - (column == target_N[:, None]).float()) * counted[:, None]).to(logits_NV.dtype), None, None


def block(x_BTD, w, num_heads, attention, keep=lambda x: x):
    """One pre-norm transformer layer. w: its parameters by name, as GPT.cast() gives them (biases of q scaled)."""
    D = x_BTD.shape[-1]
    y = layer_norm(x_BTD, w["ln1_weight"], w["ln1_bias"])
    # (H, K, D) keeps the head axis apart, so that it can be cut over the mesh
    q, k, v = zip(w["qkv_weight"].view(3, num_heads, -1, D), w["qkv_bias"].view(3, num_heads, -1), strict=True)
    q = (q[0].float() / math.sqrt(D // num_heads)).to(q[0].dtype), q[1]  # fused with the product; the bias is scaled
    qkv = [torch.einsum("btd,hkd->bthk", y, weight) + bias for weight, bias in (q, k, v)]
    out_weight = w["attention_out_weight"].view(D, num_heads, -1)
    y = torch.einsum("bthk,dhk->btd", attention(*qkv), out_weight) + w["attention_out_bias"]
    x_BTD = keep(x_BTD + y)
    y = layer_norm(x_BTD, w["ln2_weight"], w["ln2_bias"])
    y = F.gelu(torch.einsum("btd,ed->bte", y, w["mlp_in_weight"]) + w["mlp_in_bias"], approximate="tanh")
    return keep(x_BTD + torch.einsum("bte,de->btd", y, w["mlp_out_weight"]) + w["mlp_out_bias"])


class GPT(torch.nn.Module):
    """GPT-2: learned positions, pre-norm, GELU (tanh), one matrix for token embedding and output head.

    The head reads `token_embedding` itself, so there is no second weight that a move to the device could untie.
    compute_dtype: of activations and matrix products. mesh: activations stay cut along the batch; None: one device.
    """

    def __init__(
        self,
        shape: ModelShape,
        compute_dtype=torch.float32,
        *,
        remat=False,
        scan_layers=False,
        attention=None,
        mesh=None,
    ):
        super().__init__()
        self.shape, self.compute_dtype, self.mesh = shape, compute_dtype, mesh
        self.remat, self.scan_layers = remat, scan_layers
        self.block = partial(block, num_heads=shape.num_heads, attention=attention or causal_attention, keep=self.keep)
        # scan caches its trace by function and shapes; a trace made without gradients must not serve training
        self._scanned = {grad: partial(self._scan_body) for grad in (True, False)}
        for name, size in parameter_shapes(shape).items():
            if name in LAYER_MATRICES:
                self.register_module(name, torch.nn.ParameterList(torch.empty(size[1:]) for _ in range(size[0])))
            else:
                self.register_parameter(name, torch.nn.Parameter(torch.empty(size)))

    def initialise(self, seed: int) -> None:
        """llm.c's initialisation: N(0, 0.02), residual projections N(0, 0.02 / sqrt(2 L)), biases and padding 0."""
        generator = torch.Generator().manual_seed(seed)
        residual_std = 0.02 / math.sqrt(2 * self.shape.num_layers)
        for name, parameter in self.named_parameters():
            if is_matrix(name):
                torch.nn.init.normal_(parameter, 0.0, residual_std if "_out_" in name else 0.02, generator=generator)
            else:
                torch.nn.init.constant_(parameter, float(name.endswith("_weight")))
        with torch.no_grad():
            self.token_embedding[self.shape.vocab_size :] = 0.0

    def keep(self, x_BTD):
        """Hold an activation to its place on the mesh, in both passes; left alone, the partitioner may move it."""
        return x_BTD if self.mesh is None else xs.mark_sharding_with_gradients(x_BTD, self.mesh, (BATCH, None, None))

    def _scan_body(self, x_BTD, w):
        return self.block(x_BTD, w), None

    def cast(self) -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
        """All parameters in the compute dtype, once a step, and those of each layer.

        Layer norms stay float32: they compute in it anyway. Biases of q come divided by sqrt(K), in one operation for
        all layers; block() does its weights, where XLA makes that a part of the product.
        """
        cast = dict(self.named_parameters())
        scale = F.pad(torch.ones(2, 1, device=self.qkv_bias.device), (0, 0, 1, 0), value=self.shape.head_dim**-0.5)
        cast["qkv_bias"] = cast["qkv_bias"] * scale
        cast = {name: p if "ln" in name else p.to(self.compute_dtype) for name, p in cast.items()}
        columns = [cast[n].unbind(0) for n in LAYER_VECTORS]
        columns += [[cast[f"{n}.{layer}"] for layer in range(self.shape.num_layers)] for n in LAYER_MATRICES]
        names = LAYER_VECTORS + LAYER_MATRICES
        return cast, [dict(zip(names, of_one, strict=True)) for of_one in zip(*columns, strict=True)]

    def forward(self, tokens_BT):
        """Logits over the padded vocabulary, (B, T, V), in the compute dtype."""
        cast, layers = self.cast()
        # the lookup reads float32 rows: the gradients of a frequent token add up in float32
        x = F.embedding(tokens_BT, self.token_embedding) + self.position_embedding[: tokens_BT.shape[1]]
        x = self.keep(x.to(self.compute_dtype))
        if self.scan_layers:
            partition = save_nothing_partition if self.remat else default_partition
            body = self._scanned[torch.is_grad_enabled()]
            stacked = {name: torch.stack([w[name] for w in layers]) for name in layers[0]}
            x, _ = scan.scan(body, x, stacked, partition_fn=partition, is_fn_pure=True)
        else:
            for w in layers:
                if self.remat:  # torch.utils.checkpoint would be undone by common subexpression elimination
                    run = lambda x, *values: self.block(x, dict(zip(layers[0], values, strict=True)))  # noqa: E731
                    x = checkpoint(run, x, *(value.clone() for value in w.values()), preserve_rng_state=False)
                else:
                    x = self.block(x, w)
        x = layer_norm(x, cast["final_ln_weight"], cast["final_ln_bias"])
        return F.linear(x, cast["token_embedding"])


def losses(logits_BTV, targets_BT, vocab_size: int):
    """Loss in nats of every target, (B, T) float32; 0 where the target is negative."""
    return CrossEntropy.apply(logits_BTV.flatten(0, 1), targets_BT.flatten(), vocab_size).view(targets_BT.shape)


def inputs_and_targets(tokens_BS):
    """(B, T) each, from one upload: a token that is read but is no target comes as ~token (data.py)."""
    return torch.where(tokens_BS < 0, -1 - tokens_BS, tokens_BS)[:, :-1], tokens_BS[:, 1:]


def save_nothing_partition(*args, **kwargs):
    """Partition for scan that keeps only the inputs of a layer for the backward pass."""
    with torch._functorch.config.patch(activation_memory_budget=0.0):
        return min_cut_rematerialization_partition(*args, **kwargs)


def choose_mesh(config: TransformerConfig, num_devices: int, hbm_bytes: float | None) -> tuple[tuple[int, ...], str]:
    """Sizes of the axes (data, fsdp, tensor) and why. Raises InputError for a mesh that cannot work.

    auto: plain data parallelism while weights, gradients and AdamW's two moments (16 bytes a parameter) take at most
    a third of a device's memory, else the smallest fsdp axis that gets them there; tensor only when asked for.
    """
    shape, batch = config.shape, config.global_batch_size
    state = 16 * shape.num_parameters
    if config.mesh != "auto":
        sizes, why = tuple(int(size) for size in config.mesh.split("x")), "as asked"
    else:
        choices = [n for n in range(1, num_devices + 1) if num_devices % n == 0 and shape.embedding_dim % n == 0]
        enough = [n for n in choices if hbm_bytes is None or state / n <= hbm_bytes / 3]
        fsdp = enough[0] if enough else choices[-1]
        sizes = (num_devices // fsdp, fsdp, 1)
        memory = "unknown memory" if hbm_bytes is None else f"{hbm_bytes / 2**30:.0f} GiB"
        why = f"training state {state / fsdp / 2**30:.2f} GiB of {memory} per device; choose with --mesh"
    data, fsdp, tensor = sizes
    if math.prod(sizes) != num_devices:
        raise InputError(
            f"mesh {config.mesh} has {math.prod(sizes)} places for {num_devices} devices; try {num_devices}x1x1"
        )
    for name, value, axis, size in (
        ("num_heads", shape.num_heads, "tensor", tensor),
        ("padded vocabulary", shape.padded_vocab_size, "tensor", tensor),
        ("embedding_dim", shape.embedding_dim, "fsdp", fsdp),
    ):
        if value % size:
            raise InputError(
                f"{name} ({value}) must be divisible by the {axis} axis ({size}) of the mesh; choose another --mesh"
            )
    unit = data * fsdp * config.gradient_accumulation_steps
    if batch % unit:
        raise InputError(
            f"global_batch_size ({batch}) must be divisible by data x fsdp x gradient_accumulation_steps "
            f"({data} x {fsdp} x {config.gradient_accumulation_steps}); try {max(1, batch // unit) * unit}"
        )
    return sizes, why


def partition_spec(name: str, tensor: torch.Tensor) -> tuple:
    return next((spec for pattern, spec in PARTITION.items() if re.fullmatch(pattern, name)), (None,) * tensor.dim())


def place(model: GPT, tensors) -> None:
    """Cut tensors that belong to the model's parameters, in their order, as the table says."""
    if model.mesh is not None:
        for (name, parameter), tensor in zip(model.named_parameters(), tensors, strict=True):
            xs.mark_sharding(tensor, model.mesh, partition_spec(name, parameter))


def place_state(model: GPT, optimizer, metrics) -> None:
    """Cut parameters and optimizer state as the table says; what belongs to no axis is whole on every device."""
    if model.mesh is None:
        return
    for name, parameter in model.named_parameters():
        spec = partition_spec(name, parameter)
        for tensor in (parameter, *optimizer.state[parameter].values()):  # the step count belongs to no axis
            xs.mark_sharding(tensor, model.mesh, spec if tensor.shape == parameter.shape else (None,) * tensor.dim())
    for tensor in metrics.state_dict().values():
        xs.mark_sharding(tensor, model.mesh, (None,) * tensor.dim())


def compute_gradients(model: GPT, tokens_BS, parts: int):
    """Summed loss of the batch; its gradients are left in parameter.grad.

    With several parts the forward and backward pass stand in a loop inside the graph, so neither the graph nor the
    memory of activations grows with their number. (torch_xla.experimental.gradient_accumulation syncs inside the step;
    this is the loop under torch_xla's scan, which traces a function with its backward pass as it is.)
    """
    names, parameters = zip(*model.named_parameters(), strict=True)

    def summed_loss(weights, tokens):
        inputs, targets = inputs_and_targets(tokens)
        logits = torch.func.functional_call(model, dict(zip(names, weights, strict=True)), (inputs,))
        return losses(logits, targets, model.shape.vocab_size).sum()

    def one_part(carry, part):
        # weights come in as arguments: read from the module, views of them trace differently once they were updated
        weights = [weight.detach().requires_grad_() for weight in carry[-len(names) :]]
        loss = summed_loss(weights, part[0])
        loss.backward()
        sums = zip(carry, [loss.detach(), *(weight.grad for weight in weights)], strict=False)
        return [a + b for a, b in sums] + [weight.detach() for weight in weights], []

    if parts == 1:
        loss = summed_loss(parameters, tokens_BS)
        loss.backward()
        return loss.detach()
    zeros = [torch.zeros_like(parameter, requires_grad=False) for parameter in parameters]
    place(model, zeros)
    # row i goes to part i % parts, so that every part stays cut over the mesh as the batch is
    stacked = tokens_BS.view(-1, parts, tokens_BS.shape[1]).transpose(0, 1).contiguous()
    carry = [torch.zeros((), device=tokens_BS.device), *zeros, *(parameter.detach() for parameter in parameters)]
    (loss, *gradients), _ = scan._scan_impl_flat(one_part, carry, [stacked])
    for parameter, gradient in zip(parameters, gradients, strict=False):
        parameter.grad = gradient
    return loss


@torch_xla.compile(full_graph=True, name="train_step")
def train_step(model, optimizer, rates, metrics, tokens_BS, parts, clip, skip_nonfinite=False):
    """One optimizer step as one graph. rates (num_steps,) is indexed on the device: nothing but the batch goes up."""
    loss = compute_gradients(model, tokens_BS, parts)
    count = (tokens_BS[:, 1:] >= 0).sum().float()
    gradients = [parameter.grad for parameter in model.parameters()]
    place(model, gradients)
    norm = torch.stack([(gradient * gradient).sum() for gradient in gradients]).sum().sqrt() / count
    factor = ((clip / (norm + 1e-6)).clamp(max=1.0) if clip else 1.0) / count
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient * factor
    for group in optimizer.param_groups:
        group["lr"] = rates.index_select(0, metrics.step)
    finite = torch.isfinite(loss + norm)
    if skip_nonfinite:
        step_if(finite, optimizer)
    else:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)  # gradients still alive at the end would be outputs of the program
    metrics.record(loss / count, norm, skipped=~finite if skip_nonfinite else None)
    place_state(model, optimizer, metrics)  # else the partitioner chooses, and step 2 would be a second graph


@torch_xla.compile(full_graph=True, name="eval_step")
def eval_step(model, tokens_BS):
    """Summed loss and number of targets of every sequence, (B, 2) float32."""
    with torch.no_grad():
        inputs, targets = inputs_and_targets(tokens_BS)
        result = torch.stack(
            [losses(model(inputs), targets, model.shape.vocab_size).sum(1), (targets >= 0).sum(1).float()], 1
        )
        if model.mesh is not None:
            xs.mark_sharding(result, model.mesh, (None, None))  # every host reads all of it
        return result


def evaluate(model, batches, graphs, goodput, step, kind="eval") -> np.ndarray:
    """Summed loss and number of targets of every sequence of the batches, (rows, 2). Padding rows have 0 targets."""
    results = []
    for tokens in batches:
        with goodput.phase("evaluation" if graphs.compiled(kind) else "compile"):
            results.append(eval_step(model, tokens))
        graphs.check(kind, step, [tokens])
    # read when all are under way
    return np.concatenate([result.cpu().numpy() for result in results]).astype(np.float64)


def hellaswag_accuracy(result: np.ndarray, labels: np.ndarray) -> float:
    """Share of questions whose right ending has the lowest loss per token. result: (4 x questions + padding, 2)."""
    loss, count = result[: 4 * len(labels)].reshape(-1, 4, 2).transpose(2, 0, 1)
    return float(((loss / count).argmin(1) == labels).mean())


def train(config: TransformerConfig, peers: Peers | None = None) -> int:
    """peers: the processes of this run, one per host. None: this one alone."""
    goodput, stop, graphs, lock = Goodput(process_age()), StopRequest(), CompileWatch(), RunLock()
    peers = peers or Peers()
    watch_for_stalls(goodput, config.stall_seconds)
    shape, num_steps = config.shape, config.num_steps
    device = start_device(config, join=partial(start_spmd, config))
    stop.watch_metadata()
    mesh, why = start_mesh(config)
    # compile_for asks about shapes alone, and needs no data
    data = None if config.compile_for else load_sequences(config, xr.process_index(), xr.process_count())
    run_dir = peers.from_first(lambda: open_run_dir(config, lock))
    mirror = Mirror(config, run_dir, peers)  # uploads what a gs:// directory is to hold
    checkpoints = Checkpoints(run_dir / "checkpoints", config.keep_checkpoints, peers, mirror)
    print_banner(config, device)
    if peers.index == 0:
        print_plan(config, data, why, "none: nothing runs" if config.compile_for else config.run_dir or run_dir)

    attention = flash_attention if config.attention == "flash" else causal_attention
    dtype = torch.bfloat16 if config.precision == "bfloat16" else torch.float32
    options = dict(remat=config.remat, scan_layers=config.scan_layers, attention=attention, mesh=mesh)
    if config.compile_for:
        return compile_first_step(config, lambda: GPT(shape, dtype, **options), device)
    model = GPT(shape, dtype, **options)
    run = {**dataclasses.asdict(config), "data_crc32": data.fingerprint}  # what a checkpoint belongs to
    first_step, validation_loss = 0, None
    saved = peers.from_first(lambda: checkpoints.load_for_resume(config.resume, whole=False))
    if saved:
        check_same_run(run, saved["config"])
        first_step, validation_loss = saved["step"], saved["validation_loss"]
        if peers.index == 0:
            print(f"resumed    after step {first_step} of {num_steps}", flush=True)
    else:
        model.initialise(config.seed)
    profile = Profile(config, run_dir, first_step, num_steps)
    if peers.index == 0:
        write_atomically(run_dir / "config.json", json.dumps(run, indent=2).encode())

    model = model.to(device)
    optimizer = make_optimizer(config, decay_groups(model))
    schedule = learning_rates(config, num_steps)
    rates = schedule.to(device)
    metrics = DeviceMetrics(["loss", "gradient_norm"], config.log_every, device)
    place_state(model, optimizer, metrics)
    if saved:  # each device its part; the mesh may be another than the one it was saved from
        targets = dict(model=model.state_dict(keep_vars=True), optimizer=optimizer.state_dict())
        checkpoints.restore(saved, targets | dict(metrics=metrics.state_dict()))
        set_random_state(saved["random"])
        metrics.read(first_step, first_step)  # how many updates were skipped before
    if config.print_placement and peers.index == 0:
        print_placement(model)

    cut_batch = xs.ShardingSpec(mesh, (BATCH, None), minibatch=xr.process_count() > 1) if mesh else None
    upload = partial(xm.send_cpu_data_to_device, device=device, input_sharding=cut_batch)
    validation = upload([torch.from_numpy(data.validation.batch(i)) for i in range(data.validation_batches)])
    questions, labels = load_questions(config)
    questions = upload(questions)

    stop_signal = peers.largest(stop.signal or 0)
    if stop_signal:
        return stop.say(stop_signal, first_step, config.run_dir or run_dir, silent=peers.index > 0)
    batches = ((torch.from_numpy(data.train.batch(step)),) for step in range(first_step, num_steps))
    step, logged, lengths = first_step, first_step - first_step % config.log_every, []
    full_batch = config.global_batch_size * shape.sequence_length
    skip_nonfinite = config.on_nonfinite == "skip"
    step_options = (config.gradient_accumulation_steps, config.clip_gradient_norm, skip_nonfinite)
    with (
        mirror,  # left last: it waits until all is in the bucket
        checkpoints,
        RunLog(run_dir, first_step, num_steps, config.tensorboard, silent=peers.index > 0) as log,
        profile,
        DeviceLoader(batches, device, config.prefetch_batches, goodput, cut_batch) as loader,
    ):
        peak = peak_flops(xr.global_runtime_device_count())
        speed = Speed(goodput, loader, config.global_batch_size, shape.flops_per_token * full_batch, peak)
        goodput.enter("step")
        for step, (tokens,) in enumerate(loader, first_step + 1):
            length = tokens.shape[1] - 1
            kind = "train" if length == shape.sequence_length else f"train_{length}"  # one graph for each bucket
            profile.before_step(step)
            with goodput.phase("step" if graphs.compiled(kind) else "compile"):
                train_step(model, optimizer, rates, metrics, tokens, *step_options)
            graphs.check(kind, step, [tokens])
            log.advance()
            lengths.append(length)
            if step == first_step + 1:
                speed.start(step)  # without the compile
                lengths.clear()
            if step % config.log_every == 0 or step == num_steps:
                values = metrics.read(logged, step)  # the only read from the device between two log lines
                check_finite(values, logged, checkpoints, config.on_nonfinite)
                checkpoints.check()  # a save that failed behind the steps ends the run here
                fields = dict(learning_rate=schedule[step - 1].item(), skipped_steps=metrics.skipped_steps)
                fields |= in_tokens(speed.measure(step), lengths, config)
                log.train(step, **finite_means(values), **fields)
                logged = step
                lengths.clear()
            if step % config.eval_every == 0 or step == num_steps:
                with goodput.phase("evaluation"):
                    loss, count = evaluate(model, validation, graphs, goodput, step).sum(0)
                    validation_loss = float(loss / count)  # a numpy scalar would not be loaded again
                    fields = dict(validation_loss=validation_loss, perplexity=math.exp(min(validation_loss, 700.0)))
                    if data.loss_floor is not None:
                        fields["loss_floor"] = data.loss_floor
                    if questions:
                        result = evaluate(model, questions, graphs, goodput, step, "hellaswag")
                        fields["hellaswag_accuracy"] = hellaswag_accuracy(result, labels)
                log.evaluation(step, **fields)
            if peers.count == 1 or step % config.log_every == 0:  # all processes stop after the same step
                stop_signal = peers.largest(stop.signal or 0)
            if stop_signal or step % config.save_every == 0 or step == num_steps:
                # a bad state is never saved
                check_finite(metrics.read(logged, step), logged, checkpoints, config.on_nonfinite)
                state = dict(step=step, config=run, validation_loss=validation_loss, model=model.state_dict())
                state |= dict(optimizer=optimizer.state_dict(), metrics=metrics.state_dict(), random=random_state())
                with goodput.phase("checkpoint"):
                    on_host = checkpoints.copy(step, state)
                log.checkpoint(step, wait_seconds=on_host.wait_seconds)  # on disk before the step counts as done
                checkpoints.write(on_host)  # behind the next steps
            if stop_signal:
                break
        with goodput.phase("checkpoint"):
            checkpoints.wait()  # the last one is on disk
        goodput.enter("other")

    if stop_signal:
        return stop.say(stop_signal, step, config.run_dir or run_dir, silent=peers.index > 0)
    if peers.index > 0:
        return 0
    log_sample(config, run_dir, lambda: GPT(shape))
    summary = {
        "steps": num_steps,
        "train_graphs": graphs.compiled("train"),
        "eval_graphs": graphs.compiled("eval"),
        "host_to_device_uploads_per_step": speed.uploads_per_step,  # beside the batch
        "skipped_steps": metrics.skipped_steps,
        "validation_loss": validation_loss,
        "loss_floor": data.loss_floor,
        "seconds": goodput.total(),
        "goodput": goodput.seconds,
    }
    write_atomically(run_dir / "summary.json", json.dumps(summary, indent=2).encode())
    log_summary(config, run_dir, summary)
    mirror.upload_logs()
    floor = f" (floor {data.loss_floor:.4f})" if data.loss_floor is not None else ""
    print(f"validation loss {validation_loss:.4f}{floor}, perplexity {math.exp(min(validation_loss, 700.0)):.2f}")
    print_summary(summary)
    return 0


def decay_groups(model: GPT) -> list[dict]:
    """Parameter groups: matrices decay, layer norms and biases do not."""
    matrices = [parameter for name, parameter in model.named_parameters() if is_matrix(name)]
    others = [parameter for name, parameter in model.named_parameters() if not is_matrix(name)]
    return [{"params": matrices}, {"params": others, "weight_decay": 0.0}]


def compile_first_step(config: TransformerConfig, build, device) -> int:
    """The first step as train() would run it, compiled for a TPU slice instead; the weights take no memory."""
    import aot_tpu  # only here: a copy of this script trains without it

    if config.attention == "flash":
        aot_tpu.lower_pallas_for(config.compile_for)
    model = aot_tpu.without_weights(build, device)
    optimizer = make_optimizer(config, decay_groups(model))
    rates = learning_rates(config, config.num_steps).to(device)
    metrics = DeviceMetrics(["loss", "gradient_norm"], config.log_every, device)
    tokens = torch.zeros(config.global_batch_size, config.shape.sequence_length + 1, dtype=torch.int32).to(device)
    place_state(model, optimizer, metrics)
    if model.mesh is not None:
        xs.mark_sharding(tokens, model.mesh, (BATCH, None))
    count = config.global_batch_size * config.shape.sequence_length
    knobs = [("recompute activations in the backward pass", ["--remat"])] if not config.remat else []
    more_parts = 2 * config.gradient_accumulation_steps
    knobs += [("more parts of a global batch", [f"--gradient_accumulation_steps={more_parts}"])]
    if model.mesh is not None and model.mesh.mesh_shape[0] > 1:
        data, fsdp, tensor = model.mesh.mesh_shape
        knobs += [("divide parameters and optimizer state", [f"--mesh=1x{data * fsdp}x{tensor}"])]
    skip_nonfinite = config.on_nonfinite == "skip"
    step_options = (config.gradient_accumulation_steps, config.clip_gradient_norm, skip_nonfinite)
    step_args = (model, optimizer, rates, metrics, tokens, *step_options)
    sizes = dict(examples=count, unit="tokens", model_flops=count * config.shape.flops_per_token)
    settings = dataclasses.asdict(config)
    return aot_tpu.compile_for(config.compile_for, train_step, *step_args, **sizes, settings=settings, knobs=knobs)


def start_spmd(config: TransformerConfig) -> None:
    """Where there are several devices, one program for all of them: it must be said before the first tensor."""
    if xr.global_runtime_device_count() > 1:
        xr.use_spmd(auto=config.sharding == "auto" and xr.device_type() == "TPU")


def start_mesh(config: TransformerConfig) -> tuple[xs.Mesh | None, str]:
    """The mesh over all devices, None for a single one, and the line that says why it is so."""
    num_devices, on_tpu = xr.global_runtime_device_count(), xr.device_type() == "TPU"
    if config.sharding == "auto" and not on_tpu:
        raise InputError(
            "sharding is auto, but XLA's auto-sharding works on TPU only: elsewhere it leaves every parameter whole on "
            "every device; use --sharding table"
        )
    hbm_bytes = attached_chips()[0].hbm_gib * 2**30 / attached_chips()[0].devices_per_chip if on_tpu else None
    if config.compile_for:
        from tpu_program import parse_topology

        hbm_bytes = parse_topology(config.compile_for).hardware.limit_gib * 2**30
    sizes, why = choose_mesh(config, num_devices, hbm_bytes)
    if config.attention == "flash" and not on_tpu and not config.compile_for:
        raise InputError("attention is flash, but its Pallas kernels run on TPU only; use --attention plain")
    if config.attention == "flash" and version("jax") != "0.7.1":
        raise InputError(
            f"attention is flash, whose kernels are those of jax 0.7.1; found jax {version('jax')}; "
            "use --attention plain, or torch_xla 2.9.0"
        )
    if num_devices == 1:
        return None, "one device"
    mesh = xs.Mesh(np.arange(num_devices), sizes, ("data", "fsdp", "tensor"))
    xs.set_global_mesh(mesh)
    return mesh, f"data {sizes[0]} x fsdp {sizes[1]} x tensor {sizes[2]}: {why}"


def in_tokens(fields: dict, lengths: list[int], config: TransformerConfig) -> dict:
    """Speed's fields with tokens per second for examples per second, and MFU for the batches' true lengths."""
    examples_per_second = fields.pop("examples_per_second")
    if not lengths:
        return {**fields, "tokens_per_second": None}
    mean_length = sum(lengths) / len(lengths)
    mfu = fields["mfu"] and fields["mfu"] * mean_length / config.shape.sequence_length
    return {**fields, "mfu": mfu, "tokens_per_second": examples_per_second * mean_length}


def load_questions(config: TransformerConfig) -> tuple[list[torch.Tensor], np.ndarray]:
    """HellaSwag as batches of rows, 4 to a question, of one shape, and the right answers. Empty when not asked for."""
    if not config.hellaswag:
        return [], np.empty(0, int)
    questions = read_hellaswag(Path(config.data_dir) / config.hellaswag, config.shape.vocab_size)
    longest = max(len(q.context) + max(map(len, q.endings)) for q in questions) - 1
    T = min(config.shape.sequence_length, -(-longest // 128) * 128)
    rows = np.concatenate([question.rows(T) for question in questions])
    size = config.global_batch_size // config.gradient_accumulation_steps
    rows = np.concatenate([rows, np.full((-len(rows) % size, T + 1), -1, np.int32)])
    return list(torch.from_numpy(rows).split(size)), np.array([question.label for question in questions])


def print_plan(config: TransformerConfig, data: SequenceData | None, why: str, run_dir: Path | str) -> None:
    shape = config.shape
    tokens = config.global_batch_size * shape.sequence_length
    print(f"mesh       {why}")
    print(
        f"model      {shape.num_parameters:,} parameters: {shape.num_layers} layers, {shape.num_heads} heads of "
        f"{shape.head_dim}, width {shape.embedding_dim}, context {shape.sequence_length}, vocabulary "
        f"{shape.vocab_size} of {shape.padded_vocab_size}; {config.attention} attention"
    )
    if shape.embedding_dim % 128:
        padded = -(-shape.embedding_dim // 128) * 128
        print(f"width      {shape.embedding_dim} is no multiple of 128: the matrix unit works as if it were {padded}")
    print(
        f"mfu        {shape.flops_per_token:,} FLOPs a token (6 N + 12 L D T, causal half not taken off) over peak bf16"
    )
    description = data.description if data else "none: nothing runs"
    print(f"data       {description}; {tokens:,} tokens a step, {config.num_steps} steps")
    if data and data.loss_floor is not None:
        print(f"floor      no model can have an expected loss below {data.loss_floor:.4f} nats per token")
    print(f"run        {run_dir}", flush=True)


def print_placement(model: GPT) -> None:
    for name, parameter in model.named_parameters():
        spec = torch_xla._XLAC._get_xla_sharding_spec(parameter) or "one device"
        print(f"place      {name:22} {tuple(parameter.shape)!s:20} {partition_spec(name, parameter)!s:38} {spec}")


def main() -> int:
    config = parse_command_line(TransformerConfig, __doc__)
    host, addresses = tpu_hosts() if choose_device(config) == "tpu" else (0, ["localhost"])
    return train(config, wait_for_peers(host, addresses, config.peers_timeout))


if __name__ == "__main__":
    sys.exit(run_script(main))
