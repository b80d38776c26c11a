"""How the gradients of one distributed optimizer meet: the paths, and which parameter takes which.

[Note: two paths] By ``reducer``: gradients lie in buckets that travel while backward runs, and are means when it
returns. It needs all ranks, Average or Sum, and a compression that is a codec of ours. ``tensor``: every
gradient, or group of gradients, is one operation matched by name, and becomes a mean in ``synchronize``; this
does everything else. ``alone``: there is no other rank. A parameter that is added later takes the tensor path
whatever the others take.

[Note: worlds come and go] An elastic job shuts down and begins again with other ranks while the optimizer lives
on. So nothing is said to other ranks when an optimizer is made (a rank that is new makes its own while the
others train), and the paths are made anew when the world is another one than before.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol

import torch

from ....comm.codecs.registry import can_have
from ....comm.engine.grad_ownership import replace_grad, zero_missing_grads
from ....comm.engine.parameters import ReducerOptions
from ....comm.engine.reducer import GradientReducer
from ....comm.world.store_sync import require_same
from ....comm.world.world import World, world
from ....core.job_plan import JobPlan
from ....core.vocabulary.codec_spec import NONE, CodecSpec
from ....core.vocabulary.errors import CommError
from ....core.vocabulary.events import EXCHANGE, Phase
from ....core.vocabulary.spec import Plan
from ....observe.export.operation_timeline import BucketTimeline
from ...common.applied_plan import (
    FLAT,
    HONOURED,
    agree_on_passes,
    apply_plan,
    codec_of_gradient,
    meaningless,
    plan_for_named,
)
from ...common.basics import basics
from ...common.compression import CodecCompressor, codec_of, name_of
from ...common.exceptions import from_comm_error
from ...common.process_sets import ProcessSet, global_process_set
from ...common.reductions import Average, Sum
from ..ops.allreduce import ReduceOptions, begin_allreduce
from ..ops.gather_scatter import sparse_allreduce_async
from ..ops.handles import synchronize, wait_for_all
from .joining import announce_connection, serve_while_joined
from .optimizer_names import TOO_MANY, Names, noname


@dataclass(frozen=True)
class Settings:
    """The arguments of `DistributedOptimizer` that say how gradients meet."""

    compression: Any
    op: int
    predivide_factor: float
    groups: tuple[tuple[str, ...], ...]
    """Names of the parameters that travel as one."""
    sparse_as_dense: bool
    process_set: ProcessSet
    all_are_sparse: bool = False
    """Whether the optimizer takes sparse gradients alone, which travel as dense ones."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Settings:
        return self  # a copy of an optimizer talks to the same ranks, through the same objects

    def __reduce__(self) -> tuple[Callable[..., Settings], tuple[Any, ...]]:
        everybody = self.process_set is global_process_set
        state = dict(vars(self), process_set=None if everybody else self.process_set)
        return _settings, (state,)


def _settings(state: dict[str, Any]) -> Settings:
    return Settings(**{**state, "process_set": state["process_set"] or global_process_set})


class Path(Protocol):
    """One way for gradients to meet."""

    @property
    def pending(self) -> bool:
        """Whether gradients of a backward pass are waiting for `synchronize`."""

    @property
    def handles(self) -> dict[Any, tuple[Any, Any]]:
        """Parameters with gradients on their way or arrived, by themselves or by group."""

    def synchronize(self) -> None:
        """Give every parameter the gradient of all ranks; to be called by all of them."""

    def passes_due(self) -> dict[torch.Tensor, int]:
        """Return after how many backward passes each gradient travels."""

    def may_zero(self) -> bool:
        """Return whether gradients that were not used may be zeroed."""

    def set_passes(self, passes: int) -> None:
        """Change how many backward passes are added up, and count them from zero."""

    def reset(self) -> None:
        """Forget what is pending."""

    def close(self) -> None:
        """Take the hooks off."""


class PathChoice(NamedTuple):
    """A path, and why it."""

    path: Literal["reducer", "tensor", "alone"]
    reason: str


