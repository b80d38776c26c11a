"""When a model's forward and backward pass and an optimizer's step begin and end: hooks that only look.

[Note: where a phase begins] The forward pass is the root module's call. The backward pass begins when the gradient
of the model's output is known; from the end of the forward pass until then is the loss. It ends when autograd
has nothing left to run, before the wait for gradients of other ranks. A forward pass without gradients
is an evaluation. The optimizer's step is what happens between its hooks.

Hooks return nothing and change nothing. They find the world when they are called, so they outlive it; copies of a
model or optimizer, and saved ones, look at nothing.
"""

from __future__ import annotations

import gc
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import islice
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ...comm.batch_weight import tensors_in
from ...comm.device.streams import outside_graphs
from ...comm.world.store_sync import all_gather_json
from ...comm.world.world import World, has_world, world
from ...core.vocabulary.errors import ConfigError
from ...core.vocabulary.events import (
    BACKWARD,
    EVALUATION,
    FORWARD,
    LOSS,
    OPTIMIZER,
    Exchange,
    InnerExchange,
    Phase,
)
from ..model import Strategy
from ..optim.step_hooks import ScalerWatch, is_nested_step
from .device_marks import mark_begin, mark_end
from .training_facts import note_optimizer

_OUTPUTS = 16
"""Tensors of a model's output that are looked at."""
_LEAST_SECONDS = 1e-4
"""A wait in which no rank is late is shorter."""

_watched: weakref.WeakKeyDictionary[nn.Module, ModelWatch] = weakref.WeakKeyDictionary()
_timed: weakref.WeakKeyDictionary[Optimizer, OptimizerWatch] = weakref.WeakKeyDictionary()


class PassListener(Protocol):
    """What exchanges the gradients of a watched model: `GradientReducer`, for one."""

    @property
    def is_open(self) -> bool:
        """Whether gradients are still exchanged."""

    def forward_begins(self) -> None:
        """A forward pass begins."""

    def backward_begins(self) -> None:
        """The backward pass of the model begins."""


def watch_model(model: nn.Module, reducer: PassListener | None = None, *, exchanges: bool = False) -> ModelWatch:
    """Record the phases of `model` from now on; of one that is watched already, by its `reducer` from now on.

    `exchanges`: the gradients meet by something else than a reducer of ours, at the end of backward.
    """
    watch = _watched.get(model)
    if watch is None:
        watch = _watched[model] = ModelWatch(exchanges)
        # First before and first after: what FSDP2 does around the pass is in it, and its callbacks come later.
        model.register_forward_pre_hook(_Before(watch.forward_begins), prepend=True, with_kwargs=True)
        model.register_forward_hook(_After(watch.forward_ends), prepend=True, always_call=True)
    if reducer is not None:
        watch.reducer = weakref.ref(reducer)
    return watch


class WatchedPasses(Strategy):
    """Phases of the model are recorded, and its exchange is told of passes."""

    takes_own_parameters = True

    def is_asked(self) -> bool:
        """Always."""
        return True

    def apply(self) -> None:
        """See `watch_model`."""
        self._watch = watch_model(self.model, self.distributed.listener)

    def finish(self) -> None:
        """Let steps miss a `GradScaler` where the script casts. A pipeline calls layers, never the model."""
        if self.plan.precision == "fp32" and self.distributed.pipeline is None:
            for each in self.optimizers:
                watch = ScalerWatch(self.mesh.here, self._watch)
                self.distributed.hooks.append(each.register_step_pre_hook(watch))


