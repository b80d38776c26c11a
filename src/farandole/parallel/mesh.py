"""The mesh of ranks that a plan's degrees make: groups and parts of the world, by the degrees they differ in.

See [Note: order of ranks] in core/vocabulary/degrees.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from .. import backend as _registered
from ..comm.world.session import Agreed, RankChange
from ..comm.world.store_sync import all_gather_json
from ..comm.world.world import ProcessGroups, World, new_part_group
from ..core.vocabulary import events
from ..core.vocabulary.degrees import ORDER, SAME_PARAMETERS, SAME_SAMPLES, Degrees, degrees_of
from ..core.vocabulary.rules import check
from ..core.vocabulary.spec import Plan


class Mesh:
    """The ranks of a world in a mesh, seen from one of them. All ranks make groups and parts in one order."""

    def __init__(self, here: World, degrees: Degrees) -> None:
        self.here, self.degrees = here, degrees
        self._parts: dict[tuple[str, ...], World] = {}
        self._groups: dict[tuple[str, ...], dist.ProcessGroup | None] = {}
        self._models = 0

    def __repr__(self) -> str:
        return f"Mesh({self.degrees}; {self.degrees.place(self.here.rank)})"

    def follow(self, change: RankChange) -> None:
        """Ranks were lost: those that are left divide samples alone."""
        self.degrees = Degrees(data=self.here.size)

    def count_model(self) -> int:
        """Return the number of one more model that is distributed over it; from 1."""
        self._models += 1
        return self._models

    def size(self, *names: str) -> int:
        """Return the number of ranks that differ in the degrees `names` alone."""
        return self.degrees.size_over(names)

    def rank(self, *names: str) -> int:
        """Return this rank's place among those that differ in the degrees `names` alone."""
        return self.degrees.rank_over(self.here.rank, names)

    def ranks(self, *names: str) -> tuple[int, ...]:
        """Return the ranks of the job that differ from this one in the degrees `names` alone, itself included."""
        return self.degrees.members(self.here.rank, names)

    def part(self, *names: str) -> World:
        """Return the ranks that differ in the degrees `names` alone as a world; the first call is of all ranks."""
        key = self._key(names)
        if key not in self._parts:
            is_whole = self.size(*key) == self.here.size
            self._parts[key] = self.here if is_whole else make_part(self.here, "-".join(key), self.ranks(*key))
        return self._parts[key]

    def group(self, *names: str) -> dist.ProcessGroup | None:
        """Return a group for activations of the ranks that differ in the degrees `names` alone; None for one rank.

        CPU tensors travel by our own backend: through shared memory inside a host. The first
        call is of all ranks.
        """
        key = self._key(names)
        if key not in self._groups:
            _registered.register()
            name = "farandole" if self.here.device.type == "cpu" else None
            part = self.part(*key)
            self._groups[key] = part.new_group(backend=name)
        return self._groups[key]

    @property
    def replicas(self) -> World:
        """The ranks that hold the same parameters, but for those of experts."""
        return self.part(*SAME_PARAMETERS)

    @property
    def copies(self) -> int:
        """How many runs of replicas have all parameters at zero = 3; 1: as the plan's ``shard_within`` says."""
        return self.size("data") if self.size("shard") > 1 else 1

    def _key(self, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name for name in ORDER if name in names)


class _MeshTable(dict[Degrees, Mesh], Agreed):
    """The meshes of one world: several models may have one."""


def make_mesh(here: World, plan: Plan) -> Mesh:
    """Return the mesh of `plan`, and let the world know its degrees; to be called by all ranks.

    Raises:
        PlanError: the degrees do not fit the number of ranks, or cannot be combined.
    """
    degrees = degrees_of(plan, here.size)
    check({**vars(plan), **degrees.above_one()})
    before, here.session.degrees = here.session.degrees, degrees
    if not all(each.is_data_alone for each in (before, degrees) if each is not None):
        same = f"{degrees.rank_over(here.rank, SAME_SAMPLES)} {degrees.size_over(SAME_SAMPLES)}"
        facts = {events.SETUP_DEGREES: " ".join(str(getattr(degrees, name)) for name in ORDER)}
        facts |= {events.SETUP_SAME_SAMPLES: same}
        replicas = degrees.size_over(SAME_PARAMETERS)
        here.session.recorder.record(events.Setup({**facts, events.SETUP_REPLICAS: replicas}))
    meshes = here.session.keep(_MeshTable, _MeshTable)
    if degrees not in meshes:
        meshes[degrees] = Mesh(here, degrees)
        here.session.follow_change(meshes[degrees].follow)
    return meshes[degrees]


# Some ranks of a world as a world of their own: the ranks that hold the same parameters, for one.
#
# Whatever takes a `World` works on a part of the ranks then: the reducer with its codecs and routes, comparisons
# through the store. Ranks are numbered anew in a part; `World.job_ranks` has the job's numbers, which errors give.


def make_part(here: World, name: str, members: tuple[int, ...]) -> World:
    """Return the world of `members`, this rank among them; to be called by all ranks of `here`.

    Args:
        here: the world of the job.
        name: what the part is for; the same on all ranks.
        members: ranks of `here`, ascending. Each rank is in one part, and gives its own.
    """
    hosts = all_gather_json(here, f"part {name}", here.node_rank)
    nodes = [hosts[rank] for rank in members]
    mine, rank = here.node_rank, members.index(here.rank)
    different = list(dict.fromkeys(nodes))
    groups = ProcessGroups(sockets=here.sockets, ranks=members)
    made = World(
        rank=rank,
        size=len(members),
        local_rank=nodes[:rank].count(mine),
        local_size=nodes.count(mine),
        node_rank=different.index(mine),
        node_count=len(different),
        host=here.host,
        address=here.address,
        device=here.device,
        source=here.source,
        timeout_seconds=here.timeout_seconds,
        groups=groups,
        session=here.session.make_part(),
    )
    made.session.call_on_close(made.close)
    if len(members) == 1:
        return made
    assert here.store is not None, "a world of several ranks has a store"
    groups.name = f"{here.topic(f'part {name}')}/{members[0]}/"
    groups.store = dist.PrefixStore(groups.name, here.store)
    wait = timedelta(seconds=here.timeout_seconds)
    groups.default = new_part_group(here, list(members), groups.name, wait, None)
    return made
