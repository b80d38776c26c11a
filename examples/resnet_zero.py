"""A small ResNet on real images: the optimizer's states in shards (ZeRO stage 1), forward passes in bfloat16.

    apt-get install dataset-fashion-mnist
    farandole run -np 2 -- python examples/resnet_zero.py --images 6000

The loop knows nothing of either: both are keys of the plan.
"""

import argparse
import resource
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset

import farandole as fd
from farandole.bench.data import load_idx_images

PLAN = fd.Plan(zero=1, precision="bf16")


class Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(out), nn.BatchNorm2d(out)])
        self.shortcut = nn.Conv2d(channels, out, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From (batch, channels, height, width) to (batch, out, height / stride, width / stride)."""
        inside = self.norms[1](self.second(torch.relu(self.norms[0](self.first(x)))))
        return torch.relu(self.shortcut(x) + inside)


def resnet(width: int) -> nn.Module:
    """Return a ResNet of 8 layers for images of 28 x 28."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        Block(width, width, 1),
        Block(width, 2 * width, 2),
        Block(2 * width, 4 * width, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, 10),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("/usr/share/datasets/fashion-mnist"))
    parser.add_argument("--images", type=int, default=60000, help="how many training images to use")
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank in a step")
    parser.add_argument("--width", type=int, default=16)
    arguments = parser.parse_args()

    fd.init()
    torch.manual_seed(0)
    images = load_idx_images(arguments.data, train=True)
    training = Subset(images, range(min(arguments.images, len(images))))
    testing = Subset(load_idx_images(arguments.data, train=False), range(1000))
    model = resnet(arguments.width)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    model, optimizer = fd.distribute(model, optimizer, PLAN)

    for inputs, labels in fd.shard(DataLoader(training, batch_size=arguments.batch_size, shuffle=True)):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    model.eval()
    correct = count = 0
    with torch.no_grad():
        for inputs, labels in fd.shard(DataLoader(testing, batch_size=250), evaluate=True):
            correct += int((model(inputs).argmax(1) == labels).sum())
            count += len(labels)
    accuracy = fd.mean(correct / max(count, 1), samples=count)
    states = sum(
        value.nbytes
        for each in optimizer.state.values()
        for value in each.values()
        if isinstance(value, torch.Tensor)
    )
    whole = 2 * sum(parameter.nbytes for parameter in model.parameters())
    fd.print(f"states: {states} bytes on this rank, {whole} in all")
    fd.print(f"peak memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f} GB")
    fd.print(f"accuracy {accuracy:.3f} on {len(testing)} images")


if __name__ == "__main__":
    main()
