"""A candidate as numbers: the mesh, micro-batches, samples of a pass, and bytes of an element that travels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from ...core.vocabulary.codec_spec import NONE
from ...core.vocabulary.degrees import OTHER_SAMPLES, SAME_PARAMETERS, Degrees, degrees_of
from ...core.vocabulary.errors import PlanError
from ...core.vocabulary.rules import MOST_ZERO, chunks_of
from ...core.vocabulary.spec import Plan
from ..candidate import Candidate
from ..memory import Setting
from ..profile import ModelUnit

# Which gradients of a unit each degree divides.


@lru_cache(maxsize=256)
def divided_gradients(unit: ModelUnit) -> tuple[str, ...]:
    """Return of each gradient of a unit which degree divides it: "tensor", "expert" or "".

    Where the profile does not say, experts are known by their names, and of the others the largest are divided
    until they have as many parameters as the recipe says.
    """
    found = [each.divided_by for each in unit.gradients]
    if unit.expert is not None and "expert" not in found:
        found = ["expert" if "expert" in each.name.lower() else how
                 for each, how in zip(unit.gradients, found, strict=True)]  # fmt: skip
    if unit.tensor is not None and "tensor" not in found:
        left = unit.tensor.parameters
        order = sorted(range(len(found)), key=lambda i: -unit.gradients[i].rows * unit.gradients[i].columns)
        for i in order:
            count = unit.gradients[i].rows * unit.gradients[i].columns
            if not found[i] and count <= left:
                found[i], left = "tensor", left - count
    return tuple(found)


@dataclass(frozen=True)
class RunLayout:
    """What follows from a candidate alone. Raises `PlanError` for one that cannot be."""

    plan: Plan
    ranks: int
    global_batch: int
    degrees: Degrees
    ranks_per_host: int

    @classmethod
    def of(cls, candidate: Candidate, ranks_per_host: int, *, on_device: bool = False) -> RunLayout:
        """Return the layout of `candidate`. `on_device`: its ranks have accelerators.

        Raises:
            PlanError: the degrees do not fit the ranks; the batch does not divide.
        """
        plan = candidate.plan.with_bucket_bytes(on_device=on_device)
        found = cls(
            plan, candidate.ranks, candidate.global_batch, degrees_of(plan, candidate.ranks),
            max(1, min(ranks_per_host, candidate.ranks)),
        )  # fmt: skip
        parts = found.sample_ranks * found.passes
        if candidate.global_batch < 1 or candidate.global_batch % parts:
            near = max(parts, candidate.global_batch // parts * parts)
            raise PlanError(
                f"candidate: global_batch = {candidate.global_batch} does not divide into {found.sample_ranks} "
                f"replicas x {found.passes} micro-batches",
                remedy=f"use {near} or another multiple of {parts}",
            )
        return found

    # -- micro-batches -----------------------------------------------------------------------------

    @cached_property
    def micro_batches(self) -> int:
        """Those of `fd.step`."""
        if self.plan.micro_batches:
            return self.plan.micro_batches
        return 2 * self.degrees.pipeline if self.degrees.pipeline > 1 else 1

    @cached_property
    def passes(self) -> int:
        """Forward and backward passes of a rank in a step of the optimizer."""
        return self.micro_batches * self.plan.accumulate

    @cached_property
    def sample_ranks(self) -> int:
        """Ranks that train on other samples."""
        return self.degrees.size_over(OTHER_SAMPLES)

    @cached_property
    def samples(self) -> float:
        """Those of one rank in one pass."""
        return self.global_batch / (self.sample_ranks * self.passes)

    # -- groups ------------------------------------------------------------------------------------

    @cached_property
    def replicas(self) -> int:
        """Ranks with the same parameters, but for those of experts."""
        return self.degrees.size_over(SAME_PARAMETERS)

    @cached_property
    def expert_replicas(self) -> int:
        """Ranks with the same experts."""
        return self.degrees.size_over(("data", "shard", "context"))

    @cached_property
    def shards(self) -> int:
        """Ranks among which ZeRO divides; 1 without."""
        if not self.plan.zero:
            return 1
        if self.plan.zero < MOST_ZERO:
            return self.replicas
        if self.plan.shard_within == "host":
            return min(self.replicas, self.ranks_per_host)
        if self.degrees.shard > 1 and self.degrees.data > 1:
            return self.replicas // self.degrees.data
        return self.replicas

    @property
    def copies(self) -> int:
        """Those of what is sharded."""
        return self.replicas // self.shards

    def stride(self, degree: str) -> int:
        """Return how far the ranks of a degree are apart; see [Note: order of ranks] in degrees."""
        return {
            "tensor": 1,
            "context": self.degrees.tensor,
            "expert": self.degrees.tensor * self.degrees.context,
            "pipeline": self.ranks // self.degrees.pipeline,
        }.get(degree, self.degrees.tensor)

    @property
    def chunks(self) -> int:
        """Stages of a rank."""
        return chunks_of(self.plan.schedule, self.plan.chunks) if self.degrees.pipeline > 1 else 1

    # -- types -------------------------------------------------------------------------------------

    @property
    def width(self) -> float:
        """Bytes of an activation, over those of float32."""
        return 1.0 if self.plan.precision == "fp32" else 0.5

    @property
    def residual_width(self) -> float:
        """The same of residuals and of what norms give. See [Note: types under autocast] in `units`."""
        return 0.5 if self.plan.bf16_parameters else 1.0

    @property
    def gradient_width(self) -> float:
        """Bytes of a parameter and of its gradient, over those of the profile."""
        return 0.5 if self.plan.bf16_parameters else 1.0

    @property
    def casts(self) -> bool:
        """Whether autocast computes with parameters of float32 in 16 bits."""
        return self.plan.precision != "fp32" and self.gradient_width == 1.0

    @property
    def gathers_in_16_bits(self) -> bool:
        """Whether stage 3 gathers the matrices of blocks in 2 bytes an element."""
        is_wide = self.plan.precision != "bf16" or self.plan.bf16_parameters or self.plan.weight_codec != NONE
        return self.plan.zero == MOST_ZERO and self.replicas > 1 and not is_wide

    @property
    def stage(self) -> str:
        """The stage of ZeRO, as memory knows it."""
        if self.plan.zero == MOST_ZERO and self.shards < self.replicas:
            return "hybrid"
        return str(self.plan.zero)

    def setting(self) -> Setting:
        """Return the way to train that memory is asked for."""
        precision = self.plan.precision if self.plan.precision != "fp16" else "bf16"
        recompute = "none" if self.plan.recompute == "none" else "blocks"
        return Setting(
            self.stage, "bf16-weights" if self.plan.bf16_parameters else precision, recompute, self.replicas
        )
