"""Exchanges with gradients that are not finite: the step is dropped, and residuals are rolled back.

[Note: steps that are dropped] When a coded bucket had a gradient that is not finite, its own state goes back at
once: every rank has NaN as the mean. With ``nonfinite="skip"`` and ``"raise"`` nothing of the exchange is used,
and all buckets' states go back. With ``"propagate"`` the loop decides, on all ranks alike because their gradients
are: a `GradScaler` leaves the step out, a plain loop makes it. So the other buckets wait. If an optimizer steps,
they were used; if the next exchange begins first and their gradients are gone, they were not.

[Note: asked later] With gradients on a device the state of a coded bucket goes back there. With "propagate" the
host asks whether it did when the next exchange begins, and never if an optimizer has stepped by then.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from ...core.vocabulary.errors import CommError
from ...core.vocabulary.rank_lists import name_ranks
from ..buckets.bucket import Bucket
from ..buckets.bucket_set import BucketSet
from ..gradients.grad_ownership import drop_grads
from ..world.store_sync import all_gather_json
from ..world.world import World


class NonFiniteGuard:
    """What one reducer does about exchanges that brought NaN or infinity. Asked by all ranks alike."""

    def __init__(self, world: World, buckets: BucketSet, nonfinite: str) -> None:
        """`nonfinite`: the plan's key."""
        self._world, self._set, self._nonfinite = world, buckets, nonfinite
        self.undecided: list[Bucket] = []
        """Buckets of which it is not known yet whether a step uses them."""
        self.is_skipped = False
        """Whether the gradients of the last exchange were dropped, so that the step has none."""
        self._is_unread = False
        """Whether it is not known here yet if the last exchange brought NaN or infinity."""

    def commit(self) -> None:
        """Note that an optimizer steps, or that what codecs keep is replaced: nothing is rolled back any more."""
        self.undecided, self._is_unread = [], False

    def after_exchange(self) -> None:
        """Do what the plan says about NaN and infinity. See [Note: asked later]."""
        buckets = self._set.buckets
        is_late = self._nonfinite == "propagate" and not all(bucket.is_settled for bucket in buckets)
        if is_late and not self._set.carry_over.is_active:
            self.undecided, self._is_unread = list(buckets), True
            return
        for bucket in buckets:
            if not bucket.is_settled:
                bucket.settle()
        bad = [bucket for bucket in buckets if bucket.had_nonfinite]
        if bad or self.is_skipped:
            self.handle_nonfinite(bad)

    def rollback_if_dropped(self) -> None:
        """Roll back what no step used, before the next exchange: no `commit` since `handle_nonfinite`."""
        if self._is_unread:
            for bucket in self.undecided:
                bucket.settle()
            good = [bucket for bucket in self.undecided if not bucket.had_nonfinite]
            self.undecided = good if len(good) < len(self.undecided) else []
            self._is_unread = False
        dropped = [
            bucket for bucket in self.undecided if bucket in self._set.buckets and not bucket.gradients.is_held
        ]
        self._set.roll_back(dropped)
        self.undecided = []

    def handle_nonfinite(self, bad: Sequence[Bucket]) -> None:
        """Do what the plan says about the buckets with NaN or infinity, of which all ranks know."""
        self.is_skipped = bool(bad) and self._nonfinite == "skip"
        if not bad:
            return
        if self._nonfinite == "propagate":
            self._set.roll_back(bad)
            self.undecided = [bucket for bucket in self._set.buckets if bucket not in bad]
            return
        self._set.roll_back(self._set.buckets)
        text, speaker = self._explain(bad)
        if self._nonfinite == "raise":
            raise CommError(
                text,
                rank=self._world.job_rank,
                operation="backward",
                remedy="lower the learning rate, or clip gradients",
            )
        if self._world.rank == speaker:
            warnings.warn(f"farandole: step skipped: {text}", RuntimeWarning, stacklevel=2)
        drop_grads(self._set.table.parameters)

    def _explain(self, bad: Sequence[Bucket]) -> tuple[str, int]:
        """Return what is wrong with the gradients of `bad`, and the rank that is to report it."""
        overflowed = [self._set.table.names[index] for bucket in bad for index in bucket.overflowed_members]
        mine = [self._set.table.names[index] for bucket in bad for index in bucket.nonfinite_members]
        gathered = all_gather_json(self._world, "naming gradients that are not finite", mine)
        ranks = [rank for rank, names in zip(self._world.job_ranks, gathered, strict=True) if names]
        texts = []
        if ranks:
            names = sorted({name for names in gathered for name in names})
            texts.append(f"gradients of {_list(names)} hold NaN or infinity on {name_ranks(ranks)}")
        if overflowed:
            texts.append(
                f"gradients of {_list(sorted(overflowed))} are finite on every rank, "
                "and their sum over the ranks is not"
            )
        return "; ".join(texts), ranks[0] if ranks else 0


def _list(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
