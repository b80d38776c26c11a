"""What each rank of a pipeline holds, by category: `plan.memory` with the parts that the other degrees leave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from ...core.bucket_plan import disk_state_bytes
from ...core.vocabulary.rules import MOST_ZERO
from ..candidate import Candidate
from ..memory import (
    ActivationFacts,
    MemoryByCategory,
    ModelFacts,
    RankPart,
    Setting,
    gathered_in_16_bits,
    least_fixed,
    memory_of,
    part_of,
    partly_recomputed,
)
from ..profile import ModelProfile, ModelUnit
from .buckets import StageGradients, stage_gradients
from .layout import RunLayout
from .rates import Spent
from .stages import StageUnits, cut, kept_micro_batches, stage_owners
from .units import UnitPass, activation_share, divides, is_block, is_recomputed, share_of

_RESIDUAL_BYTES = 8
"""Bytes of an element with a codec: what was not sent, now and before the last step."""
_MESSAGES = 4
"""Messages of a pipeline in memory at once: two that are received each way."""


def memory_by_rank(
    profile: ModelProfile, stages: Sequence[tuple[StageUnits, StageGradients]], owners: Sequence[int],
    layout: RunLayout,
) -> tuple[MemoryByCategory, ...]:  # fmt: skip
    """Return the memory of one rank of each place in the pipeline. `owners`: the place of each stage."""
    kept = kept_micro_batches(layout)
    found = tuple(
        _of_rank(profile, [stage for stage, owner in zip(stages, owners, strict=True) if owner == place],
                 kept[place] / layout.chunks, layout)
        for place in range(layout.degrees.pipeline)
    )  # fmt: skip
    if layout.plan.weight_versions == 1:
        return found
    return tuple(_with_versions(memory, place + 1 < len(found)) for place, memory in enumerate(found))


def _with_versions(memory: MemoryByCategory, is_left_open: bool) -> MemoryByCategory:
    """Add the second version of the weights, where batches are left open, and gradients of the batch that runs.

    Those are of all weights that a rank has here: frozen ones count too.
    """
    return replace(
        memory,
        weights_bytes=memory.weights_bytes * (2 if is_left_open else 1),
        gradients_bytes=memory.gradients_bytes + memory.weights_bytes,
    )


def memory_of_candidate(
    profile: ModelProfile, candidate: Candidate, ranks_per_host: int
) -> tuple[MemoryByCategory, ...]:
    """Return the memory of one rank of each place in the pipeline, without a cluster: stages are cut by FLOPs.

    Raises `PlanError`, as `predict` does.
    """
    layout = RunLayout.of(candidate, ranks_per_host)
    passes = [
        UnitPass(Spent(unit.forward_flops), Spent(unit.backward_flops), 0.0, Spent()) for unit in profile.units
    ]
    stages = [(stage, stage_gradients(profile, stage, layout)) for stage in cut(profile, passes, layout)]
    return memory_by_rank(profile, stages, stage_owners(layout), layout)


class RoughRank:
    """What a rank holds of some units and of parts of units, in microseconds for each of many ways to train it.

    Left out: buckets, and what codecs keep.
    """

    def __init__(self, profile: ModelProfile, units: Sequence[tuple[ModelUnit, float]], layout: RunLayout) -> None:
        setting, degrees = _setting(profile, layout), layout.degrees
        facts = _known(profile, layout, setting)
        ((name, self._activations),) = facts.activations.items()
        experts = sum(count * each.expert.parameters for each, count in units if each.expert)
        self._experts = experts / degrees.expert if degrees.expert > 1 else 0.0
        self._part = _part(profile, units, 1.0, layout, self._shared(units, layout))
        self._least_fixed = least_fixed(facts, self._part, *name)
        nothing = dict.fromkeys(facts.activations, ActivationFacts(0, 0, 0))
        self._facts = part_of(replace(facts, activations=nothing), self._part)
        self._element_bytes = facts.weights[setting.precision].element_bytes
        self._samples = profile.samples
        largest = max((each.output_bytes for each, _ in units), default=0.0) if degrees.pipeline > 1 else 0.0
        self._message_bytes = _MESSAGES * largest * layout.residual_width / degrees.context

    @staticmethod
    def _shared(units: Sequence[tuple[ModelUnit, float]], layout: RunLayout) -> float:
        """Return the trainable parameters that are not of divided experts."""
        tensor, found = layout.degrees.tensor, 0.0
        for unit, count in units:
            facts = divides(unit, layout)
            divided = facts.parameters * (1 - 1 / tensor) if facts else 0.0
            experts = unit.expert.parameters if unit.expert and layout.degrees.expert > 1 else 0
            found += count * max(0.0, unit.parameters - experts - divided)
        return found

    def states(self, profile: ModelProfile, layout: RunLayout) -> tuple[int, int]:
        """Return bytes: weights, gradients and states, with what ZeRO gathers; and of the optimizer's step."""
        setting = _sharding(_setting(profile, layout), layout)
        held = memory_of(
            self._facts, setting, ranks_per_host=layout.ranks_per_host, bucket_bytes=layout.plan.bucket_bytes,
            on_disk=layout.plan.offload == "disk",
        )  # fmt: skip
        state = self._facts.optimizer[setting.precision].state_bytes_per_element
        experts = round(self._experts * (2 * self._element_bytes + state))
        return held.state_bytes + experts, held.temporary_bytes or 0

    def activation_bytes(self, samples: float, kept: float) -> int:
        """Return the most beside states, with so many samples in a pass and so many passes kept at once."""
        part, factor = self._part, samples / self._samples
        alive = self._activations.scaled(
            part.parameters, factor * kept * part.activations, factor * part.temporaries, self._least_fixed
        )
        return alive.peak_bytes + round(samples * self._message_bytes)


