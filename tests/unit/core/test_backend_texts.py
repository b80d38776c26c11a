"""Texts that torch's backends and its store really gave, and texts of other programs."""

from __future__ import annotations

import pytest

from farandole.core.failures import first_line, is_peer_lost, is_timeout, waited_seconds


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("[unbound_buffer.cc:78] Timed out waiting 20000ms for recv operation to complete", 20.0),
        ("wait timeout after 1500ms, keys: /farandole/1/x", 1.5),
        ("Operation timed out!", None),
        ("Socket Timeout", None),
    ],
)
def test_time_outs(text: str, seconds: float | None) -> None:
    assert is_timeout(text)
    assert not is_peer_lost(text)
    assert waited_seconds(text) == seconds


@pytest.mark.parametrize(
    "text",
    [
        "[pair.cc:553] Connection closed by peer [127.0.0.1]:1234",
        "[pair.cc:534] Read error [::1]:55: Connection reset by peer",
        "Broken pipe",
        "failed to recv, got 0 bytes. Connection was likely closed.",
    ],
)
def test_peers_that_are_gone(text: str) -> None:
    assert is_peer_lost(text)
    assert not is_timeout(text)


@pytest.mark.parametrize(
    "text", ["requests.get(url, timeout=30)", "ValueError: Read error in line 3", "[Errno 32] Broken pipe"]
)
def test_what_other_programs_write_is_not_taken_for_a_backends(text: str) -> None:
    assert not is_timeout(text, any_origin=True)
    assert not is_peer_lost(text, any_origin=True)


def test_the_first_line_of_an_error() -> None:
    assert first_line(RuntimeError("\nit failed\nException raised from ...")) == "it failed"
    assert first_line(RuntimeError()) == "RuntimeError"
