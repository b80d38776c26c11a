"""The one file that reads the environment.

Variables carry what only the starter of a process can know (rank, rendezvous, run directory)
and a few debug switches; they never override an argument.

[Note: whose rank variables] A process may sit inside several launchers at once: ``farandole run``
inside a Slurm allocation, ``torchrun`` inside ``srun``. The innermost one started *this* process, so
families are read from the most specific to the most general, and a family counts only when it gives
rank and size. A farandole family that contradicts the torch spelling is different: one launcher wrote both, so
somebody changed one of them, and that is an error naming both.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from .derived_meeting import derive_meeting_point, in_slurm_step, slurm_tasks_per_node
from .errors import ConfigError
from .node_place import NodePlace, read_node_place

RUN_DIRECTORY = "FARANDOLE_RUN_DIR"
PLAN_FILE = "FARANDOLE_PLAN"
GENERATION = "FARANDOLE_GENERATION"
VERIFY_STEPS = "FARANDOLE_VERIFY_STEPS"
HOSTS_FILE = "FARANDOLE_HOSTS"
NATIVE = "FARANDOLE_NATIVE"
NONCE = "FARANDOLE_NONCE"
"""Random, of one generation of ranks: nobody can guess where it meets."""
ELASTIC = "FARANDOLE_ELASTIC"
"""Address and port of the launcher of an elastic job."""
ELASTIC_WORKER = "FARANDOLE_ELASTIC_WORKER"
ELASTIC_KEY = "FARANDOLE_ELASTIC_KEY"
FROZEN = "FARANDOLE_FROZEN_SECONDS"


@dataclass(frozen=True)
class Family:
    """The variable names one launcher uses. Several names for one thing are tried in order."""

    name: str
    rank: tuple[str, ...]
    size: tuple[str, ...]
    local_rank: tuple[str, ...] = ()
    local_size: tuple[str, ...] = ()
    node_rank: tuple[str, ...] = ()
    node_count: tuple[str, ...] = ()
    address: tuple[str, ...] = ("MASTER_ADDR",)
    port: tuple[str, ...] = ("MASTER_PORT",)
    equal: tuple[str, str] | None = None
    """A variable that must have this value for the family to count."""


FAMILIES = (
    Family(
        "farandole",
        rank=("FARANDOLE_RANK",),
        size=("FARANDOLE_SIZE",),
        local_rank=("FARANDOLE_LOCAL_RANK",),
        local_size=("FARANDOLE_LOCAL_SIZE",),
        node_rank=("FARANDOLE_NODE_RANK",),
        node_count=("FARANDOLE_NODE_COUNT",),
        address=("FARANDOLE_ADDRESS",),
        port=("FARANDOLE_PORT",),
    ),
    Family(
        "torch",
        rank=("RANK",),
        size=("WORLD_SIZE",),
        local_rank=("LOCAL_RANK",),
        local_size=("LOCAL_WORLD_SIZE",),
        node_rank=("GROUP_RANK", "NODE_RANK"),
        node_count=("GROUP_WORLD_SIZE",),
    ),
    Family(
        "horovod",
        rank=("HOROVOD_RANK",),
        size=("HOROVOD_SIZE",),
        local_rank=("HOROVOD_LOCAL_RANK",),
        local_size=("HOROVOD_LOCAL_SIZE",),
        node_rank=("HOROVOD_CROSS_RANK",),
        node_count=("HOROVOD_CROSS_SIZE",),
    ),
    Family(
        "Open MPI",
        rank=("OMPI_COMM_WORLD_RANK",),
        size=("OMPI_COMM_WORLD_SIZE",),
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    Family(
        "PMI",
        rank=("PMI_RANK",),
        size=("PMI_SIZE",),
        local_rank=("PALS_LOCAL_RANKID", "MPI_LOCALRANKID"),
        local_size=("PALS_LOCAL_SIZE", "MPI_LOCALNRANKS"),
    ),
    Family(
        "Slurm",
        rank=("SLURM_PROCID",),
        size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        local_rank=("SLURM_LOCALID",),
        node_rank=("SLURM_NODEID",),
        node_count=("SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES"),
    ),
    Family(
        "torchrun's variables (PET_*)",  # one process a node, and nobody between
        rank=("PET_NODE_RANK",),
        size=("PET_NNODES",),
        node_rank=("PET_NODE_RANK",),
        node_count=("PET_NNODES",),
        address=("PET_MASTER_ADDR", "MASTER_ADDR"),
        port=("PET_MASTER_PORT", "MASTER_PORT"),
        equal=("PET_NPROC_PER_NODE", "1"),
    ),
)

_SCHEDULERS = ("Open MPI", "PMI", "Slurm")

RANK_NAMES = frozenset(
    [name for family in FAMILIES[:3] for field in ("rank", "size", "local_rank", "local_size", "node_rank",
     "node_count", "address", "port") for name in getattr(family, field)]
    + [GENERATION, "HOROVOD_HOSTNAME"]
)  # fmt: skip
"""What this package's launcher tells a rank of its place, in all spellings; it changes with the generation."""


