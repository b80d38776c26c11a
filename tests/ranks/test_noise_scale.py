"""`fd.noise_scale` against a closed form, and against one process that computes every rank's gradient."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import farandole as fd
from farandole.comm.world.store_sync import all_gather_json
from farandole.parallel.model import DistributedModel
from tests.ranks.pool import ranks
from tests.ranks.reference import assert_same_bits, data, mlp, own

OURS: dict[str, Any] = {"every": 1, "decay": 0.9}


def expected(readings: list[tuple[list[torch.Tensor], list[float], float]]) -> tuple[float, float]:
    """Return |G|^2 and tr(Sigma) of readings: (each rank's gradient, its share of the batch, samples)."""
    total = squares = variances = 0.0
    for gradients, shares, batch in readings:
        mean = sum(share * each.double() for share, each in zip(shares, gradients, strict=True) if share)
        assert isinstance(mean, torch.Tensor), "some rank has samples"
        inner = sum(
            share * float(each.double().square().sum())
            for share, each in zip(shares, gradients, strict=True)
            if share
        )
        count, outer = sum(share > 0 for share in shares), float(mean.square().sum())
        total = 0.9 * total + 1
        squares = 0.9 * squares + (count * outer - inner) / (count - 1)
        variances = 0.9 * variances + (inner - outer) * batch / (count - 1)
    return squares / total, variances / total


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def gradient(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The gradient of a plain copy of `model`, with the parameters that it has now."""
    plain = mlp()
    plain.load_state_dict(model.state_dict())
    mse_loss(plain(x), y).backward()
    return flat(plain)


def close(noise: Any, readings: list[Any], *, rtol: float = 1e-4) -> None:
    square, variance = expected(readings)
    assert noise.readings == len(readings), f"{noise.readings} readings of {len(readings)}: {noise.why_not}"
    assert noise.gradient_square == pytest.approx(square, rel=rtol, abs=1e-7), "|G|^2"
    assert noise.variance == pytest.approx(variance, rel=rtol), "tr(Sigma)"
    said = [noise.gradient_square.hex(), noise.variance.hex(), repr(noise.interval)]
    all_said = all_gather_json(fd.world(), "test/noise", said)
    assert all(each == said for each in all_said), f"ranks differ: {all_said}"


def made(plan: fd.Plan | None = None, **arguments: Any) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fd.distribute(model, optimizer, plan)
    return model, optimizer, fd.noise_scale(model, **{**OURS, **arguments})


def train(
    plan: fd.Plan | None = None, *, window: int = 1, held: bool = False, steps: int = 5, to_none: bool = True
) -> None:
    """Train on parts of the same size, and compare with the gradients of plain copies."""
    world = fd.init()
    accumulates = window if held else 1
    model, optimizer, noise = made(plan, samples=4)
    x, y = data(4 * world.size)
    readings = []
    for step in range(steps):
        own_parts: list[list[torch.Tensor]] = [[] for _ in range(world.size)]
        for i in range(window):
            xs, ys = x.roll(3 * i + step, 0), y.roll(5 * i + step, 0)
            if step < steps - 1:  # the last step's numbers would travel with the next one
                for rank in range(world.size):
                    a, b = xs.chunk(world.size)[rank], ys.chunk(world.size)[rank]
                    own_parts[rank].append(gradient(model, a, b) / window)
            with fd.accumulate(i + 1 < window) if accumulates > 1 else nullcontext():
                (mse_loss(model(own(xs)), own(ys)) / window).backward()
        if step < steps - 1:
            sums = [torch.stack(each).sum(0) for each in own_parts]
            readings.append((sums, [1 / world.size] * world.size, 4.0 * world.size * window))
        optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)
    close(noise, readings)
    if plan is None or not plan.zero:
        assert_same_bits(model)


@pytest.mark.full("further")
@ranks(2, 4)
def test_the_estimates_are_those_of_one_process() -> None:
    """Exact buckets, ZeRO, accumulation of both kinds, and gradients that are cleared to zeros."""
    train()
    fd.shutdown()
    train(to_none=False)
    fd.shutdown()
    train(window=3, held=True)
    fd.shutdown()
    train(fd.Plan(accumulate=2, route="flat"), window=2)
    fd.shutdown()
    train(fd.Plan(zero=1, accumulate=2), window=2)
    fd.shutdown()
    train(fd.Plan(zero=2))


@pytest.mark.full("further")
@ranks(2)
def test_linear_regression_with_known_noise() -> None:
    """y = w x + noise: every sample's gradient is known, and so are G, tr(Sigma) and the critical batch."""
    fd.init()
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(1024, 12, generator=generator)
    y = x @ torch.randn(12, 1, generator=generator) + 2.0 * torch.randn(1024, 1, generator=generator)
    model = nn.Linear(12, 1, bias=False)
    nn.init.constant_(model.weight, 0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    fd.distribute(model, optimizer)
    noise = fd.noise_scale(model, every=1, decay=0.9999)
    loader = fd.shard(DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True))
    for _ in range(8):
        for inputs, targets in loader:
            optimizer.zero_grad()
            mse_loss(model(inputs), targets).backward()
            optimizer.step()
    each = 2 * (x @ model.weight.detach().T - y) * x
    true = each.mean(0)
    variance, square = float((each - true).square().sum(1).mean()), float(true.square().sum())
    assert noise.global_batch == 16, "8 samples on each rank, as the loader says"
    assert noise.variance == pytest.approx(variance, rel=0.1), "tr(Sigma)"
    assert noise.critical_batch == pytest.approx(variance / square, rel=0.2), "tr(Sigma) / |G|^2, in samples"
    low, high = noise.interval or (math.inf, 0.0)
    assert low < variance / square < high, "the interval holds it"


@ranks(2)
def test_unequal_batches_weigh_by_their_samples() -> None:
    """23 samples in batches of 4: the last one of 2 ranks has 4 + 3; of 17, one rank has a placeholder."""
    world = fd.init()
    for count in (23, 17):
        model, optimizer, noise = made()
        x, y = data(count)
        loader = fd.shard(DataLoader(TensorDataset(x, y), batch_size=4))
        readings: list[Any] = []
        for _ in range(2):
            for inputs, targets in loader:
                sizes = all_gather_json(world, "test/sizes", len(inputs))
                rows = all_gather_json(world, "test/rows", [inputs.tolist(), targets.tolist()])
                weight = fd.world().session.batch_weight.by_samples / world.size
                shares = all_gather_json(world, "test/shares", weight)
                gradients = [gradient(model, torch.tensor(a), torch.tensor(b)) for a, b in rows]
                whole = sum(size for size, share in zip(sizes, shares, strict=True) if share)
                if sum(share > 0 for share in shares) > 1:
                    readings.append((gradients, shares, float(whole)))
                optimizer.zero_grad()
                mse_loss(model(inputs), targets).backward()
                optimizer.step()
        optimizer.zero_grad()
        mse_loss(model(own(x[:4])), own(y[:4])).backward()  # brings the last numbers
        optimizer.step()
        close(noise, readings)
        assert len({tuple(share) for _, share, _ in readings}) > 1 or count == 17, "some batches are unequal"


def steps_of(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    backward: Callable[[torch.Tensor, torch.Tensor], None],
    count: int = 4,
) -> None:
    x, y = data(8 * fd.world().size)
    for step in range(count):
        backward(own(x.roll(step, 0)), own(y.roll(step, 0)))
        optimizer.step()
        optimizer.zero_grad()


@ranks(2)
def test_what_is_no_measurement_is_left_out_and_said() -> None:
    fd.init()

    def plain(model: nn.Module) -> Callable[[torch.Tensor, torch.Tensor], None]:
        return lambda x, y: mse_loss(model(x), y).backward()

    model, optimizer, noise = made(samples=8)
    steps_of(model, optimizer, plain(model))
    assert noise.readings == 3, "each step but the last, whose numbers are on their way"
    before = noise.variance

    def twice(x: torch.Tensor, y: torch.Tensor) -> None:
        for _ in range(2):
            mse_loss(model(x), y).backward()

    steps_of(model, optimizer, twice)
    assert noise.readings == 8, "of two exchanges before one step, the first, which the second brings"
    x, y = data(16)
    for _ in range(3):
        mse_loss(model(own(x)), own(y)).backward()
        optimizer.step()  # and no zero_grad
    assert noise.why_not == "gradients of an earlier batch were not cleared", noise.why_not
    assert noise.readings == 9, "the first of them was still clean, and brought the last of before"
    optimizer.zero_grad()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert noise.why_not == "no backward pass brought the gradients", noise.why_not
    optimizer.zero_grad()
    (mse_loss(model(own(x)), own(y)) * float("inf")).backward()
    optimizer.zero_grad()
    steps_of(model, optimizer, plain(model), 2)
    assert math.isfinite(noise.variance), "a step that is not finite is left out"
    assert noise.variance != before, "others are not"


@ranks(2)
def test_training_is_the_same_with_and_without_it() -> None:
    fd.init()
    finals = []
    for measures in (False, True):
        model = mlp()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        fd.distribute(model, optimizer, fd.Plan(clip_norm=0.1))
        noise = fd.noise_scale(model, every=2, samples=4) if measures else None

        def backward(x: torch.Tensor, y: torch.Tensor, model: nn.Module = model) -> None:
            mse_loss(model(x), y).backward()

        steps_of(model, optimizer, backward, 6)
        finals.append([each.detach().clone() for each in model.parameters()])
        assert noise is None or noise.readings == 3, "one of two steps"
        assert noise is None or noise.busy_seconds > 0, "what it cost is counted"
    assert all(torch.equal(a, b) for a, b in zip(*finals, strict=True)), "bit for bit"


@ranks(2)
def test_parameters_that_are_frozen_unused_sparse_narrow_or_scaled() -> None:
    world = fd.init()

    class Strange(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.words = nn.Embedding(10, 4, sparse=True)
            self.layer, self.unused, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
            self.frozen.requires_grad_(False)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.frozen(self.layer(self.words(tokens)))
            return found.sum(-1)

    def gradients(model: Strange, tokens: torch.Tensor) -> torch.Tensor:
        loss = model(tokens).square().mean()
        several = torch.autograd.grad(loss, [model.words.weight, *model.layer.parameters()])
        return torch.cat([(each.to_dense() if each.is_sparse else each).flatten() for each in several])

    model = Strange()
    plain = Strange()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    fd.distribute(model, optimizer)
    noise = fd.noise_scale(model, samples=3, **OURS)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    readings = []
    for step in range(5):
        tokens = [torch.arange(3 * step + 2 * rank, 3 * step + 2 * rank + 3) % 10 for rank in range(world.size)]
        plain.load_state_dict(model.state_dict())
        if 1 <= step < 4:  # the scaler is known from its first step on, and what was before is forgotten
            readings.append(([gradients(plain, each) for each in tokens], [0.5, 0.5], 6.0))
        scaler.scale(model(tokens[world.rank]).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        if step == 2:
            scaler.update(2.0**14)
        optimizer.zero_grad()
    close(noise, readings)
    narrow = mlp().bfloat16()
    optimizer = torch.optim.SGD(narrow.parameters(), lr=0.1)
    fd.distribute(narrow, optimizer)
    noise = fd.noise_scale(narrow, samples=4, **OURS)
    x, y = (each.bfloat16() for each in data(8))
    reference = mlp().bfloat16()
    readings = []
    for step in range(3):
        reference.load_state_dict(narrow.state_dict())
        several = []
        for rank in range(2):
            reference.zero_grad()
            mse_loss(reference(x.chunk(2)[rank]), y.chunk(2)[rank]).backward()
            several.append(flat(reference))
        if step < 2:
            readings.append((several, [0.5, 0.5], 8.0))
        mse_loss(narrow(own(x)), own(y)).backward()
        optimizer.step()
        optimizer.zero_grad()
    close(noise, readings, rtol=0.05)


@pytest.mark.full("further")
@ranks(2)
def test_codecs_that_keep_the_norm_and_others() -> None:
    fd.init()

    def one(codec: str, zero: int) -> float:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(64, 80), nn.Tanh(), nn.Linear(80, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        fd.distribute(model, optimizer, fd.Plan(codec=codec, route="flat", zero=zero))
        noise = fd.noise_scale(model, samples=8, **OURS)
        x, y = data(16, width=64)
        for step in range(6):
            mse_loss(model(own(x.roll(step, 0))), own(y.roll(step, 0))).backward()
            optimizer.step()
            optimizer.zero_grad()
        reducer = DistributedModel.of(model).reducer
        assert reducer is not None, "two ranks exchange"
        assert reducer.has_codecs == (codec != "none"), "something is packed"
        assert noise.readings == 5, noise.why_not
        return float(noise.critical_batches or 0.0)

    exact = one("none", 0)
    for codec, zero in (("int8", 0), ("bf16", 0), ("int8", 1)):
        assert one(codec, zero) == pytest.approx(exact, rel=0.03), f"{codec} with zero = {zero}"
    for codec in ("int4", "fp8", "powersgd:4", "topk:0.1", "sign"):
        with pytest.raises(fd.ConfigError, match=codec.partition(":")[0]):
            made(fd.Plan(codec=codec))
    with pytest.raises(fd.ConfigError, match="topk"):
        made(fd.Plan(codec_for={"*.weight": "topk:0.1"}))


@ranks(2)
def test_what_cannot_be_measured_is_refused_on_every_rank() -> None:
    world = fd.init()
    with pytest.raises(fd.ConfigError, match="not distributed"):
        fd.noise_scale(mlp())
    with pytest.raises(fd.ConfigError, match="zero = 3"):
        made(fd.Plan(zero=3))
    with pytest.raises(fd.ConfigError, match="tensor"):
        made(fd.Plan(tensor=2, tensor_recipe={"0": "columns", "2": "rows"}))
    model, optimizer, noise = made(samples=4)
    for bad in ({"every": 0}, {"every": 1.5}, {"decay": 1.0}, {"decay": -0.1}, {"samples": 0}, {"every": True}):
        mine = bad if world.rank == 1 else {}
        with pytest.raises(fd.ConfigError, match=f"{next(iter(bad))} = .* on rank 1"):
            fd.noise_scale(model, **mine)
    with pytest.raises(fd.Mismatch, match="every"):
        fd.noise_scale(model, every=1 + world.rank)
    x, y = data(8)
    with fd.accumulate():
        mse_loss(model(own(x)), own(y)).backward()
    with pytest.raises(fd.ConfigError, match="between two steps"):
        fd.noise_scale(model)
    optimizer.step()
    assert "not known after 0 readings" in repr(noise), repr(noise)
    again = fd.noise_scale(model, **OURS)
    optimizer.zero_grad()
    for _ in range(3):
        mse_loss(model(own(x)), own(y)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert (again.readings, noise.readings) == (2, 0), "a later call replaces an earlier one"
    assert again.critical_batch is None, "samples are unknown without a loader"
    assert again.variance > 0, "in global batches it is known"


def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    x, y = data(64)
    yield from zip(x.split(8), y.split(8), strict=True)


@ranks(1)
def test_one_rank_measures_nothing() -> None:
    fd.init()
    model, optimizer, noise = made()
    for x, y in batches():
        mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert noise.critical_batch is None, "two batch sizes need two ranks"
    assert "two batch sizes need two" in repr(noise), repr(noise)


@ranks(2)
def test_it_is_recorded(tmp_path: Any) -> None:
    directory = f"{tmp_path}/run"
    world = fd.init(run_dir=directory, progress=False)
    model, optimizer, noise = made()
    optimizer.param_groups[0]["lr"] = 0.0
    x, y = data(160)
    loader = fd.shard(DataLoader(TensorDataset(x + 1.0, y + 3.0), batch_size=4))
    for inputs, targets in loader:
        mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = noise.critical_batch
    assert found is not None, "a mean that is off has a clear gradient"
    fd.shutdown()
    if world.rank == 0:
        from pathlib import Path

        from farandole.observe.figures.summary import summarise

        values = [json.loads(line) for line in (Path(directory) / "metrics.jsonl").read_text().splitlines()]
        logged = [each["values"]["critical_batch"] for each in values if each["kind"] == "metrics"]
        assert logged, f"a curve of the report: {values}"
        summary = summarise(Path(directory))
        assert summary.critical_batch is not None, summary.notes
        assert summary.critical_batch.samples == logged[-1], "the newest"
        assert summary.critical_batch.global_batch == 8, "4 samples on each of 2 ranks"
        assert "critical batch" in summary.to_text(), summary.to_text()
