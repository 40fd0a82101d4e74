"""The model that the options of transformer_tpu.py ask for, and its groups of parameters."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from language.data.new_tokens import with_new_tokens
from language.models.gpt import GPT
from language.models.layers import Decoder, is_matrix, load_weights
from language.models.llama import Llama
from language.models.muon import OF_MUON, Muon, is_muons
from language.models.operations import causal_attention
from language.options.shapes import LlamaShape
from language.options.transformer_options import TransformerConfig
from language.weights.hf_files import HuggingFaceWeights, open_weights
from language.xla.context import pieces_of, shared
from language.xla.shards import distribute
from tpu_utils.base.errors import InputError
from tpu_utils.device import Mesh, device_type
from tpu_utils.device.optim import make_optimizer
from tpu_utils.options.virtual_slice import without_weights


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
    attention = causal_attention
    if config.attention == "flash":
        from language.xla.flash_attention import flash_attention  # only here: its kernels are jax's, through torch_xla

        attention = flash_attention
    way = config.context_attention
    dtype = torch.bfloat16 if config.precision == "bfloat16" else torch.float32
    options = dict(remat=config.remat, scan_layers=config.scan_layers, mesh=mesh)
    options |= dict(attention=shared(attention, mesh, way), pieces=pieces_of(mesh, way))
    options |= dict(remat_keep=config.remat_keep, packed=config.dataset == "chat")
    options |= dict(lora_rank=config.lora_rank, lora_alpha=config.lora_alpha)
    options |= dict(base_dtype=getattr(torch, config.base_precision))
    if config.compile_for or device_type() == "TPU":  # elsewhere a device has no other memory than the host's
        options |= dict(offload=config.offload)
    if isinstance(config.shape, LlamaShape):
        options |= dict(expert_capacity=config.expert_capacity, expert_kernels=config.attention == "flash")
        build = partial(Llama, config.shape, dtype, **options)
    else:
        build = partial(GPT, config.shape, dtype, dropout=config.dropout, **options)
    if config.compile_for:
        return without_weights(build, device)
    if initialised and config.initial_weights:
        weights = open_weights(Path(config.initial_weights), config.shape)
        check_base(config, weights)
        chats = config.dataset == "chat"
        read = with_new_tokens(config, weights.names, weights.read, say) if chats else weights.read
        model = load_weights(build, read, device, partition_spec, config.seed)
    else:
        model = build()
        if initialised:
            model.initialise(config.seed)
        model = model.to(device)
    distribute(model, mesh, partition_spec)
    return model


def check_base(config: TransformerConfig, weights: HuggingFaceWeights) -> None:
    """Raises InputError where LoRA would round the weights of a folder, and nobody asked for it."""
    found = weights.kind("token_embedding").dtype
    if config.lora_rank and config.lora_base == "auto" and config.base_precision == "bfloat16" != str(found)[6:]:
        raise InputError(
            f"{config.initial_weights}: config.json says bfloat16, but the tensors are {str(found)[6:]}; expected one "
            "type; give --lora_base float32, or bfloat16 to round them"
        )


def build_optimizer(config: TransformerConfig, model: Decoder) -> torch.optim.Optimizer:
    """config's optimizer, with its state. Matrices decay, layer norms and biases do not. Raises InputError."""
    matrices, vectors, of_muon = [], [], []
    for name, parameter in model.trained().items():
        muons = config.optimizer == "muon" and is_muons(name)
        (of_muon if muons else matrices if is_matrix(name) else vectors).append(parameter)
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}, {"params": of_muon, "state": OF_MUON}]
    if config.optimizer != "muon":
        return make_optimizer(config, groups)
    if not of_muon:
        raise InputError(
            "optimizer is muon, but no parameter has the name of a layer's matrix; expected adamw, adam, sgd"
        )
    muon = partial(Muon, momentum=config.muon_momentum, mesh=model.mesh, dtype=model.compute_dtype)
    return make_optimizer(config, groups, muon)
