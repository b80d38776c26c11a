"""Parameters whose rows are still on their way after a step, and what makes each reader of them wait.

[Note: who reads a parameter] While a chunk travels, the class of its parameters is `LateParameter`. Every function
of torch that is given such a parameter asks the class first (``__torch_function__``), and so do ``p.data``,
``p.detach()``, copies, pickles and `torch.save`: it waits for the chunk, makes the parameter an ``nn.Parameter``
again, and goes on. Modules wait for their own parameters before their forward pass, in the order of use. Before a
fork, the next step, and the end of the world everything is waited for.

[Note: what is not late] A reader that has the parameter's memory already asks no class: a view or an array made
before, another process. So a chunk is waited for in the step when memory of one of its parameters has more users
than Farandole knows of, is shared with other processes, or belongs to a class of its own; and so is every chunk
once something was compiled by `torch.compile`, whose code takes parameters without asking.

Not seen are readers that are given the parameter itself by other ways than torch's functions: extensions in C++
that bind their functions themselves, `torch.func` transforms of a function of parameters, and addresses. That is
why nothing is late unless the plan says so.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from ..transport.comm_thread import BucketWork
from ..world.comm_errors import translated
from ..world.world import World

_KEY = "_farandole_late"
_TENSOR: Any = torch.Tensor
_WITHOUT_NUMBERS = frozenset(
    [_TENSOR.grad.__get__, _TENSOR.grad.__set__, _TENSOR.grad.__delete__, _TENSOR.requires_grad.__get__]
)
"""What `zero_grad` and the like ask, which reads no number of a parameter."""


class LateParameter(nn.Parameter):
    """See [Note: who reads a parameter]. Nothing is made as one: parameters become it, and cease to be."""

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Wait for the chunks of the parameters in the arguments, then call."""
        kwargs = kwargs or {}
        if func in _WITHOUT_NUMBERS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        for parameter in _late_among((args, kwargs)):
            arrive(parameter)
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a copy of what arrives."""
        arrive(self)
        return self.__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle what arrives."""
        arrive(self)
        return self.__reduce_ex__(protocol)


def arrive(parameter: torch.Tensor) -> None:
    """Return when `parameter` is whole. Raises what stopped its chunk, once."""
    chunk: _LateChunk | None = vars(parameter).get(_KEY)
    if chunk is None:
        parameter.__class__ = nn.Parameter  # another object was swapped into this one
    else:
        chunk.arrive()


class _LateChunk:
    """Some parameters that travel together."""

    def __init__(self, world: World, parameters: Sequence[torch.Tensor], work: BucketWork) -> None:
        self.parameters, self._world, self._work = parameters, world, work
        self.then: Callable[[], None] | None = None
        """Called when the parameters are whole, before any reader goes on."""
        self._lock = threading.RLock()
        self.is_here = False

    def begin(self) -> None:
        """Let the parameters be late."""
        for parameter in self.parameters:
            vars(parameter)[_KEY] = self
            parameter.__class__ = LateParameter

    def arrive(self) -> None:
        """Wait; let the parameters be as they were. An error is raised by the first call alone."""
        with self._lock:
            if self.is_here:
                return
            self._work._done.wait()
            self.is_here = True
            for parameter in self.parameters:
                parameter.__class__ = nn.Parameter
                vars(parameter).pop(_KEY, None)
            with translated(self._world, "gathering updated parameters"):
                self._work.wait()
            if self.then is not None:
                self.then()


class LateRows:
    """All chunks of a process that are late. One a session."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._chunks: list[_LateChunk] = []
        self._hook: torch.utils.hooks.RemovableHandle | None = None
        world.session.call_on_close(self.finish, first=True)
        _all().add(self)
        _wait_before_forks()

    def defer(self, parameters: Sequence[torch.Tensor], work: BucketWork, then: Callable[[], None]) -> None:
        """Let `parameters` be late: `may_be_late` was true before `work` began. `then`: to do at its end."""
        chunk = _LateChunk(self._world, parameters, work)
        chunk.then = then
        # A graph that has saved them must not be used again, wherever the numbers are by now.
        torch.autograd.graph.increment_version(list(parameters))
        if self._hook is None:
            self._hook = register_module_forward_pre_hook(self._before_module)
        self._chunks.append(chunk)
        chunk.begin()

    def arrive_all(self) -> None:
        """Return when nothing is late. Raises what stopped a chunk."""
        chunks, self._chunks = self._chunks, []
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        try:
            while chunks:
                chunks.pop(0).arrive()
        finally:
            self._chunks += chunks

    def finish(self) -> None:
        """Wait for all before the world closes; a chunk that failed tells its first reader."""
        for chunk in self._chunks:
            chunk._work._done.wait()
            if chunk._work._error is None:
                chunk.arrive()
        if all(chunk.is_here for chunk in self._chunks):
            self.arrive_all()

    def _before_module(self, module: nn.Module, _: Any) -> None:
        """Wait for the parameters of a module that is about to run; of a scripted one, for all."""
        if isinstance(module, torch.jit.ScriptModule) or all(chunk.is_here for chunk in self._chunks):
            self.arrive_all()
            return
        for parameter in module._parameters.values():
            if type(parameter) is LateParameter:
                arrive(parameter)


def may_be_late(parameters: Sequence[torch.Tensor], known_users: Sequence[int]) -> bool:
    """Return whether all who read one of `parameters` would wait. See [Note: what is not late].

    `known_users`: of each, how many tensors on its memory Farandole has, beside the parameter.
    """
    return not _something_is_compiled() and all(map(_may_be_late, parameters, known_users))


def _may_be_late(parameter: torch.Tensor, known_users: int) -> bool:
    if type(parameter) is not nn.Parameter or parameter.device.type != "cpu" or parameter.is_shared():
        return False
    return _users(parameter) == (_ALONE[0] + known_users, _ALONE[1])


def _users(tensor: torch.Tensor) -> tuple[int, int]:
    """Return how many tensors use the memory of `tensor`, and how many names its storage has in Python."""
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)), sys.getrefcount(storage)


_ALONE = _users(torch.zeros(1, dtype=torch.float32))
"""The number of uses of a tensor with one owner."""


def _late_among(value: Any) -> Iterator[torch.Tensor]:
    if type(value) is LateParameter:
        yield value
    elif isinstance(value, (list, tuple, set, frozenset)):
        for each in value:
            yield from _late_among(each)
    elif isinstance(value, dict):
        yield from _late_among(list(value.values()))


def _something_is_compiled() -> bool:
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    return compiler is not None and any(each is not None for each in compiler.cached_backends.values())


@cache
def _all() -> weakref.WeakSet[LateRows]:
    return weakref.WeakSet()


@cache
def _wait_before_forks() -> None:
    """A child has no thread that would bring what is late."""
    os.register_at_fork(before=_finish_all)


def _finish_all() -> None:
    for each in list(_all()):
        each.finish()
