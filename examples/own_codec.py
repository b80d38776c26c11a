"""A user-defined codec: the sign of each number, and one magnitude for all of them.

farandole run -np 2 -- python own_codec.py
"""

import torch
from torch import nn

import farandole as fd
from farandole.comm.messages import Message


def one_magnitude(grad, group):
    size = grad.abs().mean().view(1)
    sizes = yield Message(size, "all_gather")  # (ranks, 1): row r from rank r
    signs = yield Message((grad < 0).to(torch.uint8), "all_gather")  # (ranks, elements)
    everyone = (1 - 2 * signs.float()) * sizes
    return everyone.mean(0), everyone[group.rank]


def main():
    world = fd.init()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer = fd.distribute(model, optimizer, fd.Plan(codec="own_codec.one_magnitude"))

    weights = torch.randn(64, 1) / 8  # the same on all ranks
    torch.manual_seed(1 + world.rank)  # different samples
    for _ in range(200):
        inputs = torch.randn(32, 64)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), torch.tanh(inputs @ weights))
        loss.backward()
        fd.log(loss=loss)
        optimizer.step()
    mean_loss = fd.mean(loss.item())
    if world.rank == 0:
        print(f"loss {mean_loss:.4f} after 200 steps")


if __name__ == "__main__":
    main()
