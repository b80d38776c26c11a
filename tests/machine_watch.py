"""Compare the machine before and after each test and the session; say which test changed what."""

from __future__ import annotations

from tests.machine_state import Machine, Places, compare, this_machine

LEFT_BEHIND = 6
"""Exit code of a session that left something behind: none of pytest's own, so that no red test hides it."""
_ALLOWED = "tests write into temporary directories, and into namespaces of their own, see tests/machine_state.py"


class MachineWatch:
    """What was there last, and which test was running when a temporary file appeared.

    A module's fixtures are made in the time of its first test and go in the time of its last.
    """

    def __init__(self, places: Places, machine: Machine | None = None) -> None:
        self.wrong: list[str] = []
        """For the end of the session, one line each: a test did it."""
        self.told: list[str] = []
        """For the end of the session, too: a test or any other program did it."""
        self._machine = machine or this_machine()
        self._places = places
        self._settings = self._machine.settings()
        self._shared = self._machine.shared()
        self._own = places.read()
        self._appeared: dict[str, str] = {}

    def check(self, test: str) -> None:
        """Raise `AssertionError` for what changed since the last test ended; the next one is not blamed for it."""
        changed = self._changes()
        for name in self._places.left():
            self._appeared.setdefault(name, test)
        assert not changed, f"the test changed this machine; {_ALLOWED}:\n" + "\n".join(changed)

    def finish(self) -> bool:
        """Return whether something is wrong that no test was blamed for; `wrong` and `told` have it."""
        self.wrong += [f"after the last test: {line}" for line in self._changes()]
        for name in self._places.left():
            self.wrong.append(f"left behind: {name}, first seen after {self._appeared.get(name, 'the last test')}")
        self.told += compare(self._shared, self._machine.shared())
        return bool(self.wrong)

    def _changes(self) -> list[str]:
        self._settings, changed = self._machine.changed_settings(self._settings)
        own, self._own = self._own, self._places.read()
        return changed + compare(own, self._own)
