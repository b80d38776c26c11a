"""The engine with gradients on a simulated accelerator: the bits of the CPU, and waits left out are found."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NoReturn
from unittest.mock import patch

import pytest
import torch
from torch import nn

import farandole as fd
from farandole.comm.codecs import device_quantize
from farandole.comm.codecs.quantize import NativeQuantize
from farandole.comm.codecs.registry import make_codec
from farandole.comm.codecs.units import UnitStates
from farandole.comm.device.streams import simulate_device
from farandole.comm.engine.coded_bucket import DeviceCodedBucket
from farandole.comm.engine.in_flight import DeviceExchanges
from farandole.core.vocabulary.codec_spec import CodecSpec
from farandole.parallel.exchange_state import residual_layout
from farandole.parallel.model import DistributedModel
from tests.ranks.pool import ranks
from tests.ranks.reference import assert_same_bits, data, own
from tests.ranks.test_routes import TWO_HOSTS, pretend_two_hosts
from tests.simulated_device import OUTSIDE, Race, SimulatedDevice

WIDTH = 64
CODECS = [
    "bf16", "fp16", "fp8", "int8", "int4", "sign", "int8:feedback=false", "randomk:0.05", "powersgd:2",
    "topk:0.3,exact=true", "topk:0.02,exact=true", "topk:0.02,exact=true,momentum=0.5,clip_norm=1.0",
]  # fmt: skip
_CPU = torch.device("cpu")


class Net(nn.Module):
    """Two matrices that are large enough for a codec, and a branch that is used now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 96), nn.Linear(96, WIDTH)
        self.branch, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor, *, branch: bool) -> torch.Tensor:
        """Take (batch, WIDTH), return (batch, 3)."""
        y = self.second(torch.tanh(self.first(x)))
        out: torch.Tensor = self.last(torch.tanh(y + self.branch(y)) if branch else torch.tanh(y))
        return out


@contextmanager
def simulated(*left_out: str) -> Generator[SimulatedDevice, None, None]:
    device = SimulatedDevice(left_out)
    with simulated_by(device):
        yield device


@contextmanager
def simulated_by(device: SimulatedDevice) -> Generator[None, None, None]:
    for codec in CODECS:
        make_codec(CodecSpec.parse(codec))  # native loops are tried once a process: before they are left out here
    simulate_device(_CPU, device)
    try:
        with ExitStack() as stack:
            # Native loops write where no operation is seen. Kernels have a test of their own.
            stack.enter_context(patch.object(NativeQuantize, "fits", lambda *_: False))
            stack.enter_context(patch.object(device_quantize, "can_run", lambda _: False))
            stack.enter_context(patch.object(device_quantize, "_trials", device_quantize._Trials()))
            stack.enter_context(device)
            yield
    finally:
        device.left_out = frozenset()  # what is closed later may read
        simulate_device(_CPU, None)


def first_weight(model: nn.Module) -> torch.Tensor:
    """Return a number of the branch's matrix."""
    return dict(model.named_parameters())["branch.weight"][0, 0]


