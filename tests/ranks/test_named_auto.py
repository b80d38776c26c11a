"""codec = "auto" of named operations on real ranks: chosen once, alike on all ranks, and nothing of it before.

In most tests ranks are told a link's speed; the probes and all that follows are real. tests/net has real links.
"""

from __future__ import annotations

import contextlib
import io
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import farandole as fd
import farandole.horovod.torch as hvd
from farandole.comm.autotune.probe import probe_link
from farandole.comm.transport.rank_group import RankGroup
from farandole.comm.transport.transport import Transport
from farandole.comm.world.store_sync import all_gather_json
from farandole.core.link import LinkModel
from farandole.core.vocabulary.errors import ConfigError, Mismatch
from farandole.horovod.named_ops import auto_codecs
from farandole.horovod.named_ops.auto_codecs import EXACT_ROUNDS
from farandole.horovod.named_ops.engine import NamedOpsEngine
from farandole.horovod.named_ops.operations import Request, Ticket
from tests.ranks.pool import ranks
from tests.ranks.test_horovod_plan import launch
from tests.ranks.test_negotiate import engine
from tests.ranks.test_routes import TWO_HOSTS, pretend_two_hosts

SLOW, FAST = 1e5, 1e12
"""Bytes per second."""
SHAPES = ((256, 300), (70_001,), (200, 200))
EXACT_STEPS = EXACT_ROUNDS + 1


@contextmanager
def link_seen_as(bytes_per_second: float) -> Iterator[list[tuple[int, ...]]]:
    """Let choices go by this speed; give the groups of ranks that were measured."""
    measured: list[tuple[int, ...]] = []

    def told(transport: Transport, circle: RankGroup, everyone: RankGroup, byte_count: int) -> LinkModel:
        measured.append(circle.ranks)
        probe_link(transport, circle, everyone, byte_count)
        return LinkModel(bytes_per_second, 1e-6)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auto_codecs, "probe_link", told)
        yield measured


def gradient(rank: int, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank))


def mean_of(members: range | list[int], shape: tuple[int, ...]) -> torch.Tensor:
    return torch.stack([gradient(rank, shape) for rank in members]).mean(0)


def step(on: NamedOpsEngine, name: str, *, order: int = 1, **more: Any) -> tuple[list[torch.Tensor], list[str]]:
    """Exchange one gradient of each shape; return the means and the codecs that they travelled by."""
    rank = fd.world().rank
    tickets: dict[int, Ticket] = {}
    for i in list(range(len(SHAPES)))[::order]:
        request = Request(
            f"{name}.{i}", "allreduce", gradient(rank, SHAPES[i]), reduction="average", codec="auto",
            chosen_with=name, **more,
        )  # fmt: skip
        (tickets[i],) = on.submit([request])
    means = [tickets[i].wait() for i in range(len(SHAPES))]
    return means, [tickets[i].travel().codec for i in range(len(SHAPES))]


def same_everywhere(*values: Any) -> bool:
    told = [value.double().sum().item() if isinstance(value, torch.Tensor) else value for value in values]
    everyone = all_gather_json(fd.world(), "test/same", told)
    return all(each == everyone[0] for each in everyone)


@ranks(2)
def test_a_slow_link_gets_a_codec_after_some_exact_steps() -> None:
    rank = fd.init().rank
    expected = [mean_of(range(2), shape) for shape in SHAPES]
    said = io.StringIO()
    with engine(by_host=False) as it, link_seen_as(SLOW) as measured, contextlib.redirect_stderr(said):
        for number in range(EXACT_STEPS):
            means, codecs = step(it, "Adam", order=1 if (number + rank) % 2 else -1)
            assert codecs == ["none"] * len(SHAPES), number
            assert all(map(torch.equal, means, expected)), "exact until codecs are chosen"
        assert measured == [(0, 1)] * 2, "once, in two probes"
        totals = [torch.zeros(shape) for shape in SHAPES]
        steps = 12
        for _ in range(steps):
            means, codecs = step(it, "Adam")
            assert codecs == ["powersgd:rank=4", "int8", "powersgd:rank=4"], "the smallest, on a link so slow"
            assert same_everywhere(codecs, *means)
            totals = [total + mean for total, mean in zip(totals, means, strict=True)]
        assert measured == [(0, 1)] * 2
        assert (totals[1] / steps - expected[1]).norm() < 0.01 * expected[1].norm(), "what was lost comes later"
        means, codecs = step(it, "SGD")
        assert codecs == ["none"] * len(SHAPES), "another exchange begins anew"
    with engine(by_host=False) as it:
        assert step(it, "Adam")[1] == ["none"] * len(SHAPES), "so does another engine, as of an elastic job"
    lines = [line for line in said.getvalue().splitlines() if "codec auto" in line]
    assert len(lines) == (1 if rank == 0 else 0)
    if rank == 0:
        assert "farandole: codec auto, Adam: " in lines[0]
        assert "powersgd:rank=4 for 2, int8 for 1 of 3 buckets (predicted " in lines[0]


