"""What users would write or pick instead of transformer_tpu.py, for the other benchmarks.

Same model, same batch, same recipe; written the usual way for each library.
"""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from language.options.llama_shape import LlamaShape
from language.options.shapes import ModelShape

LEARNING_RATE, BETAS, CLIP = 6e-4, (0.9, 0.95), 1.0
WEIGHT_DECAY = 0.1
"""AdamW's, for what has two dimensions or more. CLIP: the largest norm of the gradient."""

# ---------------------------------------------------------------------------------------------------------- PyTorch


class Block(nn.Module):
    def __init__(self, shape: ModelShape):
        super().__init__()
        D = shape.embedding_dim
        self.num_heads = shape.num_heads
        self.ln1, self.ln2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.attention_out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.mlp_in, self.mlp_out = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x_BTD):
        B, T, D = x_BTD.shape
        q, k, v = (y.view(B, T, self.num_heads, -1).transpose(1, 2) for y in self.qkv(self.ln1(x_BTD)).split(D, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.attention_out(y.transpose(1, 2).reshape(B, T, D))
        return x_BTD + self.mlp_out(F.gelu(self.mlp_in(self.ln2(x_BTD)), approximate="tanh"))


class StraightGPT(nn.Module):
    """GPT-2 the way nanoGPT and most others write it: modules, scaled_dot_product_attention, a tied head."""

    def __init__(self, shape: ModelShape):
        super().__init__()
        D = shape.embedding_dim
        self.tokens, self.positions = nn.Embedding(shape.padded_vocab_size, D), nn.Embedding(shape.sequence_length, D)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.final_ln, self.head = nn.LayerNorm(D), nn.Linear(D, shape.padded_vocab_size, bias=False)
        self.tie()

    def tie(self) -> None:
        """Again after a move to an XLA device, which copies each module's parameter apart."""
        self.head.weight = self.tokens.weight

    def forward(self, tokens_BT):
        x = self.tokens(tokens_BT) + self.positions(torch.arange(tokens_BT.shape[1], device=tokens_BT.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.final_ln(x))


class HuggingFaceGPT(nn.Module):
    """transformers.GPT2LMHeadModel without dropout; its vocabulary is not padded. attention: None, what it chooses."""

    def __init__(self, shape: ModelShape, attention: str | None = None):
        import transformers

        super().__init__()
        self.model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=shape.vocab_size,
                n_positions=shape.sequence_length,
                n_embd=shape.embedding_dim,
                n_layer=shape.num_layers,
                n_head=shape.num_heads,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                attn_implementation=attention,
            )
        )

    def tie(self) -> None:
        self.model.tie_weights()

    def forward(self, tokens_BT):
        return self.model(tokens_BT, use_cache=False).logits


def usual_step(model, optimizer, tokens_BS):
    """A step as the guides show it, for torch_xla."""
    optimizer.zero_grad()
    with torch.autocast("xla", torch.bfloat16):
        logits = model(tokens_BS[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens_BS[:, 1:].flatten().long())
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    return loss.detach(), norm


def usual_adamw(model, **options) -> torch.optim.AdamW:
    decays = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decays, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, **options)


# -------------------------------------------------------------------------------------------------------------- JAX


def jax_adamw(parameters, gradients, state):
    """(parameters, state, norm of the gradient) after one update. state: (step, means, squares)."""
    import jax
    import jax.numpy as jnp

    step, means, squares = state
    step = step + 1
    leaves = jax.tree.leaves(gradients)
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in leaves))
    gradients = jax.tree.map(lambda g: g * jnp.minimum(1.0, CLIP / (norm + 1e-6)), gradients)
    beta1, beta2 = BETAS
    means = jax.tree.map(lambda m, g: beta1 * m + (1 - beta1) * g, means, gradients)
    squares = jax.tree.map(lambda v, g: beta2 * v + (1 - beta2) * g * g, squares, gradients)
    correction1, correction2 = (1 - jnp.float32(beta) ** step for beta in BETAS)

    def update(p, m, v):
        decay = WEIGHT_DECAY if p.ndim >= 2 else 0.0
        change = (m / correction1) / (jnp.sqrt(v / correction2) + 1e-8)
        return p * (1 - LEARNING_RATE * decay) - LEARNING_RATE * change

    return jax.tree.map(update, parameters, means, squares), (step, means, squares), norm


def jax_step(loss_of, parameters, state, *batch):
    """(parameters, state, norm, loss): to be jitted with donated parameters and state."""
    import jax

    loss, gradients = jax.value_and_grad(loss_of)(parameters, *batch)
    return *jax_adamw(parameters, gradients, state), loss


def jax_state(parameters):
    import jax
    import jax.numpy as jnp

    zeros = partial(jax.tree.map, jnp.zeros_like)
    return jnp.zeros((), jnp.float32), zeros(parameters), zeros(parameters)


def jax_normal(sizes):
    """Parameters of these sizes."""
    import jax

    leaves, tree = jax.tree.flatten(sizes, is_leaf=lambda x: isinstance(x, tuple))
    keys = jax.random.split(jax.random.key(0), len(leaves))
    return tree.unflatten([jax.random.normal(*of) * 0.02 for of in zip(keys, leaves, strict=True)])


def jax_gpt_parameters(shape: ModelShape):
    L, D, V, T = shape.num_layers, shape.embedding_dim, shape.padded_vocab_size, shape.sequence_length
    sizes = dict(ln1_weight=(D,), ln1_bias=(D,), qkv_weight=(D, 3 * D), qkv_bias=(3 * D,), out_weight=(D, D))
    sizes |= dict(out_bias=(D,), ln2_weight=(D,), ln2_bias=(D,), mlp_in_weight=(D, 4 * D), mlp_in_bias=(4 * D,))
    sizes |= dict(mlp_out_weight=(4 * D, D), mlp_out_bias=(D,))
    whole = dict(tokens=(V, D), positions=(T, D), final_weight=(D,), final_bias=(D,), layers=[sizes] * L)
    return jax_normal(whole)


