"""What each codec costs a rank here: the measurement of ``codec = "auto"``, repeated."""

from __future__ import annotations

from functools import partial

from ...comm.autotune.probe import measure_codecs
from ...comm.world.world import World
from ...core.cluster.cluster import CodecCost
from ...core.step_model.prediction import CANDIDATES, CodecSpeed
from .figures import seconds_figure
from .rounds import Case, sample, slowest


def measure_codec_costs(world: World, seconds: float) -> dict[str, CodecCost]:
    """Return the cost of each candidate of the tuner, of the slowest rank while all ranks encode.

    Called by all ranks. Gradients are in CPU memory; on an accelerator `codecs_by_passes` estimates.
    """
    found: dict[str, CodecSpeed] = {}

    def measure(name: str, _: int) -> float:
        found.update(measure_codecs((name,), max(2, world.size)))  # one rank: as if it had a peer
        return found[name].seconds_per_byte

    cases = [Case(name, 1.0, partial(measure, name)) for name in CANDIDATES]
    return {
        case.name: CodecCost(
            seconds_figure(slowest(samples)), float(f"{found[case.name].ratio:.6g}"), found[case.name].rounds
        )
        for case, samples in zip(cases, sample(world, cases, seconds), strict=True)
    }
