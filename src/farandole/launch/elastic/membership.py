"""The state machine of an elastic job: its workers, and the next orders. No process and no socket here.

`ElasticJob` tells the membership what happened (hosts changed, a worker is ready, failed or has ended) and calls
`tick`; it answers with orders. Time is given by the caller.

[Note: a generation] Workers that say they are ready wait. When no worker trains, those that wait become
the next generation: each is told its rank and where to meet rank 0. A generation ends in one of two ways.
*Broken*: a worker died, or reported that its exchange failed; all are told to leave at once, because a rank
that waits for a rank that waits for the dead one would notice nothing. *Asked*: hosts came or must go;
members are told, leave together at their next commit, and lose nothing. New workers are started first and
members hear of them only when they are ready, so that none waits while they import.

[Note: links between workers] The launcher may reach two workers that cannot reach each other: a generation of both
fails each time. Members whose generation failed call the other hosts and report which do not answer. If a
pair fails in two generations running, one of its hosts is dropped; so is one that others miss and that does not
even leave a generation which is over. `links` keeps the reports.
"""

from __future__ import annotations

import random
import secrets
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..job.contract import RankSpec
from ..job.hosts import HostSlots
from ..job.placement import assign_ranks
from .control import NO_STATE
from .options import ElasticOptions

# The workers of an elastic job, and the generation of ranks that some of them form.


State = Literal["starting", "preparing", "ready", "member", "removed", "ended"]


@dataclass(eq=False)
class Worker:
    """One process of the job; numbers are never used again."""

    number: int
    """Lower numbers were started earlier."""
    host: str
    progress: int = NO_STATE
    """Commits made by the job up to the state it holds."""
    started_at: float = 0.0
    state: State = "starting"
    address: str = ""
    port: int = 0
    """Where it offers to be met as rank 0; valid while it is ready."""
    has_trained: bool = False
    """Whether it ever was in a generation."""
    is_in_step: bool = False
    """Whether it waits to make a step again with those that were in it: one that is new has no part in that."""
    lets_in: bool = False
    """Whether it waits between two steps, where one that is new can come in."""
    prepares: bool = False
    """Whether it runs its script by itself until it needs the state of those that train."""

    @property
    def is_alive(self) -> bool:
        """Whether it counts: it runs and is not on its way out."""
        return self.state in ("starting", "preparing", "ready", "member")


@dataclass(eq=False)
class Generation:
    """One generation of ranks, from its assignment to the next one."""

    number: int = 0
    """0: none was formed yet."""
    members: tuple[int, ...] = ()
    """Workers by rank."""
    lost_members: int = 0
    """Members that have failed."""
    broken_at: float | None = None
    """When its members were told to leave; None: they were not."""
    asked: frozenset[int] | None = None
    """The members of the next one, as these were last told; None: they were told nothing."""


# Which hosts could not reach each other, by generation. No process and no socket here.


@dataclass
class LinkFaults:
    """What members of failed generations told of hosts that do not answer them."""

    _missed: dict[tuple[str, str], set[int]] = field(default_factory=dict)
    """Generations in which the first could not reach the second."""

    def note(self, host: str, missed: Collection[str], generation: int) -> None:
        """Take what a member on `host` says."""
        for other in missed:
            self._missed.setdefault((host, other), set()).add(generation)

    def forget(self, host: str) -> None:
        """The host is not in the job any more."""
        self._missed = {pair: found for pair, found in self._missed.items() if host not in pair}

    def who_misses(self, host: str, generation: int) -> list[str]:
        """Return the hosts that could not reach `host`, if it has not reported an unreachable host itself."""
        if any(first == host and generation in found for (first, _), found in self._missed.items()):
            return []
        return sorted(
            first for (first, second), found in self._missed.items() if second == host and generation in found
        )

    def host_to_drop(self, generation: int, order: Mapping[str, tuple[int, int]]) -> tuple[str, list[str]] | None:
        """Return a host to go on without, and who cannot reach it; None when no pair has failed twice running.

        The host that most others miss; of two that miss each other alone the later one by `order`, which also
        says which hosts there are.
        """
        pairs = {
            frozenset(pair)
            for pair in self._missed
            if self._fails(pair, generation) and self._fails(pair, generation - 1) and set(pair) <= order.keys()
        }
        if not pairs:
            return None
        count = Counter(host for pair in pairs for host in pair)
        worst = max(count, key=lambda host: (count[host], order[host]))
        return worst, sorted(host for pair in pairs if worst in pair for host in pair - {worst})

    def _fails(self, pair: tuple[str, str], generation: int) -> bool:
        return any(generation in self._missed.get(way, ()) for way in (pair, pair[::-1]))


