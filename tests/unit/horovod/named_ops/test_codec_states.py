"""What codecs of named operations keep: by circle, for names that come again, and not without end."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from farandole.comm.codecs.units import UnitStates
from farandole.comm.messages import GroupRank
from farandole.horovod.named_ops import data_plane as codec_states
from farandole.horovod.named_ops.data_plane import StatesByName
from farandole.horovod.named_ops.operations import Operation, is_unnamed

PAIR = GroupRank(0, 2)


def operation(name: str, *, codec: str = "int8", shape: tuple[int, ...] = (8,), **place: Any) -> Operation:
    """Return as much of an operation as is looked at."""
    process_set, present = place.get("process_set", 0), place.get("present", (0, 1))
    signature = SimpleNamespace(key=(process_set, name), codec=codec, shape=shape)
    return cast("Operation", SimpleNamespace(signature=signature, present=present))


def of(states: StatesByName, asked: Operation, device: str = "cpu") -> UnitStates:
    return states.of(asked, asked.signature.codec, PAIR, torch.device(device))


@pytest.mark.parametrize(
    ("name", "unnamed"),
    [
        ("allreduce.noname.7", True),
        ("grouped_allreduce.noname.set2.7.0", True),
        ("allreduce.noname.join1.7", True),
        ("allreduce.w", False),
        ("allreduce.allreduce.noname.0.3", False),  # a parameter that has no name: it comes in every step
        ("noname", False),
        ("", False),
    ],
)
def test_which_operations_have_no_name(name: str, unnamed: bool) -> None:
    assert is_unnamed(name) == unnamed


def test_nothing_is_kept_without_a_name() -> None:
    states = StatesByName()
    first = of(states, operation("allreduce.noname.1"))
    assert of(states, operation("allreduce.noname.1")) is not first
    assert states._circles == {}


def test_a_name_keeps_its_state_until_its_codec_its_shape_or_its_place_changes() -> None:
    states = StatesByName()
    kept = of(states, operation("w"))
    assert of(states, operation("w")) is kept
    assert of(states, operation("w"), "meta") is not kept
    assert of(states, operation("w", shape=(9,))) is not kept
    other = of(states, operation("w", shape=(9,), codec="bf16"))
    assert of(states, operation("w", shape=(9,), codec="bf16")) is other


def test_ranks_that_had_joined_find_what_all_had_before() -> None:
    """The others' operations meanwhile, which a joined rank does not see, change nothing of it."""
    stayed, joined = StatesByName(), StatesByName()
    before = (
        of(stayed, operation("w", codec="randomk:0.1")),
        of(joined, operation("w", codec="randomk:0.1")),
    )
    of(stayed, operation("w", codec="randomk:0.1", present=(0,)))
    assert of(stayed, operation("w", codec="randomk:0.1")) is before[0]
    assert of(joined, operation("w", codec="randomk:0.1")) is before[1]


def test_a_removed_set_takes_its_states_along() -> None:
    states = StatesByName()
    kept = of(states, operation("w"))
    of(states, operation("w", process_set=1))
    of(states, operation("w", process_set=1, present=(1,)))
    states.forget(1)
    assert list(states._circles) == [(0, (0, 1))]
    assert of(states, operation("w")) is kept


def test_of_names_that_come_once_each_the_last_are_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(codec_states, "MOST_NAMES", 3)
    states = StatesByName()
    again = of(states, operation("again"))
    with caplog.at_level(logging.WARNING, "farandole"):
        for step in range(9):
            of(states, operation(f"x{step}"))
            assert of(states, operation("again")) is again
    assert list(states._circles[0, (0, 1)]) == ["x7", "x8", "again"]
    (warning,) = caplog.messages
    assert "operations of more than 3 names used codecs: the residual of 'x0'" in warning
