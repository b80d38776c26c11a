"""The order of large operations: nothing lost, nothing split, nothing together that does not belong."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from farandole.horovod.named_ops.launch_order import IN_FLIGHT, Batch, Coordinator, ReadyGroup


@given(seed=st.integers(0, 10**6), fusion_bytes=st.integers(0, 200))
def test_every_unit_is_released_once_with_its_like(seed: int, fusion_bytes: int) -> None:
    chance = random.Random(seed)
    coordinator = Coordinator(fusion_bytes)
    made: list[ReadyGroup] = []
    out: list[Batch] = []
    on_their_way: list[Batch] = []
    for step in range(60):
        if step < 40:
            keys = tuple((0, f"{step}.{i}") for i in range(chance.randint(1, 3)))
            ranks = chance.choice([(0, 1), (1, 2), (0, 1, 2)])
            unit = ReadyGroup(keys, ranks, chance.choice("ab"), chance.randint(1, 99), chance.random() < 0.8)
            made.append(unit)
            coordinator.ready(unit)
        if on_their_way and (step >= 40 or chance.random() < 0.4):
            coordinator.done(on_their_way.pop(chance.randrange(len(on_their_way))).number)
        released = coordinator.release()
        out += released
        on_their_way += released
        for ranks in {batch.ranks for batch in on_their_way}:
            assert sum(batch.ranks == ranks for batch in on_their_way) <= IN_FLIGHT
    while on_their_way:
        coordinator.done(on_their_way.pop().number)
        released = coordinator.release()
        out += released
        on_their_way += released
    assert [batch.number for batch in out] == list(range(len(out)))
    assert sorted(unit.keys for batch in out for unit in batch.units) == sorted(unit.keys for unit in made)
    for batch in out:
        assert len({(unit.ranks, unit.kind_text) for unit in batch.units}) == 1
        if len(batch.units) > 1:
            assert all(unit.fuses for unit in batch.units)
            assert sum(unit.nbytes for unit in batch.units) <= fusion_bytes


def test_what_is_ready_while_the_network_is_busy_travels_together() -> None:
    coordinator = Coordinator(10**6)
    for i in range(2):
        coordinator.ready(ReadyGroup(((0, f"{i}"),), (0, 1), "f32", 10, True))
        assert len(coordinator.release()) == 1
    for i in range(5):
        coordinator.ready(ReadyGroup(((0, f"late{i}"),), (0, 1), "f32", 10, True))
        assert not coordinator.release()
    coordinator.ready(ReadyGroup(((1, "other"),), (2, 3), "f32", 10, True))
    assert [batch.ranks for batch in coordinator.release()] == [(2, 3)]
    coordinator.done(0)
    (batch,) = coordinator.release()
    assert len(batch.keys) == 5
