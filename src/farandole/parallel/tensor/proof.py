"""The proof of a recipe: a split unit does what the plain module does, tried once on a small input.

[Note: proof of a recipe] Before the first forward pass of a unit its ranks run both the plain module and the split
one on the first samples of the real input, forward and backward. Both have the same drawn values, all of which
train, and a sum of the input and drawn values: where a branch begins at zero, equal gradients would prove nothing.
Outputs, what modules keep for the loss, and gradients must be equal to rounding, or all ranks raise an error that
names the module. Units that are equal but for values are proven once. Which of the parameters that are whole on
all ranks get a part of their gradient on each is found in the graph (see [Note: partial gradients]), and the sum
must be that of the plain one.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten

from ...comm.device.streams import untraced
from ...comm.messages import bytes_of
from ...comm.world.store_sync import all_gather_json
from ...comm.world.world import refused_by_all
from ...core.vocabulary.errors import PlanError
from ..changed_class import plain_class_of
from ..split import Split, split_of
from .clone import OwnHook, clone, detached, first_samples, varied
from .lazy import LazyWhole
from .partial_gradients import Entrance, Entrants, kinds_of_gradients
from .regions import DEGREE, RegionSeed, TensorRanks, undivided_draw
from .sequence import EnterBlock
from .split_layers import inside

SAMPLES = 2
_NAMED = 4
"""Layers that an error names at most."""
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
_OF_16_BITS = 5e-2
_FLOOR = 1e-2
"""Gradients below this share of a unit's largest are compared with that: some are zero but for rounding."""


@dataclass
class Proofs:
    """The proofs of one model."""

    ranks: TensorRanks
    model: weakref.ref[nn.Module]
    seed: RegionSeed
    proven: dict[str, Entrants] = field(default_factory=dict)
    """Kinds of units that were proven, and which of their whole parameters do not enter as they are."""
    names: list[str] = field(default_factory=list)
    """The units."""
    waiting: set[str] = field(default_factory=set)
    """Units that have not run yet."""

    def install(self, name: str, unit: nn.Module) -> None:
        """Prove `unit` before its first forward pass."""
        self.names.append(name)
        self.waiting.add(name)
        entrance = Entrance(self.ranks, name)
        hook = _ProveOnce(self, name, entrance)
        hook.handle = unit.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
        entrance.install(unit)

    @untraced
    def prove(self, name: str, unit: nn.Module, args: Any, kwargs: Any) -> Entrants:
        """Prove `unit` on an input; raise `PlanError` on all ranks if it fails on one."""
        self.waiting.discard(name)
        key = _kind_of(unit)
        if key not in self.proven:
            try:
                self.proven[key] = self._compare(name, unit, args, kwargs)
            except PlanError as refusal:
                raise refused_by_all(refusal) from None
        return self.proven[key]

    def _compare(self, name: str, unit: nn.Module, args: Any, kwargs: Any) -> Entrants:
        """Return which whole parameters of `unit` do not enter as they are. See [Note: proof of a recipe].

        Raises `PlanError`, on all ranks of the group, if the split module does not do what the plain one does.
        """
        ranks, split = self.ranks, clone(unit, whole=False)
        expected, found, problem = _Outcome(), _Outcome(), ""
        device = next(unit.parameters()).device.type
        # Inside of a block that is recomputed its hooks would run the block again for the proof's backward pass.
        own_graph = saved_tensors_hooks(_as_it_is, _as_it_is)
        with torch.enable_grad(), torch.autocast(device, enabled=False), own_graph:
            plain, few = _run_plain(clone(unit, whole=True), args, kwargs)
            _require_same_input(name, *few, ranks)
            try:
                divided = _run(split, *few)
                if len(plain.outputs) != len(divided.outputs) or plain.kept != divided.kept:
                    problem = f"returns or keeps {len(divided.outputs)} tensors, expected {len(plain.outputs)}"
                else:
                    pairs = zip(plain.outputs, divided.outputs, strict=True)
                    kinds = ["whole" if one.shape == other.shape else "part" for one, other in pairs]
                    expected, found = _go_back(plain, kinds), _go_back(divided, kinds)
            except Exception as error:
                problem = f"does not run on this rank's part: {_first(error)}"
        problem = problem or _difference(expected, found, split, ranks) or self._strange_use(found, split)
        whole = {
            path: found.kinds.get(id(each)) for path, each in split.named_parameters(remove_duplicate=False)
            if each.requires_grad and _split_of(each) is None
        }  # fmt: skip
        entrants = Entrants(
            tuple(path for path, kinds in whole.items() if "part" in (kinds or ())),
            tuple(path for path, kinds in whole.items() if kinds is None),
        )
        said = all_gather_json(ranks.part, f"proof of {name}", [problem, [entrants.summed, entrants.unproven]])
        problems = [each for each, _ in said if each]
        if not problems and any(each != said[0][1] for _, each in said):
            problems.append("runs in another way on another rank of its group")
        if not problems:
            problem = _difference_of_whole(expected, found, split, entrants, ranks)
            with torch.autocast(device, enabled=False), saved_tensors_hooks(_as_it_is, _as_it_is):
                runs = [partial(_run, each.train(), *few) for each in (plain.module, split)]
                problem = undivided_draw(self.seed, *runs) or problem
            said = all_gather_json(ranks.part, f"gradients of {name}", problem)
            problems = [each for each in said if each]
        if problems:
            raise PlanError(
                f"tensor: the split {name or 'model'!r}, a {plain_class_of(unit).__name__}, {problems[0]}",
                remedy=_remedy(name, unit),
            )
        return entrants

    def _strange_use(self, found: _Outcome, split: nn.Module) -> str:
        """Return which parameter cannot be summed because of how the unit uses it; an empty text if none."""
        names = {id(each): path for path, each in split.named_parameters()}
        model = self.model()
        others = {} if model is None else {id(each): name for name, each in model.named_parameters()}
        for leaf, kinds in found.leaves:
            if id(leaf) in names and len(kinds) > 1:
                return f"uses {names[id(leaf)]!r} both inside and outside of its divided part"
            if isinstance(leaf, nn.Parameter) and id(leaf) not in names and "part" in kinds:
                name = others.get(id(leaf), f"of shape {list(leaf.shape)}")
                return f"uses the parameter {name!r}, no attribute of its modules, in its divided part"
        return ""


