"""Steps of ZeRO stages 1 and 2 beside plain data parallel, interleaved: Adam, 25.4 million parameters.

    farandole run -np 2 --quiet -- python benchmarks/zero.py
    farandole emulate --hosts 2 --rate 200mbit -- python benchmarks/zero.py --rounds 6 --plans plain zero1
    farandole emulate --hosts 2 --rate 200mbit -- python benchmarks/zero.py --rounds 6 --plans zero1 int8

Prints the median step of each plan in ms, its time over that of the first plan by neighbours in time, with a 95 %
bootstrap interval, and the bytes that a rank keeps of gradients and states. `--tokens`: of each rank's batch.
"""

from __future__ import annotations

import argparse
import json
import statistics

import torch
import torch.distributed as dist
from interleaved import paired, time_in_turns  # type: ignore[import-not-found]
from torch import nn
from torch.distributed.tensor import DTensor

import farandole as fd
from farandole.bench.models.language import LanguageModel

PLANS = {
    "plain": fd.Plan(),
    "zero1": fd.Plan(zero=1),
    "zero2": fd.Plan(zero=2),
    "int8": fd.Plan(zero=1, codec="int8", weight_codec="int8"),
}


def kept_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of gradients and states on this rank, each storage once."""
    tensors = [parameter.grad for parameter in model.parameters()]
    tensors += [
        value for each in optimizer.state.values() for value in each.values() if isinstance(value, torch.Tensor)
    ]
    local = [
        tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors if tensor is not None
    ]
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in local}.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=1, help="steps a block")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--plans", nargs="+", choices=sorted(PLANS), default=list(PLANS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    here = fd.init()
    generator = torch.Generator().manual_seed(here.rank)
    tokens = torch.randint(0, 256, (1, arguments.tokens + 1), generator=generator)

    def loss_of(model: nn.Module) -> torch.Tensor:
        return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    trainers = {}
    for name in arguments.plans:
        torch.manual_seed(0)
        model = LanguageModel(width=512, depth=8, heads=8, context=max(128, arguments.tokens))
        optimizer = torch.optim.Adam(model.parameters(), 1e-4)
        trainers[name] = fd.distribute(model, optimizer, PLANS[name])
    seconds = time_in_turns(trainers, loss_of, arguments)
    first = arguments.plans[0]
    for name, (model, optimizer) in trainers.items():
        ratio, interval = paired(seconds[name], seconds[first])
        if here.is_main:
            found = {
                "plan": name,
                "parameters": sum(parameter.numel() for parameter in model.parameters()),
                "median_ms": round(1e3 * statistics.median(seconds[name]), 2),
                f"over_{first}": ratio,
                "interval": interval,
                "kept_mib": round(kept_bytes(model, optimizer) / 2**20, 1),
            }
            print(json.dumps(found), flush=True)
    dist.barrier()


if __name__ == "__main__":
    main()
