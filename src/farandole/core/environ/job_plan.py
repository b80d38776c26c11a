"""The plan of the job that this process belongs to: what the script says, what the launcher passed on.

Every front end asks here, so that a plan has the same sources whichever names a script uses. Two sources that say
different things are an error naming both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ..vocabulary.errors import ConfigError, PlanError
from ..vocabulary.spec import Plan
from .env import read_run_settings


class VariableRequest(NamedTuple):
    """What a variable asks of one key of the plan."""

    value: Any
    source: str
    """How the user finds it, e.g. ``HOROVOD_AUTOTUNE=1``."""


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


def plan_with_requests(requests: Mapping[str, VariableRequest]) -> JobPlan:
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
