"""How long a step takes with a codec and a bucket size, and which are best. Plain numbers.

[Note: the model of a step] Forward, then backward, which hands over gradients at the measured moments.
A bucket leaves when its last gradient is there and the link has finished the one before it; it takes
``rounds x latency + bytes / bandwidth``. Where ranks add up inside a host (or behind a switch) first, this takes
its own measured time, and each rank then sends its slice of the bucket. Codec and TCP need processor time: on a
rank with one core this is taken from backward, else only from the link's thread. The step ends when backward has
ended and the last bucket has arrived and was decoded.

[Note: gentleness] Among lossy codecs the gentlest within 3 % of the fastest is taken. And a bucket that
hides behind backward anyway need not be small: from the first bucket on, buckets get gentler codecs as
long as the predicted step does not grow by more than 0.5 %, on half of the link.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ...core.vocabulary.comm_cost import communication_seconds, ring_bytes, ring_factor

CANDIDATES = ("none", "bf16", "int8", "int4", "powersgd:rank=4")
"""Candidates, gentlest first."""
_FASTEST_SLACK = 1.03
_REFINE_SLACK = 1.005
_REFINE_MARGIN = 0.5
"""A bucket hides only if it would on half the link: backward and the network take time from each other."""
_EFFICIENCY = 0.85
"""What a link gives while the ranks compute, beside what it gives a probe: an allowance, not a measurement."""
BUCKET_BYTES = (4 * 2**20, 8 * 2**20, 25 * 2**20)


@dataclass(frozen=True)
class Gradient:
    """One parameter's gradient: its size, and when backward hands it over."""

    name: str
    nbytes: int
    ready_seconds: float
    """After the beginning of backward."""
    rows: int
    columns: int
    can_be_coded: bool
    can_be_low_rank: bool


@dataclass(frozen=True)
class CodecSpeed:
    """What a codec costs a rank."""

    seconds_per_byte: float
    """Processor seconds for each byte of float32 in, both ways."""
    ratio: float
    """Bytes sent over bytes of the exact exchange; not used for low-rank codecs."""
    rounds: int = 2


@dataclass(frozen=True)
class LinkModel:
    """What the link gives each rank."""

    bytes_per_second: float
    latency_seconds: float
    """One round of small messages."""
    processor_seconds_per_byte: float
    pair_seconds: float | None = None
    """One round of a small message to one rank alone, where that was measured."""


@dataclass(frozen=True)
class StepProfile:
    """All that is known when choosing. The same on all ranks."""

    gradients: Sequence[Gradient]
    """In the order in which they are ready."""
    forward_seconds: float
    backward_seconds: float
    ranks: int
    """That exchange with each other."""
    shares_core: bool
    """The codecs' thread runs on the core that computes."""
    speeds: Mapping[str, CodecSpeed]
    """By text of the codec."""
    slices: int = 1
    """Ranks that add up a bucket among themselves before each exchanges its slice."""
    inside_seconds_per_byte: float = 0.0
    """Of a whole bucket, to add up and to hand out again inside."""
    inside_round_seconds: float = 0.0
    """The same for a very small bucket."""


@dataclass(frozen=True)
class CodecChoice:
    """Codecs by parameter name, the bucket size, and the step time that is expected."""

    codecs: Mapping[str, str]
    bucket_bytes: int
    seconds: float
    route: str = "flat"

    @property
    def main_codec(self) -> str:
        """The one most parameters that can be coded have; none when there are none."""
        names = [codec for codec in self.codecs.values() if codec != "none"]
        return max(sorted(set(names)), key=names.count) if names else "none"


