"""Memory of a rank by category: weights, gradients, optimizer states, activations and temporaries.

Facts about a model go in, bytes come out; nothing is run or measured here. The division by stages is that of ZeRO
(Rajbhandari et al. 2020, section 5), with what Farandole's own implementation holds beside the shards.

[Note: what a stage holds] Weights include the buffers of the model, which every rank keeps whole. Gradients lie in
the buckets, so buckets cost nothing beside them. Stage 1 divides the optimizer's states by the ranks, and updated
rows of parameters travel through memory of their own, which is among weights. Stage 2 divides the gradients too: a
bucket is whole until it is reduced, in one of a few regions that all buckets use in turn. Stage 3 divides
the weights too: parameters outside of the repeated blocks are whole for the whole step, and two blocks are, the
current one and the one fetched ahead, with their gradients until these are reduced. "hybrid" is stage 3 inside
each host, with a copy on every host. With bf16 the matrices of a block are gathered in 2 bytes an element, and
nothing casts them; gradients become float32 before they are reduced. Activations depend on the batch of a rank,
not on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ..core.bucket_plan import disk_state_bytes, gather_bytes, sum_regions
from ..core.vocabulary.spec import USUAL_BUCKET_BYTES

STAGES = ("0", "1", "2", "3", "hybrid")
PRECISIONS = ("fp32", "bf16", "bf16-weights")
"""fp32; bf16 by autocast, with weights as they are; and weights, gradients and optimizer states in bf16."""
RECOMPUTE = ("none", "blocks")
ADAPTER_RANK = 8
"""That of `fd.low_rank_adapters` by default."""
_SHARDS_OPTIMIZER, _SHARDS_GRADIENTS, _SHARDS_WEIGHTS = STAGES[1:], STAGES[2:], STAGES[3:]


@dataclass(frozen=True)
class WeightFacts:
    """Parameters and buffers of a model in one precision. Tied parameters count once."""

    weight_bytes: int
    """Parameters, trainable and frozen."""
    buffer_bytes: int
    trainable_bytes: int
    """Parameters that get gradients."""
    trainable_elements: int
    trainable_tensors: int
    largest_tensor_bytes: int
    """The largest trainable parameter."""
    outside_blocks_bytes: int
    """Parameters that are in no repeated block."""
    largest_block_bytes: int
    """Parameters of the largest repeated block; 0 without blocks."""
    blocks_cast_bytes: int = 0
    """Weights of the blocks that autocast casts, in bf16. Stage 3 gathers these so. 0: not known, or none."""
    largest_block_cast_bytes: int = 0
    """Those of the largest block."""

    @property
    def element_bytes(self) -> float:
        """Bytes of a trainable parameter."""
        return self.trainable_bytes / max(1, self.trainable_elements)


@dataclass(frozen=True)
class OptimizerFacts:
    """What an optimizer keeps and needs, for parameters of one type."""

    state_bytes_per_element: float
    state_bytes_per_tensor: float
    """States that have one size for every parameter, such as a step count."""
    temporary_bytes_per_element: float
    """Temporaries of a step, per element of what is updated at once."""
    updates_at_once: bool
    """Whether all parameters are updated at once (foreach), not one after the other."""


@dataclass(frozen=True)
class Moment:
    """What is alive at one moment of a pass, beside weights and gradients."""

    fixed_bytes: int
    """As many for any batch: weights converted by autocast, gradients that are not yet added."""
    growing_bytes: int
    """What grows with the batch."""

    @property
    def total_bytes(self) -> int:
        """Both."""
        return self.fixed_bytes + self.growing_bytes


@dataclass(frozen=True)
class ActivationFacts:
    """Memory of one forward and backward pass beside weights and gradients, for one batch."""

    saved_bytes: int
    """Alive at the end of the forward pass: the batch, and what backward needs."""
    weight_copy_bytes: int
    """Part of `saved_bytes` that does not grow with the batch: weights converted by autocast."""
    peak_bytes: int
    """The most that is alive at one moment of the two passes."""
    moments: tuple[Moment, ...] = ()
    """Those at which most is alive: in all, of what does not grow, of what does, and in all with larger batches.
    With another batch or on a part of the model another of them is the peak. Empty: not known; as much is fixed at
    the peak as is saved."""

    @property
    def highest(self) -> tuple[Moment, ...]:
        """`moments`, or the one that is taken for them."""
        return self.moments or (Moment(self.weight_copy_bytes, self.peak_bytes - self.weight_copy_bytes),)

    def scaled(
        self, copies: float, kept: float, temporaries: float, least_fixed: float = 0.0
    ) -> ActivationFacts:  # fmt: skip
        """Return these facts for another batch, or a part of the model.

        Args:
            copies: factor of weights converted by autocast, which passes that are kept at once share.
            kept: factor of the rest of what is saved, over all passes that are kept at once.
            temporaries: factor of what is alive beyond that.
            least_fixed: bytes of what does not grow that the smallest part has, if the whole has as many.
        """
        saved = self.saved_bytes - self.weight_copy_bytes
        moments = tuple(
            Moment(
                round(max(copies * each.fixed_bytes, min(each.fixed_bytes, least_fixed))),
                round(kept * min(each.growing_bytes, saved) + temporaries * max(0, each.growing_bytes - saved)),
            )
            for each in self.highest
        )
        weights = round(copies * self.weight_copy_bytes)
        return _of_moments(weights + round(kept * saved), weights, moments)

    def without_copies(self, nbytes: int) -> ActivationFacts:
        """Return these facts where autocast does not convert so many bytes of weights."""
        moments = tuple(
            Moment(each.fixed_bytes - min(each.fixed_bytes, nbytes), each.growing_bytes) for each in self.highest
        )
        copies = self.weight_copy_bytes - min(self.weight_copy_bytes, nbytes)
        return _of_moments(copies + _others(self), copies, moments)


def partly_recomputed(
    none: ActivationFacts, blocks: ActivationFacts, share: float, gone: float = 0.0
) -> ActivationFacts:
    """Return the facts of a pass that computes some blocks again.

    Where a block is computed again the blocks after it have gone, so that no moment has more than without.

    Args:
        none: nothing is computed again.
        blocks: all blocks are.
        share: what the chosen blocks leave out of what all of them would.
        gone: what is gone of all that is saved when the first one is computed again, which is the last of them.
    """
    if not 0.0 < share < 1.0:
        return blocks if share else none

    def between(of_none: float, of_blocks: float) -> float:
        return of_none + share * (of_blocks - of_none)

    copies = between(none.weight_copy_bytes, blocks.weight_copy_bytes)
    others = between(_others(none), _others(blocks))
    moments = []
    for whole, less in zip(none.highest, blocks.highest, strict=False):  # the first is "in all"
        more = max(whole.fixed_bytes - none.weight_copy_bytes, less.fixed_bytes - blocks.weight_copy_bytes)
        again = less.growing_bytes - _others(blocks) - gone * others
        rest = max(whole.growing_bytes - _others(none), again)
        moments.append(
            Moment(min(whole.fixed_bytes, round(copies + more)), min(whole.growing_bytes, round(others + rest)))
        )
    return _of_moments(round(copies + others), round(copies), tuple(moments))


def _others(facts: ActivationFacts) -> int:
    return facts.saved_bytes - facts.weight_copy_bytes


def _of_moments(saved: int, copies: int, moments: tuple[Moment, ...]) -> ActivationFacts:
    peak = max(saved, *(each.total_bytes for each in moments))
    return ActivationFacts(saved, copies, peak, moments)


@dataclass(frozen=True)
class ModelFacts:
    """What is known about a model, its optimizer and its batch, by precision and recomputation."""

    weights: Mapping[str, WeightFacts]
    """By precision."""
    optimizer: Mapping[str, OptimizerFacts]
    """By precision."""
    activations: Mapping[tuple[str, str], ActivationFacts]
    """By precision and recomputation. One that is missing is unknown."""
    lighter: Mapping[str, ModelFacts] = field(default_factory=dict)
    """The same model frozen, with adapters or stored in few bits, by the name of what was done."""
    failed: tuple[tuple[str, str], ...] = ()
    """Precisions and recomputations in which a pass failed, although others ran."""


class Setting(NamedTuple):
    """One way to train: a stage, a precision, recomputation, and the number of ranks."""

    stage: str
    precision: str
    recompute: str
    ranks: int


@dataclass(frozen=True)
class MemoryByCategory:
    """Bytes of one rank. Activations and temporaries are None if they are unknown."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int | None
    temporary_bytes: int | None
    """What the largest moment needs beyond the other categories: in backward, or in the optimizer's step."""

    @property
    def state_bytes(self) -> int:
        """Weights, gradients and optimizer states."""
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes

    @property
    def total_bytes(self) -> int:
        """The peak; without activations if these are unknown."""
        return self.state_bytes + (self.activations_bytes or 0) + (self.temporary_bytes or 0)


