"""Train or fine-tune a language model on a mesh of TPU devices.

Data, FSDP and tensor parallel. The models are in gpt.py and llama.py.

Run:     python transformer_tpu.py
             quick_test: a Markov chain of known entropy
         python transformer_tpu.py --preset development --data_dir DIR
             bytes of DIR/tinyshakespeare.txt
         python transformer_tpu.py --preset production --data_dir DIR
             GPT-2 124M, llm.c token shards, v5litepod-8
         python transformer_tpu.py --initial_weights DIR --dataset chat ...
             Hugging Face's weights, fine-tuned: docs/fine_tuning.md
         CPU_NUM_DEVICES=8 python transformer_tpu.py --mesh 2x2x2
             eight virtual devices without a TPU

Expect:  quick_test ends at 1.247 nats per token, 2.8 % above the floor of
         1.213, in 35 s; one graph for training, one for evaluation.
         XLA:CPU, 2 cores, torch 2.9.0, torch_xla 2.9.0, seed 0.
"""

# Shape suffixes: B batch, T time, S = T + 1, V padded vocabulary.

import math
import re
import sys
from functools import partial
from importlib.metadata import version
from pathlib import Path

import numpy as np

from config import TransformerConfig
from llmc_files import read_hellaswag
from model_shapes import LlamaShape
from token_data import SequenceData, check_files, load_sequences
from tpu_compiler.hardware import attached_chips, parse_topology
from tpu_utils.environment import command_line
from tpu_utils.errors import InputError, run_script

if __name__ == "__main__":  # before the slow imports: a wrong option or file is answered at once
    config = command_line(TransformerConfig, __doc__, check_files)

import torch
import torch_xla
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch_xla.experimental import scan

from dropout import batch_keys
from flash_attention import flash_attention
from gpt import GPT
from hf_files import open_weights
from layers import BATCH, Decoder, adapter_sizes, is_matrix, load_weights
from llama import Llama, parameter_shapes
from operations import causal_attention, losses
from optim import learning_rates, make_optimizer, step_optimizer
from tpu_utils.device import start_device
from tpu_utils.loader import BatchSharding
from tpu_utils.metrics import DeviceMetrics
from tpu_utils.peers import Peers, meet_hosts
from tpu_utils.run import Run

# How each axis of a parameter is sharded over the mesh (data, fsdp, tensor); None: whole. No match: whole.
# Under "tensor" a device holds some heads and some columns of the MLP; under "fsdp" it holds a part of everything and
# collects the rest of a layer when it gets there.
PARTITION = {
    "token_embedding": ("tensor", "fsdp"),
    "position_embedding": (None, "fsdp"),
    "head_weight": ("tensor", "fsdp"),
    r"(qkv|kv|gate_up)_weight\.\d+": (None, "tensor", "fsdp"),
    r"q_weight\.\d+": ("tensor", "fsdp"),
    "qkv_bias": (None, None, "tensor"),
    r"(attention|mlp)_out_weight\.\d+": ("fsdp", "tensor"),
    r"mlp_in_weight\.\d+": ("tensor", "fsdp"),
    "mlp_in_bias": (None, "tensor"),
    r"q_lora_a\.\d+": (None, "fsdp"),  # an adapter (rank, in) or (out, rank) as its matrix, the rank whole
    r"q_lora_b\.\d+": ("tensor", None),
    r"(kv|gate_up)_lora_a\.\d+": (None, None, "fsdp"),
    r"(kv|gate_up)_lora_b\.\d+": (None, "tensor", None),
    r"(attention|mlp)_out_lora_a\.\d+": (None, "tensor"),
    r"(attention|mlp)_out_lora_b\.\d+": ("fsdp", None),
}


def inputs_and_targets(tokens_BS):
    """(B, T) each, from one upload: a token that is read but is no target comes as ~token (token_data.py)."""
    return torch.where(tokens_BS < 0, -1 - tokens_BS, tokens_BS)[:, :-1], tokens_BS[:, 1:]


def partition_spec(name: str, tensor: torch.Tensor) -> tuple:
    return next((spec for pattern, spec in PARTITION.items() if re.fullmatch(pattern, name)), (None,) * tensor.dim())


def place(model: Decoder, tensors) -> None:
    """Shard tensors that belong to the parameters that are trained, in their order, as the table says."""
    if model.mesh is not None:
        for (name, parameter), tensor in zip(model.trained().items(), tensors, strict=True):
            xs.mark_sharding(tensor, model.mesh, partition_spec(name, parameter))


