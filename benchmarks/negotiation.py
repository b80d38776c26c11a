"""How many small named operations a second, and how long one takes.

::

    farandole run -np 2 -- python benchmarks/negotiation.py
"""

from __future__ import annotations

import json
import resource
import statistics
import time

import torch

import farandole as fd
from farandole.comm.negotiate.engine import NegotiationEngine
from farandole.comm.negotiate.request import Request

OPERATIONS_PER_STEP = 1000
STEPS = 20
SINGLE = 3000


def main() -> None:
    world = fd.init()
    engine = NegotiationEngine(world)
    one = torch.ones(1)
    names = [f"gradient/{i}" for i in range(OPERATIONS_PER_STEP)]
    rates = []
    for _ in range(STEPS):
        begin = time.perf_counter()
        tickets = [engine.submit([Request(name, "allreduce", one)])[0] for name in names]
        for ticket in tickets:
            ticket.wait()
        rates.append(OPERATIONS_PER_STEP / (time.perf_counter() - begin))
    seconds = []
    for _ in range(SINGLE):
        begin = time.perf_counter()
        engine.submit([Request("one", "allreduce", one)])[0].wait()
        seconds.append(time.perf_counter() - begin)
    seconds.sort()
    before = resource.getrusage(resource.RUSAGE_SELF)
    time.sleep(3)
    after = resource.getrusage(resource.RUSAGE_SELF)
    busy = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    figures = {
        "ranks": world.size,
        "small_allreduces_per_second_median": round(statistics.median(rates[2:])),
        "single_p50_ms": round(1e3 * seconds[SINGLE // 2], 3),
        "single_p99_ms": round(1e3 * seconds[SINGLE * 99 // 100], 3),
        "idle_processor_percent": round(100 * busy / 3, 2),
    }
    if world.rank == 0:
        print(json.dumps(figures), flush=True)
    engine.submit([Request("end", "barrier")])[0].wait()
    engine.close()
    fd.shutdown()


if __name__ == "__main__":
    main()
