"""The names inside a run directory, and the account a dying rank leaves there.

::

    runs/<name>/
        run.json              plan, command, versions, hosts, commit     (launcher)
        plan.toml             the plan as applied                        (launcher)
        events-rank<r>.jsonl  what rank r did, a line a step             (every rank)
        metrics.jsonl         a line a step, then the summary            (rank 0, launcher)
        summary.json          the closing figures                        (launcher)
        verify.json           answers of fd.verify                       (rank 0)
        tune.json             what `farandole tune` tried, and what won  (rank 0)
        tuned.toml            the plan with the settings that won        (rank 0)
        logs/rank_<r>.log     all that rank r printed                    (launcher)
        crashes/rank_<r>.json its exception, when it had one             (rank r)
        stacks/rank_<r>.txt   where it stood when the job hung           (rank r, launcher)
        positions/rank_<r>.json  where it stands, when it does no steps  (rank r)
        dispensable/rank_<r>  the others go on without it (servers)      (rank r)
        stall.json            which rank stood where when all waited     (rank 0)
        failure.json          why the job stopped, when it failed        (launcher)
        interrupted.json      the signal that ended it, and who waited   (launcher)
        saves.json            the last whole checkpoint, the last begun  (rank 0)
        generations/<g>/      the run before restart g + 1               (launcher)
        report.html                                                      (farandole report)

Everything a later command needs; nothing else is written anywhere. Files are 0600, directories 0700.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import random
import re
import shutil
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from .errors import ConfigError

RUN = "run.json"
PLAN = "plan.toml"
METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
VERIFY = "verify.json"
TUNE = "tune.json"
TUNED_PLAN = "tuned.toml"
REPORT = "report.html"
FAILURE = "failure.json"
INTERRUPTED = "interrupted.json"
STALL = "stall.json"
SAVES = "saves.json"
GENERATIONS = "generations"
STACKS = "stacks"
POSITIONS = "positions"
DISPENSABLE = "dispensable"
_LATEST_SECONDS = 1e11
"""In some thousands of years: what a clock never says."""
_LOOK_SECONDS = 0.2
_LOOKS = 4
FULL_DISK = frozenset({errno.ENOSPC, errno.EDQUOT})
"""What says that there is no room, and that more may come: no reason to end a training."""

_NO_TOKEN = "".join(
    f"(?<!{name}[-_])" for name in ("bos", "cls", "eos", "pad", "sep", "unk", "max", "min", "num", "per", "mask")
)
_SECRET = (
    rf"[\w.@:+-]*(?:{_NO_TOKEN}token(?!i[sz]|s\b|s_|[-_]?(?:id|count|type|file|len|limit))|secret|passw(?:or)?d"
    r"|passphrase|(?:api|access|private|wandb)[-_.]?key|credential)[\w.-]*"
)
"""Names of secrets; tokenizers, counts of tokens and special ones are none."""
_SECRET_NAME = re.compile(f"-(?!-?(?:use|no)[-_]){_SECRET}", re.I)
_SECRET_VALUE = re.compile(
    rf"""^({_SECRET}=).*|([\s;&'"?,={{]{_SECRET}["']?\s*[=:]\s*|\s-{_SECRET}\s+|authorization:\s*(?:\w+\s+)?)"""
    r"""("[^"]*"|'[^']*'|[^\s,;&"'}-][^\s,;&"'}]*)""",
    re.I | re.S,
)
_SECRET_IN_ADDRESS = re.compile(r"(://)[^/\s@]+@")


def hide_secrets(words: Sequence[str]) -> list[str]:
    """Return a command as it may be kept and shown: values of what looks like a secret are ``***``.

    >>> hide_secrets(["train.py", "--token=a", "--api-key", "b", "--max-tokens", "9", "sh -c 'x --password c'"])
    ['train.py', '--token=***', '--api-key', '***', '--max-tokens', '9', "sh -c 'x --password ***"]
    """
    hidden: list[str] = []
    before = ""
    for word in words:
        is_value = _SECRET_NAME.fullmatch(before) is not None and not word.startswith("-")
        text = _SECRET_VALUE.sub(lambda found: f"{found[1] or found[2]}***", word)
        hidden.append("***" if is_value else _SECRET_IN_ADDRESS.sub(r"\1***@", text))
        before = word
    return hidden


def events_path(run_directory: Path, rank: int) -> Path:
    """Return where rank `rank` writes its events."""
    return run_directory / f"events-rank{rank}.jsonl"


def log_path(run_directory: Path, rank: int) -> Path:
    """Return where what rank `rank` printed is kept."""
    return run_directory / "logs" / f"rank_{rank}.log"


def crash_path(run_directory: Path, rank: int) -> Path:
    """Return where rank `rank` leaves the account of its exception."""
    return run_directory / "crashes" / f"rank_{rank}.json"


def stacks_path(run_directory: Path, rank: int) -> Path:
    """Return where the stacks of rank `rank` are left when the job hangs."""
    return run_directory / STACKS / f"rank_{rank}.txt"


def position_path(run_directory: Path, rank: int) -> Path:
    """Return where rank `rank` leaves its position while it does no steps."""
    return run_directory / POSITIONS / f"rank_{rank}.json"


def mark_dispensable(run_directory: str | None, rank: int, *, is_so: bool) -> None:
    """Leave word whether the others go on without rank `rank`; without it, as on a full disk, they do not."""
    with contextlib.suppress(OSError):
        if run_directory is not None and is_so:
            write_private(Path(run_directory) / DISPENSABLE / f"rank_{rank}", "")
        elif run_directory is not None:
            (Path(run_directory) / DISPENSABLE / f"rank_{rank}").unlink()


def is_dispensable(run_directory: Path, rank: int) -> bool:
    """Return what `mark_dispensable` left last."""
    return (run_directory / DISPENSABLE / f"rank_{rank}").exists()


def write_private(path: Path, content: str | bytes | Iterable[bytes]) -> None:
    """Write a file of mode 0600 beside its place and rename it, so that no reader sees half of it.

    What is there and is no file (a pipe, a device) is written to, not replaced. Pieces are written as they come.
    Raises OSError and leaves nothing.
    """
    content = content.encode() if isinstance(content, str) else content
    pieces = [content] if isinstance(content, bytes) else content
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.exists() and not path.is_file() and not path.is_dir():
        with path.open("wb") as file:
            file.writelines(pieces)
        return
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.unlink(missing_ok=True)  # of a process that had our number, or a link that was put there
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.writelines(pieces)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def write_asked(path: Path, content: str | bytes | Iterable[bytes], *, remedy: str) -> None:
    """`write_private` of a file that an option names; raise `ConfigError` where it cannot be written."""
    try:
        write_private(path, content)
    except OSError as problem:
        raise ConfigError(f"cannot write {path}: {problem.strerror or problem}", remedy=remedy) from None


@dataclass(frozen=True)
class SavesAccount:
    """How the saves of a run stand."""

    directory: str
    """The directory of the checkpoints."""
    whole: int | None = None
    """Step of the last checkpoint that is on the disk, saved or loaded; None: this run has none."""
    when_seconds: float = 0.0
    """When it was, by the clock of rank 0's host (`time.time`)."""
    begun: int | None = None
    """Step of the save that began last."""

    def write(self, run_directory: str | None) -> None:
        """Leave it in the run directory, if there is one; a disk that fails is no reason to end a training."""
        with contextlib.suppress(OSError):
            if run_directory is not None:
                write_private(Path(run_directory) / SAVES, json.dumps(asdict(self)) + "\n")

    @classmethod
    def read(cls, run_directory: Path) -> SavesAccount | None:
        """Return what `write` left; None if there is nothing."""
        try:
            account = cls(**json.loads((run_directory / SAVES).read_text(encoding="utf-8")))
            return account if 0 <= account.when_seconds < _LATEST_SECONDS else None
        except (OSError, ValueError, TypeError):
            return None


