"""Tables in many messages, pages and compactions are as in one; snapshots of a service have all that counts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from farandole.comm.world.world import World
from farandole.core.vocabulary.errors import FarandoleError
from farandole.sync.rows import shard
from farandole.sync.rows import table as table_module
from farandole.sync.rows.links import LocalShards, RowCopy
from farandole.sync.rows.service import RowService, TablesService
from farandole.sync.rows.table import RowTable
from farandole.sync.server.channel import ServerMessage
from tests.unit.sync.rows.test_parts import config, pull, push, values

DIM = 3


def table(**arguments: Any) -> RowTable:
    return RowTable("t", **{"dim": DIM, "dtype": torch.float64, "init_std": 0.3, **arguments})


def rows_of(made: RowTable, ids: int = 500) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = made(torch.arange(ids))
    return found


def services(made: RowTable) -> list[RowService]:
    return cast("LocalShards", made._exchange.links).services


def train(made: RowTable, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 500, (300,), generator=random)
    (made(ids) * torch.randn(300, DIM, dtype=torch.float64, generator=random)).sum().backward()
    made.step()


@pytest.mark.parametrize("staleness", [0, None])
@pytest.mark.parametrize("shards", [1, 3])
def test_many_messages_are_as_one(shards: int, staleness: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    same: dict[str, Any] = {"optimizer": "adam:lr=0.1", "admit": 2, "staleness": staleness}
    whole, parts, other = table(**same), table(**same, servers=shards), table(**same, servers=2)
    for seed in range(4):
        train(whole, seed)
    calls = 0
    call = LocalShards.call

    def count(self: LocalShards, *arguments: Any, **keys: Any) -> Any:
        nonlocal calls
        calls += 1
        return call(self, *arguments, **keys)

    monkeypatch.setattr(LocalShards, "call", count)
    monkeypatch.setattr(table_module, "MOST_MESSAGE_BYTES", 1500)
    for seed in range(4):
        train(parts, seed)
        assert services(parts)[0].shard.version == seed + 1, "a push in many messages is one step"
    torch.testing.assert_close(rows_of(parts), rows_of(whole), rtol=1e-10, atol=1e-12)
    assert calls > 50
    other.restore(parts.snapshot())
    torch.testing.assert_close(rows_of(other), rows_of(whole), rtol=1e-10, atol=1e-12)
    train(other, 9)
    train(whole, 9)
    torch.testing.assert_close(rows_of(other), rows_of(whole), rtol=1e-10, atol=1e-12)


def test_a_snapshot_of_many_pages_begins_anew_where_rows_move(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("farandole.sync.rows.service.time.time", lambda: now)
    made = table(optimizer="sgd:lr=1", expire_seconds=10, init_std=0.0)
    for begin in (0, 20_000):
        made(torch.arange(begin, begin + 20_000)).sum().backward()
        made.step()
        now += 6
    page, pages = RowService._page, 0

    def moving(self: RowService, client: int, request: ServerMessage) -> ServerMessage:
        nonlocal pages
        pages += 1
        if pages == 2:
            self.shard.expire(13.0)
        return page(self, client, request)

    monkeypatch.setattr(RowService, "_page", moving)
    now = 9.0
    found = made.snapshot()
    assert sorted(found["ids"].tolist()) == list(range(20_000, 40_000))
    assert pages == 4 + 3, "rows in 3 and 2 pages, counts in one"
    assert bool((found["rows"] == -1).all())


def test_counts_outlive_the_compaction_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard, "_LEAST_COMPACTED", 0)
    made = table(optimizer="sgd:lr=1", admit=3)

    def occur(*ids: int) -> None:
        made(torch.tensor(ids)).sum().backward()
        made.step()

    occur(*range(10), *range(10))
    occur(*range(7))  # seven get rows, and what was counted of them goes
    assert made.statistics().waiting == 3
    assert len(services(made)[0].shard.waiting) == 3
    occur(7, 8)
    assert (made.statistics().rows, made.statistics().waiting) == (9, 1)


def test_a_copy_that_is_older_than_what_is_remembered_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where rows go while no step is made."""
    now = 0.0
    monkeypatch.setattr("farandole.sync.rows.service.time.time", lambda: now)
    monkeypatch.setattr(shard, "MOST_REMOVED", 2)
    made, served = table(optimizer="sgd:lr=1", expire_seconds=10), RowCopy(DIM, dtype=torch.float64)
    made(torch.arange(3)).sum().backward()
    made.step()
    served.update(made.changes_since(served.mark))
    assert served(torch.arange(3)).ne(0).all()
    now = 11.0
    changes = made.changes_since(served.mark)
    served.update(changes)
    assert served(torch.arange(3)).eq(0).all(), "three are gone, of which two are remembered"
    for step in range(3):
        now += 6
        made(torch.tensor([7 + step, 100])).sum().backward()
        made.step()
        served.update(made.changes_since(served.mark))
        assert torch.equal(served(torch.tensor([7 + step])), rows_of(made)[[7 + step]])
    assert not made.changes_since(served.mark).is_whole


