"""One rank of ``farandole test``: collectives, the rate between hosts, training, and `fd.verify`.

Rank 0 says how far it has come, and the result, as lines of JSON on its output. Exceptions end the job, whose
launcher names rank and host.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import farandole as fd

from ...comm.world.store_sync import all_gather_json
from ...comm.world.world import World
from ...train.verify.verify import Check
from ..collectives.own_routes import Connections, make_sums
from ..data import load_text
from ..models.language import LanguageModel
from .collectives_check import cases, check, our_exchanges

CONTEXT, BATCH = 64, 8
LEAST_STEPS = 20
AGREE_STEPS = 10
"""Steps between two looks at the clock, which is rank 0's."""
COLLECTIVE_SHARE = 0.4
"""At most this share of the time; what is skipped then is reported."""
TRANSFER_SECONDS = 0.3
ROUNDS = 4
LEAST_BYTES, MOST_BYTES = 1 << 20, 64 << 20


def main() -> None:
    """Prove it, and say so."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--bits-per-second", type=float, default=0.0, help="expected between hosts; 0: not known")
    options = parser.parse_args()
    world = fd.init()
    begin = time.monotonic()
    checks = [_collectives(world, COLLECTIVE_SHARE * options.seconds)]
    rate = _rate_between_hosts(world, options.bits_per_second)
    checks += _training(world, begin + options.seconds)
    if world.rank == 0:
        rows = [vars(each) for each in checks]
        _say({"result": {"ranks": world.size, "hosts": world.node_count, "bits_per_second": rate, "checks": rows}})
    fd.shutdown()


def _say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def _progress(world: World, line: str) -> None:
    if world.rank == 0:
        _say({"progress": line})


def _collectives(world: World, seconds: float) -> Check:
    """Compare everything; every rank's first fault is reported."""
    if world.size == 1:
        return Check("collectives", None, "one rank has no other to exchange with", "start at least two: -np 2")
    begin = time.monotonic()
    faults: list[str] = []
    done = left_out = 0
    group: tuple[str, int] = ("", 0)
    stop = False
    ours = our_exchanges(world)
    for case in cases(world.size):
        if (case.kind, case.elements) != group and not stop:
            if case.elements != group[1]:
                _progress(world, f"collectives of {case.elements:,} elements")
            group = case.kind, case.elements
            over = time.monotonic() - begin > seconds
            stop = bool(all_gather_json(world, "proof/time", over)[0])  # rank 0's clock counts for all
        if stop:
            left_out += 1
            continue
        fault = check(case, world, ours)
        done += 1
        if fault:
            faults.append(fault)
    gathered = all_gather_json(world, "proof/faults", faults[:1])
    wrong = [f"rank {rank}: {first[0]}" for rank, first in enumerate(gathered) if first]
    if wrong:
        return Check(
            "collectives", False, "; ".join(wrong[:3]),
            "a network that changes what it carries, or memory that does: try the hosts pair by pair",
        )  # fmt: skip
    rest = f"; {left_out} larger ones left out to keep the time" if left_out else ""
    return Check("collectives", True, f"{done} exchanges equal to a local computation{rest}")


def _rate_between_hosts(world: World, expected: float) -> float | None:
    """Return bits a second each host sends in an all-reduce of one rank a host; None on one host."""
    hosts = all_gather_json(world, "proof/leaders", world.local_rank)
    leaders = [rank for rank, local_rank in enumerate(hosts) if local_rank == 0]
    if len(leaders) < 2:
        return None
    _progress(world, f"the rate between {len(leaders)} hosts")
    connections = Connections(world)
    found: float | None = None
    if world.rank in leaders:
        passes = 2 * (len(leaders) - 1) / len(leaders)
        wanted = TRANSFER_SECONDS * (expected or 1e9) / 8 / passes
        count = int(min(MOST_BYTES, max(LEAST_BYTES, wanted))) // 4
        tensor, run = torch.zeros(count), make_sums(connections, leaders, world.rank)
        taken = []
        for _ in range(ROUNDS):
            run(torch.zeros(len(leaders)))  # they begin together
            start = time.perf_counter()
            run(tensor)
            taken.append(time.perf_counter() - start)
        found = passes * 4 * count * 8 / statistics.median(taken[1:])
    # The step ends with the slowest.
    rates = [float(rate) for rate in all_gather_json(world, "proof/rate", found) if rate is not None]
    return min(rates)


def _training(world: World, end: float) -> list[Check]:
    """Train a small model on this package's own demo text until `end`, then verify all."""
    torch.manual_seed(0)
    training, _ = load_text(context=CONTEXT)
    model: nn.Module = LanguageModel(width=64, depth=2, heads=4, context=CONTEXT).to(world.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = fd.distribute(model, optimizer)
    loader = fd.shard(DataLoader(training, batch_size=BATCH, shuffle=True), seed=0)
    losses: list[float] = []
    batch: Any = None
    while True:
        for inputs, targets in loader:
            batch = (inputs, targets)
            optimizer.zero_grad()
            logits = model(inputs.to(world.device))
            loss = nn.functional.cross_entropy(logits.flatten(0, -2), targets.to(world.device).flatten())
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
            if len(losses) % AGREE_STEPS == 0:
                enough = len(losses) >= LEAST_STEPS and time.monotonic() >= end
                over = bool(all_gather_json(world, "proof/steps", enough)[0])
                _progress(world, f"training: step {len(losses)}, loss {losses[-1]:.3f}")
                if over:
                    return [_learned(losses), *fd.verify(model, optimizer, batch=batch, losses=losses).checks]


def _learned(losses: list[float]) -> Check:
    first, last = statistics.mean(losses[:5]), statistics.mean(losses[-5:])
    learned = math.isfinite(last) and last < first
    answer = f"{len(losses)} steps, loss from {first:.3f} to {last:.3f}"
    return Check(
        "training", learned, answer, "" if learned else "the gradients that arrive are not those that were sent"
    )


if __name__ == "__main__":
    main()
