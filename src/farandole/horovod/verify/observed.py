"""What an exchange of gradients tells ``farandole verify``: for all front ends, with arrays of NumPy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...core.vocabulary.codec_spec import NONE
from ...core.vocabulary.spec import Plan
from ..common.compression import name_of
from ..common.reductions import Adasum, Sum
from ..common.running import Running
from ..exchange.settings import GradientSettings
from .arrays import Array
from .exchanges import SeenExchange
from .verification import ArrayVerification, find_verification, labelled


class Observed:
    """One exchange that is being made."""

    def __init__(
        self, verification: ArrayVerification, labels: Sequence[str], settings: GradientSettings, plan: Plan
    ) -> None:
        self._verification = verification
        self._labels = labels
        self._is_sum = settings.op == Sum
        self._not_comparable = _not_comparable(settings, plan)

    @property
    def is_replay(self) -> bool:
        """Whether one process is being replayed: its gradients are told, and travel nowhere."""
        return self._verification.replayed is not None

    def tell(self, places: Sequence[int], own: Sequence[Array], results: Sequence[Array]) -> None:
        """Tell what went in and what came out, by places in the list of gradients."""
        self._verification.exchanged(
            SeenExchange(
                [self._labels[place] for place in places],
                [np.array(each) for each in own],
                [np.array(each) for each in results],
                self._is_sum,
                self._not_comparable,
            )
        )


def observe(
    running: Running,
    name: str,
    variables: Sequence[Any],
    labels: Sequence[str],
    settings: GradientSettings,
    plan: Plan,
    *,
    is_eager: bool,
    read: Callable[[Any], Array],
) -> Observed | None:
    """Return who is told of an exchange that begins; None outside ``farandole verify``.

    Args:
        running: what `hvd.init` made.
        name: of the optimizer or tape.
        variables: whose gradients they are.
        labels: theirs.
        settings: how gradients meet.
        plan: the same, of the plan.
        is_eager: outside graphs.
        read: returns the value of a variable.
    """
    verification = find_verification(running.world)
    if verification is None or not variables:
        return None
    kept = list(variables)
    verification.begins(
        name,
        kept[0],
        lambda: labelled(labels, [read(each) for each in kept]),
        is_eager=is_eager,
        ranks=settings.process_set.size() or 1,
    )
    return Observed(verification, labels, settings, plan)


def _not_comparable(settings: GradientSettings, plan: Plan) -> str:
    if settings.op == Adasum:
        return "op=Adasum: its result is not the mean of the ranks' own"
    name = name_of(settings.compression)
    if name not in ("NoneCompressor", "CodecCompressor"):
        return f"{name} approximates gradients: use Compression.none"
    if plan.codec != NONE or plan.codec_for:
        codec = plan.codec if plan.codec != NONE else plan.codec_for
        return f"codec {codec} approximates gradients: leave it out, or give --set codec=none"
    return ""
