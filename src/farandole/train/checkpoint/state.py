"""What a checkpoint consists of: the objects of a training, and their state as tensors and JSON."""

from __future__ import annotations

import hashlib
import json
import random
import struct
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ...checkpoint.manifest import encode
from ...comm.device.accelerator import generator_of
from ...comm.messages import bytes_of
from ...comm.world.world import World, world
from ...core.vocabulary.degrees import ORDER, OTHER_SAMPLES, Degrees
from ...core.vocabulary.errors import CheckpointError
from ...core.vocabulary.events import SETUP_CHECKPOINT_ASYNCHRONOUS, SETUP_CHECKPOINT_OBJECTS, Setup
from ...parallel.exchange_state import exchange_state
from ...parallel.frozen_weight import FrozenWeight
from ...parallel.lower_precision import loss_scale_of
from ...parallel.model import DistributedModel
from ...parallel.split import Split, split_of
from ...parallel.train_schedule import scheduled_steps
from ...parallel.zero.sharded_step import weight_residuals
from ...sync.rows.table import RowTable, TableState, tables_in
from ..loop import rank_seed
from .optimizers import merge_optimizers, parameter_names, plain_parameters, read_optimizer
from .values import ELSEWHERE, TensorsAside, entries, tensor_names

OWN_PREFIX = "rank-"
"""Before the names of tensors that one rank alone has: no name of a module or an optimizer begins so."""


@dataclass(frozen=True, slots=True)
class Training:
    """The objects whose state is saved, by the names that they have in the checkpoint."""

    modules: Mapping[str, nn.Module]
    optimizers: Mapping[str, Optimizer]
    others: Mapping[str, Any]
    """Anything else with `state_dict`: schedulers, scaler, loader."""
    tables: Mapping[str, TableState]
    """Tables of rows, by their own names."""
    given: tuple[str, ...]
    """The names by which a script gives all this but model and optimizer."""

    @property
    def model(self) -> nn.Module:
        """The model whose gradients are exchanged."""
        return self.modules["model"]

    @property
    def names(self) -> dict[int, str]:
        """Name of each parameter, by its identity."""
        return parameter_names(self.modules)


def make_training(model: nn.Module, optimizer: Optimizer | None, others: Mapping[str, Any]) -> Training:
    """Sort the arguments of `fd.save`; raise `CheckpointError` for one that has no state."""
    modules: dict[str, nn.Module] = {"model": model}
    optimizers: dict[str, Optimizer] = {}
    rest: dict[str, Any] = {}
    if optimizer is not None:
        optimizers["optimizer"] = optimizer
    for name, value in others.items():
        if isinstance(value, nn.Module):
            modules[name] = value
        elif isinstance(value, Optimizer):
            optimizers[name] = value
        elif callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
            rest[name] = value
        else:
            raise CheckpointError(
                f"{name} is a {type(value).__name__}, which has no state_dict and load_state_dict", is_input=True
            )
    tables = tables_in(modules.values(), world())
    modules = {name: each for name, each in modules.items() if name == "model" or not isinstance(each, RowTable)}
    return Training(modules, optimizers, rest, tables, tuple(others))


def describe_saves(directory: Path, training: Training, *, asynchronous: bool) -> Setup:
    """Return what a record says of the saves of a training, so that a diagnosis can propose others."""
    own = ["model", *(["optimizer"] if "optimizer" in training.optimizers else [])]
    more = [f"{name}={name}" for name in training.given]
    objects = ", ".join([json.dumps(str(directory)), *own, *more])
    return Setup({SETUP_CHECKPOINT_ASYNCHRONOUS: asynchronous, SETUP_CHECKPOINT_OBJECTS: objects})


@dataclass(frozen=True, slots=True)
class TrainingState:
    """The state of a training on one rank, at one moment. The tensors are the live ones."""

    tensors: Mapping[str, torch.Tensor]
    """Those that ranks share: replicated, or sharded as DTensors."""
    shared: Any
    """What refers to them, as JSON."""
    own_tensors: Mapping[str, torch.Tensor]
    own: Any
    """What this rank has of its own, as JSON."""
    stepped: frozenset[str]
    """Those of `tensors` that optimizer steps change: parameters and the states of optimizers."""
    splits: Mapping[str, Split]
    """Splits of those of `tensors` that are parts of whole ones."""
    is_part: bool
    """Whether other ranks have tensors that this one has not: stages of a pipeline."""
    of_first: frozenset[str]
    """Those of `tensors` that differ between ranks which train on their own: rank 0's are saved."""
    copies: str
    """Digest of what should be the same on all ranks, and is not if it is a copy of a divided model."""


