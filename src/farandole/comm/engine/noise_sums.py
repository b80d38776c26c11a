"""The squares of a rank's own gradient and of the mean, for the gradient noise scale, summed over the ranks.

[Note: two batch sizes] Rank r's own gradient G_r is of a small batch, the mean M of all ranks of a big one, and
both are there anyway: G_r in the buckets before they leave, M when they have arrived. With c_r the rank's share of
the batch and R ranks that have samples,

    E |M|^2                    = |G|^2 + tr(Sigma) / B
    E sum over r of c_r |G_r|^2 = |G|^2 + tr(Sigma) R / B

for shares in proportion to samples, equal or not. McCandlish et al. 2018, "An Empirical Model of Large-Batch
Training", appendix A.1, has the same for equal ones.

[Note: no message of its own] The squares of one exchange are summed over the ranks in the next one, by a tensor of
ten numbers that leaves before the first bucket: nobody waits for it. So results come one step late, and are the
same bits on all ranks.

[Note: what is no measurement] A gradient that is added to another that was exchanged already, or that the loop did
not clear, is not that of the batch. Only the first exchange after an optimizer's step counts, and only if
gradients were zero or None when its first pass began. Micro-batches of one step must have the same size. What
carries residuals of another codec along does not count, and neither do codecs that change the norm of what they
send.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ..world.world import World
from .bucket import Bucket
from .grad_ownership import LocalAccumulation
from .parameters import count_nonzero_gradients


class NoiseReading(NamedTuple):
    """What one exchange says, the same on all ranks."""

    own_square: float
    """Sum over the ranks of c_r |G_r|^2."""
    mean_square: float
    """|M|^2."""
    ranks: int
    """That had samples."""
    batch: float | None
    """Samples of the exchange, over all ranks; None: not known."""
    loss_scale: float
    """Both squares are of gradients times it; 0.0: not known."""


class _OpenPass(NamedTuple):
    weight: float
    """This rank's weight in the mean: its share of the samples."""
    samples: int | None
    by_count: bool