class GradientExchange:
    """The gradients of one optimizer. Made anew of its parts in every world."""

    def __init__(self, settings: Settings, passes: int) -> None:
        self.settings = settings
        self.passes = passes
        self.names: Names = {}
        self.choice = PathChoice("alone", "not connected yet")
        self.plan = Plan()
        """What is applied to this optimizer."""
        self.required: set[torch.Tensor] = set()
        self._known: set[torch.Tensor] = set()
        self._paths: list[Path] = []
        self._world: World | None = None

    def attach(self, param_groups: Sequence[Mapping[str, Any]]) -> World | None:
        """Make the paths when the world is new, and return it; says nothing to other ranks."""
        here = world()
        if here is self._world:
            return None
        job = basics.running.plan
        self.plan = apply_plan(job, self.settings.compression, self.passes)
        self.passes = self.plan.accumulate
        self.close()
        parameters = [p for group in param_groups for p in group["params"] if p in self.names]
        self.choice = choose(self.settings, parameters, here)
        if self.choice.path == "tensor":
            self.plan = plan_for_named(job, self.plan, self.settings.op, self.choice.reason)
        self._world = here
        self._take(parameters, self.choice.path)
        return here

    @property
    def reducer(self) -> GradientReducer | None:
        """The gradient reducer, on the reducer path."""
        return next((path.reducer for path in self._paths if isinstance(path, GradientPath)), None)

    def add(self, number: int, parameters: Sequence[torch.Tensor]) -> None:
        """Take in the parameters of a group that was added later, the `number`-th."""
        added = [p for p in parameters if p not in self._known]  # it may have had a name before
        self.names.update((p, noname(number, index)) for index, p in enumerate(parameters) if p not in self.names)
        if self._world is not None:
            self._take(added, "alone" if self.choice.path == "alone" else "tensor")

    def _take(self, parameters: Sequence[torch.Tensor], path: str) -> None:
        assert self._world is not None, "attached"
        self._known.update(parameters)
        if path == "alone" or not parameters:
            return
        named = sorted(((self.names[p], p) for p in parameters), key=lambda entry: entry[0])
        trainable = [(name, p) for name, p in named if p.requires_grad]
        self.required.update(p for _, p in trainable)
        if path == "reducer":
            self._paths.append(GradientPath(self._world, named, self.settings, self.plan))
        elif trainable:
            self._paths.append(TensorPath(trainable, self.settings, self.plan))

    @property
    def pending(self) -> bool:
        """Whether gradients are waiting for `synchronize`."""
        return any(path.pending for path in self._paths)

    @property
    def handles(self) -> dict[Any, tuple[Any, Any]]:
        """See `Path`."""
        return {key: value for path in self._paths for key, value in path.handles.items()}

    def passes_due(self) -> dict[torch.Tensor, int]:
        """Return after how many backward passes each gradient travels, counted from the last exchange on."""
        due = dict.fromkeys(self.required, self.passes)
        for path in self._paths:
            due.update(path.passes_due())
        return due

    def synchronize(self) -> None:
        """See `Path`."""
        for path in self._paths:
            begin = time.monotonic()
            path.synchronize()
            if isinstance(path, TensorPath):  # a reducer records its exchanges itself
                world().session.recorder.record(Phase(EXCHANGE, begin, time.monotonic()))

    def may_zero(self) -> bool:
        """See `Path`."""
        answers = [path.may_zero() for path in self._paths]  # all are asked: some forget what they may
        return all(answers)

    def set_passes(self, passes: int) -> None:
        """See `Path`. Raises `ConfigError` where the plan says another number."""
        self.passes = passes = agree_on_passes(basics.running.plan, passes)
        for path in self._paths:
            path.set_passes(passes)

    def reset(self) -> None:
        """See `Path`."""
        for path in self._paths:
            path.reset()

    def close(self) -> None:
        """See `Path`."""
        for path in self._paths:
            path.close()
        self._paths, self._known, self.required = [], set(), set()


