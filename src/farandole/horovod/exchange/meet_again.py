"""The end of one generation of an elastic job and the beginning of the next, for all front ends."""

from __future__ import annotations

from ..common.basics import basics


def meet_again() -> None:
    """Leave the world, and join that of the ranks that are there now."""
    from ...train.session import shutdown as leave

    basics.shutdown()
    leave()  # the world too, when the program opened it before `hvd.init`
    basics.init()
