"""Codecs of a simulated accelerator through CPU memory: the bits of the CPU, the waits, and when it is chosen."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import nn

import farandole as fd
from farandole.comm import routes as device_route
from farandole.comm.engine.coded_bucket import DeviceCodedBucket
from farandole.comm.messages import Message
from farandole.comm.transport.rank_group import RankGroup
from farandole.comm.transport.staged_conductor import StagedConductor
from farandole.comm.world.store_sync import all_gather_json
from farandole.core.vocabulary.codec_spec import CodecSpec
from farandole.parallel.model import DistributedModel
from tests.ranks.pool import ranks
from tests.ranks.test_device_engine import CODECS, WIDTH, distributed, simulated_by, state_of, train
from tests.ranks.test_records import records
from tests.ranks.test_routes import TWO_HOSTS, pretend_two_hosts
from tests.simulated_device import OUTSIDE, Race, ThreadedDevice

SMALL: dict[str, Any] = {"bucket_bytes": 16384, "first_bucket_bytes": 1024}


@contextmanager
def simulated(*left_out: str) -> Generator[ThreadedDevice, None, None]:
    device = ThreadedDevice(*left_out)
    with simulated_by(device):
        yield device


def is_staged(model: nn.Module) -> bool:
    reducer = DistributedModel.of(model).reducer
    assert reducer is not None
    return isinstance(reducer.open_route.require().on_device, StagedConductor)


def reason_of(model: nn.Module) -> str:
    reducer = DistributedModel.of(model).reducer
    assert reducer is not None
    return reducer.route_reason


def without_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the backend refuse tensors on the device, as gloo does on some."""

    def refuse(*_: object) -> NoReturn:
        raise RuntimeError("no kernels for this device")

    monkeypatch.setattr(device_route, "exchange_by_group", refuse)


@pytest.mark.gate_cases("int8")
@pytest.mark.parametrize(
    "codec",
    [
        pytest.param(each, marks=[] if each in ("int8", "powersgd:2") else pytest.mark.full("further"))
        for each in CODECS
    ],
)
@ranks(2)
def test_the_bits_of_the_cpu_and_no_race(codec: str) -> None:
    fd.init()
    keys: dict[str, Any] = {"codec": codec, **SMALL, "route": "flat"}
    bad_step = None if codec.startswith("randomk") else 4
    expected = state_of(train(fd.Plan(**keys), bad_step=bad_step, all_coded=True))
    with simulated() as device:
        model = train(fd.Plan(**keys, staging="always"), bad_step=bad_step, all_coded=True)
        assert set(device.host_waits) <= {OUTSIDE}, device.host_waits
        assert is_staged(model)
        assert "through CPU memory: the plan says so" in reason_of(model)
        found = state_of(model)
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("codec", ["none", pytest.param("int8", marks=pytest.mark.full("further"))])
@ranks(3)
def test_exact_gradients_are_summed_through_cpu_memory_too(codec: str) -> None:
    """Small parameters of a plan with a codec, and all of one without."""
    fd.init()
    expected = state_of(train(fd.Plan(codec=codec, **SMALL, route="flat")))
    with simulated():
        model = train(fd.Plan(codec=codec, **SMALL, staging="always"))
        assert is_staged(model)
        found = state_of(model)
    for ours, theirs in zip(found, expected, strict=True):
        if codec == "none":
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        else:  # what one bit less or more rounds to the next whole number differs by a step of the codec
            assert int(((ours - theirs).abs() > 1e-6).sum()) <= 0.001 * ours.numel()
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    "codec", ["int8", pytest.param("topk:0.02,exact=true", marks=pytest.mark.full("further"))]
)
@ranks(4, **TWO_HOSTS)
def test_slices_of_hosts_go_through_cpu_memory(codec: str) -> None:
    pretend_two_hosts()
    fd.init()
    keys: dict[str, Any] = {"codec": codec, **SMALL}
    expected = state_of(train(fd.Plan(**keys, route="hierarchical"), all_coded=True))
    with simulated() as device:
        model = train(fd.Plan(**keys, staging="always"), all_coded=True)
        assert set(device.host_waits) <= {OUTSIDE}, device.host_waits
        assert is_staged(model)
        assert reason_of(model).startswith("2 hosts of 2 ranks, codecs by slices, through CPU memory")
        reducer = DistributedModel.of(model).reducer
        assert reducer is not None
        coded = [each for each in reducer.buckets.buckets if isinstance(each, DeviceCodedBucket)]
        assert coded
        assert all(each.gradients.shared is not None for each in coded)
        found = state_of(model)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.gate_cases("int8-launch", "int8-end")
