"""The flags of horovodrun that `farandole run` takes, as one table: spelling, variable, plan key, check.

Every flag that Horovod hands to its ranks as a variable is handed on here too. A flag that changes a
run of ours changes the plan, or is read by the Horovod front end; a flag that cannot change anything is
accepted, and `no_effect` says why. Not here: hosts and elastic jobs (see `host_options`), the order of
sources (see `horovod_settings`).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ...core.vocabulary.errors import ConfigError

MIB = 2**20
LOG_LEVELS = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL")


@dataclass(frozen=True)
class Flag:
    """One flag: how it is written, what it sets, what may be given."""

    spelling: str
    help: str
    group: str
    kind: type = int
    """int, float, str or bool. A bool has no value: the flag says yes, an `off` spelling no."""
    on: tuple[str, ...] = ()
    """More spellings."""
    off: tuple[str, ...] = ()
    variable: str = ""
    inverted: bool = False
    """The variable is 1 when the flag says no."""
    scale: int = 1
    """The variable counts in units this many times smaller."""
    most: float = math.inf
    metavar: str = "N"
    choices: tuple[str, ...] = ()
    config: str = ""
    """``section.key`` of the configuration file."""
    plan: Callable[[Any], Mapping[str, Any]] | None = None
    """The plan keys a value sets."""
    no_effect: str = ""
    """Why it changes nothing here; empty: it does."""

    @property
    def name(self) -> str:
        """The flag's name in messages and in the parsed options."""
        return self.spelling.lstrip("-").replace("-", "_")

    def check(self, value: Any) -> None:
        """Raise `ConfigError` in Horovod's words for a number out of bounds."""
        if self.kind not in (int, float):
            return
        if not 0 <= value <= self.most or value == math.inf:
            bounds = ">= 0" if self.most == math.inf else f"in [0, {self.most:g}]"
            raise ConfigError(f"{self.name}={value} must be {bounds}")

    def text(self, value: Any) -> str:
        """Return what the variable says."""
        if self.kind is bool:
            return "1" if bool(value) is not self.inverted else "0"
        return str(value * self.scale) if self.kind in (int, float) else str(value)


def _route(wanted: bool) -> Mapping[str, Any]:
    return {"route": "hierarchical"} if wanted else {}


def _codec(wanted: bool) -> Mapping[str, Any]:
    return {"codec": "auto"} if wanted else {}


def _bucket_bytes(megabytes: int) -> Mapping[str, Any]:
    return {"bucket_bytes": max(1, megabytes * MIB)}


def _timeout(seconds: int) -> Mapping[str, Any]:
    return {"timeout_seconds": float(seconds)} if seconds else {}


_NO_CYCLE = "an exchange starts when its gradients are there, not at the next beat"
_NO_SAMPLES = "--autotune measures the link and predicts from it; it takes no samples of scores"
_NO_LOG = "what went wrong is an error or a warning, at any level"
_NO_MPI = "no MPI is used"

TUNABLE, AUTOTUNE, TIMELINE, STALL = "tunable parameters", "autotune", "timeline", "stall check"
LIBRARY, LOGGING, STARTING = "libraries", "logging", "starting"

