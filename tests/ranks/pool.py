"""Ranks for tests: processes that import torch once and then play one job after the other.

`@ranks(2)` makes a test whose body runs on every rank of a fresh world (real processes, real sockets).
A job that fails on one rank fails the test with that rank's traceback; a job that hangs ends with the
pool killed and started anew.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import multiprocessing
import os
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

LIMIT_SECONDS = 30.0
"""For a job."""
START_SECONDS = 90.0
"""For a worker to import torch, on a busy machine: no part of any job."""
PATIENCE_SECONDS = 2.0
"""For the other ranks, when one has failed."""
patient = pytest.mark.timeout(60 + START_SECONDS)
"""For a test that may be the first to ask for workers, or for warm Python."""
START_METHOD = "spawn"
_PLAYING = "FARANDOLE_TEST_RANK"


def takes(seconds: float) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Allow the decorated job more than `LIMIT_SECONDS`. To be written below `@ranks`."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        vars(body)["limit_seconds"] = seconds
        marked: Callable[..., None] = pytest.mark.timeout(seconds + START_SECONDS)(body)
        return marked

    return decorate


def fresh(body: Callable[..., None]) -> Callable[..., None]:
    """Play the decorated job in new processes: for what counts all that a process has. Below `@ranks`.

    They start with the job's variables: for what is read when a module is imported.
    """
    vars(body)["fresh"] = True
    return body


def ranks(*sizes: int, **variables: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the decorated test's body on so many ranks, with `variables` added to their environment.

    With several sizes it is one test for each.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(**arguments: Any) -> None:
            if os.environ.get(_PLAYING):
                body(**arguments)
                return
            file = inspect.getsourcefile(body)
            assert file is not None, f"no source file of {body}"
            # pytest's own objects stay here: a temporary directory travels as its path.
            limit_seconds = vars(body).get("limit_seconds", LIMIT_SECONDS)
            size = arguments.pop("world_size", sizes[0])
            plain = {name: value for name, value in arguments.items() if name != "request"}
            job = _Job(file, body.__name__, plain, variables, limit_seconds)
            if not vars(body).get("fresh"):
                _pool.play(size, job)
                return
            _pool.close()
            with patch.dict(os.environ, variables):
                _pool.grow(size)
            try:
                _pool.play(size, job)
            finally:
                if variables:  # which these processes have for good
                    _pool.close()

        signature = inspect.signature(body)
        if len(sizes) > 1:
            several = inspect.Parameter("world_size", inspect.Parameter.KEYWORD_ONLY)
            signature = signature.replace(parameters=[*signature.parameters.values(), several])
            test = pytest.mark.parametrize("world_size", sizes)(test)
        test.__signature__ = signature  # type: ignore[attr-defined]
        if "limit_seconds" in vars(body):
            return test
        marked: Callable[..., None] = pytest.mark.timeout(LIMIT_SECONDS + START_SECONDS)(test)
        return marked

    return decorate


@dataclass(frozen=True)
class _Job:
    file: str
    name: str
    arguments: dict[str, Any]
    variables: dict[str, str]
    limit_seconds: float


@dataclass(frozen=True)
class _Skipped:
    """What a rank answers whose body skips the test."""

    reason: str


class Pool:
    """Worker processes, grown on demand, reused by every test of the session."""

    def __init__(self) -> None:
        self._workers: list[tuple[BaseProcess, Connection]] = []

    def play(self, size: int, job: _Job) -> None:
        """Run `job` on `size` ranks; raise AssertionError with what failed, or skip where a rank does."""
        reasons: list[str] = []
        try:
            failures = self._play(size, job, reasons)
        except BaseException:
            self.close()  # a test that was ended from outside: nobody knows what its ranks will say next
            raise
        if failures:
            self.close()
            raise AssertionError("\n".join(failures))
        if reasons:
            pytest.skip(reasons[0])

    def _play(self, size: int, job: _Job, reasons: list[str]) -> list[str]:
        self.grow(size)
        port = free_port()
        for rank, (_, connection) in enumerate(self._workers[:size]):
            connection.send(replace(job, variables={**_place(rank, size, port), **job.variables}))
        failures: list[str] = []
        deadline = time.monotonic() + job.limit_seconds
        for rank, (process, connection) in enumerate(self._workers[:size]):
            try:
                # A rank that failed leaves the others waiting: give them little more time.
                left_seconds = PATIENCE_SECONDS if failures else deadline - time.monotonic()
                if not connection.poll(max(0.1, left_seconds)):
                    failures.append(f"rank {rank} did not answer")
                    continue
                answer = connection.recv()
            except (EOFError, ConnectionResetError):
                process.join(5)
                answer = f"died with exit code {process.exitcode}"
            if isinstance(answer, _Skipped):
                reasons.append(answer.reason)
            elif answer is not None:
                failures.append(f"rank {rank}: {answer}")
        return failures

    def close(self) -> None:
        """End all workers."""
        for process, connection in self._workers:
            connection.close()
            process.kill()
            process.join()
        self._workers = []

    def grow(self, size: int) -> None:
        """Start workers until there are `size`."""
        context: Any = multiprocessing.get_context(START_METHOD)
        known = len(self._workers)
        while len(self._workers) < size:
            here, there = context.Pipe()
            process = context.Process(target=_work, args=(there,))
            process.start()
            there.close()
            self._workers.append((process, here))
        for rank, (process, connection) in enumerate(self._workers[known:], start=known):
            if not connection.poll(START_SECONDS):
                raise AssertionError(f"worker {rank} (process {process.pid}) did not start in {START_SECONDS:g} s")
            connection.recv()


_pool = Pool()


def close_pool() -> None:
    """End the workers; called once at the end of the session."""
    _pool.close()


def _place(rank: int, size: int, port: int) -> dict[str, str]:
    values = {"RANK": rank, "SIZE": size, "LOCAL_RANK": rank, "LOCAL_SIZE": size, "NODE_RANK": 0, "NODE_COUNT": 1}
    place = {f"FARANDOLE_{name}": str(value) for name, value in values.items()}
    return {**place, "FARANDOLE_ADDRESS": "127.0.0.1", "FARANDOLE_PORT": str(port)}


def free_port() -> int:
    """Return a port of this host that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _work(connection: Connection) -> None:
    os.environ[_PLAYING] = "1"
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    # The first optimizer of a process imports thousands of files: on a busy machine longer than a job may take.
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)
    multiprocessing.set_start_method("fork", force=True)  # for loaders' workers, as in a user's script
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message="Sparse invariant checks")
    connection.send("ready")
    while True:
        try:
            job = connection.recv()
        except (EOFError, OSError):
            return
        connection.send(_play(job))


