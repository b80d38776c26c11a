"""What codecs lose at ZeRO stages 1, 2 and 3 is part of checkpoints: the same ranks go on bit for bit, others lose
nothing of the sum.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import farandole as fd
from farandole.core.vocabulary.codec_spec import CodecSpec
from farandole.parallel.zero.sharded_step import weight_residuals
from farandole.train.verify.verify import fingerprint
from tests.ranks.pool import ranks, takes
from tests.ranks.reference import own
from tests.ranks.sharded_cases import full
from tests.ranks.test_routes import TWO_HOSTS, pretend_two_hosts

WIDTH = 70
"""Matrices of more than 4,096 elements, whose rows divide evenly among no number of ranks that is tested but 2."""


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From (batch, 70) to (batch, 70)."""
        found: torch.Tensor = x + self.second(torch.tanh(self.first(x)))
        return found


class Run:
    """A training with codecs."""

    def __init__(self, seed: int = 1, lr: float = 0.01, **keys: Any) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Sequential(Block(), Block()), nn.Linear(WIDTH, 3))
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.model.parameters(), lr, momentum=0.9)
        route: dict[str, Any] = {"route": "flat"} if keys.get("zero", 0) < 3 and "route" not in keys else {}
        fd.distribute(self.model, self.optimizer, fd.Plan(**route, **keys))

    def train(self, first: int, last: int, factor: float = 1.0) -> None:
        for step in range(first, last):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(12, WIDTH, generator=generator)
            self.optimizer.zero_grad()
            (self.model(own(x)).square().mean() * factor).backward()
            self.optimizer.step()

    def bits(self) -> dict[str, str]:
        states = {
            f"{index}/{key}": fingerprint(value.full_tensor() if isinstance(value, DTensor) else value)
            for index, each in self.optimizer.state_dict()["state"].items()
            for key, value in each.items()
            if isinstance(value, torch.Tensor)
        }
        return {**{name: fingerprint(value) for name, value in full(self.model).items()}, **states}

    def missing(self) -> dict[str, torch.Tensor]:
        """Return what is missing of the means so far, by name of the parameter: the same on all ranks."""
        found = {}
        for name, entry in fd.exchange_state(self.model)["parameters"].items():
            residual = entry["elements"]["residual"].double() * entry["scale"]
            dist.all_reduce(residual, group=fd.world().group)
            found[name] = residual / fd.world().size
        return found


CASES: list[dict[str, Any]] = [
    {"zero": 1, "codec": "int8"},
    {"zero": 2, "codec": "int4", "weight_codec": "int8"},
    {"zero": 1, "codec": "int4:rounding=stochastic", "bucket_bytes": 1024},
    {"zero": 3, "codec": "int8", "weight_codec": "int8"},
    {"zero": 3, "codec": "int8:rounding=stochastic"},
    {"zero": 3, "codec": "int8:feedback=false,rounding=stochastic"},
    {"zero": 1, "weight_codec": "int8"},
]


def goes_on(keys: dict[str, Any], folder: Path) -> None:
    """Four steps are two, a checkpoint, a fresh model and two more; and what codecs kept is part of it."""
    run = Run(**keys)
    run.train(0, 2)
    fd.save(folder, run.model, run.optimizer, step=2)
    run.train(2, 4)
    again = Run(seed=2, **keys)
    fd.load(folder, again.model, again.optimizer)
    again.train(2, 4)
    assert again.bits() == run.bits(), f"{keys}: the resumed run went another way"
    other = Run(seed=2, **keys)
    other.train(0, 1)
    fd.load(folder, other.model, other.optimizer)  # into a run that has trained
    other.train(2, 4)
    assert other.bits() == run.bits(), f"{keys}: loaded into a run that had trained, it went another way"
    keeps = CodecSpec.parse(keys.get("codec", "none")).options.get("feedback", True) and "codec" in keys
    lost = any(bool(each.any()) for each in run.missing().values()) if keeps else True
    assert lost, f"{keys}: nothing was lost, so nothing was tested"


@pytest.mark.full("slow")
@ranks(2)
@takes(60)
def test_a_resumed_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    fd.init()
    for number, keys in enumerate(CASES):
        goes_on(keys, Path(tmp_path) / f"{number}")


@pytest.mark.full("further")
@ranks(3)
def test_three_ranks_with_uneven_rows_go_on_bit_for_bit(tmp_path: Path) -> None:
    fd.init()
    for number in (1, 3):
        goes_on(CASES[number], Path(tmp_path) / f"{number}")


@pytest.mark.full("further")
@ranks(4, **TWO_HOSTS)
def test_a_resumed_run_across_hosts_goes_on_bit_for_bit(tmp_path: Path) -> None:
    pretend_two_hosts()
    fd.init()
    goes_on({"zero": 1, "codec": "int4", "weight_codec": "int8", "route": "hierarchical"}, Path(tmp_path))


# -- other ranks and stages ----------------------------------------------------------------------------


