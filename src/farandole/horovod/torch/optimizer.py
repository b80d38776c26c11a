"""`DistributedOptimizer`: an optimizer whose gradients are those of all ranks.

    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

What it returns is a subclass of the optimizer's own class, with its name, its parameter groups and its state, so
schedulers, `isinstance` checks and checkpoints work on it. How gradients meet is in `gradient_exchange`; that of
``op=Adasum`` in `adasum_optimizer`. Ask ``optimizer._farandole_path`` which path was taken.

On the reducer path gradients are those of all ranks when ``backward()`` returns, a step before Horovod's promise:
clipping and unscaling need no ``synchronize()``, which may be called all the same.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer

from ...comm.engine.grad_ownership import zero_missing_grads
from ...comm.engine.reducer import GradientReducer
from ...comm.world.world import World
from ...parallel.instrument.phase_hooks import watch_model, watch_optimizer
from ...train.data.loader_watch import watch_loaders
from ...train.verify.verification_run import VerificationRun
from ..common.applied_plan import apply_plan
from ..common.compression import check_compression
from ..common.process_sets import ProcessSet, global_process_set
from ..common.util import split_list  # noqa: F401 - scripts import names of Horovod from here
from . import mpi_ops
from .compression import Compression, codec_for
from .mpi_ops import (  # noqa: F401 - the same
    Adasum,
    Average,
    Sum,
    allreduce_async_,
    grouped_allreduce_async_,
    rank,
    rocm_built,
    size,
    sparse_allreduce_async,
    synchronize,
)
from .ops.allreduce import ReduceOptions, begin_allreduce
from .optim.adasum_optimizer import make_adasum_optimizer
from .optim.gradient_exchange import GradientExchange, Settings, clip_gradients, refuse_for_adasum
from .optim.optimizer_names import EARLY, Names, check_passes, choose_groups, find_duplicates, name_parameters

# Attributes of Horovod's distributed optimizer that programs read beside its methods; most are private there.


class HorovodAttributes:
    """What `DistributedOptimizer` has of Horovod's names; nothing of ours reads them."""

    _exchange: GradientExchange

    find_duplicates = staticmethod(find_duplicates)

    @property
    def sparse_as_dense(self) -> bool:
        """Whether sparse gradients travel as dense ones."""
        return self._exchange.settings.sparse_as_dense

    @property
    def _compression(self) -> Any:
        return self._exchange.settings.compression

    @property
    def _groups(self) -> list[list[torch.Tensor]] | None:
        by_name = {name: parameter for parameter, name in self._exchange.names.items()}
        groups = [[by_name[name] for name in group] for group in self._exchange.settings.groups]
        return groups or None

    @property
    def _allreduce_delay(self) -> dict[torch.Tensor, int]:
        """Backward passes until each gradient is exchanged."""
        return self._exchange.passes_due()

    @property
    def _grad_accs(self) -> list[Any]:
        """Horovod's own hooks hang on these; ours do not."""
        return []

    def _register_hooks(self) -> None:
        """Do nothing: hooks are made with the optimizer, and anew in a world that is new."""

    def _allreduce_grad_async(self, p: torch.nn.Parameter) -> tuple[int, Any]:
        """Begin an allreduce of one gradient, beside what the optimizer does; return handle and context."""
        zero_missing_grads([p])
        assert p.grad is not None, "just given"
        settings, name = self._exchange.settings, self._exchange.names[p]
        small, context = settings.compression.compress(p.grad)
        handle = begin_allreduce(
            [small],
            [f"allreduce.{name}"],
            ReduceOptions(settings.op, process_set=settings.process_set),
            in_place=True,
            codecs=[codec_for(settings.compression, small)],
        )
        return handle, context


O = TypeVar("O", bound=Optimizer)  # noqa: E741

_SLOW = (
    "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). "
    "This can cause training slowdown. You may want to consider using optimizer.skip_synchronize() context "
    "if you use optimizer.synchronize() in your code."
)


