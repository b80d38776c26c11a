"""How many samples of this rank a backward pass is of, where a loader of `fd.shard` knows."""

from __future__ import annotations


class SamplesInUse:
    """The samples of the batch that was handed out last."""

    def __init__(self) -> None:
        self._by_loader: dict[int, int] = {}
        """Batches that were handed out and that no backward pass has followed."""
        self._known: int | None = None

    def hand_out(self, loader: int, samples: int) -> None:
        """A loader, by its number, hands out a batch of so many samples of this rank; 0 for a placeholder."""
        self._by_loader[loader] = samples

    def of_pass(self) -> int | None:
        """Return the samples of the backward pass that begins; None: not known.

        Several passes may use one batch. Batches of two loaders in one pass are not added up: what its loss is
        a mean over is not known.
        """
        if self._by_loader:
            several = [*self._by_loader.values()]
            self._known = several[0] if len(several) == 1 else None
            self._by_loader.clear()
        return self._known
