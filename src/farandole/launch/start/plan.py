"""The plan of a job: a file, ``--set`` and flags; which of them wins, and which contradictions are refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core.vocabulary.config import parse_settings, read_mapping
from ...core.vocabulary.errors import ConfigError, PlanError
from ...core.vocabulary.spec import Plan


@dataclass(frozen=True)
class PlanOverride:
    """A plan key that a flag or the configuration file of horovodrun sets."""

    value: Any
    source: str
    """The flag, or the file and its key."""
    typed: bool


def read_plan(
    path: str | None, settings: Sequence[str], overrides: Mapping[str, PlanOverride] | None = None
) -> tuple[Plan, bool]:
    """Return the plan of the command line and whether one was given.

    Order: --set and flags over the plan file over defaults. `overrides` are the keys that flags of horovodrun
    and its configuration file set; two places that say different things are a `ConfigError` naming both, but
    a typed flag goes before the plan file.
    """
    values: dict[str, Any] = {}
    if path is not None:
        values = read_mapping(Path(path), error=PlanError)
        Plan.from_mapping(values, where=path)
    chosen: dict[str, Any] = dict(parse_settings(settings, error=PlanError))
    Plan.from_mapping(chosen, where="--set")
    for key, override in (overrides or {}).items():
        if key in chosen:
            _refuse_contradiction(key, chosen[key], "--set", override)
        elif key in values and not override.typed:
            _refuse_contradiction(key, values[key], str(path), override)
        chosen.setdefault(key, override.value)
    return Plan.from_mapping({**values, **chosen}, where=path or "--set"), bool(path or chosen)


def _refuse_contradiction(key: str, value: Any, where: str, override: PlanOverride) -> None:
    theirs, ours = (Plan.from_mapping({key: each}, where=where) for each in (value, override.value))
    if theirs != ours:
        raise ConfigError(
            f"{where} says {key} = {value!r}, {override.source} says {key} = {override.value!r}",
            remedy="drop one of them",
        )
