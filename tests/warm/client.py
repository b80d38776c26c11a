"""`run`: a farandole command to its end, on warm Python."""

from __future__ import annotations

import json
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import time
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import IO

from .program import Program, read_program, read_settings

ROOT = Path(__file__).resolve().parents[2]
FARANDOLE = [sys.executable, "-m", "farandole"]
START_SECONDS = 90.0
"""For a server to import what it is to import, on a busy machine."""


def run(
    directory: Path, *words: str, timeout: float = 40, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``farandole words`` in `directory`; raise `subprocess.TimeoutExpired` after `timeout` seconds.

    [Note: warm Python] says what differs from `tests.ranks.test_launch.run`.
    """
    return python(directory, *FARANDOLE[1:], *words, timeout=timeout, environment=environment)


def python(
    directory: Path, *words: str, timeout: float = 40, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``python words`` to its end in the same way."""
    command = [sys.executable, *words]
    told = {**os.environ, **(environment or {})}
    kind = _Kind()
    program = read_program(command, told, _environment(kind, told))
    if program is None or not is_warm():
        return subprocess.run(
            command, cwd=directory, capture_output=True, text=True, timeout=timeout, check=False, env=told
        )
    return _server(kind).run(program, command, directory, told, timeout)


def start(
    directory: Path,
    *words: str,
    out: IO[str],
    err: IO[str],
    environment: dict[str, str] | None = None,
    imports: tuple[str, ...] = (),
) -> Started | subprocess.Popen[str]:
    """Start ``python words`` in the same way, and go on; `out` and `err` are files that it writes to.

    `imports`: packages that were imported before torch, with the settings that they find in `environment`. There
    is a server for each of these.

    For what is asked about ranks at work, or stopped. How a launcher and its ranks are started, and what of them
    is left, is asked of `subprocess.Popen`.
    """
    command = [sys.executable, *words]
    told = {**os.environ, **(environment or {})}
    kind = _Kind.of(imports, told)
    program = read_program(command, told, _environment(kind, told))
    if program is None or not is_warm():
        return subprocess.Popen(command, cwd=directory, stdout=out, stderr=err, text=True, env=told)
    return _server(kind).start(program, command, directory, told, (out.fileno(), err.fileno()))


def is_warm() -> bool:
    """Return whether `run` forks; if not, it executes."""
    return not os.environ.get("FARANDOLE_TEST_COLD")


def close_server() -> None:
    """End the servers, if there are any; called once at the end of the session."""
    for server in _servers.values():
        server.close()
    _servers.clear()


@dataclass(frozen=True)
class _Kind:
    """What a server has imported beside torch."""

    imports: tuple[str, ...] = ()
    settings: tuple[tuple[str, str], ...] = ()
    """Variables that were read then."""

    @classmethod
    def of(cls, imports: tuple[str, ...], environment: dict[str, str]) -> _Kind:
        return cls(imports, read_settings(environment) if imports else ())


_environments: dict[_Kind, dict[str, str]] = {}
_servers: dict[_Kind, _Server] = {}


class Started:
    """A process that the server has forked, asked as `subprocess.Popen` is."""

    def __init__(self, server: _Server, pid: int, command: list[str]) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._server = server
        self._command = command

    def poll(self) -> int | None:
        """Return the exit code; None while it runs."""
        while self.returncode is None and self._server.listen(0.0):
            pass
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code when it has ended; raise `subprocess.TimeoutExpired`."""
        deadline = time.monotonic() + (timeout if timeout is not None else float("inf"))
        while self.returncode is None:
            left_seconds = deadline - time.monotonic()
            if left_seconds <= 0:
                raise subprocess.TimeoutExpired(self._command, timeout or 0.0)
            self._server.listen(min(left_seconds, 60.0))
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Signal it, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it, and with it what dies with its parent."""
        self.send_signal(signal.SIGKILL)


class _Server:
    """Our end of the socket."""

    def __init__(self, kind: _Kind) -> None:
        self._connection, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.warm.server", str(theirs.fileno()), *kind.imports], cwd=ROOT,
                env=_environments[kind], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
        self._said = b""
        self._is_ready = False
        self._command: list[str] = []
        self._latest: list[Started] = []
        """What was asked for last, once the server has forked."""
        self._running: dict[int, Started] = {}
        try:
            while not self._is_ready:
                assert self.listen(START_SECONDS), f"the server of warm Python is not there in {START_SECONDS:g} s"
        except BaseException:  # such as the end of a test's time: the next test starts another
            self._process.kill()
            self.close()
            raise

    def run(
        self, program: Program, command: list[str], directory: Path, environment: dict[str, str], timeout: float
    ) -> subprocess.CompletedProcess[str]:
        pipes = [os.pipe(), os.pipe()]
        try:
            started = self.start(program, command, directory, environment, (pipes[0][1], pipes[1][1]))
        finally:
            for _, ours in pipes:
                os.close(ours)
        try:
            out, err = _read_to_the_end([theirs for theirs, _ in pipes], command, timeout)
        except BaseException:
            started.kill()
            raise
        finally:
            code = started.wait(START_SECONDS)
            for theirs, _ in pipes:
                os.close(theirs)
        return subprocess.CompletedProcess(command, code, out, err)

    def start(
        self, program: Program, command: list[str], directory: Path, environment: dict[str, str],
        streams: tuple[int, int],
    ) -> Started:  # fmt: skip
        socket.send_fds(self._connection, [b"!"], [0, *streams])
        request = {
            "program": astuple(program),
            "directory": str(directory),
            "environment": environment,
            "cores": sorted(os.sched_getaffinity(0)),
        }
        self._connection.sendall(json.dumps(request).encode() + b"\n")
        self._command = command
        while not self._latest:
            assert self.listen(START_SECONDS), "the server of warm Python does not fork"
        return self._latest.pop()

    def listen(self, seconds: float) -> bool:
        """Take what the server says; return whether it said anything within `seconds`."""
        if not select.select([self._connection], [], [], seconds)[0]:
            return False
        piece = self._connection.recv(1 << 16)
        assert piece, f"the server of warm Python is gone: exit code {self._process.wait()}"
        *lines, self._said = (self._said + piece).split(b"\n")
        for line in lines:
            self._hear(*json.loads(line))
        return True

    def _hear(self, kind: str, pid: int = 0, code: int = 0) -> None:
        if kind == "ready":
            self._is_ready = True
        elif kind == "started":
            self._running[pid] = Started(self, pid, self._command)
            self._latest = [self._running[pid]]
        else:
            self._running.pop(pid).returncode = code

    def close(self) -> None:
        self._connection.close()
        self._process.wait()


def _environment(kind: _Kind, told: dict[str, str]) -> dict[str, str]:
    """Return what a server is started with: what the first test that asks has, or what it asks for."""
    return _environments.setdefault(kind, told if kind.imports else dict(os.environ))


def _server(kind: _Kind) -> _Server:
    if kind not in _servers:
        _servers[kind] = _Server(kind)
    return _servers[kind]


def _read_to_the_end(pipes: list[int], command: list[str], timeout: float) -> list[str]:
    deadline = time.monotonic() + timeout
    taken = dict.fromkeys(pipes, b"")
    with selectors.DefaultSelector() as selector:
        for pipe in pipes:
            selector.register(pipe, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                out, err = taken.values()
                raise subprocess.TimeoutExpired(command, timeout, out, err)
            for key, _ in ready:
                if piece := os.read(key.fd, 1 << 16):
                    taken[key.fd] += piece
                else:
                    selector.unregister(key.fd)
    return [data.decode().replace("\r\n", "\n").replace("\r", "\n") for data in taken.values()]