def read_state(training: Training, here: World) -> TrainingState:
    """Return the state of a training. Raises `CheckpointError` for what has no form in a checkpoint."""
    weights, states = TensorsAside(ties=True), TensorsAside()
    splits = {
        f"{name}/{key}": split
        for name, module in training.modules.items()
        for key, split in module_splits(module).items()
    }
    own = TensorsAside(f"{OWN_PREFIX}{here.rank:05d}/")
    names = training.names
    modules = {name: _encode_module(name, module, splits, weights) for name, module in training.modules.items()}
    optimizers = {
        name: encode(read_optimizer(each, names), name, states) for name, each in training.optimizers.items()
    }
    splits = {name: split for name, split in splits.items() if name in weights.tensors}
    parameters = {names[id(p)]: p for module in training.modules.values() for p in module.parameters()}
    for name, saved in optimizers.items():
        splits |= _state_splits(name, saved, parameters, states.tensors)
    others = {name: encode(each.state_dict(), name, own) for name, each in training.others.items()}
    distributed = DistributedModel.of(training.model)
    codecs = exchange_state(training.model) if distributed.plan is not None else {}
    mine = {
        "others": others,
        "tables": {name: encode(each.read(), f"rows/{name}", own) for name, each in training.tables.items()},
        "random": encode(read_random_state(here.device), "random", own),
        "exchange": encode(codecs, "exchange", own),
    }
    shared: dict[str, Any] = {"modules": modules, "optimizers": optimizers}
    scale = loss_scale_of(training.model)
    if scale is not None:
        shared["loss_scale"] = scale.state_dict()
    lost = weight_residuals(training.model)
    if lost:
        shared["weight_residuals"] = encode(lost, "weight_residuals", states)
        found = {name: split_of(training.model.get_parameter(name)) for name in lost}
        splits |= {f"weight_residuals/{name}": split for name, split in found.items() if split is not None}
    if distributed.rounded_steps is not None:
        shared["rounded_steps"] = distributed.rounded_steps.done
    if distributed.seeds is not None:
        shared["pass_seeds"] = distributed.seeds.state_dict()
    mesh, policy = distributed.mesh, distributed.policy
    if mesh is not None and not mesh.degrees.is_data_alone:
        shared["degrees"] = {name: mesh.size(name) for name in ORDER}
    is_alone = policy is not None and policy.has_own_states
    of_first = frozenset(states.tensors) if is_alone else frozenset()
    if policy is not None:
        mine["sync"] = encode(policy.state_dict(), "sync", own)
    if is_alone:
        states_here = {name: read_optimizer(each, names) for name, each in training.optimizers.items()}
        mine["optimizers"] = encode(states_here, "optimizers", own)
    steps = scheduled_steps(training.model)
    if steps is not None:
        mine["scheduled_steps"] = steps
    memory = {_memory(each) for each in parameters.values()}
    stepped = {name for name, each in weights.tensors.items() if _memory(each) in memory} | set(states.tensors)
    return TrainingState(
        {**weights.tensors, **states.tensors}, shared, own.tensors, mine, frozenset(stepped), splits,
        any(DistributedModel.of(each).saved_elsewhere() for each in training.modules.values()), of_first,
        _digest_copies(training, weights.tensors, splits),
    )  # fmt: skip


def meet_before(training: Training) -> None:
    """Let ranks that train on their own meet, so that they have one model; called by all of them."""
    for module in training.modules.values():
        policy = DistributedModel.of(module).policy
        if policy is not None:
            policy.drain()
            policy.gather_states()
    for table in training.tables.values():
        table.meet()