def choose(settings: Settings, parameters: Sequence[torch.Tensor], here: World) -> PathChoice:
    """Return the path that all ranks take, from what all ranks were given alike. See [Note: two paths]."""
    process_set = settings.process_set
    if here.size == 1:
        return PathChoice("alone", "there is one rank")
    if process_set is not global_process_set and process_set.process_set_id != 0:
        if not process_set.included():
            return PathChoice("alone", f"rank {here.rank} is not in the process set {process_set.ranks}")
        return PathChoice("tensor", "the process set is not that of all ranks")
    if settings.groups:
        return PathChoice("tensor", "groups were asked for")
    if settings.op not in (Average, Sum):
        return PathChoice("tensor", "the operation is neither Average nor Sum")
    if codec_of(settings.compression) is None:
        return PathChoice(
            "tensor", f"{name_of(settings.compression)} is a compression that only its own code knows"
        )
    half = any(p.dtype in (torch.float16, torch.bfloat16) for p in parameters)
    if settings.predivide_factor != 1.0 and half:
        return PathChoice(
            "tensor", f"gradients of 16 bits are divided by {settings.predivide_factor:g} before the sum"
        )
    reason = refuses(parameters)
    return (
        PathChoice("tensor", reason)
        if reason
        else PathChoice("reducer", "all ranks average or add dense gradients")
    )


# The reducer path: gradients lie in buckets that travel while backward runs. See `gradient_exchange`.
#
# [Note: exactly one exchange] Between two calls of ``synchronize`` (or ``step``, which calls it) every rank takes
# part in exactly one exchange: at the end of its backward pass, or, when that touched none of the optimizer's
# parameters, in ``synchronize``. A parameter without a gradient contributes zeros, and gets the mean of the
# others.
#
# [Note: gradients that are not used] A ``GradScaler`` skips a step whose gradients hold infinity. They are the
# same on all ranks, so all skip, and the next ``zero_grad`` or backward pass is no mistake: only then are
# gradients read.


def refuses(parameters: Sequence[torch.Tensor]) -> str:
    """Return why the reducer cannot take these; empty when it can."""
    for parameter in parameters:
        if not parameter.dtype.is_floating_point:
            return f"a parameter is {str(parameter.dtype).removeprefix('torch.')}"
        if parameter.device.type not in ("cpu", "cuda"):
            return f"a parameter is on {parameter.device}"
    return ""