def _remedy(name: str, unit: nn.Module) -> str:
    whole = [
        path for path, module in unit.named_modules()
        if any(each.dim() > 1 and _split_of(each) is None for each in module.parameters(recurse=False))
    ]  # fmt: skip
    if whole and any(isinstance(hook, EnterBlock) for hook in unit._forward_pre_hooks.values()):
        more = f" and {len(whole) - _NAMED} more" if len(whole) > _NAMED else ""
        return (
            "with sequence_parallel a rank has some of the tokens, which layers that are whole may not mix "
            f"({', '.join(whole[:_NAMED])}{more}): divide those of an attention by tensor_recipe, or leave "
            "sequence_parallel out"
        )
    return f'say what its layers are by tensor_recipe, or leave them whole: {{ "{name}*" = "whole" }}'


class _ProveOnce(OwnHook):
    is_first = True

    def __init__(self, proofs: Proofs, name: str, entrance: Entrance) -> None:
        self.proofs, self.name, self.entrance = proofs, name, entrance
        self.handle: Any = None

    def __call__(self, unit: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_inference_mode_enabled():
            return  # no graph can be made now
        self.handle.remove()
        inside.depth += 1
        try:
            self.entrance.entrants = self.proofs.prove(self.name, unit, args, kwargs)
        finally:
            inside.depth -= 1


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@dataclass
class _Forward:
    """A forward pass of a copy."""

    module: nn.Module
    inputs: list[torch.Tensor]
    """Those in float; the first, the activation, trains: its gradient shows whether the region begins right."""
    outputs: list[torch.Tensor]
    """What it returns, and behind that what its modules keep with a graph: a loop may add it to the loss."""
    kept: list[str]
    """The names of the latter."""


@dataclass
class _Outcome:
    """What a copy did, forward and backward."""

    outputs: list[torch.Tensor] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    inputs: list[torch.Tensor | None] = field(default_factory=list)
    """Gradients of the inputs."""
    gradients: dict[str, torch.Tensor | None] = field(default_factory=dict)
    """Gradients of the parameters."""
    leaves: list[tuple[torch.Tensor, frozenset[str]]] = field(default_factory=list)
    """What the outputs are made of, and how gradients reach it."""

    @property
    def kinds(self) -> dict[int, frozenset[str]]:
        """How gradients reach a leaf, by its identity."""
        return {id(leaf): reached for leaf, reached in self.leaves}


def _run_plain(module: nn.Module, args: Any, kwargs: Any) -> tuple[_Forward, tuple[Any, Any]]:
    """Run the plain module; return its pass, and the input that it ran on: of few samples, if it runs on few.

    A first dimension may be no batch, and values may have to be what they are: then the input is taken as it is.
    """
    for count in (SAMPLES, None):
        few = first_samples(args, kwargs, count)
        for given in (varied(*few), few):
            is_last = count is None and given is few
            try:
                done = _run(module, *given)
            except Exception:  # the module's own code, which may take no such input
                if is_last:
                    raise
                continue
            if given is few or all(bool(each.isfinite().all()) for each in done.outputs):
                return done, given
    raise AssertionError("the last try returns or raises")


def _run(module: nn.Module, args: Any, kwargs: Any) -> _Forward:
    dtype = next((each.dtype for each in module.parameters() if each.is_floating_point()), None)
    args, kwargs = detached(args, dtype), detached(kwargs, dtype)
    given = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, torch.Tensor)]
    given = [each for each in given if each.is_floating_point()]
    for each in given[:1]:
        each.requires_grad_(True)
    before = list(_kept(module).values())
    outputs = [each for each in tree_flatten(module(*args, **kwargs))[0] if isinstance(each, torch.Tensor)]
    kept = {name: each for name, each in _kept(module).items() if all(each is not other for other in before)}
    outputs = [each.whole() if isinstance(each, LazyWhole) else each for each in [*outputs, *kept.values()]]
    return _Forward(module, given, outputs, list(kept))