@dataclass(frozen=True)
class Crash:
    """What an uncaught exception of one rank was."""

    rank: int
    host: str
    step: int | None
    """Steps the rank had finished; None: not known."""
    kind: str
    """Class of the exception."""
    message: str
    traceback: str
    """Empty for the errors this package raises on purpose: their message says all."""
    consequence: bool
    """True when the exception only says that another rank is gone or out of step."""
    exit_code: int
    when_seconds: float
    """`time.monotonic()`, one clock for all processes of a host."""
    memory_limit: str = ""
    """The memory that the process might take, such as ``1.3 GB (RLIMIT_DATA)``; empty: no limit is known."""

    @classmethod
    def from_exception(
        cls, error: BaseException, trace: TracebackType | None, *, rank: int, host: str, step: int,
        ours: bool, consequence: bool, exit_code: int
    ) -> Crash:  # fmt: skip
        """Describe `error`, raised on `rank` after `step` finished steps."""
        text = "" if ours else "".join(traceback.format_exception(type(error), error, trace))
        return cls(
            rank, host, step, type(error).__name__, str(error), text, consequence, exit_code, time.monotonic()
        )

    def write(self, run_directory: Path) -> None:
        """Leave the account in the run directory; a full or missing disk is no reason to fail again.

        The first account of a rank stays: what fails later, as a rank whose worker was refused, fails by that.
        """
        with contextlib.suppress(OSError):
            if not crash_path(run_directory, self.rank).exists():
                write_private(crash_path(run_directory, self.rank), json.dumps(asdict(self)))


