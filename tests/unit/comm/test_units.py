"""The units of a flat tensor, what is kept for each, and several encodings as one: simulated ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch

from farandole.comm.codecs.codec import leaves
from farandole.comm.codecs.registry import make_codec
from farandole.comm.codecs.units import CodedFlat, FlatPart, UnitStates, fuse
from farandole.comm.messages import Encoded, Encoding, GroupRank, Message, simulate
from farandole.comm.transport.rank_group import RankGroup
from farandole.core.vocabulary.codec_spec import CodecSpec

SIZE = 2


def states_of(codec: str) -> list[UnitStates]:
    return [UnitStates(make_codec(CodecSpec.parse(codec)), GroupRank(rank, SIZE)) for rank in range(SIZE)]


def exchange(states: Sequence[UnitStates], units: Sequence[torch.Tensor], k: int = 0) -> list[Any]:
    for each, unit in zip(states, units, strict=True):
        each.begin(k, unit)
    runs = [each.exchange(k, unit) for each, unit in zip(states, units, strict=True)]
    return simulate(cast("Any", runs)).results


def residual_of(states: UnitStates, k: int = 0) -> torch.Tensor:
    found = states.residual(k)
    assert found is not None
    return found


def test_units_have_states_of_their_own_and_each_can_be_taken_back() -> None:
    states = states_of("topk:0.1")
    kept: list[list[torch.Tensor]] = []
    for turn in range(2):
        for k in range(2):
            found = exchange(states, [torch.arange(40.0) * (k + 1 + rank + turn) for rank in range(SIZE)], k)
            assert found == [True, True]
        kept.append([residual_of(states[0], k).clone() for k in range(2)])
    assert not torch.equal(kept[0][0], kept[1][0])
    states[0].restore(1)
    assert torch.equal(residual_of(states[0], 0), kept[1][0]), "the other stays"
    assert torch.equal(residual_of(states[0], 1), kept[0][1])
    states[0].restore()
    assert torch.equal(residual_of(states[0], 0), kept[0][0])


def test_a_unit_of_which_a_rank_has_nan_is_nan_on_all_and_keeps_its_state() -> None:
    states = states_of("int8")
    units = [torch.linspace(0, 1, 64) + rank for rank in range(SIZE)]
    runs = [each.exchange_finite(0, unit) for each, unit in zip(states, units, strict=True)]
    assert simulate(cast("Any", runs)).results == [True, True]
    assert torch.equal(units[0], units[1])
    before = [residual_of(each).clone() for each in states]
    for bad in ([torch.ones(64), torch.full((64,), torch.nan)], [torch.full((64,), 3e38) for _ in range(SIZE)]):
        runs = [each.exchange_finite(0, unit) for each, unit in zip(states, bad, strict=True)]
        assert simulate(cast("Any", runs)).results == [False, False]
        assert all(bool(unit.isnan().all()) for unit in bad)
        for each, old in zip(states, before, strict=True):
            assert torch.equal(residual_of(each), old)


def test_a_state_that_overflowed_begins_anew_where_codecs_leave_elements_out() -> None:
    for codec, begins_anew in (("topk:0.1", True), ("int8", False)):
        states = states_of(codec)[0]
        assert states.begin(0, torch.zeros(64)), "the first one is as it should be"
        assert states.begin(0, torch.zeros(64))
        residual_of(states)[3] = torch.inf
        assert states.begin(0, torch.zeros(64)) is not begins_anew
        assert bool(residual_of(states).isinf().any()) is not begins_anew
        states.restore()
        assert bool(residual_of(states).isinf().any()) is not begins_anew, "it is not what was before either"


def test_only_what_fits_is_loaded() -> None:
    states = states_of("topk:0.1,momentum=0.5,warmup_steps=3")[0]
    unit = torch.zeros(40)
    kept = {
        "residual": torch.ones(40), "velocity": torch.ones(39), "warm_up_step": 2, "turn": torch.ones(()),
        "stranger": 7,
    }  # fmt: skip
    states.load(0, unit, kept)
    found = leaves(states.current[0])
    assert bool((residual_of(states) == 1.0).all())
    assert not bool(cast("torch.Tensor", found["velocity"]).any()), "of another shape"
    assert (found["warm_up_step"], found["turn"]) == (2, 0), "a tensor is no number"
    assert "stranger" not in found
    states.load(0, unit, {"residual": 3.0})
    assert not bool(residual_of(states).any()), "a number is no tensor"


def test_what_is_linear_in_the_gradients_is_rescaled() -> None:
    states = states_of("topk:0.1,momentum=0.5")[0]
    states.begin(0, torch.zeros(8))
    states.load(1, torch.zeros(8), {"residual": torch.ones(8), "velocity": torch.full((8,), 3.0)})
    states.rescale(0.5)
    found = leaves(states.current[1])
    assert bool((residual_of(states, 1) == 0.5).all())
    assert bool((cast("torch.Tensor", found["velocity"]) == 1.5).all())
    matrices = UnitStates(make_codec(CodecSpec.parse("powersgd:2")), GroupRank(0, 2))
    matrices.begin(0, torch.zeros(6, 8))
    factor = leaves(matrices.current[0])["q"]
    assert isinstance(factor, torch.Tensor)
    before = factor.clone()
    matrices.rescale(0.5)
    assert torch.equal(factor, before), "a factor is no gradient"
    plain = states_of("none")[0]
    plain.begin(0, torch.zeros(8))
    plain.rescale(2.0)
    assert plain.residual(0) is None


# -- a flat tensor ---------------------------------------------------------------------------------

SHAPES = ((3, 5), (4,), (2, 6))
OFFSETS = (0, 16, 24)


def flat_of(codec: str, **options: Any) -> CodedFlat:
    parts = [FlatPart(shape, torch.empty(shape).stride(), at) for shape, at in zip(SHAPES, OFFSETS, strict=True)]
    group = RankGroup((0, 1), 0)
    return CodedFlat(make_codec(CodecSpec.parse(codec)), group, torch.zeros(64), parts, **options)


def test_parts_and_what_lies_between_them() -> None:
    made, flat = flat_of("int8"), torch.arange(64.0)
    assert [part.shape for part in made.by_part(flat)] == [torch.Size(shape) for shape in SHAPES]
    assert [part.flatten()[0].item() for part in made.by_part(flat)] == [0.0, 16.0, 24.0]
    gaps = [(float(gap[0]), len(gap)) for gap in made.gaps(flat)]
    assert gaps == [(15.0, 1), (20.0, 4), (36.0, 28)]
    assert [part.numel for part in made.parts] == [15, 4, 12]
    assert made.bounds == (0, 64)


@pytest.mark.parametrize(
    ("shape", "strides", "matrix"),
    [
        ((6, 4), (4, 1), (6, 4)),
        ((6, 4), (1, 6), (4, 6)),
        ((6, 4, 5), (20, 5, 1), (6, 20)),
        ((1, 4, 5), (20, 5, 1), (4, 5)),
        ((6, 4, 2, 2), (16, 1, 8, 4), (6, 16)),
    ],
)
def test_rows_run_along_the_slowest_dimension(
    shape: tuple[int, ...], strides: tuple[int, ...], matrix: tuple[int, int]
) -> None:
    assert FlatPart(shape, strides, 0).matrix == matrix


def test_units_are_segments_of_this_ranks_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, ...]] = []

    def step(*how: int) -> int:
        asked.append(how)
        return 12

    monkeypatch.setattr("farandole.comm.codecs.units.segment_elements", step)
    made = flat_of("int8", bounds=(8, 40), local_size=2)
    assert asked == [(32, 2, 1023)]
    assert [(float(unit[0]), len(unit)) for unit in made.by_unit(torch.arange(64.0))] == [
        (8, 12),
        (20, 12),
        (32, 8),
    ]
    assert made.unit_shapes == [(12,), (12,), (8,)]
    assert [made.units_of(i) for i in range(3)] == [[0], [0, 1], [1, 2]]
    for k in range(3):
        residual_of(made.states, k).copy_(made.by_unit(torch.arange(64.0))[k])
    found = made.residuals_of(0)
    assert [(where, float(residual[0]), len(residual)) for where, residual in found] == [(slice(8, 15), 8.0, 7)]
    assert [where for where, _ in made.residuals_of(2)] == [slice(24, 32), slice(32, 36)]
    assert [residual.tolist() for _, residual in made.residuals_of(2)] == [
        [float(i) for i in range(24, 32)],
        [32.0, 33.0, 34.0, 35.0],
    ]
    assert made.residuals_of(1)[0][1].tolist() == [16.0, 17.0, 18.0, 19.0]
    unsent = made.unsent()
    assert unsent[1].tolist() == [32.0, 34.0, 36.0, 38.0], "the sum over the ranks of the host"
    assert unsent[0].flatten()[:8].tolist() == [0.0] * 8, "another rank has it"
    assert flat_of("none").unsent() == []


def test_parts_whose_state_overflowed_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farandole.comm.codecs.units.segment_elements", lambda *_: 12)
    made, flat = flat_of("topk:0.1"), torch.zeros(64)
    assert made.begin(made.by_unit(flat)) == []
    residual_of(made.states, 1)[5] = torch.nan  # element 17, of the second part
    assert made.begin(made.by_unit(flat)) == [1]
    assert made.begin(made.by_unit(flat)) == [], "it began anew"
    residual_of(made.states, 4)[0] = torch.inf  # element 48, behind the last part
    assert made.begin(made.by_unit(flat)) == [0, 1, 2], "a gap is nobody's: all of them may be concerned"


# -- several as one --------------------------------------------------------------------------------


def rounds(values: Sequence[float], shape: tuple[int, ...], operation: Any = "all_reduce") -> Encoding:
    """Send one message for each of `values`; the mean is all that was received."""
    received = torch.zeros(len(values) + 1, *shape)
    for i, value in enumerate(values):
        received[i] = yield Message(torch.full(shape, value), operation)
    return Encoded(received, torch.zeros(shape))


def test_encodings_of_different_lengths_travel_together() -> None:
    def all_of_a_rank(rank: int) -> Any:
        return fuse([rounds([1.0 + rank, 5.0], (2, 3)), rounds([], (1,)), rounds([10.0, 20.0, 30.0 * rank], (4,))])

    done = simulate([all_of_a_rank(rank) for rank in range(SIZE)])
    assert done.rounds == 3, "as many as the longest has"
    first, second, third = (encoded.mean for encoded in done.results[0])
    assert [float(each.flatten()[0]) for each in first] == [3.0, 10.0, 0.0]
    assert first.shape == (3, 2, 3)
    assert second.shape == (1, 1)
    assert [each.tolist() for each in third[:3]] == [[20.0] * 4, [40.0] * 4, [30.0] * 4]
    with pytest.raises(ValueError, match="a matrix codec yielded 'all_gather', expected only 'all_reduce'"):
        simulate([fuse([rounds([1.0], (2,), "all_gather")]) for _ in range(SIZE)])
