"""What a training on real ranks leaves in its records: where the time went, by phase and by bucket."""

from __future__ import annotations

import copy
import gc
import json
import os
import pickle
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import farandole as fd
from farandole.comm.world.world import has_world, world
from farandole.core.vocabulary.events import (
    BACKWARD,
    DATA,
    EVALUATION,
    EXCHANGE,
    FORWARD,
    GARBAGE_COLLECTION,
    LOSS,
    OPTIMIZER,
    OTHER,
    ClockOffset,
)
from farandole.observe.figures.summary import summarise
from farandole.observe.records.clock import ClockTrack
from farandole.observe.records.rows import StepRow, step_seconds
from farandole.observe.records.timeline_reader import RankTimeline, read_events
from farandole.train.clock_sync import ClockSync
from tests import warm
from tests.ranks.pool import patient, ranks
from tests.ranks.slow import SleepInBackward, SlowSamples

SLEEP = 0.05


class Sleepy(nn.Module):
    """Sleeps where it is told."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.first, self.last = nn.Linear(8, 64), nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.where == FORWARD:
            time.sleep(SLEEP)
        sleep = partial(time.sleep, SLEEP if self.where == BACKWARD else 0.0)
        hidden: torch.Tensor = SleepInBackward.apply(self.first(x), sleep)
        return self.last(hidden)  # type: ignore[no-any-return]


class SleepySGD(torch.optim.SGD):
    """Sleeps in its step."""

    seconds = 0.0

    def step(self, closure: Any = None) -> Any:
        time.sleep(self.seconds)
        return super().step(closure)


def data(where: str = "") -> DataLoader[Any]:
    dataset = SlowSamples(torch.randn(64, 8, generator=torch.Generator().manual_seed(1)), torch.zeros(64).long())
    dataset.seconds = SLEEP / 2 if where == DATA else 0.0
    return DataLoader(dataset, batch_size=2)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any, steps: int, loss_sleep: float = 0
) -> None:
    for number, (x, y) in enumerate(loader):
        if number == steps:
            break
        optimizer.zero_grad()
        out = model(x)
        time.sleep(loss_sleep)
        nn.functional.cross_entropy(out, y).backward()
        optimizer.step()


def records(directory: str) -> RankTimeline:
    """End the world and return this rank's records."""
    rank = world().rank
    fd.shutdown()
    timeline = read_events(Path(directory) / f"events-rank{rank}.jsonl")
    assert timeline.skipped == []
    return timeline


