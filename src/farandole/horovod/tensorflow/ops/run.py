"""Run an operation where it is called: at once, or in a graph, by the kernel in C++ or a Python function there.

[Note: runs although unused] TensorFlow leaves out what no result of a function depends on. A rank that alone logs
the mean of all ranks would then wait for the others, which have left it out. So an exchange is an output of its
function, by which it runs on every rank; it still waits for nothing but its inputs.
"""

from __future__ import annotations

import ctypes
import itertools
import re
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from ...common.basics import basics
from ...common.exceptions import HorovodInternalError, HorovodMismatchError
from ...common.operations import begin, wait
from ...exchange.layouts import layouts
from ...named_ops.operations import Request, Ticket
from ..errors import code_of, failures, refuse_session, translated
from ..installed import tf
from .call import (
    Library,
    OperationCall,
    find_library,
    from_array,
    from_eager,
    from_memory,
    generation,
    to_array,
    to_eager,
    torch_type,
)

_IN_XLA = (
    "{title}: an exchange between processes cannot be inside an XLA program: use jit_compile=False, as in "
    "model.compile(..., jit_compile=False), for the function that exchanges; what it calls may be compiled"
)

_NAMES = "_farandole_names"
"""An attribute of graphs."""
calls: list[OperationCall] = []
"""What the operations of all graphs of this process ask for; an operation holds its place in here."""
_adding = threading.Lock()


def put_in_graph(
    call: OperationCall, tensors: Sequence[Any], types: Sequence[Any], shapes: Sequence[Any]
) -> list[Any]:
    """Add an operation to the graph that is being made.

    Args:
        call: what it asks for.
        tensors: what goes in.
        types: the types of what comes out.
        shapes: what is known of its shapes.
    """
    refuse_session(call.title)
    _refuse_xla(call)
    library = find_library()
    node = call.name or _unnamed(call, tensors[0])
    if library is None:
        results = _by_function(call, node, tensors, types)
    else:
        _serve()
        with _adding:
            number = len(calls)
            calls.append(call)
        results = library.operation(
            generation=generation.tensor(),
            inputs=list(tensors),
            call=number,
            in_place=call.keeps_shape,
            Tout=list(types),
            name=re.sub(r"[^A-Za-z0-9_.\\/>-]", "_", node).lstrip("_./\\>-").rstrip("/") or call.title,
        )
        _run_although_unused(results[0].op)
    for result, shape in zip(results, shapes, strict=True):
        result.set_shape(shape)
    return list(results)


def _unnamed(call: OperationCall, tensor: Any) -> str:
    """Return Horovod's name for an operation that the script gave none: by its first tensor.

    A tensor from outside the graph has a number for a name, which counts the tensors of this process: other ranks
    have another one.
    """
    if tensor.name.partition(":")[0].isdecimal():
        return call.title
    return f"{call.title}_{re.sub(r'[^A-Za-z0-9_]', '_', tensor.name)}"


def name_here(name: str) -> str:
    """Return a name for an operation of ours: in a graph, another one for each time that it is put there.

    There are as many in the graphs of all ranks, so they can be counted; names that TensorFlow makes unique depend
    on what else a rank has built.
    """
    if tf.executing_eagerly():
        return name
    graph = tf.compat.v1.get_default_graph()
    counts: Counter[str] | None = getattr(graph, _NAMES, None)
    if counts is None:
        counts = Counter()
        setattr(graph, _NAMES, counts)
    number = counts[name]
    counts[name] += 1
    return f"{name}+{number}" if number else name


def _run_although_unused(operation: Any) -> None:
    """Make an operation one of those that a function always runs. See [Note: runs although unused]."""
    if operation._control_flow_context is None:
        operation.graph.control_outputs.append(operation)


@cache
def _serve() -> Server | None:
    """Begin to serve the operations of this process, once."""
    library = find_library()
    return None if library is None else Server(library, calls)


