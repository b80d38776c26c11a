"""From the spans of passes to the units of a profile: joined, folded, and per sample.

[Note: what belongs to a unit] A unit begins at a call of a part with parameters. Calls without, such as
activations, and the model's own code belong to the unit before them; between the last block and a unit that is
none, to the latter, so that blocks stay equal. What follows the last unit, the loss among it, is the last unit's,
unless that is a block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ...plan.profile import AttentionFacts, ExpertFacts, ModelUnit, TensorFacts, UnitGradient
from .record import PassRecorder
from .spans import Marks, PassSpan, PassSpans, divided_by, limit_of, may_divide_tokens

_FIGURES = ("forward_flops", "backward_flops", "moved_bytes", "saved_bytes")
_LINEAR = 0.02
"""How far, relative to it, a figure of two samples may be from twice that of one."""


@dataclass
class UnitPart:
    """One unit before folding: the numbers of its spans, and its parameters."""

    name: str
    kind: str
    module: nn.Module | None
    is_block: bool
    spans: list[int] = field(default_factory=list)
    parameters: list[tuple[str, nn.Parameter]] = field(default_factory=list)
    inputs: tuple[Any, ...] = ()
    roles: tuple[str, ...] = ()
    """What tensor parallel does with its layers."""
    times: int = 1
    """For how many equal ones it stands: itself, and blocks that were skipped after it."""

    def key(self) -> Any:
        """Return what equal parts have in common."""
        shapes = [(tuple(each.shape), each.dtype, each.requires_grad) for _, each in self.parameters]
        return self.kind, self.is_block, shapes, self.inputs, self.roles


def find_parts(
    model: nn.Module, observed: PassSpans, first_use: Mapping[int, int], skipped: Mapping[str, int]
) -> list[UnitPart]:
    """Return the parts of a pass; see [Note: what belongs to a unit].

    `first_use`: by id of a parameter, the number of the span that used it first. `skipped`: names of blocks after
    which so many were skipped; spans of skipped ones are left out.
    """
    spans = observed.all
    parts: list[UnitPart] = []
    waiting: list[int] = []
    for number, span in enumerate(spans):
        is_unit = span.module is not None and next(span.module.parameters(), None) is not None
        if not is_unit:
            waiting.append(number)
            continue
        assert span.module is not None, "a unit is a call of a module"
        is_block = span.name in observed.blocks
        kind = type(span.module).__name__
        part = UnitPart(span.name, kind, span.module, is_block, [number], inputs=span.inputs)
        if parts and not (parts[-1].is_block and not is_block):
            parts[-1].spans += waiting
        else:
            part.spans += waiting
        waiting = []
        parts.append(part)
    if not parts:
        parts.append(UnitPart(type(model).__name__, type(model).__name__, model, is_block=False))
    elif parts[-1].is_block:
        parts.append(UnitPart("loss", "loss", None, is_block=False))
    parts[-1].spans += waiting
    _give_parameters(model, first_use, parts)
    return list(_without_skipped(parts, skipped))


def _give_parameters(model: nn.Module, first_use: Mapping[int, int], parts: list[UnitPart]) -> None:
    """Give each parameter to the part that uses it first: to the first that holds it if none does."""
    owner = {number: part for part in parts for number in part.spans}
    holder: dict[int, UnitPart] = {}
    for part in parts:
        for each in () if part.module is None else part.module.parameters():
            holder.setdefault(id(each), part)
    for name, parameter in model.named_parameters():
        user = owner.get(first_use.get(id(parameter), -1))
        part = holder.get(id(parameter), parts[0]) if user is None else user
        part.parameters.append((name, parameter))


def _without_skipped(parts: list[UnitPart], skipped: Mapping[str, int]) -> Iterator[UnitPart]:
    left = 0
    for part in parts:
        if left and part.is_block:
            left -= 1
            continue
        left = skipped.get(part.name, 0)
        part.times += left
        yield part


class UnitMaker:
    """Makes units of the parts of two passes, with n and with 2 n samples."""

    def __init__(self, model: nn.Module, marks: Marks, passes: Sequence[PassRecorder], samples: int) -> None:
        self._model, self._marks, self._samples = model, marks, samples
        self._one, self._two = passes
        order = {id(each): number for number, each in enumerate(self._one.ready)}
        self._order = order
        self.notes: list[str] = []

    def fold(self, parts: list[UnitPart]) -> list[ModelUnit]:
        """Return the units, with equal ones that follow each other folded into one: their mean."""
        for part in parts:
            inside = () if part.module is None else part.module.modules()
            part.roles = tuple(self._marks.layers[each].kind for each in inside if each in self._marks.layers)
        units: list[ModelUnit] = []
        members: list[UnitPart] = []
        for part in parts:
            if members and part.key() != members[-1].key():
                units.append(self._unit(members, part))
                members = []
            members.append(part)
        return [*units, self._unit(members, None)]

    def _unit(self, members: list[UnitPart], after: UnitPart | None) -> ModelUnit:
        first, count = members[0], sum(each.times for each in members)
        weights = [each.times / count for each in members]
        trained = [(name, each) for name, each in first.parameters if each.requires_grad]
        trained.sort(key=lambda pair: self._order.get(id(pair[1]), len(self._order)))
        degrees = {} if first.module is None else divided_by(self._marks, first.module)
        figures = {name: self._figure(members, weights, name) for name in _FIGURES}
        spans = [[self._one.spans.all[number] for number in each.spans] for each in members]
        operations = sum(
            weight * sum(span.operations for span in each) for weight, each in zip(weights, spans, strict=True)
        )
        return ModelUnit(
            name=first.name,
            kind=first.kind,
            count=count,
            gradients=tuple(_gradient(name, each, degrees.get(id(each), "")) for name, each in trained),
            frozen_bytes=sum(each.nbytes for _, each in first.parameters if not each.requires_grad),
            operations=round(operations),
            products=round(self._samples * self._mean(spans, weights, lambda span: span.products)),
            fused_flops=self._mean(spans, weights, lambda span: span.attention.flops),
            fused_backward_flops=self._mean(spans, weights, lambda span: span.attention.backward_flops),
            tensor=self._tensor(first, spans, weights),
            expert=self._expert(first, spans[0]),
            attention=self._attention(spans, weights),
            is_block=first.is_block,
            output_bytes=self._output(members, after) / self._samples,
            forward_flops=figures["forward_flops"],
            backward_flops=figures["backward_flops"],
            uncast_flops=self._mean(spans, weights, lambda span: span.uncast_flops),
            moved_bytes=figures["moved_bytes"],
            saved_bytes=figures["saved_bytes"],
        )

    def _figure(self, members: list[UnitPart], weights: list[float], name: str) -> float:
        one, two = (
            float(
                sum(
                    weight * sum(getattr(each.spans.all[number], name) for number in part.spans)
                    for weight, part in zip(weights, members, strict=True)
                )
            )
            for each in (self._one, self._two)
        )
        grown = (two - one) / self._samples
        if two < one or abs(two - 2 * one) > _LINEAR * two:
            self.notes.append(
                f"{members[0].name}: {name} is not proportional to the batch: {one:g} for {self._samples} samples "
                f"and {two:g} for {2 * self._samples}"
            )
            return one / self._samples
        return grown

    def _output(self, members: list[UnitPart], after: UnitPart | None) -> float:
        """Bytes of what a unit gives to the next: the first tensor of that; or else what it returns last."""
        following = members[1] if len(members) > 1 else after
        if following is not None and following.inputs:
            shape, kind = following.inputs[0]
            return float(math.prod(shape) * (4 if kind.is_floating_point else kind.itemsize))
        calls = [self._one.spans.all[number] for number in members[-1].spans]
        return next((span.output_bytes for span in reversed(calls) if span.name), 0.0)

    def _tensor(self, part: UnitPart, spans: list[list[PassSpan]], weights: list[float]) -> TensorFacts | None:
        if part.module is None:
            return None
        limit = limit_of(self._marks, self._model, part.module)
        if limit < 2:
            return None
        degrees = divided_by(self._marks, part.module)
        split = [p for _, p in part.parameters if p.requires_grad and degrees.get(id(p)) == "tensor"]
        divided = [span.divided for span in spans[-1]]  # the first may need no gradient of its input
        return TensorFacts(
            divides=limit,
            parameters=sum(each.numel() for each in split),
            flops=self._mean(spans, weights, lambda span: span.divided.flops),
            saved_bytes=self._mean(spans, weights, lambda span: span.divided.saved_bytes),
            sum_bytes=max((each.sum_bytes for each in divided), default=0.0) / self._samples,
            forward_sums=sum(each.forward_sums for each in divided),
            backward_sums=sum(each.backward_sums for each in divided),
            tokens=self._tokens(part),
        )

    def _tokens(self, part: UnitPart) -> int:
        """Return the tokens of a sample that may be divided: of a block called with (batch, tokens, features)."""
        assert part.module is not None, "a block is a module"
        shapes = [shape for shape, kind in part.inputs if kind.is_floating_point and len(shape) > 1]
        if not part.is_block or not shapes or len(shapes[0]) != 3 or shapes[0][0] != self._samples:
            return 0
        # What else has samples and features may be another sequence, whose tokens stay whole.
        is_alone = all((shape[0], shape[-1]) != (shapes[0][0], shapes[0][-1]) for shape in shapes[1:])
        return int(shapes[0][1]) if is_alone and may_divide_tokens(self._marks, part.module) else 0

    def _expert(self, part: UnitPart, spans: list[PassSpan]) -> ExpertFacts | None:
        inside = () if part.module is None else part.module.modules()
        held = [each for each in inside if each in self._marks.experts]
        if not held:
            return None
        counts = {self._marks.experts[each] for each in held}
        if len(counts) > 1:
            self.notes.append(f"{part.name}: layers with different numbers of experts: {sorted(counts)}")
        owned = {id(each) for _, each in part.parameters}
        return ExpertFacts(
            experts=min(counts),
            parameters=sum(p.numel() for each in held for p in each.parameters() if id(p) in owned),
            flops=sum(span.experts.flops for span in spans) / self._samples,
            token_bytes=sum(span.experts.token_bytes for span in spans) / self._samples,
        )

    def _mean(self, spans: list[list[PassSpan]], weights: list[float], of: Callable[[PassSpan], float]) -> float:
        """Return the mean over the members of a unit, per sample."""
        sums = [sum(map(of, each)) for each in spans]
        return sum(weight * each for weight, each in zip(weights, sums, strict=True)) / self._samples

    def _attention(self, spans: list[list[PassSpan]], weights: list[float]) -> AttentionFacts | None:
        seen = [span.attention for span in spans[0] if span.attention.heads]
        if not seen:
            return None
        sequence = max(each.sequence for each in seen)
        return AttentionFacts(
            heads=min(each.heads for each in seen),
            key_value_heads=min(each.key_value_heads for each in seen),
            query_bytes=sum(each.query_bytes for each in seen) / self._samples,
            key_value_bytes=sum(each.key_value_bytes for each in seen) / self._samples,
            sequence=sequence,
            saved_bytes=self._mean(spans, weights, lambda span: span.attention.saved_bytes),
            has_dropout=any(each.has_dropout for each in seen),
        )


def _gradient(name: str, parameter: nn.Parameter, degree: str) -> UnitGradient:
    rows = parameter.shape[0] if parameter.dim() else 1
    return UnitGradient(name, rows, parameter.numel() // max(1, rows), parameter.element_size(), degree)
