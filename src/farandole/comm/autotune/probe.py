"""Measure what choosing needs: the link between the ranks, and the codecs on this machine."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ...core.link import LinkModel, communication_seconds, ring_bytes
from ...core.step_model import CodecSpeed
from ...core.vocabulary.codec_spec import CodecSpec
from ..codecs.registry import make_codec
from ..device.streams import streams_of
from ..messages import GroupRank, Message, as_encoding, simulate
from ..transport.rank_group import RankGroup
from ..transport.shared_tensor import DeviceSlices, DeviceSliceTensor, SharedMemory, SharedTensor
from ..transport.transport import Transport

# Whether the link is to be measured again: asked by each rank, answered for all, with every encoded exchange.


@dataclass
class ProbeRequest:
    """The request of one autotuner. Buckets send `by_this_rank` along and fill in `by_any_rank`."""

    by_this_rank: bool = False
    by_any_rank: bool = False

    def take(self) -> bool:
        """Return whether any rank asked in the last exchange, which is the same on all ranks, and forget it."""
        by_any_rank, self.by_any_rank = self.by_any_rank, False
        return by_any_rank


PROBE_TAG = 2**62
"""Above every tag of the conductor."""
_ROUNDS = 5
_REPEATS = 3
_PAIR_TAG = PROBE_TAG + 64
_PAIR_BYTES = 64
_LANES_TAG = PROBE_TAG + 128
_PARTS = 4
_INTRA_HOST_ELEMENTS = 256 * 1024
_WORTH_CONNECTIONS = 0.95
_SEGMENT_ELEMENTS = 256 * 1024
_DEVICE_ELEMENTS = 4 * 2**20
"""Enough that the kernels take longer than their launches."""
_FEW_ELEMENTS = 64 * 1024
"""So few that nothing but the launches counts."""
_CPU = torch.device("cpu")
_LONG_ENOUGH_SECONDS = 0.03
_LARGEST_BYTES = 8 * 2**20
_FIRST_BYTES = 256 * 1024
_LEAST_BYTES = 32 * 1024


def probe_link(transport: Transport, circle: RankGroup, everyone: RankGroup, byte_count: int) -> LinkModel:
    """Exchange small messages and some of `byte_count` with every rank of `circle`; called by all ranks at once.

    Returns the same numbers to all ranks of `everyone`, in whatever circles they are: those of the slowest.
    """
    size = circle.seat.size
    small = torch.zeros(size, 8, dtype=torch.uint8)
    waits = _round_seconds(transport, circle, Message(small, "all_to_all"), PROBE_TAG)
    rows = torch.zeros(size, max(1, byte_count // size), dtype=torch.uint8)
    moved = 1
    times, cpu = [], []
    for repeat in range(_REPEATS):
        used, began = time.thread_time(), time.perf_counter()
        flight = transport.start(Message(rows, "all_to_all"), PROBE_TAG + _ROUNDS + repeat, circle)
        flight.wait()
        times.append(max(1e-9, time.perf_counter() - began - min(waits) / 2))
        cpu.append(time.thread_time() - used)
        moved = max(1, flight.sent_bytes)
    pair = Message(torch.zeros(_PAIR_BYTES, dtype=torch.uint8), "sendrecv", peer=_pair_of(circle.seat))
    pair_waits = _round_seconds(transport, circle, pair, _PAIR_TAG)
    # The best of some: what lengthens one is a rank that got no core, not the link.
    mine = [min(times) / moved, statistics.median(waits), min(cpu) / (2 * moved), statistics.median(pair_waits)]
    byte_seconds, wait, cpu_seconds, pair_wait = largest_of_all(transport, everyone, mine)
    return LinkModel(1 / byte_seconds, wait, cpu_seconds, pair_wait)


def _round_seconds(transport: Transport, circle: RankGroup, message: Message, tag: int) -> list[float]:
    """Return how long each of some rounds of `message` took; their tags begin with `tag`."""
    seconds = []
    for round_ in range(_ROUNDS):
        began = time.perf_counter()
        transport.start(message, tag + round_, circle).wait()
        seconds.append(time.perf_counter() - began)
    return seconds


def largest_of_all(
    transport: Transport, everyone: RankGroup, mine: Sequence[float], tag: int = PROBE_TAG + _ROUNDS + _REPEATS
) -> list[float]:
    """Return, for each number, the largest that some rank of `everyone` gives: the same to all ranks.

    Another `tag` than the last time, where messages went over other connections meanwhile: they may overtake.
    """
    numbers = torch.tensor(mine, dtype=torch.float64)
    seen = transport.start(Message(numbers, "all_gather"), tag, everyone).wait()
    largest: list[float] = seen.amax(0).tolist()
    return largest


def host_seconds(work: Callable[[], object]) -> float:
    """Return how long the host takes for `work`."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def probe_intra_host(
    memory: SharedMemory | DeviceSlices,
    seconds_of: Callable[[Callable[[], object]], float] = host_seconds,
) -> tuple[float, float]:
    """Return what adding up inside a host takes: seconds a byte, and of next to nothing.

    Called by all ranks of the job at once; the numbers are this rank's. `seconds_of`: what times it.
    """
    elements = _DEVICE_ELEMENTS if isinstance(memory, DeviceSlices) else _INTRA_HOST_ELEMENTS
    found = []
    for count in (1024, elements):
        tensor = memory.allocate(count + -count % memory.local_size, torch.float32)

        def add_up(tensor: SharedTensor | DeviceSliceTensor = tensor) -> None:
            tensor.reduce_scatter()
            tensor.all_gather()

        found.append(min(seconds_of(add_up) for _ in range(_ROUNDS)))
    small, large = found
    return max(0.0, large - small) / (4 * elements), small


