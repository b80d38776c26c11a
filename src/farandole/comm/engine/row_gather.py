"""Parameters whole on all ranks again, after each rank has updated its rows.

Parameters travel side by side in chunks, so that small ones share a message and what is copied stays in the cache.
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

from ...core.bucket_plan import CHUNK_BYTES, GATHER_REGIONS
from ..codecs.quantize import Packer
from ..routes import Route
from ..transport.comm_thread import BucketWork
from ..world.comm_errors import translated
from ..world.world import World
from .parameters import RowBlocks
from .row_exchange import RowExchange, packed_bytes


class _Chunk:
    """Some parameters of one dtype, and where their rows lie."""

    def __init__(self, parameters: Sequence[torch.Tensor], exchange: RowExchange) -> None:
        self.parameters = parameters
        self.blocks = RowBlocks(parameters, exchange.owners)
        self._block = exchange.block
        self._at: list[int] = []
        self._rows: list[list[torch.Tensor]] = []
        self._cut: dict[tuple[int, int], list[torch.Tensor]] = {}
        """Rows in a block, by its address and number: regions stay where they are."""

    @property
    def block_elements(self) -> int:
        """Elements of a block as it travels."""
        return self.blocks.block_elements

    @property
    def travels_as(self) -> torch.dtype:
        """The type of what travels."""
        return self.parameters[0].dtype

    def write(self, mine: torch.Tensor) -> None:
        """Put this rank's rows of the parameters into its block."""
        torch._foreach_copy_(self._rows_in(mine, self._block), self._rows[self._block])

    def read(self, blocks: Sequence[torch.Tensor]) -> None:
        """Take the other ranks' rows."""
        rows = self._rows
        others = [b for b in range(len(rows)) if b != self._block]
        targets = [row for b in others for row in rows[b]]
        sources = [row for b in others for row in self._rows_in(blocks[b], b)]
        torch._foreach_copy_(targets, sources)

    def _rows_in(self, memory: torch.Tensor, block: int) -> list[torch.Tensor]:
        key = (memory.data_ptr(), block)
        if key not in self._cut:
            self._cut[key] = self.blocks.views(memory, block)
        return self._cut[key]

    def look_up_rows(self) -> None:
        """Have views of the rows of all blocks, made anew when a parameter has other memory.

        The thread that reads and writes them asks no parameter: it may be late, and wait for this very thread.
        """
        at = [parameter.data_ptr() for parameter in self.parameters]
        if at != self._at:
            whole = [parameter.detach() for parameter in self.parameters]
            self._at = at
            self._rows = [
                [tensor[each.begin : each.end] for tensor, each in zip(whole, block, strict=True)]
                for block in self.blocks.rows
            ]


class _CodedChunk(_Chunk):
    """The same, of float32, whose changes travel packed. See `row_exchange`."""

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        exchange: RowExchange,
        exact: Sequence[torch.Tensor],
        packer: Packer,
    ) -> None:
        """`exact`: this rank's rows as its optimizer has left them, by parameter."""
        super().__init__(parameters, exchange)
        self.blocks = RowBlocks(parameters, exchange.owners, multiple=packer.block)
        self._exact, self._packer = exact, packer
        self._decoded = torch.zeros(self.blocks.block_elements, dtype=torch.float32)
        self._views = [self.blocks.views(self._decoded, block) for block in range(len(self.blocks.owners))]

    @property
    def block_elements(self) -> int:
        """See `_Chunk`: packed bytes."""
        return packed_bytes(self._packer, self.blocks.block_elements)

    @property
    def travels_as(self) -> torch.dtype:
        """See `_Chunk`."""
        return torch.uint8

    def write(self, mine: torch.Tensor) -> None:
        """Put the change of this rank's rows into its block."""
        self._decoded.zero_()
        changes = self._views[self._block]
        torch._foreach_copy_(changes, list(self._exact))
        torch._foreach_sub_(changes, self._rows[self._block])
        self._packer.pack(self._decoded, mine[: self._packer.packed_bytes(self.blocks.block_elements)])

    def read(self, blocks: Sequence[torch.Tensor]) -> None:
        """Add the change of all rows, as all ranks decode it."""
        count = self._packer.packed_bytes(self.blocks.block_elements)
        for rows, views, packed in zip(self._rows, self._views, blocks, strict=True):
            self._packer.unpack(packed[:count], self._decoded)
            torch._foreach_add_(rows, views)


