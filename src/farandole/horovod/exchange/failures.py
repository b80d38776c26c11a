"""The last error of an exchange inside a compiled step: frameworks keep its text, in an error of their own."""

from __future__ import annotations

from ..common.exceptions import HorovodInternalError


class Failures:
    """Which of our errors a framework's was made of."""

    def __init__(self) -> None:
        self.last: HorovodInternalError | None = None

    def note(self, problem: BaseException) -> None:
        """Remember an error that is handed to a framework."""
        if isinstance(problem, HorovodInternalError):
            self.last = problem

    def behind(self, error: BaseException) -> HorovodInternalError | None:
        """Return which of ours a framework's `error` was made of; None when it is not one of ours."""
        if isinstance(error, HorovodInternalError):
            return error
        last = self.last
        return last if last is not None and str(last) in str(error) else None


failures = Failures()
"""Those of this process."""
