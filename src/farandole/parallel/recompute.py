"""Activations that are computed again in backward instead of kept: plan key ``recompute``.

[Note: the second pass] The second pass must compute what the first one did, and must leave no trace. Random
numbers: torch's generators are restored by the checkpoint, Python's and NumPy's here. Buffers: the second pass
gets copies of what they were before the first, so running statistics are counted once, and a power iteration
begins where it began. Statistics of all ranks: sums that the first pass received are replayed, so no rank waits
for another in backward. Parameters: an error if they have changed, as autograd raises for a saved tensor. What
autocast casts in the first pass is not kept until the whole model has run, as it would be otherwise.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from ..core.vocabulary.errors import ConfigError, PlanError
from ..core.vocabulary.text import did_you_mean
from .blocks import repeated_blocks
from .changed_class import ChangedClass, change_class, make_kin, require_changeable, set_class
from .data.batch_norm import StatsGroup, stats_group_of
from .lower_precision import own_casts
from .model import Strategy

# A module whose activations are dropped after its forward pass and computed again in backward.
#
# The module's class becomes a kin of its class, whose forward pass runs in torch's checkpoint (Chen et al. 2016,
# "Training Deep Nets with Sublinear Memory Cost", section 3; the non-reentrant form, which keeps hooks and
# graphs). Outside of training, and without gradients, the forward pass is the plain one.

_MOST_BYTES = 1 << 20
"""Larger buffers are constants, such as masks: not copied in each pass, and refused if they change."""


class Recomputed(ChangedClass):
    """The first base of a kin that recomputes."""

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """Run the user's forward pass; in training its activations are dropped and computed again in backward."""
        plain = super().forward
        if not (self.training and torch.is_grad_enabled()):
            return plain(*arguments, **named)
        leaves, spec = tree_flatten((arguments, named))
        run = partial(_run, plain, spec)
        if torch.compiler.is_compiling():  # a graph has no buffers that change between the passes
            return checkpoint(run, *leaves, use_reentrant=False, preserve_rng_state=True)
        return checkpoint(
            run, *leaves, use_reentrant=False, preserve_rng_state=True, context_fn=partial(_contexts, self)
        )


class Recompute(Strategy):
    """The plan key: activations of blocks, or of modules by their names, are computed again in backward."""

    keys = ("recompute",)

    def check(self) -> None:
        """Raise what `modules_to_recompute` does."""
        self._chosen = modules_to_recompute(self.model, self.plan.recompute)

    def apply(self) -> None:
        """Recompute the activations of the modules from now on."""
        for name, module in self._chosen:
            kind: Any = type(module)
            change_class(module, make_kin(Recomputed, kind), f"plan: recompute, module {name!r}")


def stop_recomputing(model: nn.Module) -> None:
    """Keep the activations of all modules in `model` again."""
    for module in model.modules():
        if isinstance(module, Recomputed):
            set_class(module, module.plain_class)


def _run(plain: Callable[..., Any], spec: Any, *leaves: Any) -> Any:
    arguments, named = tree_unflatten(leaves, spec)
    return plain(*arguments, **named)


# -- the two passes; see [Note: the second pass] ---------------------------------------------------


