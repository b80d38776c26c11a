"""Ways to the other hosts, before anybody connects."""

from __future__ import annotations

import errno
import socket
import time

import pytest

from farandole.comm.world import rendezvous
from farandole.comm.world.rendezvous import has_route, wait_for_routes


def test_routes_are_looked_up_without_sending_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    assert has_route("127.0.0.1")

    class Probe(socket.socket):
        def connect(self, address: object) -> None:
            raise OSError(errno.EINVAL, "Invalid argument")  # what a route that is a black hole says

    monkeypatch.setattr("farandole.comm.world.rendezvous.socket.socket", Probe)
    assert not has_route("192.0.2.1")


def test_a_route_that_is_missing_for_a_moment_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def found_at_last(address: str) -> bool:
        asked.append(address)
        return address == "10.0.0.1" or len(asked) > 4

    monkeypatch.setattr(rendezvous, "has_route", found_at_last)
    monkeypatch.setattr(rendezvous, "_LOOK_SECONDS", 0.0)
    wait_for_routes(["", "10.0.0.1", "10.0.0.2"], 60.0, is_over=lambda: False)
    assert asked == ["10.0.0.1", "10.0.0.2", "10.0.0.2", "10.0.0.2", "10.0.0.2"]


def test_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "has_route", lambda address: False)
    begin = time.monotonic()
    wait_for_routes(["10.0.0.2"], 0.2, is_over=lambda: False)
    wait_for_routes(["10.0.0.2"], 600.0, is_over=lambda: True)
    assert time.monotonic() - begin < 10