def saved_bytes(unit: ModelUnit, profile: ModelProfile, layout: RunLayout, *, divided: bool) -> float:
    """Return what a unit keeps of one sample until backward, in fp32; recomputed ones keep their input."""
    if is_recomputed(unit, profile, layout):
        whole = unit.output_bytes
        return whole * (share_of(unit, profile, layout, divided=0.0, whole=whole) if divided else 1.0)
    return unit.saved_bytes * (activation_share(unit, profile, layout) if divided else 1.0)


def _of_rank(
    profile: ModelProfile, stages: Sequence[tuple[StageUnits, StageGradients]], kept: float, layout: RunLayout
) -> MemoryByCategory:
    units = [(profile.units[index], count) for stage, _ in stages for index, count in stage.units]
    shared = sum(gradients.elements for _, gradients in stages)

    def known(recompute: Literal["none", "blocks"]) -> ModelFacts:
        of_plan = replace(layout, plan=replace(layout.plan, recompute=recompute))
        return part_of(_known(profile, of_plan, setting), _part(profile, units, kept, of_plan, shared))

    setting = _setting(profile, layout)
    recompute = layout.plan.recompute
    mine = known("blocks" if isinstance(recompute, tuple) else recompute)
    if isinstance(recompute, tuple):
        none = known("none").activations[setting.precision, "none"]
        blocks = mine.activations[setting.precision, "blocks"]
        made = partly_recomputed(none, blocks, *_shares_of_names(profile, units, kept, layout))
        mine = replace(mine, activations={(setting.precision, setting.recompute): made})
    setting = _sharding(setting, layout)
    memory = memory_of(
        mine, setting, ranks_per_host=layout.ranks_per_host, bucket_bytes=layout.plan.bucket_bytes,
        batch_factor=layout.samples / profile.samples, on_disk=layout.plan.offload == "disk",
    )  # fmt: skip
    return _with_the_rest(memory, profile, mine, stages, layout)


def _with_the_rest(
    memory: MemoryByCategory, profile: ModelProfile, mine: ModelFacts,
    stages: Sequence[tuple[StageUnits, StageGradients]], layout: RunLayout,
) -> MemoryByCategory:  # fmt: skip
    """Add what ZeRO does not divide: experts, what codecs keep, messages of the pipeline."""
    ((precision, weights),) = mine.weights.items()
    element = profile.memory.weights[precision].element_bytes
    optimizer = mine.optimizer[precision].state_bytes_per_element
    experts = sum(gradients.expert_elements for _, gradients in stages)
    coded = sum(gradients.coded_elements for _, gradients in stages)
    messages = 0.0
    if layout.degrees.pipeline > 1:
        largest = max(profile.units[index].output_bytes for stage, _ in stages for index, _ in stage.units)
        messages = _MESSAGES * largest * layout.samples * layout.residual_width / layout.degrees.context
    states = memory.optimizer_bytes + round(experts * optimizer)
    if layout.plan.offload == "disk":
        states = disk_state_bytes(states, optimizer * weights.largest_tensor_bytes / max(1.0, element))
    temporary = memory.temporary_bytes
    return replace(
        memory,
        weights_bytes=memory.weights_bytes + round(experts * element),
        gradients_bytes=memory.gradients_bytes + round(experts * element) + _RESIDUAL_BYTES * coded,
        optimizer_bytes=states,
        temporary_bytes=None if temporary is None else temporary + round(messages),
    )


