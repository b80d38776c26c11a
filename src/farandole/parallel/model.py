"""What `distribute` makes of a model: one object that owns all that belongs to it, found by the model.

And what it is made by: strategies, one for each thing that a plan can ask of a model. Types of what both hold are
named here for the reader and the type checker; nothing of it is imported.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from ..core.vocabulary.degrees import ORDER
from ..core.vocabulary.errors import ConfigError
from ..core.vocabulary.rules import MOST_ZERO
from ..core.vocabulary.spec import Plan
from ..core.vocabulary.sync_spec import SyncSpec

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from ..comm.engine.reducer import GradientReducer
    from ..comm.world.world import World
    from .lower_precision import LowerPrecision
    from .mesh import Mesh
    from .optim.bf16_parameters import RoundedSteps
    from .optim.step_hooks import MakePolicy, StepExchange, SyncPolicy
    from .pipeline.pipeline import Pipeline
    from .seeds import PassSeeds
    from .tensor.proof import Proofs
    from .tensor.regions import TensorRanks
    from .train_schedule import TrainSchedule
    from .zero.passes import ShardedModel
    from .zero.sharded_step import ShardedStep


class Handle(Protocol):
    """What a hook was registered with."""

    def remove(self) -> None:
        """Call the hook no more."""


class DistributedModel:
    """A model and its plan on the ranks of a mesh; of a model that is not distributed all fields are empty.

    A field is None, or empty, where the plan asks for no such thing. The model keeps this alive, and not the
    other way round.
    """

    def __init__(self, plan: Plan | None = None, mesh: Mesh | None = None) -> None:
        self.plan, self.mesh = plan, mesh
        self.number = 0 if mesh is None else mesh.count_model()
        """Among the models of its mesh, from 1: the same on all ranks, also where some of them are gone."""
        self.reducer: GradientReducer | None = None
        """Exchanges gradients in each step; None in a world of one, at stage 3, and where ranks train alone."""
        self.exchange: StepExchange | None = None
        """What makes gradients means over the ranks, as an optimizer's step sees it: that of experts included."""
        self.policy: SyncPolicy | None = None
        """Lets ranks train on their own between meetings; None: they agree in every step."""
        self.passes: LowerPrecision | None = None
        self.pipeline: Pipeline | None = None
        self.proofs: Proofs | None = None
        """Those of layers that are split."""
        self.seeds: PassSeeds | None = None
        self.schedule: TrainSchedule | None = None
        self.sharded_steps: Sequence[ShardedStep] = ()
        """Steps that update the rows of this rank, at stages 1 and 2."""
        self.rounded_steps: RoundedSteps | None = None
        self.hooks: list[Handle] = []
        """What `undistribute` removes."""
        self._sharded: weakref.ref[ShardedModel] | None = None

    @classmethod
    def of(cls, model: nn.Module) -> DistributedModel:
        """Return what `model` was made; an empty one when it is not distributed."""
        return _known.get(model) or cls()

    @classmethod
    def require(cls, model: nn.Module, call: str) -> DistributedModel:
        """Return what `model` was made; raise `ConfigError`, with the `call`, if it is not distributed."""
        found = _known.get(model)
        if found is None:
            raise ConfigError(
                f"{call}: this {type(model).__name__} is not distributed",
                remedy="model, optimizer = farandole.distribute(model, optimizer)",
            )
        return found

    @classmethod
    def all(cls) -> list[nn.Module]:
        """Return the models that are distributed and still live, in the order of `distribute`."""
        return list(_known)

    @classmethod
    def all_of(cls, here: World) -> list[nn.Module]:
        """Return the models whose gradients meet now in `here`, or would, were there more than one rank."""
        owners = [(model, own.mesh, own.listener) for model, own in _known.items()]
        return [
            model
            for model, mesh, listener in owners
            if mesh is not None and mesh.here is here and (listener is None or listener.is_open)
        ]

    @property
    def plan_and_mesh(self) -> tuple[Plan, Mesh]:
        """Both, of a model that is distributed."""
        assert self.plan is not None, "the model is not distributed"
        assert self.mesh is not None, "it comes with the plan"
        return self.plan, self.mesh

    @property
    def is_whole(self) -> bool:
        """Whether each rank has all parameters, and one exchange of all ranks their gradients."""
        plan, mesh = self.plan_and_mesh
        return plan.zero < MOST_ZERO and mesh.degrees.is_data_alone

    @property
    def exchanges(self) -> bool:
        """Whether ranks with the same parameters exchange gradients: not where they train alone from the begin."""
        plan, mesh = self.plan_and_mesh
        return mesh.replicas.size > 1 and SyncSpec.parse(plan.sync).exchanges_gradients

    @property
    def sharded(self) -> ShardedModel | None:
        """The passes of a model whose parameters are sharded (ZeRO stage 3); the model keeps them alive."""
        return None if self._sharded is None else self._sharded()

    @sharded.setter
    def sharded(self, sharded: ShardedModel) -> None:
        self._sharded = weakref.ref(sharded)

    @property
    def listener(self) -> GradientReducer | ShardedModel | None:
        """What is told of the model's passes and exchanges the gradients of all but experts."""
        return self.reducer or self.sharded

    def parameters_here(self, model: nn.Module) -> list[tuple[str, nn.Parameter]]:
        """Return the named parameters that this rank keeps: all of them without a pipeline."""
        own = None if self.pipeline is None else self.pipeline.own
        return [(name, each) for name, each in model.named_parameters() if own is None or own.is_here(name)]

    def saved_elsewhere(self) -> dict[str, tuple[int, ...] | None]:
        """Return names of the model's state that other ranks of its pipeline save; of parameters the whole shapes.

        None for what is here too. The dict is empty without a pipeline, and before the first step.
        """
        own = None if self.pipeline is None else self.pipeline.own
        return {} if own is None else own.elsewhere()

    def stands_for(self, model: nn.Module) -> None:
        """Let `of` find this by `model` from now on."""
        _known[model] = self

    def end_every_step(self) -> None:
        """Exchange no gradients from now on: ranks train on their own."""
        reducer, self.reducer, self.exchange = self.reducer, None, None
        if reducer is not None:
            reducer.remove()

    def forget(self, model: nn.Module) -> None:
        """Remove all hooks; `model` is not distributed any more."""
        del _known[model]
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()


