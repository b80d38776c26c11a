"""A checkpoint in torch's own formats: a file of `torch.save`, or a directory of torch.distributed.checkpoint."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed import checkpoint as dcp

from ....checkpoint.directory import read_manifest, step_directory
from ....checkpoint.encoding import decode
from ....core.vocabulary.errors import CheckpointError
from ..reading import read_tensors
from ..values import restorer, tensor_names


def convert_checkpoint(directory: Path, step: int, output: Path, *, to: Literal["torch", "dcp"]) -> None:
    """Write modules, optimizers and the step of a checkpoint in a format of torch, by one process.

    What each rank has of its own (loaders, schedulers, generators of random numbers, residuals) is left out.

    Args:
        directory: of the run's checkpoints.
        step: which one.
        output: file or directory to write; it must not be there.
        to: ``torch``: a file that ``torch.load(..., weights_only=True)`` reads, with state dicts as `Module` and
            `Optimizer` have them; ``dcp``: a directory, with optimizers' states by names of parameters, as
            `torch.distributed.checkpoint.state_dict.get_state_dict` has them.

    Raises:
        CheckpointError: the checkpoint is damaged, or `output` cannot be written or is there already.
    """
    if output.exists():
        raise CheckpointError(f"{output} is there already", is_input=True, remedy="remove it, or name another")
    state = read_whole(directory, step, numbered=to == "torch")
    aside = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        if to == "torch":
            torch.save(state, aside)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # that it saves in a single process
                dcp.save(state, checkpoint_id=aside, no_dist=True)
        aside.rename(output)
    except (OSError, RuntimeError, dcp.CheckpointException) as problem:
        raise CheckpointError(f"cannot write {output}: {problem}", is_input=True) from None
    finally:
        with suppress(OSError):
            aside.unlink()
        shutil.rmtree(aside, ignore_errors=True)


def read_whole(directory: Path, step: int, *, numbered: bool) -> dict[str, Any]:
    """Return modules' and optimizers' states by their names in the checkpoint, and ``step``.

    Args:
        directory: of the run's checkpoints.
        step: which one.
        numbered: whether parameters of optimizers have numbers, as in ``Optimizer.state_dict``; else names.

    Raises:
        CheckpointError: a file is missing, truncated or altered.
    """
    manifest = read_manifest(directory, step)
    wanted = {name: manifest.tensors[name] for name in set(tensor_names(manifest.shared))}
    references = {
        name: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype)) for name, entry in wanted.items()
    }
    tensors = read_tensors(step_directory(directory, step), manifest, references)
    shared = decode(manifest.shared, restorer(tensors))
    optimizers = {name: _optimizer(each, numbered) for name, each in shared["optimizers"].items()}
    return {**shared["modules"], **optimizers, "step": step}


def _optimizer(saved: Mapping[str, Any], numbered: bool) -> dict[str, Any]:
    names = [name for group in saved["groups"] for name in group["params"]]
    key: dict[str, int | str] = (
        {name: index for index, name in enumerate(names)}
        if numbered
        else {name: name.removeprefix("model/") for name in names}
    )
    groups = [{**group, "params": [key[name] for name in group["params"]]} for group in saved["groups"]]
    state = {key[name]: value for name, value in saved["state"].items()}
    return {"state": {**state, **saved["other_state"]}, "param_groups": groups, **saved["rest"]}
