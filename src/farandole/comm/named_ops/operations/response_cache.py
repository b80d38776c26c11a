"""Short numbers for what a rank asks for again and again.

[Note: numbers] The first time a rank announces a signature it tells its peers a number for it; then it says only
the number. Each rank has its own numbers, so there is nothing to agree on. When they run out, the one that was
used least recently is given to another signature, in the same stream as everything else: a reader of the stream
in order always knows what a number means. An announcement that has arrived keeps its signature, whatever the
number means later.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field

from ..channel.channel import NUMBER_MASK
from .request import Request
from .signature import Signature


@dataclass(eq=False, slots=True)
class CacheEntry:
    """A signature that this rank has used."""

    number: int
    signature: Signature
    small: bool
    """The data travels along."""
    is_told: bool = False
    """The peers know the number."""
    agreed: tuple[Signature, ...] = ()
    """What the members said when they last agreed: saying the same they agree again."""
    key: tuple[int, str] = field(init=False)
    """The signature's."""

    def __post_init__(self) -> None:
        self.key = self.signature.key


class ResponseCache:
    """This rank's numbers."""

    def __init__(self, capacity: int) -> None:
        self._capacity = min(max(1, capacity), NUMBER_MASK)
        self._known: OrderedDict[Hashable, CacheEntry] = OrderedDict()

    def find(self, about: Hashable) -> CacheEntry | None:
        """Return what was made for `about`, if it is still known."""
        known = self._known.get(about)
        if known is not None:
            self._known.move_to_end(about)
        return known

    def make(self, about: Hashable, signature: Signature, *, small: bool) -> CacheEntry:
        """Return a number for a signature; the least recently used one, if there are no more."""
        known = self.find(about)
        if known is not None:
            return known
        number = len(self._known)
        if number >= self._capacity:
            _, oldest = self._known.popitem(last=False)
            number = oldest.number
        known = self._known[about] = CacheEntry(number, signature, small)
        return known


def cache_key(request: Request, serial: int, group: tuple[str, ...]) -> Hashable:
    """Return what tells requests apart whose signatures differ, without the work of making them."""
    tensor = request.tensor
    if tensor is None:
        return (request.name, request.kind, serial, group)
    return (
        request.name, request.kind, serial, tensor.dtype, tensor.shape, tensor.device.type, request.reduction,
        request.prescale, request.postscale, request.root, request.splits, request.codec, group,
        request.chosen_with,
    )  # fmt: skip
