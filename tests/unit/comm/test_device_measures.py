"""What codec "auto" makes of marks on a device and of the times of messages there; no device, no other rank."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from farandole.comm.autotune import on_device, probe
from farandole.comm.autotune.on_device import DeviceMeasures
from farandole.comm.autotune.profile import PassTimings
from farandole.comm.messages import GroupRank, Message


def measures(seconds: list[float], ranks: int = 4, parameters: int = 3) -> DeviceMeasures:
    """Return those of a device on which marks are made each second, and messages take `seconds`."""
    marks, left = count(), iter(seconds)

    def seconds_of(message: Message, circle: object) -> float:
        assert message.operation == "all_to_all"
        return next(left)

    streams = SimpleNamespace(mark=lambda: float(next(marks)), seconds_between=lambda begin, end: end - begin)
    conductor = SimpleNamespace(streams=streams, seconds_of=seconds_of)
    everyone = SimpleNamespace(seat=GroupRank(0, ranks))
    route: Any = SimpleNamespace(on_device=conductor, slices=(everyone, None), on_hosts=None)
    world: Any = None
    return DeviceMeasures(world, route, [torch.zeros(2)] * parameters, left_out=("powersgd",))


def test_the_link_is_that_of_the_slowest_rank_and_the_same_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of five is no measure; half of a message without bytes is left out of one with many."""
    waits, times = [9.0, 3e-4, 2e-4, 4e-4, 5e-4], [1e-9, 5e-3, 4e-3, 6e-3, 7e-3]
    for other in ([1e-3, 1e-9], [2e-3, 5e-6]):

        def gather(world: Any, what: str, mine: list[float], other: list[float] = other) -> list[list[float]]:
            assert mine == pytest.approx([2e-4, (4e-3 - 1e-4) / 3000])
            return [mine, other]

        monkeypatch.setattr(on_device, "all_gather_json", gather)
        link = measures([*waits, *times]).link(4000)
        assert link.latency_seconds == link.pair_seconds == other[0]
        assert 1 / link.bytes_per_second == pytest.approx(max(3.9e-3 / 3000, other[1]))


def test_the_moments_of_a_step_are_those_of_its_marks_and_no_other() -> None:
    made = measures([])
    made.forward_begins()  # 0
    made.forward_begins()  # another forward pass of the same step
    made.backward_begins()  # 1
    made.is_ready(2)  # of a pass that was not the last
    made.backward_begins()  # 3
    made.is_ready(1)
    made.is_ready(0)
    made.wait_begins()  # 6
    made.wait_ends()  # 7
    made.wait_begins()  # without a backward pass: no step
    made.wait_ends()
    made.backward_begins()  # 10, which is its beginning too; 11
    made.is_ready(2)
    made.wait_begins()
    made.wait_ends()
    first, second = made.passes()
    zero = on_device._ZERO_SECONDS
    assert first == PassTimings(zero, zero + 3, zero + 6, zero + 7, [zero + 5, zero + 4, 0.0])
    assert second == PassTimings(zero, zero + 1, zero + 3, zero + 4, [0.0, 0.0, zero + 2])
    assert made.is_over, "nothing is marked any more"
    assert made.passes() == []


@pytest.mark.parametrize(
    ("few", "many", "per_byte", "per_bucket"),
    [
        (3e-4, 3e-4 + 33030144e-12, 1e-12, 3e-4 - 524288e-12),
        (3e-4, 3e-4, 0.0, 3e-4),  # launches alone
        (3e-4, 2e-4, 0.0, 2e-4),  # noise: what is nearer to buckets counts
        (0.0, 33030144e-12, 1e-12, 0.0),
    ],
)
def test_codecs_on_a_device_cost_something_for_each_bucket(
    few: float, many: float, per_byte: float, per_bucket: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 2 ranks, whose time a mark tells together: from a gradient of 512 KiB and one of 32 MiB."""
    asked: list[int] = []

    def seconds_between(begin: int, end: int) -> float:
        return 2 * (few if begin < 2 * 4 else many)

    marks = count()
    streams = SimpleNamespace(mark=lambda: next(marks), seconds_between=seconds_between)
    monkeypatch.setattr(probe, "streams_of", lambda _: streams)
    run = probe._run_codec

    def small(spec: Any, size: int, elements: int, device: torch.device) -> probe._CodecRun:
        asked.append(elements)
        return run(spec, size, 1024, device)._replace(nbytes=4 * elements * 2)

    monkeypatch.setattr(probe, "_run_codec", small)
    speed = probe.measure_codecs(("bf16",), 2, torch.device("cpu"))["bf16"]
    assert asked == [64 * 1024, 4 * 2**20]
    assert speed.seconds_per_byte == pytest.approx(per_byte, rel=1e-6, abs=0)
    assert speed.seconds_per_bucket == pytest.approx(per_bucket, rel=1e-6, abs=1e-12)
    assert (speed.ratio, speed.rounds) == (0.5, 2)
    assert speed.seconds(2**20) == pytest.approx(2**20 * per_byte + per_bucket, rel=1e-6)


def test_codecs_on_a_cpu_cost_bytes_alone() -> None:
    speed = probe.measure_codecs(("int8",), 2)["int8"]
    assert speed.seconds_per_byte > 0
    assert speed.seconds_per_bucket == 0
