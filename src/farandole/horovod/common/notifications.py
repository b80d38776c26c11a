"""What a state hears from the launcher of an elastic job, and what the launcher hears of it.

Outside elastic jobs everything here does nothing, so that the same program runs with and without.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ...train.elastic import ElasticWorker, SyncAgreement


class HostsListener(Protocol):
    """Who wants to know of hosts that come and go: an elastic state."""

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Hosts came or must go; called in another thread."""
        ...


class WorkerNotificationManager:
    """Passes news of hosts on to the states that listen. One a process."""

    def __init__(self) -> None:
        self._member: ElasticWorker | None = None
        self._listeners: set[HostsListener] = set()

    @property
    def is_connected(self) -> bool:
        """Whether a launcher of an elastic job is there."""
        return self._member is not None

    @property
    def assigned_at(self) -> float:
        """When this generation was formed, by the launcher's clock; 0 outside elastic jobs."""
        return 0.0 if self._member is None else max(0.0, self._member.assigned_at)

    def init(self) -> None:
        """Connect to the launcher of an elastic job, when there is one. May be called again."""
        if self._member is None:
            from ...train.elastic import member

            self._member = member()
            if self._member is not None:
                self._member.add_listener(self.handle_hosts_updated)

    def register_listener(self, listener: HostsListener) -> None:
        """Tell `listener` of hosts that come and go."""
        self._listeners.add(listener)

    def remove_listener(self, listener: HostsListener) -> None:
        """Tell it no longer."""
        self._listeners.discard(listener)

    def handle_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Hosts have changed."""
        for listener in list(self._listeners):
            listener.on_hosts_updated(timestamp, update_res)

    def agree_on_sync(self, *, needed: bool) -> SyncAgreement | None:
        """Learn whether any rank needs rank 0's state; None outside elastic jobs."""
        return None if self._member is None else self._member.agree_on_sync(needed=needed)

    def has_state(self, progress: int) -> None:
        """This rank has the state after `progress` commits."""
        if self._member is not None:
            self._member.has_state(progress)

    def committed(self) -> None:
        """All ranks have committed once more."""
        if self._member is not None:
            self._member.committed()

    def failed(self, why: BaseException) -> None:
        """An operation failed here; the other ranks must leave too."""
        if self._member is not None:
            self._member.report_failure(str(why))


notification_manager = WorkerNotificationManager()
"""The one of this process."""
