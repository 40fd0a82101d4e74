"""A loop that Hugging Face's accelerate places on a device."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn

accelerator = Accelerator()
torch.manual_seed(0)
rows = torch.randn(512, 16)
targets = rows[:, :4].argmax(1)

model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows, targets), batch_size=64)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for _ in range(3):
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss {loss.item():.6f}")
