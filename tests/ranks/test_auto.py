"""codec = "auto" on real ranks: it chooses, alike on all ranks, and loses nothing when it switches."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import re
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from typing import Any

import pytest
import torch
from torch import nn

import farandole as fd
from farandole.comm.autotune import autotuner as tuning
from farandole.comm.autotune import profile as looking
from farandole.comm.autotune.autotuner import LEAST_PAUSE_SECONDS, Autotuner
from farandole.comm.autotune.probe import probe_link
from farandole.comm.messages import Message
from farandole.comm.transport.rank_group import RankGroup
from farandole.comm.transport.transport import Transport
from farandole.comm.world.store_sync import all_gather_json
from farandole.core.env import VERBOSE, changed_environment
from farandole.core.link import LinkModel
from farandole.parallel.model import DistributedModel
from tests.ranks.pool import ranks
from tests.ranks.reference import assert_close, assert_same_bits, data, own, train_alone
from tests.ranks.test_coded_engine import coded_buckets
from tests.ranks.test_routes import pretend_two_hosts


def model_of() -> nn.Sequential:
    """Return a model with one matrix that codecs take."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 96), nn.Tanh(), nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 3))


def tuner_of(model: nn.Module) -> Autotuner:
    reducer = DistributedModel.of(model).reducer
    assert reducer is not None
    assert reducer.tuner is not None, "this route has a tuner"
    return reducer.tuner


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        x, y = data(24, seed=step)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(own(x)), own(y)).backward()
        optimizer.step()


@contextlib.contextmanager
def links_seen_as(see: Callable[[RankGroup], LinkModel]) -> Iterator[None]:
    """Let the tuner believe `see(circle)` of each link, which is measured all the same: with its real bytes."""

    def probe(transport: Transport, circle: RankGroup, everyone: RankGroup, nbytes: int) -> LinkModel:
        probe_link(transport, circle, everyone, nbytes)
        return see(circle)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(looking, "probe_link", probe)
        yield


@ranks(2)
def test_it_chooses_the_same_on_all_ranks_and_stays_exact_unless_lossy_is_allowed() -> None:
    fd.init()
    model, reference = model_of(), model_of()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fd.distribute(model, optimizer, fd.Plan(codec="auto", route="flat"))
    train(model, optimizer, 8)
    tuner = tuner_of(model)
    assert tuner.choice is not None, "chosen after three steps"
    assert tuner.choice.main_codec == "none"
    assert_same_bits(model)
    train_alone(reference, torch.optim.SGD(reference.parameters(), 0.1), [data(24, seed=s) for s in range(8)])
    assert_close(model, reference)


@pytest.mark.full("further")
@ranks(3)
def test_a_link_that_becomes_slow_changes_the_codec_on_all_ranks_in_the_same_step() -> None:
    """The tuner is told that the link became slow; the probes and all that follows are real."""
    fd.init()
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen = [LinkModel(1e12, 1e-6, 0.0)]
    with links_seen_as(lambda _: seen[0]):
        fd.distribute(model, optimizer, fd.Plan(codec="auto", lossy=True, route="flat"))
        train(model, optimizer, 6)
        tuner = tuner_of(model)
        assert tuner.choice is not None
        first = tuner.choice
        assert first.main_codec == "none", "nothing is lossy where the link costs nothing"
        seen[0] = LinkModel(1e4, 1e-6, 0.0)
        if fd.world().rank == 1:
            tuner.pause.next_seconds = 0.0  # one rank wishes to look again
        train(model, optimizer, 6)
        assert tuner.choice.main_codec != "none"
        assert len(tuner.history) == 2
        assert_same_bits(model)


@pytest.mark.parametrize("verbose", ["0", "1"])
@ranks(2)
def test_it_says_one_line_a_decision_and_more_only_where_asked(verbose: str) -> None:
    world = fd.init()
    heard = io.StringIO()
    with changed_environment({VERBOSE: verbose}), redirect_stderr(heard):
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        fd.distribute(model, optimizer, fd.Plan(codec="auto", route="flat"))
        train(model, optimizer, 12)
    lines = [line for line in heard.getvalue().splitlines() if "codec auto" in line]
    if world.rank:
        assert lines == []
        return
    assert all(line.startswith("farandole: codec auto, Sequential: ") for line in lines), lines
    if verbose == "1":
        assert "buckets of " in lines[0]
        assert "measured " in lines[1]
    else:
        (line,) = lines
        assert re.search(r"Sequential: none \(predicted [\d.]+ [mµ]?s a step; lossy codecs need", line), line


