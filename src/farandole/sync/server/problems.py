"""Errors as JSON: what a reply and a snapshot say of one. A name, a text and a remedy; no pickle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...core.vocabulary import errors
from ...core.vocabulary.errors import CommError, FarandoleError


def write_problem(problem: FarandoleError) -> dict[str, str]:
    """Return an error as JSON values."""
    return {"kind": type(problem).__name__, "message": problem.message, "remedy": problem.remedy}


def read_problem(said: Mapping[str, str], *, rank: int, operation: str) -> FarandoleError:
    """Return the error that `write_problem` was given; `rank` and `operation` are those of who raises it now."""
    kind: Any = getattr(errors, said["kind"], FarandoleError)
    message, remedy = said["message"], said["remedy"]
    made: FarandoleError = (
        kind(message.partition(": ")[2], rank=rank, operation=operation, remedy=remedy)
        if issubclass(kind, CommError)
        else kind(message, remedy=remedy)
    )
    return made
