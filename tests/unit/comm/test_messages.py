"""What each operation of a message carries to whom, what sums cost, and what no driver carries."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from farandole.comm.codecs.codec import FeedbackState, MomentumState, is_finite, without_overflow
from farandole.comm.codecs.quantize import Draws
from farandole.comm.codecs.registry import Exact
from farandole.comm.messages import (
    ONE_ROUND_BYTES,
    Encoded,
    Encoding,
    Exchanged,
    GroupRank,
    Message,
    SimulationResult,
    add_rows,
    as_encoding,
    check,
    received_shape,
    reduce_scatter_all_gather,
    simulate,
    sources_and_targets,
)

SIZES = [1, 2, 3, 5]


def say(message: Message) -> Encoding:
    received = yield message
    return Encoded(received, message.tensor)


def carried(operation: Any, size: int) -> SimulationResult:
    """Each rank says a matrix of its number, with a row for each other."""
    return simulate([say(Message(torch.full((size, 2), float(rank)), operation)) for rank in range(size)])


@pytest.mark.parametrize("size", SIZES)
def test_who_receives_what(size: int) -> None:
    everyone = torch.arange(float(size))[:, None, None].expand(size, size, 2)
    assert all(torch.equal(mean, everyone) for mean in carried("all_gather", size).means)
    assert all(torch.equal(mean, everyone.sum(0)) for mean in carried("all_reduce", size).means)
    assert all(torch.equal(mean, everyone[:, 0]) for mean in carried("all_to_all", size).means)
    assert all(torch.equal(mean, everyone[:1]) for mean in carried("broadcast", size).means)
    first, *others = carried("gather", size).means
    assert torch.equal(first, everyone)
    assert all(other.shape == (0, size, 2) for other in others)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("operation", ["all_gather", "gather", "broadcast", "all_to_all"])
def test_bytes_sent_and_shapes_received_are_those_of_the_simulated_wire(operation: Any, size: int) -> None:
    together = carried(operation, size)
    whole = 4 * size * 2
    row = whole // size
    expected = {
        "all_gather": [(size - 1) * whole] * size,
        "all_to_all": [(size - 1) * row] * size,
        "gather": [0] + [whole] * (size - 1),
        "broadcast": [(size - 1) * whole] + [0] * (size - 1),
    }[operation]
    assert together.sent_bytes == expected
    assert together.rounds == 1
    for rank, mean in enumerate(together.means):
        assert mean.shape == received_shape(Message(torch.zeros(size, 2), operation), GroupRank(rank, size))


@pytest.mark.parametrize("operation", ["all_gather", "all_to_all", "gather", "broadcast", "sendrecv"])
def test_what_one_sends_the_other_expects(operation: Any) -> None:
    size = 4
    ways = [
        sources_and_targets(
            Message(torch.zeros(size), operation, peer=rank ^ 1 if operation == "sendrecv" else None),
            GroupRank(rank, size),
        )
        for rank in range(size)
    ]
    sent = {(rank, target) for rank, (_, targets) in enumerate(ways) for target in targets}
    expected = {(source, rank) for rank, (sources, _) in enumerate(ways) for source in sources}
    assert sent == expected
    assert all(a != b for a, b in sent)
    if operation in ("all_gather", "all_to_all"):
        assert len(sent) == size * (size - 1)
        assert {targets[0] for _, targets in ways} == set(range(size)), "no link is everybody's first"
        assert {sources[0] for sources, _ in ways} == set(range(size))
    alone = sources_and_targets(Message(torch.zeros(1), "sendrecv", peer=2), GroupRank(2, 4))
    assert alone == ([], []), "its own peer"


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (Message(torch.zeros(2), "all_to_all"), r"all_to_all of shape \(2,\): expected 3 rows"),
        (Message(torch.tensor(0.0), "all_to_all"), r"all_to_all of shape \(\): expected 3 rows"),
        (Message(torch.zeros(2), "sendrecv"), "sendrecv with None: expected a peer of 0 to 2"),
        (Message(torch.zeros(2), "sendrecv", peer=3), "sendrecv with 3: expected a peer of 0 to 2"),
        (Message(torch.zeros(2), "sendrecv", peer=-1), "sendrecv with -1: expected a peer of 0 to 2"),
        (
            Message(torch.zeros(2, dtype=torch.int8), "all_reduce"),
            "all_reduce of torch.int8: expected a floating-point",
        ),
        (Message(torch.zeros(2), "average"), "unknown operation 'average'"),  # type: ignore[arg-type]
    ],
)
def test_what_no_driver_carries(message: Message, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        check(message, GroupRank(0, 3))


def test_what_every_driver_carries() -> None:
    for peer in range(3):
        check(Message(torch.zeros(2), "sendrecv", peer=peer), GroupRank(0, 3))
    check(Message(torch.zeros(3, 1, dtype=torch.int8), "all_to_all"), GroupRank(0, 3))
    check(Message(torch.zeros(2, dtype=torch.int8), "all_gather"), GroupRank(0, 3))


@pytest.mark.parametrize("more", [0, 1])
def test_a_sum_is_one_round_up_to_a_size_and_its_division_is_done_once(more: int) -> None:
    size, count = 4, ONE_ROUND_BYTES // 16 + more
    tensors = [torch.full((count,), rank + 1.0) for rank in range(size)]
    together = simulate(
        [reduce_scatter_all_gather(each, GroupRank(rank, size), 4) for rank, each in enumerate(tensors)]
    )
    assert together.rounds == 1 + more
    assert all(torch.equal(total, torch.full((count,), 2.5)) for total in together.results)
    assert [float(tensor[0]) for tensor in tensors] == [1, 2, 3, 4], "they are the caller's"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_mean_without_loss(dtype: torch.dtype) -> None:
    gradients = [torch.tensor([1.0, 60000.0, 3.0]).to(dtype) * (1 if rank else 0.5) for rank in range(3)]
    wanted = torch.stack([gradient.double() for gradient in gradients]).mean(0).to(dtype)
    together = simulate(
        [Exact().encode(each.clone(), None, GroupRank(rank, 3)) for rank, each in enumerate(gradients)]
    )
    for mean, own, gradient in zip(together.means, together.owns, gradients, strict=True):
        torch.testing.assert_close(mean, wanted, rtol=1e-6 if dtype.itemsize > 2 else 0, atol=0)
        assert mean.dtype == dtype
        assert torch.equal(own, gradient)


def test_rows_of_narrow_floats_are_added_up_in_float32() -> None:
    rows = torch.tensor([1.0, *[2.0**-9] * 4]).bfloat16()[:, None]
    assert add_rows(rows) == 1 + 2.0**-7
    assert add_rows(rows).dtype == torch.bfloat16
    assert torch.equal(add_rows(torch.ones(3, 2), 2), torch.full((2,), 1.5))


def test_ranks_that_end_at_different_times_are_told() -> None:
    def talk(rounds: int) -> Encoding:
        received = torch.zeros(1)
        for _ in range(rounds):
            received = yield Message(torch.zeros(1), "all_gather")
        return Encoded(received, received)

    with pytest.raises(ValueError, match="2 of 3 ranks have finished, the others go on"):
        simulate([talk(1), talk(2), talk(1)])


def test_an_exchange_in_place_can_be_simulated() -> None:
    def double(unit: torch.Tensor) -> Any:
        received = yield Message(unit, "all_gather")
        unit.copy_(received.sum(0))
        return Exchanged(True, None)

    units = [torch.ones(2), torch.full((2,), 3.0)]
    together = simulate([as_encoding(double(unit), unit) for unit in units])
    assert [mean.tolist() for mean in together.means] == [[4, 4], [4, 4]]


# -- finite numbers --------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_number_that_is_not_finite_is_seen(bad: float) -> None:
    values = torch.full((1000,), 3e38)
    assert is_finite(values), "their sum is not, but they are"
    values[500] = bad
    assert not is_finite(values)
    assert is_finite(torch.zeros(0))


def test_a_state_that_overflowed_begins_anew_with_its_numbers() -> None:
    def state(velocity: float, draws: int) -> MomentumState:
        feedback = FeedbackState(torch.full((3,), velocity), torch.zeros(3), Draws(1, draws))
        return MomentumState(torch.tensor([1.0, velocity, 1.0]), feedback)

    finite = state(2.0, 7)
    assert without_overflow(finite, lambda: state(0.0, 0)) is finite
    anew = without_overflow(state(float("inf"), 7), lambda: state(0.0, 0))
    assert (anew.velocity.tolist(), anew.feedback.residual.tolist()) == ([1, 0, 1], [0, 0, 0])
    assert anew.feedback.codec == Draws(1, 7)
