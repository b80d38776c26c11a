"""Communication that is not hidden: its cost, and what a codec, other buckets or fewer exchanges would save.

[Note: three times the parameters] At ZeRO stage 3 a step sends each parameter to the others before forward and
before backward, and its gradient once (Rajbhandari et al. 2020, section 7.2.2): three parts of the bytes, where
other stages send two. What is in no block is gathered once: so gradients are a third to a half of what was sent.
Gains are of these parts: exposed time goes by bytes.
"""

from __future__ import annotations

import statistics
from dataclasses import replace

from ...core.host.open_sockets import PACED, USUAL
from ...core.link import ring_bytes
from ...core.vocabulary.codec_spec import AUTO, NONE, CodecSpec
from ...core.vocabulary.events import (
    SETUP_CODEC,
    SETUP_ELEMENTS,
    SETUP_MEETINGS,
    SETUP_SHARD_WITHIN,
    SETUP_WEIGHT_CODEC,
    SETUP_ZERO,
)
from ...core.vocabulary.rules import MOST_ZERO
from ...core.vocabulary.sync_spec import EVERY_STEP
from ...core.vocabulary.text import name_ranks
from ...core.vocabulary.units import format_bytes, format_seconds
from ..figures.figures import mean
from ..figures.inexact import codec_of, few_meetings, is_late, sync_of
from .finding import LEAST_SHARE, SHOWN_RANKS, Finding, Fix, Gain, command_with, confidence, format_cost
from .loader_fixes import CodecCosts, codec_fixes
from .network import LinkObservation, find_slow_link, link_line, network_of
from .step_table import (
    StepTable,
    accumulated,
    bucket_bytes_of,
    less_often,
    optimizer_steps_of,
    route_of,
    scaled_to,
)

_BUCKETS = tuple(2**20 * size for size in (1, 2, 4, 8, 16, 25, 50, 100))
_LEAST_CODED_BYTES = 2**20
_SLOW_BYTES_PER_SECOND, _LEAST_SLOW_BYTES = 12.5e6, 2**16
"""An exchange of less takes as long in fewer bits; on a link that carries no more than this, one of far less."""
SHARED = "shared"
"""The route through the memory of one host."""
_EXTRA_BYTES = 1.3
_LOSS_COSTS = 0.75
"""What a saved second counts by a codec that sends most of a gradient later: the loss falls slower by a sample."""
INT8_SHARE = 0.26
"""Bytes of numbers in blocks of 8 bits, over those in float32."""
_SET_ON_HOSTS = f"sysctl -w net.ipv4.tcp_congestion_control={USUAL}  # on every host"
"""For connections of the backend, which are made before an option can be set."""


def find_communication(table: StepTable, costs: CodecCosts | None = None) -> list[Finding]:
    """Return the findings about the network.

    `costs` of codecs were measured; without them only their bytes count.
    """
    if len(table.cells) < 2:
        return []
    seconds = mean([cell.of_gradients for own in table.cells for cell in own])  # as in all tables of parts
    share = seconds / table.step_seconds
    counts = [len(row.exchanges) for own in table.rows for row in own]
    usual = statistics.mode(counts) if counts else 0
    network = network_of(table, seconds / max(1, usual))
    if share < LEAST_SHARE:
        return []
    if table.records.missing:
        return [_absent(table, seconds, share)]
    # Where one host has everything last, the others wait for it: an exchange has ended with its slowest rank.
    longest = mean([max(cell.of_gradients for cell in cells) for cells in table.by_step()])
    odd = find_slow_link(table, network, longest, longest / table.step_seconds)
    if table.records.timelines[0].setup.get(SETUP_ZERO) == MOST_ZERO:
        sharded = _sharded(table, usual, seconds, share)
        return [sharded if odd is None else replace(odd, fixes=(*odd.fixes, *sharded.fixes))]
    extra = _extra_exchanges(table, usual, seconds, share)
    needed = seconds - sum(finding.seconds for finding in extra)
    extra += _extra_bytes(table, network, needed)
    own = _exposed(table, network, usual, seconds, share, costs=costs)
    if odd is not None:
        return [*extra, replace(odd, fixes=(*odd.fixes, *own.fixes))]
    # What the extra exchanges cost is theirs; codecs and buckets can gain from the rest only.
    left = max(0.0, 1 - sum(finding.seconds for finding in extra) / seconds)
    return [*extra, *([scaled_to(own, left)] if left * share >= LEAST_SHARE else [])]


