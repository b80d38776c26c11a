"""Codec sessions on three ranks that are threads: only the last differs, and all are told."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from farandole.comm.engine.codec_session import CodecSession
from farandole.core.vocabulary.codec_spec import CodecSpec
from farandole.core.vocabulary.errors import CommError, ConfigError, Mismatch
from tests.unit.comm.ranks_in_threads import Rank, play


def session_of(rank: Rank, codec: str = "int8") -> CodecSession:
    return CodecSession(rank.route, CodecSpec.parse(codec))


def told(rank: Rank, session: CodecSession, tensors: Any, kind: type[Exception]) -> str:
    with pytest.raises(kind) as caught:
        session.mean(tensors)
    return str(caught.value)


def test_a_difference_of_the_last_rank_alone_is_named_on_all() -> None:
    def body(rank: Rank) -> list[str]:
        session, is_odd = session_of(rank), rank.number == 2
        plain = {"w": torch.ones(4), "v": torch.ones(2)}
        said = [
            told(rank, session, {**plain, "w": torch.ones(5)} if is_odd else plain, Mismatch),
            told(rank, session, {**plain, "u": torch.ones(1)} if is_odd else plain, Mismatch),
            told(rank, session, {"w": plain["w"]} if is_odd else plain, Mismatch),
            told(rank, session_of(rank, "int4" if is_odd else "int8"), plain, Mismatch),
        ]
        session.mean(plain)
        if is_odd:
            session.rollback()
        said.append(told(rank, session, plain, Mismatch))
        return said

    for number, said in enumerate(play(3, body)):
        for text, expected in zip(
            said,
            [
                "rank 0 has 'w' [4] torch.float32 on cpu, rank 2 'w' [5] torch.float32 on cpu;",
                "rank 0 has no other tensor, rank 2 'u' [1] torch.float32 on cpu;",
                "rank 0 has 'v' [2] torch.float32 on cpu, rank 2 no other tensor;",
                "rank 0 has codec int8, rank 2 codec int4;",
                "rank 0 has 1 means kept since its state began, rank 2 0 means kept since its state began;",
            ],
            strict=True,
        ):
            assert text.startswith(f"rank {number}, codec session: {expected}"), text


def test_many_differences_are_not_all_listed() -> None:
    def body(rank: Rank) -> str:
        tensors = {f"{name}{rank.number // 2}": torch.ones(1) for name in "abcde"}
        return told(rank, session_of(rank), tensors, Mismatch)

    for text in play(3, body):
        listed = [", ".join(f"'{name}{odd}' [1] torch.float32 on cpu" for name in "abc") for odd in (0, 1)]
        assert f"rank 0 has {listed[0]}, rank 2 {listed[1]};" in text


def test_what_the_last_ranks_cannot_exchange_is_an_error_on_all() -> None:
    """The first of the errors is told, with all ranks that have it."""

    def body(rank: Rank) -> list[str]:
        session = session_of(rank)
        wrong: Any = {"w": torch.ones(4, dtype=torch.float64)}
        said = [
            told(rank, session, wrong if rank.number else {"w": torch.ones(4)}, ConfigError),
            told(rank, session, {"w": [1.0]} if rank.number == 2 else {"w": torch.ones(4)}, ConfigError),
        ]
        assert session.mean({"w": torch.full((4,), 1.0 + rank.number)})["w"].tolist() == [2.0] * 4
        return said

    for said in play(3, body):
        assert said[0].startswith(
            "ranks 1 and 2: codec session: 'w' is [4] torch.float64 on cpu, expected float32"
        )
        assert said[1].startswith("rank 2: codec session: 'w' is of type list, expected float32")


def test_bits_and_state_of_all_ranks_through_a_rollback_and_a_load() -> None:
    def body(rank: Rank) -> Any:
        session = session_of(rank, "topk:0.05,momentum=0.5,warmup_steps=4")
        generator = torch.Generator().manual_seed(rank.number)
        deltas = [{"w": torch.randn(40, 30, generator=generator), "b": torch.ones(7)} for _ in range(5)]
        session.mean(deltas[0])
        state = session.state()
        first = session.mean(deltas[1])
        session.rollback()
        session.rollback()
        again = session.mean(deltas[1])
        session.load_state(state)
        loaded = session.mean(deltas[1])
        for name, mean in first.items():
            assert torch.equal(mean, again[name])
            assert torch.equal(mean, loaded[name])
        session.load_state({})
        session.mean(deltas[2])
        session.rollback()
        assert all(not bool(entry["elements"]["residual"].any()) for entry in session.state().values())
        return {name: mean.tolist() for name, mean in first.items()}

    found = play(3, body)
    assert found[0] == found[1] == found[2]
    assert any(value for row in found[0]["w"] for value in row)


def test_nan_of_the_last_rank_is_everybodys_and_leaves_no_trace() -> None:
    def body(rank: Rank) -> None:
        for codec in ("int8", "none"):
            session = session_of(rank, codec)
            session.mean({"w": torch.linspace(0, 1, 40) + rank.number})
            before = session.state()
            bad = torch.ones(40)
            if rank.number == 2:
                bad[3] = torch.nan
            assert bool(session.mean({"w": bad})["w"].isnan().all())
            session.rollback()
            assert bool(session.mean({"w": torch.full((40,), 3e38)})["w"].isnan().all()), "their sum is infinite"
            session.rollback()
            for name, entry in session.state().items():
                for key, tensor in entry["elements"].items():
                    assert torch.equal(tensor, before[name]["elements"][key])
            mean = session.mean({"w": torch.full((40,), 1.0 + rank.number)})["w"]
            assert torch.allclose(mean, torch.full((40,), 2.0), atol=0.05)

    play(3, body)


def test_matrices_side_by_side_and_what_a_matrix_codec_cannot_take() -> None:
    def body(rank: Rank) -> None:
        session = session_of(rank, "powersgd:2")
        tensors = {"m": torch.ones(20, 30) * rank.number, "n": torch.ones(10, 3, 5)}
        means = session.mean(tensors)
        assert torch.allclose(means["m"], torch.ones(20, 30), atol=1e-4)
        assert torch.allclose(means["n"], torch.ones(10, 3, 5), atol=1e-4)
        for name, shape in (("b", (3,)), ("e", (3, 0))):
            text = told(rank, session, {name: torch.ones(shape)}, ConfigError)
            assert f"ranks 0, 1 and 2: codec session: '{name}' has shape {shape}, and codec powersgd" in text

    play(3, body)


def test_a_route_that_is_closed_is_an_error_of_the_session() -> None:
    def body(rank: Rank) -> None:
        session = session_of(rank)
        session.mean({"w": torch.ones(4)})
        assert rank.route.conductor is not None
        rank.route.conductor.close()
        with pytest.raises(CommError, match="codec session: the conductor was closed; look for the first failure"):
            session.mean({"w": torch.ones(4)})

    play(3, body)


def test_a_rollback_before_the_first_mean_changes_nothing() -> None:
    def body(rank: Rank) -> list[float]:
        session = session_of(rank)
        session.rollback()
        found: list[float] = session.mean({"w": torch.full((2,), 1.0 + rank.number)})["w"].tolist()
        return found

    for mean in play(2, body):
        assert mean == pytest.approx([1.5, 1.5], rel=0.01)