RESET_LIMIT_TEXT = "Horovod was shutdown because number of resets during elastic job exceeded limit: {}"
MISSED_SECONDS = 5.0
"""For a worker that others cannot reach to leave a generation that is over."""
MOST_WAYS = 1000
"""Hosts of a generation whose members are told each other's addresses."""
REMOVED_SECONDS = 10.0
"""For a removed worker to end by itself."""

_STATE_LOST = "every worker that had the state of the job has failed"


@dataclass(eq=False)
class Membership:
    """The members of one elastic job, and those who may become members."""

    options: ElasticOptions
    blacklist: Blacklist
    began_at: float
    hosts: dict[str, int] | None = None
    """Slots by host, the longest known first; None: not known yet."""
    workers: dict[int, Worker] = field(default_factory=dict)
    current: Generation = field(default_factory=Generation)
    finishing: bool = False
    """A worker has ended well: nothing new is begun."""
    best_progress: int = NO_STATE
    _ended_well: list[int] = field(default_factory=list)
    _left_behind: list[int] = field(default_factory=list)
    """Workers that had to be ended because others had left them."""
    _short_since: float | None = None
    _removed_at: dict[int, float] = field(default_factory=dict)
    _links: LinkFaults = field(default_factory=LinkFaults)
    _orders: list[Order] = field(default_factory=list)
    _stopped: bool = False

    # -- what happened ---------------------------------------------------------------------------

    def hosts_are(self, hosts: dict[str, int], now: float) -> None:
        """Take a new list of hosts."""
        before, self.hosts = self.hosts, dict(hosts)
        if before is not None:
            gone = sorted(set(before) - set(hosts))
            come = sorted(set(hosts) - set(before))
            changes = [f"{', '.join(names)} {what}" for names, what in ((gone, "gone"), (come, "found")) if names]
            self._orders.append(Say("hosts: " + ("; ".join(changes) or "slots changed")))
        for worker in self._alive("starting"):
            if worker.host not in hosts:
                self._remove(worker, now)
                self._orders.append(Kill(worker.number))

    def is_ready(
        self, number: int, *, progress: int, address: str, port: int, now: float,
        is_in_step: bool = False, lets_in: bool = False, can_prepare: bool = False,
    ) -> None:  # fmt: skip
        """A worker waits for the next generation, with the state after `progress` commits.

        `can_prepare`: it needs no place yet where others train already, see `Worker.prepares`.
        """
        worker = self.workers[number]
        if not worker.is_alive:
            return
        was_member = worker.state == "member"
        worker.state, worker.progress, worker.address, worker.port = "ready", progress, address, port
        worker.is_in_step, worker.lets_in, worker.prepares = is_in_step, lets_in, can_prepare
        if can_prepare and self.current.number:
            self._let_prepare(worker)
            return
        self.best_progress = max(self.best_progress, progress)
        if was_member and self.current.asked is None:
            self._break(f"worker {number} left", now)

    def has_progressed(self, number: int, progress: int) -> None:
        """A worker has received the state, or committed."""
        self.workers[number].progress = progress
        self.best_progress = max(self.best_progress, progress)

    def has_failed(self, number: int, generation: int, why: str, now: float) -> None:
        """A member's exchange failed: the others may not have noticed."""
        if generation == self.current.number and self.workers[number].state == "member":
            self._break(f"worker {number}: {why}", now)

    def has_missed(self, number: int, generation: int, addresses: list[str], now: float) -> None:
        """A member of a generation that failed cannot reach some hosts. See [Note: links between workers]."""
        worker = self.workers[number]
        if not worker.is_alive:
            return
        alive = self._alive()
        missed = {other.host for other in alive if other.address in addresses and other.address != worker.address}
        self._links.note(worker.host, missed, generation)
        order = {host: min(standing(w) for w in alive if w.host == host) for host in {w.host for w in alive}}
        found = self._links.host_to_drop(generation, order)
        if found is not None:
            self._drop(*found, now)

    def has_ended(self, number: int, *, well: bool, why: str, now: float) -> None:
        """A worker's process is gone."""
        worker = self.workers[number]
        before, worker.state = worker.state, "ended"
        self._removed_at.pop(number, None)
        if before == "removed":
            if not self.finishing:
                self._orders.append(Say(f"worker {number} has left {worker.host}"))
            return
        if well and before == "preparing":
            why = "its script has ended before it took the state of the others (Checkpointer.load)"
        elif well:
            self.finishing = True
            self._ended_well.append(number)
            return
        self.current.lost_members += before == "member" or not self.current.number
        if self.finishing:
            return
        closed = self._close_host(worker.host, now)
        self._orders.append(Say(f"worker {number} on {worker.host} is gone: {why}; {closed}"))
        if before == "member":
            self._break(f"worker {number} is gone", now)

    def host_is_lost(self, host: str, why: str, now: float) -> None:
        """A host is gone with all its workers, or could not be reached: one failure, however many they were."""
        there = [worker for worker in self.workers.values() if worker.host == host and worker.state != "ended"]
        members = [worker for worker in there if worker.state == "member"]
        self.current.lost_members += len(there if not self.current.number else members)
        for worker in there:
            worker.state = "ended"
            self._removed_at.pop(worker.number, None)
        if self.finishing or not there:
            return
        self._orders.append(Say(f"host {host} is lost: {why}; {self._close_host(host, now)}"))
        if members:
            self._break(f"host {host} is lost", now)

    # -- what to do ------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Order]:
        """Return what is to be done now."""
        if not self._stopped:
            self._decide(now)
        orders, self._orders = self._orders, []
        self._stopped = self._stopped or any(isinstance(order, Stop) for order in orders)
        return orders

    def _decide(self, now: float) -> None:
        for number, at in list(self._removed_at.items()):
            if now - at > REMOVED_SECONDS:
                self._removed_at[number] = float("inf")
                self._orders.append(Kill(number))
        if self.finishing:
            self._finish()
        elif self.hosts is not None:
            self._start_new(now)
            if not self._alive():
                self._nobody_left(now)
            elif self.best_progress > 0 and all(w.progress == NO_STATE for w in self._alive()):
                self._orders.append(Stop(False, _STATE_LOST))
            elif training := self._alive("member"):
                self._mind(training, now)
            else:
                self._form(now)

    def _finish(self) -> None:
        """Wait for those who still work; those who ask for a generation cannot have one any more."""
        if self._alive("member") or (not self.current.number and self._alive("starting")):
            return
        for worker in self._alive():
            self._remove(worker, 0.0)
            self._orders.append(Kill(worker.number))
            if worker.has_trained or not self.current.number:
                self._left_behind.append(worker.number)
            elif self.options.spares:
                continue  # it was not needed
            text = f"worker {worker.number} is stopped: another has ended the job, and no generation follows"
            self._orders.append(Say(text))
        if all(worker.state == "ended" for worker in self.workers.values()):
            succeeded = not self.current.lost_members and not self._left_behind
            self._orders.append(Stop(succeeded, self._why_unfinished()))

    def _why_unfinished(self) -> str:
        if not self._left_behind:
            return ""
        return (
            f"{_name(self._ended_well)} ended with exit code 0 while {_name(self._left_behind)} still trained and "
            "could not go on without; look for an exit or the end of a loop that not all workers reach"
        )

    def _start_new(self, now: float) -> None:
        assert self.hosts is not None, "hosts are known"
        running = Counter(worker.host for worker in self._alive())
        opened = {host for host in self.hosts if self.blacklist.is_open(host, now)}
        if self.current.number and not running:
            return  # the workers that had the state are gone
        new = []
        most = None if self.options.max_ranks is None else self.options.max_ranks + self.options.spares
        for host in vacancies(running, self.hosts, opened, most):
            number = len(self.workers)
            self.workers[number] = Worker(number, host, started_at=now)
            new.append(number)
        if new:
            places = assign(self._alive())
            self._orders += [Start(number, self.workers[number].host, places[number]) for number in new]

    def _nobody_left(self, now: float) -> None:
        assert self.hosts is not None, "hosts are known"
        if self.current.number:
            self._orders.append(Stop(False, _STATE_LOST))
        elif self.hosts and all(self.blacklist.is_closed_for_ever(host) for host in self.hosts):
            closed = ", ".join(f"{host} ({self.blacklist.failures(host)} failed)" for host in self.hosts)
            self._orders.append(Stop(False, f"workers failed on every host: {closed}"))
        else:
            self._wait_for_more(0, now)

    def _mind(self, training: list[Worker], now: float) -> None:
        """Some train: wait for them when their generation is broken, ask for them when hosts changed."""
        assert self.hosts is not None, "hosts are known"
        if self.current.broken_at is not None:
            if now - self.current.broken_at > MISSED_SECONDS:
                for host in {worker.host for worker in training}:
                    if missing := self._links.who_misses(host, self.current.number):
                        self._drop(host, missing, now)
            if now - self.current.broken_at > self.options.elastic_timeout_seconds:
                for worker in training:
                    self._orders += [
                        Say(f"worker {worker.number} did not leave generation {self.current.number} in time"),
                        Kill(worker.number),
                    ]
                self.current.broken_at = now
            return
        # New workers that start together are one change: the one that is ready first waits for the rest.
        waiting = self._alive("ready")
        if self._are_starting(now):
            waiting = [worker for worker in waiting if worker.number in (self.current.asked or ())]
        choice = self._choose([*training, *waiting])
        wanted = frozenset(worker.number for worker in choice.members)
        current = self.current.asked if self.current.asked is not None else frozenset(self.current.members)
        if wanted == current:
            return
        self.current.asked = wanted
        kind = update_kind(self.current.members, sorted(wanted))
        for worker in training:
            self._orders.append(Tell(worker.number, {"type": "hosts_updated", "kind": kind, "at": now}))

    def _form(self, now: float) -> None:
        """No worker trains: make a generation of those that wait, if they are enough."""
        waiting = self._alive("ready")
        has_time = now - self.began_at <= self.options.elastic_timeout_seconds
        if not self.current.number and self._alive("starting") and has_time:
            return
        if self.options.spares and self.current.number and not any(worker.has_trained for worker in waiting):
            self._orders.append(Stop(False, _STATE_LOST))
            return
        in_step, ready = [worker for worker in waiting if worker.is_in_step], len(waiting)
        if not all(worker.lets_in for worker in in_step):
            waiting = in_step
        choice = self._choose(waiting)
        if len(choice.members) + ready - len(waiting) < self.options.min_ranks:  # those come in after the step
            self._wait_for_more(len(choice.members), now)
            return
        limit = self.options.reset_limit
        if limit is not None and self.current.number > limit:
            self._orders.append(Stop(False, RESET_LIMIT_TEXT.format(limit)))
            return
        for worker in choice.leaving:
            self._dismiss(worker, now)
        for worker in choice.spares:
            if worker.prepares:
                self._let_prepare(worker)
        self._assign(assign(choice.members), now)
        self._short_since = None

    def _assign(self, places: dict[int, RankSpec], now: float) -> None:
        """Begin a generation: tell its members their places."""
        self.current = Generation(self.current.number + 1, tuple(places))
        first = self.workers[self.current.members[0]]
        # Where the hosts' first workers are; of very many none, as frames have a longest length.
        best = {place.host_name: self.workers[number] for number, place in reversed(places.items())}
        ways = {host: [w.address, w.port] for host, w in best.items()} if len(best) <= MOST_WAYS else {}
        frame = {
            "type": "assignment", "generation": self.current.number, "nonce": secrets.token_hex(16), "at": now,
            "address": first.address, "port": first.port,
        }  # fmt: skip
        for number, place in places.items():
            self.workers[number].state = "member"
            self.workers[number].has_trained = True
            others = [way for host, way in ways.items() if host != place.host_name]
            self._orders.append(Tell(number, {**frame, "ways": others}, place))
        who = ", ".join(f"{number} on {place.host_name}" for number, place in places.items())
        self._orders.append(Say(f"generation {self.current.number}: {len(places)} ranks: workers {who}"))

    # -- helpers ---------------------------------------------------------------------------------

    def _choose(self, workers: Collection[Worker]) -> NextMembers:
        return choose(workers, self.hosts or {}, self.options.max_ranks, spares=self.options.spares)

    def _let_prepare(self, worker: Worker) -> None:
        worker.state = "preparing"
        self._orders.append(Tell(worker.number, {"type": "later"}))

    def _alive(self, state: State | None = None) -> list[Worker]:
        return [w for w in self.workers.values() if w.is_alive and state in (None, w.state)]

    def _close_host(self, host: str, now: float) -> str:
        """Keep new workers from a host where one failed; return what to say of it."""
        until = self.blacklist.count_failure(host, now)
        return "no new workers there" + ("" if until == float("inf") else f" for {until - now:.1f} s")

    def _break(self, why: str, now: float) -> None:
        if self.current.broken_at is not None:
            return
        self.current.broken_at = now
        for worker in self._alive("member"):
            self._orders.append(
                Tell(worker.number, {"type": "leave", "generation": self.current.number, "why": why[:500]})
            )

    def _are_starting(self, now: float) -> bool:
        limit = self.options.elastic_timeout_seconds
        return any(now - worker.started_at < limit for worker in self._alive("starting"))

    def _drop(self, host: str, missed_by: list[str], now: float) -> None:
        """Go on without a host that others cannot reach."""
        closed = self._close_host(host, now)
        text = f"host {host} is dropped: {', '.join(missed_by)} cannot reach it, though this launcher reaches both"
        self._orders.append(Say(f"{text}; {closed}"))
        self._links.forget(host)
        for worker in [worker for worker in self._alive() if worker.host == host]:
            self.current.lost_members += worker.state == "member"
            self._remove(worker, now)
            self._orders.append(Kill(worker.number))
        self._break(f"host {host} cannot be reached by {', '.join(missed_by)}", now)

    def _wait_for_more(self, have: int, now: float) -> None:
        least, limit = self.options.min_ranks, self.options.elastic_timeout_seconds
        if self._short_since is None:
            self._short_since = now if self.current.number else self.began_at
            self._orders.append(Say(f"{have} workers are ready and {least} are needed: waiting for more"))
        if now - self._short_since > limit:
            hosts = ", ".join(f"{host}:{slots}" for host, slots in (self.hosts or {}).items()) or "none"
            text = f"{have} workers are ready after {limit:g} s, and {least} are needed; hosts are {hosts}"
            self._orders.append(Stop(False, text + "; add hosts, or lower --min-np or raise --elastic-timeout"))

    def _dismiss(self, worker: Worker, now: float) -> None:
        self._remove(worker, now)
        why = f"{worker.host}[{worker.number}] has been removed from elastic job"
        self._orders.append(Tell(worker.number, {"type": "removed", "why": why}))

    def _remove(self, worker: Worker, now: float) -> None:
        worker.state = "removed"
        self._removed_at[worker.number] = now


