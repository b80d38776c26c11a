"""A backward pass in two parts: gradients of a stage's inputs now, of its parameters later.

[Note: two parts of one pass] The first part runs autograd for the inputs alone, and keeps the gradients that
reach the nodes from which parameters are fed. The second part starts from those nodes, for the parameters alone:
no node computes the same gradient twice. Parameters that several such nodes feed are computed together: what flows
from one of them to another is replaced by what was kept, as it is in there already. (Zero bubble: Qi et al.
2401.10241.)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node

from ...comm.reducer.in_flight import joined_passes


class WeightPart:
    """The second part of a backward pass; `run` once."""

    def __init__(self, groups: list[tuple[list[Node], list[torch.Tensor]]], kept: dict[Node, Any]) -> None:
        self._groups, self._kept = groups, kept

    def run(self) -> None:
        """Accumulate the gradients of the parameters. See [Note: joined passes]."""
        with joined_passes():
            self._run()

    def _run(self) -> None:
        for nodes, parameters in self._groups:
            edges, gradients, handles = [], [], []
            for node in nodes:
                kept = self._kept.get(node)
                if kept is None:
                    continue  # no gradient has reached it
                for position, gradient in enumerate(kept):
                    if gradient is not None:
                        edges.append(GradientEdge(node, position))
                        gradients.append(gradient)
                if len(nodes) > 1:
                    handles.append(node.register_prehook(_replace_by(kept)))
            try:
                if edges:
                    torch.autograd.backward(edges, gradients, inputs=parameters)
            finally:
                for handle in handles:
                    handle.remove()
        self._groups, self._kept = [], {}


def backward_inputs(
    outputs: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
) -> tuple[list[torch.Tensor | None], WeightPart]:
    """Return the gradients of `inputs`, leaves with gradients, and what remains to be done.

    `gradients` are those of `outputs`. An input without influence has None.
    """
    roots = [node for node in map(_node_of, outputs) if node is not None]
    ends = dict.fromkeys(map(_node_of, inputs))
    between = _nodes_between(roots, ends)
    kept: dict[Node, Any] = {}
    borders = {node: _parameters_below(node, between, ends) for node in between}
    borders = {node: found for node, found in borders.items() if found}
    handles = [node.register_prehook(_keep(node, kept)) for node in borders]
    try:
        found = torch.autograd.grad(
            list(outputs), list(inputs), list(gradients), retain_graph=True, allow_unused=True
        )
    finally:
        for handle in handles:
            handle.remove()
    for output, gradient in zip(outputs, gradients, strict=True):
        root = _node_of(output)
        if root is None or root in between:
            continue
        # No way leads from it to an input: what feeds it is fed from itself.
        below = _parameters_below(root, set(), ends)
        if below:
            borders[root] = below
            before = kept.get(root, ())
            kept[root] = (*before, *[None] * (output.output_nr - len(before)), gradient)
    return list(found), WeightPart(_groups(borders), kept)


def leaves_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the leaves with gradients that `tensor` was computed from."""
    return [] if tensor.grad_fn is None else _parameters_below(tensor.grad_fn, set(), set())


def _node_of(tensor: torch.Tensor) -> Node | None:
    if not tensor.requires_grad:
        return None
    if tensor.grad_fn is not None:
        return tensor.grad_fn
    viewed = tensor.view_as(tensor).grad_fn
    return None if viewed is None else viewed.next_functions[0][0]


def _nodes_between(roots: Sequence[Node], ends: Collection[Node | None]) -> dict[Node, None]:
    """Return the nodes on ways from `roots` to `ends`, in an order that all ranks with this graph have.

    Backward passes may hold collectives (see [Note: partial gradients]): what runs first may not depend on where a
    node lies in memory, as the order of a set does.
    """
    feeders: dict[Node, list[Node]] = {}
    rest, seen = list(roots), set(roots)
    while rest:
        node = rest.pop()
        for below, _ in node.next_functions:
            if below is None:
                continue
            feeders.setdefault(below, []).append(node)
            if below not in seen:
                seen.add(below)
                rest.append(below)
    between: dict[Node, None] = {}
    rest = [node for node in ends if node is not None and node in seen]
    while rest:
        for node in feeders.get(rest.pop(), []):
            if node not in between:
                between[node] = None
                rest.append(node)
    return between


def _parameters_below(node: Node, between: Container[Node], ends: Container[Node | None]) -> list[torch.Tensor]:
    """Return the leaves that `node` feeds by ways outside of `between`."""
    found: dict[int, torch.Tensor] = {}
    rest, seen = [node], {node}
    while rest:
        for below, _ in rest.pop().next_functions:
            if below is None or below in between or below in seen or below in ends:
                continue
            seen.add(below)
            leaf = getattr(below, "variable", None)
            if isinstance(leaf, torch.Tensor):
                found[id(leaf)] = leaf
            else:
                rest.append(below)
    return list(found.values())


def _groups(borders: dict[Node, list[torch.Tensor]]) -> list[tuple[list[Node], list[torch.Tensor]]]:
    """Bring the nodes together that feed the same parameters."""
    groups: list[tuple[list[Node], dict[int, torch.Tensor]]] = []
    for node, parameters in borders.items():
        mine = {id(each): each for each in parameters}
        nodes = [node]
        for other in [group for group in groups if group[1].keys() & mine.keys()]:
            nodes = [*other[0], *nodes]
            mine |= other[1]
            groups.remove(other)
        groups.append((nodes, mine))
    return [(nodes, list(parameters.values())) for nodes, parameters in groups]


def _keep(node: Node, kept: dict[Node, Any]) -> Callable[[Any], None]:
    def hook(gradients: Any) -> None:
        kept[node] = gradients

    return hook


def _replace_by(kept: Any) -> Callable[[Any], Any]:
    def hook(_: Any) -> Any:
        return kept

    return hook