def module_splits(module: nn.Module) -> dict[str, Split]:
    """Return which part of the whole each divided parameter is, by all its names in the module's state."""
    found = {name: split_of(each) for name, each in plain_parameters(module)}
    return {name: split for name, split in found.items() if split is not None}


def _encode_module(
    name: str, module: nn.Module, splits: Mapping[str, Split], weights: TensorsAside
) -> dict[str, Any]:
    """Return a module's state as JSON, in its own order. What another rank saves is `ELSEWHERE`."""
    live, elsewhere = dict(get_model_state_dict(module)), DistributedModel.of(module).saved_elsewhere()
    for key, value in live.items():
        if isinstance(value, FrozenWeight) and f"{name}/{key}" in splits:
            raise CheckpointError(
                f"{name}/{key} is stored by a codec and divided over ranks, which has no form in a checkpoint",
                is_input=True,
                remedy="leave frozen_codec out of the plan",
            )
    encoded = encode({key: value for key, value in live.items() if key not in elsewhere}, name, weights)
    return {key: ELSEWHERE if key in elsewhere else encoded[key] for key in live}


def _state_splits(
    name: str, saved: Any, parameters: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]
) -> dict[str, Split]:
    """Return which states of an optimizer are parts of whole ones: those of the shape of a divided parameter.

    Raises `CheckpointError` for a state of another shape: it is not known what it is a part of.
    """
    found = {}
    for parameter, values in entries(saved["state"]):
        split = split_of(parameters[parameter]) if parameter in parameters else None
        for tensor in tensor_names(values) if split is not None else ():
            if tensors[tensor].shape == parameters[parameter].shape:
                assert split is not None, "asked above"
                found[tensor] = split
            elif tensors[tensor].numel() > 1:
                raise CheckpointError(
                    f"{tensor} has the shape {tuple(tensors[tensor].shape)}, and its parameter, which is divided "
                    f"over ranks, {tuple(parameters[parameter].shape)} here: it is not known how to join the "
                    f"ranks' states of {name}",
                    is_input=True,
                    remedy="use an optimizer that works element by element, such as torch.optim.AdamW",
                )
    return found


def _digest_copies(training: Training, tensors: Mapping[str, torch.Tensor], splits: Mapping[str, Split]) -> str:
    """Return a digest of the modules that no mesh divides, where another model is divided: else an empty text.

    A copy of a divided model has a part of it, and does not know; but then the ranks' values differ.
    """
    meshes = [DistributedModel.of(each).mesh for each in DistributedModel.all()]
    if all(mesh is None or mesh.degrees.is_data_alone for mesh in meshes):
        return ""
    digest, has_any = hashlib.sha256(), False
    own = {name for name, module in training.modules.items() if DistributedModel.of(module).mesh is not None}
    for name, tensor in tensors.items():
        if name.partition("/")[0] in own or name in splits or isinstance(tensor, DTensor):
            continue
        plain, has_any = tensor.detach().cpu(), True
        digest.update(f"{name} {tuple(plain.shape)} {plain.dtype} ".encode())
        digest.update(bytes_of(plain).numpy().data if plain.numel() else b"")
    return digest.hexdigest() if has_any else ""


def merge_shared(states: Sequence[Any], order: Sequence[str]) -> Any:
    """Return what the ranks share as JSON, of ranks that have other tensors each (`TrainingState.is_part`).

    Args:
        states: `shared` of each rank.
        order: names of all parameters, in the order of the model.

    Raises:
        CheckpointError: they do not fit together.
    """
    merged: dict[str, Any] = {**states[0], "modules": {}, "optimizers": {}}
    for name, own in states[0]["modules"].items():
        merged["modules"][name] = {
            key: _agreed(f"{name}.{key}", [each["modules"][name].get(key) for each in states]) for key in own
        }
    for name in states[0]["optimizers"]:
        merged["optimizers"][name] = merge_optimizers(name, [each["optimizers"][name] for each in states], order)
    if any("weight_residuals" in each for each in states):
        merged["weight_residuals"] = {
            key: value for each in states for key, value in each.get("weight_residuals", {}).items()
        }
    for name in {name for each in states for name in each} - {"modules", "optimizers", "weight_residuals"}:
        merged[name] = _agreed(name, [each.get(name) for each in states])
    return merged


