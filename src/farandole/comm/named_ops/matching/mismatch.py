"""Whether members ask for the same thing, and if not, in which words they are told.

The words before the colon and after "One rank" are those that scripts written for Horovod look for. Behind
them stands who asked for what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ....core.vocabulary.rank_lists import name_ranks
from ..operations.signature import Signature

_WITHOUT_SCALARS = ("allgather", "alltoall", "reducescatter")
Told = Mapping[int, Signature]
"""What each member told, by rank."""


class _Fact(NamedTuple):
    """Something in which members may differ, and how they are told: two values, and the ``kind`` of operation."""

    read: Callable[[Signature], Any]
    text: str
    show: Callable[[Any], str] = str


def _group_text(names: tuple[str, ...]) -> str:
    return (
        f"in a group of {len(names)} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
        if names
        else "alone"
    )


_WHAT = (
    _Fact(lambda s: s.kind.upper(), "Mismatched operations: One rank did an {}, but another rank did an {}."),
    _Fact(lambda s: s.group, "Mismatched groups: One rank submitted it {}, but another rank {}.", _group_text),
)
_DTYPE = _Fact(lambda s: s.dtype, "Mismatched data types: One rank had type {}, but another rank had type {}.")
_DIMENSIONS = _Fact(
    lambda s: len(s.shape),
    "Mismatched {kind} tensor shapes: One rank sent a tensor of rank {}, "
    "but another rank sent a tensor of rank {}.",
)
_SHAPE = _Fact(
    lambda s: s.shape,
    "Mismatched {kind} tensor shapes: One rank sent a tensor of shape {}, "
    "but another rank sent a tensor of shape {}.",
    lambda shape: str(list(shape)),
)
_HOW = (
    _Fact(
        lambda s: s.reduction,
        "Mismatched reduction operation: One rank specified {}, but another rank specified {}.",
    ),
    _Fact(
        lambda s: (s.prescale, s.postscale),
        "Mismatched prescale and/or postscale factors: One rank specified {}, but another rank specified {}.",
        lambda pair: f"prescale {pair[0]!r} and postscale {pair[1]!r}",
    ),
    _Fact(
        lambda s: s.root,
        "Mismatched {kind} root ranks: One rank specified root rank {}, but another rank specified root rank {}.",
    ),
    _Fact(lambda s: s.codec, "Mismatched codecs: One rank specified {}, but another rank specified {}."),
    _Fact(
        lambda s: s.chosen_with,
        "Mismatched exchanges: One rank has its codec chosen with {!r}, but another rank with {!r}.",
    ),
    _Fact(
        lambda s: s.device,
        "Mismatched {kind} CPU/GPU device selection: One rank specified device {}, "
        "but another rank specified device {}.",
        lambda device: {"cpu": "CPU", "cuda": "GPU"}.get(device, device),
    ),
)
_SETS = _Fact(
    lambda s: s.splits,
    "Mismatched process sets: One rank specified {}, but another rank specified {}.",
    lambda ranks: str(list(ranks)),
)


def disagreement(told: Told, absent: Sequence[int], hosts: Sequence[str]) -> str:
    """Return what is wrong with an operation, the same text on all members; empty when they agree.

    `absent`: members that have joined. `hosts`: by rank.
    """
    ordered = {rank: told[rank] for rank in sorted(told)}
    first = next(iter(ordered.values()))
    found = _difference(_WHAT, ordered, hosts)
    if found:
        return found
    if absent and first.kind != "allreduce":
        return (
            f"{first.kind.capitalize()} is not supported with Join at this time. "
            f"({name_ranks(sorted(absent))} joined, and {name_ranks(list(ordered))} went on)"
        )
    found = _difference([_DTYPE, *_shapes_of(first)], ordered, hosts)
    if not found and first.kind in _WITHOUT_SCALARS and not first.shape:
        found = f"Process-set rank zero tried to {first.kind.upper()} a rank-zero tensor."
    sets = [_SETS] if first.kind.endswith("process_set") else []
    return found or _difference([*_HOW, *sets], ordered, hosts)


def _difference(facts: Iterable[_Fact], ordered: Told, hosts: Sequence[str]) -> str:
    """Return the first of `facts` in which members differ, with who has what; empty when there is none."""
    for fact in facts:
        parties: dict[Any, list[int]] = {}
        for rank, signature in ordered.items():
            parties.setdefault(fact.read(signature), []).append(rank)
        if len(parties) > 1:
            kind = next(iter(ordered.values())).kind.upper()
            one, other, *_ = map(fact.show, parties)
            who = [
                f"{fact.show(value)} on {name_ranks(ranks)} ({', '.join(dict.fromkeys(hosts[r] for r in ranks))})"
                for value, ranks in list(parties.items())[:4]
            ]
            return f"{fact.text.format(one, other, kind=kind)} ({'; '.join(who)})"
    return ""


def _shapes_of(first: Signature) -> list[_Fact]:
    """Return what shapes have to agree in; given one whose dimensions are as many as the others'."""
    if first.kind not in ("allgather", "alltoall"):
        return [_SHAPE]
    text = (
        "Mismatched {{kind}} tensor shapes: One rank sent a tensor with dimension {0} equal to {{}}, "
        "but another rank sent a tensor with dimension {0} equal to {{}}."
    )
    rows = [_Fact(lambda s, d=d: s.shape[d], text.format(d)) for d in range(1, len(first.shape))]  # type: ignore[misc]
    return [_DIMENSIONS, *rows]
