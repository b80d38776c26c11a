"""codec = "auto" on a simulated accelerator: measured by marks that no step waits for, and chosen once, alike."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import farandole as fd
from farandole.comm.autotune.autotuner import Autotuner
from farandole.comm.autotune.on_device import DeviceMeasures
from farandole.comm.engine.coded_bucket import DeviceCodedBucket
from farandole.comm.world.store_sync import all_gather_json
from farandole.core.link import LinkModel
from farandole.parallel.exchange_state import residual_layout
from farandole.parallel.model import DistributedModel
from tests.ranks.pool import ranks
from tests.ranks.reference import assert_same_bits, data, own
from tests.ranks.test_device_engine import WIDTH, Net, simulated, state_of
from tests.ranks.test_routes import TWO_HOSTS, pretend_two_hosts
from tests.simulated_device import OUTSIDE, SimulatedDevice

SLOW, FAST = LinkModel(1e4, 1e-4), LinkModel(1e12, 1e-7)


def believe(link: LinkModel, monkeypatch: pytest.MonkeyPatch) -> list[LinkModel]:
    """Let the tuner believe in `link`, which is measured all the same. Returns what was measured."""
    measured: list[LinkModel] = []
    measure = DeviceMeasures.link

    def seen(self: DeviceMeasures, gradient_bytes: int) -> LinkModel:
        measured.append(measure(self, gradient_bytes))
        return link

    monkeypatch.setattr(DeviceMeasures, "link", seen)
    return measured


def train(plan: fd.Plan, device: SimulatedDevice | None = None, steps: int = 7) -> tuple[nn.Module, list[int]]:
    """Train; return the model, and how many marks were read until the end of each step."""
    torch.manual_seed(1)
    model, read = Net(), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = fd.distribute(model, optimizer, plan)
    for step in range(steps):
        x, y = data(8, seed=step, width=WIDTH)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(own(x), branch=True), own(y)).backward()
        optimizer.step()
        read.append(0 if device is None else device.marks_read)
    assert_same_bits(model)
    return model, read


def tuner_of(model: nn.Module) -> Autotuner:
    reducer = DistributedModel.of(model).reducer
    assert reducer is not None
    assert reducer.tuner is not None
    return reducer.tuner


@ranks(2)
def test_a_slow_link_gets_a_codec_after_three_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    world = fd.init()
    measured = believe(SLOW, monkeypatch)
    with simulated() as device:
        model, read = train(fd.Plan(codec="auto", lossy=True), device)
        assert read[:2] == [0, 0], "profiled steps read nothing"
        assert read[2] > 0
        assert read[2:] == [read[2]] * 5, "and once it has chosen, nothing is marked"
        assert set(device.host_waits) <= {OUTSIDE}, device.host_waits
        reducer, tuner = DistributedModel.of(model).reducer, tuner_of(model)
        assert reducer is not None
        assert tuner.choice is not None
        assert tuner.choice.main_codec != "none"
        assert any(isinstance(bucket, DeviceCodedBucket) for bucket in reducer.buckets.buckets)
        assert len({str(each) for each in all_gather_json(world, "choices", dict(tuner.choice.codecs))}) == 1
    assert len(measured) == 1
    assert 0 < measured[0].latency_seconds < 1
    assert measured[0].bytes_per_second > 1e5


@pytest.mark.full("further")
@ranks(4, **TWO_HOSTS)
def test_between_hosts_of_several_ranks_slices_are_measured_and_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_two_hosts()
    fd.init()
    measured = believe(SLOW, monkeypatch)
    with simulated() as device:
        model, _ = train(fd.Plan(codec="auto", lossy=True, staging="never"), device)
        assert set(device.host_waits) <= {OUTSIDE}, device.host_waits
        reducer, tuner = DistributedModel.of(model).reducer, tuner_of(model)
        assert reducer is not None
        assert reducer.route_reason == "2 hosts of 2 ranks, codecs by slices"
        (profile,) = tuner._profiles.values()
        assert (profile.ranks, profile.shards) == (2, 2)
        assert profile.intra_host_round_seconds > 0
        assert profile.intra_host_seconds_per_byte >= 0
        coded = [each for each in reducer.buckets.buckets if isinstance(each, DeviceCodedBucket)]
        assert coded
        assert all(each.gradients.shared is not None for each in coded)
        assert residual_layout(model).startswith("slices of elements, auto, hosts 2 x 2")
    assert len(measured) == 1


@ranks(2)
def test_an_exact_choice_trains_as_codec_none(monkeypatch: pytest.MonkeyPatch) -> None:
    fd.init()
    believe(FAST, monkeypatch)
    expected = state_of(train(fd.Plan(codec="none", route="flat"))[0])
    with simulated() as device:
        model, _ = train(fd.Plan(codec="auto"), device)
        assert set(device.host_waits) <= {OUTSIDE}, device.host_waits
        assert tuner_of(model).choice is not None
        found = state_of(model)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.full("busy")
@ranks(2)
def test_the_profile_of_a_step_is_that_of_the_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    fd.init()
    believe(FAST, monkeypatch)
    with simulated() as device:
        model, _ = train(fd.Plan(codec="auto", lossy=True), device, steps=3)
        (profile,) = tuner_of(model)._profiles.values()
        assert profile.shares_core, "codecs compute where the backward pass does"
        assert profile.forward_seconds > 0
        assert 0 < profile.backward_seconds < 1
        moments = [gradient.ready_seconds for gradient in profile.gradients]
        assert moments == sorted(moments)
        assert 0 <= moments[0] < moments[-1] <= profile.backward_seconds * 1.5
        assert all(speed.seconds_per_byte >= 0 for speed in profile.speeds.values())
        assert profile.speeds["int8"].seconds_per_byte > 0


@pytest.mark.full("further")
@ranks(2)
def test_unlike_devices_leave_out_powersgd(monkeypatch: pytest.MonkeyPatch) -> None:
    world = fd.init()
    believe(SLOW, monkeypatch)
    with simulated() as device:
        device.model = f"model {world.rank}"
        tuner = tuner_of(train(fd.Plan(codec="auto", lossy=True), steps=4)[0])
        (profile,) = tuner._profiles.values()
        assert set(profile.speeds) == {"none", "bf16", "int8", "int4"}
        assert tuner.choice is not None
        assert set(tuner.choice.codecs.values()) <= set(profile.speeds)
