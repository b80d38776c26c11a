"""What runs inside an actor of Ray: one rank's process, its output and its end."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Mapping, Sequence

from ...core.environ.env import inherited_environment
from ...core.host.interfaces import towards
from ...core.vocabulary.errors import LaunchError
from ..job.placement import ReservedPort
from ..supervise.process import RankProcess, start_rank
from ..supervise.reaper import end_group, has_ended


class RankActor:
    """Starts one rank's process when told and hands on what it prints. One call at a time."""

    def __init__(self) -> None:
        self._process: RankProcess | None = None
        self._port: ReservedPort | None = None
        self._open: dict[int, bool] = {}
        """Descriptors of pipes that are open, and whether it is stderr."""

    def address(self) -> str:
        """Return the address of the node this actor is on, as the cluster knows it."""
        import ray

        return str(ray.util.get_node_ip_address())

    def interface(self, peers: Sequence[str]) -> str:
        """Return the interface of this node that leads to the addresses `peers`."""
        return towards(peers).interface

    def reserve(self, address: str) -> int:
        """Hold a free port for the ranks to meet at until this actor ends; return it."""
        self._port = ReservedPort(address)
        return self._port.port

    def start(self, rank: int, command: Sequence[str], environment: Mapping[str, str], directory: str) -> None:
        """Start the rank; raise `LaunchError` when it cannot be."""
        try:
            os.chdir(directory)
        except OSError as problem:
            raise LaunchError(
                f"rank {rank}: {directory} on {socket.gethostname()}: {problem.strerror}",
                remedy="start from a directory that all nodes have",
            ) from None
        self._process = start_rank(rank, command, inherited_environment(environment), ())
        self._open = {pipe.fileno(): is_error for pipe, is_error in self._process.pipes}

    def poll(self, wait_seconds: float) -> tuple[list[tuple[bool, bytes]], int | None]:
        """Return what the rank printed, as (is it stderr, bytes), and its exit code once it has ended.

        Waits up to `wait_seconds` for news. What the rank has started ends with it.
        """
        process = self._process
        assert process is not None, "poll() comes after start()"
        select.select([*self._open, *([process.pidfd] if process.pidfd >= 0 else [])], [], [], wait_seconds)
        code = None
        if has_ended(process.popen):
            code = end_group(process.popen)
        printed = [(is_error, data) for fd, is_error in list(self._open.items()) if (data := self._read(fd))]
        if code is not None:
            self._open.clear()
            process.close()
        return printed, code

    def signal(self, number: int) -> None:
        """Send a signal to the rank and all that it has started."""
        if self._process is not None and not has_ended(self._process.popen):
            self._process.signal(number)

    def _read(self, descriptor: int) -> bytes:
        data = b""
        while len(data) < 1 << 20:
            try:
                piece = os.read(descriptor, 1 << 16)
            except BlockingIOError:
                return data
            if not piece:
                self._open.pop(descriptor, None)
                return data
            data += piece
        return data
