"""The one owner of ``parameter.grad``: where a gradient lies, and every assignment to it.

`FlatGradients` holds those of a bucket. Once loaded, the parameters' gradients *are* views of its flat tensor, so
the sum arrives where the optimizer reads it and nothing is copied back.

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

[Note: residuals and the loss scale] Under a `GradScaler` gradients are those of the loss times its scale, and a
residual is what is missing of them. When the scale changes, the same residual means another gradient: after the
scale has doubled, half of it would be lost. So before an exchange what codecs keep is multiplied by the change of
the scale since the last one. The scaler is known from its first step on; steps that it skips before leave nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from ..device.streams import has_streams
from ..messages import accumulates_in_fp32
from ..transport.shared_tensor import DeviceSlices, DeviceSliceTensor, SharedMemory, SharedTensor
from .parameters import Layout

# The factor of a `GradScaler` on the losses: residuals are in units of it.


class LossScale:
    """The scale of the gradients that one reducer exchanges."""

    def __init__(self) -> None:
        self.is_followed = False
        """Whether a scale is known."""
        self._read: Callable[[], float] = lambda: 0.0
        self._last = 0.0

    def follow(self, read: Callable[[], float]) -> None:
        """Ask `read` from now on; it returns the scale of the gradients that were just exchanged, 0.0: unknown."""
        self._read, self._last = read, read()
        self.is_followed = True

    def change(self) -> float:
        """Return by what the scale was multiplied since the last exchange, where another one begins."""
        now = self._read()
        last, self._last = self._last, now or self._last
        return now / last if now > 0 and last > 0 else 1.0


# Gradients that stay on this rank until a later pass, and the factor they are to be exchanged with.


class LocalAccumulation:
    """What the passes since the last exchange left in ``parameter.grad``. See [Note: the true mean]."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], *, may_hold: bool = True) -> None:
        """`may_hold`: whether passes may be held at all; from ZeRO stage 2 on shards are kept."""
        self.may_hold = may_hold
        self.loss_scale = LossScale()
        self.passes = 0
        """Backward passes whose gradients have not been exchanged."""
        self.uncounted = 0
        """How many of them are compared with no other rank's: parts of a batch that this rank alone divides so."""
        self.factor = 1.0
        """This rank's share of the samples while they ran, over the mean share."""
        self.aside: GradsAside | None = None
        """The accumulated gradients while the pass of a placeholder runs, whose own must not be added to them."""
        self.parameters = parameters
        self._weighs_nothing = False
        """Whether only placeholders' gradients were accumulated, which were dropped here."""

    def forget_cleared(self) -> None:
        """Begin to count anew where the loop has thrown away what was accumulated: all gradients are None."""
        if not self.passes:
            self._weighs_nothing = False
        elif self.aside is not None or self._weighs_nothing:
            return
        elif all(each.grad is None for each in self.parameters):
            self.passes = self.uncounted = 0

    def share_changes(self, previous: float, factor: float) -> None:
        """Rescale accumulated gradients so that one factor fits them all. See [Note: the true mean].

        Called before the batch of the new factor is used.
        """
        self.restore()
        if not self.passes:
            return
        if factor == 0.0:
            self.aside = GradsAside(self.parameters)  # the coming pass is a placeholder's
            return
        scale, self.factor = self.factor / factor, factor
        self._weighs_nothing = scale == 0.0
        scale_grads(self.parameters, scale)

    def restore(self) -> None:
        """Put back the gradients that were set aside: the placeholder's pass is over."""
        if self.aside is not None:
            self.aside.restore()
            self.aside = None


ALIGNMENT_BYTES = 64
"""Every gradient begins on a cache line: optimizers are slower on others."""
FEW_LARGE_ELEMENTS = 8192
"""From this mean size on, gradients are scaled while they are copied, one call each."""
_NEW = 2
"""Loads of a bucket in which memory of the user's own is looked for; later ones look where it was found."""


def references(tensors: list[torch.Tensor] | list[torch.Tensor | None]) -> list[int]:
    """Return how often each object is referred to from Python."""
    return list(map(sys.getrefcount, tensors))


def _unheld() -> tuple[int, int]:
    """Return how many references a tensor in a list has, and how many when it is a parameter's gradient too."""
    parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.float32))
    parameter.grad = torch.zeros(1, dtype=torch.float32)
    return references([torch.zeros(1, dtype=torch.float32)])[0], references([parameter.grad])[0]


