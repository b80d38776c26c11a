"""A time-out is told with the time that was really waited: the group's, not the world's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from farandole.comm.world.comm_errors import translate_error
from farandole.comm.world.world import World
from farandole.core.vocabulary.errors import Stalled


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        (
            "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 20000ms for recv operation to complete",
            "20",
        ),
        ("Timed out waiting 1500ms for send operation to complete", "1.5"),
        ("Operation timed out!", "600"),  # the back end does not say
    ],
)
def test_the_time_out_that_was_waited_for_is_named(said: str, seconds: str) -> None:
    sockets = SimpleNamespace(shut_down=False)
    world = cast(
        "World", SimpleNamespace(timeout_seconds=600.0, job_rank=1, sockets=sockets, find_refusal=lambda: None)
    )
    problem = translate_error(RuntimeError(said), world, "all-reduce", bucket=2)
    assert isinstance(problem, Stalled)
    assert f"no answer within {seconds} s" in str(problem)
