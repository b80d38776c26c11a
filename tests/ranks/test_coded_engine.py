"""Gradients that travel by a codec: ranks stay equal, near what one process computes, and are never stuck."""

from __future__ import annotations

import contextlib
import copy
import io
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import farandole as fd
from farandole.comm.codecs import units as segments
from farandole.comm.engine.coded_bucket import CodedBucket
from farandole.comm.engine.reducer import GradientReducer
from farandole.comm.messages import GroupRank, Message, Rounds
from farandole.core.vocabulary.codec_spec import CodecSpec
from farandole.core.vocabulary.errors import CommError
from farandole.parallel.model import DistributedModel
from tests.ranks.pool import ranks
from tests.ranks.reference import assert_close, assert_same_bits, data, own, train_alone

WIDTH = 64
MATRICES = ["0.weight", "2.weight"]
CODECS = [
    "fp16", "bf16", "int8", "int8:rounding=stochastic", "fp8", "int4", "sign", "topk:0.05",
    "topk:0.05,momentum=0.5", "threshold:0.001", "randomk:0.2", "powersgd:4", "tests.ranks.test_coded_engine.half",
]  # fmt: skip


def wide(seed: int = 1) -> nn.Sequential:
    """Return a model with two matrices large enough for a codec; the biases and the last layer are not."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, 96), nn.Tanh(), nn.Linear(96, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(x), y)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> float:
    optimizer.zero_grad()
    loss = loss_of(model, own(x), own(y))
    loss.backward()
    optimizer.step()
    return loss.item()


def distributed(plan: fd.Plan, rate: float = 0.1) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = wide()
    return fd.distribute(model, torch.optim.SGD(model.parameters(), rate), plan)


def the_reducer(model: nn.Module) -> GradientReducer:
    reducer = DistributedModel.of(model).reducer
    assert reducer is not None
    return reducer


def coded_buckets(model: nn.Module) -> dict[str, CodedBucket]:
    """Return the bucket of each parameter that travels by a codec."""
    reducer = the_reducer(model)
    return {
        name: bucket
        for bucket, names in zip(reducer.buckets.buckets, reducer.names_by_bucket, strict=True)
        if isinstance(bucket, CodedBucket)
        for name in names
    }


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def half(grad: torch.Tensor, group: GroupRank) -> Rounds:
    """A user-defined codec."""
    packed = grad.to(torch.bfloat16)
    everyone = yield Message(packed, "all_gather")
    return everyone.float().mean(0), packed.float()


@contextmanager
def segments_of(elements: int) -> Iterator[None]:
    """Cut buckets into many segments, as only far larger ones are."""
    before = segments.SEGMENT_ELEMENTS
    segments.SEGMENT_ELEMENTS = elements
    try:
        yield
    finally:
        segments.SEGMENT_ELEMENTS = before


# -- training --------------------------------------------------------------------------------------


@pytest.mark.full("further")
@pytest.mark.parametrize("codec", CODECS)
@ranks(3)
def test_ranks_train_and_hold_the_same_bits(codec: str) -> None:
    fd.init()
    model, optimizer = distributed(fd.Plan(codec=codec, bucket_bytes=16384, first_bucket_bytes=1024))
    x, y = data(24, width=WIDTH)
    losses = [fd.mean(step(model, optimizer, x, y)) for _ in range(8)]
    assert losses[-1] < 0.9 * losses[0], losses
    assert_same_bits(model)
    buckets = coded_buckets(model)
    assert sorted(buckets) == MATRICES
    assert {bucket.spec.name for bucket in buckets.values()} == {codec.partition(":")[0]}
    assert all(0 < bucket.sent_bytes < 2 * bucket.gradients.nbytes for bucket in buckets.values())


@pytest.mark.full("further")
@pytest.mark.parametrize("codec", ["int8", "int4", "bf16", "fp16"])
@ranks(3)
def test_one_rank_without_native_loops(codec: str) -> None:
    """Loops on all ranks, on two of three, on none: all runs have the same bits."""
    rank = fd.init().rank
    found = []
    for without in ([], [1], [0, 1, 2]):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("FARANDOLE_NATIVE", "0" if rank in without else "1")
            model, optimizer = distributed(fd.Plan(codec=codec, bucket_bytes=16384, first_bucket_bytes=1024))
        for bucket in coded_buckets(model).values():
            assert (bucket.coded.codec.native is None) == (rank in without)
            states = bucket.coded.states
            for k, unit in enumerate(bucket._cut.units):
                native = bucket.coded.codec.native
                assert native is None or native.fits(unit, states.current[k], states.group)
        x, y = data(24, width=WIDTH)
        for _ in range(3):
            step(model, optimizer, x, y)
        assert_same_bits(model)
        found.append([parameter.detach().clone() for parameter in model.parameters()])
    for other in found[1:]:
        assert all(torch.equal(*pair) for pair in zip(found[0], other, strict=True))


@pytest.mark.full("further")
@pytest.mark.parametrize("codec", ["int8", "topk:0.05", "powersgd:2"])
@ranks(4)
def test_four_ranks(codec: str) -> None:
    fd.init()
    model, optimizer = distributed(fd.Plan(codec=codec))
    x, y = data(16, width=WIDTH)
    losses = [fd.mean(step(model, optimizer, x, y)) for _ in range(4)]
    assert losses[-1] < losses[0]
    assert_same_bits(model)
    check = fd.verify(model, optimizer)
    assert check.passed, str(check)


@pytest.mark.parametrize(("codec", "share"), [("fp16", 2e-3), ("bf16", 1e-2), ("int8", 2e-2)])
@ranks(2)
def test_mild_codecs_stay_near_one_process(codec: str, share: float) -> None:
    fd.init()
    model, optimizer = distributed(fd.Plan(codec=codec))
    reference = wide()
    batches = [data(8, seed, WIDTH) for seed in range(6)]
    for x, y in batches:
        step(model, optimizer, x, y)
    train_alone(reference, torch.optim.SGD(reference.parameters(), 0.1), batches)
    begin = wide()
    for name, value in reference.state_dict().items():
        way = float((value - begin.state_dict()[name]).norm())
        assert float((value - model.state_dict()[name]).norm()) < share * way, name


@pytest.mark.parametrize("codec", ["sign", "powersgd:1"])
@ranks(2)
def test_small_parameters_and_biases_are_exact(codec: str) -> None:
    fd.init()
    model, _ = distributed(fd.Plan(codec=codec))
    x, y = data(8, width=WIDTH)
    alone = wide()
    loss_of(alone, x, y).backward()
    loss_of(model, own(x), own(y)).backward()
    for name, exact in gradients(alone).items():
        mine = gradients(model)[name]
        if name in MATRICES:
            assert not torch.allclose(mine, exact), name
        else:
            torch.testing.assert_close(mine, exact, msg=name)


@pytest.mark.full("further")
@ranks(2)
def test_gradients_that_are_not_float32_are_exact() -> None:
    fd.init()
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64).double())
    model[1].register_forward_hook(lambda *words: words[-1].double())
    fd.distribute(model, torch.optim.SGD(model.parameters(), 0.1), fd.Plan(codec="sign"))
    model(torch.randn(4, 64)).sum().backward()
    assert sorted(coded_buckets(model)) == ["0.weight"]
    assert_same_bits(model)


@ranks(2)
def test_each_parameter_by_its_own_codec() -> None:
    fd.init()
    plan = fd.Plan(codec="int8", codec_for={"0.*": "none", "*": "bf16", "2.weight": "powersgd:2"})
    model, optimizer = distributed(plan)
    x, y = data(8, width=WIDTH)
    for _ in range(3):
        step(model, optimizer, x, y)
    specs = {name: bucket.spec.to_text() for name, bucket in coded_buckets(model).items()}
    assert specs == {"0.weight": "bf16", "2.weight": "powersgd:rank=2"}, "the last pattern that fits counts"
    assert_same_bits(model)


@pytest.mark.full("further")
@ranks(2)
def test_convolutions_and_permuted_memory_are_matrices_too() -> None:
    fd.init()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Conv2d(32, 16, 3))
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    reference = nn.Sequential(nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Conv2d(32, 16, 3))
    reference.load_state_dict(model.state_dict())
    # A rank as large as the matrix: nothing is lost, whatever the layout is.
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x, y = torch.randn(4, 16, 6, 6), torch.randn(4, 16, 2, 2)
    fd.distribute(model, optimizer, fd.Plan(codec="powersgd:2"))
    for _ in range(3):
        step(model, optimizer, x, y)
    assert sorted(coded_buckets(model)) == ["0.weight", "2.weight"]
    assert_same_bits(model)
    means = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    for _ in range(60):  # the same gradient again and again: what is sent adds up to it
        model.zero_grad()
        loss_of(model, own(x), own(y)).backward()
        for name, grad in gradients(model).items():
            means[name] += grad / 60
    reference.load_state_dict(model.state_dict())
    loss_of(reference, x, y).backward()
    for name, exact in gradients(reference).items():
        assert float((means[name] - exact).norm()) < 0.3 * float(exact.norm()), name


@pytest.mark.full("further")
@ranks(2)
def test_accumulation_exchanges_the_sum_once() -> None:
    fd.init()
    model, optimizer = distributed(fd.Plan(codec="bf16", accumulate=2))
    reference = wide()
    other = torch.optim.SGD(reference.parameters(), 0.1)
    for seed in range(3):
        optimizer.zero_grad()
        other.zero_grad()
        for x, y in (data(8, 2 * seed, WIDTH), data(8, 2 * seed + 1, WIDTH)):
            (loss_of(model, own(x), own(y)) / 2).backward()
            (loss_of(reference, x, y) / 2).backward()
        for name, exact in gradients(reference).items():
            torch.testing.assert_close(gradients(model)[name], exact, rtol=2**-6, atol=2e-4, msg=name)
        optimizer.step()
        other.step()
    assert_close(model, reference, rtol=0, atol=1e-4)
    assert_same_bits(model)


class Branches(nn.Module):
    """Two matrices, of which a pass may use one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, left: bool, right: bool) -> torch.Tensor:
        parts = [branch(x).square().mean() for branch, used in ((self.left, left), (self.right, right)) if used]
        return torch.stack(parts).sum()