def keep(folder: str, keys: dict[str, Any]) -> None:
    """Train, and save with what is missing of the means."""
    run = Run(**keys)
    run.train(0, 3)
    fd.save(Path(folder) / "saved", run.model, run.optimizer, step=3)
    missing = run.missing()
    assert all(bool(each.any()) for name, each in missing.items() if "weight" in name and name != "1.weight"), (
        missing
    )
    if fd.world().rank == 0:
        torch.save({**missing, "parameters": full(run.model)}, Path(folder) / "missing.pt")
    else:
        full(run.model)


def nothing_is_lost(folder: str, keys: dict[str, Any]) -> None:
    """Load into other ranks or another stage: what the next step applies and what is missing then add up."""
    run = Run(seed=2, lr=1.0, **keys)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # what weight_codec has lost
        fd.load(Path(folder) / "saved", run.model, run.optimizer)
    for group in run.optimizer.param_groups:
        group.update(lr=1.0, momentum=0.0)
    expected = torch.load(Path(folder) / "missing.pt", weights_only=True)
    before = expected.pop("parameters")
    for name, value in full(run.model).items():
        assert torch.equal(value, before[name]), f"{name} is not what was saved"
    run.train(0, 1, factor=0.0)  # gradients of zero: what was missing is all that arrives
    after, missing = full(run.model), run.missing()
    both = expected.keys() & missing.keys()
    assert {name for name in expected if "weight" in name and name != "1.weight"} <= both, f"residuals of {both}"
    for name in both:
        applied = (before[name] - after[name]).double()
        error = float((applied + missing[name] - expected[name]).abs().max())
        assert error <= 1e-4 * float(expected[name].abs().max()) + 1e-7, f"{name}: {error} was lost or doubled"


@ranks(2, 3, 4)
def _keep(folder: str, keys: dict[str, Any]) -> None:
    fd.init()
    keep(folder, keys)


@ranks(2, 3, 4)
def _load(folder: str, keys: dict[str, Any]) -> None:
    fd.init()
    nothing_is_lost(folder, keys)


STAGES: dict[Any, dict[str, Any]] = {stage: {"zero": stage, "codec": "int8"} for stage in range(4)}
STAGES["hybrid"] = {"zero": 3, "codec": "int8", "shard": 2, "data": 2}


@pytest.mark.gate_cases("saved2-loaded2")
@pytest.mark.full_cases("saved2-loaded2")
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ((3, 1), (2, 3)),
        ((2, 3), (3, 2)),
        ((2, 0), (2, 1)),
        ((3, 2), (3, 0)),
        ((4, 3), (4, "hybrid")),
        ((4, "hybrid"), (4, 3)),
    ],
)
def test_other_ranks_and_stages_conserve_the_mean(saved: Any, loaded: Any, tmp_path: Path) -> None:
    """Pairs of ranks and stage."""
    _keep(world_size=saved[0], folder=str(tmp_path), keys=STAGES[saved[1]])
    _load(world_size=loaded[0], folder=str(tmp_path), keys=STAGES[loaded[1]])


ROUTES: list[dict[str, Any]] = [{"route": "flat"}, {"route": "hierarchical"}, {"zero": 1, "route": "flat"},
                                {"zero": 1, "route": "hierarchical"}]  # fmt: skip


@pytest.mark.full("slow")
@pytest.mark.parametrize("saved", [0, 2])
@ranks(4, **TWO_HOSTS)
def test_equal_ranks_and_another_route_conserve_the_mean(saved: int, tmp_path: Path) -> None:
    pretend_two_hosts()
    fd.init()
    for first, second in ((saved, saved + 1), (saved + 1, saved), (saved, saved)):
        keep(str(tmp_path), {"codec": "int8", **ROUTES[first]})
        nothing_is_lost(str(tmp_path), {"codec": "int8", **ROUTES[second]})


@ranks(2, 3)
def _pack(folder: str) -> None:
    fd.init()
    run = Run(zero=1, weight_codec="int8")
    run.train(0, 4)
    fd.save(Path(folder) / "saved", run.model, run.optimizer, step=4)


@ranks(2, 3)
def _unpack(folder: str) -> None:
    fd.init()
    run = Run(seed=2, zero=2, weight_codec="int8")
    fd.load(Path(folder) / "saved", run.model, run.optimizer)
    lost = {name: each.full_tensor() for name, each in weight_residuals(run.model).items()}
    assert any(bool(each.any()) for each in lost.values()), "nothing was lost, so nothing was tested"
    file = Path(folder) / "lost.json"
    digests = {name: fingerprint(each) for name, each in lost.items()}
    if file.exists():
        assert json.loads(file.read_text()) == digests, "another number of ranks has other residuals of weights"
    dist.barrier()
    file.write_text(json.dumps(digests))
    for stage in (0, 3):
        plain = Run(seed=2, zero=stage)
        with pytest.warns(RuntimeWarning, match="nothing is packed here, so it is dropped"):
            fd.load(Path(folder) / "saved", plain.model, plain.optimizer)


