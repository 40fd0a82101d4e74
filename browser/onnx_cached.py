"""A language model as one step over a key-value cache, in the form that ONNX takes: plain PyTorch, batch of one.

Shape suffixes: C tokens of a step, T context, S = T + C, L layers, G heads of keys and values, R = H / G, K head_dim.
"""

import torch
import torch.nn.functional as F

from language.models.layers import Decoder
from language.models.llama import Llama
from language.models.operations import layer_norm


class CachedModel(torch.nn.Module):
    """C tokens on top of what a cache holds. With many tokens it is the prefill of a prompt, with one the decoding."""

    def __init__(self, model: Decoder):
        super().__init__()
        self.model = model

    def forward(self, tokens_1C, position, length, keys_L1TGK, values_L1TGK):
        """tokens: int32, padding from index `length` on. position: (1,) int32, index of the first token in the text.
        length: (1,) int32, how many tokens are no padding. Cache rows from `position` on are not read.

        Returns logits (1, V) after the last token that counts, and new rows of keys and values (L, 1, C, G, K).
        """
        model, new = self.model, []
        C, T = tokens_1C.shape[1], keys_L1TGK.shape[2]
        here = torch.arange(C, dtype=torch.int32)
        cached = (torch.arange(T, dtype=torch.int32) < position).expand(C, T)
        is_seen = torch.cat([cached, here[:, None] >= here[None, :]], 1)  # (C, S)

        rows = torch.cat([torch.arange(T, dtype=torch.int32), position + here])  # positions of the S keys

        def attention_of_layer(layer):
            window = model.shape.windows[layer]

            def attention(q, k, v, *_):
                new.append((k, v))
                # heads in front, as a matrix product wants them: einsum would leave transpositions of weights behind
                q_GRC = q.view(C, k.shape[2], -1, q.shape[3]).permute(1, 2, 0, 3)
                keys = torch.cat([keys_L1TGK[layer], k], 1)[0].permute(1, 2, 0)[:, None]  # (G, 1, K, S)
                values = torch.cat([values_L1TGK[layer], v], 1)[0].permute(1, 0, 2)[:, None]  # (G, 1, S, K)
                scores = (q_GRC @ keys).masked_fill(~is_seen, -1e30)
                if window:
                    scores = torch.where(rows[None, :] < (position + here - (window - 1))[:, None], -1e30, scores)
                return (scores.softmax(-1) @ values).permute(2, 0, 1, 3).reshape(q.shape), None

            return attention

        weights, layers = model.cast()
        at = position + here
        if isinstance(model, Llama):
            x = model.embed(tokens_1C)
            for layer, (w, own) in enumerate(zip(layers, model.layer_kwargs(at.float(), T), strict=True)):
                x, _ = model.layer(x, w, attention=attention_of_layer(layer), **own)
        else:
            x = F.embedding(tokens_1C, model.token_embedding)
            x = x + F.embedding(at.clamp(max=len(model.position_embedding) - 1), model.position_embedding)
            for layer, w in enumerate(layers):
                x, _ = model.layer(x, w, attention=attention_of_layer(layer))
        x = x[0].index_select(0, length - 1)
        if isinstance(model, Llama):
            logits = model.head(x, weights)
        else:
            x = layer_norm(x[None], weights["final_ln_weight"], weights["final_ln_bias"])[0]
            logits = F.linear(x, weights["token_embedding"])
        keys, values = (torch.stack(rows) for rows in zip(*new, strict=True))
        return logits[:, : model.shape.vocab_size], keys, values
