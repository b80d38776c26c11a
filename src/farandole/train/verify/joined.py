"""The ranks' batches joined into one, and the gradient of one pass over it on rank 0.

[Note: coupled samples] The gradient that a loss gives to the output of one sample depends on the outputs of others
only if the loss couples them. So the loss is differentiated twice, from itself to the model's outputs: the
derivative of the gradients of the first half of the samples by the outputs of the second half is zero, exactly,
for a mean over samples. A loss that couples samples without a second derivative between them is not found.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from ...comm.batch_weight import tensors_in
from ...comm.world.comm_errors import translated
from ...comm.world.store_sync import all_gather_json
from ...comm.world.world import World
from ...core.vocabulary.text import name_ranks
from ...parallel.instrument.phase_hooks import observe_passes
from .. import chunked_cross_entropy
from ..data.loader_watch import samples_of
from ..gather import has_gathered
from .replay import Gradients, RecordedPass, ancestors, map_tensors
from .verify import Check

_MOST_BYTES = 256 * 2**20


def joined_gradients(here: World, passes: Sequence[RecordedPass]) -> tuple[Gradients | None, str]:
    """Return on rank 0 the gradients of one pass over all ranks' samples, or None and why not.

    To be called by all ranks.
    """
    problem = _problem(passes)
    facts = ["", ""] if problem else _facts(passes[0])
    gathered = all_gather_json(here, "verify/shapes", [problem, *facts])
    problems = [each[0] for each in gathered if each[0]]
    if problems:
        return None, problems[0]
    if len({each[1] for each in gathered}) > 1:
        return None, "the ranks' inputs differ in more than the number of samples"
    recorded = passes[0]
    rows = [int(each[2]) for each in gathered]
    inputs = map_tensors((recorded.arguments, recorded.named), lambda t: _join(here, t, rows))
    weight = recorded.factor / here.size
    gradients = {i: _join(here, g * weight, rows) for i, g in sorted(recorded.output_gradients.items())}
    if here.rank:
        return None, ""
    try:
        with torch.enable_grad():
            found = recorded.replay_joined(inputs, gradients)
    except Exception as failure:
        return None, f"the model does not take the joined batch ({type(failure).__name__}: {failure})"
    return {name: gradient.double() for name, gradient in found.items()}, ""


def _problem(passes: Sequence[RecordedPass]) -> str:
    if len(passes) != 1:
        return f"{len(passes)} passes led to one exchange"
    recorded = passes[0]
    if recorded.is_random:
        return "the model draws random numbers (dropout?), which one process would draw otherwise"
    if not recorded.factor:
        return "a rank had a placeholder"
    outputs = recorded.output_gradients.values()
    if any(_rows(gradient) != recorded.samples for gradient in outputs):
        return "the model's output is not one row a sample (a loss?)"
    tensors = list(tensors_in((recorded.arguments, recorded.named)))
    if sum(tensor.nbytes for tensor in tensors) > _MOST_BYTES:
        return "the batch is too large to join"
    if any(tensor.layout is not torch.strided for tensor in tensors):
        return "the inputs are sparse"
    return ""


def _facts(recorded: RecordedPass) -> list[Any]:
    tensors = [*tensors_in((recorded.arguments, recorded.named)), *recorded.output_gradients.values()]
    rest = [[str(t.dtype), list(t.shape[1:]), _rows(t) == recorded.samples] for t in tensors]
    return [json.dumps(rest), recorded.samples]


def _join(here: World, tensor: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Return all ranks' rows; a tensor with another number of rows is no part of the batch and stays as it is."""
    if _rows(tensor) != rows[here.rank]:
        return tensor
    padded = tensor.detach().new_zeros((max(rows), *tensor.shape[1:]))
    padded[: rows[here.rank]] = tensor.detach()
    flat = padded.contiguous().view(torch.uint8).reshape(-1)
    parts = [torch.empty_like(flat) for _ in rows]
    with translated(here, "joined batch"):
        dist.all_gather(parts, flat, group=here.group)
    pieces = [part.view(padded.dtype).view(padded.shape)[:count] for part, count in zip(parts, rows, strict=True)]
    return torch.cat(pieces).requires_grad_(tensor.requires_grad)


