"""Starting a server process on this host, and restoring one that is gone from its snapshot.

[Note: who restores] A server lies in a directory of its host. Any rank of that host that finds it gone takes the
lock there, looks once more, and starts it anew at its old address: ranks on other hosts call there and need not
be told. The kernel gives the lock back if the rank that holds it dies. When the server has ended on purpose its
directory is gone too.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from ...core.env import inherited_environment
from ...core.vocabulary.errors import LaunchError
from ...core.vocabulary.run_files import is_held
from .channel import open_connection
from .loop import Limits

_LOCK, _LOG = "lock", "log"
_ROOT = Path(__file__).resolve().parents[3]
_START: Final = """
import pathlib, sys
sys.path.insert(0, sys.argv[1])
if sys.argv[2:]:
    from farandole.core.vocabulary.run_files import end_with_job
    end_with_job(pathlib.Path(sys.argv[2]))
from farandole.sync.server.main import main
sys.exit(main())
"""
_SHOWN_LINES = 3
START_SECONDS = 120.0
"""For a server to listen: it imports torch first."""


@dataclass(frozen=True)
class ServerPlace:
    """Where a server is, and what it hosts. All ranks know it."""

    number: int
    host: str
    address: str
    directory: str
    clients: Sequence[int]
    """Those that it lives for."""
    services: Mapping[str, Mapping[str, Any]]
    """By name: ``class``, as ``module:class`` of a `MakeService`, and its ``config`` of JSON values."""
    limits: Limits
    generation: int = 0
    port: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ServerPlace:
        """Return what `to_json` returned."""
        return cls(**{**values, "limits": Limits(**values["limits"])})


def make_directory(parent: str | None) -> str:
    """Return a fresh directory that only this user can enter, in `parent` or where temporary files are."""
    return tempfile.mkdtemp(prefix="farandole-server-", dir=parent)


def start_server(place: ServerPlace, key: bytes, *, restores: bool = False) -> tuple[ServerPlace, ServerProcess]:
    """Start a server of `place`, at its port if it has one; return where it is, and the process.

    It is in a session of its own, and outlives this process while other clients are there, but not the launcher.
    Raises `LaunchError` with what it said.
    """
    directory = Path(place.directory)
    is_of_run = directory.parent != Path(tempfile.gettempdir())
    job = [str(directory)] if is_of_run and is_held(directory.parent) else []
    with (directory / _LOG).open("w") as log:
        process = ServerProcess(
            [sys.executable, "-c", _START, str(_ROOT), *job],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True,
            env=inherited_environment({"OMP_NUM_THREADS": "1"}),
        )  # fmt: skip
    assert process.stdin is not None, "a pipe"
    assert process.stdout is not None, "a pipe"
    config = {**place.to_json(), "key": key.hex(), "restores": restores, "starter": os.getpid()}
    with suppress(BrokenPipeError), process.stdin:
        process.stdin.write(json.dumps(config) + "\n")
    with process.stdout:
        poll = select.poll()
        poll.register(process.stdout, select.POLLIN)
        is_late = not poll.poll(1e3 * START_SECONDS)
        said = "" if is_late else process.stdout.readline()
    if not said:
        process.kill()
        process.wait()
        why = last_words(place) or (f"it said nothing for {START_SECONDS:g} s" if is_late else "it was killed")
        if not restores:
            shutil.rmtree(directory, ignore_errors=True)
        raise LaunchError(
            f"server {place.number} on {place.host} did not start: {why}",
            remedy=f"see that Python starts there, and that {directory.parent} can be written to",
        )
    return replace(place, port=int(json.loads(said)["port"])), process


def last_words(place: ServerPlace) -> str:
    """Return the end of what a server of this host has written to its standard error."""
    try:
        lines = (Path(place.directory) / _LOG).read_text(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return " | ".join(lines[-_SHOWN_LINES:])


class ServerProcess(subprocess.Popen[str]):
    """A server that this process has started, and may leave running."""

    def __del__(self, *_: Any) -> None:
        """Say nothing of a server that runs on for other ranks."""

    def end(self, seconds: float) -> bool:
        """Wait for its end; return whether it has come."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(seconds)
        return self.returncode is not None


def restore_server(place: ServerPlace, key: bytes) -> ServerProcess | None:
    """Start a server anew that is gone; None: another rank does, or it runs. See [Note: who restores].

    Raises `LaunchError` where it cannot be started, or has ended on purpose.
    """
    directory = Path(place.directory)
    try:
        lock = (directory / _LOCK).open("w")
    except FileNotFoundError:
        raise LaunchError(f"server {place.number} on {place.host} has ended, and {directory} is gone") from None
    except OSError as problem:
        raise LaunchError(f"server {place.number} on {place.host} has ended: {problem}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        if _answers(place):
            return None
        _, process = start_server(place, key, restores=True)
        return process


def _answers(place: ServerPlace) -> bool:
    with suppress(OSError), open_connection(place.address, place.port, 1.0):
        return True
    return False
