"""The batch size for a plan that was not run: by the predictor, from a profile and a cluster.

For `farandole plan`::

    advice = advise_plan(profile, cluster, answer.candidate, critical_batch=None)
    print(to_text(advice))
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ...core.cluster.cluster import Cluster
from ...core.vocabulary.codec_spec import NONE
from ...core.vocabulary.errors import PlanError
from ..candidate import Candidate, Term
from ..cost.layout import RunLayout
from ..cost.predict import CostModel, fits
from ..model.profile import ModelProfile
from .advice import BatchAdvice, BatchQuestion, advise
from .step_times import StepTime, StepTimes

HIDEABLE: tuple[Term, ...] = ("data", "shard", "codec")
"""Exchanges that do not grow with the batch: those of gradients and parameters."""


def advise_plan(
    profile: ModelProfile,
    cluster: Cluster,
    candidate: Candidate,
    *,
    critical_batch: float | None = None,
    allow_lossy: bool = False,
) -> BatchAdvice:
    """Return which global batch the links of `cluster` ask for, with the plan of `candidate`.

    Args:
        profile: the model.
        cluster: the machines.
        candidate: plan, ranks, and the batch in use.
        critical_batch: in samples, as `fd.noise_scale` measured it; None: not known.
        allow_lossy: look at the codecs that the cluster has figures of, too.

    Raises:
        PlanError: `candidate` cannot be predicted.
        ConfigError: `critical_batch` is not above 0.
    """
    model = CostModel(profile, cluster)
    layout = RunLayout.of(candidate, cluster.tiers[0].ranks, on_device=not cluster.on_cpus)
    now = model.predict(candidate)
    question = BatchQuestion(
        ranks=candidate.ranks,
        current=candidate.global_batch,
        critical_batch=critical_batch,
        multiple=layout.sample_ranks * layout.passes,
    )
    times: dict[str, StepTimes] = {candidate.plan.codec: partial(_time, model, candidate)}
    if allow_lossy and candidate.plan.codec == NONE:
        # Beside shards, what a codec costs an accelerator is not known.
        known = cluster.codecs if cluster.on_cpus or not candidate.plan.zero else ()
        for codec in filter(cluster.knows_codec, known):
            other = _with_codec(model, candidate, codec)
            if other is not None:
                times[codec] = partial(_time, model, other)
    return advise(times, question, now.warnings)


def _with_codec(model: CostModel, candidate: Candidate, codec: str) -> Candidate | None:
    """Return the candidate with another codec; None if its plan cannot have it."""
    try:
        other = replace(candidate, plan=replace(candidate.plan, codec=codec))
        model.predict(other)
    except PlanError:
        return None
    return other


def _time(model: CostModel, candidate: Candidate, global_batch: int) -> StepTime:
    found = model.predict(replace(candidate, global_batch=global_batch))
    exposed = sum(found.terms.get(name, 0.0) for name in HIDEABLE)
    return StepTime(global_batch, found.seconds, exposed, fits=fits(found, model.cluster))
