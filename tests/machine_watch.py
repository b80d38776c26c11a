"""Compare the machine before and after each test and the session; say which test changed what."""

from __future__ import annotations

from tests.machine_state import Machine, Places, compare, in_use, this_machine

_ALLOWED = "tests write into temporary directories, and into namespaces of their own, see tests/machine_state.py"


class MachineWatch:
    """What was there last, and which test was running when a temporary file appeared.

    A module's fixtures are made in the time of its first test and go in the time of its last.
    """

    def __init__(self, places: Places, machine: Machine | None = None) -> None:
        self.said: list[str] = []
        """For the end of the session, one line each."""
        self._machine = machine or this_machine()
        self._places = places
        self._state = self._machine.read()
        self._own = places.read()
        self._memory = set(self._machine.shared_memory())
        self._appeared: dict[str, str] = {}

    def check(self, test: str) -> None:
        """Raise `AssertionError` for what changed since the last test ended; the next one is not blamed for it."""
        changed = self._changes()
        for name in self._left():
            self._appeared.setdefault(name, test)
        assert not changed, f"the test changed this machine; {_ALLOWED}:\n" + "\n".join(changed)

    def finish(self) -> bool:
        """Return whether something is wrong that no test was blamed for; `said` has it."""
        self.said += [f"after the last test: {line}" for line in self._changes()]
        for name in self._left():
            if not in_use(name):  # others share memory here, too; our ranks are gone by now
                self.said.append(
                    f"left behind: {name}, first seen after {self._appeared.get(name, 'the last test')}"
                )
        return bool(self.said)

    def _left(self) -> list[str]:
        """Return what lies where tests put things for a while."""
        return self._places.left() + [name for name in self._machine.shared_memory() if name not in self._memory]

    def _changes(self) -> list[str]:
        self._state, changed = self._machine.changes(self._state)
        own, self._own = self._own, self._places.read()
        return changed + compare(own, self._own)
