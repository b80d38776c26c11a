"""`RowTable` in one process, beside a dense embedding and torch's optimizers, by generated programs in fp64."""

from __future__ import annotations

import copy
import pickle
import random
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import farandole as fd
from farandole.sync.rows.links import RowChanges, RowCopy
from farandole.sync.rows.service import RowService
from farandole.sync.rows.shard import RowOptimizer, RowRules
from farandole.sync.rows.table import RowTable
from farandole.sync.server.channel import ServerMessage

IDS, DIM = 40, 5


def table(**arguments: Any) -> RowTable:
    return RowTable("t", **{"dim": DIM, "dtype": torch.float64, "init_std": 0.3, **arguments})


def rows_of(made: RowTable, ids: int = IDS) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = made(torch.arange(ids))
    return found


def losses(vectors: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (vectors.sum(-2) - target).square().mean()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("text", ["sgd:lr=0.3", "sgd:lr=0.3,weight_decay=0.01", "adagrad:lr=0.2", "adam:lr=0.1"])
def test_trains_as_an_embedding(text: str, shards: int, seed: int) -> None:
    """Batches of any shape with duplicates, several passes a step; rows that are not touched do not change."""
    random.seed(seed)
    torch.manual_seed(seed)
    made = table(optimizer=text, servers=shards, seed=seed)
    dense = nn.Embedding(IDS, DIM, _weight=rows_of(made).clone())
    rule = RowOptimizer.parse(text)
    states = torch.zeros(IDS, rule.state_width(DIM), dtype=torch.float64)
    for _ in range(6):
        for _ in range(random.randint(1, 2)):
            shape = random.choice([(7, 3), (2, 4, 3), (1, 9)])
            ids = torch.randint(0, random.choice([4, IDS]), shape)
            target = torch.randn(DIM, dtype=torch.float64)
            losses(made(ids), target).backward()
            losses(dense(ids), target).backward()
        made.step()
        assert dense.weight.grad is not None
        touched = dense.weight.grad.abs().sum(1) > 0
        with torch.no_grad():
            part, part_states = dense.weight[touched], states[touched]
            rule.update(part, part_states, dense.weight.grad[touched], rule.lr)
            dense.weight[touched], states[touched] = part, part_states
        dense.weight.grad = None
    torch.testing.assert_close(rows_of(made), dense.weight.detach(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("text", "make"),
    [
        ("sgd:lr=0.1,weight_decay=0.02", lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.02)),
        ("adam:lr=0.1,eps=1e-6", lambda p: torch.optim.Adam(p, 0.1, eps=1e-6)),
        (
            "adam:lr=0.1,beta1=0.5,weight_decay=0.1",
            lambda p: torch.optim.Adam(p, 0.1, (0.5, 0.999), weight_decay=0.1),
        ),
    ],
)
def test_rules_are_those_of_torch_where_all_rows_are_touched(text: str, make: Any) -> None:
    made = table(optimizer=text)
    dense = nn.Embedding(IDS, DIM, _weight=rows_of(made).clone())
    optimizer = make(dense.parameters())
    for step in range(5):
        target = torch.full((DIM,), float(step), dtype=torch.float64)
        losses(made(torch.arange(IDS)), target).backward()
        losses(dense(torch.arange(IDS)), target).backward()
        made.step()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(rows_of(made), dense.weight.detach(), rtol=1e-10, atol=1e-12)


def test_row_wise_adagrad_has_one_number_a_row() -> None:
    made = table(optimizer="adagrad:lr=0.5,eps=0", init_std=0.0)
    made(torch.tensor([3])).backward(torch.arange(DIM).double()[None])
    made.step()
    gradient = torch.arange(DIM).double()
    torch.testing.assert_close(rows_of(made)[3], -0.5 * gradient / gradient.square().mean().sqrt())
    assert made.snapshot()["states"].shape == (1, 1)


@pytest.mark.parametrize("admit", [1, 2, 5])
def test_an_id_is_admitted_with_its_nth_occurrence(admit: int) -> None:
    made = table(admit=admit, optimizer="sgd:lr=1")
    first = rows_of(made)[7].clone()
    pushes = [2, 1, 1, 3]
    for number, occurrences in enumerate(pushes, start=1):
        made(torch.tensor([7] * occurrences)).sum().backward()
        made.step()
        is_there = sum(pushes[:number]) >= admit
        assert made.statistics().rows == is_there
        assert made.statistics().waiting == (not is_there)
        expected = sum(n for i, n in enumerate(pushes[:number], 1) if sum(pushes[:i]) >= admit)
        torch.testing.assert_close(rows_of(made)[7], first - expected)


def test_rows_and_counts_expire_by_last_use(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("farandole.sync.rows.service.time.time", lambda: now)
    made = table(admit=2, expire_seconds=10, optimizer="sgd:lr=1")
    served = RowCopy(DIM, dtype=torch.float64)
    first = rows_of(made).clone()

    def train(*ids: int) -> None:
        made(torch.tensor(ids)).sum().backward()
        made.step()

    train(1, 1, 2, 2, 3)
    served.update(made.changes_since(served.mark))
    assert (made.statistics().rows, made.statistics().waiting) == (2, 1)
    now = 1009.0
    train(2)
    now = 1010.5  # a pull is no use: 1 has expired, and so has the count of 3
    assert torch.equal(rows_of(made)[1], first[1])
    torch.testing.assert_close(rows_of(made)[2], first[2] - 3)
    train(3, 1)
    assert (made.statistics().rows, made.statistics().waiting) == (1, 2), "both begin anew"
    changes = made.changes_since(served.mark)
    assert (changes.ids.tolist(), changes.removed.tolist(), changes.is_whole) == ([2], [1], False)
    served.update(changes)
    assert torch.equal(served(torch.tensor(1)), torch.zeros(DIM, dtype=torch.float64))
    train(3, 1)
    served.update(made.changes_since(served.mark))
    torch.testing.assert_close(served(torch.tensor([1, 2, 3])), rows_of(made)[[1, 2, 3]])


@pytest.mark.parametrize("admit", [1, 3])
def test_a_snapshot_goes_on_with_another_number_of_shards(admit: int) -> None:
    torch.manual_seed(1)
    batches = [(torch.randint(0, IDS, (9,)), torch.randn(DIM, dtype=torch.float64)) for _ in range(12)]

    def train(made: RowTable, begin: int, end: int) -> None:
        for ids, target in batches[begin:end]:
            losses(made(ids), target).backward()
            made.step()

    whole, half, other = (table(optimizer="adam:lr=0.1", admit=admit, servers=shards) for shards in (1, 2, 5))
    train(whole, 0, 12)
    train(half, 0, 6)
    train(other, 2, 5)
    other.restore(half.snapshot())
    train(other, 6, 12)
    torch.testing.assert_close(rows_of(other), rows_of(whole), rtol=1e-10, atol=1e-12)
    assert other.statistics().rows == whole.statistics().rows
    with pytest.raises(fd.ConfigError, match="with states of"):
        table(optimizer="sgd").restore(half.snapshot())


def test_time_that_passes_between_a_snapshot_and_its_restoration_ages_no_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr("time.time", lambda: now)
    made = table(expire_seconds=10.0, admit=2)
    made(torch.tensor([1, 1, 2])).sum().backward()
    made.step()
    now += 4
    saved = made.snapshot()
    now += 1e6
    other = table(expire_seconds=10.0, admit=2)
    other.restore(saved)
    now += 5
    assert (other.statistics().rows, other.statistics().waiting) == (1, 1)
    now += 2
    assert (other.statistics().rows, other.statistics().waiting) == (0, 0)


def test_a_copy_takes_touched_rows_alone() -> None:
    made, served = table(optimizer="sgd:lr=1", servers=2), RowCopy(DIM, dtype=torch.float64)
    assert served.age_seconds == float("inf")
    for ids in ([1, 2, 3], [3, 4], [4]):
        made(torch.tensor(ids)).sum().backward()
        made.step()
        changes = made.changes_since(served.mark)
        assert sorted(changes.ids.tolist()) == ids
        served.update(changes)
    torch.testing.assert_close(served(torch.tensor([[1, 2], [3, 4]])), rows_of(made)[1:5].view(2, 2, DIM))
    assert served(torch.tensor([9])).eq(0).all()
    assert served.age_seconds < 60
    made.restore(table(optimizer="sgd").snapshot())
    served.update(made.changes_since(served.mark))
    assert len(served) == 0, "a copy of what is gone begins anew"


def test_a_copy_gives_the_places_of_removed_rows_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a generated program of rows that come, change, go and come again."""
    monkeypatch.setattr("farandole.sync.rows.links._LEAST_COMPACTED", 4)
    random_ids = random.Random(5)
    rows: dict[int, float] = {}
    served = RowCopy(1)
    for number in range(300):
        gone = random_ids.sample(sorted(rows), min(len(rows), random_ids.randrange(8)))
        ids = [each for each in random_ids.sample(range(60), random_ids.randrange(6)) if each not in gone]
        values = torch.rand(len(ids), 1)
        mark = ((0, number),)
        served.update(
            RowChanges(torch.tensor(ids, dtype=torch.int64), values, torch.tensor(gone, dtype=torch.int64),
                       False, served.mark, mark, 0.0)
        )  # fmt: skip
        rows = {each: value for each, value in rows.items() if each not in gone}
        rows |= dict(zip(ids, values[:, 0].tolist(), strict=True))
        assert len(served) == len(rows)
        assert served(torch.arange(60))[:, 0].tolist() == [rows.get(each, 0.0) for each in range(60)]
        assert len(served._rows) <= 2 * len(rows) + 4


def test_passes_that_are_not_trained_leave_nothing() -> None:
    made = table(optimizer="sgd:lr=1", admit=2)
    made(torch.tensor([1]))
    with torch.no_grad():
        made(torch.tensor([1]))
    made.step()
    assert made.statistics().waiting == 0
    loss = made(torch.tensor([1])).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    made.step()
    assert (made.statistics().rows, made.statistics().waiting) == (0, 1), "one occurrence, two backward passes"


def test_first_values_follow_from_name_seed_and_id_alone() -> None:
    first = rows_of(table(servers=1, seed=3), 20000)
    assert torch.equal(first, rows_of(table(servers=4, seed=3), 20000))
    assert torch.equal(first.float(), rows_of(table(seed=3, dtype=torch.float32), 20000))
    assert not torch.equal(first, rows_of(table(seed=4), 20000))
    assert not torch.equal(
        first, RowTable("u", DIM, dtype=torch.float64, init_std=0.3, seed=3)(torch.arange(20000))
    )
    assert abs(float(first.mean())) < 0.005
    assert abs(float(first.std()) - 0.3) < 0.003
    assert float(torch.corrcoef(first.T).fill_diagonal_(0).abs().max()) < 0.03
    assert torch.equal(rows_of(table(servers=2, dim=1, seed=3), 9), first[:9, :1])


def test_follows_an_optimizer_and_its_own_learning_rate() -> None:
    made, other = table(optimizer="sgd:lr=9"), nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([other], 0.1)
    made.attach(optimizer)
    made.lr = 2.0
    first = rows_of(made)[1].clone()
    made(torch.tensor([1])).sum().backward()
    optimizer.step()
    torch.testing.assert_close(rows_of(made)[1], first - 2)
    (8 * made(torch.tensor([1])).sum()).backward()
    made.step(grad_scale=8.0)
    torch.testing.assert_close(rows_of(made)[1], first - 4)


def test_what_is_wrong_is_refused_by_name() -> None:
    for arguments, text in (
        ({"dim": 0}, "dim = 0"), ({"admit": 0}, "admit = 0"), ({"expire_seconds": 0}, "expire_seconds = 0"),
        ({"init_std": -1.0}, "init_std = -1"), ({"staleness": 2}, "staleness = 2"),
        ({"servers": -1}, "servers = -1"),
        ({"dtype": torch.float16}, "dtype = float16"), ({"optimizer": "adagard"}, "adagrad"),
        ({"optimizer": "sgd:beta1=0.5"}, "sgd has no 'beta1'"), ({"optimizer": "adam:beta1=1"}, "beta1 = 1.0"),
        ({"optimizer": "sgd:lr=x"}, "expected a number"), ({"optimizer": "sgd:lr=nan"}, "lr = nan"),
    ):  # fmt: skip
        with pytest.raises(fd.ConfigError, match=text):
            table(**arguments)
    made = table()
    with pytest.raises(fd.ConfigError, match="id -3, expected ids from 0"):
        made(torch.tensor([5, -3]))
    with pytest.raises(fd.ConfigError, match=r"ids of torch.float32"):
        made(torch.tensor([5.0]))
    for wrong in ([5, 3], np.array([5, 3]), 5):
        for lookup in (made, RowCopy(DIM)):
            with pytest.raises(fd.ConfigError, match=f"ids of {type(wrong).__name__}, expected a tensor of int64"):
                lookup(wrong)
    with pytest.raises(fd.ConfigError, match=r"the copy: ids of torch.float32"):
        RowCopy(DIM)(torch.tensor([5.5]))
    for action in (copy.deepcopy, pickle.dumps):
        with pytest.raises(fd.ConfigError, match="table 't' cannot be"):
            action(made)
    made(torch.tensor([2, 4])).log().mul(torch.tensor([[1.0], [float("nan")]])).sum().backward()
    before = rows_of(made).clone()
    with pytest.raises(fd.FarandoleError, match="gradient of row 4, pushed by rank 0, is not finite"):
        made.step()
    assert torch.equal(rows_of(made), before)


@pytest.mark.parametrize("staleness", [0, None])
def test_a_gradient_that_is_not_finite_is_applied_on_no_shard(staleness: int | None) -> None:
    made = table(optimizer="sgd:lr=1", servers=3, staleness=staleness)
    ids = torch.arange(20)
    before = made(ids).detach().clone()
    (made(ids).sum(1) * torch.tensor([1.0] * 13 + [float("inf")] + [1.0] * 6)).sum().backward()
    with pytest.raises(fd.FarandoleError, match="gradient of row 13, pushed by rank 0, is not finite"):
        made.step()
    if staleness is None:
        assert torch.equal(made(ids), before)
        return
    for each in range(20):
        with pytest.raises(fd.FarandoleError, match="gradient of row 13"):
            made(torch.tensor([each]))


def test_large_ids_and_empty_batches() -> None:
    made = table(optimizer="sgd:lr=1", servers=3)
    ids = torch.tensor([2**63 - 1, 0, 2**40, 2**63 - 2])
    with torch.no_grad():
        first = made(ids)
    made(ids).sum().backward()
    made.step()
    with torch.no_grad():
        torch.testing.assert_close(made(ids), first - 1)
    assert made(torch.empty(0, 3, dtype=torch.int64)).shape == (0, 3, DIM)
    made.step()


@pytest.mark.parametrize("admit", [1, 2])
def test_bytes_are_those_of_the_formula(admit: int) -> None:
    made = RowTable("t", 64, admit=admit)
    made(torch.randint(0, 2**62, (5000,))).sum().backward()
    made.step()
    found = made.statistics()
    assert found.pushed_rows == found.pulled_rows
    assert found.pushed_rows * 64 * 4 < found.pushed_bytes <= 1.1 * found.pushed_rows * (64 * 4 + 8)
    assert found.pulled_bytes <= 1.1 * found.pulled_rows * (64 * 4 + 8)


def test_a_copy_misses_no_change() -> None:
    """Not by a mark of another table or another life of a server, nor by an update that was left out."""
    made, served = table(optimizer="sgd:lr=1"), RowCopy(DIM, dtype=torch.float64)

    def train(other: RowTable, *ids: int) -> None:
        for each in ids:
            other(torch.tensor([each])).sum().backward()
            other.step()

    train(made, 1, 2)
    served.update(made.changes_since(served.mark))
    left_out = made.changes_since(served.mark)
    train(made, 3)
    left_out = made.changes_since(left_out.mark)
    train(made, 4)
    with pytest.raises(fd.ConfigError, match="so it would miss some"):
        served.update(made.changes_since(left_out.mark))
    with pytest.raises(fd.ConfigError, match="but the copy has dim = 1"):
        RowCopy(1).update(left_out)
    served.update(made.changes_since(served.mark))
    torch.testing.assert_close(served(torch.arange(5)[1:]), rows_of(made)[1:5])
    other = table(optimizer="sgd:lr=1")
    train(other, 9, 1, 1, 1, 1)
    served.update(other.changes_since(served.mark))
    assert torch.equal(served(torch.tensor([1, 9])), rows_of(other)[[1, 9]])
    assert len(served) == 2
    service = RowService(
        config := {"rules": asdict(RowRules(1, "sgd", 1, None, 0.0, 0)), "ranks": [0], "staleness": None}
    )
    restored = RowService(config)
    restored.load(service.state())
    lives = [
        each.handle(0, ServerMessage({"do": "changes", "life": -1, "since": -1})) for each in (service, restored)
    ]
    assert len({each.values["life"] for each in lives if each is not None}) == 2


def test_a_learning_rate_that_is_no_number_reaches_no_row() -> None:
    made = table(optimizer="sgd:lr=1")
    first = rows_of(made)
    for lr in (float("nan"), float("inf"), -1.0):
        made.lr = lr
        made(torch.tensor([1])).sum().backward()
        with pytest.raises(fd.ConfigError, match="expected a finite number from 0"):
            made.step()
        assert torch.equal(rows_of(made), first)


def test_saved_rows_that_do_not_fit_change_nothing() -> None:
    made = table(optimizer="sgd:lr=1", admit=2)
    made(torch.tensor([1, 1, 2, 2, 3])).sum().backward()
    made.step()
    saved, trained = made.snapshot(), rows_of(made)
    for wrong in (
        {"ids": saved["ids"][:1].repeat(2)}, {"ids": saved["ids"].int()}, {"ids": -saved["ids"]},
        {"used": saved["used"][:1]}, {"waiting_counts": saved["waiting_counts"][:0]},
    ):  # fmt: skip
        with pytest.raises(fd.ConfigError, match="expected as many of each, and ids once"):
            made.restore({**saved, **wrong})
    assert torch.equal(rows_of(made), trained)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # by torch.compile
def test_a_compiled_function_trains_a_table() -> None:
    made = table(optimizer="sgd:lr=1")
    first = rows_of(made)
    run = torch.compile(lambda ids: (2 * made(ids)).sum(), backend="eager")
    for ids in ([1, 2], [2, 3, 3]):
        run(torch.tensor(ids)).backward()
        made.step()
    torch.testing.assert_close(rows_of(made)[:4], first[:4] - torch.tensor([[0.0], [2.0], [4.0], [4.0]]))
