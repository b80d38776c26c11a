"""How the ranks of a group meet: all of them come, and all mean the same group.

torch names a group by counting the calls of `new_group`. Ranks that make their groups in different orders meet at
the same name for different groups: that is a `Mismatch`, and no group in which some are missing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import NoReturn

from ...core.vocabulary.errors import Mismatch, Stalled
from ...core.vocabulary.rank_lists import name_ranks
from ..world.comm_errors import translate_error, translated
from ..world.world import World

_MAKING = "making a group"


def meet(world: World, names: Sequence[int], mine: str) -> list[str]:
    """Return the text `mine` of every rank of the group, by rank in the group.

    Args:
        world: the ranks of the group alone, with a store that is new.
        names: their global ranks, for errors.
        mine: what this rank has to say.

    Raises:
        Mismatch: another rank means a group of other ranks.
        Stalled: some ranks do not come; it names them.
    """
    if world.store is None:
        return [mine]
    members = list(names)
    keys = [f"here/{rank}" for rank in range(world.size)]
    text = json.dumps([members, mine])
    with translated(world, _MAKING):
        world.store.set(keys[world.rank], text)
        # Ranks that mean a larger group would wait for those that will not come: who is first decides ...
        first = json.loads(world.store.compare_set("members", "", json.dumps(members)))
        if first != members:
            # ... and a rank that means another group says so under the name of each rank that is still missing.
            for rank in range(len(first)):
                world.store.compare_set(f"here/{rank}", "", text)
    _require_same(members, first, names[world.rank])
    try:
        world.store.wait(keys, timedelta(seconds=world.timeout_seconds))
        said = [json.loads(value) for value in world.store.multi_get(keys)]
    except RuntimeError as problem:
        _raise_missing(world, names, keys, problem)
    for theirs, _ in said:
        _require_same(members, theirs, names[world.rank])
    return [text for _, text in said]


def _require_same(mine: list[int], theirs: list[int], rank: int) -> None:
    if mine != theirs:
        raise Mismatch(
            f"this rank makes a group of ranks {mine}, another one a group of {theirs} in its place",
            rank=rank,
            operation=_MAKING,
            remedy="all ranks must make the same groups in the same order, also those that they are not in",
        )


def _raise_missing(world: World, names: Sequence[int], keys: Sequence[str], problem: RuntimeError) -> NoReturn:
    missing: list[int] = []
    if world.store is not None:
        with suppress(RuntimeError):  # the store is gone: that is the failure
            missing = [name for name, key in zip(names, keys, strict=True) if not world.store.check([key])]
    if not missing:
        raise translate_error(problem, world, _MAKING) from None
    raise Stalled(
        f"{name_ranks(missing)} did not come within {world.timeout_seconds:g} s",
        rank=names[world.rank],
        operation=_MAKING,
        remedy="every rank of a group must make it; the log of a rank that is missing may say why",
    ) from None
