"""What belongs to the gate: every test but those that are marked for ``make test-all``.

``@pytest.mark.full(why)`` takes a test or a file out of the gate. Of a parametrised test, ``gate_cases`` names the
cases that represent it in the gate, and ``full_cases`` those that do not: by what pytest writes in brackets.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import pytest

REASONS = {
    "busy": "its verdict may depend on how busy the machine is, or it looks at the whole machine",
    "slow": "more than some seconds, or a fixture of half a minute",
    "random": "programs of new seeds: their verdict is new each time",
    "further": "a further case of a feature: other tests of the same file or package are in the gate",
}


def leaves(case: str, marks: Iterable[pytest.Mark]) -> bool:
    """Return whether a case of a test with these marks runs in ``make test-all`` only."""
    for mark in marks:
        if mark.name == "full" or (mark.name == "full_cases" and case in mark.args):
            return True
        if mark.name == "gate_cases" and case not in mark.args:
            return True
    return False


def mark_full(items: Iterable[pytest.Item], *, all_cases: bool) -> None:
    """Mark what the gate leaves out; `all_cases`: whole files were collected.

    Raises UsageError for a reason that is none, and for a case that a test does not have.
    """
    cases: dict[str, set[str]] = defaultdict(set)
    named: dict[str, set[str]] = defaultdict(set)
    for item in items:
        test, _, case = item.nodeid.partition("[")
        case = case.removesuffix("]")
        marks = list(item.iter_markers())
        cases[test].add(case)
        for mark in marks:
            if mark.name == "full" and (len(mark.args) != 1 or mark.args[0] not in REASONS):
                raise pytest.UsageError(f"{test}: full{mark.args}: expected one of {', '.join(REASONS)}")
            if mark.name in ("gate_cases", "full_cases"):
                named[test].update(mark.args)
        if leaves(case, marks):
            item.add_marker(pytest.mark.full("further"))
    stale = [f"{test}[{case}]" for test in named for case in sorted(named[test] - cases[test])]
    if all_cases and stale:
        raise pytest.UsageError(f"cases that are not there: {', '.join(stale)}")
