"""Steps that are dropped, because gradients were not finite: what their exchange used up is taken back.

[Note: steps that are dropped] When a coded bucket had a gradient that is not finite, its own state goes back at
once: NaN is what everybody got. With ``nonfinite="skip"`` and ``"raise"`` nothing of the exchange is used, and
all buckets' states go back. With ``"propagate"`` the loop decides, on all ranks alike because their gradients
are: a `GradScaler` leaves the step out, a plain loop makes it. So the other buckets wait. If an optimizer steps,
they were used; if the next exchange begins first and their gradients are gone, they were not.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from ...core.vocabulary.errors import CommError
from ...core.vocabulary.rank_lists import name_ranks
from ..buckets.bucket import Bucket
from ..buckets.bucket_set import BucketSet
from ..buckets.coded_bucket import CodedBucket
from ..world.store_sync import all_gather_json
from ..world.world import World


class NonFiniteGuard:
    """What one engine does about exchanges that brought NaN or infinity. Asked by all ranks alike."""

    def __init__(self, world: World, buckets: BucketSet, nonfinite: str) -> None:
        self._world, self._set, self._nonfinite = world, buckets, nonfinite
        self._buckets: list[Bucket] = []  # of which nobody knows yet whether they were used
        self.is_skipped = False
        """Whether the gradients of the last exchange were dropped, so that the step has none."""

    def were_used(self) -> None:
        """Note that an optimizer steps, or that what codecs keep is replaced: nothing is taken back any more."""
        self._buckets = []

    def decide(self) -> None:
        """Take back what nobody used, before the next exchange: no optimizer stepped since `answer`."""
        gone = [bucket for bucket in self._buckets if bucket in self._set.buckets and not bucket.is_held]
        self._set.take_back(gone)
        self._buckets = []

    def answer(self) -> None:
        """Do what the plan says about gradients with NaN or infinity in coded buckets; all ranks know of them."""
        bad = [bucket for bucket in self._set.coded if bucket.had_nonfinite]
        self.is_skipped = bool(bad) and self._nonfinite == "skip"
        if not bad:
            return
        if self._nonfinite == "propagate":
            self._set.take_back(bad)
            self._buckets = [bucket for bucket in self._set.buckets if bucket not in bad]
            return
        self._set.take_back(self._set.buckets)
        text, speaker = self._explain(bad)
        if self._nonfinite == "raise":
            raise CommError(
                text,
                rank=self._world.rank,
                operation="backward",
                remedy="lower the learning rate, or clip gradients",
            )
        if self._world.rank == speaker:
            warnings.warn(f"farandole: step skipped: {text}", RuntimeWarning, stacklevel=2)
        for parameter in self._set.parameters:
            parameter.grad = None

    def _explain(self, bad: Sequence[CodedBucket]) -> tuple[str, int]:
        """Return what is wrong with the gradients of `bad`, and the rank that is to say it."""
        overflowed = [self._set.names[index] for bucket in bad for index in bucket.overflowed_members]
        mine = [self._set.names[index] for bucket in bad for index in bucket.nonfinite_members]
        said = all_gather_json(self._world, "naming gradients that are not finite", mine)
        ranks = [rank for rank, names in enumerate(said) if names]
        texts = []
        if ranks:
            names = sorted({name for names in said for name in names})
            texts.append(f"gradients of {_list(names)} hold NaN or infinity on {name_ranks(ranks)}")
        if overflowed:
            texts.append(
                f"gradients of {_list(sorted(overflowed))} are finite on every rank, "
                "and their sum over the ranks is not"
            )
        return "; ".join(texts), ranks[0] if ranks else 0


def _list(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