@pytest.mark.parametrize("left_out", ["launch", "end", "read"])
@pytest.mark.parametrize("codec", ["int8", pytest.param("topk:0.02", marks=pytest.mark.full("further"))])
@ranks(2)
def test_a_wait_that_is_left_out_is_found(codec: str, left_out: str) -> None:
    fd.init()
    with simulated(left_out), pytest.raises((Race, fd.CommError), match=r"use the same bytes|it failed: Race"):
        train(fd.Plan(codec=codec, route="flat", staging="always"), all_coded=True)


@ranks(2)
def test_a_backend_without_messages_is_gone_around(monkeypatch: pytest.MonkeyPatch) -> None:
    fd.init()
    without_messages(monkeypatch)
    with simulated():
        model = train(fd.Plan(codec="int8", **SMALL))
        assert is_staged(model)
        assert "through CPU memory: the backend carries no messages: no kernels for this device" in reason_of(
            model
        )
        with pytest.raises(fd.PlanError, match="does not carry their messages there: no kernels for this device"):
            distributed(fd.Plan(codec="int8", staging="never"))


@pytest.mark.full("further")
@pytest.mark.parametrize("staged_seconds", [0.5, pytest.param(0.95, marks=pytest.mark.full("further"))])
@ranks(4, **TWO_HOSTS)
def test_the_faster_way_between_hosts_is_taken(staged_seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are measured; here the figures are given, which differ from rank to rank."""
    pretend_two_hosts()
    world = fd.init()
    measured: list[float] = []
    measure = device_route._seconds_of_both

    def given(*arguments: Any) -> tuple[float, float]:
        measured.extend(measure(*arguments))
        return 1.0, staged_seconds

    monkeypatch.setattr(device_route, "_seconds_of_both", given)
    with simulated():
        model, _ = distributed(fd.Plan(codec="int8", **SMALL))
        model(torch.ones(4, WIDTH), branch=True).sum().backward()
        assert is_staged(model) == (staged_seconds < 0.9)
        said = "through CPU memory" if staged_seconds < 0.9 else "by the backend"
        assert (
            f"codecs by slices, {said}: 2 MiB take {1e3 * staged_seconds:.3g} ms through CPU memory"
            in reason_of(model)
        )
    assert len(measured) == 2
    assert all(0 < each < 10 for each in measured)
    assert len({str(each) for each in all_gather_json(world, "measured", measured)}) == 1


@ranks(2)
def test_one_host_is_not_measured() -> None:
    fd.init()
    with simulated():
        model, _ = distributed(fd.Plan(codec="int8", **SMALL))
        model(torch.ones(4, WIDTH), branch=True).sum().backward()
        assert not is_staged(model)


@pytest.mark.full("slow")
@ranks(2)
def test_auto_chooses_by_what_staging_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """The link is what staged messages have, and it is slow."""
    fd.init()
    asked: list[Message] = []
    seconds_of = StagedConductor.seconds_of

    def slow(self: StagedConductor, message: Message, circle: RankGroup) -> float:
        asked.append(message)
        return seconds_of(self, message, circle) + message.tensor.nbytes / 1e4

    monkeypatch.setattr(StagedConductor, "seconds_of", slow)
    with simulated():
        model = train(fd.Plan(codec="auto", lossy=True, staging="always"), bad_step=None)
        reducer = DistributedModel.of(model).reducer
        assert reducer is not None
        assert reducer.tuner is not None
        assert reducer.tuner.choice is not None
        assert reducer.tuner.choice.main_codec != "none"
        assert any(isinstance(each, DeviceCodedBucket) for each in reducer.buckets.buckets)
    assert len(asked) == 10


@pytest.mark.full("slow")
@ranks(4, **TWO_HOSTS)
def test_buckets_without_a_codec_stay_with_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where staging is what was faster: the bits of a run do not depend on what was measured."""
    pretend_two_hosts()
    fd.init()
    plan = {"codec": "int8", **SMALL}
    states = {}
    for staged_seconds in (0.5, 2.0):
        monkeypatch.setattr(device_route, "_seconds_of_both", lambda *_, given=staged_seconds: (1.0, given))
        with simulated():
            model = train(fd.Plan(**plan), bad_step=None)
            assert is_staged(model) == (staged_seconds < 1)
            states[staged_seconds] = state_of(model)
    for one, other in zip(*states.values(), strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@ranks(2)
def test_codecs_that_are_asked_for_later_say_how_they_travel() -> None:
    fd.init()
    with simulated():
        model, _ = distributed(fd.Plan())
        model(torch.ones(4, WIDTH), branch=True).sum().backward()
        reducer = DistributedModel.of(model).reducer
        assert reducer is not None
        assert "CPU memory:" not in reducer.route_reason
        reducer.tuning.plan = replace(reducer.plan, staging="always")
        reducer.switch_codecs({"branch.weight": CodecSpec.parse("int8")})
        assert "through CPU memory: the plan says so" in reason_of(model)
        model(torch.ones(4, WIDTH), branch=True).sum().backward()


@ranks(2)
def test_a_rank_that_leaves_is_named() -> None:
    world = fd.init()
    with simulated():
        model, optimizer = distributed(fd.Plan(codec="int8", **SMALL, staging="always"), all_coded=True)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(4, WIDTH), branch=True).sum().backward()
            optimizer.step()
        if world.rank == 1:
            reducer = DistributedModel.of(model).reducer
            assert reducer is not None
            conductor = reducer.open_route.require().on_device
            assert conductor is not None
            conductor.close()
            return
        with pytest.raises(fd.PeerLost, match=r"rank 1 .*is gone"):
            model(torch.ones(4, WIDTH), branch=True).sum().backward()


def descriptors_at_rest(enough: int) -> int:
    """The fewest open descriptors in a second without a world: threads of one that is gone close theirs."""
    gc.collect()
    fewest, end = 1 << 30, time.monotonic() + 1.0
    while fewest > enough and time.monotonic() < end:
        fewest = min(fewest, len([*Path("/proc/self/fd").iterdir()]))
        time.sleep(0.01)
    return fewest


@pytest.mark.full("slow")
@ranks(2)
def test_worlds_come_and_go_and_leave_nothing() -> None:
    """As in an elastic job: what is kept goes on in the next world, and no thread and no connection stays."""
    plan = fd.Plan(codec="int8", **SMALL, staging="always")
    fd.init()
    with simulated():
        expected = state_of(train(plan, steps=4, bad_step=None, all_coded=True))
        threads, descriptors = threading.active_count(), list[int]()
        for _ in range(3):
            fd.shutdown()
            descriptors.append(descriptors_at_rest(descriptors[0] if descriptors else 0))
            fd.init()
            found = state_of(train(plan, steps=4, bad_step=None, all_coded=True))
            for ours, theirs in zip(found, expected, strict=True):
                assert torch.equal(ours, theirs)
        assert threading.active_count() <= threads
        assert descriptors[-1] <= descriptors[0], descriptors
        fd.shutdown()
        gone = "farandole-conductor"
        assert not [each for each in threading.enumerate() if each.name == gone and each.is_alive()]


@ranks(2)
def test_a_route_that_is_refused_leaves_nothing() -> None:
    """It is refused when staging was connected."""
    fd.init()
    with simulated():
        descriptors = []
        for _ in range(3):
            with pytest.raises(fd.PlanError, match="route = 'hierarchical', but the ranks' models are not in CPU"):
                distributed(fd.Plan(codec="int8", **SMALL, staging="always", route="hierarchical"))
            assert not [each for each in threading.enumerate() if each.name == "farandole-conductor"]
            descriptors.append(len([*Path("/proc/self/fd").iterdir()]))
        assert descriptors[-1] <= descriptors[0], descriptors
        assert is_staged(train(fd.Plan(codec="int8", **SMALL, staging="always"), steps=2, all_coded=True))


@pytest.mark.full("further")
@ranks(2)
def test_the_times_of_staged_buckets_are_recorded(tmp_path: Path) -> None:
    fd.init(run_dir=tmp_path)
    with simulated():
        train(fd.Plan(codec="int8", **SMALL, staging="always"), steps=3, bad_step=None, all_coded=True)
        timeline = records(str(tmp_path))
    assert len(timeline.steps) == 3
    for row in timeline.steps:
        (exchange,) = row.exchanges
        for bucket in exchange.buckets:
            assert bucket.launch_seconds <= bucket.begin_seconds < bucket.end_seconds <= exchange.wait_end_seconds
            assert 0 < bucket.wait_seconds <= bucket.end_seconds - bucket.begin_seconds
            assert bucket.codec_seconds == 0
            assert bucket.rounds >= 2
            assert 0 < bucket.sent_bytes < bucket.nbytes
        assert exchange.sent_bytes == sum(bucket.sent_bytes for bucket in exchange.buckets)
