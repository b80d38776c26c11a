"""What the variables of a Horovod job ask for, beside a rank's place: fusion, stalls, timelines, plan keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .env import own_environment, read_number, read_seconds, read_switch, variables
from .job_plan import PlanRequest

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
