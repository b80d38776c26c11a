"""A cluster, and what differs between two, as text for a terminal. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from ...core.cluster.cluster import Cluster, CodecCost, Coefficient
from ...core.cluster.compare import FigureChange, is_changed
from ...core.vocabulary.units import format_bytes, format_rate, format_seconds
from ..measure.intervals import format_table

_FREE_SECONDS_PER_BYTE = 1e-14
"""100 TB/s: what no memory gives."""


def format_cluster(cluster: Cluster) -> str:
    """Return a page of the most important figures."""
    device = cluster.device
    count = "1 rank" if cluster.ranks == 1 else f"{cluster.ranks} ranks"
    lines = [f"{cluster.name}: {count}; {device.name}"]
    lines += [f"  {key}: {value}" for key, value in cluster.fingerprint.items() if key in ("hosts", "hardware")]
    rows = [
        [f"computes {precision}, {format_rate(rate.flops)}FLOP", _rate(rate.flops_per_second, "FLOP/s"),
         rate.flops_per_second.source]
        for precision, rates in device.compute.items()
        for rate in (rates[0], rates[-1])[: len(rates)]
    ]  # fmt: skip
    rows += [
        [f"attends in {precision}, forward and backward", _rate(rate, "FLOP/s"), rate.source]
        for precision, rate in device.attention_flops_per_second.items()
    ]
    rows.append(["memory of a rank", format_bytes(int(device.memory_bytes.value)), device.memory_bytes.source])
    rows.append(["reads and writes memory", *_byte_rate(device.memory_bytes_per_second)])
    rows.append(["starts an operation", format_seconds(device.launch_seconds.value), device.launch_seconds.source])
    for title, figure in (
        ("loader, one worker", cluster.loader_bytes_per_second),
        ("disk, writing", cluster.disk_write_bytes_per_second),
        ("disk, reading", cluster.disk_read_bytes_per_second),
    ):
        if figure is not None:
            rows.append([title, *_byte_rate(figure)])
    rows.append(["computes longer while exchanging", *_times(cluster.compute_slowdown)])
    rows.append(["exchanges longer while computing", *_times(cluster.exchange_slowdown)])
    lines += ["", format_table(["device", "", "source"], rows)]
    exchanges = [
        [f"{tier.name} ({tier.ranks} ranks) {operation}", format_seconds(cost.latency_seconds.value),
         *_byte_rate(cost.bytes_per_second)]
        for tier in cluster.tiers
        for operation, cost in tier.collectives.items()
    ]  # fmt: skip
    if exchanges:
        lines += ["", format_table(["exchange", "latency", "a rank sends", "source"], exchanges)]
    codecs = [
        [name, _speed_of(cost), f"{cost.ratio:.3g}", cost.seconds_per_byte.source]
        for name, cost in cluster.codecs.items()
    ]
    if codecs:
        lines += ["", format_table(["codec", "of float32", "sent", "source"], codecs)]
    lines += [
        f"rank {rank} has {speed:.2g} times the speed of the others" for rank, speed in cluster.rank_speeds.items()
    ]
    return "\n".join(lines)


def format_changes(changes: Sequence[FigureChange], names: tuple[str, str]) -> str:
    """Return what differs between two clusters, figure by figure."""
    rows = [
        [change.path, _value(change.before), _value(change.after),
         "" if change.ratio is None else f"{change.ratio:.3g}x", _verdict(change)]
        for change in changes
        if is_changed(change)
    ]  # fmt: skip
    same = len(changes) - len(rows)
    if not rows:
        return f"{names[0]} and {names[1]} have the same {same} figures"
    disjoint = sum(change.is_disjoint is True for change in changes)
    count = "1 figure differs" if len(rows) == 1 else f"{len(rows)} figures differ"
    closing = f"{count}, {disjoint} by more than their intervals; {same} are the same"
    return format_table(["figure", *names, "ratio", "intervals"], rows) + f"\n\n{closing}"


def _verdict(change: FigureChange) -> str:
    if change.before is None or change.after is None:
        return "only one has it"
    return {True: "disjoint", False: "overlap", None: "not known"}[change.is_disjoint]


def _value(figure: Coefficient | None) -> str:
    return "-" if figure is None else f"{figure.value:.4g}"


def _times(figure: Coefficient) -> tuple[str, str]:
    return f"{figure.value:.3g}x", figure.source


def _rate(figure: Coefficient, unit: str) -> str:
    return f"{format_rate(figure.value)}{unit}"


def _byte_rate(figure: Coefficient) -> tuple[str, str]:
    return f"{format_bytes(int(figure.value))}/s", figure.source


def _speed_of(cost: CodecCost) -> str:
    per_byte, per_bucket = cost.seconds_per_byte.value, cost.seconds_per_bucket
    rate = f"{format_bytes(int(1 / per_byte))}/s" if per_byte > _FREE_SECONDS_PER_BYTE else "free"
    if per_bucket is None:
        return rate
    launches = f"{format_seconds(per_bucket.value)} a bucket"
    return launches if rate == "free" else f"{launches}, then {rate}"
