"""The online tuner on real ranks: buckets, codecs and routes change in a training, and its results do not."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import farandole as fd
from farandole.comm.engine.reducer import GradientReducer
from farandole.comm.world.store_sync import all_gather_json, decide_on_first
from farandole.core.bucket_plan import ExchangeKeys
from farandole.core.env import TUNE, TuneSettings, changed_environment
from farandole.core.vocabulary.errors import ConfigError
from farandole.core.vocabulary.run_files import TUNED_PLAN
from farandole.parallel.model import DistributedModel
from farandole.train import tuner
from farandole.train.data.worker_cores import TunedLoaders, WorkerTrials
from farandole.train.tuner import ExchangeSwitch, OnlineTuner
from tests.ranks.pool import ranks
from tests.ranks.reference import assert_same_bits, own

KIB = 1024
ALL = TuneSettings(budget=1.0, cache=False)
Cost = Callable[[GradientReducer], float]


def model_of(seed: int = 1) -> nn.Sequential:
    """Return 4 matrices of 256 KiB."""
    torch.manual_seed(seed)
    return nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(4)])


def reducer_in(model: nn.Module) -> GradientReducer:
    found = DistributedModel.of(model).reducer
    assert found is not None, "two ranks exchange"
    return found


@contextmanager
def tuned(tmp_path: str, settings: TuneSettings = ALL) -> Iterator[SimpleNamespace]:
    """A tuned world whose steps take what is added to ``clock.now``, all of it exposed communication."""
    clock = SimpleNamespace(now=0.0)
    clock.monotonic = lambda: clock.now
    with changed_environment({TUNE: settings.to_text()}), pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuner, "time", clock)
        patch.setattr(ExchangeSwitch, "wait_seconds", property(lambda switch: 1.0))
        fd.init(run_dir=tmp_path)
        yield clock


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, after: Callable[[], None] = lambda: None, *,
    set_to_none: bool = True,
) -> None:  # fmt: skip
    """Make steps of two passes each, the first of which is held."""
    for step in range(steps):
        x = torch.randn(8, 256, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad(set_to_none=set_to_none)
        for part, hold in zip(own(x).chunk(2), (True, False), strict=True):
            with fd.accumulate(hold):
                (model(part).pow(2).mean() / 2).backward()
        after()
        optimizer.step()


def outcome(tmp_path: str) -> dict[str, Any]:
    """Return what rank 0 has written, on all ranks, once it is there."""
    found: dict[str, Any] = json.loads(Path(tmp_path, "tune.json").read_text()) if fd.world().rank == 0 else {}
    return dict(all_gather_json(fd.world(), "test/outcome", found)[0])


def untuned(plan: fd.Plan, steps: int, *, set_to_none: bool = True) -> nn.Module:
    """Return the model that the same training gives without a tuner, in the world that there is."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), 0.3, momentum=0.9)
    fd.distribute(model, optimizer, plan)
    train(model, optimizer, steps, set_to_none=set_to_none)
    return model


def by_bucket_count(best: int) -> Cost:
    return lambda reducer: 0.01 * (1 + abs(len(reducer.bucket_bytes) - best))


@pytest.mark.full("further")
@pytest.mark.parametrize("set_to_none", [True, False])
@ranks(2)
def test_a_planted_best_size_is_found_and_results_are_the_same_bits(set_to_none: bool, tmp_path: Path) -> None:
    directory, plan = str(tmp_path), fd.Plan(route="flat", bucket_bytes=4 << 20, first_bucket_bytes=4 << 20)
    with tuned(directory, TuneSettings(("bucket_bytes", "first_bucket_bytes"), budget=1.0, cache=False)) as clock:
        model, other = model_of(), model_of(2)
        optimizer = torch.optim.SGD(model.parameters(), 0.3, momentum=0.9)
        second = torch.optim.SGD(other.parameters(), 0.3)
        fd.distribute(model, optimizer, plan)
        fd.distribute(other, second, plan)
        counts: list[int] = []

        def after() -> None:
            with fd.accumulate():
                other(torch.full((1, 256), 0.1 * (fd.world().rank + 1))).sum().backward()
            counts.append(len(reducer_in(model).bucket_bytes))
            clock.now += by_bucket_count(4)(reducer_in(model)) * (1 + fd.world().rank)

        train(model, optimizer, 60, after, set_to_none=set_to_none)
        held = [parameter.grad for parameter in other.parameters()]
        assert all(gradient is not None for gradient in held), "what was held over all switches is still there"
        other(torch.zeros(1, 256)).sum().backward()  # and travels with this pass
        found = outcome(directory)
        assert found["stopped"], found
        assert found["best"]["bucket_bytes"] == 256 * KIB, found
        assert counts[-1] == 4, counts
        assert counts[0] == 1, counts
        assert all(each == counts for each in all_gather_json(fd.world(), "test/counts", counts)), "the same steps"
        assert found["gain"]["share"] == pytest.approx(0.75, abs=0.01), "4 to 1"
        assert_same_bits(model)
        expected = untuned(plan, 60, set_to_none=set_to_none).state_dict()
        assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items()), (
            "the same bits"
        )
        gradients = [parameter.grad for parameter in other.parameters()]
        sums = [0.5 * each for each in _summed_over_ranks(other, 60)]
        for gradient, whole in zip(gradients, sums, strict=True):
            torch.testing.assert_close(gradient, whole, rtol=1e-3, atol=1e-4)
        if fd.world().rank == 0:
            assert fd.Plan.read(tmp_path / TUNED_PLAN).differences(plan).keys() == {
                "bucket_bytes", "first_bucket_bytes",
            }, "a plan like the first one"  # fmt: skip
    fd.shutdown()


