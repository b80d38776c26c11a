"""The proof of a recipe: a split unit does what the plain module does, tried once on a small input.

[Note: proof of a recipe] Before the first forward pass of a unit its ranks gather its whole parameters, and
run both the plain module and the split one on the first samples of the real input, forward and backward.
Outputs and gradients must be equal to rounding, or all ranks raise an error that names the module. Units that
are equal but for values are proven once. Parameters that are whole on all ranks, but lie inside a split
region (norms of heads), get a gradient from each rank's features alone: where only the sum over the ranks
equals that of the plain module, it is summed.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten
from torch.utils.weak import WeakIdKeyDictionary

from ...comm.messages.element_bytes import bytes_of
from ...comm.world.store_sync import all_gather_json
from ...core.vocabulary.errors import PlanError
from ..changed_class import plain_class_of
from ..split import Split, split_of
from .clone import OwnHook, clone, detached
from .layers.lazy import LazyWhole
from .layers.ranks import DEGREE, TensorRanks
from .layers.split_layers import inside

SAMPLES = 2
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
_OF_16_BITS = 5e-2
_FLOOR = 1e-2
"""Gradients below this share of a unit's largest are compared with that: some are zero but for rounding."""


@dataclass
class Proofs:
    """The proofs of one model."""

    ranks: TensorRanks
    proven: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Kinds of units that were proven, and which of their whole parameters have gradients to be summed."""
    names: list[str] = field(default_factory=list)
    """The units."""
    waiting: set[str] = field(default_factory=set)
    """Units that have not run yet."""
    summed: list[str] = field(default_factory=list)
    """Parameters whose gradients are summed over the ranks."""
    _hooked: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary)

    def install(self, name: str, unit: nn.Module) -> None:
        """Prove `unit` before its first forward pass."""
        self.names.append(name)
        self.waiting.add(name)
        hook = _ProveOnce(self, name)
        hook.handle = unit.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)

    def prove(self, name: str, unit: nn.Module, args: Any, kwargs: Any) -> None:
        """Prove `unit` on an input; raise `PlanError` on all ranks of the group if it fails on one."""
        self.waiting.discard(name)
        key = _kind_of(unit)
        if key not in self.proven:
            self.proven[key] = compare(name, unit, args, kwargs, self.ranks)
        for path in self.proven[key]:
            parameter, full = unit.get_parameter(path), f"{name}.{path}" if name else path
            if parameter.requires_grad and parameter not in self._hooked:
                self.summed.append(full)
                self._hooked[parameter] = True
                parameter.register_hook(functools.partial(_sum_gradient, self.ranks, full))


class _ProveOnce(OwnHook):
    def __init__(self, proofs: Proofs, name: str) -> None:
        self.proofs, self.name = proofs, name
        self.handle: Any = None

    def __call__(self, unit: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_inference_mode_enabled():
            return  # no graph can be made now
        self.handle.remove()
        inside.depth += 1
        try:
            self.proofs.prove(self.name, unit, args, kwargs)
        finally:
            inside.depth -= 1


def _sum_gradient(ranks: TensorRanks, what: str, grad: torch.Tensor) -> torch.Tensor:
    return ranks.all_reduce(grad.clone(memory_format=torch.contiguous_format), what)


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def compare(name: str, unit: nn.Module, args: Any, kwargs: Any, ranks: TensorRanks) -> tuple[str, ...]:
    """Return which whole parameters of `unit` have gradients to be summed. See [Note: proof of a recipe].

    Raises `PlanError`, on all ranks of the group, if the split module does not do what the plain one does.
    """
    whole, split = clone(unit, ranks, whole=True), clone(unit, ranks, whole=False)
    few = _first_samples(args, kwargs, SAMPLES)
    found, problem = _Outcome([], [], {}), ""
    device = next(unit.parameters()).device.type
    # Inside of a block that is recomputed its hooks would run the block again for the proof's own backward pass.
    own_graph = torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is)
    with torch.enable_grad(), torch.autocast(device, enabled=False), own_graph:
        try:
            expected = _run(whole, *few)
        except Exception:  # a first dimension that is no batch: the input as it is
            few = _first_samples(args, kwargs, None)
            expected = _run(whole, *few)
        _require_same_input(name, *few, ranks)
        try:
            found = _run(split, *few)
        except Exception as error:
            problem = f"does not run on this rank's part: {_first(error)}"
    problem = problem or _difference(expected, found, split, ranks)
    problems = [each for each in all_gather_json(ranks.part, f"proof of {name}", problem) if each]
    summed: list[str] = []
    if not problems:
        states = _states(expected, found, split, ranks)
        said = all_gather_json(ranks.part, f"gradients of {name}", states)
        for path in states:
            if all("w" in each[path] for each in said):
                continue
            if all("s" in each[path] for each in said):
                summed.append(path)
            else:
                problems.append(f"has another gradient of {path!r}, and so has the sum over the ranks")
    if problems:
        kind = plain_class_of(unit).__name__
        raise PlanError(
            f"tensor: the split {name or 'model'!r}, a {kind}, {problems[0]}",
            remedy=f'say what its layers are by tensor_recipe, or leave them whole: {{ "{name}*" = "whole" }}',
        )
    return tuple(summed)


@dataclass
class _Outcome:
    outputs: list[torch.Tensor]
    inputs: list[torch.Tensor | None]
    """Gradients of the inputs."""
    gradients: dict[str, torch.Tensor | None]
    """Gradients of the parameters."""


def _run(module: nn.Module, args: Any, kwargs: Any) -> _Outcome:
    dtype = next((each.dtype for each in module.parameters() if each.is_floating_point()), None)
    args, kwargs = detached(args, dtype), detached(kwargs, dtype)
    given = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, torch.Tensor)]
    given = [each for each in given if each.is_floating_point()]
    for at, each in enumerate(given):
        if at == 0:  # the activation: its gradient shows whether the region begins as it should
            each.requires_grad_(True)
    outputs = [each for each in tree_flatten(module(*args, **kwargs))[0] if isinstance(each, torch.Tensor)]
    outputs = [each.whole() if isinstance(each, LazyWhole) else each for each in outputs]
    roots = [each for each in outputs if each.requires_grad]
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(each.shape, generator=generator, dtype=torch.float32).to(each) for each in roots]
    named = {key: each for key, each in module.named_parameters() if each.requires_grad}
    trained = [each for each in given if each.requires_grad]
    wanted = [*trained, *named.values()]
    if not roots or not wanted:
        return _Outcome(outputs, [], {})
    gradients = torch.autograd.grad(roots, wanted, grads, allow_unused=True)
    count = len(trained)
    return _Outcome(outputs, list(gradients[:count]), dict(zip(named, gradients[count:], strict=True)))


def _difference(expected: _Outcome, found: _Outcome, split: nn.Module, ranks: TensorRanks) -> str:
    """Return what the split module does that the plain one does not; an empty text if nothing."""
    if len(expected.outputs) != len(found.outputs):
        return f"returns {len(found.outputs)} tensors, expected {len(expected.outputs)}"
    for at, (right, mine) in enumerate(zip(expected.outputs, found.outputs, strict=True)):
        if at and _is_of_some_heads(right.shape, mine.shape, ranks.size):
            continue  # attention weights of this rank's heads
        if right.shape != mine.shape:
            return f"returns a tensor of shape {list(mine.shape)}, expected {list(right.shape)}"
        if not _is_close(right, mine):
            return "returns other values than the plain one"
    if len(expected.inputs) != len(found.inputs):
        return f"has {len(found.inputs)} inputs with gradients, expected {len(expected.inputs)}"
    for right_, mine_ in zip(expected.inputs, found.inputs, strict=True):
        if (right_ is None) != (mine_ is None):
            return "has a gradient of its input, or has none, unlike the plain one"
        if right_ is not None and mine_ is not None and not _is_close(right_, mine_):
            return "has another gradient of its input than the plain one"
    largest = _largest(expected)
    for path, parameter in split.named_parameters():
        part, right_ = _split_of(parameter), expected.gradients.get(path)
        if part is None or right_ is None:
            continue
        mine_ = found.gradients.get(path)
        if mine_ is None or not _is_close(part.take(right_), mine_, largest):
            return f"has another gradient of {path!r} than the plain one"
    return ""


def _states(expected: _Outcome, found: _Outcome, split: nn.Module, ranks: TensorRanks) -> dict[str, str]:
    """Return whether the gradient of each whole parameter is right as it is (w), and summed (s); a collective."""
    largest, states = _largest(expected), {}
    for path, parameter in split.named_parameters():
        if path not in expected.gradients or _split_of(parameter) is not None:
            continue
        right, mine = (
            torch.zeros_like(parameter) if each is None else each
            for each in (expected.gradients[path], found.gradients.get(path))
        )
        total = ranks.all_reduce(mine.clone(memory_format=torch.contiguous_format), path)
        states[path] = "w" * _is_close(right, mine, largest) + "s" * _is_close(right, total, largest)
    return states


def _split_of(parameter: torch.Tensor) -> Split | None:
    """Return what part of a parameter a tensor rank has; experts are alike on all of them."""
    split = split_of(parameter)
    return split if split is not None and split.degree == DEGREE else None


def _largest(outcome: _Outcome) -> float:
    found = [each for each in outcome.gradients.values() if each is not None and each.numel()]
    return max((float(each.abs().max()) for each in found), default=0.0)


def _is_close(right: torch.Tensor, mine: torch.Tensor, largest: float = 0.0) -> bool:
    if not right.is_floating_point():
        return torch.equal(right, mine)
    if right.shape != mine.shape:
        return False
    if not right.numel():
        return True
    right, mine = right.detach(), mine.detach()
    finite = torch.isfinite(right)
    if not torch.equal(finite, torch.isfinite(mine)):
        return False
    right, mine = torch.where(finite, right, 0.0), torch.where(finite, mine, 0.0)
    scale = max(float(right.abs().max()), _FLOOR * largest)
    return float((right - mine).abs().max()) <= _TOLERANCE.get(right.dtype, _OF_16_BITS) * scale


def _is_of_some_heads(whole: torch.Size, part: torch.Size, size: int) -> bool:
    """Return whether a shape is another but for one dimension, of which it has a part."""
    different = [(one, other) for one, other in zip(whole, part, strict=False) if one != other]
    return len(whole) == len(part) and len(different) == 1 and different[0][0] == different[0][1] * size


def _first_samples(args: Any, kwargs: Any, count: int | None) -> tuple[Any, Any]:
    """Return the first `count` samples of tensors whose first dimension is that of the first tensor; None: all."""
    tensors = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, torch.Tensor) and each.dim()]
    if not tensors:
        return args, kwargs
    batch = tensors[0].shape[0]

    def cut(value: Any) -> Any:
        if isinstance(value, LazyWhole):
            value = value.whole()
        if isinstance(value, torch.Tensor):
            return value[:count] if value.dim() > 1 and value.shape[0] == batch else value
        if type(value) in (list, tuple):
            return type(value)(cut(each) for each in value)
        return {key: cut(each) for key, each in value.items()} if type(value) is dict else value

    return cut(args), cut(kwargs)


def _require_same_input(name: str, args: Any, kwargs: Any, ranks: TensorRanks) -> None:
    """Raise `PlanError` if the ranks of the group have different inputs: they are one replica's."""
    digest = hashlib.sha256()
    for each in tree_flatten((args, kwargs))[0]:
        if isinstance(each, torch.Tensor):
            digest.update(f"{tuple(each.shape)} {each.dtype}".encode())
            digest.update(bytes_of(each.detach().cpu()).numpy().data)
    said = all_gather_json(ranks.part, f"input of {name}", digest.hexdigest())
    if len(set(said)) > 1:
        raise PlanError(
            f"tensor: the {ranks.size} ranks of a tensor group give {name or 'the model'!r} different inputs",
            remedy="give them the same samples and the same seed: farandole.shard does, and so must own samplers",
        )


def _kind_of(unit: nn.Module) -> str:
    """Return what units have in common that differ in values alone."""
    lines = [
        f"{path} {type(module).__qualname__} {plain_class_of(module).__module__} {_plain_values(module)}"
        for path, module in unit.named_modules()
    ]
    lines += [
        f"{path} {tuple(each.shape)} {each.dtype} {each.requires_grad} {split_of(each)}"
        for path, each in unit.named_parameters()
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _plain_values(module: nn.Module) -> list[str]:
    left_out = ("training", "layer_idx", "_farandole_name")
    return sorted(
        f"{key}={value!r}" for key, value in vars(module).items()
        if isinstance(value, (int, float, str, bool, tuple)) and key not in left_out
    )  # fmt: skip


def _first(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