@dataclass(frozen=True)
class RankPart:
    """What a rank has of a model that is divided by more than ZeRO. Shares are of the whole model's figures."""

    parameters: float = 1.0
    """Share of parameters, gradients and states."""
    outside_blocks: float = 1.0
    """Share of parameters outside of the repeated blocks."""
    largest_block: float = 1.0
    largest_tensor: float = 1.0
    activations: float = 1.0
    """Share of what a pass over the whole model saves, all micro-batches together that it keeps at once."""
    temporaries: float = 1.0


def part_of(facts: ModelFacts, part: RankPart) -> ModelFacts:
    """Return the facts of `part` of a model, as of a model by itself."""
    return ModelFacts(
        weights={name: _weights_of(each, part) for name, each in facts.weights.items()},
        optimizer=facts.optimizer,
        activations={
            name: each.scaled(part.parameters, part.activations, part.temporaries, least_fixed(facts, part, *name))
            for name, each in facts.activations.items()
        },
    )


def least_fixed(facts: ModelFacts, part: RankPart, precision: str, recompute: str) -> float:
    """Return what a part has while a block is computed again: its converted weights, and as much of gradients."""
    if precision != "bf16" or recompute != "blocks":
        return 0.0
    return 2 * part.largest_block * facts.weights[precision].largest_block_cast_bytes


