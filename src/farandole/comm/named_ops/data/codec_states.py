"""What the codecs of named operations keep between two of the same name.

[Note: the same states on all ranks] Counters in a state draw alike on all ranks (`randomk`), and factors are
the same (`powersgd`), so a state is made, kept and dropped by all ranks of an operation at once. They are
kept by who takes part: the ranks of one circle see the same operations in the same order, and no others, whatever
else each of them runs in other sets, or ran while some had joined.

An operation without a name has no next one, so nothing is kept for it. If names come once each, as from a
loop that counts them up, no more than `MOST_NAMES` are kept: those used last.
"""

from __future__ import annotations

import logging
from collections import OrderedDict

import torch

from ....core.vocabulary.codec_spec import CodecSpec
from ...codecs.registry import make_codec
from ...messages.message import GroupRank
from ...sessions.units import UnitStates
from ..operations.operation import Operation
from ..operations.request import is_unnamed

MOST_NAMES = 1024
"""Names with a state, per group of ranks."""
_log = logging.getLogger("farandole")
_Kind = tuple[str, tuple[int, ...], str]
"""A codec, a shape and a place."""
Circle = tuple[int, tuple[int, ...]]
"""A process set, and those of its ranks that take part."""


class StatesByName:
    """The states of all operations of this rank."""

    def __init__(self) -> None:
        self._circles: dict[Circle, OrderedDict[str, tuple[_Kind, UnitStates]]] = {}
        self._warned = False

    def of(self, operation: Operation, codec: str, group: GroupRank, device: torch.device) -> UnitStates:
        """Return what is kept for the operation's name.

        It is made anew when the codec, the shape or `device`, where tensors travel, is another.
        """
        process_set, name = operation.signature.key
        shape = operation.signature.shape
        if is_unnamed(name):
            return UnitStates(make_codec(CodecSpec.parse(codec)), group)
        names = self._circles.setdefault((process_set, operation.present), OrderedDict())
        kept = names.get(name)
        kind = codec, shape, str(device)
        if kept is None or kept[0] != kind:
            kept = names[name] = (kind, UnitStates(make_codec(CodecSpec.parse(codec)), group))
        names.move_to_end(name)
        if len(names) > MOST_NAMES:
            oldest, _ = names.popitem(last=False)
            if not self._warned:
                self._warned = True
                _log.warning(
                    "operations of more than %d names used codecs: the residual of %r, which was "
                    "not used for longest, is dropped; use the same names in every step, or none",
                    MOST_NAMES,
                    oldest,
                )
        return kept[1]

    def forget(self, process_set: int) -> None:
        """Drop what is kept for a removed set."""
        self._circles = {circle: names for circle, names in self._circles.items() if circle[0] != process_set}
