"""A training step as work of roles: what each stage computes, exchanges and sends, on ranks of usual speed.

[Note: roles] Ranks with the same place in the pipeline do the same, so a step is described by stage, not by rank.
Ranks that exchange inside of layers (tensor, context and expert ranks, and at ZeRO stage 3 all that share a stage)
keep in step with each other: such a cell is as fast as its slowest rank. Cells of one pipeline form a replica.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ...core.schedule.actions import Schedule
from ...core.schedule.build import build_schedule
from ...core.schedule.simulate import Simulator
from ...core.step_model.link import LinkModel
from ...core.vocabulary.degrees import ORDER, SAME_PARAMETERS, Degrees
from ...core.vocabulary.schedule_names import DEFAULT_SCHEDULE


@dataclass(frozen=True)
class StageWork:
    """What one stage does with one micro-batch."""

    forward_seconds: float
    backward_input_seconds: float
    """Gradients of the stage's inputs, in the backward pass; recomputation is in it."""
    backward_weight_seconds: float
    forward_exchange_seconds: float = 0.0
    """Exchanges inside of layers, with nothing to compute meanwhile: a slow rank does not make them longer."""
    backward_exchange_seconds: float = 0.0
    send_seconds: float = 0.0
    """To bring its output to the next stage, or the gradient back."""


class GradientBucket(NamedTuple):
    """One bucket of gradients of a rank."""

    nbytes: int
    sent_bytes: float
    """By one rank."""
    rounds: float
    first_share: float
    """When the first gradient is ready, as a share of the rank's last backward pass, 0 to 1."""
    ready_share: float
    """When the last one is."""
    codec_seconds: float = 0.0
    """What its codec takes, of a core or of an accelerator."""
    inside_seconds: float = 0.0
    """Exchange inside the host, before it leaves."""


@dataclass(frozen=True)
class StepWork:
    """A step of a job, on ranks of usual speed."""

    degrees: Degrees
    stages: tuple[StageWork, ...]
    """In the order of the model; a rank of the pipeline may have several."""
    buckets: tuple[tuple[GradientBucket, ...], ...]
    """By rank of the pipeline, in launch order; empty where nothing is exchanged by buckets."""
    link: LinkModel
    """What connects the ranks that exchange buckets."""
    schedule_name: str = DEFAULT_SCHEDULE
    micro_batches: int = 1
    chunks: int = 0
    keeps_in_step: tuple[str, ...] = ("expert", "context", "tensor")
    """Degrees whose ranks exchange inside of layers. See [Note: roles]."""
    data_seconds: float = 0.0
    """Waiting for the batch."""
    exposed_seconds: float = 0.0
    """Exchanges after backward that are no buckets, such as shards of ZeRO, and what only a prediction knows."""
    optimizer_seconds: float = 0.0
    shares_core: bool = False
    """Whether codecs take their time from the computation."""
    is_serial: bool = False
    """Whether a bucket's codec and its messages follow each other: see `BucketLoad`."""
    rank_samples: int = 1
    """A step's samples on one rank."""

    @cached_property
    def schedule(self) -> Schedule:
        """The order of micro-batches; of one stage on one rank without a pipeline."""
        return build_schedule(self.schedule_name, self.degrees.pipeline, self.micro_batches, self.chunks)

    @cached_property
    def simulator(self) -> Simulator:
        """The simulator for `schedule`."""
        return Simulator(self.schedule)

    @property
    def ranks(self) -> int:
        """The job's size."""
        return self.degrees.size

    @cached_property
    def apart(self) -> tuple[str, ...]:
        """Degrees, but for the pipeline, whose ranks keep to themselves inside of layers."""
        return tuple(name for name in ORDER if name != "pipeline" and name not in self.keeps_in_step)

    @property
    def exchanges(self) -> bool:
        """Whether ranks exchange gradients at the end of a step."""
        return self.degrees.size_over(SAME_PARAMETERS) > 1

    @property
    def replicas(self) -> int:
        """Pipelines of cells."""
        return self.degrees.size_over(self.apart)

    @property
    def cell_ranks(self) -> int:
        """Ranks of a cell."""
        return self.degrees.size // (self.degrees.pipeline * self.replicas)

    def cell_of(self, rank: int) -> tuple[int, int]:
        """Return the place in the pipeline and the replica of a rank."""
        place = self.degrees.place(rank)
        replica = 0
        for name in ORDER:
            if name in self.apart:
                replica = replica * getattr(self.degrees, name) + place[name]
        return place["pipeline"], replica
