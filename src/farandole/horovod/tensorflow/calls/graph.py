"""An operation inside a graph: the kernel in C++, or a Python function where there is no compiler.

[Note: runs although unused] TensorFlow leaves out what no result of a function depends on. A rank that alone logs
the mean of all ranks would then wait for the others, which have left it out. So an exchange is an output of its
function, by which it runs on every rank; it still waits for nothing but its inputs.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

from ..errors import failures, refuse_session
from ..installed import tf
from .blocking import exchange
from .call import OperationCall
from .generation import generation
from .library import find_library
from .server import Server
from .tensors import from_array, to_array

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