class _DistributedOptimizer(HorovodAttributes, Optimizer):
    """What is added to an optimizer's class."""

    _exchange: GradientExchange
    _training: TrainingWatch | None = None
    _synchronized = False
    _should_synchronize = True

    # -- what others read ------------------------------------------------------------------

    @property
    def _farandole_path(self) -> str:
        """How gradients meet: "reducer", "tensor" or "alone"."""
        self._attach()
        return self._exchange.choice.path

    @property
    def _farandole_path_reason(self) -> str:
        """Why so."""
        self._attach()
        return self._exchange.choice.reason

    @property
    def _parameter_names(self) -> Names:
        return self._exchange.names

    @property
    def _requires_update(self) -> set[torch.Tensor]:
        return self._exchange.required

    @property
    def _handles(self) -> dict[Any, tuple[Any, Any]]:
        return self._exchange.handles

    @property
    def backward_passes_per_step(self) -> int:
        """Backward passes whose gradients are added up on each rank before they are exchanged."""
        return self._exchange.passes

    @property
    def op(self) -> int:
        """How gradients of different ranks become one."""
        return self._exchange.settings.op

    @property
    def gradient_predivide_factor(self) -> float:
        """What gradients are divided by before they are added up, for Average."""
        return self._exchange.settings.predivide_factor

    @property
    def process_set(self) -> ProcessSet:
        """The ranks that exchange gradients."""
        return self._exchange.settings.process_set

    # -- what others call ------------------------------------------------------------------

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change how many backward passes are added up; to be called between two steps, on all ranks."""
        check_passes(passes)
        self._exchange.set_passes(passes)

    def synchronize(self) -> None:
        """Give every parameter the gradient of all ranks, and wait until it is there.

        Parameters without a gradient get that of the other ranks, or zeros. Raises `HorovodInternalError`.
        """
        self._attach()
        self._exchange.synchronize()
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within this context `step` uses the gradients as they are; to be entered after `synchronize`."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Synchronize, unless told not to, and make the optimizer's step.

        With a `closure` the gradients that it computes are those of all ranks, too; all ranks must call it
        equally often.
        """
        self._attach()
        if not self._should_synchronize:
            self._synchronized = False
            return super().step(self._prepare(closure, waits=False))
        if self._synchronized:
            warnings.warn(_SLOW, UserWarning, stacklevel=2)
        # What was synchronized once needs no second time, and a closure brings gradients of its own.
        if self._exchange.pending or (closure is None and not self._synchronized):
            self._exchange.synchronize()
        self._synchronized = False
        return super().step(self._prepare(closure, waits=True))

    step.hooked = True  # type: ignore[attr-defined] # the hooks of a step are run by the class below, once

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, which must have been used: by `step`, or at least by `synchronize`."""
        self._attach()
        if not self._exchange.may_zero():
            raise AssertionError(EARLY)
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its gradients travel by the tensor path, in names made of their place."""
        super().add_param_group(param_group)
        self._exchange.add(len(self.param_groups) - 1, self.param_groups[-1]["params"])

    def load_state_dict(self, *arguments: Any, **keywords: Any) -> None:
        """Load, and forget what is pending; hooks stay."""
        self._exchange.reset()
        self._synchronized, self._should_synchronize = False, True
        super().load_state_dict(*arguments, **keywords)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        base = type(self).__bases__[1]
        names = [[self._parameter_names.get(p) for p in group["params"]] for group in self.param_groups]
        made = (base, self._exchange.settings, self._exchange.passes, names)
        return _restore, made, self.__getstate__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        names = self.__dict__.pop("_names_by_place", None)
        if names is not None:
            self._exchange.names = {
                parameter: name
                for group, row in zip(self.param_groups, names, strict=True)
                for parameter, name in zip(group["params"], row, strict=True)
                if name is not None
            }

    # -- inside ----------------------------------------------------------------------------

    def _attach(self) -> None:
        """Make hooks in a world that is new: after a restart of an elastic job, or in a copy."""
        here = self._exchange.attach(self.param_groups)
        if here is None:
            return
        verification = here.session.kept(VerificationRun)
        if verification is not None:
            verification.follow(self, self._exchange.names, self.process_set.size() or 1)
        if self._training is None:
            self._training = TrainingWatch()
        trained = [p for group in self.param_groups for p in group["params"]]
        self._training.attach(self, here, self._exchange.reducer, trained)

    def _prepare(self, closure: Callable[[], Any] | None, *, waits: bool) -> Callable[[], Any] | None:
        """Clip now the gradients that are there, or those of the closure when it was called."""
        if closure is None:
            self._clip()
            return None

        def closed() -> Any:
            loss = closure()
            if waits:
                self._exchange.synchronize()
            self._clip()
            return loss

        return closed

    def _clip(self) -> None:
        clip_gradients(self._exchange.plan, [p for group in self.param_groups for p in group["params"]])


@functools.cache
def _derive(base: Any) -> type[_DistributedOptimizer]:
    """Return the subclass of an optimizer's class; one a class, so that copies have the same."""
    members = {"__module__": base.__module__, "__doc__": base.__doc__, "__qualname__": base.__qualname__}
    return cast(type[_DistributedOptimizer], type(base.__name__, (_DistributedOptimizer, base), members))


def _restore(
    base: type[Optimizer], settings: Settings, passes: int, names: Sequence[Sequence[str | None]]
) -> _DistributedOptimizer:
    """Make an optimizer that is a copy; its state follows."""
    made = object.__new__(_derive(cast(Any, base)))
    made._exchange = GradientExchange(settings, passes)
    made.__dict__["_names_by_place"] = names
    return made


