"""Where gradients are scaled: at the borders of a model's forward pass, as autograd sees them; and by how much.

[Note: borders] Inside of a forward pass gradients are the true ones times the scale; outside of it they are true.
So they are multiplied where they enter, at the outputs, and divided where they leave: at inputs that require a
gradient, and at parameters, by a hook that runs before the gradient is accumulated. ``parameter.grad`` is true
whenever the loop looks at it, a pass may be added to another, and two models may meet in one graph.

[Note: parameters outside] A term of the loss may use a parameter directly (a penalty on weights), or a module of
the model without the model. That gradient is true and would be divided nevertheless. So before autograd runs, the
part of the graph outside of the model is looked through, a few nodes, and such gradients are multiplied first. A
tensor from inside of the forward pass that did not leave it as output is refused: true and scaled gradients would
meet in one node.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Container, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from ..comm.engine.parameters import refuse_second_order
from ..comm.world.comm_errors import translated
from ..comm.world.world import World
from ..core.vocabulary.errors import ConfigError

_MARK = "farandole_scaled"
_KEY = 'plan: precision = "fp16": '


class Entering(torch.autograd.Function):
    """The identity, through which gradients enter the forward pass: they are multiplied by the scale."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, scale: DynamicLossScale, begin: int, is_copied: bool
    ) -> torch.Tensor:
        """Let `tensor` pass; nodes from number `begin` on are inside. `is_copied`: what follows takes no views."""
        ctx.scale, ctx.begin, ctx.end = scale, begin, sequence_number()
        return tensor.clone() if is_copied else tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        """Multiply."""
        _refuse_second_order()
        return gradients[0] * ctx.scale.value, None, None, None


class Leaving(torch.autograd.Function):
    """The identity, through which gradients leave the forward pass by an input: they are divided by the scale."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, scale: DynamicLossScale) -> torch.Tensor:
        """Let `tensor` pass."""
        ctx.scale = scale
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Divide."""
        _refuse_second_order()
        return gradients[0] / ctx.scale.value, None


def _refuse_second_order() -> None:
    refuse_second_order(
        'plan: precision = "fp16"', "cannot be scaled", remedy='use precision = "bf16", which needs no scale'
    )


def sequence_number() -> int:
    """Return autograd's number of the next node that this thread makes."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number


def hook_parameter(parameter: torch.Tensor, scale: DynamicLossScale, first: Callable[[], None]) -> Any:
    """Divide gradients of `parameter` by the scale, before other hooks see them; return the hook's handle.

    `first` is called in each pass that brings one.
    """

    def unscale(gradient: torch.Tensor) -> torch.Tensor:
        first()
        return gradient / scale.value

    handle = parameter.register_hook(unscale)
    hooks: Any = parameter._backward_hooks
    if hooks is not None and handle.id in hooks:
        hooks.move_to_end(handle.id, last=False)
    return handle


def strange_leaves(outputs: Sequence[torch.Tensor], known: Container[torch.Tensor]) -> list[tuple[int, ...]]:
    """Return the shapes of leaves inside of the forward pass that are none of the `known` parameters."""
    nodes = _nodes([each.grad_fn for each in outputs], stop=lambda node: _made_by(node) is Leaving)
    leaves = [leaf for node in nodes if (leaf := getattr(node, "variable", None)) is not None]
    return [tuple(leaf.shape) for leaf in leaves if leaf not in known]


def _root(tensor: Any) -> Any:
    """Return the node of a tensor, or of a `GradientEdge`."""
    return tensor.grad_fn if isinstance(tensor, torch.Tensor) else tensor.node


def _made_by(node: Any) -> Any:
    return getattr(node, "_forward_cls", None)


def _nodes(roots: Sequence[Any], stop: Callable[[Any], bool]) -> Iterator[Any]:
    """Yield the nodes of a graph once each, in no order; nothing beyond those that `stop` chooses."""
    waiting, seen = [root for root in roots if root is not None], set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        if not stop(node):
            waiting += [edge for edge, _ in node.next_functions if edge is not None]


# -- gradients of parameters that do not come through the forward pass; see [Note: parameters outside] ----


class ScaledParameters:
    """The parameters of all models whose gradients are scaled."""

    def __init__(self) -> None:
        # By the object, not by its number: a parameter that is made later may have the number of one that is gone.
        self._scales: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._lock = threading.Lock()

    def add(self, parameters: Sequence[torch.Tensor], scale: DynamicLossScale) -> None:
        """Look for `parameters` in graphs from now on."""
        with self._lock:
            _install_engine()
            self._scales.update({each: weakref.ref(scale) for each in parameters})

    def remove(self, parameters: Sequence[torch.Tensor]) -> None:
        """Look for them no more."""
        with self._lock:
            for each in parameters:
                self._scales.pop(each, None)

    def scale_outside(self, roots: Sequence[Any]) -> None:
        """Multiply what goes from outside of forward passes to parameters; raise `ConfigError` if it cannot be."""
        if not self._scales or torch._C._current_graph_task_id() != -1:
            return  # nested: the graph of a part of a forward pass
        borders: list[Any] = []
        outside: list[Any] = []
        for node in _nodes(list(map(_root, roots)), stop=lambda node: _made_by(node) is Entering):
            (borders if _made_by(node) is Entering else outside).append(node)
        for node in outside:
            number = node._sequence_nr()
            if _made_by(node) is Leaving or any(border.begin <= number < border.end for border in borders):
                raise ConfigError(
                    f"{_KEY}the loss uses a tensor from inside of the forward pass that is none of its outputs",
                    remedy='return the tensor from forward, or use precision = "bf16"',
                )
            for position, (edge, _) in enumerate(node.next_functions):
                scale = self._scale_of(getattr(edge, "variable", None))
                if scale is not None:
                    _scale_edge(node, position, scale)

    def _scale_of(self, variable: Any) -> DynamicLossScale | None:
        scale: Any = None if variable is None else self._scales.get(variable)
        return None if scale is None else scale()


def _scale_edge(node: Any, position: int, scale: DynamicLossScale) -> None:
    """Multiply a gradient that `node` computes, once; a graph may be gone through again."""
    marked = node.metadata.setdefault(_MARK, set())
    if position not in marked:
        marked.add(position)
        node.register_hook(partial(_scaled_at, position, scale))


def _scaled_at(position: int, scale: DynamicLossScale, gradients: Any, _: Any) -> Any:
    gradient = gradients[position]
    if gradient is None:
        return None
    return (*gradients[:position], gradient * scale.value, *gradients[position + 1 :])


scaled_parameters = ScaledParameters()


class _Engine(torch._C._ImperativeEngine):
    """Autograd's engine, which lets `ScaledParameters` look at a graph before it runs."""

    def run_backward(self, tensors: Any, *arguments: Any, **named: Any) -> Any:
        scaled_parameters.scale_outside(tensors)
        return super().run_backward(tensors, *arguments, **named)


