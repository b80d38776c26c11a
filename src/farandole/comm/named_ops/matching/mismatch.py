"""Whether members ask for the same thing, and if not, in which words they are told.

The words before the colon and after "One rank" are those that scripts written for Horovod look for. Behind
them stands who asked for what.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ....core.vocabulary.rank_lists import name_ranks
from ..operations.signature import Signature

_WITHOUT_SCALARS = ("allgather", "alltoall", "reducescatter")
Told = Mapping[int, Signature]
"""What each member told, by rank."""


def disagreement(told: Told, absent: Sequence[int], hosts: Sequence[str]) -> str:
    """Return what is wrong with an operation, the same text on all members; empty when they agree.

    `absent`: members that have joined. `hosts`: by rank.
    """
    ordered = {rank: told[rank] for rank in sorted(told)}
    first = next(iter(ordered.values()))
    kind = first.kind.upper()

    def differ(read: Callable[[Signature], Any], text: Callable[[Any, Any], str], show: Any = str) -> str:
        values = {rank: read(signature) for rank, signature in ordered.items()}
        mine = values[next(iter(values))]
        for other in values.values():
            if other != mine:
                return f"{text(show(mine), show(other))} ({_who(values, show, hosts)})"
        return ""

    found = differ(
        lambda s: s.kind.upper(),
        lambda a, b: f"Mismatched operations: One rank did an {a}, but another rank did an {b}.",
    ) or differ(
        lambda s: s.group,
        lambda a, b: f"Mismatched groups: One rank submitted it {a}, but another rank {b}.",
        _group_text,
    )
    if found:
        return found
    if absent and first.kind != "allreduce":
        return (
            f"{first.kind.capitalize()} is not supported with Join at this time. "
            f"({name_ranks(sorted(absent))} joined, and {name_ranks(list(ordered))} went on)"
        )
    found = differ(
        lambda s: s.dtype,
        lambda a, b: f"Mismatched data types: One rank had type {a}, but another rank had type {b}.",
    )
    found = found or _shapes(first, kind, differ)
    for read, text, show in (
        (
            lambda s: s.reduction,
            "Mismatched reduction operation: One rank specified {}, but another rank specified {}.",
            str,
        ),
        (
            lambda s: (s.prescale, s.postscale),
            "Mismatched prescale and/or postscale factors: One rank specified {}, but another rank specified {}.",
            lambda pair: f"prescale {pair[0]!r} and postscale {pair[1]!r}",
        ),
        (
            lambda s: s.root,
            f"Mismatched {kind} root ranks: One rank specified root rank {{}}, "
            "but another rank specified root rank {}.",
            str,
        ),
        (
            lambda s: s.codec,
            "Mismatched codecs: One rank specified {}, but another rank specified {}.",
            str,
        ),
        (
            lambda s: s.device,
            f"Mismatched {kind} CPU/GPU device selection: One rank specified device {{}}, "
            "but another rank specified device {}.",
            lambda device: {"cpu": "CPU", "cuda": "GPU"}.get(device, device),
        ),
    ):
        found = found or differ(read, text.format, show)
    if not found and first.kind.endswith("process_set"):
        found = differ(
            lambda s: s.splits,
            lambda a, b: f"Mismatched process sets: One rank specified {a}, but another rank specified {b}.",
            lambda ranks: str(list(ranks)),
        )
    return found


def _shapes(first: Signature, kind: str, differ: Callable[..., str]) -> str:
    if first.kind in ("allgather", "alltoall"):
        found = differ(
            lambda s: len(s.shape),
            lambda a, b: (
                f"Mismatched {kind} tensor shapes: One rank sent a tensor of rank {a}, "
                f"but another rank sent a tensor of rank {b}."
            ),
        )
        for dimension in range(1, len(first.shape)):
            found = found or differ(
                lambda s, d=dimension: s.shape[d],
                lambda a, b, d=dimension: (
                    f"Mismatched {kind} tensor shapes: One rank sent a tensor with dimension "
                    f"{d} equal to {a}, but another rank sent a tensor with dimension {d} equal to {b}."
                ),
            )
    else:
        found = differ(
            lambda s: s.shape,
            lambda a, b: (
                f"Mismatched {kind} tensor shapes: One rank sent a tensor of shape {a}, "
                f"but another rank sent a tensor of shape {b}."
            ),
            lambda shape: str(list(shape)),
        )
    if not found and first.kind in _WITHOUT_SCALARS and not first.shape:
        found = f"Process-set rank zero tried to {kind} a rank-zero tensor."
    return found


def _group_text(names: tuple[str, ...]) -> str:
    return (
        f"in a group of {len(names)} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
        if names
        else "alone"
    )


def _who(values: Mapping[int, Any], show: Callable[[Any], str], hosts: Sequence[str]) -> str:
    """Name each value with its ranks and their hosts."""
    parties: dict[Any, list[int]] = {}
    for rank, value in values.items():
        parties.setdefault(value, []).append(rank)
    shown = [
        f"{show(value)} on {name_ranks(ranks)} ({', '.join(dict.fromkeys(hosts[rank] for rank in ranks))})"
        for value, ranks in list(parties.items())[:4]
    ]
    return "; ".join(shown)
