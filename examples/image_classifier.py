"""A small CNN on real images, with BatchNorm over the global batch and an exact evaluation.

    apt-get install dataset-fashion-mnist
    farandole run -np 2 -- python image_classifier.py --data /usr/share/datasets/fashion-mnist

The data is a directory with the four IDX files of MNIST or Fashion-MNIST, gzipped or not.
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset

import farandole as fd
from farandole.bench.data import load_idx_images

parser = argparse.ArgumentParser()
parser.add_argument("--data", type=Path, default=Path("/usr/share/datasets/fashion-mnist"))
parser.add_argument("--images", type=int, default=60000, help="how many training images to use")
parser.add_argument("--batch-size", type=int, default=64, help="images per rank in a step")
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--lr", type=float, default=0.05)
arguments = parser.parse_args()

world = fd.init()
torch.manual_seed(0)
training = load_idx_images(arguments.data, train=True)
testing = load_idx_images(arguments.data, train=False)
training = Subset(training, range(min(arguments.images, len(training))))

model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
    nn.Flatten(), nn.Linear(32 * 7 * 7, 128), nn.ReLU(), nn.Linear(128, 10),
)  # fmt: skip
optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr, momentum=0.9)
model, optimizer = fd.distribute(model, optimizer, fd.Plan(sync_batch_norm=True))
loader = fd.shard(DataLoader(training, batch_size=arguments.batch_size, shuffle=True))

for _ in range(arguments.epochs):
    for images, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        fd.log(loss=loss, total_steps=arguments.epochs * len(loader))
        optimizer.step()

model.eval()
correct = count = 0
with torch.no_grad():
    for images, labels in fd.shard(DataLoader(testing, batch_size=500), evaluate=True):
        correct += int((model(images).argmax(1) == labels).sum())
        count += len(labels)
accuracy = fd.mean(correct / max(count, 1), samples=count)
if world.rank == 0:
    print(f"accuracy {accuracy:.3f} on {len(testing)} images")
