"""Ranks that train while nothing that we know of exchanges their gradients: said at the first step and at the end.

`fd.init` alone makes a world; a model trains in it only after `fd.distribute`, by Horovod's names, or wrapped by
torch. Without that there are as many different models as ranks. What a loop adds up by itself cannot be seen
from here, so this is a note and no error. A script that calls `fd.distribute` somewhere is told at the end alone.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...comm.world.world import World
from ...core.vocabulary.text import write_notice

_WRAPPERS = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}
_HOROVOD = "farandole.horovod.common.basics"


class UndistributedWatch:
    """Looks at the first step of any optimizer of this process."""

    def __init__(self, here: World) -> None:
        self._here = here
        self._forgotten = self._has_looked = False
        self._hook = register_optimizer_step_pre_hook(self._look)

    def close(self) -> None:
        """Look no more; to be called when the world is left."""
        self._hook.remove()
        if self._forgotten and not self._here.session.steps.has_begun:
            self._say("at the end: ")

    def forget(self) -> None:
        """In a forked child: look no more, and say nothing."""
        self._hook.remove()

    def _look(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        has_looked, self._has_looked = self._has_looked, True
        if has_looked:
            return
        # Not at once: torch is going through all hooks of steps, and other ones may follow.
        self._here.session.let_go_later(self._hook.remove)
        if self._here.session.steps.has_begun or _has_horovod() or _is_wrapped():
            return
        self._forgotten = True
        if not _will_distribute():
            self._say("")

    def _say(self, when: str) -> None:
        if self._here.rank == 0:
            write_notice(
                f"{when}no model was distributed, so each of the {self._here.size} ranks trains one of "
                "its own, unless the script exchanges gradients by itself: call farandole.distribute(model, "
                "optimizer)"
            )
            sys.stderr.flush()


def _will_distribute() -> bool:
    """Return whether the script's file calls it: what trains before may be a model to compare with."""
    try:
        return "distribute(" in Path(sys.modules["__main__"].__file__ or "").read_text(encoding="utf-8")
    except (AttributeError, KeyError, OSError, ValueError):  # no file: a notebook, -c
        return False


def _has_horovod() -> bool:
    """Return whether the script calls Horovod's names, whose operations exchange what they are given."""
    module = sys.modules.get(_HOROVOD)
    return module is not None and bool(module.basics.is_initialized())


def _is_wrapped() -> bool:
    """Return whether torch's own wrappers exchange the gradients of some model."""
    kinds = {type(each) for each in gc.get_objects()}
    return any(base.__name__ in _WRAPPERS for kind in kinds for base in kind.__mro__)