class GradientPath:
    """A `gradient_exchange.Path` over one `GradientReducer`."""

    def __init__(
        self,
        here: World,
        named: Sequence[tuple[str, Any]],
        settings: Any,
        plan: Plan,
    ) -> None:
        self.world = here
        self._parameters = [parameter for _, parameter in named]
        self.name = _name_path(here, named)
        self.is_connected = False
        self._sparse = SparseAsDense(self._parameters, all_are_sparse=settings.all_are_sparse)
        # Before the reducer's hooks, which then see dense gradients.
        self._own_hooks = [
            parameter.register_post_accumulate_grad_hook(self._sparse.make_dense)
            for parameter in self._parameters
            if settings.sparse_as_dense and parameter.requires_grad
        ]
        self.reducer = GradientReducer(
            here,
            named,
            plan_for_reducer(plan, settings.compression, self._parameters, here),
            ReducerOptions(
                lazy_init=True,
                before_connecting=self._before_connecting,
                reduce_op="sum" if settings.op == Sum else "mean",
                include_frozen=True,
                on_second_gradient=self._on_second_gradient,
                map_error=from_comm_error,
            ),
        )
        self.reducer.watch(BucketTimeline(basics.running.log, lambda: self.reducer.names_by_bucket))
        self._taken = 0
        serve_while_joined(self)

    @property
    def _arrived(self) -> bool:
        return self.reducer.exchanges_done > self._taken

    @property
    def pending(self) -> bool:
        """See `Path`."""
        return self._arrived or self.reducer.passes_held > 0

    @property
    def handles(self) -> dict[Any, tuple[Any, Any]]:
        """See `Path`. The reducer has no handles to show."""
        return {p: (None, None) for p in self._parameters if p.requires_grad} if self.pending else {}

    def passes_due(self) -> dict[torch.Tensor, int]:
        """See `Path`."""
        due = 0 if self._arrived else self.reducer.accumulate - self.reducer.passes_held
        return {parameter: due for parameter in self._parameters if parameter.requires_grad}

    def synchronize(self) -> None:
        """See `Path`."""
        try:
            if not self._arrived:
                self.reducer.exchange()
        except CommError as problem:
            raise from_comm_error(problem) from problem
        self.reset()
        if not self.reducer.step_is_skipped:
            self.reducer.zero_missing_grads()
        self._sparse.make_sparse_again()

    def may_zero(self) -> bool:
        """See `Path` and [Note: gradients that are not used]."""
        if not self.pending:
            return True
        if not self._arrived or self.reducer.mean_is_finite:
            return False
        self.reset()
        return True

    def set_passes(self, passes: int) -> None:
        """See `Path`."""
        self.reducer.begin_step(accumulate=passes)

    def reset(self) -> None:
        """See `Path`."""
        self._taken = self.reducer.exchanges_done
        self.reducer.begin_step()

    def close(self) -> None:
        """See `Path`."""
        for hook in self._own_hooks:
            hook.remove()
        self.reducer.remove()

    # -- while this rank has joined; see `joining` --------------------------------------------

    def _before_connecting(self) -> None:
        self.is_connected = True
        announce_connection(self)
        keys = self.reducer.plan.to_mapping().items()
        require_same(self.world, "comparing plans", [(f"plan key {key!r}", value) for key, value in keys])

    @property
    def is_open(self) -> bool:
        """Whether gradients still meet."""
        return self.reducer.is_open

    @property
    def exchanges_done(self) -> int:
        """How many exchanges all ranks took part in."""
        return self.reducer.exchanges_done

    def exchange_nothing(self) -> None:
        """Take part in the other ranks' next exchange, with zeros."""
        self.reducer.exchange(contribute=False)

    def _on_second_gradient(self, name: str) -> Exception | None:
        return None if self.may_zero() else AssertionError(f"{TOO_MANY} (parameter {name!r})")


def _name_path(here: World, named: Sequence[tuple[str, torch.Tensor]]) -> str:
    """Return a name that is the same on all ranks, whatever the order in which they made their optimizers."""
    text = repr([(name, tuple(parameter.shape), str(parameter.dtype)) for name, parameter in named])
    return here.topic(f"gradients {hashlib.sha256(text.encode()).hexdigest()[:16]}")


# The tensor path: every gradient, or group of gradients, is one operation that ranks match by name.
#
# For what the reducer cannot do; see `gradient_exchange`. An operation is launched when its gradients are ready,
# and ``synchronize`` launches what is missing (with zeros for a parameter without a gradient) and waits for all.


Members = tuple[torch.Tensor, ...]
"""Parameters that travel as one; most are alone."""


