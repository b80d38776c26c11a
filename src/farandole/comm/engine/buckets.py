"""The buckets of one reducer: how they are agreed on and rebuilt, and what is carried over between exchanges.

The reducer says *when* buckets travel; this says *what is in them*: which parameters, by which codec, in which
bucket. Ranks agree on rank 0's order of readiness.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh

from ...core import bucket_plan as core_plan
from ...core.bucket_plan import sum_regions
from ...core.vocabulary.codec_spec import AUTO, EXACT, CodecSpec
from ...core.vocabulary.errors import CommError, ConfigError
from ...core.vocabulary.spec import USUAL_BUCKET_BYTES, Plan
from ..autotune.probe import ProbeRequest
from ..codecs import saved_state
from ..codecs.registry import (
    CodecInstance,
    carrier_of,
    choose_codec,
    make_codec,
    refuse_impossible,
    require_packer,
    why_useless,
)
from ..codecs.units import CodedFlat
from ..routes import Route
from ..transport.shared_tensor import Unavailable
from ..world.store_sync import all_gather_json, require_same
from ..world.world import World
from .bucket import MARKS, Bucket, DenseBucket, SparseBucket
from .coded_bucket import CarryOver, CodedBucket, DeviceCodedBucket
from .parameters import Layout, ParameterTable, RowBlocks
from .row_exchange import RowExchange
from .sharded_bucket import CodedShardBucket, ShardedBucket, WholeBucket


# Which gradients share a bucket: pure, on sizes, types and devices.
@dataclass(frozen=True)
class ParamInfo:
    """What the plan of the buckets needs to know of one parameter."""

    index: int
    nbytes: int
    dtype: torch.dtype
    device: torch.device
    sparse: bool = False
    codec: CodecSpec = EXACT
    is_sharded: bool = False
    """Whether each rank gets its rows of the mean alone."""


def plan_buckets(parameters: Sequence[ParamInfo], *, first_bytes: int, limit_bytes: int) -> list[list[ParamInfo]]:
    """Divide `parameters`, given in the order in which gradients become ready, into buckets.

    By core's rule, which the step model asks too. A bucket holds one dtype on one device for one codec; sparse
    gradients are alone.
    """
    return core_plan.plan_buckets(
        parameters,
        key=lambda info: None if info.sparse else (info.dtype, info.device, info.codec.to_text(), info.is_sharded),
        first_bytes=first_bytes,
        limit_bytes=limit_bytes,
    )


# Makes the buckets of shards of one reducer, with what they exchange rows by.
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


# Which codec each parameter has: chosen by the plan, changed between two steps.
class ChosenCodecs:
    """The codecs of one reducer's parameters. Raises `PlanError` for a codec that a parameter cannot have."""

    def __init__(self, table: ParameterTable, plan: Plan) -> None:
        self.by_name = {name: choose_codec(name, parameter, plan) for name, parameter in table.named}
        self.why_useless = why_useless(plan, self.by_name)
        """Empty when the plan's codec is of use."""
        self._is_auto = plan.codec == AUTO
        self._instances: dict[str, CodecInstance] = {}
        self._default: CodecInstance | None = None
        """Carries gradients without a codec; None: the backend's all-reduce does."""
        self._make(self.by_name)

    def _make(self, specs: Mapping[str, CodecSpec]) -> None:
        texts = {spec.to_text(): spec for spec in specs.values() if not spec.is_exact}
        self._instances.update((text, make_codec(spec)) for text, spec in texts.items())

    @property
    def needs_messages(self) -> bool:
        """Whether some parameter has a codec, or may get one."""
        return self._is_auto or bool(self._instances)

    @property
    def requested(self) -> list[str]:
        """The codecs that some parameter has, or may get, for error messages."""
        return [AUTO] if self._is_auto else list(self._instances)

    def set_default_codec(self, route: Route, *, always: bool) -> None:
        """Decide what carries gradients without a codec: messages, where `always` or the route says so."""
        self._default = make_codec(EXACT) if always else carrier_of(route.route)

    def update(self, changed: Mapping[str, CodecSpec]) -> None:
        """Let the named parameters have other codecs."""
        self._make(changed)
        self.by_name.update(changed)

    def instance(self, spec: CodecSpec) -> CodecInstance | None:
        """Return the codec of `spec`; None where the backend's all-reduce carries the gradients."""
        return self._default if spec.is_exact else self._instances[spec.to_text()]


