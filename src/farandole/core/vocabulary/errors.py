"""The errors a user can meet. Each says what happened, with the values, and what to do.

::

    FarandoleError              exit code 1
    |-- ConfigError             bad argument, option, file or environment: exit code 2
    |   |-- PlanError           a plan that cannot be read or applied
    |   `-- DataError           a data set that is missing or not what its format says
    |-- CheckpointError         a checkpoint that cannot be written, read or applied
    |-- LaunchError             a process could not be started or watched
    |-- CommError               ranks talking to each other; carries rank, operation, bucket
    |   |-- PeerLost            another rank is gone
    |   |-- Mismatch            ranks disagree on what they are about to do
    |   `-- Stalled             a wait reached its end
    `-- VerificationFailed      `fd.verify` found ranks that differ
"""

from __future__ import annotations


class FarandoleError(Exception):
    """Base of all errors that Farandole raises on purpose. `exit_code` is the exit code of a command.

    Args:
        message: what happened, with the values, and what was expected.
        remedy: what to do, as a command or a change.
    """

    exit_code = 1

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message}; {self.remedy}" if self.remedy else self.message

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword-only state survives the trip through a DataLoader worker or a Future.
        return (_rebuild, (type(self), self.args, dict(self.__dict__)))


def _rebuild(kind: type[FarandoleError], args: tuple[object, ...], state: dict[str, object]) -> FarandoleError:
    error = kind.__new__(kind)
    Exception.__init__(error, *args)
    error.__dict__.update(state)
    return error


class ConfigError(FarandoleError):
    """Invalid user input: an argument, an option, a file or a variable. Exit code 2."""

    exit_code = 2


class PlanError(ConfigError):
    """A plan cannot be read, or cannot be applied to this model or world."""


class DataError(ConfigError):
    """A data set that is missing, unreadable or not in the format it was said to be in."""


class CheckpointError(FarandoleError):
    """A checkpoint could not be written, or is none that can be loaded here. Raised on every rank.

    Args:
        message: what happened, with the values.
        is_input: whether the checkpoint or the directory given is at fault: exit code 2 instead of 1.
        remedy: what to do, as a command or a change.
    """

    def __init__(self, message: str, *, is_input: bool = False, remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.exit_code = 2 if is_input else 1


class LaunchError(FarandoleError):
    """A process could not be started, or died without an exception of its own."""


class CommError(FarandoleError):
    """An exchange between ranks failed. The message starts with the rank.

    Args:
        message: what happened, with the values.
        rank: the rank that raises.
        operation: the operation that failed, such as "all-reduce of gradients".
        bucket: index of the bucket, if the operation has one.
        remedy: what to do, as a command or a change.
    """

    def __init__(
        self, message: str, *, rank: int, operation: str, bucket: int | None = None, remedy: str = ""
    ) -> None:
        where = f"rank {rank}, {operation}" + ("" if bucket is None else f" of bucket {bucket}")
        super().__init__(f"{where}: {message}", remedy=remedy)
        self.rank = rank
        self.operation = operation
        self.bucket = bucket


class PeerLost(CommError):
    """Another rank is gone: its connection was closed during a wait for it."""


class Mismatch(CommError):
    """Ranks disagree on their next operation. Raised on every rank before data is sent."""


class Stalled(CommError):
    """A wait for another rank timed out."""


class VerificationFailed(FarandoleError):
    """A check of `fd.verify` failed: raised by ``raise_if_failed`` of what it returns."""