def place_state(model: Decoder, optimizer, metrics) -> None:
    """Shard parameters and optimizer state as the table says; what belongs to no axis is whole on every device."""
    if model.mesh is None:
        return
    for name, parameter in model.named_parameters():
        spec = partition_spec(name, parameter)
        for tensor in (parameter, *optimizer.state.get(parameter, {}).values()):  # the step count belongs to no axis
            xs.mark_sharding(tensor, model.mesh, spec if tensor.shape == parameter.shape else (None,) * tensor.dim())
    for tensor in metrics.state_dict().values():
        xs.mark_sharding(tensor, model.mesh, (None,) * tensor.dim())


def compute_gradients(model: Decoder, tokens_BS, accumulation_steps: int, keys_B=None):
    """Summed loss of the batch; its gradients are left in parameter.grad. keys_B: of each row, for dropout.

    With several steps the forward and backward pass stand in a loop inside the graph, so neither the graph nor the
    memory of activations grows with their number. (torch_xla.experimental.gradient_accumulation syncs inside the step;
    this is the loop under torch_xla's scan, which traces a function with its backward pass as it is.)
    """
    trained = model.trained()
    names, parameters = zip(*sorted(model.named_parameters(), key=lambda item: item[0] not in trained), strict=True)

    def summed_loss(weights, tokens, *keys):
        inputs, targets = inputs_and_targets(tokens)
        logits = torch.func.functional_call(model, dict(zip(names, weights, strict=True)), (inputs, *keys))
        return losses(logits, targets, model.shape.vocab_size).sum()

    def accumulate(carry, part):  # carry: loss, summed gradients, weights
        # weights come in as arguments: read from the module, views of them trace differently once they were updated
        weights = [weight.detach() for weight in carry[-len(names) :]]
        for weight in weights[: len(trained)]:
            weight.requires_grad_()
        loss = summed_loss(weights, *part)
        loss.backward()
        # the weights pass through: zip stops before them
        sums = zip(carry, [loss.detach(), *(weight.grad for weight in weights[: len(trained)])], strict=False)
        return [a + b for a, b in sums] + [weight.detach() for weight in weights], []

    batch = [tokens_BS] if keys_B is None else [tokens_BS, keys_B]
    if accumulation_steps == 1:
        loss = summed_loss(parameters, *batch)
        loss.backward()
        return loss.detach()
    zeros = [torch.zeros_like(parameter, requires_grad=False) for parameter in trained.values()]
    place(model, zeros)
    # row i goes to part i % accumulation_steps, so that every part stays sharded over the mesh as the batch is
    stacked = [x.view(-1, accumulation_steps, *x.shape[1:]).transpose(0, 1).contiguous() for x in batch]
    carry = [torch.zeros((), device=tokens_BS.device), *zeros, *(parameter.detach() for parameter in parameters)]
    (loss, *gradients), _ = scan._scan_impl_flat(accumulate, carry, stacked)
    for parameter, gradient in zip(trained.values(), gradients, strict=False):
        parameter.grad = gradient
    return loss


@torch_xla.compile(full_graph=True, name="train_step")
def train_step(model, optimizer, rates, metrics, tokens_BS, config):
    """One optimizer step as one graph. rates (num_steps,) is indexed on the device: nothing but the batch goes up."""
    keys = batch_keys(metrics.step, config.seed, tokens_BS) if config.dropout else None  # a mask for each row and step
    loss = compute_gradients(model, tokens_BS, config.gradient_accumulation_steps, keys)
    count = (tokens_BS[:, 1:] >= 0).sum().float()  # targets: the gradients are of the summed loss, theirs of the mean
    gradients = [parameter.grad for parameter in model.trained().values()]
    place(model, gradients)
    norm = torch.stack([(gradient * gradient).sum() for gradient in gradients]).sum().sqrt() / count
    clip = config.clip_gradient_norm
    factor = ((clip / (norm + 1e-6)).clamp(max=1.0) if clip else 1.0) / count
    for parameter, gradient in zip(model.trained().values(), gradients, strict=True):
        parameter.grad = gradient * factor
    rate = rates.index_select(0, metrics.step)
    skipped = step_optimizer(optimizer, rate, torch.isfinite(loss + norm), config.on_nonfinite)
    optimizer.zero_grad(set_to_none=True)  # gradients still alive at the end would be outputs of the program
    metrics.record(loss / count, norm, skipped=skipped)
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


def evaluate(model, batches, run: Run, step: int, kind="eval") -> np.ndarray:
    """Summed loss and number of targets of every sequence of the batches, (rows, 2). Padding rows have 0 targets."""
    results = []
    with run.phase("evaluation"):
        for (tokens,) in batches:
            with run.one_graph(kind, step, tokens):
                results.append(eval_step(model, tokens))
        # read when all are under way
        return np.concatenate([result.cpu().numpy() for result in results]).astype(np.float64)


