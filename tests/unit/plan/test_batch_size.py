"""The batch that hides communication, and the one that reaches a loss first."""

from __future__ import annotations

import json

import pytest

from farandole.core.vocabulary.errors import ConfigError
from farandole.plan.batch_advice import (
    BatchQuestion,
    StepTime,
    StepTimes,
    advise,
    hiding_batch,
    relative_samples,
    relative_steps,
    to_text,
)


def a_link(
    exchange_seconds: float, *, fixed_seconds: float = 0.0, largest: int = 10**9, asked: list[int] | None = None
) -> StepTimes:
    """A step that computes 1 ms a sample, behind which an exchange hides but for 1 ms."""

    def times(batch: int) -> StepTime:
        if asked is not None:
            asked.append(batch)
        compute = fixed_seconds + 0.001 * batch
        exposed = max(0.001, exchange_seconds - 0.001 * batch)
        return StepTime(batch, compute + exposed, exposed, fits=batch <= largest)

    return times


@pytest.mark.parametrize("multiple", [1, 4, 7])
@pytest.mark.parametrize("exchange_ms", [0, 3, 50, 1234])
def test_the_smallest_batch_that_hides_is_that_of_a_search_through_all(multiple: int, exchange_ms: int) -> None:
    times = a_link(exchange_ms / 1000)
    limit = 0.05
    expected = next(b for b in range(multiple, 5000, multiple) if times(b).exposed_share <= limit)
    found = hiding_batch(times, multiple=multiple, most=5000, exposed_share=limit)
    assert found is not None, "a batch below the largest hides"
    assert found.global_batch == expected, "bisection finds what looking at all batches finds"


def test_few_predictions_are_asked_for() -> None:
    asked: list[int] = []
    found = hiding_batch(a_link(1000.0, asked=asked), multiple=8, most=2**24, exposed_share=0.05)
    assert found is not None, "a batch hides"
    assert found.global_batch > 900_000, "a slow link needs a large batch"
    assert len(asked) <= 40, f"{len(asked)} predictions for a search over 2 million batches"


def test_no_batch_is_found_where_none_hides_or_none_fits() -> None:
    for times, most, why in (
        (a_link(1.0), 100, "the largest batch is too small"),
        (a_link(1.0, largest=500), 10**6, "what hides does not fit into the memory"),
        (a_link(1.0), 3, "fewer samples than ranks"),
        (lambda batch: StepTime(batch, 0.002 * batch, 0.001 * batch), 10**6, "what grows with the batch"),
    ):
        assert hiding_batch(times, multiple=4, most=most, exposed_share=0.05) is None, why


def test_at_the_critical_batch_both_costs_are_twice_the_least() -> None:
    assert (relative_steps(500, 500), relative_samples(500, 500)) == (2.0, 2.0), "equation 2.11 at B = B_noise"
    for batch in (1, 30, 500, 10**5):
        product = (relative_steps(batch, 500) - 1) * (relative_samples(batch, 500) - 1)
        assert product == pytest.approx(1.0), "(S / S_min - 1) (E / E_min - 1) = 1"


def test_time_to_loss_is_recommended_and_not_throughput() -> None:
    """Beyond the batch that hides, throughput still grows by a fixed part of each step; samples are wasted."""
    times = a_link(0.4, fixed_seconds=0.02)
    advice = advise({"none": times}, BatchQuestion(ranks=4, current=64, critical_batch=300.0))
    best = advice.recommended
    assert best is not None, "the critical batch is known"
    fastest = max(advice.points, key=lambda point: point.samples_per_second)
    assert fastest.global_batch > best.global_batch, "the largest batch has the highest throughput"
    exact = {b: times(b).seconds * (1 + 300 / b) for b in range(4, 8192, 4)}
    assert exact[best.global_batch] <= 1.05 * min(exact.values()), "the table holds a batch near the optimum"
    assert (best.time_to_loss or 9.0) <= 1.02, "times are relative to the best"


def test_a_codec_is_compared_with_a_larger_batch() -> None:
    """With a critical batch far below what hides an exact exchange, sending less is better than a larger batch."""
    times = {"none": a_link(4.0), "int8": a_link(1.0)}
    advice = advise(times, BatchQuestion(ranks=2, current=128, critical_batch=100.0))
    assert 0 < (advice.hiding["int8"] or 0) < (advice.hiding["none"] or 0), "fewer bytes hide behind less"
    times_to_loss = {codec: best.time_to_loss or 0.0 for codec, best in advice.best.items()}
    assert times_to_loss["int8"] < 0.8 * times_to_loss["none"], "it reaches a loss first"
    assert getattr(advice.recommended, "codec", None) == "none", "but what loses nothing is recommended"
    assert "Codec int8 with" in to_text(advice), "and the text says what the other would save"


def test_without_a_critical_batch_nothing_is_recommended() -> None:
    advice = advise({"none": a_link(0.5)}, BatchQuestion(ranks=2, current=32))
    assert advice.recommended is None, "throughput alone recommends nothing"
    assert "fd.noise_scale(model)" in to_text(advice), "the text says how to measure it"


def test_the_answer_is_text_of_100_columns_and_json() -> None:
    times = {"none": a_link(4.0, fixed_seconds=0.1), "powersgd:rank=4": a_link(1.0, fixed_seconds=0.1)}
    advice = advise(times, BatchQuestion(ranks=8, current=1024, critical_batch=123456.7), notes=["a note"])
    text = to_text(advice)
    assert max(map(len, text.splitlines())) <= 100, text
    assert all(word in text for word in ("best", "hides", "now", "note: a note", "powersgd:rank=4")), text
    values = json.loads(json.dumps(advice.to_mapping()))
    assert values["hiding"] == dict(advice.hiding), "JSON has the batch that hides by codec"
    assert len(values["points"]) == len(advice.points), "JSON has all points"
    assert values["recommended"]["global_batch"] == getattr(advice.recommended, "global_batch", None), (
        "and the best"
    )


@pytest.mark.parametrize(
    ("bad", "word"),
    [
        ({"critical_batch": 0.0}, "critical batch 0"),
        ({"critical_batch": -3.0}, "critical batch -3"),
        ({"critical_batch": float("nan")}, "critical batch nan"),
        ({"critical_batch": float("inf")}, "critical batch inf"),
        ({"exposed_share": 0.0}, "exposed share 0"),
        ({"exposed_share": 1.0}, "exposed share 1"),
        ({"ranks": 0}, "ranks = 0"),
        ({"multiple": -1}, "multiple = -1"),
        ({"most": 0}, "most = 0"),
        ({"current": 0}, "global batch 0"),
    ],
)
def test_a_question_without_sense_is_refused(bad: dict[str, float], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        BatchQuestion(**{"ranks": 2, **bad})  # type: ignore[arg-type]
