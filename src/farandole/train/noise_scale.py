"""`fd.noise_scale`: how much of a gradient is noise, and so how large a batch is worth its samples.

The two batch sizes that it takes are there anyway: a rank's own batch, and that of all ranks. See
`comm.engine.noise_sums` for what is read where, and `estimate` for the formulas.

[Note: unbiased estimates] From the mean square of the ranks' own gradients `own` and that of their mean `mean`,
over R ranks and B samples ([Note: two batch sizes] in `comm.engine.noise_sums`):

    |G|^2     = (R mean - own) / (R - 1)
    tr(Sigma) = (own - mean) B / (R - 1)

Each is unbiased and very noisy, and their ratio is neither: so each is averaged over many steps first, and the
ratio is taken of the averages. McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", appendix A.1.

[Note: the interval] The ratio x = t / g of two averages is off by about the mean of (tr(Sigma) - x |G|^2) / g over
steps; the interval is 1.96 standard errors of it to either side. Steps are taken to be independent.
"""

from __future__ import annotations

import math

from torch import nn

from ..comm.engine.noise_sums import NoiseReading, NoiseSums
from ..comm.engine.reducer import GradientReducer
from ..comm.world.store_sync import all_gather_json, require_same
from ..comm.world.world import World, world
from ..core.vocabulary.errors import ConfigError
from ..core.vocabulary.events import (
    CRITICAL_BATCH,
    SETUP_CRITICAL_BATCH,
    SETUP_CRITICAL_HIGH,
    SETUP_CRITICAL_LOW,
    Logged,
    Setup,
)
from ..core.vocabulary.rules import check
from ..core.vocabulary.text import write_notice
from ..parallel.model import DistributedModel


# Averages of |G|^2 and tr(Sigma) over steps, and the critical batch that follows from them. Pure arithmetic.
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


DECAY = 0.99
RECORDED_EVERY = 16
"""Readings between two records; before the first of these, each doubling of the readings is one."""


class NoiseScale:
    """The gradient noise scale of a model, as far as it is known. All ranks have the same numbers.

    The gradient is the exact one of the batch: before clipping and the optimizer, and at its scale in the loss.
    Made by `fd.noise_scale`.

    Args:
        here: the world whose ranks measure.
        decay: weight of the past in the means, from 0 to below 1.
    """

    def __init__(self, here: World, decay: float) -> None:
        self._here = here
        self._estimate = NoiseEstimate(decay)
        self._sums: NoiseSums | None = None
        self._batch: float | None = None
        self._units = (False, False)
        """Whether the last reading knew its samples, and its loss scale: another answer means other units."""

    # -- what is known -------------------------------------------------------------------------

    @property
    def critical_batch(self) -> float | None:
        """B_simple = tr(Sigma) / |G|^2, in samples. None: not known yet, not above 0, or samples are unknown."""
        return self._estimate.critical_batch if self._units[0] else None

    @property
    def critical_batches(self) -> float | None:
        """The same in global batches of this training."""
        found = self._estimate.critical_batch
        return None if found is None else found / (self._batch or 1.0)

    @property
    def interval(self) -> tuple[float, float] | None:
        """Where the critical batch is likely to be (95 %), in samples; None: not known."""
        return self._estimate.interval() if self._units[0] else None

    @property
    def gradient_square(self) -> float:
        """|G|^2, the square of the norm of the true gradient; NaN before the first reading."""
        return self._estimate.gradient_square

    @property
    def variance(self) -> float:
        """tr(Sigma), the variance of the gradient of one sample (of one global batch, if samples are unknown)."""
        return self._estimate.variance

    @property
    def readings(self) -> int:
        """Steps that were measured."""
        return self._estimate.count

    @property
    def global_batch(self) -> float | None:
        """Samples of the last step that was measured, over all ranks; None: not known."""
        return self._batch

    @property
    def busy_seconds(self) -> float:
        """What it has taken of this rank's time, in all: reading gradients once more."""
        return 0.0 if self._sums is None else self._sums.busy_seconds

    @property
    def why_not(self) -> str:
        """Why the last step that was looked at does not count; empty: it does."""
        if self._sums is None:
            return "there is one rank: two batch sizes need two"
        return self._sums.why_not

    def __repr__(self) -> str:
        found, likely = self.critical_batch, self.interval
        if found is None:
            return f"NoiseScale(not known after {self.readings} readings{', ' * bool(self.why_not)}{self.why_not})"
        between = "" if likely is None else f", {likely[0]:.4g} to {likely[1]:.4g}"
        return f"NoiseScale({found:.4g} samples{between}, {self.readings} readings)"

    # -- measuring -----------------------------------------------------------------------------

    def start(self, reducer: GradientReducer, every: int, samples: int | None) -> None:
        """Measure the exchanges of `reducer` from now on; on all ranks alike."""
        self._sums = reducer.measure_noise(self._take, every=every, samples=samples)

    def _take(self, reading: NoiseReading) -> None:
        if reading.ranks < 2:
            return  # placeholders on all others: one batch size
        units = (reading.batch is not None, reading.loss_scale > 0)
        if units != self._units:
            self._estimate.restart()
        self._units, self._batch = units, reading.batch
        unit = reading.loss_scale**2 if reading.loss_scale > 0 else 1.0
        own, mean = reading.own_square / unit, reading.mean_square / unit
        self._estimate.add(own, mean, reading.ranks, reading.batch or 1.0)
        count = self._estimate.count
        if count % RECORDED_EVERY == 0 or count in (4, 8):
            self._record()

    def _record(self) -> None:
        found, likely = self.critical_batch, self.interval
        if found is None or likely is None or self._here.rank:
            return
        recorder = self._here.session.recorder
        recorder.record(Logged(metrics={CRITICAL_BATCH: found}))
        high = likely[1] if math.isfinite(likely[1]) else None
        recorder.record(
            Setup({SETUP_CRITICAL_BATCH: found, SETUP_CRITICAL_LOW: likely[0], SETUP_CRITICAL_HIGH: high})
        )