def distributed(plan: fd.Plan, *, all_coded: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    """`all_coded`: what no codec is for does not train, so that no gradient travels by the backend's sum."""
    torch.manual_seed(1)
    model = Net()
    for parameter in model.parameters() if all_coded else ():
        parameter.requires_grad_(parameter.numel() >= WIDTH * WIDTH)
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.SGD(trained, 0.1, momentum=0.9)
    return fd.distribute(model, optimizer, plan)


def train(plan: fd.Plan, *, steps: int = 7, bad_step: int | None = 4, all_coded: bool = False) -> nn.Module:
    """Train with clipping, accumulation, a branch that one rank leaves out, and a step with infinity."""
    model, optimizer = distributed(plan, all_coded=all_coded)
    rank = fd.world().rank
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(2):
            x, y = data(8, seed=10 * step + part, width=WIDTH)
            loss = nn.functional.mse_loss(model(own(x), branch=step % 3 != 2 or rank == 0), own(y))
            if step == bad_step and rank == 1:
                loss = loss * torch.inf
            if part == 0:
                with fd.accumulate():
                    loss.backward()
            else:
                loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if step != bad_step:
            optimizer.step()
        else:
            assert not torch.isfinite(norm)
    assert_same_bits(model)
    return model


def state_of(model: nn.Module) -> list[torch.Tensor]:
    """Return the parameters, and what codecs keep."""
    reducer = DistributedModel.of(model).reducer
    assert reducer is not None
    kept = [value for entry in reducer.exchange_state().values() for value in entry.values()]
    return [each.detach() for each in [*model.parameters(), *kept] if torch.is_tensor(each)]


@pytest.mark.gate_cases("fp8", "int8", "powersgd:2", "topk:0.02,exact=true,momentum=0.5,clip_norm=1.0")
@pytest.mark.parametrize("codec", CODECS)
@ranks(2)
def test_the_bits_of_the_cpu_and_no_race(codec: str) -> None:
    fd.init()
    plan = fd.Plan(codec=codec, bucket_bytes=16384, first_bucket_bytes=1024, route="flat")
    bad_step = None if codec.startswith("randomk") else 4  # whose draws go on after a dropped step on a device
    expected = state_of(train(plan, bad_step=bad_step))
    with simulated() as device:
        model = train(plan, bad_step=bad_step)
        assert set(device.host_waits) <= {OUTSIDE}, device.host_waits
        found = state_of(model)
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize(
    "codec", [pytest.param(each, marks=[] if each == "int8" else pytest.mark.full("further")) for each in CODECS]
)
@ranks(4, **TWO_HOSTS)
def test_hosts_of_several_ranks_exchange_slices(codec: str) -> None:
    """With the bits of ranks that add up in CPU memory."""
    pretend_two_hosts()
    fd.init()
    keys: dict[str, Any] = {"codec": codec, "bucket_bytes": 16384, "first_bucket_bytes": 1024}
    bad_step = None if codec.startswith("randomk") else 4
    expected = state_of(train(fd.Plan(**keys, route="hierarchical"), bad_step=bad_step, all_coded=True))
    with simulated() as device:
        model = train(fd.Plan(**keys, staging="never"), bad_step=bad_step, all_coded=True)
        assert set(device.host_waits) <= {OUTSIDE}, device.host_waits
        found, reducer = state_of(model), DistributedModel.of(model).reducer
        assert reducer is not None
        assert reducer.route_reason == "2 hosts of 2 ranks, codecs by slices"
        assert residual_layout(model).startswith("slices of elements, auto, hosts 2 x 2")
        coded = [each for each in reducer.buckets.buckets if isinstance(each, DeviceCodedBucket)]
        is_sliced = [each.gradients.shared is not None for each in coded]
        assert is_sliced == [not codec.startswith("powersgd")] * len(coded)
        assert coded
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


@ranks(4, **TWO_HOSTS)
def test_a_wait_for_slices_that_is_left_out_is_found() -> None:
    pretend_two_hosts()
    fd.init()
    with simulated("launch"), pytest.raises(Race):
        train(fd.Plan(codec="int8", bucket_bytes=16384, first_bucket_bytes=1024, staging="never"))


@pytest.mark.parametrize(("said", "mib"), [({}, 25), ({"bucket_bytes": 4 << 20}, 4)])
@ranks(2)
def test_buckets_are_of_a_devices_size(said: dict[str, int], mib: int) -> None:
    fd.init()
    with simulated():
        model, _ = distributed(fd.Plan(**said))  # type: ignore[arg-type]
        reducer, plan = DistributedModel.of(model).reducer, DistributedModel.of(model).plan
        assert reducer is not None
        assert plan is not None
        assert [each.bucket_bytes >> 20 for each in (reducer.plan, plan)] == [mib, mib]
    model, _ = distributed(fd.Plan())
    plan = DistributedModel.of(model).plan
    assert plan is not None
    assert plan.bucket_bytes == 4 << 20


@ranks(2)
def test_buckets_are_those_of_a_device() -> None:
    fd.init()
    with simulated():
        model = Net()
        fd.distribute(model, torch.optim.SGD(model.parameters(), 0.1), fd.Plan(codec="int8"))
        model(torch.randn(4, WIDTH), branch=True).sum().backward()
        reducer = DistributedModel.of(model).reducer
        assert reducer is not None
        kinds = {type(bucket) for bucket in reducer.buckets.buckets}
        assert DeviceCodedBucket in kinds
        assert "not in CPU memory" in reducer.route_reason


@pytest.mark.gate_cases("powersgd:2-end", "int8-read", "topk:0.02-launch", "bf16-read", "powersgd:2-launch")
@pytest.mark.parametrize("left_out", ["launch", "end", "read"])
@pytest.mark.parametrize("codec", ["int8", "bf16", "powersgd:2", "topk:0.02"])
@ranks(2)
def test_a_wait_that_is_left_out_is_found(codec: str, left_out: str) -> None:
    fd.init()
    with simulated(left_out), pytest.raises(Race):
        train(fd.Plan(codec=codec, route="flat"))


def train_scaled(plan: fd.Plan) -> nn.Module:
    """Train with a GradScaler, which leaves out the step with infinity in one matrix of one rank."""
    model, optimizer = distributed(plan)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=100)
    for step in range(6):
        optimizer.zero_grad()
        x, y = data(8, seed=step, width=WIDTH)
        loss = nn.functional.mse_loss(model(own(x), branch=True), own(y))
        if step == 2 and fd.world().rank == 1:
            loss = loss + torch.inf * first_weight(model).square()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 32.0
    assert_same_bits(model)
    return model