@pytest.mark.gate_cases("int8")
@pytest.mark.parametrize("codec", ["int8", "powersgd:16"])
@ranks(2)
def test_a_parameter_that_one_rank_does_not_use(codec: str) -> None:
    world = fd.init()
    model, alone = Branches(), Branches()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fd.distribute(model, optimizer, fd.Plan(codec=codec))
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(4))
    alone(x, True, True).backward()
    exact = gradients(alone)
    for _ in range(3):
        model.zero_grad()
        model(x, True, world.rank == 0).backward()
    for name, grad in gradients(model).items():
        share = 1.0 if name.startswith("left") else 0.5
        error = float((grad - share * exact[name]).norm()) / float(exact[name].norm())
        assert error < (0.02 if codec == "int8" else 0.5), (name, error)
    optimizer.step()
    assert_same_bits(model)


@ranks(2)
def test_a_parameter_that_no_rank_uses_has_no_gradient() -> None:
    fd.init()
    model = Branches()
    fd.distribute(model, torch.optim.SGD(model.parameters(), 0.1), fd.Plan(codec="int8"))
    for _ in range(2):
        model.zero_grad()
        model(torch.randn(8, WIDTH), True, False).backward()
        assert sorted(gradients(model)) == ["left.bias", "left.weight"]


@pytest.mark.full("further")
@ranks(2)
def test_what_is_left_of_a_parameter_waits_until_it_is_used_again() -> None:
    fd.init()
    model = Branches()
    fd.distribute(model, torch.optim.SGD(model.parameters(), 0.1), fd.Plan(codec="sign"))
    x = torch.randn(8, WIDTH)
    model(x, True, True).backward()
    bucket = coded_buckets(model)["right.weight"]
    right = bucket.members.index(2)
    before = bucket.coded.unsent()[right].clone()
    model.zero_grad()
    model(x, True, False).backward()
    assert model.right.weight.grad is None
    torch.testing.assert_close(bucket.coded.unsent()[right], before)


