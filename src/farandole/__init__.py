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
from typing import TYPE_CHECKING, Any

from .version import VERSION as __version__

if TYPE_CHECKING:
    from .comm.world.world import World, world
    from .core.vocabulary.errors import (
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
    from .core.vocabulary.spec import Plan
    from .parallel.apply import distribute
    from .parallel.exchange_state import exchange_state, load_exchange_state
    from .parallel.optim.one_bit_adam import OneBitAdam
    from .train.data.loader import shard
    from .train.phase import phase
    from .train.preemption import preempted
    from .train.progress import log
    from .train.record import record
    from .train.reduce import mean
    from .train.session import init, shutdown
    from .train.verify.verify import verify

_HOME = {
    "OneBitAdam": "parallel.optim.one_bit_adam",
    "World": "comm.world.world",
    "init": "train.session",
    "shutdown": "train.session",
    "world": "comm.world.world",
    "Plan": "core.vocabulary.spec",
    "CommError": "core.vocabulary.errors",
    "ConfigError": "core.vocabulary.errors",
    "FarandoleError": "core.vocabulary.errors",
    "LaunchError": "core.vocabulary.errors",
    "Mismatch": "core.vocabulary.errors",
    "PeerLost": "core.vocabulary.errors",
    "PlanError": "core.vocabulary.errors",
    "Stalled": "core.vocabulary.errors",
    "VerificationFailed": "core.vocabulary.errors",
    "distribute": "parallel.apply",
    "exchange_state": "parallel.exchange_state",
    "load_exchange_state": "parallel.exchange_state",
    "shard": "train.data.loader",
    "log": "train.progress",
    "phase": "train.phase",
    "preempted": "train.preemption",
    "mean": "train.reduce",
    "record": "train.record",
    "verify": "train.verify.verify",
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
    "phase",
    "preempted",
    "record",
    "shard",
    "shutdown",
    "verify",
    "world",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'farandole' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"farandole.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