@ranks(2)
def test_a_fast_link_stays_exact() -> None:
    fd.init()
    expected = [mean_of(range(2), shape) for shape in SHAPES]
    with engine(by_host=False) as it, link_seen_as(FAST) as measured:
        for _ in range(EXACT_STEPS + 2):
            means, codecs = step(it, "Adam")
            assert codecs == ["none"] * len(SHAPES)
            assert all(map(torch.equal, means, expected))
            time.sleep(0.02)  # what a step computes
        assert measured


@pytest.mark.full("further")
@ranks(2)
def test_buckets_that_hide_behind_computing_stay_exact() -> None:
    """The first one leaves half a second before the others: its 0.3 s on the link cost nothing."""
    fd.init()
    with engine(by_host=False) as it, link_seen_as(4e6):
        early = torch.zeros(300_000)
        for number in range(EXACT_STEPS + 1):
            request = Request("e.0", "allreduce", early, codec="auto", chosen_with="e")
            (first,) = it.submit([request])
            if number < EXACT_ROUNDS:
                time.sleep(0.8)
            late = Request("e.1", "allreduce", early.clone(), codec="auto", chosen_with="e")
            (second,) = it.submit([late])
            first.wait()
            second.wait()
        assert (first.travel().codec, second.travel().codec) == ("none", "int4")


