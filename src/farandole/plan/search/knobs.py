"""The keys that tune a layout without changing what a rank holds: buckets, codecs, routes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from ...core.cluster.cluster import Cluster
from ...core.step_model.prediction import CANDIDATES
from ...core.vocabulary.codec_spec import AUTO, NONE, CodecSpec
from ...core.vocabulary.spec import MOST_ZERO, Plan
from ..combinations import lossy_keys
from .layout import SearchLayout
from .request import SearchRequest

BUCKET_BYTES = tuple(2**i for i in range(19, 27))
"""From 512 KiB to 64 MiB."""
TUNED = ("bucket_bytes", "first_bucket_bytes", "codec", "route")
"""The keys."""
ROUTES = ("auto", "flat")
"""Routes that can be fastest. The others are what "auto" takes, or for comparison."""


def settings_of(layout: SearchLayout, request: SearchRequest, cluster: Cluster) -> Iterator[dict[str, Any]]:
    """Yield the values of tuning keys to look at for a layout; the first are the defaults.

    Keys that are fixed are not in them. Codecs beside none are lossy, and only there if the request allows it.
    """
    yield {}
    if layout.sample_ranks * layout.context == 1:
        return
    fixed = request.fixed
    codecs = _codecs(layout, request, cluster)
    if layout.zero == MOST_ZERO:
        yield from ({"codec": codec} for codec in codecs if codec != NONE)
        return
    usual = Plan().with_bucket_bytes(on_device=not cluster.on_cpus).bucket_bytes
    sizes = [0, *(size for size in BUCKET_BYTES if size != usual and "bucket_bytes" not in fixed)]
    routes = ROUTES if "route" not in fixed and len(cluster.tiers) > 1 else ROUTES[:1]
    for codec, nbytes, route in product(codecs, sizes, routes):
        keys: dict[str, Any] = {"codec": codec, "bucket_bytes": nbytes, "route": route}
        if "first_bucket_bytes" not in fixed:
            keys["first_bucket_bytes"] = min(nbytes or usual, Plan.first_bucket_bytes)
        changed = {key: value for key, value in keys.items() if key not in fixed and value != getattr(Plan, key)}
        if changed:
            yield changed


def is_lossy(plan: Plan) -> bool:
    """Whether anything that travels under this plan is rounded, or may be."""
    return bool(lossy_keys(plan)) or (plan.codec == AUTO and plan.lossy)


def _codecs(layout: SearchLayout, request: SearchRequest, cluster: Cluster) -> list[str]:
    if "codec" in request.fixed or not request.allow_lossy or (layout.zero and not cluster.on_cpus):
        return [NONE]
    return [NONE, *(name for name in CANDIDATES if cluster.knows_codec(name) and _works(name, layout))]


def _works(codec: str, layout: SearchLayout) -> bool:
    """Whether a codec fits the stage; the plan's own checks refuse the rest."""
    spec = CodecSpec.parse(codec)
    if spec.is_exact:
        return False
    return spec.works_on_shards if layout.zero == MOST_ZERO else spec.is_quantized or not layout.zero


def fixed_is_lossy(fixed: Mapping[str, Any]) -> bool:
    """Whether keys that the user fixed ask for something lossy themselves."""
    named = [fixed.get(name, NONE) for name in ("codec", "weight_codec", "expert_codec")]
    named += dict(fixed.get("codec_for", {})).values()
    return bool(fixed.get("lossy")) or any(CodecSpec.parse(name).is_applied for name in named)
