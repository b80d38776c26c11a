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

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch

from ....comm.reducer.reducer import GradientReducer
from ....comm.world.world import World, world
from ....core.vocabulary.events import EXCHANGE, Phase
from ....core.vocabulary.spec import Plan
from ...common.applied_plan import agree_on_passes, apply_plan, plan_for_named
from ...common.basics import basics
from ...common.compression import codec_of, name_of
from ...common.process_sets import ProcessSet, global_process_set
from ...common.reductions import Average, Sum
from .gradient_path import GradientPath, refuses
from .optimizer_names import Names, noname
from .tensor_path import TensorPath


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
