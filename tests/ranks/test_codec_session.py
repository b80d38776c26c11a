"""Codec sessions: the mean of named tensors without autograd hooks, from any thread."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import pytest
import torch

import farandole as fd
from farandole.comm.codecs.registry import make_codec
from farandole.comm.engine.codec_session import CodecSession
from farandole.comm.messages import GroupRank, as_encoding, simulate
from farandole.comm.routes import connect_route
from farandole.core.vocabulary.codec_spec import CodecSpec
from farandole.core.vocabulary.errors import CommError, ConfigError, Mismatch
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


@pytest.mark.gate_cases("int8")
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
        with pytest.raises(
            Mismatch, match=r"rank 0 has 'w' \[4\] torch.float32 on cpu, rank 1 'w' \[5\] torch.fl"
        ):
            session.mean(other[rank])
        more = [{"w": torch.ones(4)}, {"w": torch.ones(4), "v": torch.ones(2)}]
        with pytest.raises(Mismatch, match=r"rank 0 has no other tensor, rank 1 'v' \[2\]"):
            session.mean(more[rank])
        with pytest.raises(
            ConfigError, match=r"^ranks 0 and 1: .*'w' is \[4\] torch\.float64 on cpu, expected float32"
        ):
            session.mean({"w": torch.ones(4, dtype=torch.float64)})
        assert session.mean({"w": torch.full((4,), 1.0 + rank)})["w"].tolist() == [1.5] * 4


@pytest.mark.parametrize("codec", ["int8", "none"])
@ranks(2)
def test_what_is_not_finite_on_one_rank_is_nan_on_all_and_changes_no_state(codec: str) -> None:
    with session_of(codec) as session:
        rank = fd.world().rank
        session.mean(deltas(rank, 0))
        before = session.state()
        bad = deltas(rank, 1)
        if rank == 1:
            bad["b"][0] = torch.inf
        assert all(bool(mean.isnan().all()) for mean in session.mean(bad).values())
        huge = {name: torch.full(shape, 3e38) for name, shape in SHAPES.items()}
        assert all(bool(mean.isnan().all()) for mean in session.mean(huge).values())
        session.rollback()
        for name, entry in session.state().items():
            assert torch.equal(entry["elements"]["residual"], before[name]["elements"]["residual"])


def given(kind: str) -> dict[str, Any]:
    """Return what one rank gives that no rank can exchange."""
    found: dict[str, dict[str, Any]] = {
        "float64": {"w": torch.ones(4, dtype=torch.float64)},
        "sparse": {"w": torch.ones(4).to_sparse()},
        "no tensor": {"w": [1.0] * 4},
        "another shape than its state": {"w": torch.ones(2, 2)},
        "a name that is no text": {"w": torch.ones(4), cast("str", 3): torch.ones(1)},
    }
    return found[kind]


@pytest.mark.gate_cases("2-a name that is no text-not supported between")
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("float64", r"'w' is \[4\] torch.float64 on cpu, expected float32 on cpu"),
        ("sparse", r"'w' is \[4\] torch.float32 sparse_coo on cpu, expected"),
        ("no tensor", r"'w' is of type list, expected float32"),
        ("another shape than its state", r"'w' has shape \(2, 2\), its residual \(4,\)"),
        ("a name that is no text", r"not supported between"),
    ],
)
@ranks(2, 3)
def test_what_one_rank_cannot_exchange_is_an_error_on_all_at_once(kind: str, expected: str) -> None:
    """A rank that raised alone would leave the others to wait for the time-out."""
    with session_of("int8") as session:
        rank, last = fd.world().rank, fd.world().size - 1
        first = session.mean({"w": torch.arange(4.0) + rank})["w"]
        begin = time.monotonic()
        with pytest.raises(ConfigError, match=rf"^rank {last}: .*{expected}"):
            session.mean(given(kind) if rank == last else {"w": torch.ones(4)})
        assert time.monotonic() - begin < 10.0, "nobody waited for the time-out of a minute"
        session.rollback()
        again = session.mean({"w": torch.arange(4.0) + rank})["w"]
        assert torch.allclose(again, first, atol=0.1), "what was given before left no trace"


def damaged(state: dict[str, Any], how: str) -> dict[str, Any]:
    """Return `state` with its entry of "w" as no rank can use it."""
    entry = state["w"]
    found: dict[str, dict[str, Any]] = {
        "another shape": {"w": {**entry, "elements": {"residual": torch.zeros(7)}}},
        "no entry": {"w": [entry]},
        "a part is missing": {"w": {key: value for key, value in entry.items() if key != "numbers"}},
        "of a slice": {"w": {**entry, "scale": 2, "place": [0, 4, 0, 2]}},
    }
    return found[how]


@pytest.mark.gate_cases("2-a part is missing-the entry of 'w' has no numbers")
@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("another shape", r"'w' has shape \(4,\), its residual \(7,\)"),
        ("no entry", r"the entry of 'w' has no codec"),
        ("a part is missing", r"the entry of 'w' has no numbers"),
        ("of a slice", r"the route or the buckets changed: .*'w'"),
    ],
)
@ranks(2, 3)
def test_loaded_state_that_does_not_fit_one_rank_is_an_error_on_all(how: str, expected: str) -> None:
    with session_of("int8") as session:
        rank = fd.world().rank
        session.mean({"w": torch.randn(4)})
        state = session.state()
        session.load_state(damaged(state, how) if rank == 1 else state)
        for _ in range(2):
            with pytest.raises(ConfigError, match=rf"^rank 1: .*{expected}"):
                session.mean({"w": torch.ones(4)})
        session.load_state(state)
        assert torch.isfinite(session.mean({"w": torch.ones(4)})["w"]).all()


@pytest.mark.full("further")
@ranks(2)
def test_a_history_that_differs_is_an_error_on_all_ranks() -> None:
    """Steps of a warm-up and random draws go by what was exchanged before: ranks would send other sizes."""
    with session_of("topk:0.05,warmup_steps=8") as session:
        rank = fd.world().rank
        tensors = {"w": torch.randn(100)}
        session.mean(tensors)
        state = session.state()
        session.mean(tensors)
        if rank == 1:
            session.rollback()
        with pytest.raises(Mismatch, match=r"rank 0 has 2 means kept since .* rank 1 1 means kept"):
            session.mean(tensors)
        session.load_state(state if rank == 0 else {})
        with pytest.raises(Mismatch, match=r"rank 0 has state of 'w': codec topk.*residual.*, rank 1 no other"):
            session.mean(tensors)
        later = {"w": {**state["w"], "numbers": [{**each, "warm_up_step": 5} for each in state["w"]["numbers"]]}}
        session.load_state(state if rank == 0 else later)
        with pytest.raises(Mismatch, match=r'"warm_up_step": 1.*"warm_up_step": 5'):
            session.mean(tensors)
        session.load_state(later)
        assert bool(torch.isfinite(session.mean(tensors)["w"]).all())


@ranks(2)
def test_random_draws_of_a_rank_are_its_own() -> None:
    """Seeds differ from rank to rank by intent, through a save and a load as well."""
    with session_of("int8:rounding=stochastic") as session:
        session.mean({"w": torch.randn(4)})
        session.load_state(session.state())
        assert bool(torch.isfinite(session.mean({"w": torch.ones(4)})["w"]).all())


@ranks(2)
def test_factors_that_differ_are_an_error_on_all_ranks() -> None:
    """PowerSGD's ranks project on one subspace: with two of them the mean would be of neither."""
    with session_of("powersgd:2") as session:
        tensors = {"w": torch.randn(20, 30)}
        session.mean(tensors)
        state = session.state()
        if fd.world().rank == 1:
            state["w"]["others"]["q"] += 1.0
        session.load_state(state)
        with pytest.raises(Mismatch, match=r"state of 'w': .*factors .*, rank 1 state of 'w'"):
            session.mean(tensors)
        with pytest.raises(ConfigError, match=r"'b' has shape \(3,\), and codec powersgd:rank=2 takes matrices"):
            session.mean({"b": torch.ones(3)})


