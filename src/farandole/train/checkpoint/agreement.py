"""One answer for all ranks: a problem that one rank has is raised on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ...comm.world.store_sync import all_gather_json
from ...comm.world.world import World
from ...core.vocabulary.errors import CheckpointError, FarandoleError
from ...core.vocabulary.rank_lists import name_ranks

_Result = TypeVar("_Result")


def together(here: World, topic: str, act: Callable[[], _Result]) -> _Result:
    """Return what `act` returns, once it succeeded on all ranks. Raises `CheckpointError` on all otherwise."""
    return together_saying(here, topic, act, lambda _: None)[0]


def together_saying(
    here: World, topic: str, act: Callable[[], _Result], say: Callable[[_Result], Any]
) -> tuple[_Result, list[Any]]:
    """Like `together`, and return also what each rank says of its result: a JSON value."""
    problem: FarandoleError | OSError | None = None
    result: Any = None
    message: dict[str, Any] = {}
    try:
        result = act()
        message["said"] = say(result)
    except (FarandoleError, OSError) as caught:
        problem = caught
        message = _to_json(caught)
    answers = all_gather_json(here, f"checkpoint/{topic}", message)
    failed = [rank for rank, answer in enumerate(answers) if "problem" in answer]
    if not failed:
        return result, [answer["said"] for answer in answers]
    first = answers[failed[0]]
    where = "" if here.size == 1 or len(failed) == here.size else f"{name_ranks(failed)}: "
    raise CheckpointError(
        where + first["problem"], is_input=first["is_input"], remedy=first["remedy"]
    ) from problem


def _to_json(problem: FarandoleError | OSError) -> dict[str, Any]:
    if isinstance(problem, FarandoleError):
        return {"problem": problem.message, "remedy": problem.remedy, "is_input": problem.exit_code == 2}
    return {"problem": f"{problem.strerror}: {problem.filename}", "remedy": "", "is_input": False}