@pytest.mark.full("further")
def test_what_packing_parameters_loses_is_divided_anew_or_dropped_with_a_warning(tmp_path: Path) -> None:
    _pack(world_size=3, folder=str(tmp_path))
    for size in (3, 2):
        _unpack(world_size=size, folder=str(tmp_path))


def _divided(**keys: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    fd.distribute(model, optimizer, fd.Plan(codec="int8", route="flat", **keys))
    return model, optimizer


def _lost(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return what is still to come of each parameter: the mean over the ranks with the same part of it."""
    own = {
        n: e["elements"]["residual"] * e["scale"]
        for n, e in fd.exchange_state(model).get("parameters", {}).items()
    }
    every: list[Any] = [None] * 4
    dist.all_gather_object(every, own)
    same = [each for rank, each in enumerate(every) if rank % 2 == fd.world().rank % 2]
    return {name: torch.stack([each[name] for each in same]).mean(0) for name in own}


@pytest.mark.full("further")
@ranks(4)
def test_what_was_lost_of_a_part_of_the_model_comes_back_to_that_part(tmp_path: Path) -> None:
    here = fd.init()
    keys = {"tensor": 2, "tensor_recipe": {"0": "columns", "2": "rows"}}
    model, optimizer = _divided(**keys)
    for step in range(3):
        torch.manual_seed(10 * step + here.sample_rank)
        optimizer.zero_grad()
        (0.1 * model(torch.randn(4, 64)).square().mean()).backward()
        optimizer.step()
    states: list[Any] = [None] * 4
    dist.all_gather_object(states, fd.exchange_state(model))
    expected = _lost(model)
    assert expected
    for zero in (0, 1):
        again, stepping = _divided(zero=zero, **keys)
        fd.load_exchange_state(again, states)
        before = {name: each.detach().clone() for name, each in again.named_parameters()}
        (again(torch.randn(4, 64)).square().mean() * 0.0).backward()
        stepping.step()
        left = _lost(again)
        for name, each in again.named_parameters():
            if name in expected:
                came = before[name] - each.detach() + left.get(name, 0.0)
                torch.testing.assert_close(came, expected[name], rtol=0, atol=1e-6, msg=f"zero = {zero}: {name}")
    whole, _ = _divided()
    for given in (states, states[here.rank]):
        with pytest.raises(fd.ConfigError, match="saved with data 2 x tensor 2, and the plan has data 4"):
            fd.load_exchange_state(whole, given)
    for wrong in ({"tensor": "2"}, {"tensor": 3}, {"rows": 2}, 4):
        with pytest.raises(fd.ConfigError, match="exchange state: degrees"):
            fd.load_exchange_state(whole, [{**each, "degrees": wrong} for each in states])


class Sums(nn.Module):
    """Its gradients do not depend on its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([(block(x) * (1 + i)).sum() for i, block in enumerate(self.blocks)]).sum()


def adds_up(keys: dict[str, Any]) -> None:
    """What was applied and what codecs keep are together the exact means."""
    here = fd.init()
    torch.manual_seed(1)
    model = Sums()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    fd.distribute(model, optimizer, fd.Plan(codec="int8", **keys))
    before, exact = full(model), torch.zeros(WIDTH)
    for step in range(3):
        x = torch.randn(4 * here.size, WIDTH, generator=torch.Generator().manual_seed(step))
        exact += x.sum(0) / here.size
        optimizer.zero_grad()
        model(x.chunk(here.size)[here.rank]).backward()
        optimizer.step()
    after = full(model)
    for name, entry in fd.exchange_state(model)["parameters"].items():
        kept = entry["elements"]["residual"].double() * entry["scale"]
        dist.all_reduce(kept, group=here.group)
        factor = 1 + int(name.split(".")[1])
        wanted = (
            exact.double().expand(WIDTH, WIDTH) * factor
            if name.endswith("weight")
            else torch.tensor(12.0 * factor)
        )
        came = (before[name] - after[name]).double() + kept / here.size
        torch.testing.assert_close(came, wanted.double().expand_as(came), rtol=0, atol=1e-3, msg=f"{keys}: {name}")


@ranks(4)
def test_at_stage_3_what_was_applied_and_what_is_kept_are_the_means() -> None:
    cases: list[dict[str, Any]] = [{}, {"data": 2, "shard": 2}]
    for keys in cases:
        adds_up({"zero": 3, **keys})


@ranks(2)
def test_another_reduction_than_the_mean_is_refused() -> None:
    fd.init()
    model = Sums()
    fd.distribute(model, torch.optim.SGD(model.parameters(), 1.0), fd.Plan(zero=3, codec="int8"))
    scaled: Any = model
    scaled.set_gradient_divide_factor(3.0)
    with pytest.raises(fd.ConfigError, match="expected their mean"):
        model(torch.ones(2, WIDTH)).backward()
