"""Errors of operations: Horovod's, which are TensorFlow's too, as scripts catch either.

| what | TensorFlow's | Horovod's |
|---|---|---|
| ranks asked for different things | FailedPreconditionError | HorovodMismatchError |
| this rank's arguments are invalid | InvalidArgumentError | (ValueError) |
| another rank is gone | UnknownError | HorovodPeerLostError |
| another rank did not come in time | UnknownError | HorovodStalledError |
| everything else, after a shutdown too | AbortedError | HorovodInternalError |

Inside a graph TensorFlow makes the error itself, of a code and a text; `exchange.names` knows what it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..common.exceptions import (
    HorovodInternalError,
    HorovodMismatchError,
    HorovodPeerLostError,
    HorovodStalledError,
)
from ..exchange.names import failures as failures  # noqa: PLC0414 - others take it from here
from .installed import tf

_SESSION = (
    "{title}: sessions of TensorFlow 1 are not supported: run it eagerly or in a tf.function, without "
    "tf.compat.v1.disable_eager_execution() and outside `with tf.Graph().as_default()`"
)

INVALID_ARGUMENT, UNKNOWN, FAILED_PRECONDITION, ABORTED, INTERNAL = 3, 2, 9, 10, 13
"""TensorFlow's codes."""


def code_of(problem: BaseException) -> int:
    """Return TensorFlow's code for an error of an operation."""
    if isinstance(problem, HorovodMismatchError):
        return FAILED_PRECONDITION
    if isinstance(problem, (HorovodPeerLostError, HorovodStalledError)):
        return UNKNOWN
    if isinstance(problem, HorovodInternalError):
        return ABORTED
    return INVALID_ARGUMENT if isinstance(problem, (ValueError, TypeError)) else INTERNAL


def _both(theirs: Any, ours: type[Exception]) -> Any:
    """Return a class of errors that are TensorFlow's and Horovod's."""
    name = theirs.__name__ if ours is ValueError else ours.__name__
    return type(name, (theirs, ours), {"__doc__": ours.__doc__, "__module__": __name__})


_CLASSES: list[tuple[type[Exception], Any]] = [
    (HorovodMismatchError, _both(tf.errors.FailedPreconditionError, HorovodMismatchError)),
    (HorovodPeerLostError, _both(tf.errors.UnknownError, HorovodPeerLostError)),
    (HorovodStalledError, _both(tf.errors.UnknownError, HorovodStalledError)),
    (HorovodInternalError, _both(tf.errors.AbortedError, HorovodInternalError)),
    (ValueError, _both(tf.errors.InvalidArgumentError, ValueError)),
]


def raised_in_eager(problem: Exception, title: str) -> Exception:
    """Return what an operation raises outside graphs."""
    known: bool = isinstance(problem, tf.errors.OpError)
    if known:
        return problem
    for kind, made in _CLASSES:
        if isinstance(problem, kind):
            error: Exception = made(None, None, f"{title}: {problem}")
            return error
    return problem


def session_refused(title: str) -> NotImplementedError:
    """Return the error for `title`, which would need a session of TensorFlow 1."""
    return NotImplementedError(_SESSION.format(title=title))


def refuse_session(title: str) -> None:
    """Raise NotImplementedError while a graph of TensorFlow 1 is made: only a session runs it, as it likes.

    A session leaves out what it was not asked for, on one rank perhaps and not on another.
    """
    if not tf.executing_eagerly() and not tf.compat.v1.get_default_graph().building_function:
        raise session_refused(title)


@contextmanager
def translated(title: str) -> Iterator[None]:
    """Raise what scripts expect for what goes wrong in the operation `title`."""
    try:
        yield
    except (HorovodInternalError, ValueError) as problem:
        raise raised_in_eager(problem, title) from problem
