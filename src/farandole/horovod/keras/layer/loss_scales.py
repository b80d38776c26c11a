"""Whether a distributed optimizer is inside one that scales the loss.

[Note: loss scales] An optimizer that scales the loss looks whether *its own* gradients are finite, and applies the
one inside it only then. Were the exchange in there, a rank with an infinity would skip what the others wait in. So
ours is outside: the infinity reaches all ranks, and all skip.
"""

from __future__ import annotations

import sys
from typing import Any

_WRAPPED_INSIDE = (
    "DistributedOptimizer inside a LossScaleOptimizer: a rank whose gradients are not finite would skip the "
    "exchange that the other ranks wait in. Wrap from outside: "
    "hvd.DistributedOptimizer({module}.LossScaleOptimizer(optimizer))"
)


def scales_loss(optimizer: Any) -> bool:
    """Return whether an optimizer of either Keras is one that scales the loss."""
    return any(each.__name__.startswith("LossScaleOptimizer") for each in type(optimizer).__mro__)


def refuse_loss_scale_around(optimizer: Any) -> None:
    """Raise where a LossScaleOptimizer calls a distributed one inside it, which calls this. See the note above."""
    frame = sys._getframe(2)
    for _ in range(3):  # a wrapper or two may lie between
        caller = frame.f_locals.get("self")
        if caller is not None and caller is not optimizer and scales_loss(caller):
            legacy = type(caller).__module__.startswith("tf_keras")
            module = "tf_keras.mixed_precision" if legacy else "keras.optimizers"
            raise ValueError(_WRAPPED_INSIDE.format(module=module))
        if frame.f_back is None:
            return
        frame = frame.f_back
