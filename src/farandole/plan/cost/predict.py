"""What a step of a plan takes, holds and sends.

::

    prediction = predict(profile, cluster, Candidate(Plan(zero=1), ranks=8, global_batch=64))

Formulas, their sources and what is assumed: docs/cost-model.md. For many candidates of one model: `CostModel`.
"""

from __future__ import annotations

from collections import OrderedDict

from ...core.cluster.cluster import Cluster
from ...core.vocabulary.errors import PlanError
from ...core.vocabulary.sync_spec import EVERY_STEP
from ..candidate import Candidate, Prediction
from ..model.profile import ModelProfile
from ..model.unfold import unfolded
from .held import memory_by_rank
from .layout import RunLayout
from .rates import Case, Rates
from .step import GradientCache, costed_step, place
from .warn import warnings_of

_KEPT_MODELS = 8
_models: OrderedDict[tuple[int, int], CostModel] = OrderedDict()


class CostModel:
    """Predictions of one model on one cluster. Remembers what candidates have in common."""

    def __init__(self, profile: ModelProfile, cluster: Cluster) -> None:
        self.profile, self.cluster = profile, cluster
        cases: tuple[Case, ...] = ("value", "best", "worst")
        self._rates = {case: Rates(cluster, case) for case in cases}
        self._gradients: GradientCache = {}

    def predict(self, candidate: Candidate, *, interval: bool = True) -> Prediction:
        """See `predict`. Without `interval` its ends are the value, which is a third of the work."""
        layout = self._layout(candidate)
        profile, gradients = self._profile_for(candidate)
        placed = place(profile, layout, self._rates["value"], gradients)
        step = costed_step(placed, self._rates["value"])
        low = high = step.seconds
        if interval:
            ends = (self._rates[case] for case in ("best", "worst"))
            low, high = (costed_step(placed.again(rates), rates).seconds for rates in ends)
        memory = memory_by_rank(profile, placed.stages, placed.owners, layout)
        return Prediction(
            seconds=step.seconds,
            low_seconds=min(low, step.seconds),
            high_seconds=max(high, step.seconds),
            terms=step.terms,
            memory=memory,
            sent_bytes=step.sent_bytes,
            collectives=tuple(step.calls),
            features=step.features,
            warnings=tuple(warnings_of(placed, self._rates["value"])),
        )

    def _profile_for(self, candidate: Candidate) -> tuple[ModelProfile, GradientCache]:
        """Return the profile, unfolded where patterns of recomputation tell equal units apart, and its cache."""
        recompute = candidate.plan.recompute
        if not isinstance(recompute, tuple):
            return self.profile, self._gradients
        profile = unfolded(self.profile, recompute)
        return (self.profile, self._gradients) if profile is self.profile else (profile, {})

    def _layout(self, candidate: Candidate) -> RunLayout:
        if candidate.plan.sync != EVERY_STEP:
            raise PlanError(
                f'plan: sync = "{candidate.plan.sync}": a step that exchanges nothing is not predicted yet',
                remedy="leave sync out of the plan that is predicted",
            )
        return RunLayout.of(candidate, self.cluster.tiers[0].ranks, on_device=not self.cluster.on_cpus)


def predict(profile: ModelProfile, cluster: Cluster, candidate: Candidate, *, interval: bool = True) -> Prediction:
    """Return what a step of `candidate` takes, holds and sends. Pure: nothing is run.

    Args:
        profile: the model, by units.
        cluster: figures of the machines; all ranks of the candidate are taken to be like its device.
        candidate: plan, ranks and samples of a step.
        interval: whether both ends of the interval are predicted too.

    Raises:
        PlanError: the degrees do not fit the ranks, the batch does not divide, the model cannot be cut so, or the
            cluster lacks a figure. What the product refuses for other reasons is not asked here.
    """
    key = id(profile), id(cluster)
    model = _models.get(key)
    if model is None or model.profile is not profile or model.cluster is not cluster:
        model = _models[key] = CostModel(profile, cluster)
        while len(_models) > _KEPT_MODELS:
            _models.popitem(last=False)
    return model.predict(candidate, interval=interval)


def fits(prediction: Prediction, cluster: Cluster) -> bool:
    """Return whether every rank has the memory that it needs."""
    return prediction.peak_bytes <= cluster.device.memory_bytes.value
