"""The links between hosts as a table: how fast each is while data is on it. See `read.link_traffic`."""

from __future__ import annotations

from ....core.vocabulary.units import format_bits_per_second, format_bytes
from ...read.link_traffic import links_between_hosts
from .blocks import Table
from .formatting import percent
from .run import Run

MOST_SHOWN = 24


def table_of_links(run: Run) -> Table | None:
    """Return the links, the slowest first; None where the kernels' counts are missing."""
    links = sorted(links_between_hosts(run.timelines), key=lambda link: link.bytes_per_second)
    if not links:
        return None
    rows = [
        [
            link.source, link.target, format_bytes(link.sent_bytes),
            format_bits_per_second(8 * link.bytes_per_second), percent(link.busy_share),
        ]
        for link in links[:MOST_SHOWN]
    ]  # fmt: skip
    more = f" The slowest {MOST_SHOWN} of {len(links)}." if len(links) > MOST_SHOWN else ""
    return Table(
        ["from", "to", "sent", "rate while used", "used"],
        rows,
        texts=2,
        title="Ways between hosts, the slowest first",
        note="By the kernels' account of the ranks' connections. A way that is used all the time is what binds; "
        f"one that is hardly used is faster than its rate says.{more}",
    )
