"""What a step takes where ranks train on their own and meet every H steps, by the profile of others.

[Note: how often ranks meet] A step lasts C + m / H for C seconds of computing and m of a meeting. H is the
smallest with which meetings take a twentieth of the computing; at least 10, and at most 100, as ranks drift apart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .bucket_plan import BucketPlan
from .link import LinkModel
from .prediction import StepProfile, loads_of

_MEETING_SHARE = 0.05
LEAST_STEPS, MOST_STEPS = 10, 100


@dataclass(frozen=True)
class LocalPrediction:
    """What steps take whose ranks meet after `steps` of them."""

    steps: int
    seconds: float
    """A step, with its part of a meeting."""
    meeting_seconds: float


def predict_local_steps(
    profile: StepProfile, link: LinkModel, codec: str, *, other_seconds: float = 0.0
) -> LocalPrediction:
    """Return how often ranks would meet, and what a step takes then. See [Note: how often ranks meet].

    Args:
        profile: a step without its exchange; `speeds` has `codec` and "none".
        link: what a probe gave, while the ranks did not compute: as it is in a meeting.
        codec: of the changes that can have one.
        other_seconds: what a step takes beside forward, backward and the exchange: data, the optimizer.
    """
    codecs = {each.name: codec for each in profile.gradients if each.can_be_coded}
    whole = sum(each.nbytes for each in profile.gradients)
    loads = loads_of(profile, link, BucketPlan(codecs, whole, whole))
    meeting = sum(
        load.sent_bytes / link.bytes_per_second + load.rounds * link.latency_seconds + load.cpu_seconds
        for load in loads
    )
    compute = profile.forward_seconds + profile.backward_seconds + other_seconds
    steps = math.ceil(meeting / (_MEETING_SHARE * compute)) if compute else MOST_STEPS
    steps = min(MOST_STEPS, max(LEAST_STEPS, steps))
    return LocalPrediction(steps, compute + meeting / steps, meeting)