@ranks(2)
def test_ranks_with_other_codecs_are_refused() -> None:
    world = fd.init()
    route = connect_route(world, fd.Plan(codec="int8", route="flat"), needs_messages=True, parameter_bytes=2**20)
    try:
        session = CodecSession(route, CodecSpec.parse("int8" if world.rank == 0 else "int4"))
        with pytest.raises(Mismatch, match="rank 0 has codec int8, rank 1 codec int4"):
            session.mean({"w": torch.ones(4)})
    finally:
        route.close(world)


@pytest.mark.gate_cases("topk:0.02,momentum=0.5")
@pytest.mark.parametrize("codec", ["randomk:0.2", "topk:0.02,momentum=0.5"])
@ranks(2)
def test_state_that_overflowed_is_a_mean_that_is_not_finite_on_all_ranks(codec: str) -> None:
    """It begins anew on its rank, and what it held is in no mean: the policy must hear of it."""
    with session_of(codec) as session:
        rank = fd.world().rank
        tensors = {"w": torch.full((1000,), 1.0 + rank)}
        session.mean(tensors)
        state = session.state()
        if rank == 1:
            state["w"]["elements"]["residual"][999] = torch.inf  # what is left out may add up to
        session.load_state(state)
        with pytest.raises(ConfigError, match=r"rank 0: .*'w' is of type list"):
            session.mean(given("no tensor") if rank == 0 else tensors)
        assert bool(session.mean(tensors)["w"].isnan().all()), "also where only another rank's state overflowed"
        for _ in range(3):
            assert bool(torch.isfinite(session.mean(tensors)["w"]).all())
        for each in session.state()["w"]["elements"].values():
            assert bool(torch.isfinite(each).all())