def hellaswag_accuracy(result: np.ndarray, labels: np.ndarray) -> float:
    """Share of questions whose right ending has the lowest loss per token. result: (4 x questions + padding, 2)."""
    loss, count = result[: 4 * len(labels)].reshape(-1, 4, 2).transpose(2, 0, 1)
    return float(((loss / count).argmin(1) == labels).mean())


def train(config: TransformerConfig, hosts: Peers | None = None) -> int:
    """hosts: the processes of this run, one per host. None: this one alone."""
    with Run(config) as run:  # clock, watchdog, stop signals; on leaving, all is on disk
        device = start_device(config, join=partial(start_spmd, config))
        mesh, why = start_mesh(config)
        shape, sharding = config.shape, BatchSharding(mesh, BATCH) if mesh else None
        # compile_for asks about shapes alone, and needs no data
        part = (sharding.part, sharding.num_parts) if sharding else (0, 1)  # a host reads the rows of its own devices
        data = None if config.compile_for else load_sequences(config, *part)
        tokens_per_step = config.global_batch_size * shape.sequence_length
        sizes = dict(examples=tokens_per_step, unit="tokens", flops=config.flops_per_token)
        # makes and locks the run directory; with --resume reads its newest checkpoint
        found = (data.fingerprint, data.description) if data else (0, "none: nothing runs")
        run.open(device, config.num_steps, *found, **sizes, peers=hosts, sharding=sharding)
        print_plan(run, data, why)

        model = build_model(config, mesh, device, initialised=not run.first_step)  # restore() fills it otherwise
        optimizer = make_optimizer(config, decay_groups(model))
        schedule = learning_rates(config, config.num_steps)
        rates = schedule.to(device)
        metrics = DeviceMetrics(["loss", "gradient_norm"], config.log_every, device)
        place_state(model, optimizer, metrics)
        run.restore(model=model, optimizer=optimizer, metrics=metrics)  # what checkpoints hold; filled when resuming
        if config.print_placement:
            print_placement(run, model)
        if config.compile_for:  # ask the TPU compiler about the first step instead of training
            tokens = run.upload(np.zeros((config.global_batch_size, shape.sequence_length + 1), np.int32))
            return run.compile_for(train_step, model, optimizer, rates, metrics, *tokens, config)
        validation = [run.upload(data.validation.batch(i)) for i in range(data.validation_batches)]
        questions, labels = load_questions(config)
        questions = [run.upload(rows) for rows in questions]

        for step, (tokens,) in run.steps(data.train):  # from the first one not yet done; uploads run ahead
            length = tokens.shape[1] - 1  # one graph for each
            with run.one_graph(f"train_{length}", step, tokens, count=config.global_batch_size * length):
                train_step(model, optimizer, rates, metrics, tokens, config)
            if run.log_due(step):  # reads the metrics of all steps since the last line
                run.log(step, learning_rate=schedule[step - 1].item())
            if step % config.eval_every == 0 or step == config.num_steps:
                loss, count = evaluate(model, validation, run, step).sum(0)
                fields = dict(validation_loss=float(loss / count), perplexity=math.exp(min(loss / count, 700.0)))
                if data.loss_floor is not None:
                    fields["loss_floor"] = data.loss_floor
                if questions:
                    scores = evaluate(model, questions, run, step, "hellaswag")
                    fields["hellaswag_accuracy"] = hellaswag_accuracy(scores, labels)
                run.log_evaluation(step, **fields)
            if run.save_due(step):  # every save_every steps, at the end, and before a stop
                run.save(step)  # waits for the copy to the host; the disk is written behind the next steps

        return run.finish(validation_loss=run.evaluation.get("validation_loss"), loss_floor=data.loss_floor)


def build_model(config: TransformerConfig, mesh: xs.Mesh | None, device, initialised: bool) -> Decoder:
    """The model on the device. initialised: with weights to begin with. compile_for: shapes without memory."""
    attention = flash_attention if config.attention == "flash" else causal_attention
    dtype = torch.bfloat16 if config.precision == "bfloat16" else torch.float32
    options = dict(remat=config.remat, scan_layers=config.scan_layers, attention=attention, mesh=mesh)
    options |= dict(remat_keep=config.remat_keep, packed=config.dataset == "chat")
    if isinstance(config.shape, LlamaShape):
        adapters = dict(lora_rank=config.lora_rank, lora_alpha=config.lora_alpha)
        build = partial(Llama, config.shape, dtype, **adapters, **options)
    else:
        build = partial(GPT, config.shape, dtype, dropout=config.dropout, **options)
    if config.compile_for:
        from tpu_compiler.compiling import lower_pallas_for  # only here: needs libtpu's compiler
        from tpu_compiler.tracing import without_weights

        if config.attention == "flash":
            lower_pallas_for(config.compile_for)
        return without_weights(build, device)
    if initialised and config.initial_weights:
        weights = open_weights(Path(config.initial_weights), config.shape)
        return load_weights(build, weights.read, device, partition_spec, config.seed)
    model = build()
    if initialised:
        model.initialise(config.seed)
    return model.to(device)


