"""Which parameters travel together: the buckets of one engine, how they are agreed on and rebuilt.

The engine says *when* buckets travel; this says *what is in them*: who takes part, by which codec, in which
bucket, and what a parameter has coming from before. Ranks agree on rank 0's order of readiness.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ...core.vocabulary.codec_spec import AUTO, CodecSpec
from ...core.vocabulary.errors import CommError, ConfigError
from ...core.vocabulary.spec import Plan
from ..codecs.eligibility import carrier_of, choose_codec, refuse_impossible, refuse_useless
from ..codecs.registry import make_codec
from ..gradients.parameters import describe_parameter, layout_of
from ..host_memory.shared_tensor import Unavailable
from ..routes.route import Route
from ..world.store_sync import Fact, all_gather_json, require_same
from ..world.world import World
from . import codec_state
from .bucket import Bucket, DenseBucket, ParamInfo, SparseBucket, plan_buckets
from .carry_over import CarryOver
from .coded_bucket import CodedBucket


class BucketSet:
    """The buckets of one engine, in launch order.

    Raises `PlanError` for a codec that a parameter cannot have.
    """

    def __init__(
        self,
        world: World,
        parameters: Sequence[tuple[str, torch.nn.Parameter]],
        plan: Plan,
        *,
        keep_members: bool = False,
    ) -> None:
        self._world = world
        self._plan = plan
        self.names = [name for name, _ in parameters]
        self.parameters = [parameter for _, parameter in parameters]
        self.layouts = [layout_of(parameter) for parameter in self.parameters]
        self.index_by_id = {id(parameter): index for index, parameter in enumerate(self.parameters)}
        self.index_of = {name: index for index, name in enumerate(self.names)}
        self.buckets: list[Bucket] = []
        self.bucket_of: list[Bucket | None] = [None] * len(parameters)
        self.owed = CarryOver()
        self._codecs = {name: choose_codec(name, parameter, plan) for name, parameter in parameters}
        refuse_useless(plan, self._codecs)
        self._made = {spec.to_text(): make_codec(spec) for spec in self._codecs.values() if spec.name != "none"}
        self._order: list[int] = []  # of those in buckets, as they become ready
        self._limit_bytes = plan.bucket_bytes
        self._unassigned = list(range(len(parameters)))  # in no bucket yet
        self._required = [keep_members and parameter.requires_grad for _, parameter in parameters]
        self._asleep: list[int] = []  # in a bucket, but frozen for now
        self._loaded: dict[str, codec_state.Entry] = {}  # of parameters that are in no bucket yet

    @property
    def needs_messages(self) -> bool:
        """Whether some parameter has a codec, or may get one."""
        return self._plan.codec == AUTO or bool(self._made)

    @property
    def wanted_codecs(self) -> list[str]:
        """The codecs that some parameter has, or may get, for people."""
        return [AUTO] if self._plan.codec == AUTO else [text for text in self._made if text != "none"]

    @property
    def coded(self) -> list[CodedBucket]:
        """The buckets that travel by codecs."""
        return [bucket for bucket in self.buckets if isinstance(bucket, CodedBucket)]

    def describe(self) -> list[Fact]:
        """Return what must be equal on all ranks, and let gradients lie as their parameters do now, for ever."""
        self.layouts = [layout_of(parameter) for parameter in self.parameters]
        named = zip(self.names, self.parameters, strict=True)
        return [fact for name, parameter in named for fact in describe_parameter(name, parameter)]

    @property
    def marked(self) -> Bucket | None:
        """The first bucket that says how many steps the ranks have made."""
        return next((bucket for bucket in self.buckets if not isinstance(bucket, SparseBucket)), None)

    def carry(self, lines: Route, *, always: bool) -> None:
        """Settle what carries gradients without a codec: messages, where `always` or the route says so."""
        carrier = make_codec(CodecSpec.parse("none")) if always else carrier_of(lines.route)
        if carrier is not None:
            self._made["none"] = carrier

    def was_written(self, index: int) -> bool:
        """Return whether a parameter has a gradient that is not what a step has used last."""
        bucket, grad = self.bucket_of[index], self.parameters[index].grad
        return grad is not None and (bucket is None or not bucket.holds_used(index))

    def note_used(self) -> None:
        """A step uses what lies in the buckets."""
        for bucket in self.buckets:
            bucket.note_used()

    # -- during a pass -----------------------------------------------------------------------

    def expect_all(self) -> None:
        """Expect every member that is not frozen."""
        self._asleep = [index for index in self._asleep if not self.parameters[index].requires_grad]
        for bucket in self.buckets:
            bucket.missing = len(bucket.members)
        for index in self._asleep:
            bucket_of = self.bucket_of[index]
            assert bucket_of is not None, "only members of buckets are asleep"
            bucket_of.missing -= 1

    def put_to_sleep(self, begin: int) -> None:
        """Stop expecting members that were frozen, so that buckets from `begin` on need not wait for the end."""
        for bucket in self.buckets[begin:]:
            if bucket.missing > 0:
                self._asleep += [
                    index
                    for index in bucket.members
                    if not self.parameters[index].requires_grad and index not in self._asleep
                ]

    def settle(self) -> None:
        """Forget what is owed to members that have their mean now."""
        self.owed.begin()
        if self.owed.is_empty:
            return
        for bucket in self.buckets:
            for index in bucket.members:
                if self.parameters[index].grad is not None:
                    self.owed.forget(index)

    def take_back(self, buckets: Sequence[Bucket]) -> None:
        """Keep and owe what was before the last exchange: what `buckets` brought is used by nobody."""
        for bucket in buckets:
            if isinstance(bucket, CodedBucket):
                bucket.go_back()
            for index in bucket.members:
                self.owed.take_back(index)

    def rescale_kept(self, change: float) -> None:
        """Multiply what is left to send by `change`. See [Note: residuals and the loss scale] in `loss_scale`."""
        if change != 1.0:
            for bucket in self.coded:
                bucket.rescale_kept(change)
            self.owed.rescale(change)

    def explain_load(self, bucket: Bucket, problem: RuntimeError) -> CommError:
        """Say which gradient could not be put into its bucket."""
        for index in bucket.members:
            grad = self.parameters[index].grad
            if grad is not None and grad.is_sparse != isinstance(bucket, SparseBucket):
                now, before = ("sparse", "dense") if grad.is_sparse else ("dense", "sparse")
                text = f"the gradient of {self.names[index]!r} is {now}, in the first step it was {before}"
                break
        else:
            text = str(problem).splitlines()[0]
        return CommError(text, rank=self._world.rank, operation="loading", bucket=self.buckets.index(bucket))

    # -- who is in which bucket ----------------------------------------------------------------

    def admit(self, arrivals: Sequence[int], lines: Route) -> list[int]:
        """Give a bucket to every parameter that has none yet and requires a gradient now; return these.

        With `keep_members`, also to those that required one when the set was made.

        `arrivals`: in which order they became ready on this rank.
        """
        newcomers = [
            index for index in self._unassigned if self._required[index] or self.parameters[index].requires_grad
        ]
        if not newcomers:
            return []
        names = [self.names[index] for index in newcomers]
        mine = {
            "order": list(arrivals),
            "sparse": [index for index in newcomers if self._has_sparse_gradient(index)],
        }
        require_same(
            self._world,
            "agreeing on buckets",
            [(f"trainable parameter {i}", name) for i, name in enumerate(names)],
            remedy="freeze and unfreeze the same parameters on all ranks in the same step",
        )
        said = all_gather_json(self._world, "agreeing on buckets", mine)
        sparse = {index for other in said for index in other["sparse"]}
        order = [index for index in said[0]["order"] if index in set(newcomers)]
        order += [index for index in reversed(newcomers) if index not in set(order)]
        slots = [self._slot(index, index in sparse) for index in order]
        first = self._limit_bytes if self.buckets else self._plan.first_bucket_bytes
        for members in plan_buckets(slots, first_bytes=first, limit_bytes=self._limit_bytes):
            self._add([slot.index for slot in members], members[0], lines)
        self._order += order
        self._unassigned = [index for index in self._unassigned if self.bucket_of[index] is None]
        return newcomers

    def changes(self, codecs: Mapping[str, CodecSpec]) -> dict[str, CodecSpec]:
        """Return those that are new; raise for one that is impossible, or not the same on all ranks."""
        facts = [(f"codec of {name!r}", spec.to_text()) for name, spec in sorted(codecs.items())]
        require_same(self._world, "switching codecs", [("parameters to switch", sorted(codecs)), *facts])
        for name, spec in codecs.items():
            if name not in self._codecs:
                raise ConfigError(f"switching codecs: the model has no parameter {name!r}")
            refuse_impossible(name, self.parameters[self.index_of[name]], spec)
        return {name: spec for name, spec in codecs.items() if spec != self._codecs[name]}

    def rebuild(self, changed: Mapping[str, CodecSpec], bucket_bytes: int | None, lines: Route) -> None:
        """Plan the buckets anew, and build those that are not as they were; what was not sent is owed."""
        for spec in changed.values():
            if spec.name != "none":
                self._made[spec.to_text()] = make_codec(spec)
        self._codecs.update(changed)
        self._limit_bytes = bucket_bytes or self._limit_bytes
        indices = {self.index_of[name] for name in changed}
        kept = {
            tuple(bucket.members): bucket
            for bucket in self.buckets
            if indices.isdisjoint(bucket.members) and not _is_elsewhere(bucket, lines)
        }
        slots = [self._slot(index, isinstance(self.bucket_of[index], SparseBucket)) for index in self._order]
        before, self.buckets = self.buckets, []
        first = self._plan.first_bucket_bytes
        for slots_together in plan_buckets(slots, first_bytes=first, limit_bytes=self._limit_bytes):
            members = [slot.index for slot in slots_together]
            if tuple(members) in kept:
                self.buckets.append(kept[tuple(members)])
            else:
                self._add(members, slots_together[0], lines)
        for bucket in before:
            if isinstance(bucket, CodedBucket) and bucket not in self.buckets:
                for index, unsent in zip(bucket.members, bucket.unsent(), strict=False):
                    self.owed.keep(index, unsent)

    def _add(self, members: list[int], like: ParamInfo, lines: Route) -> None:
        parameters = [self.parameters[index] for index in members]
        layouts = [self.layouts[index] for index in members]
        bucket: Bucket
        try:
            if like.sparse:
                bucket = SparseBucket(members, parameters[0], self._world.size)
            elif like.codec in self._made:
                bucket = CodedBucket(members, parameters, layouts, self._made[like.codec], lines)
                codec_state.restore([bucket], self.names, self._loaded)
            else:
                bucket = DenseBucket(members, parameters, layouts, self._world.size, lines.memory)
        except Unavailable as problem:
            raise CommError(str(problem), rank=self._world.rank, operation="making buckets") from None
        self.buckets.append(bucket)
        for index in members:
            self.bucket_of[index] = bucket

    def _slot(self, index: int, sparse: bool) -> ParamInfo:
        parameter = self.parameters[index]
        nbytes = parameter.numel() * parameter.element_size()
        codec = "none" if sparse else self._codecs[self.names[index]].to_text()
        return ParamInfo(index, nbytes, parameter.dtype, parameter.device, sparse, codec)

    def _has_sparse_gradient(self, index: int) -> bool:
        grad = self.parameters[index].grad
        return grad is not None and grad.is_sparse

    # -- what codecs keep ----------------------------------------------------------------------

    def state(self) -> dict[str, codec_state.Entry]:
        """Return what codecs keep on this rank, by parameter."""
        entries = dict(self._loaded)
        for bucket in self.coded:
            entries.update(codec_state.export(bucket, self.names))
        return entries

    def load_state(self, entries: dict[str, codec_state.Entry]) -> None:
        """Replace what codecs keep; entries of parameters without a bucket wait for it."""
        codec_state.check(entries, dict(zip(self.names, self.parameters, strict=True)), self._codecs)
        waiting = dict(entries)
        codec_state.restore(self.coded, self.names, waiting)
        self._loaded = waiting


def _is_elsewhere(bucket: Bucket, lines: Route) -> bool:
    return isinstance(bucket, CodedBucket) and bucket.route != lines.route
