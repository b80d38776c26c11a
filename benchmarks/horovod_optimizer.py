"""Step time of `hvd.DistributedOptimizer` beside stock DistributedDataParallel, interleaved in one run.

    farandole run -np 2 --quiet -- python benchmarks/horovod_optimizer.py --model lm

Both train a copy of one model on the same input, in blocks A B B A, on ranks bound to their cores. A step's
time is that of its slowest rank. Printed are medians, and the ratio of neighbours in time with a bootstrap
interval; at most 1.03 is asked.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import farandole.horovod.torch as hvd
from models import Loss, build, step_of
from shared import medians_ms, paired, read_options, report, slowest_in_turns


def trainer(name: str, make: Callable[[], nn.Module], loss_of: Loss) -> Callable[[], None]:
    """Return a step of a model that is spread over the ranks by one of the two."""
    torch.manual_seed(0)
    model = make()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), 1e-4, momentum=0.9)
    if name == "ddp":
        return step_of(DistributedDataParallel(model), loss_of, optimizer)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return step_of(model, loss_of, hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters()))


def main() -> None:
    arguments = read_options(
        __doc__,
        model=("lm", "what is trained", ["lm", "resnet50", "small"]),
        rounds=60,
        steps=(1, "steps a block"),
    )
    hvd.init()
    steps = {name: trainer(name, *build(arguments.model)) for name in ("horovod", "ddp")}
    slowest = slowest_in_turns(steps, arguments.rounds, steps=arguments.steps)
    ratio, interval = paired(slowest["horovod"], slowest["ddp"])
    report({
        "model": arguments.model, "steps": len(slowest["ddp"]), "median_ms": medians_ms(slowest, 3),
        "horovod_over_ddp": ratio, "interval": interval,
    })  # fmt: skip
    steps.clear()  # the wrapper keeps the group, which must be gone before the process is
    hvd.shutdown()


if __name__ == "__main__":
    main()