FLAGS = (
    Flag(
        "--fusion-threshold-mb", "fuse tensors up to this many MiB (plan key bucket_bytes)", TUNABLE,
        variable="HOROVOD_FUSION_THRESHOLD", scale=MIB, config="params.fusion_threshold_mb", plan=_bucket_bytes,
    ),
    Flag(
        "--cycle-time-ms", "accepted, no effect: there is no cycle", TUNABLE, float,
        variable="HOROVOD_CYCLE_TIME", config="params.cycle_time_ms", no_effect=_NO_CYCLE,
    ),
    Flag(
        "--cache-capacity", "size of the response cache (default: 1024)", TUNABLE,
        variable="HOROVOD_CACHE_CAPACITY", config="params.cache_capacity",
    ),
    Flag(
        "--hierarchical-allreduce", "reduce inside each host, then across hosts (plan: route = hierarchical)",
        TUNABLE, bool, off=("--no-hierarchical-allreduce",),
        variable="HOROVOD_HIERARCHICAL_ALLREDUCE", config="params.hierarchical_allreduce", plan=_route,
    ),
    Flag(
        "--torus-allreduce", "the same here: each local rank exchanges its shard across hosts", TUNABLE, bool,
        off=("--no-torus-allreduce",),
        variable="HOROVOD_TORUS_ALLREDUCE", config="params.torus_allreduce", plan=_route,
    ),
    Flag(
        "--hierarchical-allgather", "accepted, no effect: all-gathers are flat", TUNABLE, bool,
        off=("--no-hierarchical-allgather",),
        variable="HOROVOD_HIERARCHICAL_ALLGATHER", config="params.hierarchical_allgather",
        no_effect="gathers travel between all ranks at once",
    ),
    Flag(
        "--autotune", "measure the link and choose settings that keep results (plan: codec = auto)",
        AUTOTUNE, bool, off=("--no-autotune",),
        variable="HOROVOD_AUTOTUNE", config="autotune.enabled", plan=_codec,
    ),
    Flag(
        "--autotune-log-file", "accepted, no effect: the run's events record the choice", AUTOTUNE, str,
        metavar="FILE", variable="HOROVOD_AUTOTUNE_LOG", config="autotune.log_file",
        no_effect="what was measured and chosen is in the run directory's events",
    ),
    Flag(
        "--autotune-warmup-samples", "accepted, no effect", AUTOTUNE,
        variable="HOROVOD_AUTOTUNE_WARMUP_SAMPLES", config="autotune.warmup_samples", no_effect=_NO_SAMPLES,
    ),
    Flag(
        "--autotune-steps-per-sample", "accepted, no effect", AUTOTUNE,
        variable="HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", config="autotune.steps_per_sample", no_effect=_NO_SAMPLES,
    ),
    Flag(
        "--autotune-bayes-opt-max-samples", "accepted, no effect", AUTOTUNE,
        variable="HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES", config="autotune.bayes_opt_max_samples",
        no_effect=_NO_SAMPLES,
    ),
    Flag(
        "--autotune-gaussian-process-noise", "accepted, no effect", AUTOTUNE, float, most=1,
        variable="HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE", config="autotune.gaussian_process_noise",
        no_effect=_NO_SAMPLES,
    ),
    Flag(
        "--timeline-filename", "write a timeline to this file", TIMELINE, str, metavar="FILE",
        variable="HOROVOD_TIMELINE", config="timeline.filename",
    ),
    Flag(
        "--timeline-mark-cycles", "mark batches of operations in the timeline", TIMELINE, bool,
        off=("--no-timeline-mark-cycles",),
        variable="HOROVOD_TIMELINE_MARK_CYCLES", config="timeline.mark_cycles",
    ),
    Flag(
        "--stall-check", "warn when ranks wait for others (the default), or do not", STALL, bool,
        off=("--no-stall-check",), variable="HOROVOD_STALL_CHECK_DISABLE", inverted=True,
        config="stall_check.enabled",
    ),
    Flag(
        "--stall-check-warning-time-seconds", "warn after this long (default: 60)", STALL, metavar="S",
        variable="HOROVOD_STALL_CHECK_TIME_SECONDS", config="stall_check.warning_time_seconds",
    ),
    Flag(
        "--stall-check-shutdown-time-seconds",
        "raise on all ranks after this long (plan key timeout_seconds); 0: the plan's own", STALL, metavar="S",
        variable="HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", config="stall_check.shutdown_time_seconds", plan=_timeout,
    ),
    Flag(
        "--mpi-threads-disable", "accepted, no effect: no MPI is used", LIBRARY, bool,
        off=("--no-mpi-threads-disable",),
        variable="HOROVOD_MPI_THREADS_DISABLE", config="library_options.mpi_threads_disable", no_effect=_NO_MPI,
    ),
    Flag("--mpi-args", "accepted, no effect: no MPI is used", LIBRARY, str, metavar="TEXT", no_effect=_NO_MPI),
    Flag(
        "--tcp", "let NCCL use TCP only (NCCL_IB_DISABLE=1)", LIBRARY, bool, variable="NCCL_IB_DISABLE",
    ),
    Flag(
        "--binding-args", "accepted, no effect: each rank is bound to its cores", LIBRARY, str, metavar="TEXT",
        no_effect="each rank is bound to its share of the cores; --no-bind leaves it unbound",
    ),
    Flag(
        "--num-nccl-streams", "accepted, no effect: one stream carries exchanges", LIBRARY,
        variable="HOROVOD_NUM_NCCL_STREAMS", config="library_options.num_nccl_streams",
        no_effect="one stream carries all exchanges",
    ),
    Flag(
        "--thread-affinity", "accepted, no effect: a rank's threads share its cores", LIBRARY,
        variable="HOROVOD_THREAD_AFFINITY", config="library_options.thread_affinity",
        no_effect="the communication thread shares the cores its rank is bound to",
    ),
    Flag(
        "--gloo-timeout-seconds", "how long ranks wait for each other", LIBRARY, metavar="S",
        variable="HOROVOD_GLOO_TIMEOUT_SECONDS", config="library_options.gloo_timeout_seconds",
    ),
    Flag(
        "--log-level", "accepted, no effect: there is no debugging log", LOGGING, str, metavar="LEVEL",
        choices=LOG_LEVELS,
        variable="HOROVOD_LOG_LEVEL", config="logging.level", no_effect=_NO_LOG,
    ),
    Flag(
        "--log-with-timestamp", "accepted, no effect (see -prefix-timestamp)", LOGGING, bool,
        on=("--no-log-hide-timestamp",), off=("--log-without-timestamp", "--log-hide-timestamp"),
        variable="HOROVOD_LOG_HIDE_TIME", inverted=True, config="logging.with_timestamp",
        no_effect=_NO_LOG,
    ),
    Flag(
        "--start-timeout", "accepted, no effect: init has its own time-out", STARTING, metavar="S",
        variable="HOROVOD_START_TIMEOUT", no_effect="nothing is checked first; init has a wait of its own",
    ),
    Flag(
        "--disable-cache", "accepted, no effect: checks of hosts are not cached", STARTING, bool,
        no_effect="nothing that was found out about hosts is kept between runs",
    ),
)  # fmt: skip


def add_horovod_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the table, by their groups. What is not typed is None."""
    groups = {name: parser.add_argument_group(f"{name} (horovodrun)") for name in
              (TUNABLE, AUTOTUNE, TIMELINE, STALL, LIBRARY, LOGGING, STARTING)}  # fmt: skip
    for flag in FLAGS:
        add_flag(groups[flag.group], flag)


def add_flag(group: argparse._ActionsContainer, flag: Flag) -> None:
    """Add one flag."""
    if flag.kind is bool:
        for spellings, value in (((flag.spelling, *flag.on), True), (flag.off, False)):
            if spellings:
                about = flag.help if value else f"the opposite of {flag.spelling}"
                group.add_argument(
                    *spellings, dest=flag.name, action="store_const", const=value, default=None, help=about
                )
        return
    group.add_argument(
        flag.spelling, *flag.on, dest=flag.name, type=flag.kind, default=None, help=flag.help,
        metavar=flag.metavar, choices=flag.choices or None,
    )  # fmt: skip


def typed_flags(options: argparse.Namespace) -> dict[str, Any]:
    """Return the values that were typed, by flag name."""
    values = {flag.name: getattr(options, flag.name) for flag in FLAGS}
    return {name: value for name, value in values.items() if value is not None}
