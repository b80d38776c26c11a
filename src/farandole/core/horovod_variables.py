"""What the variables of a Horovod job ask for, beside a rank's place: fusion, stalls, timelines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .env import own_environment
from .env_values import read_number, read_seconds, read_switch
from .errors import ConfigError


@dataclass(frozen=True)
class HorovodSettings:
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


def check_stall_settings(flags: Mapping[str, str]) -> None:
    """Raise what every rank would: `ConfigError` for flags that end a job before its stall is reported.

    `flags`: the variables that the command line sets; they stand before this process's own, as for the ranks.
    """
    names = (
        "HOROVOD_STALL_CHECK_TIME_SECONDS",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
        "HOROVOD_STALL_CHECK_DISABLE",
    )
    if any(name in flags for name in names):
        told = {**own_environment(), **flags}
        read_horovod_settings({name: told[name] for name in names if told.get(name)})


def read_horovod_settings(environ: Mapping[str, str] | None = None) -> HorovodSettings:
    """Return what the ``HOROVOD_*`` variables ask for.

    Raises `ConfigError` naming the variable for a value that makes no sense, and naming both for a stall
    that would end the job before it is reported.
    """
    environ = own_environment() if environ is None else environ
    default = HorovodSettings()
    warning = read_seconds(environ, "HOROVOD_STALL_CHECK_TIME_SECONDS", default.stall_warning_seconds)
    shutdown = read_seconds(environ, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", default.stall_shutdown_seconds)
    if read_switch(environ, "HOROVOD_STALL_CHECK_DISABLE"):
        warning = shutdown = 0.0
    if 0 < shutdown < warning:
        raise ConfigError(
            f"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS={shutdown:g} is below "
            f"HOROVOD_STALL_CHECK_TIME_SECONDS={warning:g}",
            remedy="the job would end before the stall is reported; make the second one smaller",
        )
    timeline = environ.get("HOROVOD_TIMELINE", "").strip()
    timeout_seconds = read_seconds(environ, "HOROVOD_GLOO_TIMEOUT_SECONDS", 0.0)
    return HorovodSettings(
        fusion_bytes=read_number(environ, "HOROVOD_FUSION_THRESHOLD", default.fusion_bytes, 0),
        cache_capacity=read_number(environ, "HOROVOD_CACHE_CAPACITY", default.cache_capacity, 0),
        stall_warning_seconds=warning,
        stall_shutdown_seconds=shutdown,
        dynamic_process_sets=read_switch(environ, "HOROVOD_DYNAMIC_PROCESS_SETS"),
        timeline="" if timeline.upper() == "DYNAMIC" else timeline,
        timeline_is_dynamic=timeline.upper() == "DYNAMIC",
        timeline_mark_cycles=read_switch(environ, "HOROVOD_TIMELINE_MARK_CYCLES"),
        timeout_seconds=timeout_seconds or None,
    )
