"""The loop of loop_before.py on several processes. Start it with: farandole run -np 4 -- python loop_after.py."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import farandole as fd

fd.init()
torch.manual_seed(0)
x = torch.randn(4096, 20)
y = (x[:, :1] * x[:, 1:2]).sign()
loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)

model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer = fd.distribute(model, optimizer)
loader = fd.shard(loader)

for epoch in range(5):
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: loss {loss.item():.4f}")
