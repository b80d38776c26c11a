"""Which codecs and bucket size are best for a step, by core's step model. Plain numbers, no torch.

[Note: gentleness] Among lossy codecs the gentlest within 3 % of the fastest is taken. And a bucket that
hides behind backward anyway need not be small: from the first bucket on, buckets get gentler codecs as
long as the predicted step does not grow by more than 0.5 %, on half of the link.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ...core.step_model.bucket_plan import BucketPlan
from ...core.step_model.link import LinkModel
from ...core.step_model.prediction import CANDIDATES, StepProfile, buckets_of, predict_step
from ...core.vocabulary.codec_spec import NONE, CodecSpec

FASTEST_SLACK = 1.03
_REFINE_SLACK = 1.005
FALLBACK = "int8"
"""For matrices that a low-rank codec does not make smaller."""
_REFINE_MARGIN = 0.5
"""A bucket hides only if it would on half the link: backward and the network take time from each other."""
BUCKET_BYTES = (4 * 2**20, 8 * 2**20, 25 * 2**20)


@dataclass(frozen=True)
class CodecChoice:
    """Codecs by parameter name, the bucket size, and the step time that is expected."""

    plan: BucketPlan
    seconds: float
    """Predicted, times the correction of its main codec."""
    route: str = "flat"

    @property
    def codecs(self) -> Mapping[str, str]:
        """Text of the codec by parameter name."""
        return self.plan.codecs

    @property
    def bucket_bytes(self) -> int:
        """The most bytes of a bucket."""
        return self.plan.bucket_bytes

    @property
    def main_codec(self) -> str:
        """The codec of most parameters that are coded; "none" when no parameter is."""
        names = [codec for codec in self.codecs.values() if codec != NONE]
        return max(sorted(set(names)), key=names.count) if names else NONE


def _as_predicted(codec: str) -> float:
    return 1.0


def choose(
    profile: StepProfile,
    link: LinkModel,
    *,
    lossy: bool,
    first_bucket_bytes: int | None = None,
    correct: Callable[[str], float] = _as_predicted,
    sizes: Sequence[int] = BUCKET_BYTES,
) -> CodecChoice:
    """Return the best choice.

    Args:
        profile: the step without its exchange.
        link: the link as a probe measured it.
        lossy: whether codecs that lose precision are allowed; without, only the bucket size is chosen.
        first_bucket_bytes: the most bytes of the first bucket, which is not chosen. None: as the others.
        correct: what to multiply predictions with, by main codec; see `profile`.
        sizes: the bucket sizes to choose from, in bytes.
    """
    candidates = []
    for codec in CANDIDATES if lossy else CANDIDATES[:1]:
        if codec not in profile.speeds:
            continue
        codecs = assign_codecs(profile, codec)
        if codec != NONE and set(codecs.values()) == {NONE}:
            continue
        for bucket_bytes in sizes:
            plan = BucketPlan(codecs, bucket_bytes, first_bucket_bytes)
            seconds = predict_step(profile, link, plan).seconds * correct(codec)
            candidates.append(CodecChoice(plan, seconds))
    fastest = min(candidate.seconds for candidate in candidates)
    # The list is in the order of gentleness; within a codec the fastest bucket size is taken.
    gentle = next(candidate for candidate in candidates if candidate.seconds <= fastest * FASTEST_SLACK)
    same = [candidate for candidate in candidates if candidate.codecs == gentle.codecs]
    refined = _refine(profile, link, min(same, key=lambda candidate: candidate.seconds))
    return replace(refined, seconds=refined.seconds * correct(refined.main_codec))


def assign_codecs(profile: StepProfile, codec: str) -> dict[str, str]:
    """Return the codec of each gradient where `codec` is for all that can have it."""
    low_rank = CodecSpec.parse(codec).is_low_rank
    fallback = FALLBACK if low_rank and FALLBACK in profile.speeds else NONE
    codecs = {}
    for gradient in profile.gradients:
        if not gradient.can_be_coded:
            codecs[gradient.name] = NONE
        elif low_rank and not gradient.can_be_low_rank:
            codecs[gradient.name] = fallback
        else:
            codecs[gradient.name] = codec
    return codecs


def _refine(profile: StepProfile, link: LinkModel, choice: CodecChoice) -> CodecChoice:
    """Give buckets gentler codecs, from the first on, while the step would not grow even on a slower link."""
    plan = choice.plan
    slower = replace(link, bytes_per_second=link.bytes_per_second * _REFINE_MARGIN)
    limit = predict_step(profile, slower, plan).seconds * _REFINE_SLACK
    for bucket in buckets_of(profile, choice.plan):
        current = plan.codec_of(bucket[0].name)
        if current == NONE:
            continue
        for gentler in CANDIDATES[: CANDIDATES.index(current)]:
            trial = replace(plan, codecs={**plan.codecs, **{gradient.name: gentler for gradient in bucket}})
            if gentler in profile.speeds and predict_step(profile, slower, trial).seconds <= limit:
                plan = trial
                break
    return CodecChoice(plan, predict_step(profile, link, plan).seconds)