def _weights_of(facts: WeightFacts, part: RankPart) -> WeightFacts:
    share = part.parameters
    return WeightFacts(
        weight_bytes=round(share * facts.weight_bytes),
        buffer_bytes=round(share * facts.buffer_bytes),
        trainable_bytes=round(share * facts.trainable_bytes),
        trainable_elements=round(share * facts.trainable_elements),
        trainable_tensors=round(share * facts.trainable_tensors),
        largest_tensor_bytes=round(part.largest_tensor * facts.largest_tensor_bytes),
        outside_blocks_bytes=round(part.outside_blocks * facts.outside_blocks_bytes),
        largest_block_bytes=round(part.largest_block * facts.largest_block_bytes),
        blocks_cast_bytes=round(share * facts.blocks_cast_bytes),
        largest_block_cast_bytes=round(part.largest_block * facts.largest_block_cast_bytes),
    )


def gathered_in_16_bits(facts: ModelFacts) -> ModelFacts:
    """Return the facts of bf16 at stage 3, where blocks gather their matrices so: autocast casts none of them.

    Nothing changes the second time.
    """
    weights = facts.weights.get("bf16")
    if weights is None:
        return facts
    cast = {"none": weights.blocks_cast_bytes, "blocks": weights.largest_block_cast_bytes}
    activations = {
        (precision, recompute): each.without_copies(cast.get(recompute, 0)) if precision == "bf16" else each
        for (precision, recompute), each in facts.activations.items()
    }
    weights = replace(
        weights, largest_block_bytes=weights.largest_block_bytes - weights.largest_block_cast_bytes,
        blocks_cast_bytes=0, largest_block_cast_bytes=0,
    )  # fmt: skip
    return replace(facts, weights={**facts.weights, "bf16": weights}, activations=activations)