UNHELD, UNHELD_GRADIENT = _unheld()
"""References of a tensor in a list that no other code holds; the same of a gradient of a parameter."""


@dataclass
class Taken:
    """Where the gradients of a bucket's members are, by position."""

    absent: list[int] = field(default_factory=list)
    """Members without a gradient."""
    in_place: list[int] = field(default_factory=list)
    """The gradient is the bucket's view."""
    elsewhere: dict[int, torch.Tensor] = field(default_factory=dict)
    """Gradients that have memory of their own."""
    kept: dict[int, torch.Tensor] = field(default_factory=dict)
    """Those of `elsewhere` that stay the parameter's."""
    memory_is_held: bool = False
    """Other code holds the memory that would be overwritten."""


class FlatGradients:
    """Gradients of one dtype side by side in one flat tensor, as all ranks agreed."""

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        layouts: Sequence[Layout],
        *,
        memory: SharedMemory | DeviceSlices | None = None,
        tail: int = 0,
        multiple: int = 1,
    ) -> None:
        """Lay out the gradients of `parameters`.

        `memory`: where they are to lie; None: in this process's own memory. Behind them are `tail` elements for
        who sends the tensor, and zeros until its elements are a multiple of `multiple`.
        """
        # - Members
        self.parameters = list(parameters)
        self.unused: list[int] = []
        """Positions of members without a gradient on this rank, in the last `load`."""
        # - Memory
        dtype = self.parameters[0].dtype
        offsets, self.elements = _offsets(self.parameters)
        length = -(-(self.elements + tail) // multiple) * multiple
        self.shared: SharedTensor | DeviceSliceTensor | None = None
        """What `flat` is this rank's part of."""
        self.divisor = 1
        """What the sum in shared memory is divided by: of narrow floats not every rank's gradient is, which
        rounds."""
        if memory is None:
            flat = torch.zeros(length, dtype=dtype, device=self.parameters[0].device)
        else:
            self.shared = memory.allocate(length, dtype)
            flat = self.shared.mine
            if accumulates_in_fp32(dtype):
                self.divisor = memory.local_size
        self.views: list[torch.Tensor] = []
        """The gradients, by member."""
        self._places = list(zip(offsets, layouts, strict=True))
        self._uses: int | None = None
        self._lie_in(flat)
        self._kept_at: set[int] = set()
        self._loads = 0
        # On a device each call is a launch, which takes longer than a second pass over the memory.
        is_large = self.elements >= FEW_LARGE_ELEMENTS * len(self.views)
        self._is_one_by_one = is_large and not has_streams(flat.device)
        # - Who uses the gradients
        self._version_used = -1
        """Version of `flat` when a step used the gradients."""
        self._copied_back: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Gradients of the user's own memory, with the views whose mean they take."""

    @property
    def nbytes(self) -> int:
        """Bytes of the flat tensor."""
        return self.flat.nbytes

    # -- one exchange --------------------------------------------------------------------------

    @torch.no_grad()
    def load(self, weight: float) -> None:
        """Take the gradients, times `weight`. A weight of 0 contributes nothing, whatever they are (NaN too)."""
        weight *= self.divisor
        self._copied_back = []
        taken = self._take()
        if taken.memory_is_held:
            self._leave_memory()
            taken = self._take()
        views = self.views
        self._copied_back = [(gradient, views[i]) for i, gradient in taken.kept.items()]
        targets = [views[i] for i in taken.elsewhere]
        for i in taken.absent:
            views[i].zero_()
        if weight == 0.0:
            self.flat.zero_()
        elif self._is_one_by_one:
            for grad, target in zip(taken.elsewhere.values(), targets, strict=True):
                torch.mul(grad, weight, out=target)
            for i in taken.in_place:
                views[i].mul_(weight)
        else:
            if targets:
                torch._foreach_copy_(targets, list(taken.elsewhere.values()))
            self.flat.mul_(weight)
        self._become_grads([i for i in taken.elsewhere if i not in taken.kept])
        self.unused = taken.absent

    @torch.no_grad()
    def add(self, position: int, tensor: torch.Tensor, factor: float) -> None:
        """Add `tensor` times `factor` to a member's gradient, after `load`."""
        self.views[position].add_(tensor, alpha=factor * self.divisor)

    def note_uses(self) -> None:
        """Count the uses of the memory while only the bucket has it: before its first gradients are the sum."""
        if self._uses is None:
            self._uses = self._count_uses()

    @torch.no_grad()
    def finalize(self, ranks: Sequence[float]) -> None:
        """Let the means be the gradients. `ranks`: how many had a gradient, by member, where some are `unused`."""
        self._become_grads([i for i in self.unused if ranks[i]])
        if self._copied_back:
            gradients, means = zip(*self._copied_back, strict=True)
            torch._foreach_copy_(gradients, means)

    # -- between exchanges ---------------------------------------------------------------------

    @property
    def is_held(self) -> bool:
        """Whether some member's gradient still is what the last exchange brought."""
        return any(map(self._lies_here, range(len(self.views)))) or bool(self._copied_back)

    @property
    def is_finite(self) -> bool:
        """Whether the gradients here hold no NaN and no infinity."""
        return bool(torch.isfinite(self.flat).all())

    def note_used(self) -> None:
        """A step uses the gradients as they are."""
        self._version_used = self.flat._version

    def holds_used(self, position: int) -> bool:
        """Return whether the gradient of a member lies here, unchanged since `note_used`."""
        return self._version_used == self.flat._version and self._lies_here(position)

    def zero_missing(self) -> None:
        """Give parameters without a gradient their view, filled with zeros."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is None:
                parameter.grad = view.zero_()

    # -- where they lie ------------------------------------------------------------------------

    def _lie_in(self, flat: torch.Tensor) -> None:
        """Make all views anew, of `flat`."""
        self.flat = flat
        self.views[:] = [flat.as_strided(*layout, offset) for offset, layout in self._places]
        self._pointers = list(map(torch.Tensor.data_ptr, self.views))
        self._uses = None

    def _leave_memory(self) -> None:
        """Leave the memory to those who hold gradients in it, and go on in fresh one."""
        if self.shared is None:
            self._lie_in(torch.zeros_like(self.flat))
        else:
            self.shared.leave_memory()
            self._lie_in(self.shared.mine)

    def _take(self) -> Taken:
        """Say where the gradients are; views that have moved are made anew. Writes nothing."""
        if list(map(torch.Tensor.data_ptr, self.views)) != self._pointers:
            self._mend()
        counts = references(self.views)
        gradients = [parameter.grad for parameter in self.parameters]
        others = references(gradients)
        self._loads += 1
        taken = Taken()
        held = False
        for i, (gradient, view) in enumerate(zip(gradients, self.views, strict=True)):
            if gradient is view:
                taken.in_place.append(i)
                continue
            held = held or counts[i] > UNHELD
            if gradient is None:
                taken.absent.append(i)
                continue
            taken.elsewhere[i] = gradient
            if others[i] > UNHELD_GRADIENT or self._is_part(i, gradient):
                taken.kept[i] = gradient
        if not held and self._uses is not None and len(taken.in_place) < len(self.views):
            held = self._count_uses() > self._uses
        taken.memory_is_held = held
        return taken

    def _mend(self) -> None:
        """See [Note: memory, not objects]. What a stray view holds stays the gradient, which is elsewhere now."""
        for i, (offset, layout) in enumerate(self._places):
            if self.views[i].data_ptr() != self._pointers[i]:
                self.views[i] = self.flat.as_strided(*layout, offset)

    def _become_grads(self, positions: Sequence[int]) -> None:
        """Make the views at `positions` the gradients of their parameters."""
        for i in positions:
            self.parameters[i].grad = self.views[i]

    def _lies_here(self, position: int) -> bool:
        """Return whether the member's gradient lies in the bucket's memory, by whatever object."""
        gradient = self.parameters[position].grad
        return gradient is not None and gradient.data_ptr() == self._pointers[position]

    def _is_part(self, position: int, gradient: torch.Tensor) -> bool:
        """Return whether a gradient is part of a larger tensor. See [Note: memory of the user's own]."""
        if self._loads > _NEW and position not in self._kept_at:
            return False
        is_part = bool(gradient.untyped_storage().nbytes() > gradient.numel() * gradient.element_size())
        if is_part:
            self._kept_at.add(position)
        return is_part

    def _count_uses(self) -> int:
        return int(torch._C._storage_Use_Count(self.flat.untyped_storage()._cdata))


def _offsets(parameters: Sequence[torch.Tensor]) -> tuple[list[int], int]:
    """Return where each gradient begins, and the elements of all, gaps included."""
    aligned = ALIGNMENT_BYTES // parameters[0].element_size()
    offsets, elements = [], 0
    for parameter in parameters:
        elements = -(-elements // aligned) * aligned
        offsets.append(elements)
        elements += parameter.numel()
    return offsets, elements


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
