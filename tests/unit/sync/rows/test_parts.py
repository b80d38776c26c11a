"""Parts of tables of rows: index, owners, ids on the wire, pushes in rounds, and pushes that come twice."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from farandole.core.vocabulary.errors import ConfigError, FarandoleError, Mismatch
from farandole.sync.rows.service import SERVICE, RowService, TablesService
from farandole.sync.rows.store import IdIndex, key_of, owners, pack_ids, unpack_ids
from farandole.sync.server.channel import ServerMessage
from farandole.sync.server.loop import ServiceHost

RULES = {
    "dim": 2, "optimizer": "sgd:lr=1", "admit": 1, "expire_seconds": None, "init_std": 0.0, "key": 5,
    "dtype": "float64",
}  # fmt: skip


def config(ranks: int = 2, staleness: int | None = 0, **rules: Any) -> dict[str, Any]:
    return {"rules": {**RULES, **rules}, "ranks": list(range(ranks)), "staleness": staleness}


def push(
    ids: list[int], value: float, *, lr: float = 1.0, weight: float = 1.0, more: bool = False
) -> ServerMessage:
    first, steps = pack_ids(np.array(ids, np.int64))
    grads = torch.full((len(ids), 2), value).double()
    values = {
        "do": "push",
        "first": first,
        "more": more,
        "lr": lr,
        "weight": weight,
        "read": 0,
        "not_finite": None if math.isfinite(value) else ids[0],
    }
    return ServerMessage(values, [steps, grads, torch.ones(len(ids), dtype=torch.uint8)])


def pull(ids: list[int], step: int) -> ServerMessage:
    first, steps = pack_ids(np.array(ids, np.int64))
    return ServerMessage({"do": "pull", "first": first, "round": step}, [steps])


def values(reply: Any) -> list[float]:
    assert isinstance(reply, ServerMessage)
    found: list[float] = reply.tensors[0][:, 0].tolist()
    return found


@pytest.mark.parametrize("seed", range(5))
def test_an_index_is_a_dictionary(seed: int) -> None:
    random = np.random.default_rng(seed)
    index, known = IdIndex(), dict[int, int]()
    for _ in range(20):
        most = int(random.choice([50, 5000, 2**62]))
        ids = np.unique(random.integers(0, most, int(random.integers(1, 3000))))
        wanted = np.array([known.get(int(each), -1) for each in ids])
        assert np.array_equal(index.find(ids), wanted)
        new = ids[wanted < 0]
        index.add(new, np.arange(len(known), len(known) + len(new)))
        known.update({int(each): len(known) + at for at, each in enumerate(new)})
        assert len(index) == len(known)


def test_owners_share_ids_and_few_move() -> None:
    ids = np.arange(60000)
    before, after = (owners(ids, key_of("t", 0), servers) for servers in (4, 5))
    assert np.abs(np.bincount(before) / 15000 - 1).max() < 0.05
    moved = before != after
    assert abs(moved.mean() - 1 / 5) < 0.01
    assert (after[moved] == 4).all(), "to the new server alone"
    assert not np.array_equal(before, owners(ids, key_of("u", 0), 4))


@pytest.mark.parametrize("ids", [[], [0], [2**63 - 1], [3, 4, 9], [0, 300, 2**40, 2**63 - 1]])
def test_ids_on_the_wire(ids: list[int]) -> None:
    first, steps = pack_ids(np.array(ids, np.int64))
    assert unpack_ids(first, steps).tolist() == ids


def test_ids_that_do_not_ascend_are_refused() -> None:
    with pytest.raises(ConfigError, match="do not ascend"):
        unpack_ids(4, torch.tensor([0, 3, 0]))
    with pytest.raises(ConfigError, match="below 0"):
        unpack_ids(-4, torch.tensor([0, 3]))


def test_a_round_is_applied_once_when_all_ranks_have_pushed() -> None:
    service = RowService(config())
    assert service.handle(0, push([1, 2], 4.0)) is not None
    assert service.handle(0, pull([1, 2, 3], 1)) is None, "it waits for the other"
    assert not service.due()
    assert values(service.handle(1, pull([1, 2, 3], 0))) == [0, 0, 0]
    service.handle(1, push([2, 3], 8.0, weight=3.0, more=True))
    assert not service.due()
    service.handle(1, push([5], 8.0, weight=3.0))
    ((rank, reply),) = service.due()
    assert (rank, values(reply)) == (0, [-1.0, -7.0, -6.0])
    assert service.shard.version == 1


def test_a_rank_that_leaves_is_not_waited_for() -> None:
    service = RowService(config(3))
    for rank in (0, 1):
        service.handle(rank, push([1], 2.0))
    service.handle(0, pull([1], 1))
    service.handle(2, push([1], 7.0, more=True))
    service.client_left(2)
    assert values(service.due()[0][1]) == [-2.0], "half a push counts for nothing"
    service.handle(0, push([1], 2.0))
    service.client_left(0)
    service.handle(1, push([1], 4.0))
    assert values(service.handle(1, pull([1], 2))) == [-5.0], "a whole one counts"


def test_what_ranks_do_differently_is_an_error_for_all() -> None:
    service = RowService(config())
    service.handle(0, push([1], 1.0))
    service.handle(0, pull([1], 1))
    service.handle(1, push([1], 1.0, lr=2.0))
    ((_, reply),) = service.due()
    assert isinstance(reply, Mismatch)
    with pytest.raises(Mismatch, match="different learning rates"):
        service.handle(1, pull([1], 1))
    service = RowService(config())
    with pytest.raises(FarandoleError, match="row 1, pushed by rank 0, is not finite"):
        service.handle(0, push([1], float("inf")))
    with pytest.raises(FarandoleError, match="not finite"):
        service.handle(1, pull([1], 0))


@pytest.mark.parametrize("staleness", [0, None])
def test_a_push_that_comes_twice_is_applied_once_also_after_a_restoration(staleness: int | None) -> None:
    """The request's number decides; the host has it, and a snapshot has what it has applied."""

    def request(number: int, message: ServerMessage, *, keeps: bool) -> ServerMessage:
        named = {**message.values, "table": "a"}
        return ServerMessage({"seq": number, "service": SERVICE, "keeps": keeps, "values": named}, message.tensors)

    def fresh() -> ServiceHost:
        return ServiceHost({SERVICE: TablesService({"ranks": [0, 1]})}, {0, 1})

    def rows(host: ServiceHost, number: int) -> list[float]:
        replies = host.take(0, request(number, pull([1, 2], 0), keeps=False))
        return values(ServerMessage({}, replies[0][1].tensors))

    host = fresh()
    opens = ServerMessage({"do": "open", "config": config(admit=2, staleness=staleness)})
    for rank in (0, 1):
        host.take(rank, request(1, opens, keeps=True))
    for rank, number in ((0, 2), (0, 2), (1, 2), (1, 2)):
        host.take(rank, request(number, push([1], 1.0), keeps=True))
    for rank, number in ((0, 3), (0, 3)):
        host.take(rank, request(number, push([1, 2], 4.0), keeps=True))
    restored = fresh()
    restored.load(host.state())
    for each in (host, restored):
        each.take(0, request(3, push([1, 2], 4.0), keeps=True))
        each.take(1, request(3, push([1], 2.0), keeps=True))
        each.take(1, request(3, push([1], 2.0), keeps=True))
    # The second occurrence of 1 admits it: with its whole round, or with the second push.
    expected = [-1.0 - 3.0, 0.0] if staleness == 0 else [-0.5 - 2.0 - 1.0, 0.0]
    assert rows(host, 4) == rows(restored, 4) == expected
    with pytest.raises(ConfigError, match="cannot 'fly'"):
        TablesService.handle(restored.services[SERVICE], 0, ServerMessage({"do": "fly", "table": "a"}))  # type: ignore[arg-type]


def test_tables_of_one_name_are_alike() -> None:
    tables = TablesService({"ranks": [0, 1]})
    tables.handle(0, ServerMessage({"do": "open", "table": "a", "config": config()}))
    tables.handle(0, ServerMessage({"do": "open", "table": "b", "config": config(dim=3)}))
    with pytest.raises(Mismatch, match="table 'a' is made in two ways"):
        tables.handle(1, ServerMessage({"do": "open", "table": "a", "config": config(dim=3)}))
