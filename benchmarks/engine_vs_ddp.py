"""Step time of the reducer beside stock DistributedDataParallel, interleaved in one run.

    farandole run -np 2 --quiet -- python benchmarks/engine_vs_ddp.py --model small

Both train a copy of one model on the same input, in blocks A B B A, on ranks bound to their cores. A
step's time is that of its slowest rank. Printed are the route, medians, and the ratio of neighbours in time with a
bootstrap interval; "unrecorded" is the reducer with recording off, which gives the cost of recording.

On one host the reducer takes route "shared", memory that ranks share, while DDP uses gloo: --route flat lets the
reducer use gloo too. memory_vs_ddp.py measures memory.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import farandole as fd
from farandole.core.vocabulary.events import NullRecorder
from farandole.parallel.model import DistributedModel
from models import build, step_of
from shared import medians_ms, paired, read_options, report, slowest_in_turns


def main() -> None:
    arguments = read_options(
        __doc__,
        model=("small", "what is trained", ["lm", "resnet50", "small"]),
        route=("auto", "of Farandole's buckets", ["auto", "shared", "flat"]),
        rounds=60,
        steps=(1, "steps a block"),
    )
    world = fd.init()
    recorder = world.session.recorder
    make, loss_of = build(arguments.model)
    trained: dict[str, nn.Module] = {}

    def trainer(name: str) -> Callable[[], None]:
        torch.manual_seed(0)
        model = trained[name] = make()
        optimizer = torch.optim.SGD(model.parameters(), 1e-4, momentum=0.9)
        if name == "ddp":
            return step_of(DistributedDataParallel(model), loss_of, optimizer)
        fd.distribute(model, optimizer, fd.Plan(route=arguments.route))
        step = step_of(model, loss_of, optimizer)

        def recorded_step() -> None:
            world.session.recorder = NullRecorder() if name == "unrecorded" else recorder
            step()

        return recorded_step

    steps = {name: trainer(name) for name in ("farandole", "unrecorded", "ddp")}
    slowest = slowest_in_turns(steps, arguments.rounds, steps=arguments.steps)
    world.session.recorder = recorder
    reducer = DistributedModel.of(trained["farandole"]).reducer
    assert reducer is not None, "there are several ranks"
    ratio, interval = paired(slowest["farandole"], slowest["ddp"])
    recorded, recorded_interval = paired(slowest["farandole"], slowest["unrecorded"])
    report({
        "model": arguments.model, "steps": len(slowest["ddp"]), "median_ms": medians_ms(slowest, 3),
        "route": reducer.route, "farandole_over_ddp": ratio, "interval": interval,
        "recorded_over_unrecorded": recorded, "recorded_interval": recorded_interval,
    })  # fmt: skip
    steps.clear()  # the wrapper keeps the group, which must be gone before the process is


if __name__ == "__main__":
    main()