# -- NaN and infinity ------------------------------------------------------------------------------


@contextmanager
def poisoned(model: nn.Module, value: float, here: bool) -> Iterator[None]:
    """Put `value` into the gradient of 2.weight on the ranks that are `here`."""

    def poison(grad: torch.Tensor) -> torch.Tensor:
        grad = grad.clone()
        grad.view(-1)[3] = value
        return grad

    handle = model.get_parameter("2.weight").register_hook(poison) if here else None
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()


def assert_clean(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Further steps give finite gradients near the exact ones, on all ranks alike."""
    for seed in range(3):
        x, y = data(8, 50 + seed, WIDTH)
        alone = wide()
        alone.load_state_dict(model.state_dict())
        loss_of(alone, x, y).backward()
        optimizer.zero_grad()
        loss_of(model, own(x), own(y)).backward()
        for name, exact in gradients(alone).items():
            error = float((gradients(model)[name] - exact).norm()) / float(exact.norm())
            assert error < 0.05, (name, error)
        optimizer.step()
    assert all(
        bool(torch.isfinite(torch.cat([left.flatten() for left in bucket.coded.unsent()])).all())
        for bucket in coded_buckets(model).values()
    )
    assert_same_bits(model)


SMALL: dict[str, Any] = {"bucket_bytes": 20000, "first_bucket_bytes": 20000}


@pytest.mark.gate_cases("nan")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@ranks(2)
def test_nonfinite_gradients_are_nan_on_all_ranks(value: float) -> None:
    world = fd.init()
    model, optimizer = distributed(fd.Plan(codec="int8", **SMALL))
    x, y = data(8, width=WIDTH)
    for _ in range(2):
        step(model, optimizer, x, y)
    with poisoned(model, value, world.rank == 1):
        optimizer.zero_grad()
        loss_of(model, own(x), own(y)).backward()
    found = gradients(model)
    assert bool(torch.isnan(found["2.weight"]).all())
    assert bool(torch.isfinite(found["0.weight"]).all()), "a bucket of its own"
    assert_clean(model, optimizer)


@pytest.mark.full("further")
@ranks(2)
def test_nonfinite_gradients_in_the_first_step() -> None:
    world = fd.init()
    model, optimizer = distributed(fd.Plan(codec="int8", **SMALL))
    with poisoned(model, float("nan"), world.rank == 1):
        x, y = data(8, width=WIDTH)
        loss_of(model, own(x), own(y)).backward()
    assert bool(torch.isnan(gradients(model)["2.weight"]).all())
    assert_clean(model, optimizer)


@pytest.mark.full("further")
@ranks(3)
def test_nonfinite_gradients_skip_the_step() -> None:
    world = fd.init()
    model, optimizer = distributed(fd.Plan(codec="int8", nonfinite="skip", **SMALL))
    x, y = data(12, width=WIDTH)
    step(model, optimizer, x, y)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with warnings.catch_warnings(record=True) as caught, poisoned(model, float("nan"), world.rank > 0):
        warnings.simplefilter("always")
        step(model, optimizer, x, y)
    texts = [str(warning.message) for warning in caught if issubclass(warning.category, RuntimeWarning)]
    expected = "farandole: step skipped: gradients of 2.weight hold NaN or infinity on ranks 1 and 2"
    assert texts == ([expected] if world.rank == 1 else []), "said once"
    assert not gradients(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for _ in range(3):
        step(model, optimizer, x, y)
    assert_same_bits(model)
    assert all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())


@pytest.mark.full("further")
@ranks(2)
def test_nonfinite_gradients_raise_on_all_ranks() -> None:
    world = fd.init()
    model, optimizer = distributed(fd.Plan(codec="int8", nonfinite="raise", **SMALL))
    x, y = data(8, width=WIDTH)
    step(model, optimizer, x, y)
    optimizer.zero_grad()
    with poisoned(model, float("nan"), world.rank == 1), pytest.raises(CommError) as caught:
        loss_of(model, own(x), own(y)).backward()
    assert "gradients of 2.weight hold NaN or infinity on rank 1" in str(caught.value)
    assert str(caught.value).startswith(f"rank {world.rank}, backward: ")
    assert_clean(model, optimizer)


@ranks(2)
def test_many_nonfinite_gradients_are_not_all_named() -> None:
    world = fd.init()
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(5)])
    fd.distribute(model, torch.optim.SGD(model.parameters(), 0.1), fd.Plan(codec="int8", nonfinite="raise"))
    x = torch.full((2, WIDTH), float("nan") if world.rank == 0 else 1.0)
    with pytest.raises(
        CommError, match=r"0\.weight, 1\.weight, 2\.weight and 2 more hold NaN or infinity on rank 0"
    ):
        model(x).sum().backward()


@ranks(2)
def test_accumulation_begins_anew_after_nonfinite_gradients() -> None:
    world = fd.init()
    model, optimizer = distributed(fd.Plan(codec="int8", accumulate=2, nonfinite="raise", **SMALL))
    x, y = data(8, width=WIDTH)
    with poisoned(model, float("nan"), world.rank == 1), pytest.raises(CommError):  # noqa: PT012
        loss_of(model, own(x), own(y)).backward()
        loss_of(model, own(x), own(y)).backward()
    optimizer.zero_grad()
    assert the_reducer(model).passes.local.passes == 0


DROPPED = ["int8", "int8:rounding=stochastic", "sign", "topk:0.05", "topk:0.05,momentum=0.5", "powersgd:2",
           "tests.ranks.test_coded_engine.remembering"]  # fmt: skip


class Memory(NamedTuple):
    kept: torch.Tensor
    steps: int


class Remembering:
    """A user-defined codec with a state."""

    def init(self, grad: torch.Tensor, group: GroupRank) -> Memory:
        return Memory(torch.zeros_like(grad), 0)

    def encode(self, grad: torch.Tensor, state: Memory, group: GroupRank) -> Rounds:
        new = Memory(state.kept + grad, state.steps + 1)
        mean, own = yield from half(grad, group)
        return mean, own, new


remembering = Remembering()


def kept_of(model: nn.Module) -> dict[str, Any]:
    """Return copies of all that codecs keep, by parameter."""
    return copy.deepcopy(the_reducer(model).exchange_state())


def assert_kept(model: nn.Module, before: dict[str, Any]) -> None:
    """Everything that codecs keep is what it was, bit for bit."""
    now = kept_of(model)
    assert now.keys() == before.keys()
    for name, entry in now.items():
        for kind in ("elements", "padding", "others"):
            assert entry[kind].keys() == before[name][kind].keys(), (name, kind)
            for key, tensor in entry[kind].items():
                assert torch.equal(tensor, before[name][kind][key]), (name, kind, key)
        assert entry["numbers"] == before[name]["numbers"], name


@pytest.mark.full("further")
@pytest.mark.parametrize("nonfinite", ["skip", "raise"])
@pytest.mark.parametrize("codec", DROPPED)
@ranks(2)
def test_a_dropped_step_leaves_what_codecs_keep(codec: str, nonfinite: str) -> None:
    """Of finite buckets that were sent already too; and the run goes on as if it had never been."""
    world = fd.init()
    x, y = data(8, width=WIDTH)
    ended = []
    for dropped in (False, True):
        plan = fd.Plan(codec=codec, nonfinite=nonfinite, **SMALL)  # type: ignore[arg-type]
        model, optimizer = distributed(plan)
        step(model, optimizer, x, y)
        step(model, optimizer, x, y)
        if dropped:
            before = kept_of(model)
            assert any(bool(entry["elements"]["residual"].any()) for entry in before.values())
            with warnings.catch_warnings(), poisoned(model, float("nan"), world.rank == 1):
                warnings.simplefilter("ignore")
                if nonfinite == "skip":
                    step(model, optimizer, x, y)
                else:
                    with pytest.raises(CommError):
                        step(model, optimizer, x, y)
            assert_kept(model, before)
        for _ in range(2):
            step(model, optimizer, x, y)
        ended.append([parameter.detach().clone() for parameter in model.parameters()])
        assert_same_bits(model)
    assert all(torch.equal(a, b) for a, b in zip(*ended, strict=True))


@pytest.mark.parametrize("codec", ["sign", "topk:0.05,momentum=0.5"])
@ranks(2)
def test_a_propagated_nan_leaves_what_codecs_keep_when_the_loop_drops_the_step(codec: str) -> None:
    """As a GradScaler does; a loop that steps all the same has used the finite buckets."""
    world = fd.init()
    model, optimizer = distributed(fd.Plan(codec=codec, **SMALL))
    x, y = data(8, width=WIDTH)
    step(model, optimizer, x, y)
    before = kept_of(model)
    with poisoned(model, float("inf"), world.rank == 1):
        optimizer.zero_grad()
        loss_of(model, own(x), own(y)).backward()
    assert_only_the_other_changed(model, before)
    optimizer.zero_grad()
    the_reducer(model).passes.guards.nonfinite.rollback_if_dropped()  # what the next exchange begins with
    assert_kept(model, before)
    with poisoned(model, float("inf"), world.rank == 1):
        optimizer.zero_grad()
        loss_of(model, own(x), own(y)).backward()
    optimizer.step()
    optimizer.zero_grad()
    the_reducer(model).passes.guards.nonfinite.rollback_if_dropped()
    assert_only_the_other_changed(model, before)


def assert_only_the_other_changed(model: nn.Module, before: dict[str, Any]) -> None:
    now = kept_of(model)
    for name, same in (("2.weight", True), ("0.weight", False)):
        residual, was = now[name]["elements"]["residual"], before[name]["elements"]["residual"]
        assert torch.equal(residual, was) == same, name


@ranks(2)
def test_gradients_that_are_kept_after_a_nan_were_used() -> None:
    """A second backward adds to them: their buckets do not send the same again."""
    world = fd.init()
    model, _ = distributed(fd.Plan(codec="sign", **SMALL))
    x, y = data(8, width=WIDTH)
    loss_of(model, own(x), own(y)).backward()
    model.zero_grad()
    with poisoned(model, float("nan"), world.rank == 1):
        loss_of(model, own(x), own(y)).backward()
    sent = kept_of(model)["0.weight"]["elements"]["residual"]
    the_reducer(model).passes.guards.nonfinite.rollback_if_dropped()
    assert torch.equal(kept_of(model)["0.weight"]["elements"]["residual"], sent)


@ranks(2)
def test_what_is_owed_from_another_codec_is_owed_again_after_a_dropped_step() -> None:
    world = fd.init()
    model, optimizer = distributed(fd.Plan(codec="sign", nonfinite="skip", **SMALL))
    x, y = data(8, width=WIDTH)
    step(model, optimizer, x, y)
    reducer = the_reducer(model)
    reducer.switch_codecs({"0.weight": CodecSpec.parse("int8")})
    owed = {index: tensor.clone() for index, tensor in reducer.buckets.carry_over.unsent.items()}
    assert owed
    with warnings.catch_warnings(), poisoned(model, float("nan"), world.rank == 1):
        warnings.simplefilter("ignore")
        step(model, optimizer, x, y)
    assert owed.keys() == reducer.buckets.carry_over.unsent.keys()
    assert all(torch.equal(tensor, reducer.buckets.carry_over.unsent[index]) for index, tensor in owed.items())
    step(model, optimizer, x, y)
    assert not reducer.buckets.carry_over.unsent


# -- plans that cannot be ---------------------------------------------------------------------------


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


@pytest.mark.parametrize("codec", ["int8", "powersgd:4"])
@ranks(2)
def test_a_codec_for_which_a_model_is_too_small_leaves_it_exact_and_says_so_once(codec: str) -> None:
    world = fd.init()
    said = io.StringIO()
    models = [small(), wide()]
    with contextlib.redirect_stderr(said):
        for model, width in zip(models, (8, WIDTH), strict=True):
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            fd.distribute(model, optimizer, fd.Plan(codec=codec))
            for _ in range(3):
                model(torch.randn(4, width)).sum().backward()
                optimizer.step()
            assert_same_bits(model)
    lines = [line for line in said.getvalue().splitlines() if "changes nothing here" in line]
    assert len(lines) == (world.rank == 0), said.getvalue()
    assert all(f"farandole: Sequential: codec = '{codec}'" in line for line in lines)
    assert not the_reducer(models[0]).has_codecs
    assert the_reducer(models[1]).has_codecs, "the plan is for the whole run"


@pytest.mark.gate_cases("wide-plan4-PYTHONPATH")
@pytest.mark.parametrize(
    ("make", "plan", "text"),
    [
        (
            "small",
            {"codec_for": {"0.weight": "int8"}},
            r"codec_for\.0\.weight = 'int8', but parameter '0\.weight'",
        ),
        (
            "wide",
            {"codec_for": {"2.weight": "powersgd:65"}},
            r"codec_for\.2\.weight = 'powersgd:rank=65', but parameter '2\.weight' is a 64 x 96 matrix, "
            r"whose rank is below 65; give it codec none",
        ),
        ("wide", {"codec_for": {"2.weight": "powersgd:20"}}, r"'2\.weight' .* rank 20 would not halve it"),
        (
            "wide",
            {"codec_for": {"*.bias": "int8"}},
            r"codec_for\.\*\.bias = 'int8', but parameter '0\.bias' has shape",
        ),
        ("wide", {"codec": "no.such"}, "PYTHONPATH"),
        ("wide", {"codec": "tests.ranks.test_coded_engine.missing"}, "has no function 'missing'"),
    ],
)
@ranks(2)
def test_codecs_that_a_model_cannot_have(make: str, plan: dict[str, Any], text: str) -> None:
    fd.init()
    model = {"small": small, "wide": wide}[make]()
    with pytest.raises(fd.PlanError, match=text):
        fd.distribute(model, torch.optim.SGD(model.parameters(), 0.1), fd.Plan(**plan))


@ranks(2)
def test_a_pattern_for_all_takes_what_it_can() -> None:
    fd.init()
    model, optimizer = distributed(fd.Plan(codec_for={"*": "int8"}))
    x, y = data(8, width=WIDTH)
    step(model, optimizer, x, y)
    assert sorted(coded_buckets(model)) == MATRICES


# -- who waits for whom ----------------------------------------------------------------------------

DEPTH = 6


@pytest.mark.full("further")
@pytest.mark.parametrize(
    "plan",
    [
        {"codec": "int8", "bucket_bytes": 4096},
        {"codec": "topk:0.1", "bucket_bytes": 65536},
        {"codec": "powersgd:2", "bucket_bytes": 32768},
        {"codec": "int8", "codec_for": {"[26].weight": "powersgd:2", "[48].weight": "threshold:0.001"}},
        {"codec": "randomk:0.5", "codec_for": {"[06].weight": "none"}, "bucket_bytes": 16384},
    ],
)
@ranks(3)
def test_ranks_of_different_speed_never_wait_for_ever(plan: dict[str, Any]) -> None:
    """Fifty steps, in which now this rank is late at a layer and now that one."""
    world = fd.init()
    torch.manual_seed(0)
    layers = [layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    passes = 0

    def dawdle(position: int) -> Callable[[torch.Tensor], None]:
        def hook(_: torch.Tensor) -> None:
            if (passes + position) % 7 == 2 * world.rank:
                time.sleep(0.001 * (1 + position % 3))

        return hook

    for position, parameter in enumerate(model.parameters()):
        parameter.register_hook(dawdle(position))
    with segments_of(1024):  # several items for every bucket
        fd.distribute(model, optimizer, fd.Plan(**{"first_bucket_bytes": 4096, **plan}))
        x, y = torch.randn(6, WIDTH), torch.randn(6, WIDTH)
        for _ in range(50):
            passes += 1
            step(model, optimizer, x, y)
        assert len(coded_buckets(model)) >= DEPTH - 2
    assert_same_bits(model)
