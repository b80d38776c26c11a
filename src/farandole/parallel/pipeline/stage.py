"""One stage of a model on its rank: forward and backward of micro-batches.

[Note: two parts of one pass] The first part runs autograd for the inputs alone, and keeps the gradients that
reach the nodes from which parameters are fed. The second part starts from those nodes, for the parameters alone:
no node computes the same gradient twice. Parameters that several such nodes feed are computed together: what flows
from one of them to another is replaced by what was kept, as it is in there already. (Zero bubble: Qi et al.
2401.10241.)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, Node
from torch.distributed.fsdp import FSDPModule

from ...comm.engine.in_flight import joined_passes
from ...core.vocabulary.errors import ConfigError
from .program import CutProgram, Program, Segment, run_segment

# A backward pass in two parts: gradients of a stage's inputs now, of its parameters later.


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


class _StagePass(NamedTuple):
    """What is kept of a forward pass until its backward pass."""

    received: dict[int, torch.Tensor]
    """Leaves with gradients."""
    roots: dict[int, torch.Tensor]
    """Values with gradients that were sent on; the loss at -1, and the losses of layers at -2."""
    segment: Segment
    program: Program


_LOSS, _LAYERS = -1, -2
LayerLoss = Callable[[nn.Module], torch.Tensor | None]
"""Returns a loss that a module's last forward pass has beside the loss function's; None if it has none."""


class Stage:
    """The passes of one stage in one step."""

    def __init__(
        self, model: nn.Module, number: int, *, trains: bool, layer_loss: LayerLoss | None = None
    ) -> None:
        """`trains`: whether backward passes follow."""
        self._model, self._number, self._trains, self._layer_loss = model, number, trains, layer_loss
        self.layer_losses: dict[int, torch.Tensor] = {}
        """By micro-batch, detached: added up over the layers of the stage."""
        self._passes: dict[int, _StagePass] = {}
        self._weights: dict[int, Callable[[], None]] = {}

    def forward(
        self,
        micro_batch: int,
        cut: CutProgram,
        inputs: list[torch.Tensor],
        received: list[torch.Tensor],
        *,
        loss_of: Callable[[Any], torch.Tensor],
    ) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """Return the tensors for the next stage; of the last stage, the loss, detached."""
        program, segment = cut.program, cut.segments[self._number]
        values = {number: inputs[number] for number in segment.needs_inputs}
        leaves: dict[int, torch.Tensor] = {}
        changed = {before for call in segment.calls for before, _ in call.renames}
        for number, tensor in zip(segment.receives, received, strict=True):
            if program.specs[number].trains and self._trains:
                leaves[number] = tensor.requires_grad_()
            values[number] = tensor.clone() if number in leaves and number in changed else tensor
        output = _run(segment, self._model, values)
        roots = {number: values[number] for number in segment.sends if program.specs[number].trains}
        loss = None
        if segment.output is not None:
            loss = require_loss(loss_of(output), trains=self._trains)
            roots[_LOSS] = loss
        extra = self._loss_of_layers(segment)
        if extra is not None:
            self.layer_losses[micro_batch] = extra.detach()
            roots[_LAYERS] = extra
        if self._trains:
            self._passes[micro_batch] = _StagePass(leaves, roots, segment, program)
        sent = [values[number].detach().contiguous() for number in segment.sends]
        return sent, None if loss is None else loss.detach()

    def _loss_of_layers(self, segment: Segment) -> torch.Tensor | None:
        if self._layer_loss is None:
            return None
        names = {call.target: None for call in segment.calls if call.function is None}
        found = [self._layer_loss(self._model.get_submodule(name)) for name in names]
        parts = [each for each in found if each is not None]
        return torch.stack(parts).sum() if parts else None

    def backward(self, micro_batch: int, gradients: list[torch.Tensor], factor: float) -> list[torch.Tensor]:
        """Accumulate the gradients of parameters; return those of what was received. `factor`: of the loss."""
        kept = self._passes.pop(micro_batch)
        roots, at_roots = _roots(kept, gradients, factor)
        if roots:
            torch.autograd.backward(roots, at_roots)
        return [_or_zeros(kept, number, leaf.grad) for number, leaf in kept.received.items()]

    def backward_inputs(
        self, micro_batch: int, gradients: list[torch.Tensor], factor: float
    ) -> list[torch.Tensor]:
        """Return the gradients of what was received; `backward_weights` does the rest."""
        kept = self._passes.pop(micro_batch)
        roots, at_roots = _roots(kept, gradients, factor)
        if not kept.received or not roots:
            # No other stage waits for gradients of inputs: all of it is done with the weights.
            self._weights[micro_batch] = partial(torch.autograd.backward, roots, at_roots) if roots else _nothing
            return [_or_zeros(kept, number, None) for number in kept.received]
        found, part = backward_inputs(roots, at_roots, list(kept.received.values()))
        self._weights[micro_batch] = part.run
        return [_or_zeros(kept, number, each) for number, each in zip(kept.received, found, strict=True)]

    def backward_weights(self, micro_batch: int) -> None:
        """Accumulate the gradients of parameters."""
        self._weights.pop(micro_batch)()


def _run(segment: Segment, model: nn.Module, values: dict[int, torch.Tensor]) -> Any:
    """Run `segment` as `run_segment` does; of a sharded model inside its call, which gathers its parameters."""
    if not isinstance(model, FSDPModule):
        return run_segment(segment, model, values)
    numbers = list(values)

    def forward(*tensors: torch.Tensor) -> tuple[Any, dict[int, torch.Tensor]]:
        inner = dict(zip(numbers, tensors, strict=True))
        output = run_segment(segment, model, inner)
        return output, {number: inner[number] for number in segment.sends}

    before = vars(model).get("forward")
    vars(model)["forward"] = forward
    try:
        output, sent = model(*values.values())
    finally:
        del vars(model)["forward"]
        if before is not None:
            vars(model)["forward"] = before
    values.update(sent)
    return output


def require_loss(loss: Any, *, trains: bool) -> torch.Tensor:
    """Return `loss`; raise `ConfigError` unless it is a number with gradients."""
    if not isinstance(loss, torch.Tensor):
        raise ConfigError(
            f"fd.step: the loss function returned a {type(loss).__name__}",
            remedy="return a tensor with one element, the mean over the samples",
        )
    if loss.numel() != 1 or not loss.is_floating_point():
        raise ConfigError(
            f"fd.step: the loss function returned a tensor of shape {list(loss.shape)} and {loss.dtype}",
            remedy="return a tensor with one element, the mean over the samples: loss.mean()",
        )
    if trains and not loss.requires_grad:
        raise ConfigError(
            "fd.step: the loss has no gradients", remedy="let it depend on the model, without detach() or item()"
        )
    return loss.reshape(())


def _roots(
    kept: _StagePass, gradients: list[torch.Tensor], factor: float
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the values to begin the backward pass at, and their gradients."""
    losses = [root for number, root in kept.roots.items() if number < 0]
    sent = [root for number, root in kept.roots.items() if number >= 0]
    pairs = [*zip(sent, gradients, strict=True), *((each, torch.full_like(each, factor)) for each in losses)]
    pairs = [(root, gradient) for root, gradient in pairs if root.requires_grad]
    return [root for root, _ in pairs], [gradient for _, gradient in pairs]


def _or_zeros(kept: _StagePass, number: int, gradient: torch.Tensor | None) -> torch.Tensor:
    return torch.zeros_like(kept.received[number]) if gradient is None else gradient.contiguous()


def _nothing() -> None:
    """No value of the stage has a gradient."""