@pytest.mark.full("slow")
@ranks(4, **TWO_HOSTS)
def test_the_link_between_hosts_is_measured_where_ranks_meet_inside_first() -> None:
    pretend_two_hosts()
    rank = fd.init().rank
    expected = [mean_of(range(4), shape) for shape in SHAPES]
    with engine() as it, link_seen_as(SLOW) as measured:
        assert it.by_host
        pair = it.add_process_set([0, 1])
        for _ in range(EXACT_STEPS + 1):
            means, codecs = step(it, "Adam")
            assert same_everywhere(codecs, *means)
            if rank < 2:
                _, of_pair = step(it, "Adam", process_set=pair)
                assert of_pair == ["none"] * len(SHAPES), "no link between the ranks of one host"
        assert codecs == ["int4"] * len(SHAPES), "matrices are not whole here"
        for mean, exact in zip(means, expected, strict=True):
            assert (mean - exact).norm() < 0.2 * exact.norm()
        across, inside = ((0, 2), (1, 3))[rank % 2], ((0, 1), (2, 3))[rank // 2]
        assert measured == [across, across, inside]


@ranks(2)
def test_ranks_of_one_host_measure_nothing() -> None:
    rank = fd.init().rank
    said = io.StringIO()
    with engine() as it, link_seen_as(SLOW) as measured, contextlib.redirect_stderr(said):
        for _ in range(EXACT_STEPS + 1):
            _, codecs = step(it, "Adam")
            assert codecs == ["none"] * len(SHAPES)
        assert not measured
    expected = "farandole: codec auto, Adam: none (all ranks are on one host)\n"
    assert said.getvalue() == (expected if rank == 0 else "")


@pytest.mark.full("further")
@ranks(3)
def test_joined_ranks_and_process_sets_choose_by_themselves() -> None:
    rank = fd.init().rank
    with engine(by_host=False) as it, link_seen_as(SLOW) as measured:
        pair = it.add_process_set([0, 2])
        if rank != 1:
            for _ in range(EXACT_STEPS + 1):
                means, codecs = step(it, "Adam", process_set=pair)
            assert "none" not in codecs
            exact = mean_of([0, 2], SHAPES[1])
            assert (means[1] - exact).norm() < 0.2 * exact.norm()
            assert measured == [(0, 2)] * 2
        _, codecs = step(it, "Adam")
        assert codecs == ["none"] * len(SHAPES)
        if rank == 1:
            it.join().wait()
            return
        for _ in range(EXACT_STEPS + 1):
            _, codecs = step(it, "Adam")
        assert "none" not in codecs
        assert len(measured) == 4
        it.join().wait()


@ranks(2)
def test_what_is_no_exchange_is_refused() -> None:
    rank = fd.init().rank
    with engine() as it:
        for more in ({}, {"chosen_with": "x", "reduction": "max"}):
            with pytest.raises(ConfigError, match="codec auto"):
                it.submit([Request("x", "allreduce", torch.ones(9), codec="auto", **more)])  # type: ignore[arg-type]
        with pytest.raises(Mismatch, match="has its codec chosen with 'x0', but another rank with 'x1'"):
            it.submit([Request("x", "allreduce", torch.ones(9), codec="auto", chosen_with=f"x{rank}")])[0].wait()


@ranks(2)
def test_named_gradients_of_horovod_for_torch() -> None:
    """Groups take the tensor path; a parameter that is small, and a compression of the script, are as before."""
    launch("--set", "codec=auto", "--set", "lossy=true", "--set", "route=flat")
    hvd.init()
    seen: list[Ticket] = []
    submit = NamedOpsEngine.submit

    def noting(self: NamedOpsEngine, requests: Any) -> list[Ticket]:
        tickets = submit(self, requests)
        seen.extend(tickets)
        return tickets

    NamedOpsEngine.submit = noting  # type: ignore[method-assign]
    try:
        with link_seen_as(SLOW):
            for compression in (hvd.Compression.none, hvd.Compression.fp16):
                torch.manual_seed(1)
                model = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 16))
                optimizer = hvd.DistributedOptimizer(
                    torch.optim.SGD(model.parameters(), 0.1), groups=1, compression=compression
                )
                for _ in range(EXACT_STEPS + 1):
                    seen.clear()
                    optimizer.zero_grad()
                    model(gradient(hvd.rank(), (8, 256))).square().mean().backward()
                    optimizer.step()
                codecs = Counter(ticket.travel().codec for ticket in seen)
                if compression is hvd.Compression.none:
                    assert codecs == {"powersgd:rank=4": 1, "int8": 1, "none": 2}, "matrices, and biases"
                else:
                    assert set(codecs) <= {"", "none"}
                assert same_everywhere(*model.parameters())
    finally:
        NamedOpsEngine.submit = submit  # type: ignore[method-assign]
    hvd.shutdown()


@ranks(2)
def test_without_lossy_codecs_nothing_is_chosen_and_said_so() -> None:
    launch("--autotune", "--set", "route=flat")
    said = io.StringIO()
    with contextlib.redirect_stderr(said), link_seen_as(SLOW) as measured:
        hvd.init()
        for _ in range(2):
            model = nn.Linear(256, 256)
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), groups=1)
            for _ in range(EXACT_STEPS + 1):
                optimizer.zero_grad()
                model(torch.ones(1, 256)).sum().backward()
                optimizer.step()
        assert not measured
        added: Any = hvd.DistributedOptimizer(torch.optim.SGD(nn.Linear(9, 9).parameters(), 0.1))
        assert added._exchange.choice.path == "reducer"
        added.add_param_group({"params": [nn.Parameter(torch.ones(256, 256))]})
        late = added._exchange._paths[-1]
        assert set(late._codecs.values()) == {"none"}, "on the tensor path, whatever the others take"
    line = "farandole: codec auto: none (lossy codecs need the plan key lossy)"
    assert [each for each in said.getvalue().splitlines() if "auto: none" in each] == [line] * (hvd.rank() == 0)
    hvd.shutdown()


@ranks(2)
def test_a_compression_of_the_script_counts_instead_of_auto() -> None:
    launch("--set", "codec=auto", "--set", "lossy=true")
    hvd.init()
    model = nn.Linear(256, 256)
    optimizer: Any = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), compression=hvd.Compression.int8
    )
    assert optimizer._exchange.choice.path == "reducer"
    assert optimizer._exchange.plan.codec == "int8"
    hvd.shutdown()
