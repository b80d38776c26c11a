"""The memory of ``farandole estimate`` where degrees divide the model: the planner's, of one setting at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...core.vocabulary.degrees import Degrees, degrees_of
from ...core.vocabulary.errors import ConfigError, PlanError
from ...core.vocabulary.spec import MOST_ZERO, Plan
from ..candidate import Candidate
from ..cost.held import memory_of_candidate
from ..memory import PRECISIONS, STAGES, MemoryByCategory, Setting
from ..memory_advice import MOST_RANKS
from ..memory_table import Choice
from ..model.division import nearest_degree, of_experts, of_sequences, of_shards, of_stages, of_tensor
from ..model.profile import ModelProfile
from ..search.layout import SearchLayout


@dataclass(frozen=True)
class DividedModel:
    """A model, the degrees that divide it, and a batch: the example batch of the profile on each rank."""

    profile: ModelProfile
    sizes: Mapping[str, int]
    """Ranks of each degree above 1 but `data`, which is what they leave."""
    ranks_per_host: int

    def memory(self, setting: Setting) -> MemoryByCategory:
        """Return the memory of the rank of a pipeline that needs most."""
        found = memory_of_candidate(self.profile, self._candidate(setting), self.ranks_per_host)
        return max(found, key=lambda each: each.total_bytes)

    def refuse(self, rank_counts: Sequence[int]) -> None:
        """Raise `ConfigError`, with the nearest degree that can be, for a model or ranks that do not divide so."""
        profile, tensor = self.profile, self.sizes.get("tensor", 1)
        rules: dict[str, Callable[[int], str]] = {
            "tensor": lambda degree: of_tensor(profile, degree),
            "pipeline": lambda degree: of_stages(profile, degree),
            "expert": lambda degree: of_experts(profile, degree),
            "context": lambda degree: of_sequences(profile, degree, tensor, Plan.context_kind),
        }
        for name, degree in self.sizes.items():
            if reason := rules[name](degree):
                near = nearest_degree(rules[name], degree, MOST_RANKS)
                said = reason.removeprefix(f"{name} = {degree} ")
                raise ConfigError(
                    f"--{name} {degree}{': ' if said == reason else ' '}{said}",
                    remedy=f"use --{name} {near}" if near > 1 else f"leave --{name} out",
                )
        if profile.samples % self._passes:
            raise ConfigError(
                f"--pipeline {self.sizes['pipeline']}: a batch of {profile.samples} samples does not divide into "
                f"{self._passes} micro-batches",
                remedy=f"give a batch of {self._passes} samples, or of another multiple of {self._passes}",
            )
        for ranks in rank_counts:
            self._degrees(ranks)

    def possible(self, choice: Choice, ranks: int) -> tuple[Choice, list[str]]:
        """Return the settings of `choice` that can be with these degrees, and notes about those that cannot.

        Raises `PlanError` for one that cannot be where not all were asked for.
        """
        notes: list[str] = []

        def kept(
            what: str, values: Sequence[str], known: Sequence[str], setting_of: Callable[[str], Setting]
        ) -> list[str]:
            found = []
            for each in values:
                try:
                    self._candidate(setting_of(each))
                except PlanError as problem:
                    if list(values) != list(known):
                        raise
                    notes.append(f"{what} {each} is left out: {problem.message.removeprefix('plan: ')}")
                else:
                    found.append(each)
            return found

        stages = kept("stage", choice.stages, STAGES, lambda stage: Setting(stage, "fp32", "none", ranks))
        precisions = kept(
            "precision", choice.precisions, PRECISIONS, lambda name: Setting("0", name, "none", ranks)
        )
        return replace(choice, stages=stages, precisions=precisions), notes

    @property
    def _passes(self) -> int:
        """Micro-batches of a step: as many as a plan has by default."""
        pipeline = self.sizes.get("pipeline", 1)
        return 2 * pipeline if pipeline > 1 else 1

    def _degrees(self, ranks: int) -> Degrees:
        return degrees_of(Plan(**dict[str, Any](self.sizes)), ranks)

    def _candidate(self, setting: Setting) -> Candidate:
        degrees = self._degrees(setting.ranks)
        zero = MOST_ZERO if setting.stage == "hybrid" else int(setting.stage)
        if reason := of_shards(self.profile, zero, degrees.pipeline):
            raise PlanError(f"plan: zero = {zero}: {reason}", remedy="use stage 0")
        layout = SearchLayout(
            pipeline=degrees.pipeline,
            data=degrees.data,
            expert=degrees.expert,
            context=degrees.context,
            tensor=degrees.tensor,
            zero=zero,
            micro_batch=self.profile.samples // self._passes,
            passes=self._passes,
            recompute=setting.recompute,
            precision=setting.precision,
        )
        return layout.to_candidate({"shard_within": "host"} if setting.stage == "hybrid" else {})