def _by_function(call: OperationCall, node: str, tensors: Sequence[Any], types: Sequence[Any]) -> list[Any]:
    """Add a Python function that waits. Inside a function of TensorFlow these run in the order of the program."""
    names = call.names_in_graph(tf.compat.v1.get_default_graph().unique_name(node), len(tensors))
    dtypes = [tensor.dtype for tensor in tensors]

    def run(*arrays: Any) -> list[Any]:
        try:
            views = [from_array(array, dtype) for array, dtype in zip(arrays, dtypes, strict=True)]
            if call.consumes:  # TensorFlow's memory: it is not this function's to write into
                views = [view.clone() for view in views]
            found = exchange(call, names, views)
            return [to_array(result, dtype) for result, dtype in zip(found, types, strict=True)]
        except Exception as problem:
            failures.note(problem)
            raise

    found = tf.numpy_function(run, list(tensors), list(types), name=call.title)
    return list(found) if isinstance(found, (list, tuple)) else [found]


def _refuse_xla(call: OperationCall) -> None:
    from tensorflow.python.ops import control_flow_util

    if control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise ValueError(_IN_XLA.format(title=call.title))


# An operation that is waited for where it is called: outside graphs, and in a Python function inside one.


def exchange(call: OperationCall, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the results of an operation on views of TensorFlow's memory, which stay as they are."""
    if call.layout:
        layouts.compare_now(names[0], call.layout, call.set_number)
    in_place = call.keeps_shape and (call.consumes or call.kind == "broadcast")
    if in_place and not call.consumes:
        tensors = [_own(call, tensor) for tensor in tensors]
    requests = call.requests(names, tensors, in_place=in_place)
    if call.part is not None:
        call.part.submitted()
    try:
        tickets = begin(requests)
        found = wait(tickets)
    except HorovodMismatchError as problem:
        if not call.layout:
            raise
        raise layouts.explained(problem, names[0], call.layout) from problem
    if call.part is not None:
        call.part.arrived(tickets[0])
    return call.results(found)


def run_now(call: OperationCall, tensors: Sequence[Any]) -> list[Any]:
    """Return the results of an operation on eager tensors."""
    with translated(call.title):
        views = [from_eager(tensor) for tensor in tensors]
        return [to_eager(result) for result in exchange(call, call.names(len(views)), views)]


def _own(call: OperationCall, tensor: torch.Tensor) -> torch.Tensor:
    if call.kind == "broadcast" and call.root != basics.rank():
        return torch.empty_like(tensor)
    return tensor.clone()


# Run an operation where it is called: at once, or in the graph that is being made; with its gradient.


Gradient = Callable[..., Any]
"""Takes the gradients of the results, returns those of the tensors."""


def run(
    call: OperationCall,
    tensors: Sequence[Any],
    gradient: Gradient,
    *,
    types: Sequence[Any] | None = None,
    shapes: Sequence[Any] | None = None,
) -> list[Any]:
    """Return the results of an operation. Their `types` and `shapes`: by default those of the tensors."""
    types = [tensor.dtype for tensor in tensors] if types is None else types
    shapes = [tensor.shape for tensor in tensors] if shapes is None else shapes

    def begin(given: Sequence[Any]) -> list[Any]:
        if tf.executing_eagerly():
            return run_now(call, given)
        return put_in_graph(call, given, types, shapes)

    if tf.executing_eagerly() and not _is_recorded():
        return begin(tensors)

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def differentiable(*given: Any) -> tuple[list[Any], Gradient]:
        return begin(given), gradient

    return list(differentiable(*tensors))


def run_plain(call: OperationCall, tensors: Sequence[Any]) -> list[Any]:
    """Return the results of an operation without a gradient, of the types and shapes of the tensors."""
    if tf.executing_eagerly():
        return run_now(call, tensors)
    return put_in_graph(call, tensors, [each.dtype for each in tensors], [each.shape for each in tensors])


def _is_recorded() -> bool:
    """Return whether a tape may watch: without one, the tenfold cost of a gradient is saved."""
    try:
        from tensorflow.python.eager.record import could_possibly_record
    except ImportError:  # a private place of TensorFlow: it may move
        return True
    return bool(could_possibly_record())


# The thread that serves operations inside graphs: it submits them to the engine, and completes them.
#
# A kernel of TensorFlow queues its operation and returns, so no thread of TensorFlow waits for another rank, and
# any number of operations are on their way at once, in any order. This thread waits in the library, without the
# interpreter's lock, for operations that begin and for results. The engine's threads only say that there is one.


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
