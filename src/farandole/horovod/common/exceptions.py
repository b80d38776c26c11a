"""The errors of Horovod's names, and how ours become them.

::

    RuntimeError
    |-- HorovodInternalError          an operation failed on all ranks
    |   |-- HorovodMismatchError      ranks asked for different things: trying again fails again
    |   |-- HorovodPeerLostError      another rank is gone
    |   `-- HorovodStalledError       another rank did not come in time
    |-- HorovodUnsupportedError       (also a ValueError) this operation does not do that
    `-- HostsUpdatedInterrupt         elastic: hosts came or went
"""

from __future__ import annotations

from ...core.vocabulary.errors import CommError, Mismatch, PeerLost, Stalled


class HorovodInternalError(RuntimeError):
    """An operation failed; the same on every rank that took part."""


class HorovodMismatchError(HorovodInternalError):
    """Ranks asked for different things under one name. Trying again fails again."""


class HorovodPeerLostError(HorovodInternalError):
    """Another rank is gone."""


class HorovodStalledError(HorovodInternalError):
    """Another rank did not come in time."""


class HorovodUnsupportedError(ValueError, RuntimeError):
    """The operation does not do that, on any rank. Horovod raises a RuntimeError for some of these."""


class HostsUpdatedInterrupt(RuntimeError):
    """Hosts were added to an elastic job or removed from it; `skip_sync`: the state needs no new broadcast."""

    def __init__(self, skip_sync: bool) -> None:
        super().__init__(skip_sync)
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(ImportError):
    """A framework of another version than the one this was built for."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(get_version_mismatch_message(name, version, installed_version))
        self.name = name
        self.version = version
        self.installed_version = installed_version


def get_version_mismatch_message(name: str, version: str, installed_version: str) -> str:
    """Return the text of `HorovodVersionMismatchError`."""
    return f"{name} {installed_version} is installed, but {name} {version} was expected; reinstall one of them"


def from_comm_error(error: CommError) -> HorovodInternalError:
    """Return what Horovod's names raise for an error of the engine, with its text."""
    kinds: list[tuple[type[CommError], type[HorovodInternalError]]] = [
        (Mismatch, HorovodMismatchError),
        (PeerLost, HorovodPeerLostError),
        (Stalled, HorovodStalledError),
    ]
    kind = next((theirs for ours, theirs in kinds if isinstance(error, ours)), HorovodInternalError)
    return kind(str(error))
