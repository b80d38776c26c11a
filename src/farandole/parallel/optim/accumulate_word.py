"""A word at the end, when the plan key `accumulate` changed nothing: a loop that steps after each pass."""

from __future__ import annotations

from ...comm.world.world import World
from ...core.vocabulary.notice import write_notice


class AccumulateWord:
    """Counts the optimizer steps of a world whose plan accumulates."""

    def __init__(self, here: World) -> None:
        self._rank = here.rank
        self._accumulate = self._steps = self._after_one = 0
        here.session.call_on_close(self.say)

    def note(self, accumulate: int, held: int) -> None:
        """Note a step after `held` passes that were not exchanged yet, of `accumulate`."""
        self._accumulate = accumulate
        self._steps += 1
        self._after_one += held == 1

    def say(self) -> None:
        """Say on rank 0 that every step came after a single pass, if it did."""
        if self._rank == 0 and self._after_one == self._steps > 0:
            write_notice(
                f"plan: accumulate = {self._accumulate} had no effect: the optimizer stepped after each backward "
                "pass; let the loop step less often, or leave accumulate out"
            )
