"""A typical step of a run at another batch: what was measured, with the part that grows with the samples scaled.

[Note: a step at another batch] Forward, loss and backward passes, and waits for data and for other ranks, are
taken to grow in proportion to the samples; the optimizer and what is in no phase, not at all. Gradients become
ready earlier or later in the same proportion, and the buckets are replayed behind them (`replay`). Where passes
have fixed costs, the time of smaller batches is too low, and of larger ones too high. Exposed time that the replay
does not explain is assumed to stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .link import LinkModel
from .replay import BucketLoad, replay_buckets


@dataclass(frozen=True)
class MeasuredStep:
    """A typical step of a run."""

    ranks: int
    global_batch: int
    """Samples of all ranks."""
    growing_seconds: float
    fixed_seconds: float
    exposed_seconds: float
    """Communication behind which no computation ran, in all exchanges of the step."""
    exchanges: int
    buckets: tuple[BucketLoad, ...]
    """Those of one exchange. Zero is the end of computing."""
    link: LinkModel
    codec: str
    """That it was measured with."""
    ratios: Mapping[str, float]
    """By codec: bytes over those that were sent. `codec` is 1."""
    codec_seconds_per_byte: Mapping[str, float]
    """By codec, where that was measured: CPU time for a byte of float32."""
    critical_batch: float | None = None
    """As `fd.noise_scale` has measured it, in samples."""
    notes: tuple[str, ...] = ()

    def at(self, global_batch: float, codec: str) -> tuple[float, float]:
        """Return the seconds of a step and how many of them are exposed. See [Note: a step at another batch].

        >>> load = BucketLoad(4e6, 4e6, 2, ready_seconds=-0.01)
        >>> link = LinkModel(bytes_per_second=1e8, latency_seconds=0.0)
        >>> step = MeasuredStep(2, 32, 0.1, 0.02, 0.03, 1, (load,), link, "none", {"none": 1.0}, {})
        >>> [round(seconds, 3) for batch in (32, 64, 256) for seconds in step.at(batch, "none")]
        [0.15, 0.03, 0.24, 0.02, 0.82, 0.0]
        """
        factor = global_batch / self.global_batch
        exposed = self._exposed(factor, codec)
        return self.fixed_seconds + factor * self.growing_seconds + exposed, exposed

    def _exposed(self, factor: float, codec: str) -> float:
        base = self._replayed(1.0, self.codec)
        once = self.exposed_seconds / self.exchanges
        trust = min(1.0, once / base) if base > 0 else 1.0
        return self.exchanges * max(0.0, once - trust * (base - self._replayed(factor, codec)))

    def _replayed(self, factor: float, codec: str) -> float:
        ratio = self.ratios[codec]
        cost = self.codec_seconds_per_byte.get(codec, 0.0) if codec != self.codec else 0.0
        loads = [
            each.coded(ratio, cost)._replace(
                ready_seconds=factor * each.ready_seconds, first_ready_seconds=factor * each.first_ready_seconds
            )
            for each in self.buckets
        ]
        return max(0.0, replay_buckets(loads, self.link).end_seconds)