def _summed_over_ranks(model: nn.Module, passes: int) -> list[torch.Tensor]:
    """Return what `passes` held passes of both ranks sum up to."""
    alone = model_of(2)
    for rank in range(2):
        (passes * alone(torch.full((1, 256), 0.1 * (rank + 1))).sum()).backward()
    return [parameter.grad for parameter in alone.parameters() if parameter.grad is not None]


@pytest.mark.full("further")
@ranks(2)
def test_what_regresses_or_fails_on_one_rank_is_rolled_back_on_all(tmp_path: Path) -> None:
    directory = str(tmp_path)
    original = GradientReducer.switch_keys
    refused: list[ExchangeKeys] = []

    def switch_keys(reducer: GradientReducer, keys: ExchangeKeys) -> None:
        original(reducer, keys)
        if keys.bucket_bytes == 512 * KIB and fd.world().rank == 1:
            refused.append(keys)
            raise ConfigError("this rank cannot")

    settings = TuneSettings(("bucket_bytes", "first_bucket_bytes"), budget=1.0, cache=False)
    with tuned(directory, settings) as clock, pytest.MonkeyPatch.context() as patch:
        patch.setattr(GradientReducer, "switch_keys", switch_keys)
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), 0.3, momentum=0.9)
        plan = fd.Plan(route="flat", bucket_bytes=1 << 20, first_bucket_bytes=1 << 20)
        fd.distribute(model, optimizer, plan)
        small: list[int] = []

        def after() -> None:
            if len(reducer_in(model).bucket_bytes) == 4:
                small.append(1)
            is_good = 0 < len(small) <= 7 and len(reducer_in(model).bucket_bytes) == 4
            clock.now += 0.01 if is_good else 0.02 if len(reducer_in(model).bucket_bytes) == 1 else 0.05

        train(model, optimizer, 70, after)
        found = outcome(directory)
        verdicts = {trial["setting"]["bucket_bytes"] // KIB: trial["verdict"] for trial in found["trials"]}
        assert verdicts[256] == "rolled back", found
        assert verdicts[512] == "failed", found
        assert refused or fd.world().rank == 0, "it was tried"
        assert found["best"] == found["start"], found
        assert len(reducer_in(model).bucket_bytes) == 1, "as at first"
        assert_same_bits(model)
        expected = untuned(plan, 70).state_dict()
        assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items()), (
            "the same bits"
        )
    fd.shutdown()


@pytest.mark.full("further")
@ranks(2)
def test_codecs_and_routes_are_tried_and_nothing_that_was_not_sent_is_lost(tmp_path: Path) -> None:
    directory = str(tmp_path)
    with tuned(directory, TuneSettings(allow_lossy=True, budget=1.0, trials=6, cache=False)) as clock:
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        fd.distribute(model, optimizer)
        reducer = reducer_in(model)
        assert reducer.route == "shared", "two ranks of one host"
        seen: set[tuple[str, str]] = set()

        def after() -> None:
            codecs = {bucket.spec.to_text() for bucket in reducer.buckets.buckets}
            seen.update((reducer.route, codec) for codec in codecs)
            clock.now += 0.01 if reducer.route == "flat" else 0.02

        # What the step model says of a host whose ranks share memory is that nothing is faster: made to like both.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("farandole.train.tuner.rank_by_prediction", _flat_then_int8)
            train(model, optimizer, 80, after)
        found = outcome(directory)
        assert seen >= {("shared", "none"), ("flat", "none"), ("flat", "int8")}, seen
        assert found["best"]["route"] == "flat", found
        assert found["best"]["codec"] == "none", "int8 is no faster here"
        assert reducer.route == "flat", "it stays"
        assert not any(bucket.coded is not None for bucket in reducer.buckets.buckets), "exact again"
        carried = reducer.buckets.carry_over
        assert not carried.unsent, "what int8 had not sent went with the first exact exchange"
        assert_same_bits(model)
        expected = untuned(fd.Plan(), 80).state_dict()
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, expected[name], rtol=0.05, atol=0.02, msg=name)
    fd.shutdown()


