"""Train or fine-tune a language model on a mesh of TPU devices.

Data, FSDP, tensor, context and expert parallel. Models: language/.

Run:     python transformer_tpu.py
             quick_test: a Markov chain of known entropy
         python transformer_tpu.py --preset development --data_dir DIR
             bytes of DIR/tinyshakespeare.txt
         python transformer_tpu.py --preset production --data_dir DIR
             GPT-2 124M, llm.c token shards, v5litepod-8
         python transformer_tpu.py --preset finetune --initial_weights DIR
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

import numpy as np

from language.options.transformer_options import TransformerConfig
from language.sequences import check_files, load_sequences, load_tasks
from tpu_utils.base.errors import run_script
from tpu_utils.options.environment import command_line, meet_hosts

if __name__ == "__main__":  # before the slow imports: a wrong option or file is answered at once
    config = command_line(TransformerConfig, __doc__, check_files)

import torch

from language.build import build_model, build_optimizer
from language.generation.samples import write_samples
from language.mesh import print_placement, print_plan, start_mesh, start_spmd
from language.models.layers import Decoder
from language.models.operations import is_likeliest, losses
from language.models.routing import as_table, tokens_of_experts, with_routers
from language.xla.loops import BATCH, sums_over_parts
from language.xla.shards import first_row, inputs_and_targets, rows_of_all, total
from tpu_utils.base.process import Peers
from tpu_utils.device import BatchSharding, mark_sharding, send
from tpu_utils.device.dropout import batch_keys
from tpu_utils.record.metrics import DeviceMetrics
from tpu_utils.run import Run
from tpu_utils.step.graphs import one_graph
from tpu_utils.step.optim import learning_rates, step_optimizer

# The mesh axis (language/xla/loops.py) that each axis of a parameter is sharded over; None, no match: replicated. Along
# "tensor" a device holds some heads and columns of the MLP; along FSDP a shard of every matrix, and gathers those of
# a layer when it gets there. Gathered rows of gate and up lie as their product reads them: columns would be copied.
FSDP = ("fsdp", "context")
PARTITION = {
    "(token_embedding|head_weight)": ("tensor", FSDP),
    "position_embedding": (None, FSDP),
    r"gate_up_weight\.\d+": (None, ("tensor", *FSDP), None),
    r"(qkv|kv)_weight\.\d+": (None, "tensor", FSDP),
    "(qkv|kv)_bias": (None, None, "tensor"),
    r"(attention|mlp)_out_weight\.\d+": (FSDP, "tensor"),
    r"(q|mlp_in)_weight\.\d+": ("tensor", FSDP),
    r"expert_gate_up_weight\.\d+": ("expert", None, "tensor", FSDP),
    r"expert_out_weight\.\d+": ("expert", FSDP, "tensor"),
    "(mlp_in|q)_bias": (None, "tensor"),
    r"(q|mlp_in)_lora_a\.\d+": (None, FSDP),  # LoRA's a (rank, in), b (out, rank): sharded as their matrix, rank not
    r"(q|mlp_in)_lora_b\.\d+": ("tensor", None),
    r"(qkv|kv|gate_up)_lora_a\.\d+": (None, None, FSDP),
    r"(qkv|kv|gate_up)_lora_b\.\d+": (None, "tensor", None),
    r"(attention|mlp)_out_lora_a\.\d+": (None, "tensor"),
    r"(attention|mlp)_out_lora_b\.\d+": (FSDP, None),
}


def partition_spec(name: str, tensor: torch.Tensor) -> tuple:
    return next((spec for pattern, spec in PARTITION.items() if re.fullmatch(pattern, name)), (None,) * tensor.dim())


def place(model: Decoder, named: dict[str, torch.Tensor]) -> None:
    """Shard tensors as PARTITION says for the parameter whose name and shape they have."""
    if model.mesh is not None:
        for name, tensor in named.items():
            mark_sharding(tensor, model.mesh, partition_spec(name, tensor))


def place_state(model: Decoder, optimizer, metrics) -> None:
    """Shard parameters and optimizer state as PARTITION says; replicate the metrics and the optimizer's step count."""
    if model.mesh is None:
        return
    for name, parameter in model.named_parameters():
        spec = partition_spec(name, parameter)
        for tensor in (parameter, *optimizer.state.get(parameter, {}).values()):  # a step count is (1,)
            mark_sharding(tensor, model.mesh, spec if tensor.shape == parameter.shape else (None,) * tensor.dim())
    for tensor in metrics.state_dict().values():
        mark_sharding(tensor, model.mesh, (None,) * tensor.dim())


