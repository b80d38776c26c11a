"""The nearest known name, for errors about unknown ones."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name closest to `name`, or None when nothing is close."""
    names = list(known)
    found = [each for each in names if _is_swapped(name, each)]
    found += difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return found[0] if found else None


def _is_swapped(name: str, other: str) -> bool:
    """Return whether two neighbouring letters changed places: the commonest slip, to difflib two of them."""
    swaps = (f"{name[:at]}{name[at + 1]}{name[at]}{name[at + 2 :]}" for at in range(len(name) - 1))
    return name != other and other in swaps


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a remedy: the nearest name, or all of them.

    >>> did_you_mean("bucket_byte", ["accumulate", "bucket_bytes"])
    "did you mean 'bucket_bytes'?"
    """
    names = sorted(known)
    close = nearest(name, names)
    return f"did you mean {close!r}?" if close else f"known: {', '.join(names)}"
