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

from ....core.vocabulary.codec_spec import CodecSpec
from ...codecs.finite import forget_overflowed
from ...codecs.registry import CodecInstance, make_codec
from ...codecs.rollback import RollbackState
from ..operations.operation import Operation
from ..operations.request import is_unnamed

MOST_NAMES = 1024
"""Names with a state, per group of ranks."""
_log = logging.getLogger("farandole")
Circle = tuple[int, tuple[int, ...]]
"""A process set, and those of its ranks that take part."""


class CodecStates:
    """A codec, and what it keeps for one name: a state for each segment."""

    def __init__(self, codec: str, shape: tuple[int, ...]) -> None:
        self.codec, self.shape = codec, shape
        self.made: CodecInstance = make_codec(CodecSpec.parse(codec))
        self._states: dict[int, RollbackState] = {}

    def begin(self, index: int) -> tuple[RollbackState, bool]:
        """Return the state of a segment, which can go back to what it is now, and whether it is sound.

        One that is not, because it overflowed, begins anew. See [Note: sums that overflow] in `codecs.finite`.
        """
        state = self._states.setdefault(index, RollbackState())
        is_sound = not (self.made.leaves_out and forget_overflowed(state))
        state.begin(state.room, copies=self.made.spec.is_own)
        return state, is_sound


class StatesByName:
    """The states of all operations of this rank."""

    def __init__(self) -> None:
        self._circles: dict[Circle, OrderedDict[str, CodecStates]] = {}
        self._warned = False

    def of(self, operation: Operation) -> CodecStates:
        """Return what is kept for the operation's name; made anew when its codec or its shape is another."""
        process_set, name = operation.signature.key
        codec, shape = operation.signature.codec, operation.signature.shape
        if is_unnamed(name):
            return CodecStates(codec, shape)
        names = self._circles.setdefault((process_set, operation.present), OrderedDict())
        kept = names.get(name)
        if kept is None or (kept.codec, kept.shape) != (codec, shape):
            kept = names[name] = CodecStates(codec, shape)
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
        return kept

    def forget(self, process_set: int) -> None:
        """Drop what is kept for a removed set."""
        self._circles = {circle: names for circle, names in self._circles.items() if circle[0] != process_set}
