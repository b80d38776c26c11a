"""Loading: find the checkpoint, compare it with the training, read and verify, and only then change anything."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor

from ...checkpoint.directory import read_manifest_bytes, saved_steps, step_directory
from ...checkpoint.encoding import decode
from ...checkpoint.manifest import NAME, Manifest, parse_manifest
from ...checkpoint.verify import last_good_step, verify_checkpoint
from ...comm.world.world import World
from ...core.vocabulary.errors import CheckpointError
from ...core.vocabulary.notice import write_notice
from ...parallel.apply import plan_of
from ...parallel.exchange_state import load_exchange_state
from .agreement import together, together_saying
from .optimizers import different_groups, state_reference, write_optimizer
from .random_state import seed_new_rank, write_random_state
from .reading import read_tensors
from .state import Training
from .values import restorer, tensor_names

_MOST_NAMED = 3


def load_training(directory: Path, step: int | None, training: Training, here: World) -> int:
    """Load a checkpoint into a training, on all ranks; nothing is changed unless all of them can.

    Args:
        directory: of the checkpoints.
        step: which; None: the last one.
        training: what to load into. Nothing else is read.
        here: the world.

    Returns:
        The step of the checkpoint.

    Raises:
        CheckpointError: there is none, it is damaged, or it is another model's; on every rank.
    """
    manifest = _find(directory, step, here)
    plan = _Loading(training, manifest, here)
    together(here, "compare", plan.compare)
    folder = step_directory(directory, manifest.step)

    def read() -> dict[str, torch.Tensor]:
        try:
            return read_tensors(folder, manifest, plan.references)
        except CheckpointError as problem:
            raise _with_offer(problem, directory, manifest.step) from None

    buffers = together(here, "read", read)
    together(here, "apply", lambda: plan.apply(buffers))
    return manifest.step


def find_good_step(directory: Path, here: World) -> int | None:
    """Return the last step whose checkpoint is whole, the same on all ranks; None if there is no checkpoint.

    Raises `CheckpointError` on all ranks if there are some, and none is whole.
    """

    def find() -> int | None:
        if here.rank > 0 or not saved_steps(directory):
            return None
        last = saved_steps(directory)[-1]
        try:
            verify_checkpoint(directory, last)
        except CheckpointError as problem:
            good = last_good_step(directory, last)
            if good is None:
                raise
            write_notice(f"ALARM: {problem.message}; loading the last good one, of step {good}")
            return good
        return last

    return cast("int | None", together_saying(here, "find good", find, lambda found: found)[1][0])


def _find(directory: Path, step: int | None, here: World) -> Manifest:
    def choose() -> int:
        steps = saved_steps(directory)
        if not steps:
            what = "no checkpoint in it" if directory.is_dir() else "no such directory"
            raise CheckpointError(f"{directory}: {what}", is_input=True)
        if step is not None and step not in steps:
            listed = ", ".join(map(str, steps[-8:]))
            raise CheckpointError(f"{directory} has no checkpoint of step {step}, only of {listed}", is_input=True)
        return steps[-1] if step is None else step

    _, said = together_saying(here, "find", lambda: choose() if here.rank == 0 else -1, lambda found: found)
    chosen = said[0]

    def read() -> tuple[Manifest, str]:
        data = read_manifest_bytes(directory, chosen)
        try:
            manifest = parse_manifest(data, str(step_directory(directory, chosen) / NAME), chosen)
        except CheckpointError as problem:
            raise _with_offer(problem, directory, chosen) from None
        return manifest, hashlib.sha256(data).hexdigest()

    (manifest, _), digests = together_saying(here, "manifest", read, lambda result: result[1])
    if len(set(digests)) > 1:
        raise CheckpointError(
            f"the hosts see different checkpoints in {directory}",
            is_input=True,
            remedy="give a directory of a file system that all hosts share",
        )
    return manifest


def _with_offer(problem: CheckpointError, directory: Path, step: int) -> CheckpointError:
    good = last_good_step(directory, step)
    offer = "there is no earlier one that is whole" if good is None else f"load the last good one: step={good}"
    return CheckpointError(problem.message, is_input=True, remedy=problem.remedy or offer)


class _Loading:
    """What of a checkpoint belongs where in this training."""

    def __init__(self, training: Training, manifest: Manifest, here: World) -> None:
        self._training, self._manifest, self._here = training, manifest, here
        self._models = {name: dict(get_model_state_dict(each)) for name, each in training.modules.items()}
        self._names = training.names
        self._is_resume = bool(training.optimizers)
        self.references: dict[str, torch.Tensor] = {}
        """By name in the checkpoint: what this rank needs of it."""

    def compare(self) -> None:
        """Fill `references`; raise `CheckpointError` with the first differences from the checkpoint."""
        shared = self._manifest.shared
        differences: list[str] = []
        for name, live in self._models.items():
            differences += self._compare_module(name, live, shared["modules"].get(name))
        if not differences:
            for name, optimizer in self._training.optimizers.items():
                saved = shared["optimizers"].get(name)
                if saved is None:
                    differences.append(f"no {name} in the checkpoint")
                    continue
                found = different_groups(optimizer, self._names, decode(saved, lambda key, body: None))
                differences += [f"{name}: {each}" for each in found]
        for name in self._training.others:
            differences += [] if name in self._manifest.ranks[0]["others"] else [f"no {name} in the checkpoint"]
        if differences:
            listed = "; ".join(differences[:_MOST_NAMED])
            more = len(differences) - _MOST_NAMED
            raise CheckpointError(
                f"the checkpoint of step {self._manifest.step} is of another training: {listed}"
                + (f"; and {more} more" if more > 0 else ""),
                is_input=True,
                remedy="nothing was loaded: give the model and the objects that were saved",
            )
        self._add_optimizer_tensors()
        self._add_own_tensors()

    def apply(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Load `buffers`, which `references` asked for."""
        for name, live in self._models.items():
            self._apply_module(name, live, buffers)
        whole = {name: self._like_reference(name, each) for name, each in buffers.items()}
        restore = restorer(whole)
        for name, optimizer in self._training.optimizers.items():
            saved = decode(self._manifest.shared["optimizers"][name], restore)
            write_optimizer(optimizer, self._names, saved)
        own = self._own()
        for name, each in self._training.others.items():
            each.load_state_dict(decode(own["others"][name], restore))
        if not self._is_resume:
            return
        if plan_of(self._training.model) is not None:
            self._apply_exchange(restore)
        if self._here.rank < self._manifest.world_size:
            write_random_state(decode(own["random"], restore), self._here.device)
        else:
            seed_new_rank(decode(own["random"], restore), self._manifest.step, self._here.rank)

    def _own(self) -> Any:
        """What was this rank's own; a rank that did not exist takes rank 0's."""
        rank = self._here.rank
        return self._manifest.ranks[rank if rank < self._manifest.world_size else 0]

    def _compare_module(self, name: str, live: Mapping[str, Any], saved: Any) -> list[str]:
        if saved is None:
            return [f"no {name} in the checkpoint"]
        differences = []
        for key in (*live, *(key for key in saved if key not in live)):
            here, there = live.get(key), saved.get(key)
            own = f"{str(here.dtype)[6:]}{tuple(here.shape)}" if isinstance(here, torch.Tensor) else "nothing"
            other = "nothing"
            if isinstance(there, dict) and "$tensor" in there:
                entry = self._manifest.tensors[there["$tensor"]]
                other = f"{entry.dtype}{entry.shape}"
                if own == other:
                    self.references[there["$tensor"]] = here  # type: ignore[assignment]
            elif key in saved and key in live:
                continue  # extra state, which is the module's own to judge
            if own != other:
                differences.append(f"{name}.{key} is {other} in the checkpoint and {own} here")
        return differences

    def _add_optimizer_tensors(self) -> None:
        parameters = {
            self._names[id(parameter)]: parameter
            for module in self._training.modules.values()
            for parameter in module.parameters()
        }
        for name in self._training.optimizers:
            saved = self._manifest.shared["optimizers"][name]
            for tensor in tensor_names(saved):
                self._add_plain(tensor)
            for parameter, values in _entries(saved["state"]):
                for value in values.values() if isinstance(values, dict) else ():
                    if isinstance(value, dict) and "$tensor" in value and parameter in parameters:
                        shape = self._manifest.tensors[value["$tensor"]].shape
                        sharded = state_reference(parameters[parameter], shape)
                        if sharded is not None:
                            self.references[value["$tensor"]] = sharded

    def _add_own_tensors(self) -> None:
        own = self._own()
        wanted = [own["others"][name] for name in self._training.others]
        if self._is_resume:
            wanted.append(own["random"])
            same = self._manifest.world_size == self._here.size
            wanted += [each["exchange"] for each in ([own] if same else self._manifest.ranks)]
        for value in wanted:
            for tensor in tensor_names(value):
                self._add_plain(tensor)

    def _add_plain(self, name: str) -> None:
        entry = self._manifest.tensors[name]
        # Only its shape is asked: one element, whatever the size.
        self.references[name] = torch.empty((), dtype=getattr(torch, entry.dtype)).expand(entry.shape)

    def _apply_module(self, name: str, live: dict[str, Any], buffers: Mapping[str, torch.Tensor]) -> None:
        saved = self._manifest.shared["modules"][name]
        for key, value in live.items():
            if isinstance(value, torch.Tensor):
                tensor = saved[key]["$tensor"]
                live[key] = self._like_reference(tensor, buffers[tensor])
            else:
                live[key] = decode(saved[key], restorer(buffers))
        set_model_state_dict(self._training.modules[name], live)

    def _like_reference(self, name: str, buffer: torch.Tensor) -> torch.Tensor:
        reference = self.references[name]
        if not isinstance(reference, DTensor):
            return buffer
        return DTensor.from_local(
            buffer.to(reference.to_local().device), reference.device_mesh, reference.placements,
            run_check=False, shape=reference.shape, stride=reference.stride(),
        )  # fmt: skip

    def _apply_exchange(self, restore: Any) -> None:
        ranks = self._manifest.ranks
        if self._here.size == self._manifest.world_size:
            load_exchange_state(self._training.model, decode(self._own()["exchange"], restore))
        elif self._here.size > 1:
            states = [decode(each["exchange"], restore) for each in ranks]
            load_exchange_state(self._training.model, states)


def _entries(encoded: Any) -> list[tuple[str, Any]]:
    """Return names and values of an encoded dict."""
    if isinstance(encoded, dict) and "$dict" in encoded:
        return [(name, value) for name, value in encoded["$dict"] if isinstance(name, str)]
    return list(encoded.items())
