"""Exchanges of gradients, as ``farandole verify`` sees them: each must be the mean of what the ranks had.

The ranks' own gradients are added up a second time, in float64 and by a plain all-reduce of torch, which shares no
code with the exchange. See [Note: the oracle] in `train.verify.replay`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ...comm.world.comm_errors import translated
from ...comm.world.store_sync import all_gather_json
from ...comm.world.world import World
from ...core.vocabulary.rank_lists import name_ranks
from ...train.verify.gradient_reference import Difference, compare_gradients
from ...train.verify.verify import Check
from .arrays import Array, digest_of, unique_labels

_NAME = "gradients"


@dataclass(frozen=True)
class SeenExchange:
    """The gradients of one optimizer or tape in one step, dense, without those that stay on a rank."""

    labels: Sequence[str]
    own: Sequence[Array]
    results: Sequence[Array]
    is_sum: bool = False
    """Whether the ranks' gradients were added up and not averaged."""
    not_comparable: str = ""
    """Why the result is not their mean; empty: it is."""


def not_checked(name: str, why: str) -> Check:
    """Return the answer to a question that has none. It counts as a thing to know."""
    return Check(name, None, why, word="not checked")


def tensors(labels: Sequence[str], arrays: Sequence[Array]) -> dict[str, torch.Tensor]:
    """Return arrays as float64 tensors by unique labels."""
    return {
        label: torch.from_numpy(np.array(array, dtype=np.float64, order="C"))
        for label, array in zip(unique_labels(labels), arrays, strict=True)
    }


def leave_out_infinite(result: torch.Tensor, expected: torch.Tensor) -> bool:
    """Put zeros where `expected` is infinite or not a number: a loss scale may be too large for a step.

    Returns:
        Whether `result` was finite there.
    """
    odd = ~expected.isfinite()
    is_wrong = bool((odd & result.isfinite()).any())
    result[odd], expected[odd] = 0.0, 0.0
    return is_wrong


def tolerance(results: Sequence[Array], *, is_mixed: bool = False) -> float:
    """Return the largest relative error that rounding explains."""
    is_short = is_mixed or any(each.dtype.itemsize < 4 for each in results)
    return 5e-2 if is_short else 1e-3


@dataclass
class ExchangeCheck:
    """Compares every exchange of a training. Each call is made by all ranks, in the same order."""

    here: World
    _compared: int = 0
    _worst: tuple[float, str] = (0.0, "")
    _failed: list[str] = field(default_factory=list)
    _not_comparable: str = ""
    _digests: list[list[Any]] = field(default_factory=list)
    _sums: bool = False

    def compare(self, seen: SeenExchange, step: int) -> None:
        """Compare one exchange, of step `step`."""
        self._digests.append([step, digest_of(seen.results)])
        self._sums |= seen.is_sum
        if seen.not_comparable:
            self._not_comparable = seen.not_comparable
            return
        size = self.here.size
        own = {
            label: each / (1 if seen.is_sum else size) for label, each in tensors(seen.labels, seen.own).items()
        }
        reference = {label: self._summed(each) for label, each in own.items()}
        self._compared += 1
        results = tensors(seen.labels, seen.results)
        for label, expected in reference.items():
            if leave_out_infinite(results[label], expected):
                self._failed.append(
                    f"{label!r} of rank {self.here.rank} in step {step} is finite where a rank's own is not"
                )
        found = compare_gradients(results, reference, own, size)
        for each in found:
            self._worst = max(self._worst, (each.error, each.name))
        self._failed += _failures(found, tolerance(seen.results), step, self.here.rank)

    @property
    def has_failed(self) -> bool:
        """Whether an exchange on this rank was wrong."""
        return bool(self._failed)

    def _summed(self, own: torch.Tensor) -> torch.Tensor:
        total = own.clone().to(self.here.device)
        with translated(self.here, "gradients of one process"):
            dist.all_reduce(total, group=self.here.group)
        return total.cpu()

    def checks(self) -> list[Check]:
        """Return the answers. To be called by all ranks."""
        here = self.here
        gathered = all_gather_json(
            here, "verify/exchanges", [self._compared, self._worst, self._failed[:3], self._digests]
        )
        if not any(digests for _, _, _, digests in gathered):
            return [Check(_NAME, False, "no gradients were exchanged: each rank trains a model of its own", _WRAP)]
        checks = [*self._same_bits([digests for *_, digests in gathered]), self._means(gathered)]
        if self._sums:
            answer = f"op=Sum: the exchanged gradient is {here.size} times that of one process"
            checks.append(
                Check("sum", None, answer, "op=hvd.Average, or the learning rate of one rank", "not exact")
            )
        return checks

    def _same_bits(self, digests: list[list[list[Any]]]) -> list[Check]:
        """Return a check that failed if ranks got different results, else nothing: `_means` says the rest."""
        counts = [len(each) for each in digests]
        if len(set(counts)) > 1:
            return [Check(_NAME, False, f"ranks made {', '.join(map(str, counts))} exchanges", "train alike")]
        for row in zip(*digests, strict=True):
            odd = [rank for rank, (_, digest) in enumerate(row) if digest != row[0][1]]
            if odd:
                return [Check(_NAME, False, f"{name_ranks(odd)} got others than rank 0 in step {row[0][0]}")]
        return []

    def _means(self, gathered: list[Any]) -> Check:
        failed = [text for _, _, texts, _ in gathered for text in texts]
        if failed:
            return Check(_NAME, False, "; ".join(failed[:3]))
        compared = min(count for count, *_ in gathered)
        if not compared:
            return not_checked(_NAME, self._not_comparable)
        worst = max(tuple(each) for _, each, _, _ in gathered)
        what = "sum" if self._sums else "mean"
        return Check(
            _NAME,
            True,
            f"the same on all ranks, and the {what} of the ranks' own in {compared} "
            f"exchange{'s' * (compared > 1)} (the farthest, {worst[1]}: {worst[0]:.1g})",
        )


_WRAP = "optimizer = hvd.DistributedOptimizer(optimizer), or tape = hvd.DistributedGradientTape(tape)"


def _failures(found: Sequence[Difference], most: float, step: int, rank: int) -> list[str]:
    return [
        f"{each.name!r} of rank {rank} in step {step} differs by {each.error:.2g} from the mean of the ranks' "
        f"own{each.cause}"
        for each in sorted(found, key=lambda each: -each.error)
        if not each.error <= most
    ]
