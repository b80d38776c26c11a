"""`fd.RowTable` on several ranks: real server processes, beside one process that trains on the joined batch."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import farandole as fd
from farandole.comm.world.store_sync import all_gather_json
from farandole.sync.rows.links import RowServers
from tests.ranks.pool import ranks, takes

pytestmark = pytest.mark.full("busy")

IDS, DIM, WHOLE = 60, 4, 12


def alone(name: str, **arguments: Any) -> fd.RowTable:
    """Return a table of this process alone, as one without `fd.init` has it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("farandole.sync.rows.table.has_world", lambda: False)
        return fd.RowTable(name, **arguments)


def batches(steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    random = torch.Generator().manual_seed(3)
    return [
        (
            torch.randint(0, IDS, (WHOLE, 5), generator=random),
            torch.randn(WHOLE, DIM, dtype=torch.float64, generator=random),
        )
        for _ in range(steps)
    ]


def train(table: fd.RowTable, steps: int, rank: int, size: int, after: Callable[[int], object] = id) -> None:
    for step, (ids, targets) in enumerate(batches(steps)):
        vectors = table(ids.chunk(size)[rank]).sum(1)
        (vectors - targets.chunk(size)[rank]).square().mean().backward()
        table.step()
        after(step)


def rows_of(table: fd.RowTable) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = table(torch.arange(IDS))
    return found


@pytest.mark.parametrize("optimizer", ["sgd:lr=0.5,weight_decay=0.01", "adagrad:lr=0.3", "adam:lr=0.1"])
@pytest.mark.parametrize("admit", [1, 4])
@ranks(2, 3)
def test_ranks_in_step_train_as_one_process(optimizer: str, admit: int) -> None:
    world = fd.init()
    same: dict[str, Any] = {"dim": DIM, "optimizer": optimizer, "admit": admit, "dtype": torch.float64}
    table = fd.RowTable("a", staleness=0, servers=world.size - 1, **same)
    single = alone("a", **same)
    train(table, 8, world.rank, world.size)
    train(single, 8, 0, 1)
    torch.testing.assert_close(rows_of(table), rows_of(single), rtol=1e-10, atol=1e-12)
    found = table.statistics()
    assert found.rows == single.statistics().rows
    assert found.staleness == {0: 8 * world.size * (world.size - 1)}
    if world.rank == 0:
        single.restore(table.snapshot())
        torch.testing.assert_close(rows_of(single), rows_of(table), rtol=0, atol=0)
    all_gather_json(world, "read", 0)


@ranks(3)
def test_on_arrival_each_push_is_applied_once() -> None:
    """Gradients are whole numbers, so sums are exact in any order."""
    world = fd.init()
    table = fd.RowTable("a", DIM, optimizer="sgd:lr=3", init_std=0.0, servers=2, dtype=torch.float64)
    expected = torch.zeros(IDS, dtype=torch.float64)
    for rank in range(world.size):
        for step in range(10):
            ids = (torch.arange(7) * (rank + 2) + step) % IDS
            expected.index_add_(0, ids, torch.full((7,), -float(rank + 1), dtype=torch.float64))
            if rank == world.rank:
                ((rank + 1.0) * table(ids)).sum().backward()
                table.step()
    all_gather_json(world, "pushed", 0)
    assert torch.equal(rows_of(table), expected[:, None].expand(IDS, DIM))
    served = fd.RowCopy(DIM, dtype=torch.float64)
    served.update(table.changes_since())
    assert torch.equal(served(torch.arange(IDS)), rows_of(table))
    staleness = table.statistics().staleness
    assert sum(staleness.values()) >= 30, staleness
    assert min(staleness) >= 0
    all_gather_json(world, "read", 0)


@ranks(2)
def test_ranks_without_ids_and_ranks_that_leave_hold_up_nobody() -> None:
    world = fd.init()
    table = fd.RowTable("a", DIM, optimizer="sgd:lr=1", staleness=0, init_std=0.0)
    other = fd.RowTable("b", DIM, optimizer="sgd:lr=1", init_std=0.0)
    if world.rank:
        other(torch.tensor([5])).sum().backward()
        other.step()
        table.step()
        fd.shutdown()
        return
    table(torch.tensor([5])).sum().backward()
    table.step()
    assert rows_of(table)[5].eq(-0.5).all()
    for _ in range(2):
        table(torch.tensor([5])).sum().backward()
        table.step()
        assert rows_of(table)[6].eq(0).all()
    assert rows_of(table)[5].eq(-2.5).all(), "alone it is the mean"
    assert rows_of(other)[5].eq(-0.5).all()


@ranks(2)
def test_what_ranks_say_differently_is_an_error_on_all() -> None:
    world = fd.init()
    with pytest.raises(fd.Mismatch, match="what the table is"):
        fd.RowTable("a", DIM + world.rank)
    table = fd.RowTable("a", DIM, optimizer="adagrad", staleness=0)
    with pytest.raises(fd.Mismatch, match="table 'a' is made in two ways"):
        fd.RowTable("a", DIM + 1)
    with pytest.raises(fd.ConfigError, match="two would share its rows"):
        fd.RowTable("a", DIM, optimizer="adagrad", staleness=0)
    with pytest.raises(fd.ConfigError, match="servers = 3, but those of this job have 1"):
        fd.RowTable("b", DIM, servers=3)
    with pytest.raises(fd.ConfigError, match="with states of"):
        table.restore(alone("a", dim=DIM, optimizer="sgd").snapshot() if world.rank == 0 else {})
    (table(torch.tensor([3])) * (float("nan") if world.rank else 1.0)).sum().backward()
    all_gather_json(world, "pulled", 0)  # the first push that is broken ends pulls too
    with pytest.raises(fd.FarandoleError, match="gradient of row 3, pushed by rank 1, is not finite"):  # noqa: PT012
        table.step()
        table(torch.tensor([3]))
    all_gather_json(world, "seen", 0)


@ranks(2)
def test_a_table_is_restored_after_what_was_pushed_before() -> None:
    world = fd.init()
    table = fd.RowTable("a", DIM, optimizer="sgd:lr=1", init_std=0.0)
    if world.rank:
        time.sleep(0.5)
        table(torch.tensor([5])).sum().backward()
        table.step()
    table.restore(alone("a", dim=DIM, optimizer="sgd").snapshot() if world.rank == 0 else {})
    assert rows_of(table).eq(0).all()
    all_gather_json(world, "read", 0)


@ranks(2)
def test_a_rank_that_reads_nothing_runs_one_step_ahead_at_most() -> None:
    world = fd.init()
    table = fd.RowTable("a", DIM, optimizer="sgd:lr=1", staleness=0, init_std=0.0)
    done: list[float] = []
    for step in range(4):
        if world.rank:
            time.sleep(0.3)
            assert table(torch.tensor([5])).eq(0).all() or step
        table.step()
        done.append(time.monotonic())
    ends = all_gather_json(world, "ends", done)
    for step in range(3):
        assert ends[0][step + 1] >= ends[1][step] - 0.25, ends


@pytest.mark.full("slow")
@takes(60)
@pytest.mark.parametrize("snapshot_seconds", [0.0, 0.05])
@ranks(2)
def test_a_server_that_is_killed_changes_no_row(snapshot_seconds: float) -> None:
    world = fd.init()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("farandole.sync.rows.links.SNAPSHOT_SECONDS", snapshot_seconds)
        same: dict[str, Any] = {"dim": DIM, "optimizer": "adam:lr=0.1", "admit": 3, "dtype": torch.float64}
        table = fd.RowTable("a", staleness=0, servers=2, **same)
    servers = world.session.kept(RowServers)
    assert servers is not None
    connections = servers.connections

    def after(step: int) -> None:
        if step in (3, 6):
            processes = [*connections.started, *(each for c in connections.clients for each in c.restored)]
            if (step == 3) == (world.rank == 0):
                processes[-1].kill()
        time.sleep(0.02)

    train(table, 10, world.rank, world.size, after)
    single = alone("a", **same)
    train(single, 10, 0, 1)
    torch.testing.assert_close(rows_of(table), rows_of(single), rtol=1e-10, atol=1e-12)
    restored = sum(len(each.restored) for each in connections.clients)
    assert sum(all_gather_json(world, "restored", restored)) >= 2
