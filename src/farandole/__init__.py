"""Train models on many machines as fast as the network allows, and say why when it can't.

::

    import farandole as fd

    fd.init()
    model, optimizer = fd.distribute(model, optimizer)
    loader = fd.shard(loader)

and ``farandole run -np 4 -- python train.py``. Names are loaded when first used: importing this
package imports no torch.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .version import VERSION as __version__

if TYPE_CHECKING:
    from .comm.world import World, world
    from .core.errors import (
        CommError,
        ConfigError,
        FarandoleError,
        LaunchError,
        Mismatch,
        PeerLost,
        PlanError,
        Stalled,
        VerificationFailed,
    )
    from .core.spec import Plan
    from .parallel.apply import distribute
    from .parallel.exchange_state import exchange_state, load_exchange_state
    from .parallel.one_bit_adam import OneBitAdam
    from .train.loader import shard
    from .train.observe import observe
    from .train.phase import phase
    from .train.preemption import preempted
    from .train.progress import log
    from .train.reduce import mean
    from .train.session import init, shutdown
    from .train.verify import verify

_HOME = {
    "OneBitAdam": "parallel.one_bit_adam",
    "World": "comm.world",
    "init": "train.session",
    "shutdown": "train.session",
    "world": "comm.world",
    "Plan": "core.spec",
    "CommError": "core.errors",
    "ConfigError": "core.errors",
    "FarandoleError": "core.errors",
    "LaunchError": "core.errors",
    "Mismatch": "core.errors",
    "PeerLost": "core.errors",
    "PlanError": "core.errors",
    "Stalled": "core.errors",
    "VerificationFailed": "core.errors",
    "distribute": "parallel.apply",
    "exchange_state": "parallel.exchange_state",
    "load_exchange_state": "parallel.exchange_state",
    "shard": "train.loader",
    "log": "train.progress",
    "phase": "train.phase",
    "preempted": "train.preemption",
    "mean": "train.reduce",
    "verify": "train.verify",
}

__all__ = [
    "CommError",
    "ConfigError",
    "FarandoleError",
    "LaunchError",
    "Mismatch",
    "OneBitAdam",
    "PeerLost",
    "Plan",
    "PlanError",
    "Stalled",
    "VerificationFailed",
    "World",
    "__version__",
    "distribute",
    "exchange_state",
    "init",
    "load_exchange_state",
    "log",
    "mean",
    "observe",
    "phase",
    "preempted",
    "shard",
    "shutdown",
    "verify",
    "world",
]


class _Observe(ModuleType):
    """`fd.observe` is a package, and what its function does is asked for by its name: so it can be called."""

    def __call__(self, *arguments: Any, **keywords: Any) -> None:
        """See `farandole.train.observe.observe`."""
        importlib.import_module("farandole.train.observe").observe(*arguments, **keywords)


class _Package(ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        if name == "observe" and isinstance(value, ModuleType):
            value.__class__ = _Observe
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name == "observe":
        return importlib.import_module("farandole.observe")
    if name not in _HOME:
        raise AttributeError(f"module 'farandole' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"farandole.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
