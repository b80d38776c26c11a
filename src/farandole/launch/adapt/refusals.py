"""Why a script cannot be changed: what distributes its training already, or hides its loop."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from ...core.vocabulary.errors import ConfigError
from .roles import at
from .script import Script

_WRAPPERS = {
    "DistributedDataParallel": "DistributedDataParallel",
    "FullyShardedDataParallel": "FullyShardedDataParallel",
    "fully_shard": "fully_shard",
    "DataParallel": "nn.DataParallel",
    "DistributedSampler": "a DistributedSampler",
    "init_process_group": "torch.distributed.init_process_group",
}
_FRAMEWORKS = {
    "lightning": ("Lightning's Trainer", "Trainer$"),
    "pytorch_lightning": ("Lightning's Trainer", "Trainer$"),
    "transformers": ("transformers' Trainer", "Trainer$"),
    "trl": ("trl's trainer", "Trainer$"),
    "accelerate": ("accelerate's Accelerator", "Accelerator$"),
    "deepspeed": ("DeepSpeed", "initialize$"),
    "fastai": ("fastai's Learner", "earner$"),
    "ignite": ("Ignite's engine", "^Engine$|^create_supervised_trainer$"),
    "skorch": ("skorch's estimator", "^NeuralNet"),
}
"""Package -> what holds the loop, and the name of the class or function that does."""

_BY_HAND = {
    "ignite": "model, optimizer = fd.distribute(model, optimizer), and trainer.run(fd.shard(loader))",
    "skorch": "fd.distribute in initialize_optimizer and fd.shard in get_iterator of a subclass",
}
"""What to write where the three lines have their place, though not that of a loop."""

_INTEGRATIONS = Path(__file__).parents[2] / "integrations"


def refuse_foreign(script: Script) -> None:
    """Raise `ConfigError` for a script that something distributes already, or whose loop is elsewhere."""
    roots = {full.partition(".")[0] for full in script.imports.values()}
    if "farandole" in roots:
        raise ConfigError(
            f"{script.path} uses farandole already",
            remedy=f"check it: farandole verify -np 2 -- python {script.path}",
        )
    if "horovod" in roots:
        raise ConfigError(
            f"{script.path} is written for Horovod",
            remedy=f"it runs unchanged: farandole run --as-horovod -np 2 -- python {script.path}",
        )
    for call in script.calls():
        name = script.full_name(call.func)
        last = name.rpartition(".")[2]
        if last in _WRAPPERS and last not in script.classes and last not in script.functions:
            raise ConfigError(
                f"{at(script, call)}: {_WRAPPERS[last]} distributes this training already",
                remedy="take it out first; farandole.distribute and farandole.shard replace it",
            )
        holder, pattern = _FRAMEWORKS.get(name.partition(".")[0], ("", ""))
        if holder and re.search(pattern, last):
            raise ConfigError(f"{at(script, call)}: the loop is inside {holder}", remedy=_remedy(name))
    for owner in script.classes.values():
        for base in owner.bases:
            name = script.full_name(base)
            holder, pattern = _FRAMEWORKS.get(name.partition(".")[0], ("", ""))
            if holder and re.search(f"{pattern}|^LightningModule$", name.rpartition(".")[2]):
                raise ConfigError(f"{at(script, owner)}: the loop is inside {holder}", remedy=_remedy(name))
    has_backward = any(
        isinstance(node, ast.Attribute) and node.attr == "backward" for node in ast.walk(script.tree)
    )
    if not (has_backward and "torch" in roots):
        _refuse_tensorflow(script)
    if "torch" not in roots:
        raise ConfigError(f"{script.path} does not import torch", remedy="give the script that trains")
    if not has_backward:
        raise ConfigError(
            f"{script.path} has no training loop: nothing in it calls backward()",
            remedy="give the file that has the loop, the model's optimizer and the loader",
        )


def _refuse_tensorflow(script: Script) -> None:
    """Raise `ConfigError` for a script that trains with TensorFlow or Keras."""
    parts = {part for full in script.imports.values() for part in full.split(".")[:2]}
    parts |= {node.attr for node in ast.walk(script.tree) if isinstance(node, ast.Attribute)} & {"keras"}
    library = "Keras" if parts & {"keras", "tf_keras"} else "TensorFlow"
    if library == "Keras" or "tensorflow" in parts:
        raise ConfigError(
            f"{script.path} trains with {library}, and init changes scripts for PyTorch only",
            remedy="add hvd.init(), hvd.DistributedOptimizer, the callbacks and farandole.keras.shard by hand: "
            "docs/horovod-tensorflow.md shows these lines",
        )


def _remedy(name: str) -> str:
    package = {"pytorch_lightning": "lightning", "trl": "transformers"}.get(
        name.partition(".")[0], name.partition(".")[0]
    )
    if package in _BY_HAND:
        return f"add the lines by hand: {_BY_HAND[package]}; see docs/integrations.md"
    if (_INTEGRATIONS / f"{package}.py").exists():
        return f"it has its own way to several processes; see farandole.integrations.{package}"
    return "it has its own way to several processes; farandole.record(model, optimizer) observes them"
