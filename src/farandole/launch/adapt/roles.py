"""What the parts of a training script are: models with their optimizers, loaders, the loops that train.

[Note: what is trained on] A loader is trained on when a loop over it calls ``backward()``, itself or through
functions of the script. Where no loop can be followed to a loader, names decide: not ``val``, ``test`` and such.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

from ...core.vocabulary.errors import ConfigError
from .script import Binding, Script, dotted

_NO_OPTIMIZER = ("lr_scheduler", "swa_utils", "Scheduler", "_params_with_grad")
_SCHEDULE = re.compile(r"sched(?!ulefree)|warmup", re.IGNORECASE)
"""What is given an optimizer and makes none. AdamWScheduleFree makes one."""
_OPTIMIZERS = re.compile(
    r"(adam|sgd|lion|lamb|lars|adagrad|adadelta|rmsprop|rprop|lbfgs|optim|muon|shampoo|adafactor)", re.IGNORECASE
)
_FOR_EVALUATION = re.compile(
    r"(^|[_.])(val|valid|validation|test|eval|evaluation|dev|holdout)($|[_\d])", re.IGNORECASE
)


@dataclass(frozen=True)
class Trained:
    """A model, and the optimizers that step it."""

    model: str
    optimizers: tuple[str, ...]
    statements: tuple[ast.stmt, ...]
    """That make the optimizers."""


@dataclass(frozen=True)
class Loader:
    """A DataLoader and the statements that give it its name."""

    name: str
    statements: tuple[ast.stmt, ...]
    is_trained_on: bool


def at(script: Script, node: ast.AST) -> str:
    """Return ``file:line``."""
    return f"{script.path}:{getattr(node, 'lineno', 1)}"


# -- models and optimizers -------------------------------------------------------------------------


def find_trained(script: Script) -> list[Trained]:
    """Return each model with its optimizers. Raises `ConfigError` where they cannot be told."""
    found: dict[tuple[ast.AST, str], list[Binding]] = {}
    for binding in script.bindings:
        models = _models_stepped_by(script, binding)
        if models is None:
            continue
        if not models:
            raise ConfigError(
                f"{at(script, binding.statement)}: cannot tell whose parameters {binding.name} steps",
                remedy="add the line yourself after it: model, optimizer = fd.distribute(model, optimizer)",
            )
        if len(models) > 1:
            raise ConfigError(
                f"{at(script, binding.statement)}: {binding.name} steps several models: {', '.join(models)}",
                remedy="put them into one torch.nn.ModuleList before, and give that to fd.distribute",
            )
        where = script.class_of(binding.statement) if models[0].startswith("self.") else binding.scope
        found.setdefault((where or binding.scope, models[0]), []).append(binding)
    trained = []
    for (_, model), bindings in found.items():
        optimizers = tuple(dict.fromkeys(binding.name for binding in bindings))
        trained.append(Trained(model, optimizers, tuple(binding.statement for binding in bindings)))
    return trained


def _models_stepped_by(script: Script, binding: Binding) -> list[str] | None:
    """Return the models of the optimizer that a binding makes; None when it makes none."""
    call = binding.value
    if not isinstance(call, ast.Call) or binding.index is not None:
        return None
    name = script.full_name(call.func)
    if any(word in name for word in _NO_OPTIMIZER):
        return None
    last = name.rpartition(".")[2]
    if name.startswith("torch.optim.") or (
        last not in script.functions
        and not _SCHEDULE.search(last)
        and (_OPTIMIZERS.search(last) or _OPTIMIZERS.search(binding.name))
        and _parameter_owners(script, call, binding)
    ):
        return _parameter_owners(script, call, binding)
    if last in script.functions:
        return _models_of_maker(script, call, binding)
    return None


def _models_of_maker(script: Script, call: ast.Call, binding: Binding) -> list[str] | None:
    """Return the models whose optimizer a function of this script makes and returns to `binding`."""
    for value, place in script.returned(call, None):
        made = value
        if name := dotted(value):
            origins = script.bindings_of(name, place)
            made = origins[-1].value if origins else value
        if isinstance(made, ast.Call) and script.full_name(made.func).startswith("torch.optim."):
            given = [dotted(argument) for argument in (*call.args, *(k.value for k in call.keywords))]
            known = [each for each in given if each and script.bindings_of(each, call)]
            models = [each for each in known if not _is_plain(script, each, call)]
            return models[:1] if len(models) == 1 else []
    return None


def _is_plain(script: Script, name: str, at_: ast.AST) -> bool:
    """Return whether a name holds a number, a text or the like, or parsed arguments."""
    origins = script.bindings_of(name, at_)
    return all(
        isinstance(origin.value, ast.Constant)
        or (isinstance(origin.value, ast.Call) and dotted(origin.value.func).endswith("parse_args"))
        for origin in origins
    )


def _parameter_owners(script: Script, call: ast.AST, binding: Binding, depth: int = 3) -> list[str]:
    """Return the models whose ``parameters()`` an expression has, one name each; follows plain names."""
    owners: list[str] = []
    for node in ast.walk(call):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in ("parameters", "named_parameters"):
                owners.append(_root_of(node.func.value))
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and depth:
            for origin in script.bindings_of(node.id, binding.statement):
                is_list = isinstance(origin.value, (ast.List, ast.ListComp, ast.Call, ast.BinOp, ast.GeneratorExp))
                if origin.statement is not binding.statement and is_list and _mentions_parameters(origin.value):
                    owners += _parameter_owners(script, origin.value, origin, depth - 1)
    return list(dict.fromkeys(owner for owner in owners if owner))


def _mentions_parameters(value: ast.expr) -> bool:
    return any(
        isinstance(node, ast.Attribute) and node.attr in ("parameters", "named_parameters")
        for node in ast.walk(value)
    )


def _root_of(value: ast.expr) -> str:
    """Return the model that ``model.body["layer"]`` is a part of: ``model``, ``self.model``; empty if unknown."""
    while isinstance(value, (ast.Attribute, ast.Subscript)):
        if isinstance(value, ast.Attribute) and dotted(value.value) == "self":
            break
        value = value.value
    return dotted(value)


# -- loops and loaders -----------------------------------------------------------------------------


def training_loops(script: Script) -> list[ast.For | ast.AsyncFor | ast.While]:
    """Return the loops that call ``backward()``, also through functions of the script, innermost first."""
    stepping = _stepping_functions(script)
    loops = [
        node
        for node in ast.walk(script.tree)
        if isinstance(node, (ast.For, ast.AsyncFor, ast.While)) and _steps(node.body, stepping)
    ]
    return sorted(loops, key=lambda loop: -loop.col_offset)


def _stepping_functions(script: Script) -> set[str]:
    """Return the names of functions that call ``backward()``, directly or through others."""
    found: set[str] = set()
    while True:
        more = {
            name
            for name, several in script.functions.items()
            if name not in found and any(_steps(function.body, found) for function in several)
        }
        if not more:
            return found
        found |= more


def _steps(body: list[ast.stmt], stepping: set[str]) -> bool:
    for statement in body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Call):
                last = dotted(node.func).rpartition(".")[2] or getattr(node.func, "attr", "")
                if last == "backward" or last in stepping:
                    return True
    return False


def find_loaders(script: Script) -> list[Loader]:
    """Return the script's loaders. See [Note: what is trained on]."""
    trained_on: list[Binding] = []
    for loop in training_loops(script):
        for source in _sources(script, loop):
            trained_on += [origin for origin in script.origins(source, loop) if is_loader(script, origin)]
    made = [binding for binding in script.bindings if is_loader(script, binding)]
    if not trained_on:
        trained_on = [binding for binding in made if not _FOR_EVALUATION.search(binding.name)]
    names: dict[tuple[ast.AST, str], list[Binding]] = {}
    for binding in made:
        names.setdefault((binding.scope, binding.name), []).append(binding)
    return [
        Loader(name, tuple(binding.statement for binding in several), any(b in trained_on for b in several))
        for (_, name), several in names.items()
    ]