def _agreed(name: str, values: Sequence[Any]) -> Any:
    found = [value for value in values if value != ELSEWHERE]
    if not found or any(value != found[0] for value in found):
        raise CheckpointError(f"the ranks have different states of {name}" if found else f"no rank has {name}")
    return found[0]


def _memory(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return 0 if isinstance(local, FrozenWeight) else local.untyped_storage().data_ptr()  # it has none of its own


# What a rank goes on with: whose part of a checkpoint, and the generators of random numbers.
#
# They are Python's, NumPy's, and torch's on the CPU and on the rank's device.


_OF_THE_HOST = {"seed", "python", "numpy", "torch"}
_PYTHON = struct.Struct("<625I")


@dataclass(frozen=True, slots=True)
class SavedRanks:
    """The ranks that saved a checkpoint, seen from one that loads it."""

    rank: int
    degrees: Degrees
    """The degrees of the mesh here."""
    saved: Degrees
    """The degrees of the mesh that saved."""

    @property
    def is_other_mesh(self) -> bool:
        """Whether the parameters were, or are, divided, and otherwise than now."""
        are_replicas = self.degrees.is_data_alone and self.saved.is_data_alone
        return self.degrees != self.saved and not are_replicas

    @property
    def place(self) -> int:
        """Which part of the samples this rank sees."""
        return self.degrees.rank_over(self.rank, OTHER_SAMPLES)

    @property
    def own(self) -> int | None:
        """The rank whose own state goes on here, in another mesh the first that saw the same samples.

        None if there was none.
        """
        if not self.is_other_mesh:
            return self.rank if self.rank < self.saved.size else None
        first = self.saved.members(0, OTHER_SAMPLES)
        return first[self.place] if self.place < len(first) else None

    def warn_of_codecs(self) -> None:
        """Say that what codecs kept of parameters that were divided otherwise is lost."""
        warnings.warn(
            f"farandole: the checkpoint is of {self.saved}, and there is {self.degrees} here, so what the codecs "
            "had left is dropped",
            RuntimeWarning,
            stacklevel=2,
        )


def read_random_state(device: torch.device) -> dict[str, Any]:
    """Return the state of all generators of this process."""
    version, numbers, gauss = random.getstate()
    state = {
        "seed": torch.initial_seed(),
        "python": (version, _PYTHON.pack(*numbers), gauss),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    generator = generator_of(device)
    if generator is not None:
        state[device.type] = generator.get_state()
    return state


def require_random_state(state: Any) -> None:
    """Raise `CheckpointError` unless `state` is one that generators can continue with; they are not changed."""
    try:
        version, numbers, gauss = state["python"]
        random.Random().setstate((version, _PYTHON.unpack(numbers), gauss))
        np.random.RandomState().set_state(state["numpy"])
        torch.Generator().set_state(state["torch"])
        int(state["seed"])
        for kind in state.keys() - _OF_THE_HOST:
            if not isinstance(state[kind], torch.Tensor):
                raise TypeError(f"the state of {kind}'s generator is a {type(state[kind]).__name__}")
    except (
        AttributeError,
        LookupError,
        OverflowError,
        RuntimeError,
        TypeError,
        ValueError,
        struct.error,
    ) as problem:
        raise CheckpointError(
            f"the checkpoint's states of random numbers cannot be continued: {type(problem).__name__}: {problem}",
            is_input=True,
        ) from None


def write_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Continue with what `read_random_state` returned."""
    version, numbers, gauss = state["python"]
    random.setstate((version, _PYTHON.unpack(numbers), gauss))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    generator = generator_of(device)
    if generator is not None and device.type in state:
        generator.set_state(state[device.type])


def seed_new_rank(state_of_main: dict[str, Any], step: int, rank: int) -> None:
    """Seed a rank that did not exist when the checkpoint was written: by rank 0's seed, the step and the rank."""
    digest = hashlib.sha256(f"{state_of_main['seed']}/{step}".encode()).digest()
    own = rank_seed(int.from_bytes(digest[:8], "big") % 2**63, rank)
    random.seed(own)
    np.random.seed(own % 2**32)
    torch.manual_seed(own)