def noise_scale(
    model: nn.Module, *, every: int = 10, decay: float = DECAY, samples: int | None = None
) -> NoiseScale:
    """Measure the gradient noise scale of a distributed model while it trains. Call it on all ranks.

    The critical batch B_simple = tr(Sigma) / |G|^2 is the batch at which a loss needs twice the fewest steps and
    twice the fewest samples. A rank's own gradient and the mean of all ranks are those of a small and a big batch.
    The training stays the same, bit for bit. Source: McCandlish et al. 2018, "An Empirical Model of Large-Batch
    Training", appendix A.1.

    Args:
        model: what `fd.distribute` was called with; of data parallelism alone, with `zero` up to 2.
        every: measure one of so many steps. It reads a rank's gradients once more, and a part of the mean.
        decay: weight of what was known before a measurement, in averages of |G|^2 and tr(Sigma).
        samples: in a backward pass of this rank, where the loader is not one of `fd.shard`; the same on all ranks.

    Returns:
        What is known, at any time: ``critical_batch``, ``interval``, ``gradient_square``, ``variance``. One rank
        alone measures nothing.

    Raises:
        ConfigError: the model is not distributed, its plan cannot be measured, or an argument is out of range;
            raised on every rank.
        Mismatch: the ranks' arguments differ; raised on every rank.
    """
    here = world()
    problem = _invalid(every, decay, samples)
    gathered = all_gather_json(here, "fd.noise_scale", problem)
    wrong = [f"{text} on rank {rank}" for rank, text in enumerate(gathered) if text]
    if wrong:
        raise ConfigError(f"noise_scale: {', '.join(wrong[:4])}")
    require_same(here, "fd.noise_scale", [("every", every), ("decay", decay), ("samples", samples)])
    distributed = DistributedModel.require(model, "noise_scale")
    plan, mesh = distributed.plan_and_mesh
    check({**vars(plan), **mesh.degrees.above_one(), "noise_scale": True})
    noise = NoiseScale(here, decay)
    reducer = distributed.reducer
    if reducer is None:
        write_notice(
            "noise_scale: nothing is measured on one rank: the two batch sizes are those of one and of all"
        )
        return noise
    noise.start(reducer, every, samples)
    return noise


def _invalid(every: object, decay: object, samples: object) -> str:
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        return f"every = {every!r}, expected a number of steps of at least 1"
    if isinstance(decay, bool) or not isinstance(decay, (int, float)) or not 0 <= decay < 1:
        return f"decay = {decay!r}, expected at least 0 and below 1"
    if samples is not None and (isinstance(samples, bool) or not isinstance(samples, int) or samples < 1):
        return f"samples = {samples!r}, expected a number of at least 1"
    return ""