def is_loader(script: Script, binding: Binding, depth: int = 3) -> bool:
    """Return whether a binding makes a DataLoader: by its class, a subclass, or a function of the script."""
    return _is_loader_value(script, binding.value, binding.index, binding.statement, depth)


def _is_loader_value(script: Script, value: ast.expr, index: int | None, place: ast.AST, depth: int) -> bool:
    if not isinstance(value, ast.Call) or not depth:
        return False
    name = script.full_name(value.func)
    last = name.rpartition(".")[2]
    if index is None and (last.endswith("DataLoader") or _is_loader_class(script, last)):
        return True
    for returned, where in script.returned(value, index):
        other = dotted(returned)
        if not other:
            if _is_loader_value(script, returned, None, where, depth - 1):
                return True
        elif any(is_loader(script, origin, depth - 1) for origin in script.origins(other, where)):
            return True
    return False


def _is_loader_class(script: Script, name: str) -> bool:
    owner = script.classes.get(name)
    return owner is not None and any(dotted(base).endswith("DataLoader") for base in owner.bases)


def _sources(script: Script, loop: ast.For | ast.AsyncFor | ast.While) -> list[str]:
    """Return the names that a loop takes its batches from: what it is over, and what ``next`` is called on."""
    found = [] if isinstance(loop, ast.While) else _names_in(loop.iter)
    for statement in loop.body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Call) and dotted(node.func) == "next" and node.args:
                found += _names_in(node.args[0])
    more = []
    for name in found:
        for origin in script.bindings_of(name, loop):
            if isinstance(origin.value, ast.Call):
                more += _names_in(origin.value)  # batches = iter(loader)
    return list(dict.fromkeys([*found, *more]))


def _names_in(value: ast.expr) -> list[str]:
    """Return the plain names that an iterable is made of, through ``enumerate``, ``tqdm`` and the like."""
    if name := dotted(value):
        return [name]
    if isinstance(value, ast.Call):
        own = dotted(value.func.value) if isinstance(value.func, ast.Attribute) else ""
        given = [name for argument in value.args for name in _names_in(argument)]
        return given if given or not own else [own]
    if isinstance(value, ast.Tuple):
        return [name for each in value.elts for name in _names_in(each)]
    return []