def jax_attention(q_BTHK, k_BSHK, v_BSHK):
    """Causal attention written with jax.numpy alone; softmax in float32."""
    import jax
    import jax.numpy as jnp

    T = q_BTHK.shape[1]
    mask = jnp.tril(jnp.ones((T, T), bool))
    scores = jnp.einsum("bthk,bshk->bhts", q_BTHK, k_BSHK).astype(jnp.float32) / math.sqrt(q_BTHK.shape[-1])
    p = jax.nn.softmax(jnp.where(mask, scores, -1e30), axis=-1).astype(q_BTHK.dtype)
    return jnp.einsum("bhts,bshk->bthk", p, v_BSHK)


def jax_gpt_loss(parameters, tokens_BS, num_heads: int, dtype, attention=jax_attention):
    """Mean loss of a GPT-2 written with jax.numpy; products in dtype, loss in float32."""
    import jax
    import jax.numpy as jnp

    def layer_norm(x, weight, bias):
        z = x.astype(jnp.float32)
        z = (z - z.mean(-1, keepdims=True)) * jax.lax.rsqrt(z.var(-1, keepdims=True) + 1e-5)
        return (z * weight + bias).astype(dtype)

    inputs, targets = tokens_BS[:, :-1], tokens_BS[:, 1:]
    B, T = inputs.shape
    x = (parameters["tokens"][inputs] + parameters["positions"][:T]).astype(dtype)
    for layer in parameters["layers"]:
        w = {name: value if "ln" in name else value.astype(dtype) for name, value in layer.items()}
        y = layer_norm(x, w["ln1_weight"], w["ln1_bias"]) @ w["qkv_weight"] + w["qkv_bias"]
        q, k, v = (part.reshape(B, T, num_heads, -1) for part in jnp.split(y, 3, axis=-1))
        y = attention(q, k, v).reshape(B, T, -1)
        x = x + y @ w["out_weight"] + w["out_bias"]
        y = layer_norm(x, w["ln2_weight"], w["ln2_bias"]) @ w["mlp_in_weight"] + w["mlp_in_bias"]
        x = x + jax.nn.gelu(y, approximate=True) @ w["mlp_out_weight"] + w["mlp_out_bias"]
    x = layer_norm(x, parameters["final_weight"], parameters["final_bias"])
    return jax_cross_entropy(x @ parameters["tokens"].astype(dtype).T, targets)


def jax_cross_entropy(logits_BTV, targets_BT):
    """Mean loss, in float32."""
    import jax
    import jax.numpy as jnp

    logits = logits_BTV.astype(jnp.float32)
    picked = jnp.take_along_axis(logits, targets_BT[..., None], axis=-1)[..., 0]
    return (jax.nn.logsumexp(logits, axis=-1) - picked).mean()


def jax_llama_parameters(shape: LlamaShape):
    L, D, V, E = shape.num_layers, shape.embedding_dim, shape.padded_vocab_size, shape.mlp_dim
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    sizes = dict(ln1_weight=(D,), q_weight=(D, queries), k_weight=(D, keys), v_weight=(D, keys))
    sizes |= dict(out_weight=(queries, D), ln2_weight=(D,), gate=(D, E), up=(D, E), mlp_out=(E, D))
    head = {} if shape.tied_head else dict(head=(V, D))
    return jax_normal(dict(tokens=(V, D), final_weight=(D,), layers=[sizes] * L) | head)


def jax_llama_loss(parameters, tokens_BS, shape: LlamaShape, dtype, attention):
    """As jax_gpt_loss, of a Llama. The stretching of rope_scaling would change constants and no operation."""
    import jax
    import jax.numpy as jnp

    def rms_norm(x, weight):
        z = x.astype(jnp.float32)
        return (z * jax.lax.rsqrt((z * z).mean(-1, keepdims=True) + shape.norm_eps) * weight).astype(dtype)

    inputs, targets = tokens_BS[:, :-1], tokens_BS[:, 1:]
    (B, T), K = inputs.shape, shape.head_dim
    radians = jnp.arange(T)[:, None] / shape.rope_theta ** (jnp.arange(0, K, 2) / K)
    cos, sin = jnp.cos(radians)[:, None], jnp.sin(radians)[:, None]

    def rotate(x_BTHK):
        x, y = jnp.split(x_BTHK.astype(jnp.float32), 2, axis=-1)
        return jnp.concatenate([x * cos - y * sin, y * cos + x * sin], -1).astype(dtype)

    x = parameters["tokens"][inputs].astype(dtype)
    for layer in parameters["layers"]:
        w = {name: value if "ln" in name else value.astype(dtype) for name, value in layer.items()}
        y = rms_norm(x, w["ln1_weight"])
        q, k, v = ((y @ w[f"{name}_weight"]).reshape(B, T, -1, K) for name in "qkv")
        x = x + attention(rotate(q), rotate(k), v).reshape(B, T, -1) @ w["out_weight"]
        y = rms_norm(x, w["ln2_weight"])
        x = x + (jax.nn.silu(y @ w["gate"]) * (y @ w["up"])) @ w["mlp_out"]
    head = parameters["tokens" if shape.tied_head else "head"].astype(dtype)
    return jax_cross_entropy(rms_norm(x, parameters["final_weight"]) @ head.T, targets)
