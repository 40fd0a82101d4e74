"""Train a GPT-2 / GPT-3 language model on a mesh of TPU devices."""

# Shape suffixes: B batch, T time, D embedding width, H heads, K head_dim, V padded vocabulary, L layers, N = B*T.

import math
import re
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class ModelShape:
    """What fixes the size of a GPT: layers, heads, width, longest sequence, real vocabulary."""

    num_layers: int
    num_heads: int
    embedding_dim: int
    sequence_length: int
    vocab_size: int = 50257

    @property
    def padded_vocab_size(self) -> int:
        """Next multiple of 128, the lane count of the matrix unit; padded tokens get no probability."""
        return -(-self.vocab_size // 128) * 128

    @property
    def head_dim(self) -> int:
        return self.embedding_dim // self.num_heads


def parameter_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Every parameter in the order of llm.c's weight files. Layers are stacked on the first axis: 16 tensors
    at any depth, so tracing the optimizer costs the host the same at 12 and at 48 layers."""
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
    """Embeddings and weights of linear layers: cast to the compute dtype, and the only ones with weight decay."""
    return name.endswith(("_embedding", "_weight")) and "ln" not in name


def layer_norm(x, weight_D, bias_D, eps: float = 1e-5):
    """Float32 inside one fusion, the dtype of x in memory. E[x^2] - E[x]^2 reads x once."""
    z = x.float()
    mean = z.mean(-1, keepdim=True)
    variance = (z * z).mean(-1, keepdim=True) - mean * mean
    return ((z - mean) * torch.rsqrt(variance + eps) * weight_D + bias_D).to(x.dtype)


class Softmax(torch.autograd.Function):
    """softmax(scores * scale) under a mask: float32 inside, the dtype of scores saved for the way back."""

    @staticmethod
    def forward(ctx, scores, mask, scale):
        z = (scores.float() * scale).masked_fill(~mask, -1e30)
        e = (z - z.amax(-1, keepdim=True)).exp()
        p = (e / e.sum(-1, keepdim=True)).to(scores.dtype)
        ctx.save_for_backward(p)
        ctx.scale = scale
        return p

    @staticmethod
    def backward(ctx, grad):
        (saved,) = ctx.saved_tensors
        p, g = saved.float(), grad.float()
        return ((g - (g * p).sum(-1, keepdim=True)) * p * ctx.scale).to(saved.dtype), None, None


def causal_attention(q_BHTK, k_BHTK, v_BHTK, chunks: int | None = None):
    """Each slice of queries sees only the keys up to its end: 5/8 of the full square at 4 chunks.

    Chunks are cut only where they stay multiples of 128 long; shorter sequences go in one piece.
    """
    T, K = q_BHTK.shape[-2:]
    chunks = chunks or (4 if T % 512 == 0 else 1)
    width = T // chunks
    position = torch.arange(T, device=q_BHTK.device)
    out = []
    for end in range(width, T + 1, width):
        mask = position[end - width : end, None] >= position[None, :end]
        scores = q_BHTK[:, :, end - width : end] @ k_BHTK[:, :, :end].transpose(-1, -2)
        out.append(Softmax.apply(scores, mask, 1 / math.sqrt(K)) @ v_BHTK[:, :, :end])
    return torch.cat(out, 2) if chunks > 1 else out[0]


class CrossEntropy(torch.autograd.Function):
    """Negative log likelihood of every target, float32; 0 for targets below 0. Padded columns get no probability.

    Logits stay in the compute dtype in memory, and the target is picked by comparison: a gather over a sharded
    vocabulary would bring all logits to every device.
    """

    @staticmethod
    def forward(ctx, logits_NV, target_N, vocab_size):
        column = torch.arange(logits_NV.shape[1], device=logits_NV.device, dtype=torch.int32)
        z = logits_NV.float().masked_fill(column >= vocab_size, -1e30)
        logsumexp = torch.logsumexp(z, -1, keepdim=True)
        picked = (z * (column == target_N[:, None]).float()).sum(-1)
        ctx.save_for_backward(logits_NV, target_N, logsumexp)
        ctx.vocab_size = vocab_size
        return (logsumexp[:, 0] - picked) * (target_N >= 0).float()

    @staticmethod
    def backward(ctx, grad_N):
        logits_NV, target_N, logsumexp = ctx.saved_tensors
        column = torch.arange(logits_NV.shape[1], device=logits_NV.device, dtype=torch.int32)
        p = (logits_NV.float() - logsumexp).exp().masked_fill(column >= ctx.vocab_size, 0.0)
        counted = (target_N >= 0).float() * grad_N
        return ((p - (column == target_N[:, None]).float()) * counted[:, None]).to(logits_NV.dtype), None, None


def block(x_BTD, w, num_heads, attention):
    """One pre-norm transformer layer. w: this layer's slices of the stacked parameters, by name."""
    B, T, D = x_BTD.shape
    y = layer_norm(x_BTD, w["ln1_weight"], w["ln1_bias"])
    qkv = F.linear(y, w["qkv_weight"].reshape(3 * D, D), w["qkv_bias"].reshape(3 * D))
    q, k, v = (part.view(B, T, num_heads, -1).transpose(1, 2) for part in qkv.split(D, -1))
    y = attention(q, k, v).transpose(1, 2).reshape(B, T, D)
    x_BTD = x_BTD + F.linear(y, w["attention_out_weight"], w["attention_out_bias"])
    y = layer_norm(x_BTD, w["ln2_weight"], w["ln2_bias"])
    y = F.gelu(F.linear(y, w["mlp_in_weight"], w["mlp_in_bias"]), approximate="tanh")
    return x_BTD + F.linear(y, w["mlp_out_weight"], w["mlp_out_bias"])


class GPT(torch.nn.Module):
    """GPT-2: learned positions, pre-norm, GELU (tanh), one matrix for token embedding and output head.

    The head reads `token_embedding` itself, so there is no second weight that a move to the device could untie.
    """

    def __init__(self, shape: ModelShape, compute_dtype=torch.float32, remat: bool = False, scan_layers: bool = False):
        super().__init__()
        self.shape, self.compute_dtype, self.remat, self.scan_layers = shape, compute_dtype, remat, scan_layers
        self.attention = causal_attention
        for name, size in parameter_shapes(shape).items():
            self.register_parameter(name, torch.nn.Parameter(torch.empty(size)))

    def initialise(self, seed: int) -> None:
        """llm.c's initialisation: N(0, 0.02), residual projections N(0, 0.02 / sqrt(2L)), biases and padding 0."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if is_matrix(name):
                residual = re.search("(attention|mlp)_out", name) is not None
                std = 0.02 / math.sqrt(2 * self.shape.num_layers) if residual else 0.02
                torch.nn.init.normal_(parameter, 0.0, std, generator=generator)
            else:
                torch.nn.init.constant_(
                    parameter, 1.0 if name.endswith("ln_weight") or ("ln" in name and "weight" in name) else 0.0
                )
        with torch.no_grad():
            self.token_embedding[self.shape.vocab_size :] = 0.0

    def forward(self, tokens_BT):
        """Logits over the padded vocabulary, (B, T, V), in the compute dtype."""
        w = {n: p.to(self.compute_dtype) if is_matrix(n) or "ln" not in n else p for n, p in self.named_parameters()}
        T = tokens_BT.shape[1]
        # the lookup reads float32 rows, so that the gradients of a frequent token add up in float32
        x = F.embedding(tokens_BT, self.token_embedding) + self.position_embedding[:T]
        x = x.to(self.compute_dtype)
        layers = {n: p for n, p in w.items() if n in LAYER_PARAMETERS}
        run = partial(block, num_heads=self.shape.num_heads, attention=self.attention)
        sliced = {n: p.unbind(0) for n, p in layers.items()}
        for i in range(self.shape.num_layers):
            x = run(x, {n: p[i] for n, p in sliced.items()})
        x = layer_norm(x, w["final_ln_weight"], w["final_ln_bias"])
        return F.linear(x, w["token_embedding"])

    def loss_sum(self, tokens_BT, targets_BT):
        """Summed loss in nats over the targets >= 0, float32."""
        logits = self(tokens_BT)
        return CrossEntropy.apply(logits.flatten(0, 1), targets_BT.flatten(), self.shape.vocab_size).sum()


LAYER_PARAMETERS = [n for n in parameter_shapes(ModelShape(1, 1, 1, 1)) if "embedding" not in n and "final" not in n]