def _name(workers: list[int]) -> str:
    return ("worker " if len(workers) == 1 else "workers ") + ", ".join(map(str, sorted(workers)))


# The members and ranks of the next generation. Pure: workers and hosts in, rank assignments out.
#
# [Note: rank 0 holds the state] After a change the ranks copy their state from rank 0. So rank 0 must be a worker
# that has it, and of those one with the newest commit: workers are ordered by their progress first (all survivors
# of one generation have the same, as a rule), by age second. Ranks of a host are next to each other, and a host's
# place is that of its best worker; so survivors keep their order, and those who joined come last.


@dataclass(frozen=True)
class NextMembers:
    """Who stays and who goes."""

    members: tuple[Worker, ...]
    leaving: tuple[Worker, ...]
    """Their host, or their slot on it, is no longer there."""
    spares: tuple[Worker, ...] = ()
    """They wait for a place."""


def choose(
    workers: Collection[Worker], slots: Mapping[str, int], max_ranks: int | None, *, spares: int = 0
) -> NextMembers:
    """Choose the members among `workers`: at most a host's slots on each host, at most `max_ranks` in all.

    When only workers that should leave hold the state, the best of them stays for one more generation. `spares`:
    how many may wait that have a slot.
    """
    members: list[Worker] = []
    leaving: list[Worker] = []
    waiting: list[Worker] = []
    taken: dict[str, int] = {}
    for worker in sorted(workers, key=standing):
        used = taken.get(worker.host, 0)
        full = max_ranks is not None and len(members) >= max_ranks
        has_slot = used < slots.get(worker.host, 0)
        found = leaving if not has_slot or (full and len(waiting) == spares) else waiting if full else members
        taken[worker.host] = used + has_slot
        found.append(worker)
    if leaving and _best(leaving) > NO_STATE and members and _best(members) == NO_STATE:
        kept, *leaving = leaving
        if max_ranks is not None and len(members) >= max_ranks:
            leaving.append(members.pop())
        return NextMembers((*members, kept), tuple(leaving), tuple(waiting))
    return NextMembers(tuple(members), tuple(leaving), tuple(waiting))