def choose_connection_count(
    transport: Transport, circle: RankGroup, everyone: RankGroup, byte_count: int, tried: Sequence[int]
) -> int:
    """Return how many connections to use, the same on all ranks: more only where faster by more than 5 %.

    Called by all ranks at once. Sends some of `byte_count` over each number of `tried`, ascending, interleaved.
    """
    size = circle.seat.size
    rows = torch.zeros(size, max(1, byte_count // (size * _PARTS)), dtype=torch.uint8)
    times: dict[int, list[float]] = {lanes: [] for lanes in tried}
    for repeat in range(_REPEATS):
        for lanes in times if repeat % 2 else reversed(times):
            transport.used_lanes = lanes
            tag = _LANES_TAG + 64 * repeat + 8 * tried.index(lanes)
            began = time.perf_counter()
            flights = [transport.start(Message(rows, "all_to_all"), tag + part, circle) for part in range(_PARTS)]
            for flight in flights:
                flight.wait()
            times[lanes].append(time.perf_counter() - began)
    fastest = [min(each) for each in times.values()]
    slowest = largest_of_all(transport, everyone, fastest, _LANES_TAG + 64 * _REPEATS)
    best, best_seconds = tried[0], slowest[0]
    for lanes, seconds in zip(tried[1:], slowest[1:], strict=True):
        if seconds < _WORTH_CONNECTIONS * best_seconds:
            best, best_seconds = lanes, seconds
    return best


def _pair_of(seat: GroupRank) -> int:
    """Return a rank half the way round, whose pair this one is; the last of an odd number is alone."""
    half = seat.size // 2
    if seat.rank >= 2 * half:
        return seat.rank
    return seat.rank + half if seat.rank < half else seat.rank - half


def probe_bytes(link: LinkModel | None, gradient_bytes: int = _LARGEST_BYTES) -> int:
    """Return how much to send so that a probe is long enough to mean something, and no longer.

    Never more than all gradients of a step, but for very few of them: what is longer is not asked of the link.
    """
    wanted = _FIRST_BYTES if link is None else int(link.bytes_per_second * 2 * _LONG_ENOUGH_SECONDS)
    most = min(_LARGEST_BYTES, max(_LEAST_BYTES, gradient_bytes))
    return min(most, max(_FIRST_BYTES, wanted))


def probe_seconds(link: LinkModel, size: int, gradient_bytes: int = _LARGEST_BYTES) -> float:
    """Return how long the next look at a link that is like this one takes, among `size` ranks: two probes."""
    both = probe_bytes(None, gradient_bytes), probe_bytes(link, gradient_bytes)
    moved = sum(ring_bytes(each, size, passes=1) for each in both)
    return communication_seconds(_REPEATS * moved, link.bytes_per_second, 6 * _ROUNDS, link.latency_seconds)


def measure_codecs(names: tuple[str, ...], size: int, device: torch.device = _CPU) -> dict[str, CodecSpeed]:
    """Return what each codec costs one rank of `size` here: the median of three short runs each.

    On an accelerator seconds of the device, for which the host waits: of many numbers, and of few, from which
    follows what a bucket of any size takes.
    """
    streams = streams_of(device)
    found = {}
    for name in names:
        spec = CodecSpec.parse(name)
        if streams is None or spec.is_exact:  # the backend adds up in one operation
            run = _run_codec(spec, size, _SEGMENT_ELEMENTS if streams is None else _DEVICE_ELEMENTS, device)
            found[name] = CodecSpeed(run.seconds / run.nbytes, run.ratio, spec.rounds)
            continue
        few, many = (_run_codec(spec, size, elements, device) for elements in (_FEW_ELEMENTS, _DEVICE_ELEMENTS))
        per_byte = max(0.0, (many.seconds - few.seconds) / (many.nbytes - few.nbytes))
        per_bucket = max(0.0, many.seconds - per_byte * many.nbytes)
        found[name] = CodecSpeed(per_byte, many.ratio, spec.rounds, per_bucket)
    return found


class _CodecRun(NamedTuple):
    """An exchange of one gradient, all ranks of which were here."""

    nbytes: int
    """The gradient's, in float32."""
    seconds: float
    """One rank's."""
    ratio: float
    """Bytes sent over bytes of the exact exchange."""


def _run_codec(spec: CodecSpec, size: int, elements: int, device: torch.device) -> _CodecRun:
    """Encode, add up and decode `elements`, or half of them for each rank of up to four."""
    ranks, streams = min(size, 4), streams_of(device)
    codec, side = make_codec(spec), math.isqrt(elements)
    shape = (side, side) if spec.granularity == "matrix" else (elements * ranks // 2,)
    generator = torch.Generator(device).manual_seed(1)
    grads = [torch.randn(shape, dtype=torch.float32, generator=generator, device=device) for _ in range(ranks)]
    groups = [GroupRank(rank, ranks) for rank in range(ranks)]
    states = [codec.init(grad, group) for grad, group in zip(grads, groups, strict=True)]
    times = []
    sent = 0
    for _ in range(4):
        units = [grad.clone() for grad in grads]
        encodings = [
            as_encoding(codec.exchange(unit, state, group), unit)
            for unit, state, group in zip(units, states, groups, strict=True)
        ]
        began = time.thread_time() if streams is None else streams.mark()
        together = simulate(encodings)
        spent = time.thread_time() - began if streams is None else streams.seconds_between(began, streams.mark())
        times.append(spent / ranks)
        sent, states = together.sent_bytes[0], together.states
    nbytes = grads[0].numel() * 4
    return _CodecRun(nbytes, statistics.median(times[1:]), sent / ring_bytes(nbytes, ranks))