def _absent(table: StepTable, seconds: float, share: float) -> Finding:
    """Return that the wait may be for ranks whose events are missing."""
    missing = name_ranks(table.records.missing, most=SHOWN_RANKS)
    cost = format_cost(seconds, share)
    title = f"the ranks wait for the network or for {missing}, of which there are no events: {cost}"
    fix = Fix(
        "bring the events of all ranks together",
        f"rsync 'HOST:{table.records.directory}/events-rank*.jsonl' {table.records.directory}/",
    )
    evidence = ("a wait for a rank that left nothing cannot be told from the network's time",)
    ranks = tuple(table.records.missing)
    return Finding("absent", title, seconds, share, ranks, (), "exchange", evidence, (fix,), "low")


def _exposed(
    table: StepTable,
    network: LinkObservation | None,
    usual: int,
    seconds: float,
    share: float,
    *,
    costs: CodecCosts | None,
) -> Finding:
    fixes: list[Fix] = []
    evidence = []
    kind, title = "communication", f"the exchange of gradients is not hidden: {format_cost(seconds, share)}"
    if network is not None:
        evidence.append(link_line(network))
        evidence.append(
            f"the link is busy for {format_seconds(network.busy_seconds * usual)} a step, "
            f"{format_seconds(network.hidden_seconds * usual)} of it behind computing"
        )
        fixes += codec_fixes(table, network, usual, costs)
        steadier = _steadier(table, network, usual)
        fixes += [steadier] if steadier is not None else []
        sized = _bucket_fix(network, usual, table)
        if sized is not None:
            size, fix = sized
            fixes.append(fix)
            assert fix.gain is not None, "a bucket size is chosen by its gain"
            if fix.gain.seconds > 0.5 * seconds:
                usual_size = format_bytes(network.bucket_bytes)
                kind = "small-buckets" if size > network.bucket_bytes else "large-buckets"
                why = "small" if kind == "small-buckets" else "large"
                title = (
                    f"buckets of {usual_size} are too {why} to hide the exchange: {format_cost(seconds, share)}"
                )
    elif sync_of(table.records).is_server:
        title = f"the ranks wait for their servers and for each other: {format_cost(seconds, share)}"
        sent = mean([float(sum(each.sent_bytes for each in row.exchanges)) for own in table.rows for row in own])
        rate = f"{format_bytes(sent)} a step, {format_bytes(sent / seconds)} a second of that wait"
        evidence.append(f'plan: sync = "{sync_of(table.records).to_text()}"; a rank sends {rate}')
        if len({each.host for each in table.records.timelines}) > 1:
            fixes.append(_without_servers(table))
    elif not sync_of(table.records).is_every_step:
        title = f"the ranks wait for their meetings: {format_cost(seconds, share)}"
        evidence.append(
            f'plan: sync = "{sync_of(table.records).to_text()}"; a mean over all steps, most of which send nothing'
        )
        fixes += _smaller_meetings(table, seconds)
    else:
        evidence.append("the buckets' times were not recorded: no link can be fitted")
    meetings, sync = table.records.timelines[0].setup.get(SETUP_MEETINGS), sync_of(table.records)
    if not sync.is_server and not (type(meetings) is int and meetings // 2 < few_meetings(sync)):
        fixes.append(less_often(table, seconds))
    fixes.sort(key=lambda fix: -_worth(fix))
    if kind != "communication":
        fixes.sort(key=lambda fix: "bucket_bytes" not in fix.changes)
    return Finding(
        kind, title, seconds, share, (), (), "exchange", tuple(evidence), tuple(fixes),
        confidence(len(table.steps)),
    )  # fmt: skip


def _worth(fix: Fix) -> float:
    """Return what a fix saves, less where it costs something of the loss: see `_LOSS_COSTS`."""
    codec = str(fix.changes.get("codec", NONE))
    seconds = fix.gain.seconds if fix.gain else 0.0
    return seconds * (_LOSS_COSTS if codec == AUTO or is_late(codec) else 1.0)


def _sharded(table: StepTable, usual: int, seconds: float, share: float) -> Finding:
    """Return what exposed communication costs at ZeRO stage 3. See [Note: three times the parameters]."""
    setup = table.records.timelines[0].setup
    sent = mean([sum(exchange.sent_bytes for exchange in row.exchanges) for own in table.rows for row in own])
    evidence = (
        f"a rank sends {format_bytes(sent)} a step in {usual} exchanges: blocks of parameters are gathered for "
        "forward and for backward, and gradients are reduced to shards",
    )
    elements, part = setup.get(SETUP_ELEMENTS), 1 / 3  # of the bytes are gradients
    if isinstance(elements, int) and sent and setup.get(SETUP_CODEC) == setup.get(SETUP_WEIGHT_CODEC) == NONE:
        part = min(1 / 2, max(1 / 3, ring_bytes(4 * elements, table.records.size, passes=1) / sent))
    whole = _smaller(table, seconds * (1 - 2 * part), "parameters whole on every rank: they travel once", zero=2)
    fixes = [whole] if 1 - 2 * part >= LEAST_SHARE else []
    is_host = setup.get(SETUP_SHARD_WITHIN) == "host"
    if not is_host and setup.get(SETUP_WEIGHT_CODEC) == NONE:
        gain = seconds * (1 - part) * (1 - INT8_SHARE)
        fixes.append(_smaller(table, gain, "parameters that travel as 8-bit numbers", weight_codec="int8"))
    if not is_host and setup.get(SETUP_CODEC) == NONE:
        gain = seconds * part * (1 - INT8_SHARE)
        fixes.append(_smaller(table, gain, "gradients that travel as 8-bit numbers", codec="int8"))
    fixes.sort(key=lambda fix: -(fix.gain.seconds if fix.gain else 0.0))
    title = f"the exchange of parameters and gradients is not hidden: {format_cost(seconds, share)}"
    return Finding(
        "communication", title, seconds, share, (), (), "exchange", evidence, tuple(fixes),
        confidence(len(table.steps)),
    )  # fmt: skip


def _smaller(table: StepTable, seconds: float, what: str, **changes: object) -> Fix:
    basis = "exposed time in proportion to bytes"
    return Fix(what, command_with(table.records, changes), Gain(seconds, basis), changes)


def _smaller_meetings(table: StepTable, seconds: float) -> list[Fix]:
    """Return a codec for what ranks exchange that train on their own, where they have none and send a lot."""
    sent = [each.sent_bytes for own in table.rows for row in own for each in row.exchanges]
    if sync_of(table.records).codec(codec_of(table.records)) != NONE or not sent:
        return []
    carried = sum(sent) / (seconds * len(table.steps) * len(table.cells))
    if mean(sent) < (_LEAST_CODED_BYTES if carried > _SLOW_BYTES_PER_SECOND else _LEAST_SLOW_BYTES):
        return []
    bits = CodecSpec.parse("int4").bytes_per_element(1)
    assert bits is not None, "its size is fixed"
    return [_smaller(table, seconds * (1 - bits / 4), "changes that travel as 4-bit numbers", codec="int4")]


def _without_servers(table: StepTable) -> Fix:
    """Return what sends less where the network limits: servers take gradients exactly."""
    changes = {"sync": EVERY_STEP, "codec": AUTO, "lossy": True}
    what = "where the network limits, not a slow rank: gradients by a codec in each step, which servers don't take"
    return Fix(what, command_with(table.records, changes), None, changes)


def _steadier(table: StepTable, network: LinkObservation, usual: int) -> Fix | None:
    """Return another congestion control, where TCP is paced and some exchanges take far longer than most."""
    used = table.records.plan.get("congestion_control") or table.records.facts.get("congestion_control")
    saved = usual * network.uneven_seconds
    if used not in PACED or saved < LEAST_SHARE * table.step_seconds or route_of(table) == SHARED:
        return None
    basis = f"a mean exchange is on the wire {format_seconds(network.uneven_seconds)} longer than the middle one"
    paste, changes = _SET_ON_HOSTS, {}
    if codec_of(table.records) != NONE:
        changes = {"congestion_control": USUAL}
        paste = command_with(table.records, changes)
    return Fix(
        f"TCP that is not paced by {used}, after whose pauses some exchanges take far longer than the rest",
        paste, Gain(saved, basis), changes,
    )  # fmt: skip


def _bucket_fix(network: LinkObservation, usual: int, table: StepTable) -> tuple[float, Fix] | None:
    """Return the best bucket size and the fix, if it gains something."""
    now = network.bucket_bytes
    best, exposed = now, network.exposed_seconds
    planned = bucket_bytes_of(table.records.timelines[0].setup, table.records.plan)
    for size in _BUCKETS:
        if size == planned or 2 / 3 < size / max(now, 1.0) < 1.5:
            continue
        predicted = network.exposed_with_bucket_bytes(size)
        if predicted < exposed:
            best, exposed = size, predicted
    saved = usual * (network.exposed_seconds - exposed)
    if best == now or saved < LEAST_SHARE * table.step_seconds:
        return None
    text = f"{int(best) // 2**20}MiB"
    basis = (
        f"the same gradients in buckets of {text} instead of {format_bytes(now)}, replayed over the fitted link"
    )
    what = "larger buckets: fewer rounds" if best > now else "smaller buckets: the first leaves earlier"
    changes = {"bucket_bytes": text}
    return best, Fix(f"{what} ({text})", command_with(table.records, changes), Gain(saved, basis), changes)


def _extra_exchanges(table: StepTable, usual: int, seconds: float, share: float) -> list[Finding]:
    needed = optimizer_steps_of(table)
    if usual <= needed or table.front_end:  # of which nothing tells how many optimizers step in a batch
        return []
    extra = usual - needed
    saved, part = seconds * extra / usual, share * extra / usual
    gain = Gain(
        saved, f"{needed} exchange{'s' * (needed > 1)} instead of {usual}: {extra}/{usual} of the exposed time"
    )
    evidence: tuple[str, ...] = (f"{usual} exchanges in a step (usual of {len(table.steps)} steps)",)
    if needed > 1:
        evidence += (f"{needed} optimizers step in it, and each needs one",)
        paste = "with fd.accumulate():\n    loss.backward()  # all backward passes of a model but its last"
        fix = Fix("add a model's gradients up on the rank and exchange their sum once", paste, gain)
    else:
        changes = {"accumulate": usual * accumulated(table)}
        what = "add gradients up on the rank and exchange their sum once"
        fix = Fix(what, command_with(table.records, changes), gain, changes)
    enough = "once is enough" if needed == 1 else f"{needed} times are enough"
    title = f"gradients are exchanged {usual} times a step where {enough}: {format_cost(saved, part)}"
    return [Finding("extra-exchange", title, saved, part, phase="exchange", evidence=evidence, fixes=(fix,))]


def _extra_bytes(table: StepTable, network: LinkObservation | None, seconds: float) -> list[Finding]:
    if table.front_end:  # which pads small gradients, and sends them to all ranks at once
        return []
    if (
        network is None
        or codec_of(table.records) != NONE
        or table.records.plan.get("route") not in (None, "auto", "flat")
    ):
        return []
    nbytes = sum(bucket.nbytes for bucket in network.buckets)
    needed = ring_bytes(nbytes, table.records.size)
    if needed <= 0 or network.sent_bytes < _EXTRA_BYTES * needed:
        return []
    saved = seconds * (1 - needed / network.sent_bytes)
    share = saved / table.step_seconds
    if share < LEAST_SHARE:
        return []
    evidence = (
        f"a rank sends {format_bytes(network.sent_bytes)} an exchange; summing {format_bytes(nbytes)} over "
        f"{table.records.size} ranks needs {format_bytes(needed)} (2 (N-1)/N)",
    )
    fix = Fix(
        "look for what else is exchanged: sparse gradients, buffers, or a route that sends all to all ranks",
        command_with(table.records, {"route": "auto"}), Gain(saved, "exposed time in proportion to bytes"),
        {"route": "auto"},
    )  # fmt: skip
    times = network.sent_bytes / needed
    title = f"{times:.1f} times the bytes that a sum needs are sent: {format_cost(saved, share)}"
    return [
        Finding("extra-exchange", title, saved, share, phase="exchange", evidence=evidence, fixes=(fix,),
                confidence="medium")
    ]  # fmt: skip
