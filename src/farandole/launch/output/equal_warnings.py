"""Warnings that several ranks print alike: that of the first rank is shown. The logs have all of them."""

from __future__ import annotations

import re

_WARNING = re.compile(rb":\d+: \w*Warning: |^farandole: warning: ")
"""As Python prints a warning, ``train.py:3: UserWarning: ...``, and as Farandole does."""


class EqualWarnings:
    """What ranks have warned of so far."""

    def __init__(self) -> None:
        self._first: dict[bytes, int] = {}
        """The rank that printed a warning first."""
        self._hiding: set[int] = set()
        """Ranks whose last warning was hidden: the line of code below it is hidden with it."""

    def hides(self, rank: int, line: bytes) -> bool:
        """Return whether `line`, which `rank` wrote to stderr, belongs to a warning that another rank printed."""
        if rank in self._hiding and line.startswith(b"  "):
            return True
        self._hiding.discard(rank)
        if not _WARNING.search(line):
            return False
        is_equal = self._first.setdefault(line.strip(), rank) != rank
        if is_equal:
            self._hiding.add(rank)
        return is_equal
