"""Some ranks of a world as a world of their own: the ranks that hold the same parameters, for one.

Whatever takes a `World` works on a part of the ranks then: the reducer with its codecs and routes, comparisons
through the store. Ranks are numbered anew in a part; `World.job_ranks` has the job's numbers, which errors give.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from .process_groups import ProcessGroups, new_part_group
from .store_sync import all_gather_json
from .world import World


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
