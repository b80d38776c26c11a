"""Pairs of linear layers with only elementwise operations between them (Shoeybi et al. 2019, section 3).

The module around them is traced by `torch.fx` with its children as leaves: no input is needed. A module that
cannot be traced has no pairs.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

from ...changed_class import plain_class_of
from ..layers.split_layers import is_linear
from .recipe import LayerPart, TensorRecipe

_MODULES = (
    nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.ELU, nn.SELU, nn.CELU, nn.LeakyReLU, nn.Softplus,
    nn.Softsign, nn.Hardswish, nn.Hardtanh, nn.Hardsigmoid, nn.Mish, nn.LogSigmoid, nn.Identity, nn.Dropout,
)  # fmt: skip
_FUNCTIONS = {
    functional.relu, functional.gelu, functional.silu, functional.elu, functional.leaky_relu, functional.mish,
    functional.dropout, functional.hardswish, functional.softplus, functional.sigmoid, functional.tanh,
    functional.selu, functional.relu6, torch.relu, torch.tanh, torch.sigmoid, torch.square, torch.mul, torch.add,
    torch.sub, torch.neg, operator.mul, operator.add, operator.sub, operator.neg, operator.pow, torch.pow,
}  # fmt: skip
_METHODS = {"relu", "tanh", "sigmoid", "mul", "add", "sub", "square", "pow", "neg"}


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def add_pairs(recipe: TensorRecipe, model: nn.Module) -> None:
    """Add the pairs of modules that hold at least two linear layers themselves."""
    for name, module in model.named_modules():
        linear = [child for child, each in module.named_children() if is_linear(each)]
        if len(linear) < 2 or plain_class_of(module).forward is nn.Module.forward:
            continue
        for group in find_pairs(module):
            found = {f"{name}.{path}" if name else path: part for path, part in group.items()}
            if not any(path in recipe.parts for path in found):
                recipe.add(found)


def find_pairs(module: nn.Module) -> list[dict[str, LayerPart]]:
    """Return groups of children of `module`: layers by columns, and the one by rows to which all of them lead."""
    try:
        graph = _Tracer().trace(module)
    except Exception:  # any code may be in a forward pass: what cannot be traced has no pairs
        return []
    called: dict[str, int] = {}
    for node in graph.nodes:
        if node.op == "call_module":
            called[str(node.target)] = called.get(str(node.target), 0) + 1
    groups, taken = [], set[str]()
    for node in graph.nodes:
        if not _is_linear_call(node, module):
            continue
        first = _leads_from(node.args[0] if node.args else None, module)
        names = [str(each.target) for each in first] if first else []
        group = {*names, str(node.target)}
        once = all(called[name] == 1 for name in group) and str(node.target) not in names
        if (
            names
            and once
            and not group & taken
            and all(_leads_only_to(each, node, module) for each in first or ())
        ):
            taken |= group
            source = "traced pair"
            groups.append(
                {**dict.fromkeys(names, LayerPart("columns", source)), str(node.target): LayerPart("rows", source)}
            )
    return groups


def _leads_from(node: Any, module: nn.Module) -> list[fx.Node] | None:
    """Return the linear layers that `node` is made of elementwise; None if of anything else."""
    if not isinstance(node, fx.Node):
        return []
    if _is_linear_call(node, module):
        return [node]
    if not _is_elementwise(node, module):
        return None
    found: list[fx.Node] = []
    for each in node.all_input_nodes:
        before = _leads_from(each, module)
        if before is None:
            return None
        found += [one for one in before if one not in found]
    return found or None


def _leads_only_to(node: fx.Node, end: fx.Node, module: nn.Module) -> bool:
    """Return whether all that is made of `node` goes into `end`, by elementwise operations."""
    return bool(node.users) and all(
        user is end or (_is_elementwise(user, module) and _leads_only_to(user, end, module)) for user in node.users
    )


def _is_linear_call(node: fx.Node, module: nn.Module) -> bool:
    return node.op == "call_module" and is_linear(module.get_submodule(str(node.target)))


def _is_elementwise(node: fx.Node, module: nn.Module) -> bool:
    if node.op == "call_module":
        called = module.get_submodule(str(node.target))
        return isinstance(called, _MODULES) or _is_plain_activation(called)
    return (node.op == "call_function" and node.target in _FUNCTIONS) or (
        node.op == "call_method" and node.target in _METHODS
    )


def _is_plain_activation(module: nn.Module) -> bool:
    """Return whether it is one of transformers' activations."""
    kind = plain_class_of(module)
    return kind.__module__ == "transformers.activations" and next(module.parameters(), None) is None
