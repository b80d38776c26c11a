"""Codec sessions: the mean of named tensors without autograd hooks, from any thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

import farandole as fd
from farandole.comm.codecs.registry import make_codec
from farandole.comm.messages.message import GroupRank
from farandole.comm.messages.simulator import as_encoding, simulate
from farandole.comm.routes.route import connect_route
from farandole.comm.sessions.session import CodecSession
from farandole.core.vocabulary.codec_spec import CodecSpec
from farandole.core.vocabulary.errors import ConfigError, Mismatch
from tests.ranks.pool import ranks

SHAPES = {"b": (3,), "w": (100, 41), "s": ()}
SIZE = 2


@contextmanager
def session_of(codec: str) -> Iterator[CodecSession]:
    world = fd.init()
    plan = fd.Plan(codec=codec, route="flat")
    route = connect_route(world, plan, needs_messages=True, parameter_bytes=2**20)
    try:
        yield CodecSession(route, CodecSpec.parse(codec))
    finally:
        route.close(world)


def deltas(rank: int, turn: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * turn + rank)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def in_a_thread(call: Callable[[], Any]) -> Any:
    """Return what `call` returns in another thread than the main one."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    thread.join()
    return results[0]


def simulated(codec: str, turns: int) -> list[dict[str, torch.Tensor]]:
    """Return the means of `turns` exchanges of two simulated ranks: all tensors in one segment, by name."""
    instance = make_codec(CodecSpec.parse(codec))
    groups = [GroupRank(rank, SIZE) for rank in range(SIZE)]
    names = sorted(SHAPES)
    total = sum(torch.Size(SHAPES[name]).numel() for name in names)
    padded = -(-total // 2048) * 2048
    states = [instance.init(torch.zeros(padded), group) for group in groups]
    found = []
    for turn in range(turns):
        units = []
        for rank in range(SIZE):
            unit = torch.zeros(padded)
            unit[:total] = torch.cat([deltas(rank, turn)[name].flatten() for name in names])
            units.append(unit)
        together = simulate(
            [as_encoding(instance.exchange(units[g.rank], states[g.rank], g), units[g.rank]) for g in groups]
        )
        states = together.states
        parts = units[0][:total].split([torch.Size(SHAPES[name]).numel() for name in names])
        found.append({name: part.view(SHAPES[name]) for name, part in zip(names, parts, strict=True)})
    return found


@pytest.mark.parametrize("codec", ["int8", "int4:rounding=stochastic", "topk:0.05,momentum=0.5", "none"])
@ranks(2)
def test_deltas_from_another_thread_have_the_bits_of_the_simulator(codec: str) -> None:
    """Residuals are kept, through a save and a load, and a step that is rolled back leaves no trace."""
    expected = simulated(codec, 4)
    with session_of(codec) as session:
        rank = fd.world().rank
        for turn in range(4):
            if turn == 2 and codec != "none":
                state = session.state()
                assert sorted(state) == sorted(SHAPES)
                session.load_state({})
                session.mean(deltas(rank, 99))
                session.load_state(state)
            elif turn == 3:
                session.mean(deltas(rank, 98))
                session.rollback()
            given = deltas(rank, turn)
            means = in_a_thread(partial(session.mean, given))
            for name, mean in means.items():
                assert torch.equal(mean, expected[turn][name]), (turn, name)
            assert torch.equal(given["w"], deltas(rank, turn)["w"]), "they are the caller's"


@ranks(2)
def test_tensors_that_differ_are_an_error_on_all_ranks_and_the_session_lives_on() -> None:
    with session_of("int8") as session:
        rank = fd.world().rank
        other = [{"w": torch.ones(4)}, {"w": torch.ones(5)}]
        with pytest.raises(Mismatch, match=r"rank 0 has w \[4\] torch.float32 cpu, rank 1 w \[5\] torch.float32"):
            session.mean(other[rank])
        more = [{"w": torch.ones(4)}, {"w": torch.ones(4), "v": torch.ones(2)}]
        with pytest.raises(Mismatch, match=r"rank 0 has no other tensor, rank 1 v \[2\]"):
            session.mean(more[rank])
        with pytest.raises(ConfigError, match=r"'w' is torch\.float64 on cpu, expected float32"):
            session.mean({"w": torch.ones(4, dtype=torch.float64)})
        assert session.mean({"w": torch.full((4,), 1.0 + rank)})["w"].tolist() == [1.5] * 4


@ranks(2)
def test_what_is_not_finite_on_one_rank_is_nan_on_all_and_changes_no_state() -> None:
    with session_of("int8") as session:
        rank = fd.world().rank
        session.mean(deltas(rank, 0))
        before = session.state()
        bad = deltas(rank, 1)
        if rank == 1:
            bad["b"][0] = torch.inf
        assert all(bool(mean.isnan().all()) for mean in session.mean(bad).values())
        huge = {name: torch.full(shape, 3e38) for name, shape in SHAPES.items()}
        assert all(bool(mean.isnan().all()) for mean in session.mean(huge).values())
        for name, entry in session.state().items():
            assert torch.equal(entry["elements"]["residual"], before[name]["elements"]["residual"])