def _rows(tensor: torch.Tensor) -> int:
    return tensor.shape[0] if tensor.dim() else 0


# Whether a loss compares the samples of a batch with each other, as contrastive, Dice and RMSE losses do.
#
# Each rank has its own samples only, so the mean of the ranks' losses is then not the loss of the joined batch.

_SMALLEST_SHARE = 1e-6
"""As a part of all second derivatives; less is rounding."""


class JoinedLoss:
    """Looks at each backward pass from a loss to outputs with one row for each sample, until one couples them."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rows = 0
        self._outputs: list[torch.Tensor] = []
        self._couples = False
        self._stop: Callable[[], None] | None = observe_passes(world, self)

    def stop(self) -> None:
        """See no more passes."""
        self._outputs = []
        if self._stop is not None:
            self._stop()
        self._stop = None

    def forward_begins(self, model: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """A pass of a distributed model begins."""
        self._rows = samples_of(arguments) or samples_of(dict(named))

    def forward_ends(self, model: nn.Module, output: Any) -> None:
        """Keep its outputs until the next backward pass."""
        if not self._couples and self._rows > 1:
            self._outputs += [tensor for tensor in tensors_in(output) if tensor.requires_grad]

    def backward_begins(self, loss: torch.Tensor) -> None:
        """Look at the loss, before its own backward pass."""
        outputs, self._outputs = self._outputs, []
        of_samples = [each for each in outputs if each.dim() and each.shape[0] == self._rows]
        if self._couples or not of_samples or loss.numel() != 1 or not loss.requires_grad or has_gathered(loss):
            return
        with _without_hooks([loss, *outputs]):
            self._couples = _couples(loss, _last(of_samples))

    def checks(self) -> list[Check]:
        """Name a loss that couples samples; to be called by all ranks."""
        if not any(all_gather_json(self._world, "verify/joined loss", self._couples)):
            return []
        answer = "it compares the samples of a batch with each other, and each rank has its own only"
        remedy = "compute it from fd.gather(outputs, gradients=True)"
        return [Check("loss of the joined batch", None, answer, remedy, word="not exact")]


def _last(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the outputs that no other is computed from: what lies between two is the model's business."""
    before = {node for each in outputs for node in ancestors(each)}
    return [each for each in outputs if each.grad_fn not in before]


def _couples(loss: torch.Tensor, outputs: Sequence[torch.Tensor]) -> bool:
    """See [Note: coupled samples]."""
    half = outputs[0].shape[0] // 2
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.enable_grad():
            first = torch.autograd.grad(loss, outputs, create_graph=True, retain_graph=True, allow_unused=True)
            parts = [
                (each[:half] * torch.rand(each[:half].shape, generator=generator).to(each)).sum()
                for each in first
                if each is not None and each.requires_grad
            ]
            if not parts:
                return False  # linear in the outputs
            total = torch.stack(parts).sum()
            second = torch.autograd.grad(total, outputs, retain_graph=True, allow_unused=True)
    except RuntimeError:
        return False  # a function without a second derivative: it cannot be told
    there = [each.detach().abs().double() for each in second if each is not None]
    across = sum(float(each[half:].sum()) for each in there)
    return across > _SMALLEST_SHARE * sum(float(each.sum()) for each in there)


