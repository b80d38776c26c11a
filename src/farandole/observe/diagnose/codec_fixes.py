"""What another codec would save: its bytes replayed over the run's link, and its measured CPU time.

[Note: bytes of a codec] Codecs of elements send a share of the bytes that does not depend on the model. A low-rank
codec sends rank x (rows + columns) numbers of a matrix, and records know the bytes of a bucket and its parameters,
not their shapes: they are taken to be square and alike, which is the least that such a codec can send. What keeps
the chosen elements only sends them to every rank, so its share grows with their number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from ...core.step_model.prediction import CANDIDATES
from ...core.vocabulary.codec_spec import CodecSpec
from ...core.vocabulary.errors import PlanError
from ...core.vocabulary.events import SETUP_CODABLE
from ...core.vocabulary.units import format_bytes
from ..figures.inexact import codec_of
from .finding import LEAST_SHARE, Fix, Gain, command_with
from .network import LinkObservation
from .step_table import StepTable

CodecCosts = Mapping[str, float]
"""CPU seconds per byte of float32, for encoding and decoding, by codec."""

LOW_RANK = CANDIDATES[-1]
SPARSE = "topk:0.01"
PREDICTED = (*CANDIDATES[1:], SPARSE)
"""Codecs whose gain is estimated: those that codec "auto" chooses from, smallest loss first, and a sparse one."""
_GAINS = 1.1
_LOSES = {
    "bf16": "rounds gradients to 16 bits",
    LOW_RANK: "keeps a matrix of rank 4, the rest is sent later: compare the loss",
    SPARSE: "sends the largest 1%; the rest is sent later",
}


def codec_fixes(table: StepTable, network: LinkObservation, usual: int, costs: CodecCosts | None) -> list[Fix]:
    """Return the codecs with a gain, the least lossy first, and how the gain is estimated."""
    current = _element_ratio(codec_of(table.records))
    if current is None:
        return []  # a codec whose bytes depend on shapes or density: nothing to estimate from
    share = table.records.timelines[0].setup.get(SETUP_CODABLE)
    coded = float(share) if isinstance(share, (int, float)) else 1.0
    current = _of_all(coded, current)
    fixes: list[Fix] = []
    is_by_row = table.records.plan.get("zero") in (1, 2)  # each element goes to one rank
    chosen: tuple[float, str] | None = None
    best = 0.0
    for name in PREDICTED:
        ratio = codec_ratio(table, name) if CodecSpec.parse(name).is_quantized or not is_by_row else None
        cost = None if costs is None else costs.get(name)
        ratio = None if ratio is None else _of_all(coded, ratio)
        if ratio is None or ratio / current > 0.9 or (cost is None and (costs is not None or name == SPARSE)):
            continue  # finding the largest is slow: nothing is said of it without its measured time
        predicted = network.exposed_with_codec(ratio / current, cost or 0.0)
        saved = usual * (network.exposed_seconds - predicted)
        # A codec that loses more must make the step shorter than a gentler one does: by a tenth at least.
        if saved < LEAST_SHARE * table.step_seconds or (
            best > 0 and _GAINS * (table.step_seconds - saved) > table.step_seconds - best
        ):
            continue
        best = saved
        loses = _LOSES.get(name, "loses precision, which is sent later")
        gain = Gain(saved, _basis(network, ratio / current, cost, name))
        changes = {"codec": name}
        fixes.append(Fix(f"codec {name} ({loses})", command_with(table.records, changes), gain, changes))
        # Buffers of Keras and TensorFlow are flat: what is chosen for them is no codec of matrices.
        if name != SPARSE and not (table.front_end and name == LOW_RANK):
            chosen = (saved, name)
    if chosen is not None and not is_by_row:
        gain = Gain(chosen[0], f"that of {chosen[1]}, the best of the codecs it chooses from, or more")
        what = "the codec that is best for each bucket by measurement, chosen while it trains (may lose precision)"
        automatic = {"codec": "auto", "lossy": True}
        fixes.append(Fix(what, command_with(table.records, automatic), gain, automatic))
    return fixes


def _of_all(coded: float, ratio: float) -> float:
    """Return the bytes of all gradients beside those of float32, of which a codec takes the share `coded`."""
    return coded * ratio + 1 - coded


def codec_ratio(table: StepTable, name: str) -> float | None:
    """Return a codec's bytes beside those of float32, or None where records do not tell.

    See [Note: bytes of a codec].
    """
    spec = CodecSpec.parse(name)
    if spec.is_low_rank:
        return _low_rank_ratio(table, spec)
    per_element = spec.bytes_per_element(1, ranks=table.records.size)
    return None if per_element is None else per_element / 4


def _element_ratio(codec: str) -> float | None:
    """Return the same for a codec whose bytes depend on nothing else; None for others and for unknown ones."""
    try:
        spec = CodecSpec.parse(codec)
    except PlanError:
        return None
    if not (spec.is_exact or spec.is_quantized):
        return None
    return (spec.bytes_per_element(1) or 4.0) / 4


def _low_rank_ratio(table: StepTable, spec: CodecSpec) -> float | None:
    layouts = table.records.timelines[0].layouts
    buckets = [b for b in layouts[-1][1].buckets if b.nbytes > 0 and b.parameters] if layouts else []
    total = sum(bucket.nbytes for bucket in buckets)
    if total == 0:
        return None
    sent = 0.0
    for bucket in buckets:
        side = math.sqrt(bucket.nbytes / 4 / len(bucket.parameters))
        # Factors of half the matrix or more are not used: it then travels as it is.
        share = (spec.bytes_per_element(side, side) or 4.0) / 4
        sent += bucket.nbytes * (share if share < 0.5 else 1.0)
    return sent / total


def _basis(network: LinkObservation, ratio: float, cost: float | None, name: str) -> str:
    text = (
        f"bytes / bandwidth + rounds x latency, replayed with {format_bytes(network.sent_bytes * ratio)} "
        f"instead of {format_bytes(network.sent_bytes)}"
    )
    if name == LOW_RANK:
        text += " (if matrices are about square)"
    if cost is None:
        return f"{text}; the codec's CPU time is not included"
    speed = format_bytes(1 / cost) if cost > 0 else "any number of bytes"
    return f"{text}; the codec takes {speed} per CPU second, as measured, before each bucket is sent"