_known: weakref.WeakKeyDictionary[nn.Module, DistributedModel] = weakref.WeakKeyDictionary()


# What a plan can ask of a model.


@dataclass(eq=False)
class DistributeCall:
    """What one call of `distribute` is about, and what its strategies tell each other."""

    distributed: DistributedModel
    model: nn.Module
    optimizers: Sequence[Optimizer]
    given: Plan | None
    """The plan that the script gave, if it did."""
    make_policy: MakePolicy | None
    """For plans whose ranks do not agree in every step."""
    divided_blocks: Sequence[str] = ()
    """Blocks in which a rank has some of the tokens of its samples; known when layers are checked."""
    token_ranks: TensorRanks | None = None
    """The ranks that have the others; known when layers are split."""
    after_sharding: Callable[[], None] | None = None
    """What hooks of split layers ask for, when shards have hooks too."""
    when_cut: Callable[[], None] | None = None
    """With a pipeline: what is still to do when a rank has its own parameters alone, at the first step."""


class Strategy:
    """One thing that a plan asks of a model, made for one call of `distribute`.

    None imports another: what two must know of each other is a field of the call, or of the model's owner. All
    methods are called on all ranks.
    """

    keys: ClassVar[tuple[str, ...]] = ()
    """The degrees and keys of a plan that ask for it, by a value that is not their default."""
    takes_own_parameters: ClassVar[bool] = False
    """Whether it is for the parameters of this rank: with a pipeline it is applied at the first step."""

    def __init__(self, call: DistributeCall) -> None:
        self.call, self.distributed = call, call.distributed
        self.model, self.optimizers = call.model, call.optimizers
        self.plan, self.mesh = call.distributed.plan_and_mesh

    def is_asked(self) -> bool:
        """Whether the plan asks for it; by `keys`, where a strategy does not say otherwise."""
        return any(
            self.mesh.size(key) > 1 if key in ORDER else getattr(self.plan, key) != getattr(_DEFAULTS, key)
            for key in self.keys
        )

    def check(self) -> None:
        """Raise what stands against it, on every rank; nothing is changed."""

    def prepare(self) -> None:
        """Change the model before the values of rank 0 are sent."""

    def apply(self) -> None:
        """Change the model and its optimizers, when all ranks have the values of rank 0."""

    def finish(self) -> None:
        """Do what comes last, when all are applied."""


_DEFAULTS = Plan()


# What surrounds the forward pass of a model's own code, told to what runs that code in pieces. A model whose class
# was changed does something before and after its own `forward`. A pipeline calls the layers and never the model.


class OuterPass(Protocol):
    """What surrounds the passes of one model."""

    def begin(self, model: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Check the inputs of a pass; return those of the model's own code, a tuple or a dict."""

    def inside(self) -> AbstractContextManager[None]:
        """Return what the model's own code runs in."""

    def end(self, output: Any) -> Any:
        """Return what the model returns instead of `output`."""


OUTER_PASS = "_farandole_context"
"""The attribute of a model that has it."""


def outer_pass_of(model: nn.Module) -> OuterPass | None:
    """Return what surrounds the passes of `model`; None if nothing does."""
    found: OuterPass | None = vars(model).get(OUTER_PASS)
    return found
