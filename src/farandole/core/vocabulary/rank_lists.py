"""Lists of ranks as messages, findings and reports write them."""

from __future__ import annotations

from collections.abc import Sequence


def name_ranks(ranks: Sequence[int], *, most: int | None = None, hosts: Sequence[str] = ()) -> str:
    """Return ranks as a sentence has them, `most` of them by number, and the hosts they are on.

    >>> name_ranks([3]), name_ranks([0, 2, 5]), name_ranks([0, 1, 2, 3, 4])
    ('rank 3', 'ranks 0, 2 and 5', 'ranks 0-4')
    >>> name_ranks([0, 2, 4, 6, 8, 10], most=4, hosts=["b"])
    'ranks 0, 2, 4, 6 and 2 more (host b)'
    """
    where = f" (host {', '.join(hosts)})" if hosts else ""
    if len(ranks) == 1:
        return f"rank {ranks[0]}{where}"
    if len(ranks) > (most or 3) and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}-{ranks[-1]}{where}"
    if most is not None and len(ranks) > most:
        shown, last = ranks[:most], f"{len(ranks) - most} more"
    else:
        shown, last = ranks[:-1], str(ranks[-1])
    return f"ranks {', '.join(map(str, shown))} and {last}{where}"
