"""Loading: find the checkpoint, compare it with the training, read and verify, and only then change anything."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor

from ...checkpoint.directory import step_directory
from ...checkpoint.manifest import Manifest, decode
from ...checkpoint.writer_client import Writer
from ...comm.codecs.saved_state import merge
from ...comm.world.world import World
from ...core.vocabulary.degrees import Degrees
from ...core.vocabulary.errors import CheckpointError
from ...parallel.exchange_state import load_exchange_state, residual_layout
from ...parallel.frozen_weight import FrozenWeight
from ...parallel.lower_precision import loss_scale_of
from ...parallel.model import DistributedModel
from ...parallel.pipeline.apply import refuse_open_batch
from ...parallel.split import Split, split_of
from ...parallel.train_schedule import resume_schedule
from ...parallel.zero.sharded_step import load_weight_residuals, packs_weights, warn_of_lost_weights
from ...sync.rows.table import SavedTables
from .agreement import find_manifest, named, together, with_offer
from .later_copy import WriterPool
from .optimizers import different_groups, load_optimizer, require_like, state_reference, without_parameters
from .reading import read_tensors, shared_room
from .state import (
    SavedRanks,
    Training,
    meet_before,
    module_splits,
    require_random_state,
    seed_new_rank,
    write_random_state,
)
from .values import CopiedIfShared, entries, frozen_weight, only_copies, restorer, tensor_names

_MOST_NAMED = 3


def load_training(
    directory: Path, step: int | None, training: Training, here: World, writer: Writer | None = None
) -> int:
    """Load a checkpoint into a training, on all ranks; nothing is changed unless all of them can.

    Args:
        directory: of the checkpoints.
        step: which; None: the last one.
        training: what to load into. Nothing else is read.
        here: the world.
        writer: the one of this rank's saves, if it has one, which writes nothing now: its memory is used.

    Returns:
        The step of the checkpoint.

    Raises:
        CheckpointError: there is none, it is damaged, or it is another model's; on every rank.
    """
    refuse_open_batch(training.model, "farandole.load")
    meet_before(training)
    manifest = find_manifest(directory, step, here)
    plan = _Loading(training, manifest, here)
    together(here, "compare", plan.compare)
    pool = here.session.keep(WriterPool, lambda: WriterPool(here))
    is_kept = pool.has_free
    used = pool.take() if writer is None else writer
    try:
        _load(directory, manifest, plan, here, used)
    finally:
        if writer is None and is_kept:
            pool.give_back(used)
        elif writer is None:
            used.close()  # a process that only loads does not keep it
    return manifest.step


def _load(directory: Path, manifest: Manifest, plan: _Loading, here: World, writer: Writer) -> None:
    folder = step_directory(directory, manifest.step)
    room = shared_room(here, manifest, plan.references, writer, plan.splits)

    def read() -> dict[str, torch.Tensor]:
        try:
            return read_tensors(folder, manifest, plan.references, room, plan.splits)
        except CheckpointError as problem:
            raise with_offer(problem, directory, manifest.step) from None

    buffers = together(here, "read", read)
    together(here, "decode", lambda: plan.decode(buffers))
    together(here, "others", lambda: plan.apply_others(buffers, frozenset(room.tensors)))
    together(here, "apply", lambda: plan.apply(buffers, frozenset(room.tensors)))
    for name, write in plan.tables.writes(restorer(buffers)).items():
        together(here, f"rows of {name}", write)


class _Loading:
    """What of a checkpoint belongs where in this training."""

    def __init__(self, training: Training, manifest: Manifest, here: World) -> None:
        self._training, self._manifest, self._here = training, manifest, here
        self._models = {name: dict(get_model_state_dict(each)) for name, each in training.modules.items()}
        self._names = training.names
        self._is_resume = bool(training.optimizers)
        self.tables = SavedTables(training.tables, manifest.ranks[0].get("tables", {}), here)
        self.references: dict[str, torch.Tensor] = {}
        """By name in the checkpoint: what this rank needs of it."""
        self.splits: dict[str, Split] = {}
        """Splits of those of `references` that are parts of what the checkpoint has."""
        self._elsewhere = {
            name: DistributedModel.of(each).saved_elsewhere() for name, each in training.modules.items()
        }
        self._absent = {
            self._names[id(parameter)]
            for name, module in training.modules.items()
            for key, parameter in module.named_parameters(remove_duplicate=False)
            if self._elsewhere[name].get(key) is not None
        }
        """Parameters that other stages of a pipeline have."""
        mesh = DistributedModel.of(training.model).mesh
        self._ranks = SavedRanks(
            here.rank,
            Degrees(data=here.size) if mesh is None else mesh.degrees,
            Degrees(**(manifest.shared.get("degrees") or {"data": manifest.world_size})),
        )

    def compare(self) -> None:
        """Fill `references`; raise `CheckpointError` with the first differences from the checkpoint."""
        shared = self._manifest.shared
        differences: list[str] = []
        for name, live in self._models.items():
            differences += self._compare_module(name, live, shared.get("modules", {}).get(name))
        if not differences:
            for name, optimizer in self._training.optimizers.items():
                saved = shared.get("optimizers", {}).get(name)
                if saved is None:
                    differences.append(f"no {name} in the checkpoint")
                    continue
                own = without_parameters(saved, self._absent)
                found = different_groups(optimizer, self._names, decode(own, lambda key, body: None))
                differences += [f"{name}: {each}" for each in found]
        for name in self._training.others:
            differences += [] if name in self._own().get("others", {}) else [f"no {name} in the checkpoint"]
        differences += [f"no rows of {name} in the checkpoint" for name in self.tables.missing()]
        if self._is_resume and not all({"random", "exchange"} <= each.keys() for each in self._manifest.ranks):
            differences.append("no states of random numbers and of codecs in the checkpoint")
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

    def decode(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Decode what will be needed, and let copies of optimizers load it: an error changes nothing."""
        restore = restorer(CopiedIfShared(buffers, frozenset(), self._like_reference))
        for name, optimizer in self._training.optimizers.items():
            saved = decode(without_parameters(self._manifest.shared["optimizers"][name], self._absent), restore)
            load_optimizer(name, optimizer, self._names, saved, tries=True)
        own, restore = self._own(), restorer(buffers)
        decode([own["others"][name] for name in self._training.others], restore)
        for name, live in self._models.items():
            extra = [key for key, value in live.items() if not isinstance(value, torch.Tensor)]
            decode([self._manifest.shared["modules"][name][key] for key in extra], restore)
        self.tables.writes(restore)
        if self._is_resume:
            require_random_state(decode(own["random"], restore))
            decode(self._exchanges, restore)
            decode(self._weight_residuals if packs_weights(self._training.model) else {}, restore)

    def apply_others(self, buffers: Mapping[str, torch.Tensor], shared: frozenset[str]) -> None:
        """Load first what judges its state itself: objects of the script, which may refuse it."""
        restore = restorer(CopiedIfShared(buffers, shared, self._like_reference))
        model, saved, common = self._training.model, self._own().get("others"), self._manifest.shared
        states = [(name, each, saved[name]) for name, each in self._training.others.items()]
        if self._is_resume:
            ours = {"pass_seeds": DistributedModel.of(model).seeds, "loss_scale": loss_scale_of(model)}
            states += [(name, each, common[name]) for name, each in ours.items() if each and name in common]
        for name, each, state in states:
            with named(name, "model and optimizers are as they were"):
                each.load_state_dict(decode(state, restore))

    def apply(self, buffers: Mapping[str, torch.Tensor], shared: frozenset[str]) -> None:
        """Load `buffers`, which `references` asked for. `shared`: those whose memory is not this rank's alone."""
        own_buffers = CopiedIfShared(buffers, shared)
        for name, live in self._models.items():
            copies = only_copies(self._training.modules[name])
            self._apply_module(name, live, buffers if copies else own_buffers, own_buffers)
        restore = restorer(CopiedIfShared(buffers, shared, self._like_reference))
        for name, optimizer in self._training.optimizers.items():
            saved = decode(without_parameters(self._manifest.shared["optimizers"][name], self._absent), restore)
            load_optimizer(name, optimizer, self._names, saved)
        if not self._is_resume:
            return
        self._apply_policy(restore)
        resume_schedule(self._training.model, self._own().get("scheduled_steps", self._manifest.step))
        if DistributedModel.of(self._training.model).plan is not None:
            self._apply_exchange(restore)
        if packs_weights(self._training.model):
            load_weight_residuals(self._training.model, decode(self._weight_residuals, restore))
        elif self._weight_residuals:
            warn_of_lost_weights()
        rounded = DistributedModel.of(self._training.model).rounded_steps
        if rounded is not None:
            rounded.done = self._manifest.shared.get("rounded_steps", 0)
        if self._ranks.own is not None:
            write_random_state(decode(self._own()["random"], restore), self._here.device)
        else:
            seed_new_rank(decode(self._own()["random"], restore), self._manifest.step, self._ranks.place)

    def _own(self) -> Any:
        """What was this rank's own; a rank that did not exist takes rank 0's."""
        return self._manifest.ranks[self._ranks.own or 0]

    @property
    def _weight_residuals(self) -> dict[str, Any]:
        saved = self._manifest.shared.get("weight_residuals", {})
        return {name: value for name, value in saved.items() if f"model/{name}" not in self._absent}

    def _compare_module(self, name: str, live: Mapping[str, Any], saved: Any) -> list[str]:
        if saved is None:
            return [f"no {name} in the checkpoint"]
        differences = []
        splits, elsewhere = module_splits(self._training.modules[name]), self._elsewhere[name]
        for key in (*live, *(key for key in saved if key not in live)):
            here, there = live.get(key), saved.get(key)
            if isinstance(here, FrozenWeight) or (isinstance(there, dict) and "$frozen" in there):
                differences += self._compare_frozen(f"{name}.{key}", here, there)
                continue
            own = "nothing"
            if isinstance(here, torch.Tensor):
                shape = splits[key].shape if key in splits else elsewhere.get(key) or tuple(here.shape)
                own = f"{str(here.dtype)[6:]}{shape}"
            other = "nothing"
            if isinstance(there, dict) and "$tensor" in there:
                entry = self._manifest.tensors[there["$tensor"]]
                other = f"{entry.dtype}{entry.shape}"
                if own == other and elsewhere.get(key) is None:
                    self.references[there["$tensor"]] = here  # type: ignore[assignment]
                    self.splits |= {there["$tensor"]: splits[key]} if key in splits else {}
            elif key in saved and key in live and not isinstance(here, torch.Tensor):
                continue  # extra state, which is the module's own to judge
            elif key in live and not isinstance(here, torch.Tensor):
                own = f"a {type(here).__name__}"
            elif key in saved:
                other = "a value that is no tensor"
            if own != other:
                differences.append(f"{name}.{key} is {other} in the checkpoint and {own} here")
        return differences

    def _compare_frozen(self, name: str, here: Any, there: Any) -> list[str]:
        """Frozen weights are loaded as they are stored, so both are to be stored alike."""
        own, other = "not stored by a codec", "not stored by a codec"
        if isinstance(here, FrozenWeight):
            own = f"{here.codec} for {str(here.dtype)[6:]}{tuple(here.shape)}"
        if isinstance(there, dict) and "$frozen" in there:
            body = there["$frozen"]
            other = f"{body['codec']} for {body['dtype']}{tuple(body['shape'])}"
            if own == other:
                self.references |= {body[key]["$tensor"]: part for key, part in here.parts.items()}
        if own == other:
            return []
        return [f"{name} is {other} in the checkpoint and {own} here (plan key frozen_codec)"]

    def _add_optimizer_tensors(self) -> None:
        parameters = {
            self._names[id(parameter)]: parameter
            for module in self._training.modules.values()
            for parameter in module.parameters()
        }
        for name, optimizer in self._training.optimizers.items():
            saved = without_parameters(self._manifest.shared["optimizers"][name], self._absent)
            for tensor in tensor_names(saved):
                self._add_plain(tensor)
            for parameter, values in entries(saved["state"]):
                for key, value in values.items() if isinstance(values, dict) else ():
                    if isinstance(value, dict) and "$tensor" in value and parameter in parameters:
                        shape = self._manifest.tensors[value["$tensor"]].shape
                        require_like(parameters[parameter], optimizer, key, parameter, shape)
                        self._add_state(value["$tensor"], parameters[parameter], shape)

    def _add_state(self, name: str, parameter: torch.Tensor, shape: tuple[int, ...]) -> None:
        split = split_of(parameter)
        follows = state_reference(parameter, shape)
        if follows is not None:
            self.references[name] = follows
            self.splits |= {} if split is None else {name: split}
        elif split is not None and math.prod(shape) > 1:
            raise CheckpointError(
                f"{name} has the shape {shape} in the checkpoint, and its parameter, which is divided over ranks "
                f"here, {split.shape}: it is not known which part of it belongs here",
                is_input=True,
                remedy="nothing was loaded: use an optimizer that works element by element",
            )

    def _add_own_tensors(self) -> None:
        own = self._own()
        wanted = [*(own["others"][name] for name in self._training.others), *self.tables.wanted()]
        if self._is_resume:
            wanted.append(own["random"])
            if DistributedModel.of(self._training.model).policy is not None:
                wanted += [own.get("optimizers"), *(each.get("sync") for each in self._manifest.ranks)]
            wanted += self._exchanges
            if packs_weights(self._training.model):
                self._add_weight_residuals()
        for tensor in tensor_names(wanted):
            self._add_plain(tensor)

    def _add_weight_residuals(self) -> None:
        for name, value in self._weight_residuals.items():
            for tensor in tensor_names(value):
                parameter = self._training.model.get_parameter(name)
                self._add_plain(tensor)
                if split_of(parameter) is not None:
                    self._add_state(tensor, parameter, self._manifest.tensors[tensor].shape)

    @property
    def _keeps_own(self) -> bool:
        """Whether each rank goes on with what its own codecs kept: as many ranks, with the same elements."""
        has_any = any(each["exchange"] for each in self._manifest.ranks)
        saved, layout = dict(entries(self._own()["exchange"])), residual_layout(self._training.model)
        same = not has_any or saved.get("layout", saved.get("of", layout)).removesuffix(", switches 0") == layout
        return same and self._manifest.world_size == self._here.size

    @property
    def _exchanges(self) -> list[Any]:
        """What this rank needs of what codecs kept: its own, or that of all ranks."""
        if self._ranks.is_other_mesh:
            return []
        return [each["exchange"] for each in ([self._own()] if self._keeps_own else self._manifest.ranks)]

    def _add_plain(self, name: str) -> None:
        entry = self._manifest.tensors[name]
        # Only its shape is asked: one element, whatever the size.
        self.references[name] = torch.empty((), dtype=getattr(torch, entry.dtype)).expand(entry.shape)

    def _apply_module(
        self,
        name: str,
        live: dict[str, Any],
        buffers: Mapping[str, torch.Tensor],
        own_buffers: Mapping[str, torch.Tensor],
    ) -> None:
        saved = self._manifest.shared["modules"][name]
        for key, value in live.items():
            if self._elsewhere[name].get(key) is not None:
                continue  # another stage's: without elements
            if isinstance(value, FrozenWeight):
                body = saved[key]["$frozen"]
                names = [body[part]["$tensor"] for part in value.parts]
                live[key] = frozen_weight(body, {n: self._like_reference(n, own_buffers[n]) for n in names})
            elif isinstance(value, torch.Tensor):
                tensor = saved[key]["$tensor"]
                live[key] = self._like_reference(tensor, buffers[tensor])
            else:
                live[key] = decode(saved[key], restorer(own_buffers))
        with named(name, "other parts of the training were loaded: start anew"):
            set_model_state_dict(self._training.modules[name], live)

    def _like_reference(self, name: str, buffer: torch.Tensor) -> torch.Tensor:
        reference = self.references[name]
        if not isinstance(reference, DTensor):
            return buffer
        return DTensor.from_local(
            buffer.to(reference.to_local().device), reference.device_mesh, reference.placements,
            run_check=False, shape=reference.shape, stride=reference.stride(),
        )  # fmt: skip

    def _apply_policy(self, restore: Any) -> None:
        """Load what a rank has of its own that trains on its own between meetings."""
        policy = DistributedModel.of(self._training.model).policy
        if policy is None:
            return
        for name, state in decode(self._own().get("optimizers", {}), restore).items():
            if name in self._training.optimizers:
                load_optimizer(name, self._training.optimizers[name], self._names, state)
        policy.load_state_dict(self._policy_state(restore))

    def _policy_state(self, restore: Any) -> dict[str, Any]:
        """Return what the policy goes on from; where ranks were more or fewer, all take the mean residuals."""
        states = [decode(each["sync"], restore) for each in self._manifest.ranks if each.get("sync")]
        if len(states) == self._here.size:
            return dict(states[self._here.rank])
        if not states:
            return {}
        kept = [each.get("codecs", {}) for each in states]  # none before sync "auto" has chosen local steps
        codecs = {name: merge([each[name] for each in kept]) for name in kept[0]}
        return {**states[0], "codecs": codecs}

    def _apply_exchange(self, restore: Any) -> None:
        if self._ranks.is_other_mesh:
            if any(each["exchange"] for each in self._manifest.ranks) and self._here.rank == 0:
                self._ranks.warn_of_codecs()
            load_exchange_state(self._training.model, {})
        elif self._keeps_own or self._here.size > 1:
            states = decode(self._exchanges, restore)
            load_exchange_state(self._training.model, states[0] if self._keeps_own else states)
