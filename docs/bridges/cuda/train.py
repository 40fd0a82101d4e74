"""A loop as it is written for one NVIDIA GPU; without one it runs on the CPU."""

import torch
import torch.nn.functional as F
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
images = torch.randn(1000, 64)
labels = torch.randint(10, (1000,))

model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for start in range(0, len(images), 64):
    x = images[start : start + 64].to(device, non_blocking=True)
    y = labels[start : start + 64].to(device, non_blocking=True)
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.6f}")