class RowGather:
    """Gives all ranks the rows that each of them has of `parameters`. To be made and called by all ranks alike."""

    def __init__(
        self,
        world: World,
        route: Route,
        parameters: Sequence[torch.Tensor],
        *,
        packed: tuple[Packer, Sequence[torch.Tensor | None]] | None = None,
    ) -> None:
        """`parameters`: each with one dimension at least.

        `packed`: how changes travel, and this rank's exact rows; None: of a parameter that travels as it is.
        """
        exact = [None] * len(parameters) if packed is None else packed[1]
        rows = {id(parameter): row for parameter, row in zip(parameters, exact, strict=True)}
        groups = _chunks(parameters, [row is not None for row in exact])
        size = world.size
        multiple = 1 if packed is None else packed[0].block
        most = max((_padded_bytes(group, size, multiple) for group in groups), default=1)
        self._exchange = RowExchange(world, route, region_bytes=most, regions=GATHER_REGIONS)
        self._chunks = [
            _Chunk(group, self._exchange)
            if packed is None or rows[id(group[0])] is None
            else _CodedChunk(
                group, self._exchange, [row for each in group if (row := rows[id(each)]) is not None], packed[0]
            )
            for group in groups
        ]

    @property
    def chunks(self) -> list[Sequence[torch.Tensor]]:
        """The parameters that travel together, in the order of the parameters."""
        return [chunk.parameters for chunk in self._chunks]

    def look_up(self, number: int) -> None:
        """Have the views of a chunk's parameters that `start` needs: of each one a rank, and what they view."""
        self._chunks[number].look_up_rows()

    @torch.no_grad()
    def start(self, number: int) -> BucketWork:
        """Begin to gather a chunk, whose rows this rank has updated; to be called for the same ones on all ranks.

        Waits while the regions are in use. The work's `wait` raises `PeerLost`, `Stalled` or `Mismatch`.
        """
        chunk = self._chunks[number]
        chunk.look_up_rows()
        return self._exchange.all_gather(chunk.block_elements, chunk.travels_as, chunk.write, chunk.read)


def _chunks(parameters: Sequence[torch.Tensor], are_packed: Sequence[bool]) -> list[list[torch.Tensor]]:
    """Return the parameters side by side, of one dtype each and all packed or none, of about `CHUNK_BYTES`."""
    found: list[list[torch.Tensor]] = []
    kinds = [(parameter.dtype, packed) for parameter, packed in zip(parameters, are_packed, strict=True)]
    for kind in dict.fromkeys(kinds):
        nbytes = CHUNK_BYTES + 1  # the first one begins a chunk, also if it has no elements
        for parameter in (each for each, own in zip(parameters, kinds, strict=True) if own == kind):
            if nbytes + parameter.nbytes > CHUNK_BYTES:
                found.append([])
                nbytes = 0
            found[-1].append(parameter)
            nbytes += parameter.nbytes
    return found


def _padded_bytes(parameters: Sequence[torch.Tensor], size: int, multiple: int) -> int:
    return RowBlocks(parameters, range(size), multiple=multiple).elements * parameters[0].itemsize


# Parameters whose rows are still on their way after a step, and what makes each reader of them wait.
#
# [Note: who reads a parameter] While a chunk travels, the class of its parameters is `LateParameter`. Every
# function of torch that is given such a parameter asks the class first (``__torch_function__``), and so do
# ``p.data``, ``p.detach()``, copies, pickles and `torch.save`: it waits for the chunk, makes the parameter an
# ``nn.Parameter`` again, and goes on. Modules wait for their own parameters before their forward pass, in the
# order of use. Before a fork, the next step, and the end of the world everything is waited for.
#
# [Note: what is not late] A reader that has the parameter's memory already asks no class: a view or an array made
# before, another process. So a chunk is waited for in the step when memory of one of its parameters has more users
# than Farandole knows of, is shared with other processes, or belongs to a class of its own; and so is every chunk
# once something was compiled by `torch.compile`, whose code takes parameters without asking.
#
# Not seen are readers that are given the parameter itself by other ways than torch's functions: extensions in C++
# that bind their functions themselves, `torch.func` transforms of a function of parameters, and addresses. That is
# why nothing is late unless the plan says so.


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