@ranks(2)
def test_a_grad_scaler_leaves_out_a_step() -> None:
    fd.init()
    plan = fd.Plan(codec="int8", bucket_bytes=16384, first_bucket_bytes=1024, route="flat")
    expected = state_of(train_scaled(plan))
    with simulated():
        found = state_of(train_scaled(plan))
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("device_is_used", [False, True])
@ranks(2)
def test_gradients_that_are_not_finite_are_named(device_is_used: bool) -> None:
    fd.init()
    with simulated() if device_is_used else nullcontext():
        model, optimizer = distributed(fd.Plan(codec="int8", nonfinite="raise", route="flat"))
        loss = model(torch.ones(4, WIDTH), branch=True).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = model(torch.ones(4, WIDTH), branch=True).sum()
        if fd.world().rank == 1:
            loss = loss + torch.inf * first_weight(model).square()
        with pytest.raises(fd.CommError, match=r"gradients of branch\.weight hold NaN or infinity on rank 1"):
            loss.backward()


def full_on_rank_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let rank 1 have no room for what codecs keep."""

    def full(*_: Any, **__: Any) -> NoReturn:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 25.00 MiB.\nGPU 0 has ...")

    if fd.world().rank == 1:
        monkeypatch.setattr(UnitStates, "begin", full)


FULL = r"rank 1 has no room for the buckets .*: CUDA out of memory\. Tried to allocate 25\.00 MiB"


@ranks(2)
def test_a_full_device_is_named_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    fd.init()
    with simulated():
        model, _ = distributed(fd.Plan(codec="int8", route="flat"))
        full_on_rank_1(monkeypatch)
        with pytest.raises(fd.CommError, match=FULL):
            model(torch.ones(4, WIDTH), branch=True).sum().backward()


@ranks(2)
def test_a_codec_that_had_no_room_may_be_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All is as before it was asked for: what was not sent, and which codecs there are."""
    fd.init()
    with simulated():
        model, optimizer = distributed(fd.Plan(codec="int4", route="flat"), all_coded=True)

        def step() -> None:
            optimizer.zero_grad()
            model(torch.ones(4, WIDTH), branch=True).square().sum().backward()
            optimizer.step()

        step()
        reducer = DistributedModel.of(model).reducer
        assert reducer is not None
        kept, other = state_of(model), {"branch.weight": CodecSpec.parse("int8")}
        with monkeypatch.context() as patched:
            full_on_rank_1(patched)
            with pytest.raises(fd.CommError, match=FULL):
                reducer.switch_codecs(other)
        for ours, theirs in zip(state_of(model), kept, strict=True):
            assert torch.equal(ours, theirs)
        reducer.switch_codecs(other)
        step()
        assert {each.spec.to_text() for each in reducer.buckets.buckets} == {"int4", "int8"}
        assert_same_bits(model)


@pytest.mark.parametrize("codec", ["int8", "none"])
@ranks(2)
def test_different_steps_are_found_an_exchange_later(codec: str) -> None:
    fd.init()
    with simulated():
        model, optimizer = distributed(fd.Plan(codec=codec, route="flat"))

        def backward() -> None:
            model(torch.ones(4, WIDTH), branch=True).sum().backward()

        backward()
        optimizer.step()
        if fd.world().rank == 1:
            optimizer.step()
        backward()  # of different steps
        with pytest.raises(fd.Mismatch, match="different steps met in exchange 2"):
            backward()


@ranks(2)
def test_the_last_exchange_is_compared_when_the_state_is_saved() -> None:
    fd.init()
    with simulated():
        model, optimizer = distributed(fd.Plan(codec="int8", route="flat"))
        model(torch.ones(4, WIDTH), branch=True).sum().backward()
        if fd.world().rank == 1:
            optimizer.step()
        optimizer.zero_grad()
        model(torch.ones(4, WIDTH), branch=True).sum().backward()
        reducer = DistributedModel.of(model).reducer
        assert reducer is not None
        with pytest.raises(fd.Mismatch, match="different steps met in exchange 2"):
            reducer.exchange_state()


@pytest.mark.parametrize("is_noted", [True, False])
@ranks(2)
def test_gradients_of_another_stream_are_waited_for(is_noted: bool) -> None:
    """A hook of the user's changes a gradient on a stream of its own; the bucket is launched by a later hook."""
    fd.init()
    with simulated() as device:
        torch.manual_seed(1)
        model = Net()
        before = device.current

        def on_another(parameter: torch.Tensor) -> None:
            event, device.current = device.record(), "another"
            device.arrive("another", event)
            assert parameter.grad is not None
            parameter.grad.mul_(2.0)

        def back(parameter: torch.Tensor) -> None:
            device.current = before

        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model.second.weight.register_post_accumulate_grad_hook(on_another)
        model, optimizer = fd.distribute(model, optimizer, fd.Plan(codec="int8", route="flat"))
        model.second.weight.register_post_accumulate_grad_hook(back)
        reducer = DistributedModel.of(model).reducer
        assert reducer is not None
        reducer.in_flight.on_device = DeviceExchanges()
        if not is_noted:
            reducer.in_flight.on_device.note_stream = lambda: None  # type: ignore[method-assign]
        with nullcontext() if is_noted else pytest.raises(Race):
            for _ in range(3):
                model(torch.ones(4, WIDTH), branch=True).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
