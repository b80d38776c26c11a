"""Whether an optimizer's step may be taken in parts, some parameters after the others.

torch's own optimizers keep everything by parameter, and their `step` does nothing else: called for each part of
the parameters it does what one call does. A subclass may count its calls, or look at
all gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import optim
from torch.optim import Optimizer

KNOWN = (
    optim.ASGD, optim.Adadelta, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam,
    optim.RMSprop, optim.Rprop, optim.SGD,
)  # fmt: skip
_OURS = __name__.partition(".")[0]


def step_without_hooks(optimizer: Optimizer, begin: int) -> Callable[[Optimizer], Any] | None:
    """Return the step of `optimizer` that may be called for parts; None if it is to be called once.

    `begin`: number of the pre-hook that leaves a part of the parameters in the groups. Hooks of the script that
    come after it, and read the groups, would miss the others: then there is one call.
    """
    if type(optimizer) not in KNOWN:
        return None
    inner = getattr(type(optimizer).step, "__wrapped__", None)
    if inner is None or inner.__module__ != type(optimizer).__module__:
        return None  # another library has put its own in its place
    numbers = list(optimizer._optimizer_step_pre_hooks)
    later = [optimizer._optimizer_step_pre_hooks[i] for i in numbers[numbers.index(begin) + 1 :]]
    if any(type(hook).__module__.partition(".")[0] != _OURS for hook in later):
        return None
    found: Callable[[Optimizer], Any] = inner
    return found
