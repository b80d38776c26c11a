"""What is recorded of connections to other hosts: differences, when due, whoever opened and closed them."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from farandole.core.host.open_sockets import Key, borrowed, open_sockets
from farandole.core.vocabulary.events import LinkTraffic, StepDone, Traffic
from farandole.observe.records import host_sampler
from farandole.observe.records.host_sampler import TrafficWatch, _Count, read_connections


def play(monkeypatch: pytest.MonkeyPatch, readings: list[dict[Key, _Count]], steps: list[float]) -> list[Traffic]:
    """Return what is recorded when steps end at `steps` and the kernel answers with `readings`."""
    answers: Iterator[dict[Key, _Count]] = iter(readings)
    monkeypatch.setattr(host_sampler, "read_connections", lambda: next(answers))
    found: list[Traffic] = []
    watch = TrafficWatch(found.append)
    for number, at in enumerate(steps, start=1):
        watch.record(StepDone(number, at))
    watch.close()
    assert next(answers, None) is None, "read as often as due"
    return found


def count(sent: int, busy: float, peer: str = "10.0.0.2") -> _Count:
    return _Count("10.0.0.1", peer, sent, busy)


def test_differences_are_recorded_soon_when_due_and_at_the_end_from_the_third_step_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    readings = [
        {(3, 30): count(10**6, 1.0)},
        {(3, 30): count(3 * 10**6, 1.5), (4, 40): count(10**6, 0.25)},  # a second connection of the same way
        {(4, 40): count(2 * 10**6, 0.75)},  # the first was closed
        {(4, 40): count(3 * 10**6, 1.0)},
    ]
    found = play(monkeypatch, readings, [1.0, 2.0, 3.0, 3.4, 3.5, 4.5, 5.5, 6.5])
    assert found == [
        Traffic(3.5, 0.5, (LinkTraffic("10.0.0.1", "10.0.0.2", 3 * 10**6, 0.75),)),
        Traffic(5.5, 2.0, (LinkTraffic("10.0.0.1", "10.0.0.2", 10**6, 0.5),)),
        Traffic(6.5, 1.0, (LinkTraffic("10.0.0.1", "10.0.0.2", 10**6, 0.25),)),  # at the end
    ]


def test_a_descriptor_that_was_used_again_counts_from_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = [{(3, 30): count(10**9, 9.0)}, {(3, 31): count(10**6, 0.5, "10.0.0.3")}]
    [traffic] = play(monkeypatch, readings, [1.0, 2.0, 3.0, 5.0])
    assert traffic.links == (LinkTraffic("10.0.0.1", "10.0.0.3", 10**6, 0.5),)


def test_the_busiest_ways_of_very_many_are_recorded_and_quiet_ones_not(monkeypatch: pytest.MonkeyPatch) -> None:
    many = {(n, n): count(10**6 + n, 0.5, f"10.0.{n // 256}.{n % 256}") for n in range(1000)}
    [traffic] = play(monkeypatch, [{}, many], [1.0, 2.0, 3.0, 5.0])
    assert len(traffic.links) == host_sampler.MOST_LINKS
    assert traffic.links[0].sent_bytes == 10**6 + 999
    assert play(monkeypatch, [{}, {(1, 1): count(1000, 0.5)}], [1.0, 2.0, 3.0, 5.0]) == []


def test_a_forked_process_records_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Traffic] = []
    watch = TrafficWatch(found.append)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    monkeypatch.setattr(host_sampler, "read_connections", lambda: pytest.fail("not in a loader's worker"))
    for number in range(9):
        watch.record(StepDone(number, 10.0 * number))


def test_connections_within_the_host_and_other_sockets_are_left_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        other, _ = server.accept()
        left, right = socket.socketpair()
        with other, socket.socket(socket.AF_INET, socket.SOCK_DGRAM), left, right:
            one.sendall(bytes(10**5))
            before = open_sockets()
            assert read_connections() == {}
            assert open_sockets() == before
            assert other.recv(10) == bytes(10)


def test_what_is_no_socket_is_not_lent_and_leaves_nothing_open() -> None:
    read, write = os.pipe()
    try:
        before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208
        with pytest.raises(OSError, match="non-socket"), borrowed(read):
            pass
        assert set(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
    finally:
        os.close(read)
        os.close(write)
