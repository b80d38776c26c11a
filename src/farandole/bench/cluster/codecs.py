"""What each codec costs a rank here: the measurement of ``codec = "auto"``, repeated."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ...comm.autotune.probe import measure_codecs
from ...comm.device.streams import streams_of
from ...comm.world.store_sync import all_gather_json
from ...comm.world.world import World
from ...core.cluster.cluster import CodecCost
from ...core.cluster.coefficient import Coefficient
from ...core.step_model.prediction import CANDIDATES, CodecSpeed
from .figures import measured, seconds_figure
from .rounds import Case, sample

_BUCKET_BYTES = 25 * 2**20
"""A case is narrow when the time of such a bucket is."""


def measure_codec_costs(world: World, seconds: float) -> dict[str, CodecCost]:
    """Return the cost of each candidate of the tuner, of the slowest rank while all ranks encode.

    Called by all ranks. On an accelerator seconds of the device, and what a bucket takes beside its bytes.
    """
    runs: dict[str, list[CodecSpeed]] = {name: [] for name in CANDIDATES}

    def measure(name: str, _: int) -> float:
        size = max(2, world.size)  # one rank: as if it had a peer
        runs[name].append(measure_codecs((name,), size, world.device)[name])
        return runs[name][-1].seconds(_BUCKET_BYTES)

    sample(world, [Case(name, 1.0, partial(measure, name)) for name in CANDIDATES], seconds)
    costs = {name: [(run.seconds_per_byte, run.seconds_per_bucket) for run in each] for name, each in runs.items()}
    everyone = all_gather_json(world, "measure/codecs", costs)
    has_fixed = streams_of(world.device) is not None
    found = {}
    for name, (run, *_) in runs.items():
        rounds = zip(*(costs[name] for costs in everyone), strict=True)
        slowest = [tuple(map(max, zip(*round_, strict=True))) for round_ in rounds]
        per_byte, per_bucket = (_figure(column) for column in zip(*slowest, strict=True))
        found[name] = CodecCost(per_byte, float(f"{run.ratio:.6g}"), run.rounds, per_bucket if has_fixed else None)
    return found


def _figure(samples: Sequence[float]) -> Coefficient:
    return seconds_figure(samples) if any(samples) else measured(0.0, 0.0, 0.0)
