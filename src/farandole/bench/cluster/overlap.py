"""By how much computation and exchanges slow each other down: each alone, then both at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

from ...comm.device.accelerator import synchronize
from ...comm.world.store_sync import all_gather_json
from ...comm.world.world import World
from ...core.cluster.cluster import Coefficient
from .exchanges import SIZES, Run, elements_of
from .figures import slowdown_figure
from .rounds import LEAST_ROUNDS, MOST_ROUNDS, barrier

_SIDE = 256
_FEWEST_EXCHANGES, _MOST_EXCHANGES = 2, 200


def measure_overlap(world: World, run: Run, width: int, seconds: float) -> tuple[Coefficient, Coefficient]:
    """Return the slow-down of computation and of the exchange `run`, an all-reduce among `width` ranks.

    Called by all ranks. An exchange is of 2 MiB, or of less where the link is slow.
    """
    begin = time.monotonic()
    multiply = _products(world.device)
    tensor, count = _load(world, run, width, multiply, seconds / (LEAST_ROUNDS + 1))
    compute_alone: list[float] = []
    compute_both: list[float] = []
    exchange_alone: list[float] = []
    exchange_both: list[float] = []
    for done in range(1, MOST_ROUNDS + 1):
        round_begin = time.monotonic()
        rows = all_gather_json(world, "measure/overlap", _round(world, run, tensor, count, multiply))
        slowest = [max(column) for column in zip(*rows, strict=True)]
        for values, value in zip(
            (exchange_alone, exchange_both, compute_alone, compute_both), slowest, strict=True
        ):
            values.append(value)
        now = time.monotonic()
        wanted = _next_count(count, done, now - begin, now - round_begin, seconds)
        count = int(all_gather_json(world, "measure/overlap goes on", wanted)[0])
        if not count:
            break
    return slowdown_figure(compute_both, compute_alone), slowdown_figure(exchange_both, exchange_alone)


def _next_count(count: int, done: int, passed: float, took: float, seconds: float) -> int:
    """Return how many exchanges the next round makes, fewer where rounds take too long; 0: the time is over.

    Args:
        count: of the last round.
        done: rounds, at least 1.
        passed: seconds of all of it so far.
        took: seconds of the last round.
        seconds: for all of it.
    """
    if done >= LEAST_ROUNDS and passed * (done + 1) / done > seconds:
        return 0
    allowed = (seconds - passed) / max(1, LEAST_ROUNDS - done)
    return min(count, max(_FEWEST_EXCHANGES, int(count * allowed / max(took, 1e-9))))


def _load(
    world: World, run: Run, width: int, multiply: Callable[[], None], seconds: float
) -> tuple[torch.Tensor, int]:
    """Return what to exchange, and how often in a round of about `seconds`: the same on all ranks.

    Beside computation an exchange may take many times as long, and not each alike: so short rounds are made, until
    one is long enough to tell.
    """
    for nbytes in reversed(SIZES[:-1]):
        tensor = torch.zeros(elements_of(nbytes, width), dtype=torch.float32, device=world.device)
        run(tensor)
        barrier(world)
        once = max(all_gather_json(world, "measure/once", _exchanges(run, tensor, 1)))
        if 12 * once <= seconds:
            break
    count = _FEWEST_EXCHANGES
    while True:
        begin = time.perf_counter()
        _round(world, run, tensor, count, multiply)
        took = max(all_gather_json(world, "measure/round of overlap", time.perf_counter() - begin))
        if took >= seconds / 8 or count == _MOST_EXCHANGES:
            return tensor, min(_MOST_EXCHANGES, max(_FEWEST_EXCHANGES, int(count * seconds / took)))
        count = min(_MOST_EXCHANGES, 4 * count)


def _round(
    world: World, run: Run, tensor: torch.Tensor, count: int, multiply: Callable[[], None]
) -> tuple[float, float, float, float]:
    """Return the seconds of all exchanges, alone and beside products, and of one product, alone and beside."""
    barrier(world)
    alone = _exchanges(run, tensor, count)
    barrier(world)
    product = _count_until(multiply, time.perf_counter() + alone)
    barrier(world)
    both, product_both = _together(run, tensor, count, multiply)
    return alone, both, product, product_both


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