class PassObserver(Protocol):
    """Who wants to see what goes through the watched models: ``farandole verify --deep``."""

    def forward_begins(self, model: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """`model` was called, with gradients."""

    def forward_ends(self, model: nn.Module, output: Any) -> None:
        """The call has returned `output`."""


class _Observers(list[PassObserver]):
    """Those of one world, kept by its session."""


def observe_passes(here: World, observer: PassObserver) -> Callable[[], None]:
    """Tell `observer` of every forward pass of a watched model while `here` is the world; return what ends it."""
    observers = here.session.keep(_Observers, _Observers)
    observers.append(observer)
    return lambda: observers.remove(observer)


def _observers() -> tuple[PassObserver, ...]:
    found = world().session.kept(_Observers) if has_world() else None
    return tuple(found or ())


def watch_optimizer(optimizer: Optimizer, here: World) -> None:
    """Record the steps of `optimizer` from now on; the first one of a session that lives counts its steps."""
    here.session.steps.register(optimizer)
    time_optimizer(optimizer)
    note_optimizer(here, optimizer)


def time_optimizer(optimizer: Optimizer) -> None:
    """Hook `optimizer`, whose steps are recorded once a world knows it."""
    if optimizer not in _timed:
        watch = _timed[optimizer] = OptimizerWatch()
        optimizer.register_step_pre_hook(watch.begins)
        watch.end_hook = optimizer.register_step_post_hook(watch.ends).id


def end_steps_with(optimizer: Optimizer, hook: Callable[..., None]) -> RemovableHandle:
    """Have a watched optimizer's steps end with `hook`, which is part of the step's time and of its records."""
    handle = optimizer.register_step_post_hook(hook)
    hooks: Any = optimizer._optimizer_step_post_hooks
    hooks.move_to_end(_timed[optimizer].end_hook)
    return handle


class OptimizerWatch:
    """The steps of one optimizer."""

    end_hook: int
    """The number of the hook that ends a step."""

    def __init__(self) -> None:
        self._begin_seconds = 0.0

    def begins(self, optimizer: Optimizer, *_: Any) -> None:
        """Its `step` was called."""
        if is_nested_step(optimizer):
            return
        self._begin_seconds = time.monotonic()
        mark_begin(OPTIMIZER)

    def ends(self, optimizer: Optimizer, *_: Any) -> None:
        """Its `step` is over."""
        if is_nested_step(optimizer):
            return
        mark_end(OPTIMIZER)
        _record(Phase(OPTIMIZER, self._begin_seconds, time.monotonic()))
        if has_world():
            world().session.step_ends(optimizer)


class ModelWatch:
    """The passes of one model."""

    def __init__(self, exchanges: bool) -> None:
        self.reducer: weakref.ref[PassListener] | None = None
        self._exchanges = exchanges
        self.refuses_compiled_autograd = not exchanges
        self._depth = 0
        self._forward_seconds = 0.0
        self._forward_end_seconds = 0.0
        self._backward_seconds = 0.0
        self._factor: float | None = None
        """Weight of the batch that the current forward pass sees; None where that does not matter."""
        self.in_float16 = False
        """Whether the last forward pass with gradients ran under autocast of the script's in float16."""
        self.take_buckets: Callable[[], tuple[Any, ...]] = tuple
        """Returns the times of the buckets of the exchange that has ended."""

    def forward_begins(self, model: nn.Module, arguments: Any, named: Any) -> None:
        """The root module was called."""
        if _compiled_autograd_is_on():
            self._refuse_compiled_autograd()
        self._depth += 1
        if self._depth > 1:
            return  # a module that calls itself
        reducer = self._reducer()
        if reducer is not None:
            reducer.forward_begins()
        self._factor = _factor_of((arguments, named))
        if torch.is_grad_enabled():
            device = _device_type(model)
            self.in_float16 = (
                torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.float16
            )
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            for observer in _observers():
                observer.forward_begins(model, arguments, named)
        mark_begin(FORWARD)
        self._forward_seconds = time.monotonic()

    def forward_ends(self, model: nn.Module, output: Any) -> None:
        """The call has returned `output`, or raised (None)."""
        if not self._depth:
            return  # the hooks came while it ran
        self._depth = max(0, self._depth - 1)
        if self._depth:
            return
        now = time.monotonic()
        trains = torch.is_grad_enabled()
        mark_end(FORWARD, FORWARD if trains else EVALUATION)
        _record(Phase(FORWARD if trains else EVALUATION, self._forward_seconds, now))
        if not trains:
            return
        self._forward_end_seconds = now
        # A parameter that comes out as it is (a temperature) would keep the hook for all later passes.
        for tensor in islice((each for each in tensors_in(output) if each.grad_fn is not None), _OUTPUTS):
            tensor.register_hook(partial(outside_graphs(self._backward_begins), self._factor))
        if not torch.compiler.is_compiling():
            for observer in _observers():
                observer.forward_ends(model, output)

    def _refuse_compiled_autograd(self) -> None:
        """No exchange can begin in its graphs, and FSDP2's gradients are wrong (torch 2.13)."""
        if has_world() and world().size > 1 and self.refuses_compiled_autograd:
            raise ConfigError(
                "compiled autograd runs the backward pass, where gradients cannot be exchanged",
                remedy="leave torch._dynamo.config.compiled_autograd off; a compiled function may call backward()",
            )

    def _backward_begins(self, factor: float | None, _: torch.Tensor) -> None:
        if _compiled_autograd_is_on():
            self._refuse_compiled_autograd()
        if factor is not None and has_world():
            world().session.batch_weight.backward_begins(torch._C._current_graph_task_id(), factor)
        if self._forward_end_seconds:  # once a forward pass
            now = time.monotonic()
            begin, self._forward_end_seconds = self._forward_end_seconds, 0.0
            _record(Phase(LOSS, begin, now))
            reducer = self._reducer()
            if reducer is not None:
                reducer.backward_begins()
                return
            self._backward_seconds = now
            mark_begin(BACKWARD)
            torch.autograd.Variable._execution_engine.queue_callback(outside_graphs(self._backward_ends))

    def _backward_ends(self) -> None:
        """Autograd has run everything. Callbacks queued later, of those who wait for others, are still to come."""
        now = time.monotonic()
        mark_end(BACKWARD)
        _record(Phase(BACKWARD, self._backward_seconds, now))
        if self._exchanges:
            self._backward_seconds = now
            torch.autograd.Variable._execution_engine.queue_callback(outside_graphs(self._exchange_ends))

    def _exchange_ends(self) -> None:
        """The callbacks that wait for other ranks were queued before this one."""
        buckets, now = self.take_buckets(), time.monotonic()
        if not buckets and now - self._backward_seconds < _LEAST_SECONDS:
            return  # a pass that exchanged nothing
        launches = tuple(bucket.launch_seconds for bucket in buckets)
        sent = sum(bucket.sent_bytes for bucket in buckets)
        _record(Exchange(launches, self._backward_seconds, now, sent, buckets))

    def _reducer(self) -> PassListener | None:
        reducer = None if self.reducer is None else self.reducer()
        return reducer if reducer is not None and reducer.is_open else None


class _Hook:
    """A hook that calls a watch. A copy, made with a copy of its model or saved with it, does nothing."""

    def __init__(self, call: Callable[..., None] | None = None) -> None:
        """Without `call`: in models that were saved by version 0.2."""
        self.call = None if call is None else outside_graphs(call)

    def __reduce__(self) -> Any:
        return reduce_to_nothing()

    @property
    def __name__(self) -> str:
        """The class's name. TorchScript, which compiles a module's hooks, asks for it first, and is refused."""
        if sys._getframe(1).f_globals.get("__name__", "").startswith("torch.jit"):
            raise ConfigError(
                "torch.jit.script compiles a model's hooks, and those of fd.distribute read clocks",
                remedy="script a model that was made anew and loaded with load_state_dict, or use torch.export",
            )
        return type(self).__qualname__


def reduce_to_nothing() -> Any:
    """Return what pickles a hook as a function of the standard library that does nothing."""
    return (getattr, (nullcontext(), "__exit__"))


class _Before(_Hook):
    def __call__(self, module: nn.Module, arguments: Any, named: Any) -> None:
        if self.call is not None:
            self.call(module, arguments, named)


class _After(_Hook):
    def __call__(self, module: nn.Module, arguments: Any, output: Any) -> None:
        if self.call is not None:
            self.call(module, output)


def _compiled_autograd_is_on() -> bool:
    """Return whether it would run a backward pass that began now, or runs one."""
    found = sys.modules.get("torch._dynamo.compiled_autograd")
    states = ("compiled_autograd_enabled", "in_compiled_autograd_region")
    return any(getattr(found, state, False) for state in states)


def _factor_of(inputs: Any) -> float | None:
    """Return the weight of the batch that `inputs` are from. See [Note: shares follow the batch]."""
    if not (torch.is_grad_enabled() and has_world()):
        return None
    here = world()
    if not here.session.batch_weight.watches:
        return None
    return here.session.batch_weight.forward_begins(
        inputs, lambda fits: all_gather_json(here, "which batch is in use", fits)
    )


def _device_type(model: nn.Module) -> str:
    parameter = next(model.parameters(), None)
    return "cpu" if parameter is None else parameter.device.type


def _record(event: Any) -> None:
    if has_world():
        world().session.recorder.record(event)


# A hook of a model that tells its policy what was done to the model.


class PolicyHook:
    """A hook of a model that calls its policy. One that was copied or saved with its model does nothing."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def __call__(self, *_: Any) -> None:
        """Tell the policy."""
        self._call()

    def __reduce__(self) -> Any:
        return reduce_to_nothing()


# What is inside, or around, the objects that trainers hand out: wrapped optimizers, and a model's wrapper.


_DEEPEST = 8
"""Wrappers around an optimizer."""


def inner_optimizer(candidate: Any) -> Optimizer | None:
    """Return the optimizer that takes hooks: `candidate`, or what it holds as ``.optimizer``; None: there is none.

    Accelerate's ``AcceleratedOptimizer`` calls itself an `Optimizer` and has not run its constructor.
    """
    for _ in range(_DEEPEST):
        if isinstance(candidate, Optimizer) and "_optimizer_step_pre_hooks" in vars(candidate):
            return candidate
        candidate = getattr(candidate, "optimizer", None)
    return None


def ddp_around(model: nn.Module) -> DistributedDataParallel | None:
    """Return the `DistributedDataParallel` of this process that wraps `model`; None: there is none."""
    for each in gc.get_objects():
        if DistributedDataParallel in type(each).__mro__ and vars(each).get("_modules", {}).get("module") is model:
            found: DistributedDataParallel = each
            return found
    return None


# Records how long passes and steps wait for exchanges inside of them: of activations, of updated parameters.
#
# On accelerators such a wait is that of a stream, which the host does not see: nothing is recorded there.


@contextmanager
def inner_exchange(here: World, degree: str, sent_bytes: int | Callable[[], int]) -> Iterator[None]:
    """Record the time inside as a wait for the ranks of a degree; of one that succeeded.

    `sent_bytes`: by this rank, of collectives what a ring sends; or what gives it when all is sent.
    """
    if here.device.type != "cpu":
        yield
        return
    begin = time.monotonic()
    yield
    sent = sent_bytes if isinstance(sent_bytes, int) else sent_bytes()
    here.session.recorder.record(InnerExchange(degree, begin, time.monotonic(), sent))
