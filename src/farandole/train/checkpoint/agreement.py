"""One answer for all ranks: a problem that one rank has is raised on every rank; which checkpoint is loaded."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

from ...checkpoint.directory import read_manifest_bytes, saved_steps, step_directory
from ...checkpoint.listing import last_good_step, verify_checkpoint
from ...checkpoint.manifest import NAME, Manifest, parse_manifest
from ...comm.world.store_sync import all_gather_json
from ...comm.world.world import World
from ...core.vocabulary.errors import CheckpointError, FarandoleError
from ...core.vocabulary.text import name_ranks, write_notice

_Result = TypeVar("_Result")


def together(here: World, topic: str, act: Callable[[], _Result]) -> _Result:
    """Return what `act` returns, once it succeeded on all ranks. Raises `CheckpointError` on all otherwise.

    An error that is no `FarandoleError` or `OSError` (a `RuntimeError` of torch, say) is raised as it is on the
    rank that had it.
    """
    return together_saying(here, topic, act, lambda _: None)[0]


def together_saying(
    here: World, topic: str, act: Callable[[], _Result], say: Callable[[_Result], Any]
) -> tuple[_Result, list[Any]]:
    """Like `together`, and return also what each rank says of its result: a JSON value."""
    problem: Exception | None = None
    result: Any = None
    message: dict[str, Any] = {}
    try:
        result = act()
        message["said"] = say(result)
    except Exception as caught:  # of any kind: the other ranks wait for the answer
        problem = caught
        message = _to_json(caught)
    answers = all_gather_json(here, f"checkpoint/{topic}", message)
    failed = [rank for rank, answer in enumerate(answers) if "problem" in answer]
    if not failed:
        return result, [answer["said"] for answer in answers]
    if problem is not None and not isinstance(problem, (FarandoleError, OSError)):
        raise problem
    first = answers[failed[0]]
    where = "" if here.size == 1 or len(failed) == here.size else f"{name_ranks(failed)}: "
    raise CheckpointError(
        where + first["problem"], is_input=first["is_input"], remedy=first["remedy"]
    ) from problem


@contextmanager
def named(name: str, remedy: str) -> Iterator[None]:
    """Raise `CheckpointError` with the name of what refuses its state, whatever its own code raises."""
    try:
        yield
    except FarandoleError:
        raise
    except Exception as problem:
        raise CheckpointError(
            f"the checkpoint's state of {name} cannot be loaded: {type(problem).__name__}: {problem}",
            is_input=True,
            remedy=remedy,
        ) from problem


def find_good_step(directory: Path, here: World) -> int | None:
    """Return the last step whose checkpoint is whole, the same on all ranks; None if there is no checkpoint.

    Raises `CheckpointError` on all ranks if there are some, and none is whole.
    """

    def find() -> int | None:
        if here.rank > 0 or not saved_steps(directory):
            return None
        last = saved_steps(directory)[-1]
        try:
            verify_checkpoint(directory, last)
        except CheckpointError as problem:
            good = last_good_step(directory, last)
            if good is None:
                raise
            write_notice(f"ALARM: {problem.message}; loading the last good one, of step {good}")
            return good
        return last

    return cast("int | None", together_saying(here, "find good", find, lambda found: found)[1][0])


def find_manifest(directory: Path, step: int | None, here: World) -> Manifest:
    """Return the manifest of a checkpoint, of the last one by default. Raises `CheckpointError` on all ranks."""

    def choose() -> int:
        steps = saved_steps(directory)
        if not steps:
            what = "no checkpoint in it" if directory.is_dir() else "no such directory"
            raise CheckpointError(f"{directory}: {what}", is_input=True)
        if step is not None and step not in steps:
            listed = ", ".join(map(str, steps[-8:]))
            raise CheckpointError(f"{directory} has no checkpoint of step {step}, only of {listed}", is_input=True)
        return steps[-1] if step is None else step

    _, said = together_saying(here, "find", lambda: choose() if here.rank == 0 else -1, lambda found: found)
    chosen = said[0]

    def read() -> tuple[Manifest, str]:
        data = read_manifest_bytes(directory, chosen)
        try:
            manifest = parse_manifest(data, str(step_directory(directory, chosen) / NAME), chosen)
        except CheckpointError as problem:
            raise with_offer(problem, directory, chosen) from None
        return manifest, hashlib.sha256(data).hexdigest()

    (manifest, _), digests = together_saying(here, "manifest", read, lambda result: result[1])
    if len(set(digests)) > 1:
        raise CheckpointError(
            f"the hosts see different checkpoints in {directory}",
            is_input=True,
            remedy="give a directory of a file system that all hosts share",
        )
    return manifest


def with_offer(problem: CheckpointError, directory: Path, step: int) -> CheckpointError:
    """Return an error about a damaged checkpoint that names the last good one."""
    good = last_good_step(directory, step)
    offer = "there is no earlier one that is whole" if good is None else f"load the last good one: step={good}"
    return CheckpointError(problem.message, is_input=True, remedy=problem.remedy or offer)


def _to_json(problem: Exception) -> dict[str, Any]:
    if isinstance(problem, FarandoleError):
        return {"problem": problem.message, "remedy": problem.remedy, "is_input": problem.exit_code == 2}
    if isinstance(problem, OSError):
        return {"problem": f"{problem.strerror}: {problem.filename}", "remedy": "", "is_input": False}
    return {"problem": f"{type(problem).__name__}: {problem}", "remedy": "", "is_input": False}