def median_parts(rows: list[StepRow]) -> dict[str, float]:
    """Return the median time of each phase; the parts of each row add up to it exactly."""
    parts = [step_seconds(row) for row in rows]
    for row, each in zip(rows, parts, strict=True):
        assert sum(each.values()) == pytest.approx(row.end_seconds - row.begin_seconds, abs=1e-6)
    names = {name for each in parts for name in each}
    return {name: sorted(each.get(name, 0.0) for each in parts)[len(parts) // 2] for name in names}


@pytest.mark.full("busy")
@pytest.mark.parametrize("where", [DATA, FORWARD, LOSS, BACKWARD, OPTIMIZER])
@ranks(2)
def test_a_sleep_is_found_in_its_phase(where: str, tmp_path: Path) -> None:
    """Rank 1 sleeps; rank 0 waits for it in the exchange."""
    fd.init(run_dir=tmp_path)
    mine = where if world().rank == 1 else ""
    model = Sleepy(mine)
    torch.optim.SGD(model.parameters(), lr=0.1)  # now torch runs the hooks around the base class's step too
    optimizer = SleepySGD(model.parameters(), lr=0.1)
    optimizer.seconds = SLEEP if mine == OPTIMIZER else 0.0
    fd.distribute(model, optimizer)
    rank = world().rank
    train(model, optimizer, fd.shard(data(mine)), 8, SLEEP if mine == LOSS else 0.0)
    timeline = records(str(tmp_path))
    assert len(timeline.steps) == 8
    parts = median_parts(timeline.steps[2:])
    step = sum(parts.values())
    if rank == 1:
        assert SLEEP <= parts[where] < SLEEP + 0.03, parts
    else:
        assert parts[EXCHANGE] > 0.8 * SLEEP, parts
    # What has a name is at least 95 % of the step.
    assert parts[OTHER] < 0.05 * step, parts


@pytest.mark.full("further")
@ranks(2)
def test_every_bucket_is_timed_in_order(tmp_path: Path) -> None:
    fd.init(run_dir=tmp_path)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = fd.Plan(bucket_bytes=20_000, first_bucket_bytes=20_000, codec="int8", lossy=True, route="flat")
    fd.distribute(model, optimizer, plan)
    for _ in range(4):
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
    timeline = records(str(tmp_path))
    step, layout = timeline.layouts[0]
    names = [name for facts in layout.buckets for name in facts.parameters]
    assert (step, layout.route, sorted(names)) == (1, "flat", sorted(name for name, _ in model.named_parameters()))
    assert len(timeline.layouts) == 1
    assert "int8" in {facts.codec for facts in layout.buckets}
    for row in timeline.steps:
        (exchange,) = row.exchanges
        assert len(exchange.buckets) == len(layout.buckets) > 2
        backward = next(phase for phase in row.phases if phase.name == BACKWARD)
        for bucket, facts in zip(exchange.buckets, layout.buckets, strict=True):
            assert bucket.nbytes == facts.nbytes
            assert bucket.first_ready_seconds is not None
            assert bucket.last_ready_seconds is not None
            assert backward.begin_seconds <= bucket.first_ready_seconds <= bucket.last_ready_seconds
            assert bucket.last_ready_seconds <= bucket.launch_seconds <= bucket.begin_seconds
            assert bucket.begin_seconds <= bucket.end_seconds <= exchange.wait_end_seconds
            if facts.codec == "int8":
                assert bucket.codec_seconds > 0
                assert bucket.rounds >= 2
        assert exchange.sent_bytes == sum(bucket.sent_bytes for bucket in exchange.buckets)
        launches = exchange.launch_seconds
        assert launches == sorted(launches) == [bucket.launch_seconds for bucket in exchange.buckets]


@ranks(2)
def test_passes_that_stay_local_are_timed_too(tmp_path: Path) -> None:
    fd.init(run_dir=tmp_path)
    model = Sleepy("")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fd.distribute(model, optimizer, fd.Plan(accumulate=3))
    for _ in range(3):
        for _ in range(3):
            model(torch.randn(2, 8)).sum().backward()
        optimizer.step()
    for row in records(str(tmp_path)).steps:
        named = [phase.name for phase in row.phases]
        assert [named.count(name) for name in (FORWARD, LOSS, BACKWARD, OPTIMIZER)] == [3, 3, 3, 1]
        assert len(row.exchanges) == 1


def fail_in_a_checkpoint(slept: list[float]) -> None:
    with fd.phase("checkpoint"):
        begin = time.monotonic()
        time.sleep(0.02)
        slept.append(time.monotonic() - begin)
        raise KeyError("is not kept back")


@pytest.mark.full("further")
@ranks(1)
def test_pauses_have_names(tmp_path: Path) -> None:
    fd.init(run_dir=tmp_path)
    model = Sleepy("")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fd.distribute(model, optimizer)
    with pytest.raises(fd.ConfigError, match="the name is ''"), fd.phase(""):
        pass
    slept: list[float] = []
    around_seconds = 0.0
    for step in range(3):
        if step == 1:
            with torch.no_grad():
                model(torch.randn(2, 8))
            begin = time.monotonic()
            with pytest.raises(KeyError):
                fail_in_a_checkpoint(slept)
            around_seconds = time.monotonic() - begin
            kept = [{i: [i]} for i in range(200_000)]
            gc.collect()
            del kept
        model(torch.randn(2, 8)).sum().backward()
        optimizer.step()
    first, second, third = (step_seconds(row) for row in records(str(tmp_path)).steps)
    assert second[EVALUATION] > 0
    rounding = 1e-5  # of the record's times
    assert slept[0] - rounding <= second["checkpoint"] <= around_seconds + rounding
    assert second[GARBAGE_COLLECTION] > 0.005
    assert not {EVALUATION, "checkpoint"} & (first.keys() | third.keys())


@ranks(1)
def test_copies_and_saved_models_are_not_recorded(tmp_path: Path) -> None:
    fd.init(run_dir=tmp_path)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fd.distribute(model, optimizer)
    twin, saved = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for each in (model, twin, saved):
        each(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    (row,) = records(str(tmp_path)).steps
    assert [phase.name for phase in row.phases].count(FORWARD) == 1
    assert torch.equal(twin(torch.ones(1, 4)), saved(torch.ones(1, 4)))  # after the world has ended, too


@pytest.mark.full("further")
@ranks(1)
def test_the_host_is_sampled(tmp_path: Path) -> None:
    fd.init(run_dir=tmp_path)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fd.distribute(model, optimizer)
    begin = time.monotonic()
    while time.monotonic() - begin < 1.3:
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
    spent = time.monotonic() - begin
    sample = records(str(tmp_path)).samples[0]
    assert 1.0 <= sample.span_seconds <= spent
    assert 0.1 < (sample.process_cores or 0) < 64
    assert 0 < (sample.machine_share or 0) <= 1
    assert (sample.resident_bytes or 0) > 50e6
    assert (sample.available_bytes or 0) > 0
    assert sample.network_sent_bytes is not None
    assert (sample.cores or 0) >= 1
    assert sample.gpu_share is None


_KILLED = """
import os, signal, sys, torch, farandole as fd
fd.init(run_dir=sys.argv[1])
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
fd.distribute(model, optimizer)
import time
steps, begin = 0, time.monotonic()
while True:
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    steps += 1
    if steps == 150:
        begin = time.monotonic()  # they are on disk a second later
    if steps > 150 and time.monotonic() - begin > 1.5:
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.full("further")
@patient
def test_a_killed_rank_leaves_readable_records(tmp_path: Path) -> None:
    done = warm.python(tmp_path, "-c", _KILLED, str(tmp_path), timeout=50)
    assert done.returncode == -signal.SIGKILL
    timeline = read_events(tmp_path / "events-rank0.jsonl")
    assert len(timeline.steps) > 100
    assert [row.step for row in timeline.steps] == list(range(1, len(timeline.steps) + 1))
    assert all("cut short" in text for text in timeline.skipped)


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def ddp(observed: bool, directory: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Sleepy(FORWARD if observed else ""), bucket_cap_mb=0.001)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = data(DATA if observed else "")
    if observed:
        fd.record(model, optimizer, loader)
        assert isinstance(loader, DataLoader)
        assert type(pickle.loads(pickle.dumps(loader))) is DataLoader
    train(model, optimizer, loader, 5)
    return weights(model)


@pytest.mark.full("slow")
@ranks(3)
def test_stock_ddp_is_observed_and_trains_to_the_same_bits(tmp_path: Path) -> None:
    fd.init(run_dir=tmp_path)
    plain = ddp(False, str(tmp_path))
    observed = ddp(True, str(tmp_path))
    assert all(torch.equal(a, b) for a, b in zip(plain, observed, strict=True))
    timeline = records(str(tmp_path))
    assert [row.step for row in timeline.steps] == [1, 2, 3, 4, 5]
    parts = median_parts(timeline.steps[1:])
    assert SLEEP <= parts[FORWARD] < SLEEP + 0.03
    assert SLEEP <= parts[DATA] < SLEEP + 0.03
    assert parts[BACKWARD] > 0
    assert parts[OPTIMIZER] > 0
    assert parts[OTHER] < 0.05 * sum(parts.values()), parts
    last = timeline.steps[-1]
    assert last.samples == 2
    (exchange,) = last.exchanges
    assert len(exchange.buckets) >= 2
    assert sum(bucket.nbytes for bucket in exchange.buckets) == 4 * (8 * 64 + 64 + 64 * 4 + 4)
    assert all(bucket.launch_seconds < bucket.end_seconds for bucket in exchange.buckets)


@pytest.mark.full("further")
@ranks(2)
def test_fsdp2_is_observed_and_trains_to_the_same_bits(tmp_path: Path) -> None:
    from torch.distributed.fsdp import fully_shard

    fd.init(run_dir=tmp_path)

    def run(observed: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Sleepy(BACKWARD if observed else "")
        fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if observed:
            fd.record(model, optimizer)
        train(model, optimizer, data(), 5)
        return [parameter.to_local().clone() for parameter in model.parameters()]  # type: ignore[attr-defined]

    plain, observed = run(False), run(True)
    assert all(torch.equal(a, b) for a, b in zip(plain, observed, strict=True))
    parts = median_parts(records(str(tmp_path)).steps[1:])
    assert SLEEP <= parts[BACKWARD] < SLEEP + 0.04, parts
    assert parts[FORWARD] > 0
    assert parts[OPTIMIZER] > 0


@ranks(2)
def test_observe_joins_a_group_that_is_there(tmp_path: Path) -> None:
    """As under torchrun, in a script that calls init_process_group itself."""
    place = {name: os.environ[f"FARANDOLE_{name}"] for name in ("RANK", "SIZE", "ADDRESS", "PORT")}
    at = f"tcp://{place['ADDRESS']}:{place['PORT']}"
    dist.init_process_group("gloo", at, rank=int(place["RANK"]), world_size=int(place["SIZE"]))
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fd.record(model, optimizer)  # there is nowhere to write, which is said
    assert not has_world()
    fd.record(model, optimizer, run_dir=tmp_path)
    for _ in range(3):
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
    timeline = records(str(tmp_path))
    dist.destroy_process_group()
    assert (timeline.started.size, len(timeline.steps)) == (2, 3)
    assert len(timeline.steps[0].exchanges[0].buckets) == 1


@pytest.mark.gate_cases("data")
@pytest.mark.parametrize("where", [FORWARD, DATA])
@ranks(2)
def test_horovods_optimizer_finds_its_model_and_the_waits_for_data(where: str, tmp_path: Path) -> None:
    from torch.utils.data import dataloader

    import farandole.horovod.torch as hvd

    original = dataloader._BaseDataLoaderIter.__next__

    fd.init(run_dir=tmp_path)
    hvd.init()
    rank = hvd.rank()
    model = Sleepy(where if rank else "")
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
    )
    train(model, optimizer, data(where if rank else ""), 6)
    assert dataloader._BaseDataLoaderIter.__next__ is not original
    hvd.shutdown()
    fd.shutdown()
    assert dataloader._BaseDataLoaderIter.__next__ is original
    timeline = read_events(tmp_path / f"events-rank{rank}.jsonl")
    assert len(timeline.steps) == 6
    parts = median_parts(timeline.steps[1:])
    if rank:
        assert SLEEP <= parts[where] < SLEEP + 0.03, parts
    else:
        assert parts[EXCHANGE] > 0.8 * SLEEP, parts
    assert parts[DATA] > 0
    assert parts[OPTIMIZER] > 0
    assert parts[BACKWARD] > 0
    assert len(timeline.steps[-1].exchanges[0].buckets) >= 1
    from torch.nn.modules import module

    assert not module._global_forward_pre_hooks


@pytest.mark.full("further")
@ranks(3)
def test_clocks_of_hosts_are_compared_again_and_again() -> None:
    """Rank 1 has a clock an hour ahead that runs 1 % fast; rank 2 shares that of rank 0."""
    here = fd.init(progress=False)
    taken: list[ClockOffset] = []

    class Keep:
        def record(self, event: Any) -> None:
            taken.append(event)

    here.session.recorder = Keep()
    rank, zero = here.rank, time.monotonic()

    def clock() -> float:
        now = time.monotonic()
        return now + 3600 + (now - zero) * 0.01 if rank == 1 else now

    sync = ClockSync(here, "fast" if rank == 1 else "true", clock=clock, every_seconds=0.3)
    for step in range(1, 100):
        time.sleep(0.01)
        sync.after_step(step)
    if rank != 1:
        assert taken == []
        return
    assert 3 <= len(taken) < 20
    track = ClockTrack(taken)
    for offset in taken:
        true = -3600 - (offset.at_seconds - 3600 - zero) * 0.01 / 1.01
        assert abs(offset.offset_seconds - true) <= offset.error_seconds + 1e-6
        assert offset.error_seconds < 0.05
    middle = (taken[0].at_seconds + taken[-1].at_seconds) / 2
    true = -3600 - (middle - 3600 - zero) * 0.01 / 1.01
    assert abs(track.offset(middle) - true) < 0.05


@ranks(2)
def test_a_host_that_stays_away_is_not_waited_for_again() -> None:
    here = fd.init(progress=False)
    sync = ClockSync(here, f"clock of {here.rank}", every_seconds=0.01, meet_seconds=0.2)
    assert sync.next_step == 10
    if here.rank == 1:
        return  # it makes no steps
    begin = time.monotonic()
    for step in range(1, 40):
        sync.after_step(step)
    assert 0.2 <= time.monotonic() - begin < 1.0
    assert sync.next_step is None


@pytest.mark.full("further")
@ranks(2)
def test_the_split_of_the_wait_uses_corrected_clocks(tmp_path: Path) -> None:
    """Both ranks' records as if of two hosts, rank 1's an hour ahead: the split is as of one."""
    fd.init(run_dir=tmp_path)
    model = Sleepy(BACKWARD if world().rank == 1 else "")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fd.distribute(model, optimizer)
    train(model, optimizer, fd.shard(data()), 8)
    rank = world().rank
    world().session.recorder.record(ClockOffset(time.monotonic(), 0.0, 1e-4))
    fd.shutdown()
    if rank == 1:
        _move_an_hour(tmp_path / "events-rank1.jsonl")
    here_done = tmp_path / f"done{rank}"
    here_done.touch()
    while not (tmp_path / f"done{1 - rank}").exists():
        time.sleep(0.01)
    summary = summarise(tmp_path)
    waiting = summary.ranks[0].shares["waiting"] * summary.ranks[0].step_seconds
    assert waiting > 0.7 * SLEEP, summary.ranks
    assert summary.notes == []


def _move_an_hour(path: Path) -> None:
    moved = []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        if "version" in row:
            row |= {"begin_seconds": row["begin_seconds"] + 3600, "host": "other", "clock": "other"}
        elif "begin" in row:
            row["begin"] += 3600
        elif "clock" in row:
            row["clock"] = [row["clock"][0] + 3600, -3600.0, 1e-4]
        moved.append(json.dumps(row))
    aside = path.with_suffix(f".{os.getpid()}")
    aside.write_text("\n".join(moved) + "\n")
    aside.replace(path)