@dataclass(frozen=True)
class RankVariables:
    """What whoever started this process said about its place."""

    source: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    node_rank: int
    node_count: int
    address: str | None
    port: int | None
    store_is_served: bool = False
    """True when the starter already serves the store at the address (torchrun's agent)."""


@dataclass(frozen=True)
class RunSettings:
    """What the launcher of this package passes on beside the rank."""

    run_directory: str | None
    plan_file: str | None
    generation: int
    verify_steps: int


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


def read_rank_variables(environ: Mapping[str, str] | None = None) -> RankVariables | None:
    """Return this process's place, or None when nobody gave it one (a world of one).

    Raises `ConfigError` naming the variable for a value that is no number or out of range, and
    naming both for the farandole and torch spellings that contradict each other.
    """
    environ = os.environ if environ is None else environ
    found = [family for family in FAMILIES if _counts(family, environ)]
    if not found:
        return None
    chosen = _read_family(found[0], environ)
    if [family.name for family in found[:2]] == ["farandole", "torch"]:
        _refuse_contradiction(environ)
    return chosen


def read_own_node() -> NodePlace | None:
    """Return which node this is, where a scheduler starts one command a node; None elsewhere."""
    return read_node_place(os.environ)


def read_run_settings(environ: Mapping[str, str] | None = None) -> RunSettings:
    """Return what ``farandole run`` passed on; empty values when it did not start us."""
    environ = os.environ if environ is None else environ
    return RunSettings(
        run_directory=environ.get(RUN_DIRECTORY) or None,
        plan_file=environ.get(PLAN_FILE) or None,
        generation=_number(environ, GENERATION if GENERATION in environ else "TORCHELASTIC_RESTART_COUNT", 0, 0),
        verify_steps=_number(environ, VERIFY_STEPS, 0, 0),
    )


@dataclass(frozen=True)
class ElasticSettings:
    """What the launcher of an elastic job tells a worker when it starts it."""

    address: str
    port: int
    worker: int
    key: bytes


def read_elastic_settings(environ: Mapping[str, str] | None = None) -> ElasticSettings | None:
    """Return how to reach the launcher of this elastic job; None in other jobs."""
    environ = os.environ if environ is None else environ
    where = environ.get(ELASTIC)
    if not where:
        return None
    address, _, port = where.rpartition(":")
    try:
        return ElasticSettings(
            address, int(port), int(environ[ELASTIC_WORKER]), bytes.fromhex(environ[ELASTIC_KEY])
        )
    except (KeyError, ValueError):
        # Not the values: one of them is secret.
        raise ConfigError(
            f"{ELASTIC}, {ELASTIC_WORKER} and {ELASTIC_KEY} do not belong together",
            remedy="they are set by farandole run; do not change them inside the job",
        ) from None


def read_nonce(environ: Mapping[str, str] | None = None) -> str:
    """Return the random text of this generation of ranks; empty outside elastic jobs."""
    environ = os.environ if environ is None else environ
    return environ.get(NONCE, "")


def adopt_rank_variables(values: Mapping[str, str]) -> None:
    """Take a new place in the job: what is read from now on, by scripts too. Other variables stay."""
    unknown = sorted(set(values) - RANK_NAMES - {NONCE})
    if unknown:
        raise ConfigError(f"{', '.join(unknown)} do not describe a rank's place")
    os.environ.update(values)


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
        read_horovod_settings({name: value for name in names if (value := {**os.environ, **flags}.get(name))})


