"""The plan of a job, and which source decides each of its keys: the one home of that decision.

`read_plan` is the launcher's: a file, ``--set`` and flags. `resolve_plan` and `plan_with_requests` are the ranks':
the script, what the launcher passed on, and variables. Every front end asks here, so that a plan has the same
sources whichever names a script uses. Two sources that say different things are an error naming both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ..vocabulary.config import parse_settings
from ..vocabulary.errors import ConfigError, PlanError
from ..vocabulary.spec import Plan
from .env import read_run_settings


class PlanRequest(NamedTuple):
    """What a variable, a flag or a key of horovodrun's configuration file asks of one key of the plan."""

    value: Any
    source: str
    """How the user finds it, e.g. ``HOROVOD_AUTOTUNE=1``, a flag, or a file and its key."""
    is_typed: bool = False
    """Whether it stands on the command line, and goes before the plan file."""


@dataclass(frozen=True)
class JobPlan:
    """A plan, and where each of its keys is from."""

    plan: Plan
    sources: Mapping[str, str] = field(default_factory=dict)
    """By key that is not as by default: a file, or a variable."""

    def describe(self, key: str) -> str:
        """Return one key with its value and its source, to be read."""
        return f"{key} = {getattr(self.plan, key)!r} ({self.sources.get(key, 'by default')})"

    def changed(self) -> list[str]:
        """Return the keys that are not as by default."""
        return [key for key in self.plan.to_mapping() if getattr(self.plan, key) != getattr(_DEFAULT, key)]


_DEFAULT = Plan()


def read_plan(
    path: str | None, settings: Sequence[str], requests: Mapping[str, PlanRequest] | None = None
) -> Plan | None:
    """Return the plan of the command line; None if none was given.

    Order: --set and flags over the plan file over defaults. `requests` are the keys that flags of horovodrun
    and its configuration file set. Two places that say different things are a `ConfigError` naming both, but
    a typed flag goes before the plan file.
    """
    values: dict[str, Any] = {}
    if path is not None:
        values = Plan.read_keys(path)
    chosen: dict[str, Any] = dict(parse_settings(settings, error=PlanError))
    Plan.from_mapping(chosen, where="--set")
    for key, request in (requests or {}).items():
        if key in chosen:
            _refuse_contradiction(key, chosen[key], "--set", request)
        elif key in values and not request.is_typed:
            _refuse_contradiction(key, values[key], str(path), request)
        chosen.setdefault(key, request.value)
    return Plan.from_mapping({**values, **chosen}, where=path or "--set") if path or chosen else None


def _refuse_contradiction(key: str, value: Any, where: str, request: PlanRequest) -> None:
    theirs, ours = (Plan.from_mapping({key: each}, where=where) for each in (value, request.value))
    if theirs != ours:
        raise ConfigError(
            f"{where} says {key} = {value!r}, {request.source} says {key} = {request.value!r}",
            remedy="drop one of them",
        )


def resolve_plan(given: Plan | None) -> Plan:
    """Return the plan to apply: the script's, or what ``farandole run`` passed on.

    Raises `PlanError`, naming the keys and both values, when they differ.
    """
    path = read_run_settings().plan_file
    if path is None:
        return given if given is not None else Plan()
    launched = Plan.read(path)
    if given is not None and given != launched:
        differences = ", ".join(
            f"{key} = {mine!r} in the script, {theirs!r} in {path}"
            for key, (mine, theirs) in given.differences(launched).items()
        )
        raise PlanError(f"two plans: {differences}", remedy="drop the plan of the script, or that of the command")
    return launched


def plan_with_requests(requests: Mapping[str, PlanRequest]) -> JobPlan:
    """Return the launched plan with what variables ask of keys that it leaves as by default.

    Raises `ConfigError`, naming both, where the plan says something else.
    """
    plan = resolve_plan(None)
    path = read_run_settings().plan_file
    sources = {key: str(path) for key in JobPlan(plan).changed()}
    for key, request in requests.items():
        if key in sources and getattr(plan, key) != request.value:
            raise ConfigError(
                f"{JobPlan(plan, sources).describe(key)}, but {request.source} asks for {key} = {request.value!r}",
                remedy="drop one of them",
            )
        if getattr(plan, key) != request.value:
            plan = replace(plan, **{key: request.value})
            sources[key] = request.source
    return JobPlan(plan, sources)
