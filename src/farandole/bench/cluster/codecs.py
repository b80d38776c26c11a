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
from ...core.step_model.prediction import CANDIDATES, CodecSpeed, slowest_speed
from ...core.vocabulary.codec_spec import CodecSpec
from ...core.vocabulary.spec import DEVICE_BUCKET_BYTES
from .figures import measured, seconds_figure
from .rounds import Case, sample


def measure_codec_costs(world: World, seconds: float) -> dict[str, CodecCost]:
    """Return the cost of each candidate of the tuner, of the slowest rank while all ranks encode.

    Called by all ranks. On an accelerator seconds of the device, and what a bucket takes beside its bytes.
    """
    runs: dict[str, list[CodecSpeed]] = {name: [] for name in CANDIDATES}

    def measure(name: str, _: int) -> float:
        size = max(2, world.size)  # one rank: as if it had a peer
        runs[name].append(measure_codecs((name,), size, world.device)[name])
        return runs[name][-1].seconds(DEVICE_BUCKET_BYTES)

    sample(world, [Case(name, 1.0, partial(measure, name)) for name in CANDIDATES], seconds)
    costs = {name: [(run.seconds_per_byte, run.seconds_per_bucket) for run in each] for name, each in runs.items()}
    everyone = all_gather_json(world, "measure/codecs", costs)
    is_device = streams_of(world.device) is not None
    found = {}
    for name, (run, *_) in runs.items():
        rounds = zip(*(costs[name] for costs in everyone), strict=True)
        slowest = [slowest_speed(run, round_) for round_ in rounds]
        found[name] = CodecCost(
            _figure([each.seconds_per_byte for each in slowest]), float(f"{run.ratio:.6g}"), run.rounds,
            _figure([each.seconds_per_bucket for each in slowest])
            if is_device and not CodecSpec.parse(name).is_exact else None,
        )  # fmt: skip
    return found


def _figure(samples: Sequence[float]) -> Coefficient:
    return seconds_figure(samples) if any(samples) else measured(0.0, 0.0, 0.0)
