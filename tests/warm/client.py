"""`run`: a farandole command to its end, on warm Python."""

from __future__ import annotations

import functools
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from dataclasses import astuple
from pathlib import Path

from .program import Program, read_program

ROOT = Path(__file__).resolve().parents[2]
FARANDOLE = [sys.executable, "-m", "farandole"]
START_SECONDS = 90.0
"""For the server to import torch, on a busy machine."""


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
    program = read_program(command, told, _environment())
    if program is None or not is_warm():
        return subprocess.run(
            command, cwd=directory, capture_output=True, text=True, timeout=timeout, check=False, env=told
        )
    return _server().run(program, command, directory, told, timeout)


def is_warm() -> bool:
    """Return whether `run` forks; if not, it executes."""
    return not os.environ.get("FARANDOLE_TEST_COLD")


def close_server() -> None:
    """End the server, if there is one; called once at the end of the session."""
    if _server.cache_info().currsize:
        _server().close()
        _server.cache_clear()


class _Server:
    """Our end of the socket."""

    def __init__(self) -> None:
        self._connection, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.warm.server", str(theirs.fileno())], cwd=ROOT,
                env=_environment(), pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        self._connection.settimeout(START_SECONDS)
        self._lines = self._connection.makefile("rb")
        assert self._answer() == "ready", "the server says so first"

    def run(
        self, program: Program, command: list[str], directory: Path, environment: dict[str, str], timeout: float
    ) -> subprocess.CompletedProcess[str]:
        pipes = [os.pipe(), os.pipe()]
        try:
            socket.send_fds(self._connection, [b"!"], [0, pipes[0][1], pipes[1][1]])
            request = {
                "program": astuple(program),
                "directory": str(directory),
                "environment": environment,
                "cores": sorted(os.sched_getaffinity(0)),
            }
            self._connection.sendall(json.dumps(request).encode() + b"\n")
        finally:
            for _, ours in pipes:
                os.close(ours)
        child = int(self._answer())
        try:
            out, err = _read_to_the_end([theirs for theirs, _ in pipes], command, timeout)
        except BaseException:
            os.kill(child, signal.SIGKILL)  # it is nobody else: the server has not told us of its end
            raise
        finally:
            code = int(self._answer())
            for theirs, _ in pipes:
                os.close(theirs)
        return subprocess.CompletedProcess(command, code, out, err)

    def close(self) -> None:
        self._lines.close()
        self._connection.close()
        self._process.wait()

    def _answer(self) -> str:
        line = self._lines.readline()
        assert line, f"the server of warm Python is gone: exit code {self._process.wait()}"
        return str(json.loads(line))


@functools.cache
def _environment() -> dict[str, str]:
    """Return what the server is started with: what the first test that asks has."""
    return dict(os.environ)


@functools.cache
def _server() -> _Server:
    return _Server()


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
