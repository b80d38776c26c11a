"""What `fd.noise_scale` costs a step: the same model with and without it, in alternating blocks of steps.

    farandole run -np 2 -- python benchmarks/noise_scale.py --width 256 --depth 6

Prints, for a measurement in every step: the median step of both, their difference, and the time of this rank's
thread in which gradients were read. With the default, one step of ten is measured.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import nn

import farandole as fd
from farandole.bench.models.language import LanguageModel

CONTEXT = 64


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--batch", type=int, default=4, help="samples of a rank")
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--steps", type=int, default=5, help="of a block")
    arguments = parser.parse_args()
    world = fd.init(progress=False)
    trained = []
    for _ in range(2):
        torch.manual_seed(0)
        model = LanguageModel(width=arguments.width, depth=arguments.depth, heads=4, context=CONTEXT)
        trained.append(fd.distribute(model, torch.optim.SGD(model.parameters(), lr=0.01)))
    noise = fd.noise_scale(trained[1][0], every=1, samples=arguments.batch)
    tokens = torch.randint(0, 256, (arguments.batch, CONTEXT), generator=torch.Generator().manual_seed(world.rank))
    seconds: list[list[float]] = [[], []]
    for block in range(2 * arguments.blocks):
        model, optimizer = trained[block % 2]
        for _ in range(arguments.steps):
            begin = time.perf_counter()
            nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds[block % 2].append(time.perf_counter() - begin)
    if world.rank == 0:
        without, measured = (statistics.median(each[2 * arguments.steps :]) for each in seconds)
        parameters = sum(each.numel() for each in trained[0][0].parameters())
        busy = noise.busy_seconds / len(seconds[1])
        print(f"{parameters / 1e6:.1f} M parameters, {world.size} ranks")
        print(f"step without: {1000 * without:.2f} ms, measured: {1000 * measured:.2f} ms")
        print(f"difference: {1000 * (measured - without):.2f} ms, {measured / without - 1:.1%} of a step")
        print(f"reading gradients: {1000 * busy:.2f} ms, {busy / without:.1%} of a step")


if __name__ == "__main__":
    main()