def predict(situation: StepProfile, link: LinkModel, codecs: Mapping[str, str], bucket_bytes: int) -> float:
    """Return the seconds of one step. See [Note: the model of a step]."""
    busy = 0.0  # processor time taken from backward so far
    link_free = 0.0
    last_decode = 0.0
    for bucket in _buckets(situation.gradients, codecs, bucket_bytes):
        codec = codecs.get(bucket[0].name, "none")
        speed = situation.speeds[codec]
        whole = sum(gradient.nbytes for gradient in bucket)
        nbytes = whole / situation.slices
        sent = sum(sent_bytes(gradient, codec, speed, situation.ranks) for gradient in bucket) / situation.slices
        inside = whole * situation.inside_seconds_per_byte + situation.inside_round_seconds
        processor = nbytes * speed.seconds_per_byte + 2 * sent * link.processor_seconds_per_byte
        ready = bucket[-1].ready_seconds + (busy if situation.shares_core else 0.0)
        # The first segment must be encoded before anything leaves; the rest is encoded while it travels.
        begin = max(ready, link_free) + inside
        busy += processor + inside
        link_free = max(
            begin
            + communication_seconds(sent, _EFFICIENCY * link.bytes_per_second, speed.rounds, link.latency_seconds),
            begin + processor,
        )
        last_decode = processor / (2 * max(1.0, nbytes // 2**21))
    backward = situation.backward_seconds + (busy if situation.shares_core else 0.0)
    return situation.forward_seconds + max(backward, link_free + last_decode)


def sent_bytes(gradient: Gradient, codec: str, speed: CodecSpeed, ranks: int) -> float:
    """Return what a rank sends for one gradient."""
    share = ring_factor(ranks)
    if codec.startswith("powersgd"):
        rank = int(codec.rpartition("=")[2])
        return share * 4 * rank * (gradient.rows + gradient.columns)
    return share * gradient.nbytes * speed.ratio


SumKind = Literal["direct", "parts", "doubling"]


def sum_seconds(link: LinkModel, ranks: int, nbytes: int) -> dict[SumKind, float]:
    """Return what a sum of `nbytes` over `ranks` takes: rounds x latency + bytes / bandwidth.

    ``direct``: everybody to everybody in one round; ``parts``: reduce-scatter and gather; ``doubling``: a message
    to one rank in each of about log2 N rounds. A round's latency has the cost of its messages in it.
    """
    bandwidth, latency = link.bytes_per_second, link.latency_seconds
    pair_seconds = latency if link.pair_seconds is None else link.pair_seconds
    rounds = doubling_rounds(ranks)
    return {
        "direct": communication_seconds((ranks - 1) * nbytes, bandwidth, 1, latency),
        "parts": communication_seconds(ring_bytes(nbytes, ranks), bandwidth, 2, latency),
        "doubling": communication_seconds(rounds * nbytes, bandwidth, rounds, pair_seconds),
    }


def doubling_rounds(ranks: int) -> int:
    """Return the rounds of a sum by doubling."""
    power = ranks.bit_length() - 1
    return power + (2 if ranks > 1 << power else 0)


def _as_predicted(codec: str) -> float:
    return 1.0


def choose(
    situation: StepProfile, link: LinkModel, *, lossy: bool, correct: Callable[[str], float] = _as_predicted
) -> CodecChoice:
    """Return the best choice. Without `lossy` only the bucket size is chosen.

    `correct`: what to multiply predictions with, by main codec; see `learned`.
    """
    candidates = []
    for codec in CANDIDATES if lossy else CANDIDATES[:1]:
        if codec not in situation.speeds:
            continue
        codecs = _assign(situation, codec)
        if codec != "none" and set(codecs.values()) == {"none"}:
            continue
        for bucket_bytes in BUCKET_BYTES:
            seconds = predict(situation, link, codecs, bucket_bytes) * correct(codec)
            candidates.append(CodecChoice(codecs, bucket_bytes, seconds))
    fastest = min(candidate.seconds for candidate in candidates)
    # The list is in the order of gentleness; within a codec the fastest bucket size is taken.
    gentle = next(candidate for candidate in candidates if candidate.seconds <= fastest * _FASTEST_SLACK)
    same = [candidate for candidate in candidates if candidate.codecs == gentle.codecs]
    refined = _refine(situation, link, min(same, key=lambda candidate: candidate.seconds))
    return replace(refined, seconds=refined.seconds * correct(refined.main_codec))


def _assign(situation: StepProfile, codec: str) -> dict[str, str]:
    low_rank = codec.startswith("powersgd")
    fallback = "int8" if low_rank and "int8" in situation.speeds else "none"
    codecs = {}
    for gradient in situation.gradients:
        if not gradient.can_be_coded:
            codecs[gradient.name] = "none"
        elif low_rank and not gradient.can_be_low_rank:
            codecs[gradient.name] = fallback
        else:
            codecs[gradient.name] = codec
    return codecs


def _refine(situation: StepProfile, link: LinkModel, choice: CodecChoice) -> CodecChoice:
    """Give buckets gentler codecs, from the first on, while the step would not grow even on a slower link."""
    codecs = dict(choice.codecs)
    slower = replace(link, bytes_per_second=link.bytes_per_second * _REFINE_MARGIN)
    limit = predict(situation, slower, codecs, choice.bucket_bytes) * _REFINE_SLACK
    for bucket in _buckets(situation.gradients, choice.codecs, choice.bucket_bytes):
        current = codecs[bucket[0].name]
        if current == "none":
            continue
        for gentler in CANDIDATES[: CANDIDATES.index(current)]:
            trial = {**codecs, **{gradient.name: gentler for gradient in bucket}}
            if gentler in situation.speeds and predict(situation, slower, trial, choice.bucket_bytes) <= limit:
                codecs = trial
                break
    return CodecChoice(codecs, choice.bucket_bytes, predict(situation, link, codecs, choice.bucket_bytes))


def _buckets(gradients: Sequence[Gradient], codecs: Mapping[str, str], bucket_bytes: int) -> list[list[Gradient]]:
    """Divide as `bucket.plan_buckets` does: by codec, in the order of readiness of the last member."""
    done: list[list[Gradient]] = []
    open_buckets: dict[str, list[Gradient]] = {}
    for gradient in gradients:
        codec = codecs.get(gradient.name, "none")
        members = open_buckets.setdefault(codec, [])
        if members and sum(member.nbytes for member in members) + gradient.nbytes > bucket_bytes:
            done.append(members)
            members = open_buckets[codec] = []
        members.append(gradient)
    done += [members for members in open_buckets.values() if members]
    return sorted(done, key=lambda members: members[-1].ready_seconds)