def summed_loss(model: Decoder, tokens_BS, keys_B, config, weights: dict | None = None):
    """(what the gradients are of, [loss summed over the targets, *model.reported]) of a batch. keys_B: dropout's, of
    rows. weights: instead of the model's own, by name."""
    inputs, targets = inputs_and_targets(model, tokens_BS)
    if weights is None:
        logits, routing = model(inputs, keys_B)
    else:
        logits, routing = torch.func.functional_call(model, weights, (inputs, keys_B))
    loss = losses(logits, targets, model.shape.vocab_size, model.mesh).sum()
    objective, *reported = with_routers(loss, routing, targets, config)  # adds the losses of experts' routers
    return objective, [value.detach() for value in reported]


def accumulate_gradients(model: Decoder, tokens_BS, keys_B, config) -> list[torch.Tensor]:
    """What summed_loss() reports, of several micro-batches; gradients are left in parameter.grad.

    Their forward and backward passes are a loop inside the graph, so neither the graph nor the memory of activations
    grows with their number. (torch_xla.experimental.gradient_accumulation syncs in it.)
    """
    trained, unused, accumulation_steps = model.trained(), [], config.gradient_accumulation_steps
    names, parameters = zip(*sorted(model.named_parameters(), key=lambda item: item[0] not in trained), strict=True)

    def micro_batch(weights, rows):  # what it adds to the loss and to the gradients
        # weights come in as arguments: read from the module, views of them trace differently once they were updated
        weights = [weight.detach().requires_grad_(i < len(trained)) for i, weight in enumerate(weights)]
        tokens, keys = rows if keys_B is not None else (*rows, None)
        objective, reported = summed_loss(model, tokens, keys, config, dict(zip(names, weights, strict=True)))
        objective.backward()
        found = [weight.grad for weight in weights[: len(trained)]]
        unused.extend(name for name, gradient in zip(trained, found, strict=True) if gradient is None)
        return [*reported, *(0.0 if gradient is None else gradient for gradient in found)]

    batch = [tokens_BS] if keys_B is None else [tokens_BS, keys_B]
    zeros = {name: torch.zeros_like(parameter, requires_grad=False) for name, parameter in trained.items()}
    place(model, zeros)
    # row i goes to micro-batch i % accumulation_steps, so that each stays sharded over the mesh as the batch is
    stacked = [x.view(-1, accumulation_steps, *x.shape[1:]).transpose(0, 1).contiguous() for x in batch]
    reported = [torch.zeros((), device=tokens_BS.device) for _ in ("loss", *model.reported)]
    sums = sums_over_parts(model, micro_batch, [*reported, *zeros.values()], parameters, stacked)
    for (name, parameter), gradient in zip(trained.items(), sums[len(reported) :], strict=True):
        parameter.grad = None if name in unused else gradient
    return sums[: len(reported)]


@one_graph(each_shape=True)  # one graph for each length of a row; another one stops the run and says what changed
def train_step(model, optimizer, rates, metrics, tokens_BS, config):
    """One optimizer step as one graph. rates (num_steps,) is indexed on the device: nothing but the batch goes up."""
    # a mask for each row and step
    keys = batch_keys(metrics.step, config.seed, tokens_BS, first_row(tokens_BS)) if config.dropout else None
    if config.gradient_accumulation_steps == 1:
        objective, (loss, *reported) = summed_loss(model, tokens_BS, keys, config)
        objective.backward()
    else:
        loss, *reported = accumulate_gradients(model, tokens_BS, keys, config)
    loss, count = total(loss, model.mesh), total((tokens_BS[:, 1:] >= 0).sum().float(), model.mesh)  # count: targets
    gradients = {name: p.grad for name, p in model.trained().items() if p.grad is not None}  # None: no output needs it
    place(model, gradients)
    squares = [total((gradient * gradient).sum(), model.mesh) for gradient in gradients.values()]
    norm = torch.stack(squares).sum().sqrt() / count
    factor = ((config.clip_gradient_norm / (norm + 1e-6)).clamp(max=1.0) if config.clip_gradient_norm else 1.0) / count
    for name, gradient in gradients.items():
        model.get_parameter(name).grad = gradient * factor
    rate = rates.index_select(0, metrics.step)
    skipped = step_optimizer(optimizer, rate, torch.isfinite(loss + norm), config.on_nonfinite)
    optimizer.zero_grad(set_to_none=True)  # gradients still alive at the end would be outputs of the program
    metrics.record(loss / count, norm, *reported, skipped=skipped)
    place_state(model, optimizer, metrics)  # else XLA chooses the outputs' sharding: step 2 would be a second graph


