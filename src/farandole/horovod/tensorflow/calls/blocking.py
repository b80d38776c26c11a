"""An operation that is waited for where it is called: outside graphs, and in a Python function inside one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...common.basics import basics
from ...common.exceptions import HorovodMismatchError
from ...common.operations import begin, wait
from ...exchange.layouts import layouts
from ..errors import translated
from .call import OperationCall
from .tensors import from_eager, to_eager


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