class TensorPath:
    """A `gradient_exchange.Path` over named operations."""

    def __init__(self, named: Sequence[tuple[str, Any]], settings: Any, plan: Plan) -> None:
        self._settings = settings
        self._passes = passes = plan.accumulate
        self._names = {parameter: name for name, parameter in named}
        by_name = dict(named)
        self._members: dict[torch.Tensor, Members] = {parameter: (parameter,) for _, parameter in named}
        for group in settings.groups:
            members = tuple(by_name[name] for name in group if name in by_name)
            self._members.update(dict.fromkeys(members, members))
        wanted = settings.all_are_sparse
        self._sparse = SparseAsDense([parameter for _, parameter in named], all_are_sparse=wanted)
        self._codecs = {
            parameter: _codec(name, parameter, settings.compression, plan) for name, parameter in named
        }
        self._due = dict.fromkeys(self._names, passes)
        """How many backward passes each gradient still waits for."""
        self._on_their_way: dict[Members, Callable[[], None]] = {}
        """For each operation, what waits for it and puts the results into the gradients."""
        self._hooks = [p.register_post_accumulate_grad_hook(self._ready) for _, p in named]

    @property
    def pending(self) -> bool:
        """See `Path`."""
        return bool(self._on_their_way) or any(due < self._passes for due in self._due.values())

    @property
    def handles(self) -> dict[Any, tuple[Any, Any]]:
        """See `Path`: the function that waits, or None for gradients that are not complete."""
        begun = [p for p, due in self._due.items() if due < self._passes]
        keys = {members if len(members) > 1 else members[0] for members in self._on_their_way}
        waiting: dict[Any, tuple[Any, Any]] = {p: (None, None) for p in begun if self._members[p] not in keys}
        waiting.update(
            (members if len(members) > 1 else members[0], (wait, None))
            for members, wait in self._on_their_way.items()
        )
        return waiting

    def passes_due(self) -> dict[torch.Tensor, int]:
        """See `Path`."""
        return dict(self._due)

    def synchronize(self) -> None:
        """See `Path`."""
        try:
            for members in sorted(set(self._members.values()), key=lambda group: self._names[group[0]]):
                if members not in self._on_their_way:
                    self._launch(members)
            wait_for_all(self._on_their_way.values())
            if self._settings.sparse_as_dense:
                self._sparse.make_sparse_again()
        finally:
            self._restart()

    def may_zero(self) -> bool:
        """See `Path`."""
        return not self.pending

    def set_passes(self, passes: int) -> None:
        """See `Path`."""
        self._passes = passes
        self._due = dict.fromkeys(self._names, passes)

    def reset(self) -> None:
        """See `Path`. What is on its way must arrive first: it writes into the gradients."""
        try:
            wait_for_all(self._on_their_way.values())
        finally:
            self._restart()

    def close(self) -> None:
        """See `Path`."""
        for hook in self._hooks:
            hook.remove()
        self._restart()

    def _restart(self) -> None:
        self._on_their_way = {}
        self._due = dict.fromkeys(self._names, self._passes)

    def _ready(self, parameter: torch.Tensor) -> None:
        if self._due[parameter] <= 0:
            raise AssertionError(f"{TOO_MANY} (parameter {self._names[parameter]!r})")
        self._due[parameter] -= 1
        members = self._members[parameter]
        if all(self._due[member] == 0 for member in members):
            self._launch(members)

    @torch.no_grad()
    def _launch(self, members: Members) -> None:
        grouped = len(members) > 1
        zero_missing_grads(members)
        for parameter in members:
            grad = parameter.grad
            if grad is not None and grad.is_sparse and (grouped or self._settings.sparse_as_dense):
                self._sparse.make_dense(parameter)
        first = members[0]
        if first.grad is not None and first.grad.is_sparse:
            self._on_their_way[members] = self._launch_sparse(first, first.grad)
        else:
            self._on_their_way[members] = self._launch_dense(members)

    def _launch_dense(self, members: Members) -> Callable[[], None]:
        settings = self._settings
        compression = settings.compression
        grads = [parameter.grad for parameter in members if parameter.grad is not None]
        small, contexts = zip(*[compression.compress(grad.contiguous()) for grad in grads], strict=True)
        factor = settings.predivide_factor if settings.op == Average else 1.0
        options = ReduceOptions(settings.op, 1.0 / factor, factor, settings.process_set)
        handle = begin_allreduce(
            small,
            [f"allreduce.{self._names[parameter]}" for parameter in members],
            options,
            codecs=[self._codecs[parameter] for parameter in members],
            in_place=True,
            grouped=True,
            chosen_with="gradients",
        )

        def wait() -> None:
            totals = synchronize(handle)
            with torch.no_grad():
                for grad, total, context in zip(grads, totals, contexts, strict=True):
                    result = compression.decompress(total, context)
                    if result is not grad:
                        grad.copy_(result)

        return wait

    def _launch_sparse(self, parameter: torch.Tensor, grad: torch.Tensor) -> Callable[[], None]:
        settings = self._settings
        handle = sparse_allreduce_async(
            grad.coalesce(), self._names[parameter], settings.op, process_set=settings.process_set
        )

        def wait() -> None:
            replace_grad(parameter, handle().coalesce())

        return wait


