"""The factor of a `GradScaler` on the losses: residuals are in units of it.

[Note: residuals and the loss scale] Under a `GradScaler` gradients are those of the loss times its scale, and a
residual is what is missing of them. When the scale changes, the same residual means another gradient: after the
scale has doubled, half of it would be lost. So before an exchange what codecs keep is multiplied by the change of
the scale since the last one. The scaler is known from its first step on; steps that it skips before leave nothing.
"""

from __future__ import annotations

from collections.abc import Callable


class LossScale:
    """The scale of the gradients that one reducer exchanges."""

    def __init__(self) -> None:
        self.is_followed = False
        """Whether a scale is known."""
        self._read: Callable[[], float] = lambda: 0.0
        self._last = 0.0

    def follow(self, read: Callable[[], float]) -> None:
        """Ask `read` from now on; it returns the scale of the gradients that were just exchanged, 0.0: unknown."""
        self._read, self._last = read, read()
        self.is_followed = True

    def change(self) -> float:
        """Return by what the scale was multiplied since the last exchange, where another one begins."""
        now = self._read()
        last, self._last = self._last, now or self._last
        return now / last if now > 0 and last > 0 else 1.0
