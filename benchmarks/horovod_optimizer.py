"""Step time of `hvd.DistributedOptimizer` beside stock DistributedDataParallel, interleaved in one run.

    farandole run -np 2 --quiet -- python benchmarks/horovod_optimizer.py --model lm

Both train a copy of one model on the same input, in blocks A B B A, on ranks bound to their cores. A step's
time is that of its slowest rank. Printed are medians, and the ratio of neighbours in time with a bootstrap
interval; at most 1.03 is asked.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import torch
from interleaved import argument_parser, build, describe, paired, time_in_turns  # type: ignore[import-not-found]
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
    arguments = argument_parser(__doc__ or "", "lm").parse_args()
    hvd.init()
    make, loss_of = build(arguments.model)
    trainers = {name: trainer(name, make) for name in ("horovod", "ddp")}
    slowest = time_in_turns(trainers, loss_of, arguments)
    if hvd.rank() == 0:
        ratio, interval = paired(slowest["horovod"], slowest["ddp"])
        result = {**describe(arguments.model, slowest), "horovod_over_ddp": ratio, "interval": interval}
        print(json.dumps(result), flush=True)
    trainers.clear()  # the wrapper keeps the group, which must be gone before the process is
    hvd.shutdown()


if __name__ == "__main__":
    main()
