"""Steps of ZeRO stages 1 and 2 beside plain data parallel, interleaved: Adam, 25.4 million parameters.

    farandole run -np 2 --quiet -- python benchmarks/zero.py
    farandole emulate --hosts 2 --rate 200mbit -- python benchmarks/zero.py --rounds 6 --plans plain zero1
    farandole emulate --hosts 2 --rate 200mbit -- python benchmarks/zero.py --rounds 6 --plans zero1 int8

Prints the median step of each plan in ms, its time over that of the first plan by neighbours in time, with a 95 %
bootstrap interval, and the bytes that a rank keeps of gradients and states. `--tokens`: of each rank's batch.
"""

from __future__ import annotations

import torch
from torch import nn

import farandole as fd
from memory_by_category import storages
from models import large_language_model, next_byte_loss, random_bytes, step_of
from shared import median_ms, paired, read_options, report, slowest_in_turns

PLANS = {
    "plain": fd.Plan(),
    "zero1": fd.Plan(zero=1),
    "zero2": fd.Plan(zero=2),
    "int8": fd.Plan(zero=1, codec="int8", weight_codec="int8"),
}


def kept_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of gradients and states on this rank, each storage once."""
    states = [value for each in optimizer.state.values() for value in each.values()]
    return sum(storages([*(parameter.grad for parameter in model.parameters()), *states]).values())


def main() -> None:
    arguments = read_options(
        __doc__,
        rounds=40,
        steps=(1, "steps a block"),
        tokens=128,
        plans=(list(PLANS), "in this order", sorted(PLANS)),
    )
    torch.set_num_threads(1)
    loss_of = next_byte_loss(random_bytes(1, arguments.tokens, fd.init().rank))
    trainers = {}
    for name in arguments.plans:
        torch.manual_seed(0)
        model = large_language_model(max(128, arguments.tokens))
        trainers[name] = fd.distribute(model, torch.optim.Adam(model.parameters(), 1e-4), PLANS[name])
    steps = {name: step_of(model, loss_of, optimizer) for name, (model, optimizer) in trainers.items()}
    seconds = slowest_in_turns(steps, arguments.rounds, steps=arguments.steps)
    first = arguments.plans[0]
    for name, (model, optimizer) in trainers.items():
        ratio, interval = paired(seconds[name], seconds[first])
        report({
            "plan": name,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "median_ms": median_ms(seconds[name], 2),
            f"over_{first}": ratio,
            "interval": interval,
            "kept_mib": round(kept_bytes(model, optimizer) / 2**20, 1),
        })  # fmt: skip
    fd.barrier()


if __name__ == "__main__":
    main()
