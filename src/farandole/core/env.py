"""The one file that reads the environment.

Variables carry what only the starter of a process can know (rank, rendezvous, run directory)
and a few debug switches; they never override an argument. What needs more than a line to understand has a file
of its own, which asks `own_environment`: those of Horovod in `job_plan`, those of launchers in `rank_variables`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import asdict, dataclass

from .vocabulary.errors import ConfigError
from .vocabulary.text import did_you_mean

# Numbers and switches in variables: read from a mapping, and refused by name where they make no sense.


def read_number(environ: Mapping[str, str], name: str, default: int, least: int) -> int:
    """Return a whole number; raise `ConfigError` naming the variable for one below `least`, or none."""
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


def read_seconds(environ: Mapping[str, str], name: str, default: float) -> float:
    """Return a number of seconds; raise `ConfigError` naming the variable for one below 0, or none."""
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


def read_switch(environ: Mapping[str, str], name: str) -> bool:
    """Return whether the variable is on; raise `ConfigError` naming it for what is neither on nor off."""
    text = environ.get(name, "").strip().lower()
    if text in ("", "0", "false", "no", "off"):
        return False
    if text in ("1", "true", "yes", "on"):
        return True
    raise ConfigError(f"{name}={text!r}: expected 1 or 0")


RUN_DIRECTORY = "FARANDOLE_RUN_DIR"
PLAN_FILE = "FARANDOLE_PLAN"
GENERATION = "FARANDOLE_GENERATION"
VERIFY_STEPS = "FARANDOLE_VERIFY_STEPS"
VERIFY_DEEP = "FARANDOLE_VERIFY_DEEP"
HOSTS_FILE = "FARANDOLE_HOSTS"
NATIVE = "FARANDOLE_NATIVE"
NONCE = "FARANDOLE_NONCE"
"""Random, of one generation of ranks: its rendezvous cannot be guessed."""
SECRET = "FARANDOLE_SECRET"
"""Random, of one job: a secret of its ranks, given by the launcher that starts all of them."""
ELASTIC = "FARANDOLE_ELASTIC"
"""Address and port of the launcher of an elastic job."""
ELASTIC_WORKER = "FARANDOLE_ELASTIC_WORKER"
ELASTIC_KEY = "FARANDOLE_ELASTIC_KEY"
FROZEN = "FARANDOLE_FROZEN_SECONDS"
VERBOSE = "FARANDOLE_VERBOSE"
CORES = "FARANDOLE_CORES"
"""The cores that a rank is bound to, and those that no rank of its host has: ``0,1:6,7``."""
BACKEND = "FARANDOLE_BACKEND"
"""What torch's process groups for CPU tensors are made of, as ``farandole run --backend`` says."""
BACKENDS = ("gloo", "farandole")
RECORD = "FARANDOLE_RECORD"
"""1: a training by DistributedDataParallel is recorded, which ``farandole run --no-record`` turns off."""
TUNE = "FARANDOLE_TUNE"
"""What `farandole tune` asks of the ranks: `TuneSettings` as JSON."""
TYPED = "FARANDOLE_TYPED"
"""The command line that the user typed, where a command of ours starts another one, as a JSON list."""


def own_environment() -> MutableMapping[str, str]:
    """Return this process's variables, as they are now; changes to them are changes to the process."""
    return os.environ


def variables(environ: Mapping[str, str] | None) -> Mapping[str, str]:
    """Return `environ`, or this process's variables where none are given."""
    return os.environ if environ is None else environ


@dataclass(frozen=True)
class RunSettings:
    """What the launcher of this package passes on beside the rank."""

    run_directory: str | None
    plan_file: str | None
    generation: int
    verify_steps: int
    verify_deep: bool = False


