"""Which requests a server has had: what is sent again is answered as before, also after a restoration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from farandole.core.framing import FrameError
from farandole.sync.server.channel import ServerMessage
from farandole.sync.server.loop import ServiceHost
from tests.unit.sync.server.ledger import Ledger

CONFIG: Mapping[str, Any] = {"elements": 2}


def host() -> ServiceHost:
    return ServiceHost({"a": Ledger(CONFIG), "b": Ledger(CONFIG)}, {0, 1})


def take(
    to: ServiceHost, client: int, number: int, do: str, *, service: str = "a", keeps: bool = True, **values: Any
) -> list[tuple[int, ServerMessage]]:
    named = {"seq": number, "service": service, "keeps": keeps, "values": {"do": do, **values}}
    return to.take(client, ServerMessage(named, [torch.ones(2).double()]))


def restored(of: ServiceHost) -> ServiceHost:
    made = host()
    made.load(of.state())
    return made


def said(replies: list[tuple[int, ServerMessage]]) -> dict[str, Any]:
    ((_, reply),) = replies
    return {name: reply.values.get(name) for name in ("seq", "values", "error")}


def test_a_request_that_is_sent_again_is_answered_as_it_was_and_not_done_again() -> None:
    first = host()
    take(first, 0, 1, "add", entry=5)
    answer = said(take(first, 1, 3, "add", entry=6))
    assert answer["values"] == {"count": 2}
    for each in (first, restored(first)):
        assert said(take(each, 1, 3, "add", entry=6)) == answer
        assert said(take(each, 1, 2, "add", entry=6))["values"] == {}, "an older one, whose answer it has had"
        assert each.last_of(1) == 3
        assert each.lasts() == {0: 1, 1: 3}
        entries = said(take(each, 0, 2, "read", keeps=False, at_least=0))["values"]["entries"]
        assert entries == [[0, 5], [1, 6]]


def test_an_error_is_said_again_too_where_its_reply_was_lost() -> None:
    first = host()
    answer = said(take(first, 0, 1, "fail"))
    assert answer["error"] == {"kind": "ConfigError", "message": "it was asked to", "remedy": "do not ask"}
    for each in (first, restored(first)):
        assert said(take(each, 0, 1, "fail")) == answer
        assert said(take(each, 0, 2, "add", entry=1))["values"] == {"count": 1}


def test_a_client_that_has_left_has_left_a_restored_server_too() -> None:
    first = host()
    first.leave(1)
    assert first.leave(1) == []
    again = restored(first)
    assert again.expected == {0}
    assert said(take(again, 0, 1, "read", keeps=False, at_least=0))["values"]["left"] == [1]


def test_durable_is_what_a_snapshot_on_the_disk_has() -> None:
    first = host()
    assert take(first, 0, 1, "add", entry=1)[0][1].values["durable"] == 0
    first.durable = {0: 1}
    assert take(first, 0, 2, "add", entry=1)[0][1].values["durable"] == 1
    assert take(restored(first), 0, 3, "add", entry=1)[0][1].values["durable"] == 2


def test_a_reply_is_of_the_service_that_was_asked_last() -> None:
    both = host()
    assert take(both, 0, 1, "read", keeps=False, at_least=1) == []
    assert take(both, 0, 2, "read", service="b", keeps=False, at_least=1) == []
    assert said(take(both, 1, 1, "add", entry=7)[:1])["seq"] == 1
    assert both.due() == []
    replies = dict(take(both, 1, 2, "add", service="b", entry=8))
    assert said([(0, replies[0])]) == {"seq": 2, "values": {"entries": [[1, 8]], "left": []}, "error": None}


def test_what_is_no_request_is_refused() -> None:
    for values in ({}, {"seq": "x", "service": "a", "keeps": True, "values": {}}, {"seq": 1, "service": "c"}):
        with pytest.raises(FrameError, match="without a number, a service or values"):
            host().take(0, ServerMessage(values))
