"""Which epoch the samples of a batch are of: compared between the ranks at each exchange of gradients.

Ranks that shuffle by different epochs lose and repeat samples, and nothing else shows it. A loop that goes back
and forth between loaders within their epochs may do so differently on each rank, and is not compared.
"""

from __future__ import annotations

from .drawn_batches import Origin


class EpochInUse:
    """The epoch of the batch that was handed out last, in the thread that trains."""

    def __init__(self) -> None:
        self._current: Origin | None = None
        self._left_open: set[Origin] = set()
        """Loops that another one came between before they ended."""
        self._is_mixed = False
        self.number = 0
        """What must be equal on all ranks; 0 where there is nothing to compare."""

    def hand_out(self, origin: Origin) -> None:
        """A batch of `origin` is used next."""
        if origin == self._current:
            return
        if self._current is not None:
            self._left_open.add(self._current)
        self._is_mixed = self._is_mixed or origin in self._left_open
        self._current = origin
        self.number = 0 if self._is_mixed else origin.order

    def loop_ends(self, origin: Origin) -> None:
        """No more batches come from `origin`."""
        self._left_open.discard(origin)
        if self._current == origin:
            self._current = None
            self.number = 0