@ranks(2)
def test_state_that_overflows_in_a_long_run_ends_in_one_bad_mean() -> None:
    with session_of("randomk:0.2") as session:
        sign = 1.0 if fd.world().rank == 0 else -1.0  # the sum of what is sent is zero
        seen = []
        for turn in range(16):
            value = sign * 1.5e38 if turn < 6 else 1.0
            mean = session.mean({"w": torch.full((1000,), value)})["w"]
            seen.append(bool(torch.isfinite(mean).all()))
        assert not all(seen), "it overflowed"
        assert all(seen[10:]), seen


@pytest.mark.full("further")
@ranks(2)
def test_names_may_change_between_exchanges_and_their_residuals_wait() -> None:
    expected = simulated_alone("int8", 2)
    with session_of("int8") as session:
        rank = fd.world().rank
        seen = []
        for turn in range(2):
            seen.append(session.mean({"w": deltas(rank, turn)["w"]})["w"])
            session.mean({"b": torch.ones(3)})
        for turn, mean in enumerate(seen):
            assert torch.equal(mean, expected[turn]), turn


def simulated_alone(codec: str, turns: int) -> list[torch.Tensor]:
    """Return the means of "w" alone."""
    instance = make_codec(CodecSpec.parse(codec))
    groups = [GroupRank(rank, SIZE) for rank in range(SIZE)]
    count = torch.Size(SHAPES["w"]).numel()
    padded = -(-count // 2048) * 2048
    states = [instance.init(torch.zeros(padded), group) for group in groups]
    found = []
    for turn in range(turns):
        units = [torch.zeros(padded) for _ in groups]
        for rank, unit in enumerate(units):
            unit[:count] = deltas(rank, turn)["w"].flatten()
        states = simulate(
            [as_encoding(instance.exchange(units[g.rank], states[g.rank], g), units[g.rank]) for g in groups]
        ).states
        found.append(units[0][:count].view(SHAPES["w"]))
    return found


@pytest.mark.full("further")
@ranks(2)
def test_many_segments_of_strange_memory_orders() -> None:
    """More elements than one segment holds; tensors that are slices, and others laid out by columns."""
    with session_of("none") as session:
        rank = fd.world().rank
        wide = torch.arange(1_500_000, dtype=torch.float32).view(1000, 1500) + rank
        tensors = {"wide": wide, "columns": wide[:40].t(), "every other": wide[0, ::2], "empty": wide[:0]}
        for name, mean in session.mean(tensors).items():
            assert torch.equal(mean, tensors[name] - rank + 0.5), name


@pytest.mark.gate_cases("int8:rounding=stochastic")
@pytest.mark.parametrize("codec", ["int8:rounding=stochastic", "topk:0.01,warmup_steps=4"])
@ranks(2)
def test_what_lies_in_several_segments_goes_on_as_it_was_saved(codec: str) -> None:
    with session_of(codec) as session:
        generator = torch.Generator().manual_seed(fd.world().rank)
        shapes = {"a": (700, 1000), "b": (3,), "c": (900, 1000)}
        turns = [
            {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()} for _ in range(2)
        ]
        session.mean(turns[0])
        state = session.state()
        expected = session.mean(turns[1])
        session.load_state(state)
        for name, mean in session.mean(turns[1]).items():
            assert torch.equal(mean, expected[name]), name
        session.rollback()
        for name, entry in session.state().items():
            for key, kept in entry["elements"].items():
                assert torch.equal(kept, state[name]["elements"][key]), (name, key)
            assert entry["numbers"] == state[name]["numbers"], name


@ranks(2)
def test_a_session_ends_with_its_route_and_in_a_forked_child() -> None:
    with session_of("int8") as session:
        session.mean({"w": torch.ones(4)})
        reader, writer = os.pipe()
        child = os.fork()
        if not child:  # nothing but what is asked here, and no way back into the test
            try:
                session.mean({"w": torch.ones(4)})
            except BaseException as problem:
                os.write(writer, f"{type(problem).__name__}: {problem}".encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            told = pipe.read()
        os.waitpid(child, 0)
        assert told.startswith("CommError: rank"), told
        assert "was forked from that rank" in told, told
        session.mean({"w": torch.ones(4)})
    with pytest.raises(CommError, match="codec session: the conductor was closed"):
        session.mean({"w": torch.ones(4)})