def _install_engine() -> None:
    if not isinstance(Variable._execution_engine, _Engine):
        Variable._execution_engine = _Engine()


# Dynamic loss scaling: the scale of gradients inside a model with ``precision = "fp16"``.
#
# Float16 holds no number below 6e-8, and many gradients are smaller. So they are multiplied by a scale before they
# enter the model's backward pass, and divided by it where they leave it. (Micikevicius et al. 2018, "Mixed
# Precision Training", section 3.2.) The constants are those of `torch.amp.GradScaler`.
#
# [Note: one decision] A step whose gradients are not finite is left out. They are looked at after the exchange,
# when they are the same bits on all ranks, so all ranks decide alike and nothing is sent for it. Where each rank
# has shards of them (plan key ``zero``), it looks at its own, and the ranks agree by one small all-reduce. Several
# optimizers of one model decide each for its own gradients, and change the scale once a backward pass.


INITIAL = 65536.0
GROWTH = 2.0
BACKOFF = 0.5
GOOD_STEPS = 2000
LEAST = 2.0**-16
"""A scale below 1 loses more than it saves: the gradients are not finite by themselves."""


class DynamicLossScale:
    """The scale of one model's gradients, and the steps that were skipped. The same on all ranks."""

    def __init__(self) -> None:
        self.value = INITIAL
        self.good_steps = 0
        """Steps since the scale changed."""
        self.skipped_steps = 0
        self._passes = 0
        self._round = -1
        self._is_counted = False
        self._is_backed_off = False
        self._found: dict[int, torch.Tensor] = {}
        self._decided: dict[int, bool] = {}

    def note_finite(self, key: int, finite: torch.Tensor | None) -> None:
        """Note whether the gradients of optimizer `key` are finite, a tensor () of bool; None: it has none.

        Their exchange has ended. Nothing is waited for.
        """
        self._decided.pop(key, None)
        self._found.pop(key, None)
        if finite is not None:
            self._found[key] = finite

    def pass_ends(self) -> None:
        """Note that a backward pass has brought new gradients."""
        self._passes += 1

    def is_dropped(self, key: int) -> bool:
        """Return whether the step of optimizer `key` is to be left out."""
        if key not in self._decided:
            finite = self._found.get(key)
            self._decided[key] = finite is not None and not bool(finite)
        return self._decided[key]

    def step(self, key: int) -> bool:
        """Return whether the step of optimizer `key` is left out, and let the scale follow."""
        dropped = self.is_dropped(key)
        self._found.pop(key, None)
        self._decided.pop(key, None)
        if self._round != self._passes:
            self._round, self._is_counted, self._is_backed_off = self._passes, False, False
        if dropped:
            self.good_steps = 0
            self.skipped_steps += not self._is_backed_off
            if not self._is_backed_off:
                self.value = max(self.value * BACKOFF, LEAST)
            self._is_backed_off = True
        elif not self._is_backed_off and not self._is_counted:
            self._is_counted = True
            self.good_steps += 1
            if self.good_steps >= GOOD_STEPS:
                self.value, self.good_steps = self.value * GROWTH, 0
        return dropped

    def state_dict(self) -> dict[str, float | int]:
        """Return scale and counters."""
        return {"scale": self.value, "good_steps": self.good_steps, "skipped_steps": self.skipped_steps}

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        """Take scale and counters."""
        self.value = float(state["scale"])
        self.good_steps, self.skipped_steps = int(state["good_steps"]), int(state["skipped_steps"])


def agree_finite(here: World, found: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Return what `found` is on all ranks together: a flag is true if it is on each. None counts as true.

    To be called by all ranks, with as many flags.

    Raises:
        CommError: a rank is gone, or does something else.
    """
    flags = torch.tensor([each is None or bool(each) for each in found], dtype=torch.int32, device=here.device)
    with translated(here, "agreeing on finite gradients"):
        dist.all_reduce(flags, op=dist.ReduceOp.MIN, group=here.group)
    return list(flags.bool())


def all_finite(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return whether no gradient holds NaN or infinity, as a tensor () of bool on the first one's device.

    A DTensor is looked at here, which is this rank's part of it.
    """
    local = [each.to_local() if isinstance(each, DTensor) else each for each in gradients]
    plain = [each.coalesce().values() if each.layout == torch.sparse_coo else each for each in local]
    norms = torch._foreach_norm([each for each in plain if each.numel()], float("inf"))
    device = plain[0].device
    if not norms:
        return torch.ones((), dtype=torch.bool, device=device)
    return torch.isfinite(torch.stack([norm.to(device, torch.float32) for norm in norms])).all()
