"""What a rank records of its threads, loader and optimizer, and which cores its loader's workers get."""

from __future__ import annotations

import os
import shlex
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import farandole as fd
from farandole.core.env import CORES, CoreShares
from farandole.observe.records.timeline_reader import read_events


class Affinity(Dataset[Any]):
    """Its samples say which cores the process that loads them may use."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        mask = torch.zeros(os.cpu_count() or 1)
        mask[sorted(os.sched_getaffinity(0))] = 1.0
        return mask


@pytest.fixture
def one_core() -> Any:
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("needs two cores")
    first, *rest = sorted(before)
    os.sched_setaffinity(0, {first})
    yield first, rest
    os.sched_setaffinity(0, before)


def cores_of_workers(loader: Any) -> set[int]:
    return {int(core) for batch in loader for core in batch.sum(0).nonzero().flatten()}


def test_workers_use_the_cores_of_no_rank_and_the_rank_keeps_its_own(
    one_core: tuple[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, rest = one_core
    monkeypatch.setenv(CORES, CoreShares((first,), tuple(rest)).to_text())
    started: list[int] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loader = DataLoader(Affinity(), batch_size=2, num_workers=2, worker_init_fn=started.append)
        fd.init()
        try:
            divided = fd.shard(loader)
            assert cores_of_workers(divided) == {first, *rest}
            assert os.sched_getaffinity(0) == {first}
            assert divided.worker_init_fn == started.append, "the user's own, as it was"
        finally:
            fd.shutdown()


def test_a_bound_rank_may_have_workers_without_advice_from_torch(
    one_core: tuple[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, rest = one_core
    monkeypatch.setenv(CORES, CoreShares((first,), tuple(rest)).to_text())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        DataLoader(Affinity(), num_workers=2)
        assert said, "torch takes the core of the rank for the whole machine"
        said.clear()
        fd.init()
        try:
            fd.shard(DataLoader(Affinity(), num_workers=2))
        finally:
            fd.shutdown()
    assert not [each for each in said if "worker" in str(each.message)], [str(each.message) for each in said]


def test_workers_keep_the_cores_that_a_script_has_chosen(
    one_core: tuple[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, rest = one_core
    monkeypatch.setenv(CORES, CoreShares((first, rest[0]), tuple(rest[1:])).to_text())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fd.init()
        try:
            assert cores_of_workers(fd.shard(DataLoader(Affinity(), batch_size=2, num_workers=1))) == {first}
        finally:
            fd.shutdown()


def test_a_rank_records_what_fixes_depend_on(tmp_path: Path) -> None:
    torch.set_num_threads(2)
    fd.init(run_dir=tmp_path)
    try:
        model = nn.Linear(4, 2)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        fd.distribute(model, optimizer)
        begin = torch.zeros(())
        for (x,) in fd.shard(DataLoader(torch.utils.data.TensorDataset(torch.randn(8, 4)), batch_size=2)):
            optimizer.zero_grad()
            (model(x).sum() + begin).backward()
            optimizer.step()
            torch.set_num_threads(1)
    finally:
        fd.shutdown()
    timeline = read_events(tmp_path / "events-rank0.jsonl")
    facts = timeline.setup
    assert not timeline.skipped, timeline.skipped
    assert (facts["optimizer"], facts["optimizer_fused"], facts["parameter_tensors"]) == ("AdamW", True, 2)
    assert (facts["loader_workers"], facts["loader_batch"], facts["parameter_elements"]) == (0, 2, 10)
    assert facts["codable_share"] == 0.0, "a matrix of 10 elements"
    assert facts["loader_persistent"] is False
    assert facts.get("optimizer_momentum") is None, "AdamW has betas"
    assert (facts["device"], facts["threads"]) == ("cpu", 1), "the newest count"
    assert shlex.split(str(facts["arguments"]))[0] == sys.orig_argv[0]
    assert all(row.data_cpu_seconds is not None for row in timeline.steps)
    assert all((row.data_cpu_seconds or 0) <= row.data_seconds + 1e-3 for row in timeline.steps)