@one_graph(each_shape=True)
def eval_step(model, tokens_BS):
    """(B, 3 or more) float32: summed loss of a sequence, its targets, the likeliest of these; choices of routers."""
    with torch.no_grad():
        inputs, targets = inputs_and_targets(model, tokens_BS)
        logits, routing = model(inputs)
        vocab_size = model.shape.vocab_size
        loss, likeliest = losses(logits, targets, vocab_size, model.mesh), is_likeliest(logits, targets, vocab_size)
        sums = [x.sum(1, keepdim=True) for x in (loss, (targets >= 0).float(), likeliest)]
        return rows_of_all(torch.cat([*sums, *tokens_of_experts(routing, targets)], 1), model.mesh)


def evaluate(model, batches, run: Run) -> np.ndarray:
    """What eval_step gives of every sequence of the batches, (rows, 3 or more). Padding rows have 0 targets."""
    with run.phase("evaluation"):
        results = [eval_step(model, tokens) for tokens in batches]
        return np.concatenate([result.cpu().numpy() for result in results]).astype(np.float64)  # the first read


def train(config: TransformerConfig, hosts: Peers | None = None) -> int:
    """hosts: the processes of this run, one for each host. None: this one alone."""
    join = partial(start_spmd, config)  # one program for all devices
    with Run(config, train_step, eval_step, hosts=hosts, join=join) as run:  # leaving it, all is on disk
        mesh, why = start_mesh(config)
        sharding = BatchSharding(mesh, BATCH) if mesh else None
        part = (sharding.part, sharding.num_parts) if sharding else (0, 1)  # a host reads the rows of its own devices
        data = load_sequences(config, *part)
        run.open(data, data, config.flops_per_token, sharding)  # locks the run directory, reads its newest checkpoint
        print_plan(run, data, why)
        # without initial values where run.track() fills in a checkpoint's
        model = build_model(config, mesh, run.device, partition_spec, run.print, initialised=not run.first_step)
        optimizer = build_optimizer(config, model)
        schedule = learning_rates(config, config.num_steps)
        rates = schedule.to(run.device)
        metrics = DeviceMetrics(["loss", "gradient_norm", *model.reported], config.log_every, run.device)
        place_state(model, optimizer, metrics)
        run.track(model=model, optimizer=optimizer, metrics=metrics)  # what checkpoints hold; filled when resuming
        print_placement(run, model, partition_spec)
        tasks = load_tasks(config, *part)
        asked = [send(batch, run.device, sharding)[0] for batch in tasks.batches]
        validation = [send(data.validation.batch(i), run.device, sharding)[0] for i in range(data.validation_batches)]

        for step, (tokens,) in run.steps(data):  # from the first one not yet done; uploads run ahead
            train_step(model, optimizer, rates, metrics, tokens, config)
            if run.log_due(step):  # reads the metrics of all steps since the last line
                run.log(step, learning_rate=schedule[step - 1].item())
            if step % config.eval_every == 0 or step == config.num_steps:
                loss, count, _, *chosen = evaluate(model, validation, run).sum(0)
                fields = dict(validation_loss=float(loss / count), perplexity=math.exp(min(loss / count, 700.0)))
                fields |= {} if data.loss_floor is None else dict(loss_floor=data.loss_floor)
                fields |= tasks.fields(evaluate(model, asked, run)) if asked else {}
                run.log_evaluation(step, **fields, **as_table(chosen, config))
            write_samples(run, step, model, config)
            if run.save_due(step):  # every save_every steps, at the end, and before a stop
                run.save(step)  # waits for the copy to the host; the disk is written behind the next steps
        return run.finish()


if __name__ == "__main__":
    sys.exit(run_script(lambda: train(config, meet_hosts(config))))