def _kept(module: nn.Module) -> dict[str, torch.Tensor]:
    return {
        f"{path}.{key}".removeprefix("."): value
        for path, each in module.named_modules() for key, value in vars(each).items()
        if isinstance(value, torch.Tensor) and value.grad_fn is not None
    }  # fmt: skip


def _go_back(done: _Forward, kinds: Sequence[str]) -> _Outcome:
    """Run backward from the outputs that all ranks have whole; `kinds` says of each whether they do."""
    roots = [(each, kind) for each, kind in zip(done.outputs, kinds, strict=True) if each.requires_grad]
    named = {key: each for key, each in done.module.named_parameters() if each.requires_grad}
    outcome = _Outcome(done.outputs, done.kept, leaves=kinds_of_gradients(roots))
    trained = [each for each in done.inputs if each.requires_grad]
    whole = [each for each, kind in roots if kind == "whole"]
    if whole and (trained or named):
        generator = torch.Generator().manual_seed(0)
        grads = [torch.randn(each.shape, generator=generator, dtype=torch.float32).to(each) for each in whole]
        gradients = torch.autograd.grad(whole, [*trained, *named.values()], grads, allow_unused=True)
        outcome.inputs = list(gradients[: len(trained)])
        outcome.gradients = dict(zip(named, gradients[len(trained) :], strict=True))
    return outcome


def _difference(expected: _Outcome, found: _Outcome, split: nn.Module, ranks: TensorRanks) -> str:
    """Return what the split module does that the plain one does not; an empty text if nothing."""
    returned = len(expected.outputs) - len(expected.kept)
    for at, (right, mine) in enumerate(zip(expected.outputs, found.outputs, strict=True)):
        if at and _is_of_some_heads(right.shape, mine.shape, ranks.size):
            continue  # attention weights of this rank's heads
        what = "returns" if at < returned else f"keeps {expected.kept[at - returned]!r},"
        if right.shape != mine.shape:
            return f"{what} a tensor of shape {list(mine.shape)}, expected {list(right.shape)}"
        if not _is_close(right, mine):
            return f"{what} {'other values than' if at < returned else 'with other values than in'} the plain one"
    if len(expected.inputs) != len(found.inputs):
        return f"has {len(found.inputs)} inputs with gradients, expected {len(expected.inputs)}"
    for right_, mine_ in zip(expected.inputs, found.inputs, strict=True):
        if (right_ is None) != (mine_ is None):
            return "has a gradient of its input, or has none, unlike the plain one"
        if right_ is not None and mine_ is not None and not _is_close(right_, mine_):
            return "has another gradient of its input than the plain one"
    largest, proven = _largest(expected), False
    for path, parameter in split.named_parameters():
        part, right_ = _split_of(parameter), expected.gradients.get(path)
        if part is None or right_ is None:
            continue
        proven = proven or bool(right_.any())
        mine_ = found.gradients.get(path)
        if mine_ is None or not _is_close(part.take(right_), mine_, largest):
            return f"has another gradient of {path!r} than the plain one"
    if expected.inputs and not proven:
        return "gives its divided layers no gradient, whatever their values, so that nothing is proven"
    return ""


def _difference_of_whole(
    expected: _Outcome, found: _Outcome, split: nn.Module, entrants: Entrants, ranks: TensorRanks
) -> str:
    """Return which whole parameter has another gradient than in the plain module; a collective."""
    largest, wrong = _largest(expected), []
    for path, parameter in split.named_parameters():
        if path not in expected.gradients or _split_of(parameter) is not None:
            continue
        right, mine = (
            torch.zeros_like(parameter) if each is None else each
            for each in (expected.gradients[path], found.gradients.get(path))
        )
        if path in entrants.summed:
            mine = ranks.all_reduce(mine.clone(memory_format=torch.contiguous_format), path)
        if not _is_close(right, mine, largest):
            wrong.append(path)
    return f"has another gradient of {wrong[0]!r} than the plain one" if wrong else ""


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
        f"{path} {tuple(each.shape)} {each.dtype} {split_of(each)}" for path, each in unit.named_parameters()
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
