"""When codecs of named operations are chosen, and what operations get that are not as regular as others."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from farandole.comm.autotune.autotuner import CodecChoice
from farandole.comm.transport.transport import Transport
from farandole.core.bucket_plan import BucketPlan
from farandole.core.link import LinkModel
from farandole.horovod.named_ops import auto_codecs
from farandole.horovod.named_ops.auto_codecs import EXACT_ROUNDS, AutoCodecs, GivenBucket, MeasuredChoice
from farandole.horovod.named_ops.operations import Operation

LARGE, SMALL = (300, 300), (90_000,)
MEASURED: list[Sequence[GivenBucket]] = []


@pytest.fixture(autouse=True)
def _a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices get powersgd, and all else nothing."""
    MEASURED.clear()

    def choose(*place: Any) -> MeasuredChoice:
        buckets: Sequence[GivenBucket] = place[-1]
        MEASURED.append(buckets)
        codecs = {each.name: "powersgd:rank=4" if len(each.shape) > 1 else "none" for each in buckets}
        return MeasuredChoice(CodecChoice(BucketPlan(codecs, 1), 0.1), 1.0, LinkModel(1e6, 1e-3))

    monkeypatch.setattr(auto_codecs, "choose_for_buckets", choose)


class Rank:
    """One rank's operations, one after the other, by a clock of its own."""

    def __init__(self, hosts: Sequence[int] | None = None) -> None:
        self.auto = AutoCodecs(1, hosts)
        self.now = 100.0

    def exchange(
        self, name: str, shape: tuple[int, ...] = LARGE, *, process_set: int = 0, present: tuple[int, ...] = (0, 1)
    ) -> str:
        """Return the codec of an operation, which has come and gone."""
        signature = SimpleNamespace(name=name, shape=shape, process_set=process_set, chosen_with="SGD.0")
        ticket = SimpleNamespace(waits_since_seconds=None)
        operation = cast(
            Operation,
            SimpleNamespace(signature=signature, present=present, ticket=ticket, submitted_seconds=self.now),
        )
        codec, choose = self.auto.next(operation, None)
        if choose is not None:
            choose(cast(Transport, None))
        self.auto.landed(operation, lambda *result: None)
        return codec


def test_the_first_rounds_are_exact_and_the_next_one_chooses() -> None:
    rank = Rank()
    for _ in range(EXACT_ROUNDS + 1):
        assert not MEASURED
        assert [rank.exchange("a"), rank.exchange("b", SMALL)] == ["none", "none"]
    assert [rank.exchange("a"), rank.exchange("b", SMALL)] == ["powersgd:rank=4", "none"]
    ((first, second),) = MEASURED
    assert (first[:2], second[:2]) == (("a", LARGE), ("b", SMALL))


def test_names_that_are_not_in_every_round_are_chosen_for_too() -> None:
    rank = Rank()
    for number in range(EXACT_ROUNDS):
        rank.exchange("a")
        if number == 1:
            rank.exchange("b")
    assert rank.exchange("a") == "none"
    assert rank.exchange("a") == "powersgd:rank=4"
    assert rank.exchange("b") == "none", "once more: the choice may be under way on another rank"
    assert rank.exchange("b") == "powersgd:rank=4"


def test_what_comes_later_takes_the_codec_of_most_but_none_of_matrices() -> None:
    rank = Rank()
    for _ in range(EXACT_ROUNDS + 1):
        rank.exchange("a")
    assert rank.exchange("a") == "powersgd:rank=4"
    assert rank.exchange("a", SMALL) == "int8", "another shape is another bucket"
    assert [rank.exchange("late", SMALL) for _ in range(3)] == ["none", "int8", "int8"]
    assert len(MEASURED) == 1


def test_sets_choose_by_themselves_and_a_removed_one_is_forgotten() -> None:
    rank = Rank()
    for _ in range(EXACT_ROUNDS + 1):
        rank.exchange("a", process_set=3)
    assert rank.exchange("a", process_set=3) == "powersgd:rank=4"
    assert rank.exchange("a") == "none"
    rank.auto.forget(3)
    assert [rank.exchange("a", process_set=3) for _ in range(EXACT_ROUNDS + 2)][-2:] == ["none", "powersgd:rank=4"]


def test_without_a_link_nothing_is_chosen() -> None:
    one_host, alone = Rank(hosts=[0, 0, 1]), Rank()
    for _ in range(EXACT_ROUNDS + 3):
        assert one_host.exchange("a") == "none"
        assert alone.exchange("a", present=(1,)) == "none"
    assert not MEASURED
    for _ in range(EXACT_ROUNDS + 1):
        one_host.exchange("a", present=(0, 1, 2))
    assert one_host.exchange("a", present=(0, 1, 2)) == "powersgd:rank=4"


def test_waits_of_a_thread_are_no_computing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each round computes 0.1 s for "a" and 0.2 s for "b", and a thread waits a second for "a" in between."""
    rank = Rank()
    clock = SimpleNamespace(monotonic=lambda: rank.now)
    monkeypatch.setattr(auto_codecs, "time", clock)
    for _ in range(EXACT_ROUNDS + 1):
        for name, computing in (("a", 0.1), ("b", 0.2)):
            rank.now += computing
            signature = SimpleNamespace(name=name, shape=LARGE, process_set=0, chosen_with="SGD.0")
            operation: Any = SimpleNamespace(
                signature=signature, present=(0, 1), submitted_seconds=rank.now,
                ticket=SimpleNamespace(waits_since_seconds=rank.now),
            )  # fmt: skip
            _, choose = rank.auto.next(operation, None)
            if choose is not None:
                choose(cast(Transport, None))
            rank.now += 1.0
            rank.auto.landed(operation, lambda *result: None)
    ((first, second),) = MEASURED
    assert (first.ready_seconds, second.ready_seconds) == pytest.approx((0.1, 0.3))