def _setting(profile: ModelProfile, layout: RunLayout) -> Setting:
    """Return the plan's setting, in a precision that is known."""
    setting, weights = layout.setting(), profile.memory.weights
    if setting.precision not in weights:
        setting = setting._replace(precision="fp32" if "fp32" in weights else next(iter(weights)))
    return setting


def _sharding(setting: Setting, layout: RunLayout) -> Setting:
    """Return the setting with the ranks that share, where these are not those of a host."""
    if layout.stage == "hybrid" and layout.plan.shard_within != "host":
        return setting._replace(stage="3", ranks=layout.shards)
    return setting


def _known(profile: ModelProfile, layout: RunLayout, setting: Setting) -> ModelFacts:
    """Return the facts of a setting: activations that were not traced are those that units save."""
    facts, recompute = profile.memory, str(layout.plan.recompute)
    found = facts.activations.get((setting.precision, recompute))
    if found is None:
        whole = sum(each.count * saved_bytes(each, profile, layout, divided=False) for each in profile.units)
        again = [each.saved_bytes for each in profile.units if is_recomputed(each, profile, layout)]
        bytes_of_one = profile.samples * layout.width
        found = ActivationFacts(
            round(whole * bytes_of_one), 0, round((whole + max(again, default=0.0)) * bytes_of_one)
        )
    weights = facts.weights[setting.precision]
    if layout.plan.zero == MOST_ZERO and not layout.gathers_in_16_bits:  # `memory_of` is told no codec
        weights = replace(weights, blocks_cast_bytes=0, largest_block_cast_bytes=0)
    known = ModelFacts({setting.precision: weights}, facts.optimizer, {(setting.precision, recompute): found})
    return gathered_in_16_bits(known) if layout.gathers_in_16_bits else known


def _shares_of_names(
    profile: ModelProfile, units: Sequence[tuple[ModelUnit, int]], kept: float, layout: RunLayout
) -> tuple[float, float]:
    """Return what the named blocks of a rank leave out of what all would, and what is gone when they run again."""
    chosen, most, held, reached = 0.0, 0.0, 0.0, 0.0
    for unit, count in units:
        again = is_recomputed(unit, profile, layout)
        if is_block(unit, profile):
            left_out = count * max(0.0, unit.saved_bytes - unit.output_bytes)
            most, chosen = most + left_out, chosen + again * left_out
        held += count * saved_bytes(unit, profile, layout, divided=True)
        reached = held if again else reached
    share = chosen / most if chosen < most else float(most > 0)
    return share, (1 - reached / held) / max(1.0, kept) if held else 0.0


def _part(
    profile: ModelProfile,
    units: Sequence[tuple[ModelUnit, float]],
    kept: float,
    layout: RunLayout,
    shared: float,
) -> RankPart:
    elements = max(1, profile.parameters)
    whole = sum(each.count * saved_bytes(each, profile, layout, divided=False) for each in profile.units)
    mine = sum(count * saved_bytes(each, profile, layout, divided=True) for each, count in units)
    outside = sum(each.count * each.parameters for each in profile.units if not is_block(each, profile))
    outside_here = sum(count * each.parameters for each, count in units if not is_block(each, profile))
    split = 1.0 / layout.degrees.tensor
    largest_tensor = max((_largest_tensor(each) for each in profile.units), default=0.0)
    largest_tensor_here = max((_largest_tensor(each, layout) for each, _ in units), default=0.0)
    largest = max((each.parameters for each in profile.units if is_block(each, profile)), default=0)
    largest_here = max((each.parameters for each, _ in units if is_block(each, profile)), default=0)
    share = mine / whole if whole else 1.0 / layout.degrees.pipeline
    widest = max((each.saved_bytes for each in profile.units), default=0.0)
    widest_here = max(
        (each.saved_bytes * activation_share(each, profile, layout) for each, _ in units), default=0.0
    )
    return RankPart(
        parameters=shared / elements,
        outside_blocks=split * outside_here / outside if outside else 0.0,
        largest_block=split * largest_here / largest if largest else 0.0,
        largest_tensor=largest_tensor_here / largest_tensor if largest_tensor else 0.0,
        activations=kept * share,
        temporaries=widest_here / widest if widest else split,
    )


def _largest_tensor(unit: ModelUnit, layout: RunLayout | None = None) -> float:
    """Return the bytes of the largest trainable parameter: of what a rank has of it with a layout."""
    sizes = {} if layout is None else {"tensor": layout.degrees.tensor, "expert": layout.degrees.expert}
    return max((each.nbytes / sizes.get(each.divided_by, 1) for each in unit.gradients), default=0.0)