class NoiseSums:
    """Measures the exchanges of one reducer. `ExtraTensors`."""

    def __init__(
        self,
        world: World,
        *,
        every: int,
        samples: int | None,
        take: Callable[[NoiseReading], None],
    ) -> None:
        """Measure one of `every` steps.

        Args:
            world: the ranks.
            every: steps.
            samples: of a backward pass of this rank; None: as the loader says.
            take: called on all ranks, an exchange later, with the same.
        """
        self._world, self._every, self._samples, self._take = world, every, samples, take
        self.loss_scale: Callable[[], float] = lambda: 0.0
        """Returns the scale of the gradients that are exchanged; 0.0: not known."""
        # - Of the current exchange
        self.is_measuring = False
        self._passes: list[_OpenPass] = []
        self._is_fresh = True
        self._own = torch.zeros((), dtype=torch.float64)
        self._scale = 0.0
        # - Across exchanges
        self._steps = -1
        """Optimizer steps before the last exchange."""
        self._pending: torch.Tensor | None = None
        """This rank's numbers of a measured exchange, that are not summed yet; then they are."""
        self._pending_scale: float | None = None
        """The loss scale of that exchange; None: what is pending are zeros. The same on all ranks."""
        self.why_not = ""
        """Why the last exchange that was to be measured does not count; empty: it does."""
        self.busy_seconds = 0.0
        """Time of this rank's thread, in all."""

    # -- a step ------------------------------------------------------------------------------

    def wants(self, steps: int) -> bool:
        """Return whether the next exchange is to be measured; `steps`: of optimizers, before it."""
        return steps != self._steps and steps % self._every == 0

    def pass_opens(self, local: LocalAccumulation, steps: int) -> None:
        """Note what a backward pass weighs, whose first gradient is ready, and what was there before it."""
        share = self._world.session.batch_weight
        if not local.passes:
            self._passes = []
            # The gradient that is ready is one. See [Note: what is no measurement].
            self._is_fresh = not self.wants(steps) or count_nonzero_gradients(local.parameters, 2) < 2
        factor = 0.0 if local.aside is not None else local.factor
        samples = share.samples.of_pass() if self._samples is None else self._samples
        self._passes.append(_OpenPass(factor / self._world.size, samples, share.count_number > 0))

    def begin(self, steps: int) -> None:
        """An exchange begins; nothing of it is loaded."""
        self.is_measuring = self.wants(steps)
        self._steps = steps
        if self.is_measuring:
            self._own = torch.zeros((), dtype=torch.float64, device=self._world.device)
            self._scale = self.loss_scale()

    def add_own(self, bucket: Bucket) -> None:
        """Take this rank's gradients of a bucket that was loaded."""
        begin = time.monotonic()
        self._own += bucket.own_square().to(self._own.device)
        self.busy_seconds += time.monotonic() - begin

    def finish(self, buckets: Sequence[Bucket], *, carries_over: bool) -> None:
        """Take the means, which have arrived. `carries_over`: there is more in them than this batch."""
        begin = time.monotonic()
        if self.is_measuring:
            self._take_means(buckets, carries_over=carries_over)
        self._passes, self.is_measuring = [], False
        self.busy_seconds += time.monotonic() - begin

    def _take_means(self, buckets: Sequence[Bucket], *, carries_over: bool) -> None:
        rank, size = self._world.rank, self._world.size
        mean = torch.zeros((), dtype=torch.float64, device=self._world.device)
        for bucket in buckets:
            mean += bucket.mean_square(rank, size).to(mean.device)
        weight = math.fsum(each.weight for each in self._passes)
        has_samples = weight > 0.0
        known = [each.samples for each in self._passes if each.samples is not None]
        claims = [
            each.samples / each.weight
            for each in self._passes
            if each.samples is not None and each.weight > 0.0 and not each.by_count
        ]
        self.why_not = self._why_not(buckets, claims, carries_over=carries_over)
        numbers = torch.tensor(
            [
                0.0, 0.0, weight, float(has_samples), float(not self.why_not),
                float(sum(known)), float(len(known) == len(self._passes)), math.fsum(claims), float(len(claims)),
                float(len(self._passes)),
            ],
            dtype=torch.float64, device=mean.device,
        )  # fmt: skip
        if has_samples:
            numbers[0] = self._own / weight
        numbers[1] = mean
        self._pending, self._pending_scale = numbers, self._scale

    def _why_not(self, buckets: Sequence[Bucket], claims: Sequence[float], *, carries_over: bool) -> str:
        changing = [bucket.spec.to_text() for bucket in buckets if not bucket.spec.preserves_norm]
        if changing:
            return f"gradients travel by codec {changing[0]}, which changes their norm"
        if carries_over:
            return "residuals of another codec were added"
        if not self._passes:
            return "no backward pass brought the gradients"
        if not self._is_fresh:
            return "gradients of an earlier batch were not cleared"
        if claims and max(claims) - min(claims) > 1e-6 * max(claims):
            return "micro-batches of one step have different sizes"
        return ""

    # -- over the ranks, see [Note: no message of its own] -------------------------------------

    def prepare(self) -> bool:
        """See `ExtraTensors`."""
        return True

    def pack(self, weight: float) -> torch.Tensor:
        """See `ExtraTensors`. Zeros where there is nothing new."""
        if self._pending is None:
            self._pending = torch.zeros(10, dtype=torch.float64, device=self._world.device)
        return self._pending

    def unpack(self) -> None:
        """See `ExtraTensors`."""
        pending, scale = self._pending, self._pending_scale
        self._pending = self._pending_scale = None
        if pending is None or scale is None:
            return  # and no accelerator is waited for
        own, mean, weight, ranks, valid, samples, known, claimed, claims, passes = pending.tolist()
        size = self._world.size
        if valid < size or not math.isfinite(own + mean):
            return  # on some rank it does not count, or the gradients are not finite
        batch = samples if known == size and samples > 0 else None
        if batch is not None and claims and abs(claimed - batch * claims / (passes / size)) > 1e-6 * claimed:
            batch = None  # batches were drawn ahead: these are not the samples of this step
        self._take(NoiseReading(weight * own, mean, round(ranks), batch, scale))
