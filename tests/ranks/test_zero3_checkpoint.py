"""Checkpoints of sharded models: into any stage and any number of ranks, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import farandole as fd
from farandole.core.vocabulary.spec import Plan
from farandole.train.verify.verify import fingerprint
from tests.ranks.pool import ranks, takes
from tests.ranks.reference import own
from tests.ranks.sharded_cases import Words, batches, full, loss_of, whole
from tests.ranks.test_routes import TWO_HOSTS, pretend_two_hosts


class Run:
    """A training of `Words`."""

    def __init__(self, plan: Plan, seed: int = 1) -> None:
        self.model = Words(is_tied=True, unused=True, seed=seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 0.01)
        fd.distribute(self.model, self.optimizer, plan)

    def train(self, first: int, last: int) -> None:
        for x, y in batches(8)[first:last]:
            self.optimizer.zero_grad()
            loss_of(self.model, own(x), own(y)).backward()
            self.optimizer.step()

    @property
    def bits(self) -> dict[str, Any]:
        """Fingerprints of parameters and of what the optimizer keeps for them."""
        found = {name: fingerprint(tensor) for name, tensor in full(self.model).items()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                found[f"{name}/{key}"] = fingerprint(whole(value))
        return found


@pytest.mark.gate_cases("2-0")
@pytest.mark.parametrize("zero", [3, 0])
@takes(60)
@ranks(2, 3)
def test_a_resumed_run_goes_on_bit_for_bit(zero: int, tmp_path: Path) -> None:
    fd.init()
    run = Run(Plan(zero=zero))
    run.train(0, 3)
    loss_of(run.model, *batches(1)[0])  # a pass without backward leaves parameters gathered
    fd.save(tmp_path / "saved", run.model, run.optimizer)
    before = run.bits
    other = Run(Plan(zero=3 - zero), seed=5)
    fd.load(tmp_path / "saved", other.model, other.optimizer)
    assert other.bits == before, "another stage holds the same numbers"
    other.train(3, 4)  # it trains
    run.train(3, 6)
    again = Run(Plan(zero=zero), seed=6)
    fd.load(tmp_path / "saved", again.model, again.optimizer)
    assert again.bits == before, "the same stage holds the same numbers"
    again.train(3, 6)
    assert again.bits == run.bits, "it goes on as the first run did"


@ranks(3)
def _write(folder: str) -> None:
    fd.init()
    run = Run(Plan(zero=3))
    run.train(0, 3)
    fd.save(Path(folder) / "of three", run.model, run.optimizer)
    (Path(folder) / "bits.json").write_text(json.dumps(run.bits))


@ranks(2)
def _pass_on(folder: str) -> None:
    fd.init()
    run = Run(Plan(zero=3), seed=7)
    fd.load(Path(folder) / "of three", run.model, run.optimizer)
    assert json.loads(json.dumps(run.bits)) == json.loads((Path(folder) / "bits.json").read_text()), "on two"
    fd.save(Path(folder) / "of two", run.model, run.optimizer)


@ranks(4, **TWO_HOSTS)
def _read(folder: str) -> None:
    pretend_two_hosts()
    fd.init()
    run = Run(Plan(zero=3, shard_within="host"), seed=8)
    fd.load(Path(folder) / "of two", run.model, run.optimizer)
    assert json.loads(json.dumps(run.bits)) == json.loads((Path(folder) / "bits.json").read_text()), "hybrid"
    run.train(3, 4)


@takes(90)
@ranks(1)
def _alone(folder: str) -> None:
    fd.init()
    run = Run(Plan(zero=3), seed=9)
    fd.load(Path(folder) / "of two", run.model, run.optimizer)
    assert json.loads(json.dumps(run.bits)) == json.loads((Path(folder) / "bits.json").read_text()), "alone"


@pytest.mark.full("further")
@pytest.mark.timeout(240)
def test_other_numbers_of_ranks_and_hybrid_hold_the_same_numbers(tmp_path: Path) -> None:
    for job in (_write, _pass_on, _read, _alone):
        job(folder=str(tmp_path))


@ranks(2)
def test_residuals_of_a_model_whose_parameters_are_all_exact_at_another_stage_are_dropped(tmp_path: Path) -> None:
    fd.init()
    run = Run(Plan(zero=3, codec="int8"))
    run.train(0, 2)
    fd.save(tmp_path / "saved", run.model, run.optimizer)
    before = full(run.model)
    again = Run(Plan(zero=1, codec="int8"), seed=7)
    with pytest.warns(RuntimeWarning, match="parameters such as 'words.weight' have no codec at this ZeRO stage"):
        fd.load(tmp_path / "saved", again.model, again.optimizer)
    assert all(torch.equal(each, before[name]) for name, each in full(again.model).items())
    states: list[Any] = [None, None]
    dist.all_gather_object(states, fd.exchange_state(run.model))
    assert {state.pop("layout") for state in states} == {"units of 2"}
    with pytest.warns(RuntimeWarning, match="have no codec at this ZeRO stage"):  # as older versions saved them
        fd.load_exchange_state(again.model, [{**state, "of": "rows"} for state in states])
    exact = Run(Plan(zero=1), seed=7)
    with pytest.raises(fd.CheckpointError, match="has none by this plan, so its residual would be lost"):
        fd.load(tmp_path / "saved", exact.model, exact.optimizer)


@ranks(2)
def test_an_average_of_weights_is_kept_beside_the_model_and_saved_by_it(tmp_path: Path) -> None:
    fd.init()
    run = Run(Plan(zero=3))
    average = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    for step in range(3):
        run.train(step, step + 1)
        with torch.no_grad():
            for name, p in run.model.named_parameters():
                average[name].lerp_(p, 0.5)
    trained, kept = run.bits, {name: p.detach().clone() for name, p in run.model.named_parameters()}
    with torch.no_grad():
        for name, p in run.model.named_parameters():
            p.copy_(average[name])
    fd.save(tmp_path / "average", run.model)
    with torch.no_grad():
        for name, p in run.model.named_parameters():
            p.copy_(kept[name])
    assert run.bits == trained
    other = Run(Plan(zero=0), seed=2)
    fd.load(tmp_path / "average", other.model)
    for name, p in other.model.named_parameters():
        assert torch.equal(p, whole(average[name])), name
