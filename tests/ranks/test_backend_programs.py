"""Generated programs (`tests.programs.exchanges`) on groups of the backend "farandole".

A program that fails is in the message with its seed.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

import farandole as fd
from tests.programs.exchanges import draw, play
from tests.ranks.pool import ranks, takes
from tests.ranks.test_backend import as_if_apart, make

LAYOUTS = {"one host": 0, "messages": 1, "two a host": 2}
"""How many ranks a host pretends to have; 0: all."""
FEW, MANY = 5, 56
"""Programs a test; `make test-all` plays MANY more, 504 in all."""


def play_all(seeds: Iterable[int], ranks_a_host: int) -> None:
    """Play the programs on this rank, each on groups of its own."""
    size = fd.init().size
    with as_if_apart(bool(ranks_a_host), max(ranks_a_host, 1)):
        for seed in seeds:
            play(draw(seed, size), make)
    fd.shutdown()


@pytest.mark.gate_cases("4-two a host", "2-messages", "3-two a host")
@pytest.mark.parametrize("layout", LAYOUTS)
@ranks(2, 3, 4)
@takes(60)
def test_programs_give_what_their_inputs_say(layout: str) -> None:
    play_all(range(FEW), LAYOUTS[layout])


@pytest.mark.full("slow")
@pytest.mark.parametrize("layout", LAYOUTS)
@ranks(2, 3, 4)
@takes(500)
def test_many_programs_give_what_their_inputs_say(layout: str) -> None:
    play_all(range(FEW, FEW + MANY), LAYOUTS[layout])