def _flat_then_int8(
    look: Any, now: ExchangeKeys, *arguments: Any, **named: Any
) -> tuple[list[ExchangeKeys], list[str]]:
    assert set(look.profiles) == {"shared", "flat"}, "both were looked at"
    assert look.links["flat"].bytes_per_second > 0, "measured"
    flat = ExchangeKeys(now.bucket_bytes, now.first_bucket_bytes, "none", "flat", 1, 1)
    return [flat, ExchangeKeys(now.bucket_bytes, now.first_bucket_bytes, "int8", "flat", 2, 1)], []


@pytest.mark.gate_cases("plan0-zero = 1", "plan2-divided")
@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        ({"zero": 1}, "zero = 1"),
        ({"codec": "auto", "route": "flat"}, 'codec = "auto"'),
        ({"tensor": 2}, "divided"),
    ],
)
@ranks(2)
def test_what_cannot_be_tuned_is_said_and_trains_as_ever(
    plan: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with tuned(str(tmp_path)) as clock:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128))
        if "tensor" in plan:
            plan = {**plan, "tensor_recipe": {"0": "columns", "2": "rows"}}
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        fd.distribute(model, optimizer, fd.Plan(**plan))
        for _ in range(12):
            optimizer.zero_grad()
            model(torch.ones(4, 128)).pow(2).mean().backward()
            clock.now += 0.01
            optimizer.step()
        found = outcome(str(tmp_path))
        assert reason in found["notes"][0], found
        assert "trials" not in found, "nothing was tried"
        tuner = fd.world().session.kept(OnlineTuner)
        assert tuner is not None, "it was asked for"
        assert tuner.is_over, "and costs nothing more"
    fd.shutdown()


class RandomSamples(Dataset[torch.Tensor]):
    """Samples that are drawn anew each time."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(2) + index


@ranks(1)
def test_batches_are_the_same_with_any_number_of_workers(tmp_path: Path) -> None:
    with tuned(str(tmp_path)), pytest.MonkeyPatch.context() as patch:
        used: list[int] = []

        def more(trials: WorkerTrials, workers: int, *_: Any) -> int:
            used.append(1 + len(used) // 2)  # 1, 1, 2 workers
            return used[-1]

        patch.setattr(WorkerTrials, "_next", more)
        changed = fd.shard(DataLoader(RandomSamples(), 4, shuffle=True, num_workers=1), seed=3)
        batches = [batch for _ in range(3) for batch in changed]
        assert used == [1, 1, 2], "asked at each iteration"
        assert changed.num_workers == 2, "torch was told"
        fd.world().session.drop(TunedLoaders)
        plain = fd.shard(DataLoader(RandomSamples(), 4, shuffle=True, num_workers=1), seed=3)
        expected = [batch for _ in range(3) for batch in plain]
        assert len(batches) == 18, "all samples"
        assert all(torch.equal(a, b) for a, b in zip(batches, expected, strict=True)), "the same numbers"
    fd.shutdown()


def _refuse(said: list[Any]) -> Any:
    raise ValueError("cannot decide")


@ranks(2)
def test_a_run_that_ends_in_a_trial_says_so(tmp_path: Path) -> None:
    with tuned(str(tmp_path)) as clock:
        with pytest.raises(ValueError if fd.world().rank == 0 else fd.CommError, match="decide"):
            decide_on_first(fd.world(), "test", 1, _refuse)
        assert decide_on_first(fd.world(), "test", fd.world().rank, sum) == 1, "what rank 0 makes of all"
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        fd.distribute(model, optimizer, fd.Plan(route="flat"))

        def after() -> None:
            clock.now += 0.01

        train(model, optimizer, 12, after)
    rank = fd.world().rank
    fd.shutdown()
    if rank == 0:
        found = json.loads((tmp_path / "tune.json").read_text())
        assert found["stopped"] == "the run has ended", found
        assert [trial["verdict"] for trial in found["trials"]] == ["not finished"], found
        assert found["best"] == found["start"], found
    assert time.monotonic() > 0, "the clock is the real one again"
