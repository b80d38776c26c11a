"""``--on ray``: the same script as a placement group of actors, on a running cluster or a local one.

One actor a rank; each starts the script as a process of its node, so that a script that ends its process or
corrupts its memory takes no worker of Ray along. Ranks of a node are neighbours, and rank 0's node is where
they meet. The actors end with this driver, their processes with the actors.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...core.env import default_environment, inherited_environment, read_ray_address
from ...core.host.interfaces import towards
from ...core.vocabulary.errors import ConfigError, LaunchError
from ...core.vocabulary.run_files import read_crashes
from ...core.vocabulary.text import install_command
from ..job.contract import JobSpec, RankSpec, rank_environment
from ..job.hosts import LOOPBACK, HostSlots
from ..job.placement import ReservedPort, assign_ranks
from ..output import Output
from ..supervise.failure import Exit
from ..supervise.job_loop import FixedJob, HostReports
from ..supervise.process import RankProcess, end_group, has_ended, start_rank

PLACE_SECONDS = 60.0
"""How long to wait for the cluster to make room for all ranks."""
CALL_SECONDS = 60.0
"""How long an actor may take to answer."""
POLL_SECONDS = 0.2


@dataclass(frozen=True)
class RayRequest:
    """What the ranks need of the cluster."""

    size: int
    cpus_per_rank: int = 1
    gpus_per_rank: int = 0

    @property
    def bundle(self) -> dict[str, float]:
        """The resources of one rank, in Ray's names."""
        gpus = {"GPU": float(self.gpus_per_rank)} if self.gpus_per_rank else {}
        return {"CPU": float(self.cpus_per_rank), **gpus}


@contextmanager
def cluster(spec: RayRequest) -> Iterator[Any]:
    """Join the running cluster, or start one on this machine, and yield Ray; leave it at the end.

    Raises `ConfigError` when Ray is not installed, and when the cluster can never hold the ranks.
    """
    try:
        import ray
    except ImportError:
        raise ConfigError("--on ray needs Ray", remedy=f"install it: {install_command('ray')}") from None
    quiet = {"logging_level": "ERROR", "log_to_driver": False}
    # Ray reports the use of clusters that it starts to its makers unless it is told not to.
    with default_environment({"RAY_USAGE_STATS_ENABLED": "0"}):
        try:
            ray.init(address="auto", **quiet)
        except (ConnectionError, RuntimeError, ray.exceptions.RayError) as problem:
            if read_ray_address() or not isinstance(problem, ConnectionError):
                where = read_ray_address() or "this machine"
                raise LaunchError(
                    f"cannot join the cluster of Ray at {where}: {problem}",
                    remedy="does ray status answer here? a cluster with a token needs it in RAY_AUTH_TOKEN",
                ) from None
            cores = max(os.cpu_count() or 1, spec.size * spec.cpus_per_rank)
            ray.init(address="local", num_cpus=cores, include_dashboard=False, **quiet)
    try:
        there_is = ray.cluster_resources()
        for name, each in spec.bundle.items():
            if there_is.get(name, 0.0) < each * spec.size:
                raise ConfigError(
                    f"{spec.size} ranks need {each * spec.size:g} {name}, and this cluster of Ray has "
                    f"{there_is.get(name, 0.0):g}",
                    remedy="lower -np, --cpus-per-rank or --gpus-per-node, or add nodes: ray start --address=...",
                )
        yield ray
    finally:
        ray.shutdown()


@dataclass(eq=False)
class RayActors:
    """An actor a rank on nodes of the cluster. Use once: `place`, then `close`."""

    ray: Any
    spec: RayRequest
    places: list[RankSpec] = field(default_factory=list)
    actors: list[Any] = field(default_factory=list)
    """By rank."""
    _group: Any = None

    def place(self) -> tuple[str, int]:
        """Make the actors, give out the ranks and return the meeting point.

        Raises `LaunchError` when the cluster makes no room in time.
        """
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        spec = self.spec
        self._group = self.ray.util.placement_group([spec.bundle] * spec.size, strategy="PACK")
        if not self._group.wait(PLACE_SECONDS):
            raise LaunchError(
                f"Ray made no room for {spec.size} ranks within {PLACE_SECONDS:g} s",
                remedy="is another job using the cluster? see: ray status",
            )
        make = self.ray.remote(RankActor)
        made = [
            make.options(
                num_cpus=spec.cpus_per_rank, num_gpus=spec.gpus_per_rank, max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, index),
            ).remote()
            for index in range(spec.size)
        ]  # fmt: skip
        self.actors = made
        addresses = self.answers([actor.address.remote() for actor in made])
        order = sorted(range(spec.size), key=lambda index: (addresses.index(addresses[index]), index))
        self.actors = [made[index] for index in order]
        hosts = [HostSlots(name, addresses.count(name)) for name in dict.fromkeys(addresses)]
        interfaces = self._interfaces([host.name for host in hosts], addresses, made)
        self.places = [
            replace(place, interface=interfaces.get(place.host_name, ""))
            for place in assign_ranks(hosts, spec.size)
        ]
        address = LOOPBACK if len(hosts) == 1 else hosts[0].name
        port: int = self.answers([self.actors[0].reserve.remote(address)])[0]
        return address, port

    def _interfaces(self, hosts: Sequence[str], addresses: Sequence[str], actors: Sequence[Any]) -> dict[str, str]:
        """Return by host the interface that leads to the others, as an actor there sees it."""
        if len(hosts) == 1:
            return {}
        asked = [actors[addresses.index(host)] for host in hosts]
        peers = [hosts[1:], *([hosts[:1]] * (len(hosts) - 1))]  # rank 0's host is met by all
        calls = [actor.interface.remote(list(each)) for actor, each in zip(asked, peers, strict=True)]
        return dict(zip(hosts, self.answers(calls), strict=True))

    def close(self) -> None:
        """End the actors, and with them what they started, and give the room back."""
        for actor in self.actors:
            with suppress(Exception):  # an actor that is gone has nothing to end
                self.ray.kill(actor)
        if self._group is not None:
            self.ray.util.remove_placement_group(self._group)
            self._group = None

    def answers(self, calls: Sequence[Any]) -> list[Any]:
        """Return what calls of actors return; raise `LaunchError` when one fails or takes too long."""
        try:
            found: list[Any] = self.ray.get(list(calls), timeout=CALL_SECONDS)
        except self.ray.exceptions.GetTimeoutError:
            raise LaunchError(
                f"actors of Ray did not answer within {CALL_SECONDS:g} s", remedy="see: ray status"
            ) from None
        except self.ray.exceptions.RayTaskError as problem:
            cause = problem.cause
            if isinstance(cause, LaunchError):
                raise cause from None
            raise LaunchError(f"an actor of Ray failed: {cause!r}") from None
        except self.ray.exceptions.RayActorError as problem:
            raise LaunchError(
                f"an actor of Ray could not start: {str(problem).strip().splitlines()[0]}",
                remedy="is farandole installed on all nodes of the cluster?",
            ) from None
        return found


