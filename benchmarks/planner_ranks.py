"""The ranks of planner.py: train a model by the plan of the command, at one global batch.

farandole run -np 2 --plan plan.toml -- python benchmarks/planner_ranks.py language --batch 32
"""

from __future__ import annotations

import resource
from typing import Any

import torch

import farandole as fd
import planner_models
from farandole.core.host.process_status import data_bytes
from farandole.core.vocabulary.degrees import OTHER_SAMPLES
from farandole.parallel.apply import mesh_of, plan_of
from shared import make_parser

THREADS_BYTES = 64 * 2**20
"""Stacks of threads that start later, and what libraries allocate once."""


def main() -> None:
    """Train."""
    parser = make_parser(
        __doc__,
        batch=(int, "samples of a step over all ranks"),
        steps=30,
        slow=(str, "RANK:SPEED of a rank whose sleep takes longer"),
        memory=(int, "bytes that a rank may allocate beside libraries"),
    )
    parser.add_argument("model", choices=planner_models.MODELS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    here = fd.init()
    if options.slow:
        rank, speed = options.slow.split(":")
        planner_models.speed = float(speed) if here.rank == int(rank) else 1.0
    make_model, make_batch, loss_of = planner_models.MODELS[options.model]
    if options.memory:
        _warm_up()
        limit = (data_bytes() or 0) + options.memory + THREADS_BYTES
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    fd.distribute(model, optimizer)
    plan, mesh = plan_of(model), mesh_of(model)
    assert plan is not None, "it is distributed"
    assert mesh is not None, "it is distributed"
    samples = options.batch // mesh.size(*OTHER_SAMPLES) // plan.accumulate
    for _ in range(options.steps):
        for _ in range(plan.accumulate):
            _pass(model, make_batch(samples), loss_of, plan, is_language=options.model == "language")
        optimizer.step()
        optimizer.zero_grad()


def _pass(model: Any, batch: torch.Tensor, loss_of: Any, plan: fd.Plan, *, is_language: bool) -> None:
    targets = batch if is_language else batch.detach()
    if plan.context != 1:
        batch, targets = fd.context_shard(batch, targets)
    if plan.pipeline != 1 or plan.micro_batches > 1:
        fd.step(model, loss_of, batch, targets)
        return
    (loss_of(model(batch), targets) / plan.accumulate).backward()


def _warm_up() -> None:
    """Let libraries and the threads of the session allocate what they keep, beside any model."""
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    fd.distribute(model, optimizer)
    plan = plan_of(model)
    assert plan is not None, "it is distributed"
    for _ in range(plan.accumulate):
        model(torch.full((4, 64), float(fd.world().rank))).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


if __name__ == "__main__":
    main()
