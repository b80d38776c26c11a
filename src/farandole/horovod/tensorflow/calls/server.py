"""The thread that serves operations inside graphs: it submits them to the engine, and completes them.

A kernel of TensorFlow queues its operation and returns, so no thread of TensorFlow waits for another rank, and any
number of operations are on their way at once, in any order. This thread waits in the library, without the
interpreter's lock, for operations that begin and for results. The engine's threads only say that there is one.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ....comm.named_ops.operations import Request, Ticket
from ...common.exceptions import HorovodInternalError, HorovodMismatchError
from ...common.operations import begin, wait
from ...exchange.layouts import layouts
from ..errors import code_of, failures
from ..installed import tf
from .call import Library, OperationCall
from .scalars import from_memory, generation, torch_type

_MOST_DIMENSIONS = 254
"""TensorFlow's limit."""


@dataclass
class _Running:
    """One operation between its beginning and its end."""

    handle: int
    call: OperationCall
    names: list[str]
    tensors: list[torch.Tensor]
    tickets: list[Ticket]
    waits_for: int = 0
    """Tickets that are not done."""
    compares: bool = False
    """Whether the tickets are those of a comparison of layouts, before the operation itself."""


class Server:
    """Serves the operations of one process."""

    def __init__(self, library: Library, calls: Sequence[OperationCall]) -> None:
        """`calls`: what operations ask for, by their attribute `call`; it grows."""
        self._library = library
        self._calls = calls
        self._numbers = itertools.count()
        self._running: dict[int, _Running] = {}
        self._about = (ctypes.c_int64 * (3 + _MOST_DIMENSIONS))()
        threading.Thread(target=self._serve, name="farandole-tensorflow", daemon=True).start()

    def _serve(self) -> None:
        torch.set_grad_enabled(False)
        number = ctypes.c_int64()
        while True:
            handle = self._library.next(ctypes.byref(number))
            if handle:
                self._guarded(handle, "", partial(self._begin, handle))
            elif (running := self._running.get(number.value)) is not None:
                running.waits_for -= 1
                if not running.waits_for:
                    del self._running[number.value]
                    self._guarded(running.handle, running.call.title, partial(self._end, running))

    def _guarded(self, handle: int, title: str, step: Any) -> None:
        """Make a step of an operation; an error in it is the operation's, and never this thread's end."""
        try:
            step()
        except Exception as problem:
            failures.note(problem)
            text = f"{title}: {problem}" if title else str(problem)
            self._library.fail(handle, code_of(problem), text.encode())

    def _begin(self, handle: int) -> None:
        number, began_in, node = ctypes.c_int64(), ctypes.c_int64(), ctypes.c_char_p()
        count = self._library.look(handle, ctypes.byref(number), ctypes.byref(began_in), ctypes.byref(node))
        if not 0 <= number.value < len(self._calls):
            raise ValueError("FarandoleExchange: this graph was made by another process")
        call = self._calls[number.value]
        try:
            if began_in.value != generation.number:
                raise HorovodInternalError("the world in which this step began was shut down")
            tensors = [self._view(handle, i) for i in range(count)]
            names = call.names_in_graph((node.value or b"").decode(), count)
            running = _Running(handle, call, names, tensors, [])
            question = call.layout_question(names[0])
            if question is not None:
                running.compares = True
                self._submit(running, [question])
            else:
                self._submit(running, call.requests(names, tensors, in_place=call.keeps_shape))
        except Exception as problem:
            raise _named(problem, call) from problem

    def _submit(self, running: _Running, requests: Sequence[Request]) -> None:
        if running.call.part is not None and not running.compares:
            running.call.part.submitted()
        running.tickets = begin(requests)
        running.waits_for = len(running.tickets)
        number = next(self._numbers)
        self._running[number] = running
        tell = partial(self._library.post, number)
        for ticket in running.tickets:
            ticket.call_when_done(tell)

    def _end(self, running: _Running) -> None:
        call = running.call
        try:
            found = wait(running.tickets)
        except HorovodMismatchError as problem:
            if not call.layout:
                raise
            raise layouts.explained(problem, running.names[0], call.layout) from problem
        if running.compares:
            layouts.compare(running.names[0], call.layout, found[0])
            running.compares = False
            self._submit(running, call.requests(running.names, running.tensors, in_place=call.keeps_shape))
            return
        if not call.keeps_shape:
            for place, result in enumerate(call.results(found)):
                self._put_out(running.handle, place, result)
        if call.part is not None:
            call.part.arrived(running.tickets[0])
        self._library.finish(running.handle)

    def _view(self, handle: int, place: int) -> torch.Tensor:
        about = self._about
        address = self._library.tensor(handle, place, about, _MOST_DIMENSIONS)
        dtype, dimensions, nbytes = about[0], about[1], about[2]
        return from_memory(address, nbytes, torch_type(tf.as_dtype(dtype)), about[3 : 3 + dimensions])

    def _put_out(self, handle: int, place: int, result: torch.Tensor) -> None:
        dtype = tf.as_dtype(str(result.dtype).removeprefix("torch."))
        dims = (ctypes.c_int64 * max(1, result.dim()))(*result.shape)
        address = self._library.output(handle, place, dtype.as_datatype_enum, dims, result.dim())
        if address is None and result.numel():
            raise MemoryError(f"TensorFlow has no memory for a result of shape {tuple(result.shape)}")
        memory = from_memory(address, result.numel() * result.element_size(), result.dtype, result.shape)
        memory.copy_(result)


def _named(problem: Exception, call: OperationCall) -> Exception:
    """Return an error that begins with the operation's title."""
    text = f"{call.title}: {problem}"
    if isinstance(problem, HorovodInternalError):
        return type(problem)(text)
    return ValueError(text) if isinstance(problem, (ValueError, TypeError)) else RuntimeError(text)
