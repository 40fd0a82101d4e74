"""The loop of nanoGPT's train.py, with a small model: random crops, accumulation, clipping, a rate for each step."""

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
block_size, batch_size, gradient_accumulation_steps = 16, 8, 2
max_iters, warmup_iters, learning_rate, min_lr, grad_clip = 20, 5, 1e-2, 1e-3, 1.0
torch.manual_seed(0)
data = np.random.default_rng(0).integers(0, 64, 10_000).cumsum() % 64

model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64)).to(device)
if device == "cuda":
    model = torch.compile(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
draw = torch.Generator().manual_seed(1)


def get_batch():
    ix = torch.randint(len(data) - block_size, (batch_size,), generator=draw)
    x = torch.stack([torch.from_numpy(data[i : i + block_size].copy()) for i in ix])
    y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + block_size].copy()) for i in ix])
    return x.to(device), y.to(device)


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / warmup_iters
    ratio = (it - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


for iter_num in range(max_iters):
    for param_group in optimizer.param_groups:
        param_group["lr"] = get_lr(iter_num)
    for _ in range(gradient_accumulation_steps):
        x, y = get_batch()
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten()) / gradient_accumulation_steps
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    print(f"loss {loss.item() * gradient_accumulation_steps:.6f}")