def _contexts(block: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    passes = _Passes(block)
    return passes.first(), _Reentered(passes.second)


class _Reentered:
    """A context that can be entered again: the graph may be kept for a second backward pass."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make = make
        self._open: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        self._open.append(self._make())
        self._open[-1].__enter__()

    def __exit__(self, *problem: Any) -> bool | None:
        return self._open.pop().__exit__(*problem)


class _Passes:
    """One forward pass of a block, and what its second pass needs."""

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self._random = _read_random()
        self._buffers = {
            (module, name): buffer
            for module in block.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        }
        self._before = {key: _copy(key[0], buffer) for key, buffer in self._buffers.items()}
        self._versions = [_version(buffer) for buffer in self._buffers.values()]
        self._parameters = [(parameter, _version(parameter)) for parameter in block.parameters()]
        self._sums: dict[StatsGroup, list[torch.Tensor]] = {group: [] for group in _stats_groups(block)}

    @contextmanager
    def first(self) -> Iterator[None]:
        with ExitStack() as stack:
            for group, sums in self._sums.items():
                stack.enter_context(group.remember(sums))
            stack.enter_context(own_casts())
            yield
        self._forget_constants()

    def _forget_constants(self) -> None:
        """Keep the copies of buffers that the first pass has changed; refuse those of which there is none."""
        for (key, buffer), version in zip(list(self._buffers.items()), self._versions, strict=True):
            module, name = key
            is_written = _version(buffer) != version
            counts = isinstance(module, _NormBase) and module.training  # its kernels count no version
            if not is_written and not counts and module._buffers.get(name) is buffer:
                del self._before[key]
            elif is_written and self._before[key] is buffer:
                raise ConfigError(
                    f"plan: recompute: buffer {name!r} of a {type(module).__name__} changes in the forward pass "
                    f"and has more than {_MOST_BYTES} bytes, too many to keep what the first pass saw",
                    remedy="recompute other modules: recompute takes patterns of module names",
                )
        self._buffers.clear()

    @contextmanager
    def second(self) -> Iterator[None]:
        for parameter, version in self._parameters:
            if _version(parameter) != version:
                raise ConfigError(
                    f"plan: recompute: a parameter of shape {tuple(parameter.shape)} of a recomputed "
                    f"{type(self._block).__name__} was changed in place between its forward and backward pass",
                    remedy="call backward() before optimizer.step()",
                )
        live = {key: key[0]._buffers.get(key[1]) for key in self._before}
        now = _read_random()
        with ExitStack() as stack:
            for group, sums in self._sums.items():
                stack.enter_context(group.replay(sums))
            stack.enter_context(own_casts())
            try:
                _write_random(self._random)
                for (module, name), before in self._before.items():
                    module._buffers[name] = before.clone()
                yield
            finally:
                for (module, name), buffer in live.items():
                    module._buffers[name] = buffer
                _write_random(now)


def _stats_groups(block: nn.Module) -> list[StatsGroup]:
    found = (stats_group_of(module) for module in block.modules())
    return list({id(group): group for group in found if group is not None}.values())


def _copy(module: nn.Module, buffer: torch.Tensor) -> torch.Tensor:
    """Return a copy of what may change; the buffer itself where that is unlikely and would be large."""
    is_large = buffer.nbytes > _MOST_BYTES and not isinstance(module, _NormBase)
    return buffer if is_large else buffer.detach().clone()


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _read_random() -> tuple[Any, Any]:
    """Return the state of Python's generator, and of NumPy's where it is in use."""
    numpy = sys.modules.get("numpy.random")
    return random.getstate(), None if numpy is None else numpy.get_state()


def _write_random(state: tuple[Any, Any]) -> None:
    random.setstate(state[0])
    numpy = sys.modules.get("numpy.random")
    if numpy is not None and state[1] is not None:
        numpy.set_state(state[1])


# Which modules of a model are recomputed: its repeated blocks, or those whose names match patterns.

_NAMES = 12
"""Names that an error lists at most."""


def modules_to_recompute(
    model: nn.Module, recompute: Literal["none", "blocks"] | tuple[str, ...]
) -> list[tuple[str, nn.Module]]:
    """Return the modules that the plan key names, outermost ones only, in the order of `named_modules`.

    Raises `PlanError` when ``"blocks"`` finds none, or a pattern matches no module that has a forward pass;
    `ConfigError` for a module whose forward pass cannot be changed.
    """
    if recompute == "none":
        return []
    chosen = _blocks(model) if recompute == "blocks" else _matching(model, recompute)
    for name, module in chosen:
        require_changeable(module, f"plan: recompute, module {name!r}")
    return chosen


def _blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    found = repeated_blocks(model)
    if not found:
        raise PlanError(
            f'plan: recompute = "blocks", but this {type(model).__name__} has no list of repeated blocks',
            remedy='name modules by patterns: recompute = ["encoder.*"]',
        )
    return found


def _matching(model: nn.Module, patterns: tuple[str, ...]) -> list[tuple[str, nn.Module]]:
    callable_modules = {name: module for name, module in model.named_modules() if name and _has_forward(module)}
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in callable_modules):
            raise PlanError(
                f"plan: recompute: the pattern {pattern!r} matches no module with a forward pass",
                remedy=_remedy(pattern, list(callable_modules)),
            )
    chosen: list[tuple[str, nn.Module]] = []
    for name, module in callable_modules.items():
        is_inside = any(module is not outer and module in set(outer.modules()) for _, outer in chosen)
        if not is_inside and any(fnmatchcase(name, pattern) for pattern in patterns):
            chosen.append((name, module))
    return chosen


def _has_forward(module: nn.Module) -> bool:
    """Return whether the module can be called; an `nn.ModuleList` cannot."""
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def _remedy(pattern: str, names: list[str]) -> str:
    inside = f"{pattern}.*"
    if any(fnmatchcase(name, inside) for name in names):
        return f"did you mean {inside!r}?"
    text = did_you_mean(pattern, names)
    return text if text.startswith("did") else f"modules: {', '.join(names[:_NAMES])}"