def read_run_settings(environ: Mapping[str, str] | None = None) -> RunSettings:
    """Return what ``farandole run`` passed on; empty values when it did not start us."""
    environ = variables(environ)
    generation = GENERATION if GENERATION in environ else "TORCHELASTIC_RESTART_COUNT"
    return RunSettings(
        run_directory=environ.get(RUN_DIRECTORY) or None,
        plan_file=environ.get(PLAN_FILE) or None,
        generation=read_number(environ, generation, 0, 0),
        verify_steps=read_number(environ, VERIFY_STEPS, 0, 0),
        verify_deep=bool(read_number(environ, VERIFY_DEEP, 0, 0)),
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
    environ = variables(environ)
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


@dataclass(frozen=True)
class CoreShares:
    """How the launcher divided the cores of this host."""

    own: tuple[int, ...]
    """This rank's."""
    spare: tuple[int, ...]
    """Those of no rank."""

    def to_text(self) -> str:
        """Return the value of the variable."""
        return ":".join(",".join(map(str, cores)) for cores in (self.own, self.spare))


def read_core_shares(environ: Mapping[str, str] | None = None) -> CoreShares | None:
    """Return how our launcher divided the cores; None where it bound no rank."""
    environ = variables(environ)
    own, colon, spare = environ.get(CORES, "").partition(":")
    try:
        shares = [tuple(int(word) for word in text.split(",") if word) for text in (own, spare)]
    except ValueError:
        return None
    return CoreShares(shares[0], shares[1]) if colon and shares[0] else None


def read_typed_command(environ: Mapping[str, str] | None = None) -> list[str]:
    """Return the command line that the user typed, when it was another command of ours than this; else nothing."""
    environ = variables(environ)
    with contextlib.suppress(ValueError):
        words = json.loads(environ.get(TYPED, ""))
        if isinstance(words, list) and all(isinstance(word, str) for word in words):
            return words
    return []


def read_backend(environ: Mapping[str, str] | None = None) -> str | None:
    """Return what ``farandole run --backend`` says, one of `BACKENDS`; None: it says nothing."""
    text = variables(environ).get(BACKEND, "")
    if text not in ("", *BACKENDS):
        raise ConfigError(f"{BACKEND}={text!r}: expected {' or '.join(BACKENDS)}")
    return text or None


def recording_is_wanted(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether trainings are recorded that did not ask for it: FARANDOLE_RECORD is 1."""
    return variables(environ).get(RECORD) == "1"


def read_thread_count(environ: Mapping[str, str] | None = None) -> int | None:
    """Return how many threads the user asks OpenMP for; None: not said, or not as one number."""
    environ = variables(environ)
    text = environ.get("OMP_NUM_THREADS", "")
    return int(text) if text.isdecimal() else None


def read_nonce(environ: Mapping[str, str] | None = None) -> str:
    """Return the random text of this generation of ranks; empty outside elastic jobs."""
    return variables(environ).get(NONCE, "")


def read_job_secret(environ: Mapping[str, str] | None = None) -> bytes:
    """Return what only the ranks of this job know; empty where no launcher of ours started all of them."""
    return variables(environ).get(SECRET, "").encode()


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


def default_environment(values: Mapping[str, str]) -> contextlib.AbstractContextManager[None]:
    """Set variables inside a ``with`` that the user has not set, and take them away again."""
    return changed_environment({name: value for name, value in values.items() if name not in os.environ})


def set_variables(names: Iterable[str], environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return those of the named variables that are set and not empty, with their values."""
    environ = variables(environ)
    return {name: environ[name] for name in names if environ.get(name)}


def inside_lsf(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether this process belongs to a job of LSF."""
    return "LSB_JOBID" in variables(environ)


def inherited_environment(changes: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return what a child would inherit, with `changes`."""
    return {**os.environ, **(changes or {})}


def read_hosts_file(environ: Mapping[str, str] | None = None) -> str | None:
    """Return the file that describes the hosts to place ranks on; None: this host alone."""
    return variables(environ).get(HOSTS_FILE) or None


def read_ssh_connection(environ: Mapping[str, str] | None = None) -> tuple[str, str]:
    """Return the addresses of the caller and of this host, as sshd says by which we were started; "": no ssh."""
    words = variables(environ).get("SSH_CONNECTION", "").split()
    return (words[0], words[2]) if len(words) == 4 else ("", "")


def read_socket_interface(environ: Mapping[str, str] | None = None) -> str | None:
    """Return the network interface to use, in the spelling of torch's gloo; None: not named."""
    environ = variables(environ)
    names = environ.get("GLOO_SOCKET_IFNAME", "").split(",")
    return names[0].strip() or None


def read_meeting_address(environ: Mapping[str, str] | None = None) -> str | None:
    """Return where rank 0 is, as torch's own variables say (MASTER_ADDR); None: they do not."""
    return variables(environ).get("MASTER_ADDR") or None


def read_ray_address(environ: Mapping[str, str] | None = None) -> str | None:
    """Return where the user's cluster of Ray is (RAY_ADDRESS); None: not named."""
    return variables(environ).get("RAY_ADDRESS") or None


def color_is_allowed(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether terminals may get colors: unless NO_COLOR is set, to whatever (no-color.org)."""
    return "NO_COLOR" not in variables(environ)


def native_loops_are_wanted(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether loops in C and Triton kernels may be compiled and used: unless FARANDOLE_NATIVE is 0."""
    environ = variables(environ)
    text = environ.get(NATIVE, "").strip()
    if text not in ("", "0", "1"):
        raise ConfigError(f"{NATIVE}={text!r}: expected 0 or 1", remedy="0 turns the native loops off")
    return text != "0"


def is_verbose(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether notices have all details: FARANDOLE_VERBOSE is 1, as ``farandole run --verbose`` sets it."""
    return variables(environ).get(VERBOSE, "").strip() == "1"


def read_frozen_seconds(default: float, environ: Mapping[str, str] | None = None) -> float:
    """Return how long a rank may be stopped by a signal (FARANDOLE_FROZEN_SECONDS); 0: for ever."""
    return read_seconds(variables(environ), FROZEN, default)


def read_cache_directory(environ: Mapping[str, str] | None = None) -> str | None:
    """Return where this user's caches lie (XDG_CACHE_HOME, else below HOME); None: nowhere."""
    environ = variables(environ)
    named = environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(named):  # noqa: PTH117  # others are to be ignored, says the XDG specification
        return named
    home = environ.get("HOME", "")
    return f"{home}/.cache" if os.path.isabs(home) else None  # noqa: PTH117


def read_command_path(environ: Mapping[str, str] | None = None) -> str:
    """Return where commands are looked for; empty: nowhere."""
    return variables(environ).get("PATH", "")


def allocator_is_tuned(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether the user has tuned glibc's allocator, or replaced it, by variables."""
    environ = variables(environ)
    names = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "LD_PRELOAD")
    return any(environ.get(name) for name in names) or "glibc.malloc" in environ.get("GLIBC_TUNABLES", "")


# Variables of NCCL and of torch's group of it. NCCL tells GPUs apart by the host's name and the GPU's.


_HOST = "NCCL_HOSTID"


def nccl_host() -> str:
    """Return the name that this process's host has for NCCL alone; empty: its own."""
    return own_environment().get(_HOST, "")


def share_device(devices: int) -> None:
    """Let NCCL take all ranks of a host with fewer `devices`, by sockets: each has a host's name of its own."""
    environ = own_environment()
    if int(environ.get("LOCAL_WORLD_SIZE", "1")) > devices:
        environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        environ[_HOST] = f"rank {environ['RANK']} of {nccl_host() or 'this host'}"


def expect_single_sends() -> None:
    """Do not let torch advise against single sends and receives: it means groups of several neighbours."""
    own_environment().setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")


# What ``farandole tune`` tells the ranks: one variable, read by `train.session`.


SETTINGS = (
    "bucket_bytes",
    "first_bucket_bytes",
    "codec",
    "route",
    "connections",
    "micro_batches",
    "loader_workers",
)
"""What may be tuned: keys of the plan, and the workers of the data loader."""


@dataclass(frozen=True)
class TuneSettings:
    """How a running job is tuned. Raises `ConfigError` for values that make no sense."""

    names: tuple[str, ...] = SETTINGS
    """Those of `SETTINGS` that may change."""
    allow_lossy: bool = False
    """Whether codecs that lose precision may be tried."""
    budget: float = 0.02
    """Share of the run's steps that may run by settings that are being tried."""
    trials: int = 10
    steps: int | None = None
    """Steps of the whole run; None: what `fd.log` says, or not known."""
    cache: bool = True
    """Whether what won is kept for the next run in the cache directory, and read from there."""

    def __post_init__(self) -> None:
        unknown = [name for name in self.names if name not in SETTINGS]
        if unknown or not self.names:
            word = unknown[0] if unknown else ""
            raise ConfigError(
                f"--settings {word!r}: expected some of {','.join(SETTINGS)}",
                remedy=did_you_mean(word, SETTINGS),
            )
        if "codec" in self.names and not self.allow_lossy:
            object.__setattr__(self, "names", tuple(name for name in self.names if name != "codec"))
        if not (0 < self.budget <= 1 and math.isfinite(self.budget)):
            raise ConfigError(f"--budget {self.budget}: expected a share of the steps above 0, at most 1")
        if self.trials < 1:
            raise ConfigError(f"--trials {self.trials}: expected at least 1")
        if self.steps is not None and self.steps < 1:
            raise ConfigError(f"--steps {self.steps}: expected at least 1")

    def to_text(self) -> str:
        """Return the value of the variable."""
        return json.dumps(asdict(self))


def read_tune_settings(environ: Mapping[str, str] | None = None) -> TuneSettings | None:
    """Return how this job is to be tuned; None: it is not. Raises `ConfigError` for other values."""
    text = variables(environ).get(TUNE, "")
    if not text:
        return None
    try:
        values = json.loads(text)
        return TuneSettings(**{**values, "names": tuple(values.get("names", SETTINGS))})
    except (ValueError, TypeError, AttributeError):
        raise ConfigError(
            f"{TUNE} holds no settings", remedy="it is set by farandole tune; do not change it inside the job"
        ) from None
