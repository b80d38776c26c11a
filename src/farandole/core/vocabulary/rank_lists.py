"""Lists of ranks as messages, findings and reports write them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


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


def write_numbers(numbers: Iterable[int]) -> str:
    """Write a set of numbers as ranges, as Linux writes cores.

    >>> write_numbers({0, 1, 2, 8, 10})
    '0-2,8,10'
    """
    spans: list[list[int]] = []
    for number in sorted(set(numbers)):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def parse_numbers(text: str, *, most: int = 4096) -> set[int]:
    """Read what `write_numbers` wrote; nothing of another text, nor of more than `most` numbers.

    >>> sorted(parse_numbers("0-2,8,10"))
    [0, 1, 2, 8, 10]
    """
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not first.isdecimal() or not (last or first).isdecimal():
            return set()
        span = range(int(first), int(last or first) + 1)
        if len(found) + len(span) > most:
            return set()
        found.update(span)
    return found


def who_failed(rank: int | None, host: str, step: int | None, cause: str) -> str:
    """Return one line about the first cause of a stop, for example ``rank 1 on a failed after step 5: killed``.

    Args:
        rank: None: a whole host failed, or the way to it.
        host: Empty: neither a rank nor a host, but the launcher says `cause`.
        step: Steps that the rank had finished; None when unknown.
        cause: The exception, or how the process ended.
    """
    if not host:
        return cause
    after = f" after step {step}" if step else " before its first step" if step == 0 else ""
    return f"{f'host {host}' if rank is None else f'rank {rank} on {host}'} failed{after}: {cause}"
