"""The one owner of ``parameter.grad``: where a gradient lies, and every assignment to it.

Other modules read ``parameter.grad`` and change numbers in it; which tensor it is, or None, is decided here. A
style test looks for assignments elsewhere.

[Note: memory, not objects] A bucket's gradients are views of its flat tensor. Users and torch itself may give such
a view other memory (``p.grad.data = x``; `Module._apply` does that for every conversion), give the parameter
another gradient, or the same one by another object. So what counts is where memory lies: a view that has moved
is made anew before anything is sent, and a gradient that lies elsewhere is copied in.

[Note: what others hold] Who keeps ``p.grad`` of one pass, a view of it or an array on it, and clears that of the
parameter, must find it as it was when the next pass has run. An object that others hold has more references than
ours; a view of the memory has the storage in use. Then the bucket leaves that memory to them and takes fresh one.
A gradient that still *is* the parameter's is added to in place, as without Farandole.

[Note: memory of the user's own] A gradient that other code holds when it is taken, or that is part of a larger
tensor (a flat one made by hand, looked for while a bucket is new), stays the parameter's: it is copied in, and
the mean is copied back.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from .parameters import Layout

_NEW = 2
"""Loads of a bucket in which memory of the user's own is looked for; later ones look where it was found."""


def _references(tensors: list[torch.Tensor] | list[torch.Tensor | None]) -> list[int]:
    return list(map(sys.getrefcount, tensors))


def _unheld() -> tuple[int, int]:
    """Return how many references a tensor in a list has, and how many when it is a parameter's gradient too."""
    parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.float32))
    parameter.grad = torch.zeros(1, dtype=torch.float32)
    return _references([torch.zeros(1, dtype=torch.float32)])[0], _references([parameter.grad])[0]


_UNHELD, _UNHELD_GRADIENT = _unheld()


@dataclass
class Taken:
    """Where the gradients of a bucket's members are, by position."""

    absent: list[int] = field(default_factory=list)
    """Members without a gradient."""
    in_place: list[int] = field(default_factory=list)
    """The gradient is the bucket's view."""
    elsewhere: list[int] = field(default_factory=list)
    """The gradient has memory of its own."""
    gradients: list[torch.Tensor] = field(default_factory=list)
    """Those of `elsewhere`."""
    kept: list[int] = field(default_factory=list)
    """Those of `elsewhere` that stay the parameter's."""
    memory_is_held: bool = False
    """Other code holds the memory that would be overwritten."""


