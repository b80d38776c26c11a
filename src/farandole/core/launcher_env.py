"""What a launcher's variables say.

A launcher starts ranks (it has `RankNames`), or one command a node (`NodeNames`), or either. A new one is an
instance of `LauncherEnv` in `table`, of a subclass where names alone do not say it, and an entry in
`rank_variables.RANK_LAUNCHERS` or `node_env.NODE_LAUNCHERS`. All methods are pure: they read the mapping given.

[Note: ports of jobs] A rendezvous that is derived from a job's name has a port from 15000 to 29999: below those
that the kernel hands out for outgoing connections, which could sit on one by chance.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .env import read_number
from .vocabulary.errors import ConfigError

LOOPBACK = "127.0.0.1"
FIRST_PORT, PORTS = 15000, 15000
"""See [Note: ports of jobs]."""
DEFAULT_PORT = 29500
"""Where nodes meet that have a network of their own, as torchrun does."""


@dataclass(frozen=True)
class RankNames:
    """The variables that a rank is given. Several names for one thing are tried in order."""

    rank: tuple[str, ...]
    size: tuple[str, ...]
    local_rank: tuple[str, ...] = ()
    local_size: tuple[str, ...] = ()
    node_rank: tuple[str, ...] = ()
    node_count: tuple[str, ...] = ()
    address: tuple[str, ...] = ("MASTER_ADDR",)
    port: tuple[str, ...] = ("MASTER_PORT",)

    def all_names(self) -> tuple[str, ...]:
        """Return every name, of whatever it tells."""
        return (
            *self.rank, *self.size, *self.local_rank, *self.local_size,
            *self.node_rank, *self.node_count, *self.address, *self.port,
        )  # fmt: skip


@dataclass(frozen=True)
class NodeNames:
    """The variables that the one command of a node is given. Several names for one thing are tried in order."""

    node_rank: str
    node_count: str
    address: tuple[str, ...]
    """A list of addresses, one a line, means its first."""
    port: tuple[str, ...] = ("MASTER_PORT",)
    slots: tuple[str, ...] = ()


@dataclass(frozen=True)
class NodeInfo:
    """One node's place among those of its job."""

    source: str
    node_rank: int
    node_count: int
    address: str
    """Node 0, as the others reach it."""
    port: int
    slots: int | None = None
    """Ranks a node, where the launcher says so."""
    second: str = ""
    """Node 1, as node 0 reaches it; empty: not said."""


@dataclass(frozen=True)
class LauncherEnv:
    """One launcher, and what it tells a rank or a node."""

    name: str
    ranks: RankNames | None = None
    nodes: NodeNames | None = None
    command: str = ""
    """What starts its ranks; empty: `farandole run`, which knows whether it has."""
    block_remedy: str = ""
    """How it is told to give neighbouring ranks to a host; empty: it does so always."""

    def started_rank(self, environ: Mapping[str, str]) -> bool:
        """Return whether it started this process as a rank: it says both rank and size."""
        assert self.ranks is not None, f"{self.name} starts no ranks"
        return all(any(name in environ for name in names) for names in (self.ranks.rank, self.ranks.size))

    def ranks_here(self, environ: Mapping[str, str], size: int, node_count: int) -> int:
        """Return how many ranks share this host, where no variable says it in one number: an even part."""
        return max(1, size // node_count)

    def rendezvous(self, environ: Mapping[str, str], *, one_host: bool) -> tuple[str | None, int | None]:
        """Return the address and port at which ranks meet that are told none; None for what is not known."""
        return None, None

    def serves_store(self, environ: Mapping[str, str]) -> bool:
        """Return whether it serves the store at the address already."""
        return False

    def refuse_contradiction(self, environ: Mapping[str, str]) -> None:
        """Raise `ConfigError` where it said one thing twice, and a value was changed since."""

    def started_node(self, environ: Mapping[str, str]) -> bool:
        """Return whether it started this process as the one command of a node."""
        assert self.nodes is not None, f"{self.name} starts no nodes"
        return self.nodes.node_rank in environ and self.node_count(environ) is not None

    def node_count(self, environ: Mapping[str, str]) -> str | None:
        """Return the number of nodes as it is written; None: not said."""
        assert self.nodes is not None, f"{self.name} starts no nodes"
        return environ.get(self.nodes.node_count)

    def second_node(self, environ: Mapping[str, str]) -> str:
        """Return node 1's address; empty: not said."""
        return ""

    def read_node(self, environ: Mapping[str, str]) -> NodeInfo | None:
        """Return this node's place; None for the only one. Raises `ConfigError` naming the wrong variable."""
        names, count_text = self.nodes, self.node_count(environ)
        assert names is not None, f"{self.name} starts no nodes"
        assert count_text is not None, "started_node was asked before"
        count = read_whole(count_text, names.node_count, 1)
        if count == 1:
            return None
        rank = read_whole(environ[names.node_rank], names.node_rank, 0)
        if rank >= count:
            raise ConfigError(
                f"{names.node_rank}={rank}, {names.node_count}={count}: expected a node below {count}"
            )
        address = next((environ[name].split()[0] for name in names.address if environ.get(name, "").strip()), None)
        if address is None:
            raise ConfigError(
                f"{self.name}: this is node {rank} of {count}, but no variable says where node 0 is",
                remedy=f"set {' or '.join(names.address)}",
            )
        port_name = next((name for name in names.port if environ.get(name)), None)
        port = DEFAULT_PORT if port_name is None else read_whole(environ[port_name], port_name, 1)
        slots = _read_slots(names.slots, environ)
        return NodeInfo(self.name, rank, count, address, port, slots, self.second_node(environ))


def read_first(environ: Mapping[str, str], names: tuple[str, ...], default: int, least: int) -> int:
    """Return the number in the first of the variables that is set; raise `ConfigError` naming it."""
    name = next((name for name in names if name in environ), None)
    return default if name is None else read_number(environ, name, default, least)


def read_whole(text: str, name: str, least: int) -> int:
    """Return a whole number of at most nine digits; raise `ConfigError` naming the variable."""
    text = text.strip()
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and int(text) >= least):
        raise ConfigError(f"{name}={text!r}: expected a whole number, at least {least}")
    return int(text)


def _read_slots(names: tuple[str, ...], environ: Mapping[str, str]) -> int | None:
    for name in names:
        text = environ.get(name, "").strip()
        if text.isdecimal() and int(text) > 0:
            return int(text)
        if text and not text.isdecimal() and text not in ("auto", "cpu", "gpu", "xpu"):
            raise ConfigError(f"{name}={text!r}: expected a whole number")
    return None
