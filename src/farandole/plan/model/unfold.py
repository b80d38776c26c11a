"""Folded units taken apart: where equal units are treated differently, as by patterns of their names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import groupby

from .profile import ModelProfile, ModelUnit


def name_of(first: str, number: int) -> str:
    """Return the name of the unit that is so many after the one that is named `first`.

    >>> name_of("model.layers.4", 3)
    'model.layers.7'
    """
    stem, _, last = first.rpartition(".")
    if not number or not last.isdigit():
        return first
    return f"{stem}.{int(last) + number}" if stem else str(int(last) + number)


def unfolded(profile: ModelProfile, patterns: Sequence[str]) -> ModelProfile:
    """Return the profile with units folded only where all of them match one of `patterns`, or none does."""
    units: list[ModelUnit] = []
    for unit in profile.units:
        runs = groupby(range(unit.count), key=lambda number: _matches(name_of(unit.name, number), patterns))
        for _, run in runs:
            numbers = list(run)
            units.append(replace(unit, name=name_of(unit.name, numbers[0]), count=len(numbers)))
    return profile if len(units) == len(profile.units) else replace(profile, units=tuple(units))


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
