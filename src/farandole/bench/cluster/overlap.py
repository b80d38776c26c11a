"""By how much computation and exchanges slow each other down: each alone, then both at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

from ...comm.world.store_sync import all_gather_json
from ...comm.world.world import World
from ...core.cluster.coefficient import Coefficient
from .exchanges import SIZES, Run, elements_of
from .figures import slowdown_figure
from .rounds import LEAST_ROUNDS, MOST_ROUNDS, barrier, synchronize

_SIDE = 256
_MOST_EXCHANGES = 200


def measure_overlap(world: World, run: Run, width: int, seconds: float) -> tuple[Coefficient, Coefficient]:
    """Return the slow-down of computation and of the exchange `run`, an all-reduce among `width` ranks.

    Called by all ranks. An exchange is of 2 MiB, or of less where the link is slow.
    """
    tensor, count = _load(world, run, width, seconds / (3 * LEAST_ROUNDS))
    multiply = _products(world.device)
    compute_alone: list[float] = []
    compute_both: list[float] = []
    exchange_alone: list[float] = []
    exchange_both: list[float] = []
    begin = time.monotonic()
    for round_ in range(MOST_ROUNDS):
        barrier(world)
        alone = _exchanges(run, tensor, count)
        barrier(world)
        product = _count_until(multiply, time.perf_counter() + alone)
        barrier(world)
        both, product_both = _together(run, tensor, count, multiply)
        rows = all_gather_json(world, "measure/overlap", [alone, both, product, product_both])
        slowest = [max(column) for column in zip(*rows, strict=True)]
        for values, value in zip(
            (exchange_alone, exchange_both, compute_alone, compute_both), slowest, strict=True
        ):
            values.append(value)
        passed = time.monotonic() - begin
        is_over = round_ + 1 >= LEAST_ROUNDS and passed * (round_ + 2) / (round_ + 1) > seconds
        if all_gather_json(world, "measure/overlap is over", is_over)[0]:
            break
    return slowdown_figure(compute_both, compute_alone), slowdown_figure(exchange_both, exchange_alone)


def _load(world: World, run: Run, width: int, seconds: float) -> tuple[torch.Tensor, int]:
    """Return what to exchange, and how often it fits into `seconds`: the same on all ranks."""
    for nbytes in reversed(SIZES[:-1]):
        tensor = torch.zeros(elements_of(nbytes, width), dtype=torch.float32, device=world.device)
        run(tensor)
        barrier(world)
        once = max(all_gather_json(world, "measure/once", _exchanges(run, tensor, 1)))
        if 4 * once <= seconds:
            break
    return tensor, min(_MOST_EXCHANGES, max(2, int(seconds / max(once, 1e-9))))


def _products(device: torch.device) -> Callable[[], None]:
    left = torch.randn(_SIDE, _SIDE, dtype=torch.float32, device=device)
    out = torch.empty_like(left)

    def multiply() -> None:
        torch.mm(left, left, out=out)
        synchronize(device)

    return multiply


def _exchanges(run: Run, tensor: torch.Tensor, count: int) -> float:
    begin = time.perf_counter()
    for _ in range(count):
        run(tensor)
    synchronize(tensor.device)
    return time.perf_counter() - begin


def _count_until(multiply: Callable[[], None], end: float) -> float:
    """Return the seconds of one product, made until `end` of `perf_counter`."""
    begin, done = time.perf_counter(), 0
    while not done or time.perf_counter() < end:
        multiply()
        done += 1
    return (time.perf_counter() - begin) / done


def _together(run: Run, tensor: torch.Tensor, count: int, multiply: Callable[[], None]) -> tuple[float, float]:
    """Return the seconds of all exchanges, made by another thread, and of one product meanwhile."""
    taken: list[float] = []
    failures: list[BaseException] = []

    def exchange() -> None:
        try:
            taken.append(_exchanges(run, tensor, count))
        except BaseException as problem:  # raised again in the main thread
            failures.append(problem)

    thread = threading.Thread(target=exchange, name="farandole-measure-exchange", daemon=True)
    begin, done = time.perf_counter(), 0
    thread.start()
    while not done or thread.is_alive():
        multiply()
        done += 1
    each = (time.perf_counter() - begin) / done
    thread.join()
    if failures:
        raise failures[0]
    return taken[0], each
