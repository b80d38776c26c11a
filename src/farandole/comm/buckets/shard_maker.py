"""Makes the buckets of shards of one reducer, with what they exchange rows by."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh

from ...core.step_model.row_regions import sum_regions
from ...core.vocabulary.codec_spec import CodecSpec
from ...core.vocabulary.errors import ConfigError
from ..codecs.registry import require_packer
from ..gradients.parameters import Layout, ParameterTable
from ..gradients.row_blocks import RowBlocks
from ..routes.route import Route
from ..rows.row_exchange import RowExchange
from ..world.world import World
from .bucket_plan import ParamInfo
from .coded_shard_bucket import CodedShardBucket
from .sharded_bucket import ShardedBucket, WholeBucket
from .step_marks import MARKS


class ShardMaker:
    """See the module. To be called by all ranks alike."""

    def __init__(self, world: World, mesh: DeviceMesh, *, stage: int) -> None:
        """`mesh`: of all ranks, to which the rows of gradients are divided. `stage`: of ZeRO, 1 or 2."""
        self._world, self._mesh, self._stage = world, mesh, stage
        self._rows: RowExchange | None = None

    def prepare(self, planned: Sequence[Sequence[ParamInfo]], table: ParameterTable, route: Route) -> None:
        """Have memory for the largest of the planned buckets; raise `ConfigError` for a sparse gradient."""
        largest = 0
        for together in planned:
            if together[0].sparse:
                raise ConfigError(
                    f"the gradient of {table.names[together[0].index]!r} is sparse, and cannot be sharded",
                    remedy="make its module with sparse=False, or set zero = 0",
                )
            if together[0].is_sharded:
                parameters = [table.parameters[info.index] for info in together]
                multiple = 1 if together[0].codec.is_exact else require_packer(together[0].codec).block
                tail = len(parameters) + MARKS
                blocks = RowBlocks(parameters, range(self._world.size), tail=tail, multiple=multiple)
                largest = max(largest, blocks.elements * parameters[0].itemsize)
        if largest > (0 if self._rows is None else self._rows.region_bytes):
            regions, largest = (1, 1) if self._stage == 1 else (sum_regions(largest), largest)
            self._rows = RowExchange(self._world, route, region_bytes=largest, regions=regions)

    def make(
        self,
        members: list[int],
        parameters: Sequence[torch.nn.Parameter],
        layouts: Sequence[Layout],
        route: Route,
        codec: CodecSpec,
    ) -> ShardedBucket | WholeBucket:
        """Return a bucket that was planned in `prepare`. Inside one host nothing is packed."""
        if not parameters[0].dim():
            memory = route.memory if route.route == "shared" else None  # which is of one host alone
            whole = WholeBucket(members, parameters, layouts, self._world.size, memory=memory)
            whole.gradients.mesh = self._mesh
            return whole
        assert self._rows is not None, "prepared before"
        keeps_region = self._stage == 1
        if codec.is_exact or self._rows.hosts == 1:
            return ShardedBucket(members, parameters, self._rows, self._mesh, keeps_region=keeps_region)
        return CodedShardBucket(
            members, parameters, self._rows, self._mesh, keeps_region=keeps_region, codec=codec
        )