class RayJob(FixedJob):
    """Runs one command as the ranks of actors that have their places."""

    def __init__(
        self, made: RayActors, command: Sequence[str], job: JobSpec, output: Output, ours: Mapping[str, str]
    ) -> None:
        """`ours` are the variables of this process that ranks get: Ray's workers inherit their node's."""
        super().__init__(output, job)
        self._made, self._command, self._ours = made, command, ours

    def _begin(self, at_last: ExitStack) -> None:
        variables = [{**self._ours, **rank_environment(each, self._job, self._ours)} for each in self._made.places]
        host = RayHost(self._made, self._job.run_directory, self)
        self.hosts.add(host, numbers=range(len(variables)))
        host.start(self._command, variables)


class RayHost:
    """All actors of a job as one `JobHost`."""

    def __init__(self, made: RayActors, run_directory: Path, reports: HostReports) -> None:
        self._made, self._directory, self._reports = made, run_directory, reports
        self._waiting: dict[Any, int] = {}
        """Calls that wait for news of a rank, and whose."""
        self._news = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_stopping = False

    def fileno(self) -> int:
        """Return a descriptor that is readable when a call was answered."""
        return self._news

    def start(self, command: Sequence[str], variables: Sequence[Mapping[str, str]]) -> None:
        """Start all ranks; raise `LaunchError` when one cannot be."""
        here = str(Path.cwd())
        self._made.answers(
            [
                actor.start.remote(rank, list(command), environment, here)
                for rank, (actor, environment) in enumerate(zip(self._made.actors, variables, strict=True))
            ]
        )
        for rank in range(len(variables)):
            self._ask(rank)

    def _ask(self, rank: int) -> None:
        call = self._made.actors[rank].poll.remote(POLL_SECONDS)
        self._waiting[call] = rank
        call.future().add_done_callback(self._answered)

    def _answered(self, _: object) -> None:
        with suppress(OSError):  # closed meanwhile
            os.eventfd_write(self._news, 1)

    def poll(self) -> None:
        """Deal with what was answered."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._news)
        if not self._waiting:
            return
        ready, _ = self._made.ray.wait(list(self._waiting), num_returns=len(self._waiting), timeout=0)
        for news in ready:
            rank = self._waiting.pop(news)
            if self._take(rank, news):
                self._ask(rank)

    def tick(self, now: float) -> None:
        """Look for accounts of crashes, where the nodes share the run directory."""
        for crash in read_crashes(self._directory):
            self._reports.crashed(crash)

    def _take(self, rank: int, news: Any) -> bool:
        """Pass on what a rank printed; return whether it still runs."""
        try:
            printed, code = self._made.ray.get(news)
        except self._made.ray.exceptions.RayError as problem:
            text = str(problem).strip().splitlines()
            self._reports.say(f"rank {rank}: its actor is gone: {text[0] if text else type(problem).__name__}")
            printed, code = [], -signal.SIGKILL
        for is_error, data in printed:
            self._reports.printed(rank, is_error, data)
        if code is None:
            return True
        self.tick(time.monotonic())  # its account goes first
        host = self._made.places[rank].host_name
        self._reports.ended(Exit(rank, code, time.monotonic(), self._is_stopping, host=host))
        return False

    def stop(self, number: int) -> None:
        """Send a signal to all ranks."""
        self._is_stopping = self._is_stopping or number != signal.SIGUSR1
        for rank in self._waiting.values():
            self._made.actors[rank].signal.remote(int(number))

    def take_stacks(self) -> None:
        """Take none: actors have no way for it."""

    def leave(self) -> bool:
        """Return True: nothing has to be brought from there."""
        return True

    def close(self) -> None:
        """Wait for no more news; who made the actors ends them."""
        self._waiting.clear()
        os.close(self._news)


# What runs inside an actor of Ray: one rank's process, its output and its end.


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