def _codec(name: str, parameter: torch.nn.Parameter, compression: Any, plan: Plan) -> str:
    """Return how the gradient of a parameter travels; what a compressor has made small travels as it is."""
    by_compressor = codec_of(compression) in (None, "fp16", "bf16") and not isinstance(
        compression, CodecCompressor
    )
    return NONE if by_compressor else codec_of_gradient(name, parameter, plan)


# The plan of the job as the reducer of one `DistributedOptimizer` applies it: see `common.applied_plan`.


def plan_for_reducer(plan: Plan, compression: Any, parameters: Iterable[torch.Tensor], here: World) -> Plan:
    """Return what the engine of one optimizer applies."""
    spec = CodecSpec.parse(plan.codec)
    by_script = codec_of(compression) not in (None, NONE)
    if by_script and spec.is_applied and not any(can_have(each, spec) for each in parameters):
        plan = replace(plan, codec=NONE)  # a small model has nothing to compress: no mistake in the script
    # A threshold of 0 joins nothing, in the first bucket neither.
    if plan.bucket_bytes:
        plan = replace(plan, first_bucket_bytes=min(plan.first_bucket_bytes, plan.bucket_bytes))
    if plan.timeout_seconds == Plan().timeout_seconds:
        plan = replace(plan, timeout_seconds=here.timeout_seconds)
    if plan.route == "hierarchical" and basics.running.settings.asks_for_hierarchy and not _has_hierarchy(here):
        plan = replace(plan, route="auto")  # Horovod's flag means: inside a host first, where there are several
    return plan


def _has_hierarchy(here: World) -> bool:
    return here.node_count > 1 and here.local_size > 1


def refuse_for_adasum(job: JobPlan) -> None:
    """Raise `PlanError` for keys that mean nothing if updates are exchanged instead of gradients."""
    for key in job.changed():
        if key in ("codec", "codec_for", "clip_norm") or (key not in HONOURED and key != "route"):
            raise meaningless(job, key, "with op=Adasum no gradients travel")
    if job.plan.route not in FLAT:
        raise meaningless(job, "route", "with op=Adasum no gradients travel")


@torch.no_grad()
def clip_gradients(plan: Plan, parameters: Sequence[torch.Tensor]) -> None:
    """Clip the mean gradients to the plan's norm, if it has one."""
    if plan.clip_norm is not None:
        torch.nn.utils.clip_grad_norm_(parameters, plan.clip_norm)


# Gradients that are sparse and travel as dense ones: made dense when they are ready, sparse again afterwards.
#
# Their optimizer sees what it would see without other ranks: `SparseAdam` takes no dense gradients, and others
# make no step for rows that no rank used. As in Horovod they are sparse from ``synchronize()`` on.


class SparseAsDense:
    """Which gradients of one optimizer are sparse on this rank."""

    def __init__(self, parameters: Iterable[torch.Tensor], *, all_are_sparse: bool) -> None:
        """`all_are_sparse`: the optimizer takes no others, so those that this rank did not touch are, too."""
        self._dimensions: dict[torch.Tensor, int] = dict.fromkeys(parameters, 1) if all_are_sparse else {}
        """How many of the first dimensions a parameter's sparse gradient has indices for."""

    def make_dense(self, parameter: torch.Tensor) -> None:
        """Make a gradient dense, and remember that it was not."""
        if parameter.grad is not None and parameter.grad.is_sparse:
            self._dimensions[parameter] = parameter.grad.sparse_dim()
            replace_grad(parameter, parameter.grad.to_dense())

    @torch.no_grad()
    def make_sparse_again(self) -> None:
        """Make those sparse that were; rows of zeros are left out."""
        for parameter, dimensions in self._dimensions.items():
            grad = parameter.grad
            if grad is not None and not grad.is_sparse:
                replace_grad(parameter, grad.to_sparse(dimensions))
