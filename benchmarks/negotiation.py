"""How many small named operations a second, what one costs, and how long one takes alone.

::

    farandole run -np 2 -- python benchmarks/negotiation.py

On a machine that does other things too, compare the processor's time per operation: it is that of all threads of a
rank, and waiting for a turn does not count.
"""

from __future__ import annotations

import json
import resource
import statistics
import time
from collections.abc import Callable

import torch

import farandole as fd
import farandole.horovod.torch as hvd
from farandole.horovod.named_ops.engine import NamedOpsEngine
from farandole.horovod.named_ops.operations import Request
from shared import seconds_of

OPERATIONS_PER_STEP = 1000
STEPS = 20
WARM_UP_STEPS = 2
SINGLE = 3000
IDLE_SECONDS = 3.0


def main() -> None:
    hvd.init()
    engine = NamedOpsEngine(fd.world())
    one = torch.ones(1)
    names = [f"gradient/{i}" for i in range(OPERATIONS_PER_STEP)]

    def by_engine() -> None:
        tickets = [engine.submit([Request(name, "allreduce", one)])[0] for name in names]
        for ticket in tickets:
            ticket.wait()

    def by_horovods_names() -> None:
        handles = [hvd.allreduce_async_(torch.ones(1), name=name, op=hvd.Sum) for name in names]
        for handle in handles:
            hvd.synchronize(handle)

    def alone() -> None:
        engine.submit([Request("one", "allreduce", one)])[0].wait()

    figures = {
        "ranks": hvd.size(),
        **throughput("small_allreduces", by_engine),
        **throughput("hvd_allreduces", by_horovods_names),
        **latency("single", alone),
        **latency("hvd_single", lambda: hvd.allreduce(one, name="one", op=hvd.Sum)),
    }
    before = processor_seconds()
    time.sleep(IDLE_SECONDS)
    figures["idle_processor_percent"] = round(100 * (processor_seconds() - before) / IDLE_SECONDS, 2)
    if hvd.rank() == 0:
        print(json.dumps(figures), flush=True)
    engine.submit([Request("end", "barrier")])[0].wait()
    engine.close()
    hvd.shutdown()


def throughput(name: str, step: Callable[[], None]) -> dict[str, float]:
    """Return the median rate of steps, and the processor's time an operation takes on this rank."""
    before = processor_seconds()
    seconds = seconds_of(step, STEPS)
    busy = (processor_seconds() - before) / (STEPS * OPERATIONS_PER_STEP)
    return {
        f"{name}_per_second_median": round(OPERATIONS_PER_STEP / statistics.median(seconds[WARM_UP_STEPS:])),
        f"{name}_processor_us": round(1e6 * busy, 1),
    }


def latency(name: str, operation: Callable[[], object]) -> dict[str, float]:
    """Return how long one takes that is waited for at once."""
    seconds = sorted(seconds_of(operation, SINGLE))
    return {
        f"{name}_p50_ms": round(1e3 * seconds[SINGLE // 2], 3),
        f"{name}_p99_ms": round(1e3 * seconds[SINGLE * 99 // 100], 3),
    }


def processor_seconds() -> float:
    """Return what this process has used of the processor."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
