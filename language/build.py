"""The model that the options of transformer_tpu.py ask for, and its groups of parameters."""

from collections.abc import Callable
from functools import partial

import torch

from language.models.layers import Decoder, LoRA, is_matrix
from language.models.operations import causal_attention
from language.options.shapes import ModelShape
from language.options.transformer_options import TransformerConfig
from language.xla.saved_activations import LEVELS, LayerExecution
from language.xla.shards import distribute, pieces_of, size_of
from tpu_utils.device import Mesh, device_type
from tpu_utils.step.optim import make_optimizer


def build_model(
    config: TransformerConfig,
    mesh: Mesh | None,
    device,
    partition_spec: Callable,
    say: Callable[[str], None] = print,
    *,
    initialised: bool,
) -> Decoder:
    """The model on the device. partition_spec(name, parameter): how a parameter is sharded. say: prints a line.
    initialised: with weights to begin with. compile_for: shapes without memory. Raises InputError."""
    dtype = torch.bfloat16 if config.precision == "bfloat16" else torch.float32
    # elsewhere a device has no other memory than the host's
    offloads = config.remat and (config.compile_for or device_type() == "TPU")
    on_host = LEVELS.get(config.offload, ()) if offloads else ()
    points = LEVELS[config.remat_keep] if config.remat else None
    rest = config.scan_layers, config.loss_parts, config.remat_all_but, config.gradient_accumulation_steps
    options = dict(execution=LayerExecution(points, on_host, *rest), attention=choose_attention(config, mesh))
    options |= dict(mesh=mesh, pieces=pieces_of(mesh, config.context_attention), packed=config.dataset == "chat")
    if config.lora_rank:
        options |= dict(lora=LoRA(config.lora_rank, config.lora_alpha, getattr(torch, config.base_precision)))
    if type(config.shape) is ModelShape:
        from language.models.gpt import GPT  # only here, as Llama below: a run has one of them

        build = partial(GPT, config.shape, dtype, dropout=config.dropout, **options)
    else:
        from language.models.llama import Llama

        options |= dict(expert_capacity=config.expert_capacity, expert_kernels=config.attention == "flash")
        build = partial(Llama, config.shape, dtype, **options)
    if config.compile_for:
        from tpu_utils.options.virtual_slice import without_weights  # only for the compiler

        return without_weights(build, device)
    if initialised and config.initial_weights:
        from language.weights.initial_weights import begin_with  # only for a run that begins with others' weights

        model = begin_with(config, build, device, partition_spec, say)
    else:
        model = build()
        if initialised:
            model.initialise(config.seed)
        model = model.to(device)
    distribute(model, mesh, partition_spec)
    return model


def choose_attention(config: TransformerConfig, mesh: Mesh | None) -> Callable:
    attention = causal_attention
    if config.attention == "flash":
        from language.xla.flash_attention import flash_attention  # only here: its kernels are jax's, through torch_xla

        attention = flash_attention
    if size_of(mesh) == 1:
        return attention
    from language.xla.context_attention import context_parallel  # only for devices that share sequences

    return context_parallel(attention, mesh, config.context_attention)


def build_optimizer(config: TransformerConfig, model: Decoder) -> torch.optim.Optimizer:
    """config's optimizer, with its state. Matrices decay, layer norms and biases do not. Raises InputError."""
    if config.optimizer == "muon":
        from language.models.muon import make_muon  # only for a run that has it

        return make_muon(config, model)
    matrices = [parameter for name, parameter in model.trained().items() if is_matrix(name)]
    vectors = [parameter for name, parameter in model.trained().items() if not is_matrix(name)]
    return make_optimizer(config, [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}])