def assign(members: Collection[Worker]) -> dict[int, RankSpec]:
    """Return the members' places by worker, in the order of ranks. See [Note: rank 0 holds the state]."""
    hosts: dict[str, list[Worker]] = {}
    for member in sorted(members, key=standing):
        hosts.setdefault(member.host, []).append(member)
    workers = [member.number for here in hosts.values() for member in here]
    slots = [HostSlots(host, len(here)) for host, here in hosts.items()]
    return dict(zip(workers, assign_ranks(slots, len(workers)), strict=True))


def vacancies(
    workers: Mapping[str, int], slots: Mapping[str, int], open_hosts: Collection[str], max_ranks: int | None
) -> list[str]:
    """Return a host for each worker to start: free slots of open hosts, in the hosts' order.

    `workers`: how many run on each host. `slots` is in the hosts' order, the longest known first.
    """
    room = float("inf") if max_ranks is None else max_ranks - sum(workers.values())
    found: list[str] = []
    for host, count in slots.items():
        if host in open_hosts:
            free = max(0, count - workers.get(host, 0))
            found += [host] * int(min(free, max(0, room - len(found))))
    return found


def update_kind(before: Sequence[int], after: Sequence[int]) -> int:
    """Return what changes from one set of workers to another: 0 nothing, 1 removed, 2 added, 3 both."""
    removed = bool(set(before) - set(after))
    added = bool(set(after) - set(before))
    return int(removed) + 2 * int(added)


