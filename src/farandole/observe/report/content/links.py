"""The ways between hosts as a table: how fast each is while something is on it. See `observe.ways`."""

from __future__ import annotations

from ....core.vocabulary.units import format_bits_per_second, format_bytes
from ...read.link_traffic import ways_between_hosts
from .blocks import Table
from .formatting import percent
from .run import Run

MOST_SHOWN = 24


def table_of_ways(run: Run) -> Table | None:
    """Return the ways, the slowest first; None where the kernels' counts are missing."""
    ways = sorted(ways_between_hosts(run.timelines), key=lambda way: way.bytes_per_second)
    if not ways:
        return None
    rows = [
        [
            way.source, way.target, format_bytes(way.sent_bytes),
            format_bits_per_second(8 * way.bytes_per_second), percent(way.busy_share),
        ]
        for way in ways[:MOST_SHOWN]
    ]  # fmt: skip
    more = f" The slowest {MOST_SHOWN} of {len(ways)}." if len(ways) > MOST_SHOWN else ""
    return Table(
        ["from", "to", "sent", "rate while used", "used"],
        rows,
        texts=2,
        title="Ways between hosts, the slowest first",
        note="By the kernels' account of the ranks' connections. A way that is used all the time is what binds; "
        f"one that is hardly used is faster than its rate says.{more}",
    )
