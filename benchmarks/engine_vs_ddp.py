"""Step time of the reducer beside stock DistributedDataParallel, interleaved in one run.

    farandole run -np 2 --quiet -- python benchmarks/engine_vs_ddp.py --model small

Both train a copy of one model on the same input, in blocks A B B A, on ranks bound to their cores. A
step's time is that of its slowest rank. Printed are the route, medians, and the ratio of neighbours in time with a
bootstrap interval; "unrecorded" is the reducer with recording off, which gives the cost of recording.

On one host the reducer takes route "shared", memory that ranks share, while DDP uses gloo: --route flat lets the
reducer use gloo too. memory_vs_ddp.py measures memory.
"""

from __future__ import annotations

import json

import torch
from interleaved import argument_parser, build, describe, paired, time_in_turns  # type: ignore[import-not-found]
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import farandole as fd
from farandole.core.vocabulary.events import NullRecorder
from farandole.parallel.model import DistributedModel


def main() -> None:
    parser = argument_parser(__doc__ or "", "small")
    parser.add_argument(
        "--route", choices=["auto", "shared", "flat"], default="auto", help="of Farandole's buckets"
    )
    arguments = parser.parse_args()
    world = fd.init()
    recorder = world.session.recorder
    make, loss_of = build(arguments.model)
    trainers: dict[str, tuple[nn.Module, torch.optim.Optimizer]] = {}
    for name in ("farandole", "unrecorded", "ddp"):
        torch.manual_seed(0)
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), 1e-4, momentum=0.9)
        if name == "ddp":
            model = DistributedDataParallel(model)
        else:
            fd.distribute(model, optimizer, fd.Plan(route=arguments.route))
        trainers[name] = (model, optimizer)

    def choose_recorder(name: str) -> None:
        world.session.recorder = NullRecorder() if name == "unrecorded" else recorder

    slowest = time_in_turns(trainers, loss_of, arguments, before=choose_recorder)
    world.session.recorder = recorder
    reducer = DistributedModel.of(trainers["farandole"][0]).reducer
    assert reducer is not None, "there are several ranks"
    if world.rank == 0:
        over_ddp, over_interval = paired(slowest["farandole"], slowest["ddp"])
        recorded, recorded_interval = paired(slowest["farandole"], slowest["unrecorded"])
        result = {
            **describe(arguments.model, slowest),
            "route": reducer.route,
            "farandole_over_ddp": over_ddp,
            "interval": over_interval,
            "recorded_over_unrecorded": recorded,
            "recorded_interval": recorded_interval,
        }
        print(json.dumps(result), flush=True)
    trainers.clear()  # the wrapper keeps the group, which must be gone before the process is


if __name__ == "__main__":
    main()