def read_crashes(run_directory: Path) -> list[Crash]:
    """Return the accounts of all ranks that left a readable one, earliest first."""
    crashes = []
    for path in (run_directory / "crashes").glob("rank_*.json"):
        with contextlib.suppress(OSError, ValueError, TypeError):
            crashes.append(Crash(**json.loads(path.read_text(encoding="utf-8"))))
    return sorted(crashes, key=lambda crash: crash.when_seconds)


class JobLock:
    """The launcher's hold on a run directory, of which the kernel lets go when it dies.

    So a process in a session of its own, which outlives the rank that started it, ends with the job all the same,
    however the launcher and the ranks end. Several launchers may share a directory. Where a file system has no
    locks this does nothing.
    """

    def __init__(self, directory: Path) -> None:
        self._held = contextlib.ExitStack()
        with contextlib.suppress(OSError):
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
            self._held.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_SH)

    def close(self) -> None:
        """Let go of it: the job has ended. May be called twice."""
        self._held.close()


def is_held(directory: Path) -> bool:
    """Return whether a launcher holds `directory`, as far as is known: also where there are no locks."""
    for _ in range(_LOOKS):  # another process may look at this very moment
        with contextlib.suppress(OSError), contextlib.ExitStack() as at_end:
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
            at_end.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return False
        time.sleep(random.uniform(0.001, 0.01))
    return True


_needs: list[Callable[[], bool]] = []


def stay_while(is_needed: Callable[[], bool]) -> None:
    """Let `end_with_job` wait as long as a thread that asks `is_needed` is told so."""
    _needs.append(is_needed)


def end_with_job(directory: Path) -> None:
    """End this process, and remove `directory`, once no launcher holds the run directory and no client needs it.

    A thread looks, so that a process ends that has not come to its loop yet. Each host has a launcher of its own,
    and ranks of other hosts may go on: see `stay_while`.
    """

    def watch() -> None:
        while is_held(directory.parent) or any(is_needed() for is_needed in _needs):
            time.sleep(_LOOK_SECONDS)
        shutil.rmtree(directory, ignore_errors=True)
        os._exit(0)

    threading.Thread(target=watch, name="farandole-job-lock", daemon=True).start()