def decay_groups(model: Decoder) -> list[dict]:
    """Parameter groups: matrices decay, layer norms and biases do not."""
    matrices = [parameter for name, parameter in model.trained().items() if is_matrix(name)]
    others = [parameter for name, parameter in model.trained().items() if not is_matrix(name)]
    return [{"params": matrices}, {"params": others, "weight_decay": 0.0}]


def choose_mesh(config: TransformerConfig, num_devices: int, hbm_bytes: float | None) -> tuple[tuple[int, ...], str]:
    """Sizes of the axes (data, fsdp, tensor) and why. Raises InputError for a mesh that cannot work.

    auto: plain data parallelism while weights, gradients and AdamW's two moments (16 bytes a parameter) take at most
    a third of a device's memory, else the smallest fsdp axis that gets them there; tensor only when asked for.
    """
    shape, batch = config.shape, config.global_batch_size
    state = (2 if config.lora_rank else 16) * shape.num_parameters  # frozen: bfloat16; adapters are few
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
        needed = math.prod(sizes)  # hbm_bytes is None where there is neither a TPU nor a slice to ask about
        remedy = (
            f"start it with CPU_NUM_DEVICES={needed} for as many virtual devices, or" if hbm_bytes is None else "try"
        )
        where = config.compile_for or ("this TPU slice" if hbm_bytes else "this CPU")
        raise InputError(
            f"mesh is {config.mesh}, {needed} devices, but {where} has {num_devices}; {remedy} --mesh {num_devices}x1x1"
        )
    for name, value, axis, size in (
        ("num_heads", shape.num_heads, "tensor", tensor),
        ("number of heads of keys and values", shape.num_cached_heads, "tensor", tensor),
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


def load_questions(config: TransformerConfig) -> tuple[list[np.ndarray], np.ndarray]:
    """HellaSwag as batches of rows, 4 to a question, of one shape, and the right answers. Empty when not asked for."""
    if not config.hellaswag:
        return [], np.empty(0, int)
    questions = read_hellaswag(Path(config.data_dir) / config.hellaswag, config.shape.vocab_size)
    longest = max(len(q.context) + max(map(len, q.endings)) for q in questions) - 1
    T = min(config.shape.sequence_length, -(-longest // 128) * 128)
    rows = np.concatenate([question.rows(T) for question in questions])
    size = config.global_batch_size // config.gradient_accumulation_steps
    rows = np.concatenate([rows, np.full((-len(rows) % size, T + 1), -1, np.int32)])
    return list(rows.reshape(-1, size, T + 1)), np.array([question.label for question in questions])


def print_plan(run: Run, data: SequenceData | None, why: str) -> None:
    config, shape = run.config, run.config.shape
    run.print(f"mesh       {why}")
    run.print(
        f"model      {shape.num_parameters:,} parameters: {shape.num_layers} layers, {shape.num_heads} heads of "
        f"{shape.head_dim}, width {shape.embedding_dim}, context {shape.sequence_length}, vocabulary "
        f"{shape.vocab_size} of {shape.padded_vocab_size}; {config.attention} attention"
    )
    if shape.embedding_dim % 128:
        padded = -(-shape.embedding_dim // 128) * 128
        run.print(
            f"width      {shape.embedding_dim} is no multiple of 128: the matrix unit works as if it were {padded}"
        )
    if config.initial_weights:
        run.print(f"weights    {config.initial_weights}{', as the run has changed them' if run.first_step else ''}")
    if config.lora_rank:
        sizes = adapter_sizes(parameter_shapes(shape), config.lora_rank)
        trained = sum(math.prod(size) for size in sizes.values())
        run.print(f"lora       {trained:,} more in adapters of rank {config.lora_rank}, which alone are trained")
    run.print(
        f"mfu        {config.flops_per_token:,} FLOPs a token ({4 if config.lora_rank else 6} N + 12 L D T, causal "
        "half not taken off) over peak bf16"
    )
    tokens = config.global_batch_size * shape.sequence_length
    run.print(f"batch      {tokens:,} tokens a step, {config.num_steps} steps")
    if data and data.loss_floor is not None:
        run.print(f"floor      no model can have an expected loss below {data.loss_floor:.4f} nats per token")


def print_placement(run: Run, model: Decoder) -> None:
    for name, parameter in model.named_parameters():
        spec = torch_xla._XLAC._get_xla_sharding_spec(parameter) or "one device"
        table = partition_spec(name, parameter)
        run.print(f"place      {name:22} {tuple(parameter.shape)!s:20} {table!s:38} {spec}")


if __name__ == "__main__":
    sys.exit(run_script(lambda: train(config, meet_hosts(config))))
