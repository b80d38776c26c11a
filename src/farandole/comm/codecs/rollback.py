"""A codec's state that can go back to what it was before the last exchange.

[Note: two residuals by turns] A step may be dropped after its buckets were sent: some rank had a gradient that
is not finite, and the others learn of it only when all is over. Then the state must be what it was, bit for bit.
It cannot be computed back: asked - own is rounded, and the gradient was overwritten by the mean. So the next
residual is written beside the last one, and the two take turns. That costs memory, four bytes an element, and no
time; a copy before each exchange would cost both. Everything else in a state is replaced by the codecs, never
written into, so that to remember it is to keep the reference.
"""

from __future__ import annotations

from typing import Any

import torch

from ..messages.message import State


class RollbackState(dict[str, Any]):
    """A `State` with room for the next residual. See [Note: two residuals by turns]."""

    def __init__(self, residual: torch.Tensor | None = None) -> None:
        super().__init__({} if residual is None else {"residual": residual})
        self.room: torch.Tensor | None = None
        """Where the next residual is written; None: in the place of the last one."""
        self._before: dict[str, Any] | None = None

    def begin(self, room: torch.Tensor | None, *, copies: bool) -> None:
        """Remember what is kept now. `copies`: for a codec that may write into its tensors."""
        self.room = room
        self._before = {
            key: value.clone() if copies and isinstance(value, torch.Tensor) and key != "residual" else value
            for key, value in self.items()
        }

    def go_back(self) -> None:
        """Be what `begin` remembered."""
        if self._before is not None:
            self.clear()
            self.update(self._before)


def room_for_residual(state: State) -> torch.Tensor:
    """Return where the next residual is written, to become ``state["residual"]``; there is a last one."""
    room: torch.Tensor | None = getattr(state, "room", None)
    last: torch.Tensor = state["residual"]
    return last if room is None else room


def put_residual(state: State, asked: torch.Tensor, own: torch.Tensor) -> None:
    """Keep ``asked - own`` as the residual."""
    state["residual"] = torch.sub(asked, own, out=room_for_residual(state))
