"""Which uncaught errors say only that another rank is gone: the launcher looks for the cause there."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from farandole.comm.world.store_sync import all_gather_json
from farandole.comm.world.world import ProcessGroups, World
from farandole.core.vocabulary.errors import CommError, ConfigError, PeerLost, Stalled
from farandole.train.session import only_a_consequence
from tests.ranks.pool import free_port


def world_of(store: dist.Store) -> World:

    groups = ProcessGroups(store=store)
    return World(1, 2, 1, 2, 0, 1, "here", "127.0.0.1", torch.device("cpu"), "test", 5.0, groups)


@pytest.mark.parametrize("kind", [PeerLost, Stalled])
def test_a_rank_that_is_gone_or_late_is_the_cause(kind: type[CommError]) -> None:
    assert only_a_consequence(kind("x", rank=2, operation="introduce"))


def test_a_store_that_is_gone_is_a_consequence() -> None:
    """Rank 0 serves it, and says itself why it ended."""
    wait, port = timedelta(seconds=5), free_port()
    server = dist.TCPStore("127.0.0.1", port, 2, is_master=True, timeout=wait, wait_for_workers=False)
    world = world_of(dist.TCPStore("127.0.0.1", port, 2, is_master=False, timeout=wait))
    server.set("topic/0/0", "1")
    assert all_gather_json(world, "topic", 2) == [1, 2]
    del server
    with pytest.raises(PeerLost, match="the store, which rank 0 serves, is gone") as found:
        all_gather_json(world, "topic", 2)
    assert only_a_consequence(found.value)


def test_other_errors_are_causes() -> None:
    text = "the ranks found each other but could not connect: no route to host"
    assert not only_a_consequence(CommError(text, rank=2, operation="connecting"))
    assert not only_a_consequence(ConfigError("x"))
    assert not only_a_consequence(RuntimeError("shape '[2]' is invalid"))
    assert only_a_consequence(RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [::1]:5"))
