"""Steps of a training: which optimizer counts them, and who is told of each.

[Note: the leading optimizer] Several models may train at once, and a step is counted once: by the first optimizer
that was registered and still lives. When it is dropped, the next one leads, and the count goes on.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

Listener = Callable[[int], None]


class StepCounter:
    """The steps since `fd.init`. Optimizers are known weakly."""

    def __init__(self) -> None:
        self.done = 0
        self.has_begun = False
        """Whether an optimizer was ever registered: a model was distributed, or is recorded."""
        self._optimizers: list[weakref.ref[object]] = []
        """In the order of registration: the first that lives leads."""
        self._listeners: list[Listener] = []
        self.on_begin: Callable[[], None] | None = None
        """Called where a step begins: when an optimizer is registered, and at the end of each step."""

    def register(self, optimizer: object) -> None:
        """Let `optimizer` lead once those registered before it are gone. See [Note: the leading optimizer]."""
        self.has_begun = True
        self._optimizers = [each for each in self._optimizers if each() is not None]
        if not any(each() is optimizer for each in self._optimizers):
            self._optimizers.append(weakref.ref(optimizer))
        if self.on_begin is not None:
            self.on_begin()

    def unregister(self, optimizer: object) -> None:
        """Let `optimizer` lead no more: its training is over, and something may still hold it."""
        self._optimizers = [each for each in self._optimizers if each() not in (None, optimizer)]

    def optimizers(self) -> list[object]:
        """Return those that are registered and live, in their order."""
        found = (each() for each in self._optimizers)
        return [each for each in found if each is not None]

    def count(self, optimizer: object) -> bool:
        """Count a step of `optimizer` if it leads; return whether it does."""
        while self._optimizers:
            leader = self._optimizers[0]()
            if leader is optimizer:
                self.done += 1
                return True
            if leader is not None:
                return False
            del self._optimizers[0]
        return False

    def after_step(self, listener: Listener) -> None:
        """Call `listener` with the number of every step that is done, after it was recorded."""
        self._listeners.append(listener)

    def notify(self) -> None:
        """Call the listeners."""
        for listener in self._listeners:
            listener(self.done)
        if self.on_begin is not None:
            self.on_begin()

    def forget(self) -> None:
        """Call no listener any more."""
        self._listeners.clear()
        self.on_begin = None
