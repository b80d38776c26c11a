"""What a step of a plan takes, holds and sends.

::

    prediction = predict(profile, cluster, Candidate(Plan(zero=1), ranks=8, global_batch=64))

Formulas, their sources and what is assumed: docs/plan/internals.md. For many candidates of one model: `CostModel`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from fnmatch import fnmatchcase

from ...core.cluster import Cluster, Coefficient
from ...core.vocabulary.errors import PlanError
from ...core.vocabulary.sync_spec import EVERY_STEP
from ..candidate import Candidate, Prediction
from ..division import may_divide_tokens, of_tokens
from ..profile import ModelProfile, unfolded
from .held import memory_by_rank
from .layout import RunLayout, divided_gradients
from .rates import Case, Rates
from .step import GradientCache, PlacedModel, costed_step, place
from .units import divides

# What a prediction stands on that was not measured, or not for this: said beside it.

_MOST_NAMES = 4
_MUCH = 0.1
"""A share of a unit that is worth a word."""


def warnings_of(placed: PlacedModel, rates: Rates) -> Iterator[str]:
    """Return sentences, the most important ones first."""
    layout, profile = placed.layout, placed.profile
    if profile.device not in ("", rates.cluster.operations):
        yield (
            f"the profile has operations of {profile.device!r}, and ranks of {rates.cluster.name} run those of "
            f"{rates.cluster.operations!r}: analyse the model again for this cluster"
        )
    if layout.degrees.tensor > 1:
        yield from _of_tensor(placed)
    if layout.plan.sequence_parallel:
        ranks = layout.degrees.tensor * layout.degrees.context
        yield (
            "sequence_parallel is proven at the first step, and needs batches whose tokens are a multiple of "
            f"{ranks}: pad others, or --fix sequence_parallel=false"
        )
    elif layout.degrees.tensor > 1 and may_divide_tokens(profile):
        reason = of_tokens(profile, layout.degrees.tensor, layout.degrees.context)
        if reason:
            yield reason
    outside = []
    for unit in profile.units:
        sizes = unit.times.samples if unit.times is not None else ()
        if sizes and not min(sizes) <= layout.samples <= max(sizes):
            outside.append(unit.name)
    if outside:
        extrapolated = f"the times of {_names(outside)} are extrapolated"
        yield f"{layout.samples:g} samples a pass were not measured; {extrapolated}"
    if all(unit.times is None for unit in profile.units):
        yield "no unit was measured (plan --measure times them): computing is what the device's rates say"
    presets = _presets(rates, attends=any(unit.fused_flops for unit in profile.units))
    if presets:
        yield f"preset, not measured: {_names(presets)}"
    if isinstance(layout.plan.recompute, tuple):
        inside = [
            pattern for pattern in layout.plan.recompute
            if not any(fnmatchcase(unit.name, pattern) for unit in profile.units)
        ]  # fmt: skip
        if inside:
            yield f"recompute: what {_names(inside)} names inside of units is not in the prediction"
    yield from _of_experts(placed)
    yield from profile.notes
    yield from sorted(rates.assumed)


def _of_tensor(placed: PlacedModel) -> Iterator[str]:
    """Name what computes the same on all ranks that divide layers."""
    layout, whole = placed.layout, []
    begin = f"tensor = {layout.degrees.tensor} leaves"
    if list(layout.plan.tensor_recipe.items()) != list(placed.profile.tensor_recipe.items()):
        yield "the plan has another tensor_recipe than the model was analysed with: analyse it again"
    for unit in placed.profile.units:
        facts, by = divides(unit, layout), divided_gradients(unit)
        matrices = [
            (each.name, degree) for each, degree in zip(unit.gradients, by, strict=True) if each.columns > 1
        ]
        if facts is None:
            whole += [unit.name] if matrices else []
            continue
        degrees, computed = ["tensor"], unit.forward_flops
        if unit.expert is not None and layout.degrees.expert > 1:
            degrees, computed = ["tensor", "expert"], computed - unit.expert.flops
        names = [name for name, degree in matrices if degree not in degrees]
        if names and computed - facts.flops > _MUCH * computed:
            yield (
                f"{begin} {1 - facts.flops / computed:.0%} of what {unit.name} computes whole on every rank: "
                f"{_names(names)} (--fix tensor_recipe: docs/fit/one-model.md)"
            )
    if whole:
        yield f"{begin} {_names(whole)} whole on every rank: they have no recipe"


def _of_experts(placed: PlacedModel) -> Iterator[str]:
    layout = placed.layout
    wide = [unit.name for unit in placed.profile.units if unit.uncast_flops] if layout.casts else []
    if wide:
        yield (
            f"experts of {_names(wide)} compute in float32: precision = {layout.plan.precision!r} leaves them in "
            "the type of their parameters (bf16_parameters = true, or weights in bfloat16)"
        )
    if layout.degrees.expert > 1:
        yield "experts: even load is assumed"


def _presets(rates: Rates, *, attends: bool) -> list[str]:
    device, found = rates.cluster.device, []
    groups: list[tuple[str, list[Coefficient]]] = [
        ("device.compute", [rate.flops_per_second for each in device.compute.values() for rate in each]),
        ("device.memory_bytes_per_second", [device.memory_bytes_per_second]),
    ]
    if attends:
        groups.append(("device.attention_flops_per_second", list(device.attention_flops_per_second.values())))
    for i, tier in enumerate(rates.cluster.tiers):
        costs = [c for each in tier.collectives.values() for c in (each.latency_seconds, each.bytes_per_second)]
        costs += [tier.pair_bytes_per_second] if tier.pair_bytes_per_second is not None else []
        groups.append((f"tiers.{i} ({tier.name})", costs))
    for name, coefficients in groups:
        if any(each.source == "preset" for each in coefficients):
            found.append(name)
    return found


def _names(names: list[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


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