def _play(job: _Job) -> str | _Skipped | None:
    import faulthandler

    import torch

    import farandole as fd

    before = dict(os.environ)
    os.environ.update(job.variables)
    hook = sys.excepthook
    faulthandler.dump_traceback_later(job.limit_seconds - 5)
    try:
        torch.manual_seed(0)
        _load(job.file, job.name)(**job.arguments)
    except pytest.skip.Exception as skipped:
        return _Skipped(str(skipped))
    except BaseException:
        found = traceback.format_exc()
        print(found, file=sys.stderr)  # should the end of the world hang, this is the reason
        return found
    else:
        return None
    finally:
        for each in job.arguments.values():
            if isinstance(each, pytest.MonkeyPatch):
                each.undo()  # this process's copy: pytest undoes its own
        fd.shutdown()
        faulthandler.cancel_dump_traceback_later()
        compiler = sys.modules.get("torch._dynamo")
        if compiler is not None:
            compiler.reset()  # else the next test's parameters could not be late: what is compiled asks no class
        sys.excepthook = hook
        os.environ.clear()
        os.environ.update(before)


def _load(file: str, name: str) -> Callable[..., None]:
    root = Path(__file__).resolve().parents[2]
    module = importlib.import_module(".".join(Path(file).resolve().relative_to(root).with_suffix("").parts))
    found: Callable[..., None] = getattr(module, name)
    return found
