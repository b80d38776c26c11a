"""Step time of `hvd.DistributedOptimizer` beside stock DistributedDataParallel, interleaved in one run.

    farandole run -np 2 --quiet -- python benchmarks/horovod_optimizer.py --model lm

Both train a copy of one model on the same input, in blocks A B B A, on ranks bound to their cores. A step's
time is that of its slowest rank. Printed are medians, and the ratio of neighbours in time with a bootstrap
interval; at most 1.03 is asked.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from datetime import date

import torch
import torch.distributed as dist
from engine_vs_ddp import build, paired  # type: ignore[import-not-found]
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import farandole.horovod.torch as hvd


def trainer(name: str, make: Callable[[], nn.Module]) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and its optimizer, spread over the ranks by one of the two."""
    torch.manual_seed(0)
    model = make()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), 1e-4, momentum=0.9)
    if name == "ddp":
        return DistributedDataParallel(model), optimizer
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    return model, optimizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["lm", "resnet50", "small"], default="lm")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--steps", type=int, default=1, help="steps a block")
    arguments = parser.parse_args()
    hvd.init()
    make, loss_of = build(arguments.model)
    trainers = {name: trainer(name, make) for name in ("horovod", "ddp")}
    times: dict[str, list[float]] = {name: [] for name in trainers}

    def block(name: str) -> None:
        model, optimizer = trainers[name]
        for _ in range(arguments.steps):
            dist.barrier()
            begin = time.perf_counter()
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
            times[name].append(time.perf_counter() - begin)

    order = list(trainers)
    for round_ in range(arguments.rounds + 1):
        for name in order if round_ % 2 else reversed(order):
            block(name)
        if round_ == 0:
            times = {name: [] for name in trainers}  # warm-up
    slowest = {}
    for name, values in times.items():
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        slowest[name] = tensor.tolist()
    if hvd.rank() == 0:
        ratio, interval = paired(slowest["horovod"], slowest["ddp"])
        result = {
            "model": arguments.model,
            "date": date.today().isoformat(),
            "machine": f"{platform.machine()}, torch {torch.__version__}, {hvd.size()} ranks, "
            f"{torch.get_num_threads()} thread(s) each",
            "steps": len(slowest["ddp"]),
            "median_ms": {name: round(1e3 * statistics.median(v), 3) for name, v in slowest.items()},
            "horovod_over_ddp": ratio,
            "interval": interval,
        }
        print(json.dumps(result), flush=True)
    trainers.clear()  # the wrapper keeps the group, which must be gone before the process is
    hvd.shutdown()


if __name__ == "__main__":
    main()