@ranks(2)
def test_probes_are_in_proportion_to_the_gradients() -> None:
    """What the first look sends, beside a model whose gradients have 24 kB."""
    fd.init()
    sent: list[int] = []

    def counted(self: Transport, message: Message, *rest: Any) -> Any:
        flight = start(self, message, *rest)
        sent.append(message.tensor.nbytes)
        return flight

    start = Transport.start
    model = nn.Sequential(nn.Linear(64, 90), nn.Linear(90, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fd.distribute(model, optimizer, fd.Plan(codec="auto", lossy=True, route="flat"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Transport, "start", counted)
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.ones(4, 64)).sum().backward()
            optimizer.step()
    assert tuner_of(model).choice is not None, "it has looked"
    gradients = sum(p.nbytes for p in model.parameters())
    assert sum(sent) < 40 * gradients, f"{sum(sent)} bytes beside gradients of {gradients}"


@ranks(2)
def test_where_memory_is_shared_there_is_nothing_to_choose() -> None:
    fd.init()
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fd.distribute(model, optimizer, fd.Plan(codec="auto", lossy=True))
    train(model, optimizer, 5)
    reducer = DistributedModel.of(model).reducer
    assert reducer is not None
    assert reducer.route == "shared"
    assert reducer.tuner is None
    assert_same_bits(model)


@ranks(2)
def test_a_tuned_model_can_be_copied_and_pickled() -> None:
    fd.init()
    model = model_of()
    fd.distribute(model, torch.optim.SGD(model.parameters(), 0.1), fd.Plan(codec="auto", route="flat"))
    again = pickle.loads(pickle.dumps(model))
    x, _ = data(4)
    assert torch.equal(again(x), model(x))
    assert torch.equal(copy.deepcopy(model)(x), model(x))


@pytest.mark.full("further")
@ranks(4, FARANDOLE_LOCAL_SIZE="2", FARANDOLE_NODE_COUNT="2")
def test_slices_of_all_local_ranks_get_the_same_codec() -> None:
    """Two circles across two hosts measure two links; the choice must be one."""
    pretend_two_hosts()
    world = fd.init()
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fd.distribute(model, optimizer, fd.Plan(codec="auto", lossy=True))
    train(model, optimizer, 8)
    tuner = tuner_of(model)
    assert tuner.choice is not None
    seen = [[link.bytes_per_second, link.latency_seconds] for link, _ in tuner.history]
    assert all(other == seen for other in all_gather_json(world, "test/links", seen))
    assert_same_bits(model)


@ranks(2)
def test_a_codec_that_a_person_chose_stays() -> None:
    fd.init()
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with links_seen_as(lambda _: LinkModel(1e4, 1e-6, 0.0)):
        plan = fd.Plan(codec="auto", lossy=True, route="flat", codec_for={"2.weight": "none"})
        fd.distribute(model, optimizer, plan)
        train(model, optimizer, 6)
        choice = tuner_of(model).choice
        assert choice is not None
        assert "2.weight" not in choice.codecs


@pytest.mark.full("further")
@ranks(4, FARANDOLE_LOCAL_SIZE="2", FARANDOLE_NODE_COUNT="2")
def test_the_route_follows_the_links_that_were_measured() -> None:
    """The tuner is told links by how many use them at once; probes, routes and sums are real."""
    pretend_two_hosts()
    fd.init()
    model, reference = model_of(), model_of()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen = {2: LinkModel(1e5, 1e-6, 0.0), 4: LinkModel(1e12, 1e-6, 0.0)}
    with links_seen_as(lambda circle: seen[len(circle.ranks)]):
        fd.distribute(model, optimizer, fd.Plan(codec="auto"))
        reducer = DistributedModel.of(model).reducer
        assert reducer is not None
        assert reducer.route == "hierarchical"
        train(model, optimizer, 6)
        tuner = tuner_of(model)
        assert reducer.route == "flat"
        assert {bucket._route for bucket in coded_buckets(model).values()} == {"flat"}
        assert "route flat, by hierarchical" in tuner._explain(tuner.history[-1][1])
        seen[2], seen[4] = seen[4], seen[2]
        if fd.world().rank == 3:
            tuner.pause.next_seconds = 0.0
        train(model, optimizer, 4)
        assert reducer.route == "hierarchical"
        assert {bucket._route for bucket in coded_buckets(model).values()} == {"hierarchical"}
        assert [choice.route for _, choice in tuner.history] == ["flat", "hierarchical"]
        assert_same_bits(model)
    batches = [data(24, seed=seed) for seed in [*range(6), *range(4)]]
    train_alone(reference, torch.optim.SGD(reference.parameters(), 0.1), batches)
    assert_close(model, reference)


@ranks(2)
def test_what_all_ranks_learn_from_their_steps_is_what_the_slowest_measured() -> None:
    world = fd.init()
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with links_seen_as(lambda _: LinkModel(1e6, 1e-6, 0.0)):
        fd.distribute(model, optimizer, fd.Plan(codec="auto", lossy=True, route="flat"))
        train(model, optimizer, 4)
        tuner = tuner_of(model)
        assert tuner.choice is not None
        codec = tuner.choice.main_codec
        tuner._steps.measured_seconds = [tuner._steps.model_seconds * (1.25 if world.rank else 0.75)] * 40
        if world.rank == 0:
            tuner.pause.next_seconds = 0.0
        train(model, optimizer, 3)
        ratios = dict(tuner._calibration._ratios)
        assert list(ratios) == [f"{codec} by flat"]
        assert all(other == ratios for other in all_gather_json(world, "test/ratios", ratios))
        assert abs(ratios[f"{codec} by flat"] - 1.25) < 1e-6
        assert_same_bits(model)


@ranks(2)
def test_steps_that_are_always_late_are_measured_no_more_often_than_the_pause_allows() -> None:
    """And rank 0 says what it predicted and measured once for each choice, however often it looks."""
    fd.init()
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "write_notice", said.append)
        fd.distribute(model, optimizer, fd.Plan(codec="auto", route="flat"))
        train(model, optimizer, 4)
        tuner = tuner_of(model)
        real, looks, begin = tuner._probe_and_choose, [0], time.monotonic()

        def look() -> object:
            looks[0] += 1
            return real()

        patch.setattr(tuner, "_probe_and_choose", look)
        for _ in range(60):
            tuner._steps.expected_seconds = 1e-9
            train(model, optimizer, 1)
        assert looks[0] <= (time.monotonic() - begin) / LEAST_PAUSE_SECONDS
        tuner.pause.next_seconds = 0.0
        train(model, optimizer, 6)
        assert looks[0] >= 1
    choices = len(tuner.history)
    assert sum("connection" in line for line in said) <= choices
    assert sum("measured" in line for line in said) <= choices