class GradientViews:
    """The views of one flat tensor that are the gradients of `parameters`."""

    def __init__(
        self,
        flat: torch.Tensor,
        parameters: Sequence[torch.nn.Parameter],
        offsets: Sequence[int],
        layouts: Sequence[Layout],
    ) -> None:
        self.views: list[torch.Tensor] = []
        self._parameters = parameters
        self._places = list(zip(offsets, layouts, strict=True))
        self._kept_at: set[int] = set()
        self._loads = 0
        self.lie_in(flat)

    def lie_in(self, flat: torch.Tensor) -> None:
        """Make all views anew, of `flat`."""
        self._flat = flat
        self.views[:] = [flat.as_strided(*layout, offset) for offset, layout in self._places]
        self._pointers = list(map(torch.Tensor.data_ptr, self.views))
        self._uses: int | None = None

    def note_uses(self) -> None:
        """Count the uses of the memory while only the bucket has it: before its first gradients are the sum."""
        if self._uses is None:
            self._uses = self._count_uses()

    def mended(self) -> list[torch.Tensor]:
        """Return the views, none of which has been given other memory: for who asks where they lie."""
        if list(map(torch.Tensor.data_ptr, self.views)) != self._pointers:
            self._mend()
        return self.views

    def take(self) -> Taken:
        """Say where the gradients are; views that have moved are made anew. Writes nothing."""
        self.mended()
        references = _references(self.views)
        gradients = [parameter.grad for parameter in self._parameters]
        others = _references(gradients)
        self._loads += 1
        taken = Taken()
        held = False
        for i, (gradient, view) in enumerate(zip(gradients, self.views, strict=True)):
            if gradient is view:
                taken.in_place.append(i)
                continue
            held = held or references[i] > _UNHELD
            if gradient is None:
                taken.absent.append(i)
                continue
            taken.elsewhere.append(i)
            taken.gradients.append(gradient)
            if others[i] > _UNHELD_GRADIENT or self._is_part(i, gradient):
                taken.kept.append(i)
        if not held and self._uses is not None and len(taken.in_place) < len(self.views):
            held = self._count_uses() > self._uses
        taken.memory_is_held = held
        return taken

    def become_grads(self, positions: Sequence[int], *, but: Sequence[int] = ()) -> None:
        """Make the views at `positions`, without those in `but`, the gradients of their parameters."""
        for i in positions:
            if i not in but:
                self._parameters[i].grad = self.views[i]

    def zero_missing(self) -> None:
        """Give parameters without a gradient their view, filled with zeros."""
        for parameter, view in zip(self._parameters, self.views, strict=True):
            if parameter.grad is None:
                parameter.grad = view.zero_()

    def lies_here(self, position: int) -> bool:
        """Return whether the member's gradient lies in the bucket's memory, by whatever object."""
        gradient = self._parameters[position].grad
        return gradient is not None and gradient.data_ptr() == self._pointers[position]

    def lie_here(self) -> bool:
        """Return whether some member's gradient lies in the bucket's memory."""
        return any(map(self.lies_here, range(len(self.views))))

    def _mend(self) -> None:
        """See [Note: memory, not objects]. What a stray view holds stays the gradient, which is elsewhere now."""
        for i, (offset, layout) in enumerate(self._places):
            if self.views[i].data_ptr() != self._pointers[i]:
                self.views[i] = self._flat.as_strided(*layout, offset)

    def _is_part(self, position: int, gradient: torch.Tensor) -> bool:
        """Return whether a gradient is part of a larger tensor. See [Note: memory of the user's own]."""
        if self._loads > _NEW and position not in self._kept_at:
            return False
        if gradient.layout != torch.strided:
            return False
        is_part = bool(gradient.untyped_storage().nbytes() > gradient.numel() * gradient.element_size())
        if is_part:
            self._kept_at.add(position)
        return is_part

    def _count_uses(self) -> int:
        return int(torch._C._storage_Use_Count(self._flat.untyped_storage()._cdata))


def replace_grad(parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """Let `gradient`, or None, be the gradient of `parameter` from now on."""
    parameter.grad = gradient


def drop_grads(parameters: Iterable[torch.Tensor]) -> None:
    """Leave `parameters` without gradients."""
    for parameter in parameters:
        parameter.grad = None


def zero_missing_grads(parameters: Iterable[torch.Tensor]) -> None:
    """Give `parameters` without a gradient contiguous zeros."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter, memory_format=torch.contiguous_format)


@torch.no_grad()
def scale_grads(parameters: Iterable[torch.Tensor], scale: float) -> None:
    """Multiply gradients by `scale`, in place; by 0 they are dropped, whatever they hold."""
    for parameter in parameters:
        if parameter.grad is not None:
            if scale == 0.0:
                parameter.grad = None
            else:
                parameter.grad.mul_(scale)


class GradsAside:
    """Gradients that were taken off their parameters for one backward pass."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        """Take the gradients off `parameters`, which have none from now on."""
        self._parameters = parameters
        self._gradients = [parameter.grad for parameter in parameters]
        drop_grads(parameters)

    def restore(self) -> None:
        """Put them back, replacing the current gradients of the parameters."""
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient


@torch.no_grad()
def lie_as_parameters(parameters: Sequence[torch.Tensor]) -> None:
    """Give gradients that lie in memory in another order than their parameters a copy that does not.

    If the model's memory format is changed after `fd.distribute`, gradients keep the order that all ranks agreed
    on. Fused optimizers go over both as they lie, without a look at strides: elements would meet strangers.
    """
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None and gradient.layout == torch.strided and gradient.stride() != parameter.stride():
            parameter.grad = torch.empty_like(parameter).copy_(gradient)
