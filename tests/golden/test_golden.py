"""The code gives the losses and bytes on record. `python -m tests.golden --regenerate` records them anew."""

from __future__ import annotations

import dataclasses
import math

import pytest

from tests.golden.records import allowed, differences, read, this_machine
from tests.golden.trainings import STEPS, TRAININGS, Measured, run


@pytest.mark.gate_cases("int8")
@pytest.mark.parametrize("name", TRAININGS)
def test_a_training_gives_what_is_on_record(name: str) -> None:
    machine, recorded = read(name)
    lines = differences(recorded, run(name), tolerance=allowed(name, machine))
    assert not lines, "\n".join(
        [f"recorded on {machine}, this is {this_machine()}; if the change is meant, see CONTRIBUTING", *lines]
    )


@pytest.mark.parametrize("name", TRAININGS)
def test_the_model_on_record_learns(name: str) -> None:
    losses = read(name)[1].losses
    assert len(losses) == STEPS
    assert losses[-1] < 0.75 * losses[0], "a training that learns nothing would hide wrong gradients"


@pytest.mark.parametrize("name", TRAININGS)
def test_our_count_of_bytes_is_the_kernels_without_headers(name: str) -> None:
    recorded = read(name)[1]
    for own, kernel in zip(recorded.sent_bytes, recorded.tcp_bytes, strict=True):
        assert own <= kernel <= 1.1 * own, f"{own} bytes by our count, {kernel} by the kernel's"


def test_int8_sends_a_quarter() -> None:
    plain, coded = read("plain")[1], read("int8")[1]
    assert sum(coded.sent_bytes) < 0.28 * sum(plain.sent_bytes)


def changed(measured: Measured, **values: float) -> Measured:
    """Return a copy in which the last value of each named list is another."""
    lists = {key: [*getattr(measured, key)[:-1], value] for key, value in values.items()}
    return dataclasses.replace(measured, **lists)


@pytest.mark.parametrize("tolerance", [0.0, 1e-6])
def test_every_difference_is_found(tolerance: float) -> None:
    recorded = read("plain")[1]
    last = recorded.losses[-1]
    assert not differences(recorded, recorded, tolerance=tolerance)
    for other in (last * (1 + 2e-6), math.nan):
        (line,) = differences(recorded, changed(recorded, losses=other), tolerance=tolerance)
        assert line.startswith(f"loss of step {STEPS - 1}: {other!r}, recorded {last!r}")
    for bytes_of in ("sent_bytes", "tcp_bytes"):
        (line,) = differences(recorded, changed(recorded, **{bytes_of: 1}), tolerance=tolerance)
        assert line == f"{bytes_of} of rank 1: 1, recorded {getattr(recorded, bytes_of)[1]}"


def test_one_bit_is_a_difference_on_the_recorded_kind_of_machine_only() -> None:
    recorded = read("plain")[1]
    near = changed(recorded, losses=math.nextafter(recorded.losses[-1], math.inf))
    other_machine = dataclasses.replace(this_machine(), cpu_capability="NEON")
    assert len(differences(recorded, near, tolerance=allowed("plain", this_machine()))) == 1
    assert not differences(recorded, near, tolerance=allowed("plain", other_machine))
