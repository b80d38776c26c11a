"""``farandole measure``: the job over all hosts that measures, and a cluster as text. Imports no torch."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ...core.cluster import Cluster, CodecCost, Coefficient, FigureChange, is_changed
from ...core.cluster_file import check_cluster
from ...core.vocabulary.config import FieldPath, from_plain
from ...core.vocabulary.errors import ConfigError, FarandoleError
from ...core.vocabulary.text import format_table
from ...core.vocabulary.units import format_bytes, format_rate, format_seconds
from ..launch_ranks import account_of, follow_job, refusal, remove_unless_failed

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


# The job: it measures what the planner needs to know.
#
# It runs through the ordinary commands: here, over ssh, or on the hosts of ``farandole emulate``.


DEFAULT_SECONDS, MOST_SECONDS = 90.0, 3600.0
_START_SECONDS = 90.0
_MOST_SHARE = 4.0
"""A job that takes so many times its time hangs."""


def measure_cluster(
    words: Sequence[str], *, seconds: float, name: str, disk: str, say: Callable[[str], None]
) -> Cluster:
    """Run the job on the hosts that `words`, options of ``farandole run``, name; its phases take about `seconds`.

    Args:
        words: options that place the job, such as ``["-np", "2"]``.
        seconds: for all phases together; the start of the ranks, and their end, come on top.
        name: of the cluster.
        disk: folder whose disk is measured, on the hosts that have it.
        say: is given lines of progress.

    Raises:
        ConfigError: the job is refused for its options, or the hosts have different numbers of ranks.
        FarandoleError: a rank failed; the message is the launcher's, which names the logs.
    """
    job = [sys.executable, "-m", "farandole.bench.cluster.worker", "--seconds", f"{seconds:g}"]
    job += ["--name", name, "--disk", disk]
    directory = Path(tempfile.mkdtemp(prefix="farandole-measure-"))
    code = 0
    try:
        run = ["run", *words, "--json", "--run-dir", str(directory / "run"), "--", *job]
        end = time.monotonic() + _MOST_SHARE * seconds + _START_SECONDS
        code, result, output = follow_job([sys.executable, "-m", "farandole", *run], say, end)
    finally:
        remove_unless_failed(directory, code)
    if code == ConfigError.exit_code:
        raise ConfigError(refusal(output))
    if code or result is None:
        raise FarandoleError(
            "the measurement failed: " + "\n".join(account_of(code, output)),
            remedy="check the hosts: farandole test",
        )
    cluster = from_plain(Cluster, result, FieldPath("measured"))
    check_cluster(cluster, "measured")
    return cluster
