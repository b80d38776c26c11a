"""The optimizer of ``op=Adasum``: each rank makes its own step, and the changes of the parameters are combined.

A step of the wrapped optimizer is made with this rank's own gradients; how it changed each parameter travels as an
allreduce with `Adasum` named like the parameter, and the combined change is what is kept. All changes are
launched together in `step`, because an optimizer may look at several parameters at once.

Saeed Maleki et al., "Scaling Distributed Training with Adaptive Summation", 2020 (arXiv:2006.02924).
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast

import torch
from torch.optim import Optimizer

from ...common.reductions import Adasum
from ..compression import codec_for
from ..ops.allreduce import ReduceOptions, begin_allreduce
from ..ops.handles import synchronize, wait_for_all
from .optimizer_names import EARLY, TOO_MANY, Names, check_passes, noname

T = TypeVar("T")


class _DistributedAdasumOptimizer(Optimizer):
    """What is added to an optimizer's class."""

    _farandole_path = "adasum"
    _farandole_path_reason = "the operation is Adasum"
    _parameter_names: Names
    _compression: Any
    _passes: int
    _passes_done: Counter[torch.Tensor]
    """Gradients that each parameter got since the last step."""

    @property
    def backward_passes_per_step(self) -> int:
        """Backward passes that may precede a step."""
        return self._passes

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change how many backward passes may precede a step."""
        check_passes(passes)
        self._passes = passes
        self._passes_done.clear()

    def synchronize(self) -> None:
        """Do nothing: gradients stay each rank's own."""

    def skip_synchronize(self) -> AbstractContextManager[None]:
        """Raise `AssertionError`: a step without the other ranks would let the parameters drift apart."""
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make the wrapped optimizer's step and keep what the ranks' changes combine to.

        Raises `HorovodInternalError` when they cannot be combined; the parameters are as before then.
        """
        parameters = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        parameters.sort(key=lambda p: self._parameter_names[p])
        starts = [p.detach().clone() for p in parameters]
        result = super().step(closure)
        self._passes_done.clear()
        with torch.no_grad():
            changes = [(p - start).contiguous() for p, start in zip(parameters, starts, strict=True)]
            for p, start in zip(parameters, starts, strict=True):
                p.copy_(start)
        combined = self._combine(parameters, changes)
        with torch.no_grad():
            for p, change in zip(parameters, combined, strict=True):
                p.add_(change)
        return result

    step.hooked = True  # type: ignore[attr-defined] # the hooks of a step are run by the class below, once

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, which must have been used by `step`."""
        if self._passes_done:
            raise AssertionError(EARLY)
        super().zero_grad(set_to_none)

    def load_state_dict(self, *arguments: Any, **keywords: Any) -> None:
        """Load, and count passes from zero."""
        self._passes_done.clear()
        super().load_state_dict(*arguments, **keywords)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        base = type(self).__mro__[2]
        names = [[self._parameter_names[p] for p in group["params"]] for group in self.param_groups]
        passes_done = [[self._passes_done[p] for p in group["params"]] for group in self.param_groups]
        made = (base, self._compression, self._passes, names, passes_done)
        return _restore, made, self.__getstate__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        places = self.__dict__.pop("_by_place", None)
        if places is None:
            return
        names, passes_done = places
        given = [group["params"] for group in self.param_groups]
        self._parameter_names = _by_parameter(given, names)
        self._passes_done = +Counter(_by_parameter(given, passes_done))
        self._count_gradients()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; what its parameters change travels under names made of their place."""
        super().add_param_group(param_group)
        number, added = len(self.param_groups) - 1, self.param_groups[-1]["params"]
        for index, parameter in enumerate(added):
            self._parameter_names.setdefault(parameter, noname(number, index))
        self._count_gradients()

    def _count_gradients(self) -> None:
        """Count the gradients of all parameters that are not counted yet; a copy's are its own."""
        counted = self.__dict__.setdefault("_counted", set())
        this = weakref.WeakMethod(self._count)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and parameter not in counted:
                    counted.add(parameter)
                    parameter.register_post_accumulate_grad_hook(functools.partial(_tell, this))

    def _combine(self, parameters: list[Any], changes: list[torch.Tensor]) -> list[torch.Tensor]:
        travelling = []
        for p, change in zip(parameters, changes, strict=True):
            small, context = self._compression.compress(change)
            name = f"allreduce.{self._parameter_names[p]}"
            codecs = [codec_for(self._compression, small)]
            handle = begin_allreduce([small], [name], ReduceOptions(Adasum), in_place=True, codecs=codecs)
            travelling.append((handle, context))
        sums = wait_for_all(functools.partial(synchronize, handle) for handle, _ in travelling)
        return [
            self._compression.decompress(each, context)
            for each, (_, context) in zip(sums, travelling, strict=True)
        ]

    def _count(self, parameter: torch.Tensor) -> None:
        if self._passes_done[parameter] >= self._passes:
            raise AssertionError(TOO_MANY)
        self._passes_done[parameter] += 1


@functools.cache
def _derive(base: Any) -> type[_DistributedAdasumOptimizer]:
    members = {"__module__": base.__module__, "__doc__": base.__doc__, "__qualname__": base.__qualname__}
    return cast(
        type[_DistributedAdasumOptimizer], type(base.__name__, (_DistributedAdasumOptimizer, base), members)
    )


def make_adasum_optimizer(optimizer: Optimizer, names: Names, compression: Any, passes: int) -> Optimizer:
    """Return an optimizer like `optimizer`, with its groups and state, that combines steps by Adasum."""
    made = object.__new__(_derive(cast(Any, type(optimizer))))
    made.__dict__.update({key: value for key, value in vars(optimizer).items() if key != "step"})
    made._parameter_names, made._compression, made._passes = names, compression, passes
    made._passes_done = Counter()
    made._count_gradients()
    return made


def _restore(
    base: type[Optimizer],
    compression: Any,
    passes: int,
    names: Sequence[Sequence[str]],
    passes_done: Sequence[Sequence[int]],
) -> _DistributedAdasumOptimizer:
    """Make an optimizer that is a copy; its state follows."""
    made = object.__new__(_derive(cast(Any, base)))
    made._compression, made._passes = compression, passes
    made.__dict__["_by_place"] = names, passes_done
    return made


def _by_parameter(given: Sequence[Sequence[torch.Tensor]], rows: Sequence[Sequence[T]]) -> dict[torch.Tensor, T]:
    return {
        parameter: each
        for parameters, row in zip(given, rows, strict=True)
        for parameter, each in zip(parameters, row, strict=True)
    }


def _tell(count: weakref.WeakMethod[Any], parameter: torch.Tensor) -> None:
    """Count for an optimizer that still lives: a parameter outlives it, and must not keep it."""
    call = count()
    if call is not None:
        call(parameter)
