"""The servers of a job: which rank starts which, and the connections of this rank to all of them."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ....comm.transport.connect import Door, require_same_secret
from ....comm.world.comm_errors import refuse_if_ended
from ....comm.world.rendezvous import own_address
from ....comm.world.store_sync import all_gather_json
from ....comm.world.world import World
from ....core.env import read_job_secret, read_run_settings
from ....core.framing import keyed_hash
from ....core.vocabulary.errors import LaunchError
from ....core.vocabulary.sync_spec import SyncSpec
from ..client import ServerClient, ServerPlace, ServerProcess, make_directory, start_server
from ..loop import Limits
from . import clock_service, shard

GRACE_SECONDS: Final = 3.0
"""For a rank that has lost its connection to come back: a dead one holds up the others so long."""
_START_SECONDS = 120.0
_KEPT_COPIES, _LEAST_KEPT_BYTES = 8, 256 << 20
"""What a rank keeps of pushes that are in no snapshot: so many times what it sends to a server in a step."""
_MARGIN_BYTES = 16 << 20
_COPIES = 16
"""States of an optimizer that a message may have beside the parameters."""


@dataclass(eq=False)
class ServerConnections:
    """Connections of one rank to all servers of one model."""

    clients: list[ServerClient]
    started: list[ServerProcess] = field(default_factory=list)
    """Those that this rank has started."""

    def close(self) -> None:
        """Leave: servers end when all have left. May be called twice."""
        was_last = [each.leave() for each in self.clients]
        processes = [*self.started, *(process for each in self.clients for process in each.restored)]
        for process in processes:
            process.end(10.0 if all(was_last) else 0.5)
        self.clients, self.started = [], []

    def forget(self) -> None:
        """In a forked child: close its copies of the connections."""
        for each in self.clients:
            each.close()


def starters(nodes: Sequence[int], servers: int) -> list[int]:
    """Return by server the rank that starts it: hosts in turn, and on each its ranks in turn.

    >>> starters([0, 0, 1, 1], 3)
    [0, 2, 1]
    """
    by_node: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        by_node.setdefault(node, []).append(rank)
    width = max(map(len, by_node.values()))
    order = [ranks[i] for i in range(width) for ranks in by_node.values() if i < len(ranks)]
    return order[:servers]


@dataclass(frozen=True)
class ServerLayout:
    """How many servers there are, and what each hosts."""

    servers: int
    """0: one on each host."""
    services: Callable[[int, str], Mapping[str, Mapping[str, Any]]]
    """By number and directory of a server: see `ServerPlace.services`."""
    snapshot_seconds: float
    most_bytes: int
    """Tensors of a request or a reply."""
    most_kept_bytes: int
    """Tensors of requests of one rank to one server that are in no snapshot yet."""


def connect_servers(here: World, spec: SyncSpec, shard_bytes: int) -> ServerConnections:
    """Start the servers of a model's parameters and connect to them; to be called by all ranks.

    Args:
        here: the ranks that train.
        spec: which servers, and how often they write snapshots.
        shard_bytes: of the parameters at one server.

    Raises:
        LaunchError: on all ranks, where one could not be started.
    """

    def services(number: int, directory: str) -> Mapping[str, Mapping[str, Any]]:
        made: dict[str, dict[str, Any]] = {shard.SERVICE: {"class": f"{shard.__name__}:DenseShard", "config": {}}}
        if number == 0:
            config = {"ranks": list(range(here.size)), "staleness": spec.staleness, "directory": directory}
            made[clock_service.SERVICE] = {"class": f"{clock_service.__name__}:ClockService", "config": config}
        return made

    most_bytes = (_COPIES + 2) * shard_bytes + _MARGIN_BYTES
    kept = max(_KEPT_COPIES * shard_bytes, _LEAST_KEPT_BYTES)
    return start_and_connect(here, ServerLayout(spec.servers, services, spec.snapshot_seconds, most_bytes, kept))


def start_and_connect(here: World, layout: ServerLayout) -> ServerConnections:
    """Start the servers of `layout` and connect to them; to be called by all ranks.

    Raises `LaunchError` on all ranks, where one could not be started.
    """
    secret = read_job_secret()
    said = all_gather_json(
        here,
        "servers",
        {"node": here.node_rank, "nonce": secrets.token_hex(32), "secret": Door.fingerprint(secret)},
    )
    require_same_secret(here, "servers", [each["secret"] for each in said])
    key = keyed_hash(secret, b"servers", said[0]["nonce"].encode())
    nodes = [each["node"] for each in said]
    count = layout.servers or len(set(nodes))
    mine = [number for number, rank in enumerate(starters(nodes, count)) if rank == here.rank]
    started: list[ServerProcess] = []
    told: dict[str, Any] = {"places": [], "failed": ""}
    for number in mine:
        try:
            place, process = start_server(_place(here, layout, number), key)
        except (LaunchError, OSError) as problem:
            told["failed"] = str(problem)
            break
        started.append(process)
        told["places"].append(place.to_json())
    everyone = all_gather_json(here, "servers started", told)
    failed = next((each["failed"] for each in everyone if each["failed"]), "")
    if failed:
        for process in started:
            process.kill()
            process.wait()
        for place in told["places"]:
            shutil.rmtree(place["directory"], ignore_errors=True)
        raise LaunchError(failed)
    places = sorted(
        (ServerPlace.from_json(each) for told in everyone for each in told["places"]), key=lambda each: each.number
    )
    clients = [
        ServerClient(
            place, key, client=here.rank, rank=here.job_rank, host=_host(here),
            most_kept_bytes=layout.most_kept_bytes, most_bytes=layout.most_bytes,
            still_on=lambda: refuse_if_ended(here, "server"),
        )
        for place in places
    ]  # fmt: skip
    return ServerConnections(clients, started)


def _place(here: World, layout: ServerLayout, number: int) -> ServerPlace:
    run = read_run_settings().run_directory
    directory = make_directory(run if run is not None and Path(run).is_dir() else None)
    limits = Limits(layout.snapshot_seconds, GRACE_SECONDS, _START_SECONDS, layout.most_bytes)
    return ServerPlace(
        number=number, host=_host(here), address=own_address(here.address), directory=directory,
        clients=list(range(here.size)), services=layout.services(number, directory), limits=limits,
        generation=read_run_settings().generation,
    )  # fmt: skip


def _host(here: World) -> str:
    return here.host if here.node_count == 1 else f"{here.host} (host {here.node_rank})"
