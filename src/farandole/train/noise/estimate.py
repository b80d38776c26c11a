"""Averages of |G|^2 and tr(Sigma) over steps, and the critical batch that follows from them. Pure arithmetic.

[Note: unbiased estimates] From the mean square of the ranks' own gradients `own` and that of their mean `mean`,
over R ranks and B samples ([Note: two batch sizes] in `comm.reducer.noise_sums`):

    |G|^2     = (R mean - own) / (R - 1)
    tr(Sigma) = (own - mean) B / (R - 1)

Each is unbiased and very noisy, and their ratio is neither: so each is averaged over many steps first, and the
ratio is taken of the averages. McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", appendix A.1.

[Note: the interval] The ratio x = t / g of two averages is off by about the mean of (tr(Sigma) - x |G|^2) / g over
steps; the interval is 1.96 standard errors of it to either side. Steps are taken to be independent.
"""

from __future__ import annotations

import math


class NoiseEstimate:
    """Exponential averages over readings; the last 1 / (1 - `decay`) of them count most."""

    def __init__(self, decay: float) -> None:
        """`decay`: weight of what was known before a reading, at least 0 and below 1."""
        self.decay = decay
        self.restart()

    def restart(self) -> None:
        """Forget everything: from now on gradients are in other units."""
        self.count = 0
        """Readings since the begin, or since this call."""
        self._total = self._squared = 0.0
        """Sums of the weights, and of their squares."""
        self._moments = [0.0] * 5
        """Weighted sums of g, t, g g, g t and t t."""

    def add(self, own_square: float, mean_square: float, ranks: int, batch: float) -> None:
        """Take a reading. `ranks`: at least 2. `batch`: samples. See [Note: unbiased estimates]."""
        g = (ranks * mean_square - own_square) / (ranks - 1)
        t = (own_square - mean_square) * batch / (ranks - 1)
        keep = self.decay
        self._total = keep * self._total + 1.0
        self._squared = keep * keep * self._squared + 1.0
        news = (g, t, g * g, g * t, t * t)
        self._moments = [keep * old + new for old, new in zip(self._moments, news, strict=True)]
        self.count += 1

    @property
    def gradient_square(self) -> float:
        """|G|^2; not above 0 where noise hides it. NaN before the first reading."""
        return self._moments[0] / self._total if self._total else math.nan

    @property
    def variance(self) -> float:
        """tr(Sigma), of one sample. NaN before the first reading."""
        return self._moments[1] / self._total if self._total else math.nan

    @property
    def critical_batch(self) -> float | None:
        """B_simple = tr(Sigma) / |G|^2, in samples; None where either is not above 0."""
        g, t = self.gradient_square, self.variance
        return t / g if g > 0 and t > 0 else None

    def interval(self) -> tuple[float, float] | None:
        """Return where the critical batch is likely to be; None: not known. See [Note: the interval].

        The upper end is infinite where |G|^2 cannot be told from 0.
        """
        ratio = self.critical_batch
        if ratio is None or self.count < 2:
            return None
        g, t, gg, gt, tt = (each / self._total for each in self._moments)
        spread = max(0.0, (tt - t * t) - 2 * ratio * (gt - g * t) + ratio * ratio * (gg - g * g))
        of_g = max(0.0, gg - g * g)
        share = self._squared / self._total**2  # 1 / the number of readings that count
        error = 1.96 * math.sqrt(spread * share / max(1e-9, 1 - share)) / g
        is_told = g > 1.96 * math.sqrt(of_g * share / max(1e-9, 1 - share))
        return max(0.0, ratio - error), ratio + error if is_told else math.inf
