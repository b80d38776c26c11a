"""A rank of a trial: trains some steps by its plan, and rank 0 says what they took.

``python -m farandole.train.analysis.trial_worker WORK``, started by ``farandole run --plan``. The learning rate
is 0, so that what a trial takes does not depend on where its training goes.
"""

from __future__ import annotations

import json
import math
import os
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

import farandole as fd

from ...comm.device.accelerator import peak_bytes, synchronize
from ...comm.world.store_sync import all_gather_json
from ...comm.world.world import World
from ...parallel.model import DistributedModel
from .probe import make_optimizer
from .trial import set_limit
from .trials import MARK, TrialSteps, TrialWork
from .user_code import (
    Batches,
    Loss,
    as_inputs,
    batch_in,
    errors_of_user,
    forward_loss,
    inputs_and_targets,
    load_function,
    scalar_loss,
)


def main(text: str) -> None:
    """Run the trial that `text` asks for."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    work = TrialWork(**json.loads(text))
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the user's code prints
    here = fd.init(progress=False)
    set_limit(work.limit_bytes, str(here.device))
    seconds = _train(here, work)
    everyone = all_gather_json(here, "trial", {"seconds": seconds, "peak_bytes": _peak_bytes(here)})
    if here.rank == 0:
        slowest = max((each["seconds"] for each in everyone), key=statistics.median)
        low, high = interval_of_median(slowest)
        steps = TrialSteps(
            seconds=statistics.median(slowest),
            low_seconds=low,
            high_seconds=high,
            peak_bytes=max(each["peak_bytes"] for each in everyone),
            steps=len(slowest),
        )
        answer.write(f"{MARK}{json.dumps(asdict(steps))}\n")
        answer.flush()
    fd.shutdown()


def interval_of_median(seconds: Sequence[float]) -> tuple[float, float]:
    """Return an interval that has the median with 95 % confidence, by order statistics; with few, all of them.

    >>> interval_of_median([3.0, 1.0, 2.0])
    (1.0, 3.0)
    """
    ordered, half = sorted(seconds), 0.98 * math.sqrt(len(seconds))
    first = max(0, math.floor(len(ordered) / 2 - half))
    last = min(len(ordered) - 1, math.ceil(len(ordered) / 2 + half))
    return ordered[first], ordered[last]


def _train(here: World, work: TrialWork) -> list[float]:
    """Return the seconds of each step that counts, on this rank."""
    loss = load_function(work.loss, what="the loss") if work.loss else None
    batches = Batches(load_function(work.batch, what="the batch"))
    with errors_of_user("making the model"):
        model = load_function(work.model, what="the model")().to(here.device)
    # Ranks that differ in samples alone draw other ones.
    torch.manual_seed(1 + here.sample_rank)
    batch = batch_in(None, batches.of(work.samples), here.device)
    optimizer = make_optimizer(work.optimizer, model.parameters())
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    fd.distribute(model, optimizer)
    seconds = []
    with errors_of_user("a training step"):
        for number in range(work.warm_up + work.steps):
            begin = time.perf_counter()
            _step(model, optimizer, batch, loss, work)
            synchronize(here.device)
            if number >= work.warm_up:
                seconds.append(time.perf_counter() - begin)
    return seconds


def _step(model: nn.Module, optimizer: Optimizer, batch: Any, loss: Loss | None, work: TrialWork) -> None:
    plan = DistributedModel.of(model).plan
    assert plan is not None, "it is distributed"
    if work.passes == 1 and (plan.pipeline != 1 or plan.micro_batches > 1):
        inputs, targets = (as_inputs(each) for each in inputs_and_targets(model, batch, loss))
        fd.step(model, lambda output, wanted: scalar_loss(output, wanted, loss), inputs, targets)
    else:
        for number in range(work.passes):
            each = work.samples // work.passes
            part = batch if work.passes == 1 else _rows(batch, work.samples, number * each, each)
            device = torch.device(next(model.parameters()).device).type
            scalar = forward_loss(model, part, loss, device=device, precision="fp32")
            (scalar / work.passes).backward()
    optimizer.step()
    optimizer.zero_grad()


def _rows(batch: Any, samples: int, begin: int, count: int) -> Any:
    def cut(each: Any) -> Any:
        is_rows = isinstance(each, torch.Tensor) and each.dim() and each.shape[0] == samples
        return each[begin : begin + count] if is_rows else each

    return tree_map(cut, batch)


def _peak_bytes(here: World) -> int:
    of_device = peak_bytes(here.device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 if of_device is None else of_device


if __name__ == "__main__":
    main(sys.argv[1])
