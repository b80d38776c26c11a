"""The contract of a codec: pure, with a state that goes in and comes out.

[Note: conservation] A codec returns ``Encoded(mean, own, state)``. `own` is what this rank contributed, in units
of its own gradient: the mean of `own` over the ranks is `mean`, to float rounding, whatever was rounded before.
So ``asked - own`` is all that was lost, and `ErrorFeedback` can keep it for the next step, for every codec alike.
Where a rank rounds the *sum* of a piece (the second half of a reduce-scatter + all-gather), that error is `size`
times its own.

[Note: a state is a value] A codec never writes into the state it is given: it returns another one. To drop a step
is to keep the state from before it. A residual is not allocated anew in each step: the next one is written into
the memory of the last but one, which the state carries as `spare`. So a state stays valid until two further ones
have been computed from it, which is what dropping one step needs.

The smallest codec, which sends half of the bytes and keeps nothing::

    class Half:
        def init(self, grad, group):
            return None

        def encode(self, grad, state, group):
            packed = grad.to(torch.bfloat16)
            gathered = yield Message(packed, "all_gather")
            return Encoded(gathered.float().mean(0), packed.float(), state)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

import torch

from ..messages.message import Encoding, GroupRank

S = TypeVar("S")
Leaf = torch.Tensor | bool | int | float


class Codec(Protocol[S]):
    """Encodes one unit of gradients: a 1-D segment of a bucket, or the 2-D gradient of one parameter.

    `S` is its state: a NamedTuple of tensors, numbers and further states, or None. Tensors and numbers of a state
    have field names that are unique in it, by which they are saved.
    """

    def init(self, grad: torch.Tensor, group: GroupRank) -> S:
        """Return the state of the first step. Only shape and device of `grad` (float32) matter."""

    def encode(self, grad: torch.Tensor, state: S, group: GroupRank) -> Encoding:
        """Return the generator that exchanges `grad`. It may overwrite `grad` only where its class says so."""


def leaves(state: Any) -> dict[str, Leaf]:
    """Return the tensors and numbers of a state by field name; `spare` memory is none of them.

    >>> leaves(None)
    {}
    """
    if state is None:
        return {}
    if not hasattr(state, "_fields"):
        return {"state": state}
    found: dict[str, Leaf] = {}
    for name, value in zip(state._fields, state, strict=True):
        if value is None or hasattr(value, "_fields"):
            found |= leaves(value)
        elif name != "spare":
            found[name] = value
    return found


def with_leaves(state: S, new: Mapping[str, Any]) -> S:
    """Return `state` with the leaves in `new` replacing those of the same names."""
    if not hasattr(state, "_fields"):
        return state if state is None else new.get("state", state)
    values = [
        with_leaves(value, new) if value is None or hasattr(value, "_fields") else new.get(name, value)
        for name, value in zip(state._fields, state, strict=True)  # type: ignore[call-overload]
    ]
    return type(state)(*values)