def test_a_copy_hears_of_rows_that_go_while_no_step_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("farandole.sync.rows.service.time.time", lambda: now)
    made, served = table(optimizer="sgd:lr=1", expire_seconds=10), RowCopy(DIM, dtype=torch.float64)
    made(torch.arange(3)).sum().backward()
    made.step()
    served.update(made.changes_since(served.mark))
    now = 11.0
    changes = made.changes_since(served.mark)
    assert (sorted(changes.removed.tolist()), changes.is_whole) == ([0, 1, 2], False)
    served.update(changes)
    assert served(torch.arange(3)).eq(0).all()


def test_a_restored_service_waits_for_no_rank_that_has_left() -> None:
    service = RowService(config())
    service.client_left(1)
    again = RowService(config())
    again.load(service.state())
    for each in (service, again):
        each.handle(0, push([1], 2.0))
        assert values(each.handle(0, pull([1], 1))) == [-2.0]


def test_a_restored_service_has_the_times_the_parts_and_the_rates_of_pushes() -> None:
    rules: dict[str, Any] = {"expire_seconds": 10.0, "admit": 2}
    service = RowService(config(**rules))
    service.handle(0, push([1], 5.0))
    service.handle(1, push([2], 1.0))
    service.shard.waiting.used[:] = 4.0
    service.handle(0, push([1], 1.0, lr=0.5, weight=3.0))
    service.handle(1, push([1], 4.0, lr=0.5, more=True))
    service.shard.rows.add(*_row(9))
    service.shard.rows.used[:] = 3.0
    again = RowService(config(**rules))
    again.load(service.state())
    assert again.shard.waiting.used.tolist() == [4.0, 4.0]
    assert again.shard.rows.used.tolist() == [3.0]
    assert again.handle(1, pull([1], 2)) is None
    for each in (service, again):
        each.shard.waiting.used[:] = each.shard.rows.used[:] = 1e12
        assert not each._pushes[1]
        each.handle(1, push([5], 4.0, lr=0.5))
        assert values(each.handle(0, pull([1, 9], 2))) == [-0.5 * (3 * 1.0 + 1 * 4.0) / 4, 7.0]
        assert each._staleness == {0: 4}


def _row(number: int) -> Any:
    return np.array([number]), torch.full((1, 2), 7.0, dtype=torch.float64), None


@pytest.mark.parametrize("problem", ["is not finite", "different learning rates"])
def test_a_table_that_is_broken_is_broken_after_a_restoration(problem: str) -> None:
    service = RowService(config())
    if problem == "is not finite":
        with pytest.raises(FarandoleError, match=problem):
            service.handle(0, push([1], float("nan")))
    else:
        service.handle(0, push([1], 1.0, lr=2.0))
        service.handle(1, push([1], 1.0))
    again = RowService(config())
    again.load(service.state())
    for each in (service, again):
        with pytest.raises(FarandoleError, match=problem):
            each.handle(1, pull([1], 0))


def test_a_table_that_is_opened_later_waits_for_no_rank_that_has_left() -> None:
    tables = TablesService({"ranks": [0, 1]})
    tables.client_left(1)
    again = TablesService({"ranks": [0, 1]})
    again.load(tables.state())
    for each in (tables, again):
        each.handle(0, ServerMessage({"do": "open", "table": "a", "config": config()}))
        for message in (push([1], 2.0), pull([1], 1)):
            reply = each.handle(0, ServerMessage({**message.values, "table": "a"}, message.tensors))
        assert values(reply) == [-2.0]


def test_a_push_weighs_by_the_samples_of_its_rank() -> None:
    made = table(optimizer="sgd:lr=1")
    first = rows_of(made, 3)
    recorded: list[Any] = []
    session = SimpleNamespace(
        batch_weight=SimpleNamespace(factor=0.25), recorder=SimpleNamespace(record=recorded.append)
    )
    made._world = cast("World", SimpleNamespace(session=session))
    made(torch.tensor([1])).sum().backward()
    made.step()
    torch.testing.assert_close(rows_of(made, 3), first - torch.tensor([[0.0], [0.25], [0.0]]).double())
    assert [each.degree for each in recorded] == ["rows"] * 3, "two pulls and a push"
    assert all(each.sent_bytes > 0 for each in recorded)


def test_a_rows_corrections_of_adam_are_of_its_own_steps() -> None:
    """The first step of a row moves it by `lr`, however many steps others have made."""
    made = table(optimizer="adam:lr=0.1,eps=0", init_std=0.0)
    for ids in ([1], [1], [1, 2]):
        made(torch.tensor(ids)).sum().backward()
        made.step()
    torch.testing.assert_close(rows_of(made, 3)[:, 0], torch.tensor([0.0, -0.3, -0.1]).double())
