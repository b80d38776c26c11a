"""Bound methods that are called as long as their objects live."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


class Listeners:
    """Bound methods, in the order in which they were added. They do not keep their objects alive."""

    def __init__(self) -> None:
        self._methods: list[weakref.WeakMethod[Callable[..., object]]] = []

    def add(self, method: Callable[..., object], *, first: bool = False) -> None:
        """Call `method` too, for as long as its object lives; `first`: before all that are here."""
        self._methods = [each for each in self._methods if each() is not None]
        self._methods.insert(0 if first else len(self._methods), weakref.WeakMethod(method))

    def clear(self) -> None:
        """Call none of them any more."""
        self._methods.clear()

    def __call__(self, *arguments: Any) -> None:
        """Call them all. One that is added meanwhile is not called yet."""
        for each in list(self._methods):
            method = each()
            if method is not None:
                method(*arguments)