def DistributedOptimizer(  # noqa: N802 - the name and the arguments that scripts know
    optimizer: O,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = mpi_ops.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> O:
    """Return an optimizer like `optimizer` that steps with the gradients of all ranks of `process_set`.

    Args:
        optimizer: any torch optimizer; its class, state and options are kept.
        named_parameters: pairs of name and parameter. Names appear in messages and timelines, and match parameters
            between ranks.
        compression: one of `Compression`, or a class with ``compress`` and ``decompress``.
        backward_passes_per_step: number of passes whose gradients are added (not averaged) before the exchange.
        op: Average, Sum or Adasum.
        gradient_predivide_factor: with Average, divides by this factor before and by size / factor after the sum.
        num_groups: deprecated spelling of `groups` as a number.
        groups: parameters that are exchanged as one operation, or the number of such groups.
        sparse_as_dense: whether sparse gradients are converted to dense ones before the exchange.
        process_set: the ranks that take part.

    Returns:
        An optimizer of a subclass of the same name.

    Raises:
        ValueError: an argument is invalid.
        NotImplementedError: Adasum with a process set.
    """
    if gradient_predivide_factor != 1.0:
        if mpi_ops.rocm_built():
            raise ValueError("gradient_predivide_factor not supported yet with ROCm")
        if op != mpi_ops.Average:
            raise ValueError("gradient_predivide_factor not supported with op != Average")
    check_passes(backward_passes_per_step)
    check_compression(compression)
    names = name_parameters(optimizer.param_groups, named_parameters)
    if op == mpi_ops.Adasum and mpi_ops.size() > 1:
        if process_set is not global_process_set:
            raise NotImplementedError("Adasum does not support non-global process sets yet.")
        job = mpi_ops._basics.running.plan
        plan = apply_plan(job, compression, backward_passes_per_step)
        refuse_for_adasum(job)
        return cast(O, make_adasum_optimizer(optimizer, names, compression, plan.accumulate))
    mine = {p: names[p] for group in optimizer.param_groups for p in group["params"]}
    settings = Settings(
        compression=compression,
        op=op if op != mpi_ops.Adasum else mpi_ops.Average,
        predivide_factor=gradient_predivide_factor,
        groups=choose_groups(groups, num_groups, mine),
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
        all_are_sparse=sparse_as_dense and isinstance(optimizer, torch.optim.SparseAdam),
    )
    made = object.__new__(_derive(cast(Any, type(optimizer))))
    # Groups and state stay shared, so that a scheduler of the given optimizer still sets our learning rate.
    made.__dict__.update({key: value for key, value in vars(optimizer).items() if key != "step"})
    made._exchange = GradientExchange(settings, backward_passes_per_step)
    made._exchange.names = names
    mpi_ops.size()  # raises when there is no world
    made._attach()
    return cast(O, made)


# Records of a training with `DistributedOptimizer`: the model and its data loaders are found automatically.
#
# The steps are the optimizer's; the model is found when it is first called, so the first forward pass is not seen.
# Waits for batches are those of all of torch's loaders; one of another kind is shown by ``farandole.record(model,
# optimizer, loader)``.


class TrainingWatch:
    """What is recorded of one distributed optimizer, through all the worlds it lives in."""

    def __init__(self) -> None:
        self._model: weakref.ref[nn.Module] | None = None
        self._finder: ModelFinder | None = None
        self._reducer: weakref.ref[GradientReducer] | None = None

    def attach(
        self,
        optimizer: Optimizer,
        here: World,
        reducer: GradientReducer | None,
        parameters: Sequence[torch.Tensor],
    ) -> None:
        """Record in a world that is new."""
        watch_optimizer(optimizer, here)
        watch_loaders(here)
        self._reducer = None if reducer is None else weakref.ref(reducer)
        model = None if self._model is None else self._model()
        if model is not None:
            self._found(model)
        elif self._finder is None:
            watch = weakref.WeakMethod(self._found)
            self._finder = ModelFinder(parameters, lambda found: _tell(watch, found))
            weakref.finalize(self, self._finder.stop)

    def _found(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        watch_model(model, None if self._reducer is None else self._reducer())


def _tell(watch: weakref.WeakMethod[Any], model: nn.Module) -> None:
    found = watch()
    if found is not None:
        found(model)


# The model that some parameters belong to, found when it is first called.
#
# For front ends that are given an optimizer and no model. A hook on all modules looks at each that is called,
# until one holds all the parameters: the outermost, because that is called first. Then, or after a thousand calls,
# it is gone and costs nothing.


CALLS = 1000


class ModelFinder:
    """Calls `found` with the module that holds all `parameters`, once it is called. `close` stops looking."""

    def __init__(self, parameters: Iterable[torch.Tensor], found: Callable[[nn.Module], None]) -> None:
        self._wanted = {id(parameter) for parameter in parameters}
        self._found = found
        self._others: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._calls = 0
        self._handle = register_module_forward_pre_hook(self._called) if self._wanted else None

    def stop(self) -> None:
        """Take the hook off at the next call: now torch may be going through the hooks of modules."""
        self._calls = CALLS

    def close(self) -> None:
        """Take the hook off; may be called twice."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.remove()

    def _called(self, module: nn.Module, _: Any) -> None:
        if self._handle is None:
            return
        self._calls += 1
        if module not in self._others:
            if self._wanted <= {id(parameter) for parameter in module.parameters()}:
                self.close()
                self._found(module)
                return
            self._others.add(module)
        if self._calls >= CALLS:
            self.close()