def read_horovod_settings(environ: Mapping[str, str] | None = None) -> HorovodSettings:
    """Return what the ``HOROVOD_*`` variables ask for.

    Raises `ConfigError` naming the variable for a value that makes no sense, and naming both for a stall
    that would end the job before it is reported.
    """
    environ = os.environ if environ is None else environ
    default = HorovodSettings()
    warning = _decimal(environ, "HOROVOD_STALL_CHECK_TIME_SECONDS", default.stall_warning_seconds)
    shutdown = _decimal(environ, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", default.stall_shutdown_seconds)
    if _switch(environ, "HOROVOD_STALL_CHECK_DISABLE"):
        warning = shutdown = 0.0
    if 0 < shutdown < warning:
        raise ConfigError(
            f"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS={shutdown:g} is below "
            f"HOROVOD_STALL_CHECK_TIME_SECONDS={warning:g}",
            remedy="the job would end before the stall is reported; make the second one smaller",
        )
    timeline = environ.get("HOROVOD_TIMELINE", "").strip()
    timeout_seconds = _decimal(environ, "HOROVOD_GLOO_TIMEOUT_SECONDS", 0.0)
    return HorovodSettings(
        fusion_bytes=_number(environ, "HOROVOD_FUSION_THRESHOLD", default.fusion_bytes, 0),
        cache_capacity=_number(environ, "HOROVOD_CACHE_CAPACITY", default.cache_capacity, 0),
        stall_warning_seconds=warning,
        stall_shutdown_seconds=shutdown,
        dynamic_process_sets=_switch(environ, "HOROVOD_DYNAMIC_PROCESS_SETS"),
        timeline="" if timeline.upper() == "DYNAMIC" else timeline,
        timeline_is_dynamic=timeline.upper() == "DYNAMIC",
        timeline_mark_cycles=_switch(environ, "HOROVOD_TIMELINE_MARK_CYCLES"),
        timeout_seconds=timeout_seconds or None,
    )


@contextlib.contextmanager
def changed_environment(values: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables inside a ``with``, and put back what was there. None leaves a variable alone."""
    wanted = {name: str(value) for name, value in values.items() if value is not None}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def inside_lsf(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether this process belongs to a job of LSF."""
    environ = os.environ if environ is None else environ
    return "LSB_JOBID" in environ


def slurm_allocation_nodes(environ: Mapping[str, str] | None = None) -> int | None:
    """Return how many nodes the Slurm allocation has that this process could use; None outside one."""
    environ = os.environ if environ is None else environ
    if not environ.get("SLURM_JOB_ID") or in_slurm_step(environ):
        return None
    return _number(environ, "SLURM_JOB_NUM_NODES", 1, 1)


def inherited_environment(changes: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return what a child would inherit, with `changes`."""
    return {**os.environ, **(changes or {})}


def read_hosts_file(environ: Mapping[str, str] | None = None) -> str | None:
    """Return the file that describes the hosts to place ranks on; None: this host alone."""
    environ = os.environ if environ is None else environ
    return environ.get(HOSTS_FILE) or None


def read_ssh_connection(environ: Mapping[str, str] | None = None) -> str | None:
    """Return what sshd says of the connection we were started over: both addresses and ports; None: no ssh."""
    environ = os.environ if environ is None else environ
    return environ.get("SSH_CONNECTION") or None


def read_socket_interface(environ: Mapping[str, str] | None = None) -> str | None:
    """Return the network interface to use, in the spelling of torch's gloo; None: not named."""
    environ = os.environ if environ is None else environ
    names = environ.get("GLOO_SOCKET_IFNAME", "").split(",")
    return names[0].strip() or None


def native_loops_are_wanted(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether loops in C may be compiled and used: unless FARANDOLE_NATIVE is 0."""
    environ = os.environ if environ is None else environ
    text = environ.get(NATIVE, "").strip()
    if text not in ("", "0", "1"):
        raise ConfigError(f"{NATIVE}={text!r}: expected 0 or 1", remedy="0 turns the native loops off")
    return text != "0"


def read_frozen_seconds(default: float, environ: Mapping[str, str] | None = None) -> float:
    """Return how long a rank may be stopped by a signal (FARANDOLE_FROZEN_SECONDS); 0: for ever."""
    environ = os.environ if environ is None else environ
    return _decimal(environ, FROZEN, default)


def read_cache_directory(environ: Mapping[str, str] | None = None) -> str | None:
    """Return where this user's caches lie (XDG_CACHE_HOME, else below HOME); None: nowhere."""
    environ = os.environ if environ is None else environ
    named = environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(named):  # noqa: PTH117  # others are to be ignored, says the XDG specification
        return named
    home = environ.get("HOME", "")
    return f"{home}/.cache" if os.path.isabs(home) else None  # noqa: PTH117


def read_command_path(environ: Mapping[str, str] | None = None) -> str:
    """Return where commands are looked for; empty: nowhere."""
    environ = os.environ if environ is None else environ
    return environ.get("PATH", "")


def allocator_is_tuned(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether the user has tuned glibc's allocator, or replaced it, by variables."""
    environ = os.environ if environ is None else environ
    names = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "LD_PRELOAD")
    return any(environ.get(name) for name in names) or "glibc.malloc" in environ.get("GLIBC_TUNABLES", "")


def _counts(family: Family, environ: Mapping[str, str]) -> bool:
    if family.equal is not None and environ.get(family.equal[0]) != family.equal[1]:
        return False
    if family.name == "Slurm" and not in_slurm_step(environ):
        return False  # a batch script has SLURM_PROCID=0 too
    return all(any(name in environ for name in names) for names in (family.rank, family.size))


def _read_family(family: Family, environ: Mapping[str, str]) -> RankVariables:
    def read(names: tuple[str, ...], default: int, least: int) -> int:
        name = next((name for name in names if name in environ), None)
        return default if name is None else _number(environ, name, default, least)

    size = read(family.size, 1, 1)
    rank = read(family.rank, 0, 0)
    if rank >= size:
        names = f"{family.rank[0]}={rank}, {family.size[0]}={size}"
        raise ConfigError(f"{names}: the rank must be below the world size")
    node_count = read(family.node_count, 1, 1)
    # A launcher that does not say how many share the host: all of them, or an even part of them.
    local_size = read(family.local_size, _even_share(family, environ, size, node_count), 1)
    local_rank = read(family.local_rank, rank % local_size, 0)
    if family.name in _SCHEDULERS:
        _refuse_turns(family, rank, size, local_rank, local_size)
    node_count = max(node_count, -(-size // local_size)) if not _given(family.node_count, environ) else node_count
    port_name = next((name for name in family.port if name in environ), None)
    address = next((environ[name] for name in family.address if environ.get(name)), None)
    port = None if port_name is None else _number(environ, port_name, 0, 1)
    if address is None or port is None:
        derived = derive_meeting_point(family.name, environ, one_host=local_size == size)
        address, port = address or derived[0], port or derived[1]
    return RankVariables(
        source=family.name,
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        node_rank=read(family.node_rank, rank // local_size, 0),
        node_count=node_count,
        address=address,
        port=port,
        store_is_served=family.name == "torch" and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _even_share(family: Family, environ: Mapping[str, str], size: int, node_count: int) -> int:
    """Return how many ranks share this host, when no variable says it in one number."""
    if family.name == "Slurm":
        tasks = slurm_tasks_per_node(environ)
        node = next((_number(environ, name, 0, 0) for name in family.node_rank if name in environ), 0)
        if node < len(tasks) and sum(tasks) == size:
            return max(1, tasks[node])
    return max(1, size // node_count)


def _refuse_turns(family: Family, rank: int, size: int, local_rank: int, local_size: int) -> None:
    """Neighbours on a host must have neighbouring ranks: groups of a host are made of them."""
    equal_hosts = size % local_size == 0
    if equal_hosts and rank % local_size != local_rank:
        raise ConfigError(
            f"{family.name} dealt ranks out to the hosts in turn: rank {rank} is number {local_rank} of "
            f"{local_size} on its host",
            remedy="start with srun --distribution=block" if family.name == "Slurm" else "mpirun --map-by slot",
        )


def _refuse_contradiction(environ: Mapping[str, str]) -> None:
    for mine, theirs in (("FARANDOLE_RANK", "RANK"), ("FARANDOLE_SIZE", "WORLD_SIZE")):
        if environ[mine].strip() != environ[theirs].strip():
            raise ConfigError(
                f"{mine}={environ[mine]} and {theirs}={environ[theirs]} contradict each other",
                remedy=f"one launcher set both; do not change {theirs} inside the job",
            )


def _given(names: tuple[str, ...], environ: Mapping[str, str]) -> bool:
    return any(name in environ for name in names)


def _number(environ: Mapping[str, str], name: str, default: int, least: int) -> int:
    text = environ.get(name, "").strip()
    if not text:
        return default
    try:
        value = int(text)
    except ValueError:
        raise ConfigError(f"{name}={text!r}: expected a whole number") from None
    if value < least:
        raise ConfigError(f"{name}={value}: expected at least {least}")
    return value


def _decimal(environ: Mapping[str, str], name: str, default: float) -> float:
    """Return a number of seconds, at least 0."""
    text = environ.get(name, "").strip()
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        raise ConfigError(f"{name}={text!r}: expected a number of seconds") from None
    if not 0 <= value < float("inf"):
        raise ConfigError(f"{name}={text}: expected at least 0 seconds")
    return value


def _switch(environ: Mapping[str, str], name: str) -> bool:
    text = environ.get(name, "").strip().lower()
    if text in ("", "0", "false", "no", "off"):
        return False
    if text in ("1", "true", "yes", "on"):
        return True
    raise ConfigError(f"{name}={text!r}: expected 1 or 0")