@contextmanager
def _without_hooks(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Keep those who wait for the backward pass, the reducer among them, from taking this for it."""
    taken: list[tuple[Any, dict[int, Any]]] = []
    for tensor in tensors:
        hooks: Any = tensor._backward_hooks
        if hooks:
            taken.append((hooks, dict(hooks)))
            hooks.clear()
    try:
        yield
    finally:
        for hooks, were in taken:
            hooks.update(were)


# What a rank's loss is the mean of: tokens that are not ignored, of which ranks may have different numbers.
#
# Seen by standing in front of `torch.nn.functional.cross_entropy`, ``nll_loss`` and `fd.chunked_cross_entropy`;
# only while a script is verified.

_NAMES = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction")
REMEDY = "call fd.weight(count) with the number of these elements before backward(), in every step"


class MeanCounts:
    """The counts of a script's losses, one for each call, from `start` to `stop`."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._seen: list[tuple[float, float]] = []
        self._pending: list[float] = []
        """Counts of losses whose backward pass has not begun: until then the loop may give their weight."""
        self._undo: list[Callable[[], None]] = []

    def start(self) -> None:
        """Begin to count."""
        self._undo = count_means(self._pending.append)

    def backward_begins(self) -> None:
        """Note the weight of the losses since the last call."""
        factor = self._world.session.batch_weight.factor
        self._seen += [(count, factor) for count in self._pending]
        self._pending.clear()

    def stop(self) -> None:
        """Put everything back."""
        while self._undo:
            self._undo.pop()()

    def checks(self) -> list[Check]:
        """Name a mean over elements whose numbers do not go with the ranks' weights; to be called by all ranks."""
        here = self._world
        self.backward_begins()
        gathered = all_gather_json(here, "verify/elements of the loss", self._seen)
        for step, row in enumerate(zip(*gathered, strict=False)):
            counts, factors = [float(count) for count, _ in row], [float(factor) for _, factor in row]
            if not goes_with(counts, factors):
                answer = f"in call {step + 1} it is over {_listed(counts)}, and ranks are averaged by samples"
                return [Check("mean of the loss", None, answer, REMEDY, word="not exact")]
        return []


def count_means(note: Callable[[float], object]) -> list[Callable[[], None]]:
    """Call `note` with what each loss is a mean over; return what ends it."""

    def counted(original: Any, *arguments: Any, **named: Any) -> Any:
        loss = original(*arguments, **named)
        count = _elements_of_mean(arguments, named)
        if count is not None and torch.is_grad_enabled():
            note(count)
        return loss

    plain = [replaced(functional, name, counted) for name in ("cross_entropy", "nll_loss")]
    return [*plain, replaced(chunked_cross_entropy, "loss_by_chunks", counted)]


def goes_with(counts: Sequence[float], factors: Sequence[float]) -> bool:
    """Return whether ranks weigh as much as they have elements, or that is not known."""
    if len(counts) < 2 or min(counts) <= 0 or min(factors) <= 0:
        return True
    wanted = (count * len(counts) / sum(counts) for count in counts)
    return all(abs(a - b) < 1e-6 for a, b in zip(factors, wanted, strict=True))


def _listed(counts: Sequence[float]) -> str:
    ranks = name_ranks(list(range(len(counts))))
    return f"{', '.join(f'{count:g}' for count in counts[:8])} elements on {ranks}"


def _elements_of_mean(arguments: tuple[Any, ...], named: dict[str, Any]) -> float | None:
    """Return what a loss is a mean over: the targets that are not ignored. None for other losses."""
    given = {**dict(zip(_NAMES, arguments, strict=False)), **named}
    target = given.get("target")
    if given.get("reduction", "mean") != "mean" or given.get("weight") is not None:
        return None
    if not isinstance(target, torch.Tensor) or target.is_floating_point():
        return None
    return float((target != given.get("ignore_index", -100)).sum())


def replaced(place: Any, name: str, watcher: Any) -> Callable[[], None]:
    """Replace a function by one that goes through `watcher`; return what puts it back."""
    original = getattr(place, name)

    def through(*arguments: Any, **named: Any) -> Any:
        return watcher(original, *arguments, **named)

    setattr(place, name, through)

    def put_back() -> None:
        if getattr(place, name) is through:
            setattr(place, name, original)

    return put_back
