"""Train models on many machines as fast as the network allows, and say why when it can't.

::

    import farandole as fd

    fd.init()
    model, optimizer = fd.distribute(model, optimizer)
    loader = fd.shard(loader)

and ``farandole run -np 4 -- python train.py``. Names are loaded when first used: importing this
package imports no torch.
"""

import sys as _sys
import typing as _typing  # underscores and no __future__ import: completion shows public names only

from .version import VERSION as __version__

if _typing.TYPE_CHECKING:
    from .comm.world.world import World, world
    from .core.vocabulary.errors import (
        CheckpointError,
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
    from .integrations.notebook import notebook
    from .parallel.context.apply import context_gather, context_positions, context_shard
    from .parallel.exchange_state import exchange_state, load_exchange_state
    from .parallel.expert.layer import MixtureOfExperts, router_loss
    from .parallel.frozen_model import freeze, low_rank_adapters
    from .parallel.optim.one_bit_adam import OneBitAdam
    from .parallel.step import drain, evaluate, step, weight
    from .sync.rows.links import RowCopy
    from .sync.rows.table import RowTable
    from .train.analysis.find_micro_batch import find_micro_batch
    from .train.analysis.find_plan import find_plan
    from .train.checkpoint.checkpointer import Checkpointer, load, save
    from .train.chunked_cross_entropy import chunked_cross_entropy
    from .train.data.loader import shard
    from .train.distribute import averaged, distribute
    from .train.gather import gather
    from .train.loop import (
        accumulate,
        barrier,
        log,
        main_first,
        mean,
        phase,
        print,  # noqa: A004 - the field's name
        seed,
    )
    from .train.noise_scale import NoiseScale, noise_scale
    from .train.preemption import preempted
    from .train.prefetch import prefetch
    from .train.record import record
    from .train.session import init, shutdown
    from .train.verify.verify import verify

if _sys.platform in ("darwin", "win32", "cygwin"):
    raise ImportError(
        f"farandole runs on Linux only, and this is {_sys.platform}: use Linux, a Linux container or WSL2"
    )

_HOME = {
    "MixtureOfExperts": "parallel.expert.layer",
    "router_loss": "parallel.expert.layer",
    "OneBitAdam": "parallel.optim.one_bit_adam",
    "RowCopy": "sync.rows.links",
    "RowTable": "sync.rows.table",
    "World": "comm.world.world",
    "init": "train.session",
    "shutdown": "train.session",
    "world": "comm.world.world",
    "Plan": "core.vocabulary.spec",
    "CheckpointError": "core.vocabulary.errors",
    "Checkpointer": "train.checkpoint.checkpointer",
    "CommError": "core.vocabulary.errors",
    "ConfigError": "core.vocabulary.errors",
    "FarandoleError": "core.vocabulary.errors",
    "LaunchError": "core.vocabulary.errors",
    "Mismatch": "core.vocabulary.errors",
    "PeerLost": "core.vocabulary.errors",
    "PlanError": "core.vocabulary.errors",
    "Stalled": "core.vocabulary.errors",
    "VerificationFailed": "core.vocabulary.errors",
    "accumulate": "train.loop",
    "barrier": "train.loop",
    "chunked_cross_entropy": "train.chunked_cross_entropy",
    "context_gather": "parallel.context.apply",
    "context_positions": "parallel.context.apply",
    "context_shard": "parallel.context.apply",
    "averaged": "train.distribute",
    "distribute": "train.distribute",
    "find_micro_batch": "train.analysis.find_micro_batch",
    "find_plan": "train.analysis.find_plan",
    "freeze": "parallel.frozen_model",
    "gather": "train.gather",
    "exchange_state": "parallel.exchange_state",
    "load_exchange_state": "parallel.exchange_state",
    "shard": "train.data.loader",
    "load": "train.checkpoint.checkpointer",
    "save": "train.checkpoint.checkpointer",
    "log": "train.loop",
    "low_rank_adapters": "parallel.frozen_model",
    "main_first": "train.loop",
    "phase": "train.loop",
    "preempted": "train.preemption",
    "prefetch": "train.prefetch",
    "print": "train.loop",
    "mean": "train.loop",
    "NoiseScale": "train.noise_scale",
    "noise_scale": "train.noise_scale",
    "notebook": "integrations.notebook",
    "record": "train.record",
    "seed": "train.loop",
    "verify": "train.verify.verify",
    "drain": "parallel.step",
    "evaluate": "parallel.step",
    "step": "parallel.step",
    "weight": "parallel.step",
}

__all__ = [
    "CheckpointError",
    "Checkpointer",
    "CommError",
    "ConfigError",
    "FarandoleError",
    "LaunchError",
    "Mismatch",
    "MixtureOfExperts",
    "NoiseScale",
    "OneBitAdam",
    "PeerLost",
    "Plan",
    "PlanError",
    "RowCopy",
    "RowTable",
    "Stalled",
    "VerificationFailed",
    "World",
    "__version__",
    "accumulate",
    "averaged",
    "barrier",
    "chunked_cross_entropy",
    "context_gather",
    "context_positions",
    "context_shard",
    "distribute",
    "drain",
    "evaluate",
    "exchange_state",
    "find_micro_batch",
    "find_plan",
    "freeze",
    "gather",
    "init",
    "load",
    "load_exchange_state",
    "log",
    "low_rank_adapters",
    "main_first",
    "mean",
    "noise_scale",
    "notebook",
    "phase",
    "preempted",
    "prefetch",
    "print",
    "record",
    "router_loss",
    "save",
    "seed",
    "shard",
    "shutdown",
    "step",
    "verify",
    "weight",
    "world",
]


def __getattr__(name: str) -> _typing.Any:
    if name not in _HOME:
        raise AttributeError(f"module 'farandole' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f"farandole.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