class BucketSet:
    """The buckets of one reducer, in launch order.

    Raises `PlanError` for a codec that a parameter cannot have.
    """

    def __init__(
        self,
        world: World,
        parameters: Sequence[tuple[str, torch.nn.Parameter]],
        plan: Plan,
        *,
        include_frozen: bool = False,
        mesh: DeviceMesh | None = None,
    ) -> None:
        """With `include_frozen`, parameters that require a gradient now are assigned even if frozen later.

        `mesh`: of all ranks, to which the rows of gradients are divided; None: every rank gets all of them.
        """
        self._world = world
        self._shards = None if mesh is None else ShardMaker(world, mesh, stage=plan.zero)
        # - Parameters
        self.table = ParameterTable(parameters)
        self.codecs = ChosenCodecs(self.table, plan)
        self._required = {i for i, (_, each) in enumerate(parameters) if include_frozen and each.requires_grad}
        self.unassigned = list(range(len(parameters)))
        """Parameters that are in no bucket yet."""
        self.frozen: list[int] = []
        """Parameters in buckets that are frozen for now, and not waited for."""
        # - Buckets
        self.buckets: list[Bucket] = []
        """In launch order. Another list object whenever they change."""
        self.bucket_of: list[Bucket | None] = [None] * len(parameters)
        self._order: list[int] = []
        """Parameters in buckets, as they become ready."""
        self._first_bytes = plan.first_bucket_bytes
        self._limit_bytes = plan.bucket_bytes or USUAL_BUCKET_BYTES  # at zero = 3 a plan has none
        # - What is kept between exchanges
        self.carry_over = CarryOver()
        self._loaded: dict[str, saved_state.Entry] = {}
        """State of codecs that was loaded, of parameters that are in no bucket yet."""
        self.probe_request = ProbeRequest()
        """Travels with encoded buckets."""

    def was_written(self, index: int) -> bool:
        """Return whether a parameter has a gradient that is not what a step has used last."""
        bucket, grad = self.bucket_of[index], self.table.parameters[index].grad
        if bucket is None or grad is None:
            return grad is not None
        return not bucket.gradients.holds_used(bucket.members.index(index))

    # -- during a pass -----------------------------------------------------------------------

    def expect_unfrozen(self) -> None:
        """Count as pending only members that require a gradient, given that all are counted."""
        self.frozen = [index for index in self.frozen if not self.table.parameters[index].requires_grad]
        for index in self.frozen:
            bucket = self.bucket_of[index]
            assert bucket is not None, "only members of buckets are excluded"
            bucket.pending -= 1

    def exclude_frozen(self, begin: int) -> None:
        """Stop waiting for members that were frozen, so that buckets from `begin` on can start early."""
        for bucket in self.buckets[begin:]:
            if bucket.pending > 0:
                self.frozen += [
                    index
                    for index in bucket.members
                    if not self.table.parameters[index].requires_grad and index not in self.frozen
                ]

    def settle_carry_over(self) -> None:
        """Forget what was carried over to members that have their mean now."""
        parameters = self.table.parameters
        members = [index for bucket in self.buckets for index in bucket.members]
        self.carry_over.settle([index for index in members if parameters[index].grad is not None])

    def roll_back(self, buckets: Sequence[Bucket]) -> None:
        """Restore what codecs kept, and what was pending, before the last exchange: its step was dropped."""
        for bucket in buckets:
            bucket.roll_back()
            for index in bucket.members:
                self.carry_over.roll_back(index)

    def rescale_kept(self, change: float) -> None:
        """Multiply residuals by `change`. See [Note: residuals and the loss scale] in `grad_ownership`."""
        if change != 1.0:
            for bucket in self.buckets:
                bucket.rescale(change)
            self.carry_over.rescale(change)

    def explain_load(self, bucket: Bucket, problem: RuntimeError) -> CommError:
        """Say which gradient could not be put into its bucket."""
        for index in bucket.members:
            grad = self.table.parameters[index].grad
            if grad is not None and grad.is_sparse != bucket.is_sparse:
                now, before = ("sparse", "dense") if grad.is_sparse else ("dense", "sparse")
                text = f"the gradient of {self.table.names[index]!r} is {now}, in the first step it was {before}"
                break
        else:
            text = str(problem).splitlines()[0]
        return CommError(text, rank=self._world.job_rank, operation="loading", bucket=self.buckets.index(bucket))

    # -- who is in which bucket ----------------------------------------------------------------

    def assign_new_parameters(self, arrivals: Sequence[int], route: Route) -> list[int]:
        """Give a bucket to every parameter that has none yet and requires a gradient now; return these.

        `arrivals`: in which order they became ready on this rank.
        """
        new = [i for i in self.unassigned if i in self._required or self.table.parameters[i].requires_grad]
        if not new:
            return []
        names = [self.table.names[index] for index in new]
        mine = {"order": list(arrivals), "sparse": [index for index in new if self._has_sparse_gradient(index)]}
        require_same(
            self._world,
            "agreeing on buckets",
            [(f"trainable parameter {i}", name) for i, name in enumerate(names)],
            remedy="freeze and unfreeze the same parameters on all ranks in the same step",
        )
        gathered = all_gather_json(self._world, "agreeing on buckets", mine)
        sparse = {index for other in gathered for index in other["sparse"]}
        order = [index for index in gathered[0]["order"] if index in set(new)]
        order += [index for index in reversed(new) if index not in set(order)]
        infos = [self._info(index, index in sparse) for index in order]
        first_bytes = self._limit_bytes if self.buckets else self._first_bytes
        planned = plan_buckets(infos, first_bytes=first_bytes, limit_bytes=self._limit_bytes)
        if self._shards is not None:
            self._shards.prepare(planned, self.table, route)
        with self._with_room(route):
            made = [self._make([info.index for info in together], together[0], route) for together in planned]
        self._take([*self.buckets, *made])
        self._order += order
        return new

    def changes(self, codecs: Mapping[str, CodecSpec]) -> dict[str, CodecSpec]:
        """Return those that are new; raise for one that is impossible, or not the same on all ranks."""
        facts = [(f"codec of {name!r}", spec.to_text()) for name, spec in sorted(codecs.items())]
        require_same(self._world, "switching codecs", [("parameters to switch", sorted(codecs)), *facts])
        chosen = self.codecs.by_name
        for name, spec in codecs.items():
            if name not in chosen:
                raise ConfigError(f"switching codecs: the model has no parameter {name!r}")
            refuse_impossible(name, self.table.parameters[self.table.index_of[name]], spec)
        return {name: spec for name, spec in codecs.items() if spec != chosen[name]}

    def rebuild_buckets(
        self,
        changed: Mapping[str, CodecSpec],
        bucket_bytes: int | None,
        route: Route,
        *,
        first_bucket_bytes: int | None = None,
    ) -> None:
        """Plan the buckets anew, and build those that differ; what was not sent is carried over."""
        before = dict(self.codecs.by_name), self._limit_bytes, self._first_bytes
        self.codecs.update(changed)
        self._limit_bytes = bucket_bytes or self._limit_bytes
        self._first_bytes = first_bucket_bytes or self._first_bytes
        indices = {self.table.index_of[name] for name in changed}
        kept = {
            tuple(bucket.members): bucket
            for bucket in self.buckets
            if indices.isdisjoint(bucket.members) and bucket.fits(route)
        }
        sparse = {index for bucket in self.buckets if bucket.is_sparse for index in bucket.members}
        infos = [self._info(index, index in sparse) for index in self._order]
        buckets: list[Bucket] = []
        unsent: list[tuple[int, torch.Tensor]] = []
        try:
            with self._with_room(route):
                for together in plan_buckets(infos, first_bytes=self._first_bytes, limit_bytes=self._limit_bytes):
                    members = [info.index for info in together]
                    buckets.append(kept.get(tuple(members)) or self._make(members, together[0], route))
                for bucket in self.buckets:
                    if bucket.coded is not None and bucket not in buckets:
                        unsent += zip(bucket.members, bucket.coded.unsent(), strict=False)
        except BaseException:
            names, self._limit_bytes, self._first_bytes = before
            self.codecs.update(names)
            raise
        for index, each in unsent:
            self.carry_over.keep(index, each)
        self._take(buckets)

    def remake(self, route: Route) -> None:
        """Make all buckets anew, for other ranks: with the same members, and what codecs keep."""
        self._loaded = self.state()
        with self._with_room(route):
            made = [self._make(b.members, self._info(b.members[0], b.is_sparse), route) for b in self.buckets]
        self._take(made)

    def dissolve(self) -> None:
        """Have no buckets, as before the first exchange: ranks that are left agree on them anew."""
        self._loaded = self.state()
        self.buckets, self._order, self.frozen = [], [], []
        self.bucket_of = [None] * len(self.bucket_of)
        self.unassigned = list(range(len(self.bucket_of)))

    def _take(self, buckets: list[Bucket]) -> None:
        self.buckets = buckets
        for bucket in buckets:
            for index in bucket.members:
                self.bucket_of[index] = bucket
        self.unassigned = [index for index in self.unassigned if self.bucket_of[index] is None]

    @contextmanager
    def _with_room(self, route: Route) -> Generator[None, None, None]:
        """Make buckets in a block; raise on all ranks where a device has no room, and all is as before."""
        full, loaded = "", dict(self._loaded)
        try:
            yield
        except torch.OutOfMemoryError as problem:
            if route.on_device is None:
                raise
            full = str(problem).splitlines()[0]
        if route.on_device is None:
            return
        for rank, text in enumerate(all_gather_json(self._world, "memory of buckets", full)):
            if text:
                self._loaded = loaded
                raise CommError(
                    f"rank {rank} has no room for the buckets of gradients, and what codecs keep: {text}",
                    rank=self._world.job_rank,
                    operation="making buckets",
                    remedy='smaller batches, codec "none", which keeps nothing, or zero = 3',
                )

    def _make(self, members: list[int], like: ParamInfo, route: Route) -> Bucket:
        parameters = [self.table.parameters[index] for index in members]
        layouts = [self.table.layouts[index] for index in members]
        codec = self.codecs.instance(like.codec)
        try:
            if self._shards is not None and not like.sparse:
                made = self._shards.make(members, parameters, layouts, route, like.codec)
                if isinstance(made, CodedShardBucket):
                    made.load_state([self.table.names[index] for index in members], self._loaded)
                return made
            if like.sparse:
                return SparseBucket(members, parameters[0], self._world.size)
            if codec is not None:
                bucket = self._make_coded(members, parameters, layouts, codec, route)
                saved_state.restore([(bucket.coded, [self.table.names[index] for index in members])], self._loaded)
                return bucket
            return DenseBucket(members, parameters, layouts, self._world.size, memory=route.memory)
        except Unavailable as problem:
            raise CommError(str(problem), rank=self._world.job_rank, operation="making buckets") from None

    def _make_coded(
        self,
        members: list[int],
        parameters: list[torch.nn.Parameter],
        layouts: list[Layout],
        codec: CodecInstance,
        route: Route,
    ) -> CodedBucket:
        request = self.probe_request
        if route.on_device is None:
            return CodedBucket(members, parameters, layouts, codec, lines=route, probe_request=request)
        streams = route.on_device.streams
        return DeviceCodedBucket(
            members, parameters, layouts, codec, lines=route, probe_request=request, streams=streams
        )

    def _info(self, index: int, sparse: bool) -> ParamInfo:
        parameter = self.table.parameters[index]
        nbytes = parameter.numel() * parameter.element_size()
        codec = EXACT if sparse else self.codecs.by_name[self.table.names[index]]
        is_sharded = self._shards is not None and parameter.dim() > 0
        return ParamInfo(index, nbytes, parameter.dtype, parameter.device, sparse, codec, is_sharded)

    def set_aside_shard(self, index: int) -> None:
        """Before a gradient is added to that of a parameter. See [Note: earlier shards] in `sharded_bucket`."""
        bucket = self.bucket_of[index]
        if isinstance(bucket, ShardedBucket | WholeBucket):
            bucket.gradients.set_aside(bucket.members.index(index))

    def has_earlier_shard(self, index: int) -> bool:
        """Return whether an earlier exchange left something that a gradient of a parameter is to be added to."""
        bucket = self.bucket_of[index]
        if self.table.parameters[index].grad is not None:
            return True
        return isinstance(bucket, ShardedBucket) and bucket.gradients.has_set_aside

    def _has_sparse_gradient(self, index: int) -> bool:
        grad = self.table.parameters[index].grad
        return grad is not None and grad.is_sparse

    def _kept_by_codecs(self) -> list[tuple[CodedFlat, list[str]]]:
        """Return what each encoded bucket keeps, and the names of its members."""
        return [
            (bucket.coded, [self.table.names[index] for index in bucket.members])
            for bucket in self.buckets
            if bucket.coded is not None
        ]

    # -- what codecs keep ----------------------------------------------------------------------

    def state(self) -> dict[str, saved_state.Entry]:
        """Return what codecs keep on this rank, by parameter."""
        entries = dict(self._loaded)
        for coded, names in self._kept_by_codecs():
            entries.update(saved_state.export(coded, names))
        for bucket, names in self._shards_kept():
            entries.update(bucket.state(names))
        return entries

    def load_state(self, entries: dict[str, saved_state.Entry]) -> None:
        """Replace what codecs keep; entries of parameters without a bucket wait for it."""
        saved_state.check(entries, dict(self.table.named), self.codecs.by_name)
        waiting = dict(entries)
        saved_state.restore(self._kept_by_codecs(), waiting)
        for bucket, names in self._shards_kept():
            bucket.load_state(names, waiting)
        self._loaded = waiting

    def _shards_kept(self) -> list[tuple[CodedShardBucket, list[str]]]:
        """Return the buckets of rows that keep what packing loses, and the names of their members."""
        return [
            (bucket, [self.table.names[index] for index in bucket.members])
            for bucket in self.buckets
            if isinstance(bucket, CodedShardBucket)
        ]
