"""A small ResNet on real images, cut into the stages of a pipeline.

    apt-get install dataset-fashion-mnist
    farandole run -np 2 -- python examples/resnet_pipeline.py --images 6000

The layers are timed at the first step and divided so that the slowest stage is as fast as can be.
"""

import argparse
from pathlib import Path

import torch
from resnet_zero import resnet
from torch import nn
from torch.utils.data import DataLoader, Subset

import farandole as fd
from farandole.bench.data import load_idx_images


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("/usr/share/datasets/fashion-mnist"))
    parser.add_argument("--images", type=int, default=60000, help="how many training images to use")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--schedule", default="1f1b", help="gpipe, 1f1b, interleaved, zb-h1 or zb-v")
    arguments = parser.parse_args()

    world = fd.init()
    torch.manual_seed(0)
    images = load_idx_images(arguments.data, train=True)
    training = Subset(images, range(min(arguments.images, len(images))))
    model = resnet(16)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    plan = (
        fd.Plan(pipeline=world.size, schedule=arguments.schedule, micro_batches=4) if world.size > 1 else fd.Plan()
    )
    model, optimizer = fd.distribute(model, optimizer, plan)

    loader = DataLoader(training, batch_size=arguments.batch_size, shuffle=True, drop_last=True)
    for inputs, labels in fd.shard(loader):
        optimizer.zero_grad()
        loss = fd.step(model, nn.functional.cross_entropy, inputs, labels)
        optimizer.step()
        fd.log(loss=float(loss))

    here = sum(parameter.numel() for parameter in model.parameters())
    fd.print(f"{here} parameters on rank 0, last loss {float(loss):.3f}")


if __name__ == "__main__":
    main()
