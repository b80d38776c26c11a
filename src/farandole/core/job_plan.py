"""The plan of a job, and which source decides each of its keys: the one home of that decision.

`read_plan` is the launcher's: a file, ``--set`` and flags. `resolve_plan` and `plan_with_requests` are the ranks':
the script, what the launcher passed on, and variables. Every front end asks here, so that a plan has the same
sources whichever names a script uses. Two sources that say different things are an error naming both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from .env import own_environment, read_number, read_run_settings, read_seconds, read_switch, variables
from .vocabulary.config import parse_settings
from .vocabulary.degrees import OTHER_SAMPLES, degrees_of, refuse_shares
from .vocabulary.errors import ConfigError, PlanError
from .vocabulary.rules import check
from .vocabulary.spec import Plan


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


# What the variables of a Horovod job ask for, beside a rank's place: fusion, stalls, timelines, plan keys.


_FUSION, _SHUTDOWN = "HOROVOD_FUSION_THRESHOLD", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
_HIERARCHICAL = ("HOROVOD_HIERARCHICAL_ALLREDUCE", "HOROVOD_TORUS_ALLREDUCE")


@dataclass(frozen=True)
class HorovodVariables:
    """What the variables of a Horovod job ask for, as far as it has a meaning here."""

    fusion_bytes: int = 128 * 2**20
    cache_capacity: int = 1024
    stall_warning_seconds: float = 60.0
    """0: never."""
    stall_shutdown_seconds: float = 0.0
    """0: never."""
    dynamic_process_sets: bool = False
    timeline: str = ""
    """Where to write the timeline; empty: nowhere."""
    timeline_is_dynamic: bool = False
    """Whether the program starts and stops timelines itself."""
    timeline_mark_cycles: bool = False
    timeout_seconds: float | None = None
    """How long ranks wait for each other; None: not said."""
    plan: Mapping[str, PlanRequest] = field(default_factory=dict)
    """What they ask of keys of the plan."""
    asks_for_hierarchy: bool = False
    """Whether a variable says: inside each host first."""
    warnings: tuple[str, ...] = ()
    """What of it cannot be had."""


def stall_warnings(flags: Mapping[str, str]) -> tuple[str, ...]:
    """Return what every rank would warn of: flags that would end a job before its stall is reported.

    `flags`: the variables that the command line sets; they stand before this process's own, as for the ranks.
    """
    names = (
        "HOROVOD_STALL_CHECK_TIME_SECONDS",
        _SHUTDOWN,
        "HOROVOD_STALL_CHECK_DISABLE",
    )
    if not any(name in flags for name in names):
        return ()
    values = {**own_environment(), **flags}
    return read_horovod_variables({name: values[name] for name in names if values.get(name)}).warnings


def read_horovod_variables(environ: Mapping[str, str] | None = None) -> HorovodVariables:
    """Return what the ``HOROVOD_*`` variables ask for.

    Raises `ConfigError` naming the variable for a value that makes no sense. A stall that would end the job before
    it is reported does not end it at all, as in Horovod, which is among the warnings.
    """
    environ = variables(environ)
    default = HorovodVariables()
    warning = read_seconds(environ, "HOROVOD_STALL_CHECK_TIME_SECONDS", default.stall_warning_seconds)
    shutdown = read_seconds(environ, _SHUTDOWN, default.stall_shutdown_seconds)
    if read_switch(environ, "HOROVOD_STALL_CHECK_DISABLE"):
        warning = shutdown = 0.0
    warnings: tuple[str, ...] = ()
    if 0 < shutdown < warning:
        warnings = (
            f"{_SHUTDOWN}={shutdown:g} has no effect: it is below HOROVOD_STALL_CHECK_TIME_SECONDS={warning:g}, "
            "and the job would end before the stall is reported; make the second one smaller",
        )
        shutdown = 0.0
    timeline = environ.get("HOROVOD_TIMELINE", "").strip()
    timeout_seconds = read_seconds(environ, "HOROVOD_GLOO_TIMEOUT_SECONDS", 0.0)
    return HorovodVariables(
        fusion_bytes=read_number(environ, _FUSION, default.fusion_bytes, 0),
        cache_capacity=read_number(environ, "HOROVOD_CACHE_CAPACITY", default.cache_capacity, 0),
        stall_warning_seconds=warning,
        stall_shutdown_seconds=shutdown,
        dynamic_process_sets=read_switch(environ, "HOROVOD_DYNAMIC_PROCESS_SETS"),
        timeline="" if timeline.upper() == "DYNAMIC" else timeline,
        timeline_is_dynamic=timeline.upper() == "DYNAMIC",
        timeline_mark_cycles=read_switch(environ, "HOROVOD_TIMELINE_MARK_CYCLES"),
        timeout_seconds=timeout_seconds or None,
        plan=_plan_requests(environ, shutdown),
        asks_for_hierarchy=any(read_switch(environ, variable) for variable in _HIERARCHICAL),
        warnings=warnings,
    )


def _plan_requests(environ: Mapping[str, str], shutdown_seconds: float) -> dict[str, PlanRequest]:
    """Return the keys of the plan that Horovod's variables set, as the flags of the same names do."""
    requests: dict[str, PlanRequest] = {}

    def request(key: str, value: object, variable: str) -> None:
        requests[key] = PlanRequest(value, f"{variable}={environ[variable].strip()}")

    if environ.get(_FUSION, "").strip():
        request("bucket_bytes", max(1, read_number(environ, _FUSION, 0, 0)), _FUSION)
    for variable in _HIERARCHICAL:
        if read_switch(environ, variable):
            request("route", "hierarchical", variable)
    if read_switch(environ, "HOROVOD_AUTOTUNE"):
        request("codec", "auto", "HOROVOD_AUTOTUNE")
    if shutdown_seconds:
        request("timeout_seconds", shutdown_seconds, _SHUTDOWN)
    return requests


def refuse_plan(plan: Plan | None, size: int | None) -> None:
    """Raise `PlanError` for a plan that so many ranks cannot have. `size`: None where it is not known."""
    if plan is not None and size is not None:
        degrees = degrees_of(plan, size)
        check({**vars(plan), **degrees.above_one()})
        refuse_shares(plan.balance or "", degrees.size_over(OTHER_SAMPLES))
