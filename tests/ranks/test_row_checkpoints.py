"""Rows of tables in checkpoints: `fd.save` and `fd.load`, and restorations that break."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import farandole as fd
from farandole.comm.world.store_sync import all_gather_json
from farandole.core.vocabulary.errors import CommError
from farandole.core.vocabulary.events import SETUP_CHECKPOINT_OBJECTS
from farandole.train.checkpoint.state import describe_saves, make_training
from tests.ranks.pool import ranks
from tests.ranks.test_row_tables import DIM, IDS, rows_of


@pytest.mark.full("slow")
@ranks(2)
def test_a_restoration_that_breaks_is_told_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    world = fd.init()
    table = fd.RowTable("a", DIM)

    def break_off(*_: object) -> str:
        raise CommError("server 0 is gone", rank=0, operation="rows")

    monkeypatch.setattr("farandole.sync.rows.table.put_rows", break_off)
    with pytest.raises(fd.FarandoleError, match="server 0 is gone") as caught:
        table.restore({})
    assert ("rank 0 could not give back its rows" in str(caught.value)) == (world.rank > 0)


class Clicks(nn.Module):
    """A model with a table in it."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.head = (
            fd.RowTable("users", DIM, optimizer="adagrad:lr=0.3", staleness=0),
            nn.Linear(DIM, 1),
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Take (batch,), return (batch, 1)."""
        out: torch.Tensor = self.head(self.users(ids))
        return out


@pytest.mark.full_cases("2")
@ranks(1, 2)
def test_a_checkpoint_has_the_tables_that_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the model, one by its name; of the third it says that it is not there."""
    world = fd.init()
    said: list[str] = []
    monkeypatch.setattr("farandole.sync.rows.table.write_notice", said.append)
    directory = all_gather_json(world, "directory", str(tmp_path))[0]
    model = Clicks()
    items, other = fd.RowTable("items", DIM, admit=3, staleness=0), fd.RowTable("other", DIM)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fd.distribute(model, optimizer)
    for each in (model.users, items, other):
        each.attach(optimizer)

    def train(steps: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            ids = torch.randint(0, IDS, (6,), generator=generator) + world.rank
            optimizer.zero_grad()
            (model(ids).sum() + items(ids).sum() + other(ids).sum()).backward()
            optimizer.step()

    train(4, 1)
    before = [rows_of(each) for each in (model.users, items)]
    for _ in range(2):
        fd.save(directory, model, optimizer, items=items, more=model.users)
    assert ["without the rows of other" in each for each in said] == [True] * (world.rank == 0)
    training = make_training(model, optimizer, {"items": items, "more": model.users})
    objects = describe_saves(Path("d"), training, asynchronous=True).values[SETUP_CHECKPOINT_OBJECTS]
    assert objects == '"d", model, optimizer, items=items, more=more'
    said.clear()
    train(3, 2)
    want = [rows_of(each) for each in (model.users, items)]
    left = [each.statistics().waiting for each in (model.users, items)]
    train(2, 3)
    assert not torch.equal(rows_of(items), want[1])
    fd.load(directory, model, optimizer, items=items)
    train(3, 2)
    for each, rows, waiting in zip((model.users, items), want, left, strict=True):
        torch.testing.assert_close(rows_of(each), rows)
        assert each.statistics().waiting == waiting
    assert ["rows of other are as they were" in each for each in said] == [True] * (world.rank == 0)
    compiled: Any = torch.compile(model, backend="eager")
    fd.load(directory, compiled, items=items)
    for each, rows in zip((model.users, items), before, strict=True):
        torch.testing.assert_close(rows_of(each), rows)
    fd.save(directory, model, optimizer)
    with pytest.raises(fd.CheckpointError, match="no rows of items"):
        fd.load(directory, model, optimizer, items=items)