def memory_of(
    facts: ModelFacts,
    setting: Setting,
    *,
    ranks_per_host: int = 8,
    bucket_bytes: int = USUAL_BUCKET_BYTES,
    batch_factor: float = 1.0,
    on_disk: bool = False,
) -> MemoryByCategory:
    """Return the memory of one rank.

    Args:
        facts: the model, its optimizer and its batch.
        setting: the stage, precision, recomputation and ranks.
        ranks_per_host: over how many ranks "hybrid" shards, if there are as many.
        bucket_bytes: size of the gradients' buckets.
        batch_factor: the batch of a rank, relative to the one in `facts`.
        on_disk: whether the states of the optimizer are in a file.
    """
    if setting.stage in _SHARDS_WEIGHTS and setting.precision == "bf16" and setting.ranks > 1:
        facts = gathered_in_16_bits(facts)
    weights, optimizer = facts.weights[setting.precision], facts.optimizer[setting.precision]
    ranks = min(setting.ranks, ranks_per_host) if setting.stage == "hybrid" else setting.ranks
    state = (
        optimizer.state_bytes_per_element * weights.trainable_elements
        + optimizer.state_bytes_per_tensor * weights.trainable_tensors
    )
    largest = optimizer.state_bytes_per_element * _largest_elements(weights)
    at_once = weights.trainable_elements if optimizer.updates_at_once else _largest_elements(weights)
    step = optimizer.temporary_bytes_per_element * at_once
    if setting.stage in _SHARDS_OPTIMIZER:
        state, step, largest = state / ranks, step / ranks, largest / ranks
    if on_disk:
        state = disk_state_bytes(state, largest)
    weight_bytes, gradient_bytes = _weights_and_gradients(weights, setting.stage, ranks, bucket_bytes)
    activations = facts.activations.get((setting.precision, setting.recompute))
    saved = temporary = None
    if activations is not None:
        activations = activations.scaled(1.0, batch_factor, batch_factor)
        saved = activations.saved_bytes
        temporary = max(activations.peak_bytes, round(step)) - saved
    return MemoryByCategory(
        weights_bytes=weight_bytes + weights.buffer_bytes,
        gradients_bytes=gradient_bytes,
        optimizer_bytes=round(state),
        activations_bytes=saved,
        temporary_bytes=temporary,
    )


def _largest_elements(weights: WeightFacts) -> float:
    if not weights.trainable_elements:
        return 0
    return weights.largest_tensor_bytes * weights.trainable_elements / weights.trainable_bytes


def _weights_and_gradients(weights: WeightFacts, stage: str, ranks: int, bucket_bytes: int) -> tuple[int, int]:
    """Return the bytes of parameters and of gradients; see [Note: what a stage holds]."""
    whole, gradients = weights.weight_bytes, weights.trainable_bytes
    if ranks == 1 or stage not in _SHARDS_OPTIMIZER:
        return whole, gradients
    gathered = whole + gather_bytes(gradients, weights.largest_tensor_bytes)
    if stage not in _SHARDS_GRADIENTS:
        return gathered, gradients
    if stage not in _SHARDS_WEIGHTS:
        largest = min(gradients, max(bucket_bytes, weights.largest_tensor_bytes))
        return gathered, round(gradients / ranks) + sum_regions(largest) * largest
    gathered = weights.outside_blocks_bytes + 2 * weights.largest_block_bytes
    return round(whole / ranks) + gathered, round(gradients / ranks) + min(gradients, gathered)