def standing(worker: Worker) -> tuple[int, int]:
    """Return what workers are ordered by, the best first. See [Note: rank 0 holds the state]."""
    return -worker.progress, worker.number


def _best(workers: Collection[Worker]) -> int:
    return max(worker.progress for worker in workers)


# Hosts on which workers failed: no new workers there, for a while or for ever.
#
# Unlike Horovod's, this list stops no worker that runs: the death of one process says little about its neighbours.
# It only keeps new ones from being started where the last one died.


@dataclass
class Blacklist:
    """Counts failures by host. Times are of one clock, given by the caller."""

    range_seconds: tuple[float, float] | None = None
    """Least and longest delay; None: a failed host stays closed."""
    jitter: random.Random = field(default_factory=random.Random)
    _failures: dict[str, int] = field(default_factory=dict)
    _closed_until: dict[str, float] = field(default_factory=dict)

    def count_failure(self, host: str, now: float) -> float:
        """Close `host` and return until when (infinity: for ever).

        The delay doubles with every failure, with up to one least delay of chance added so that hosts
        that failed together do not come back together.
        """
        count = self._failures[host] = self._failures.get(host, 0) + 1
        until = float("inf")
        if self.range_seconds is not None:
            least, longest = self.range_seconds
            # Beyond 2**12 every delay is clipped; the exponent must not grow without bound.
            until = now + min(longest, least * 2.0 ** min(count, 12) + self.jitter.random() * least)
        self._closed_until[host] = until
        return until

    def is_open(self, host: str, now: float) -> bool:
        """Return whether new workers may be started on `host`."""
        return now >= self._closed_until.get(host, float("-inf"))

    def is_closed_for_ever(self, host: str) -> bool:
        """Return whether `host` will never open again."""
        return self._closed_until.get(host) == float("inf")

    def failures(self, host: str) -> int:
        """Return how often workers failed on `host`."""
        return self._failures.get(host, 0)


# What the membership orders, and the job does.


@dataclass(frozen=True)
class Start:
    """Start worker `number` on `host`."""

    number: int
    host: str
    place: RankSpec
    """Its rank if all running workers formed the next generation: for a script's code before `init`."""


@dataclass(frozen=True)
class Tell:
    """Send a frame to a worker."""

    number: int
    frame: dict[str, Any]
    place: RankSpec | None = None
    """Its place in the generation that an assignment begins."""


@dataclass(frozen=True)
class Kill:
    """End a worker now."""

    number: int


@dataclass(frozen=True)
class Say:
    """Tell the person who watches."""

    text: str


@dataclass(frozen=True)
class Stop:
    """The job is over."""

    succeeded: bool
    text: str = ""


Order = Start | Tell | Kill | Say | Stop
