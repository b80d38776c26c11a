"""The proof at the first forward pass: divided over ranks, a short input gives what the plain model gives.

[Note: the proof] The first tokens of each run of this rank's tokens, joined with those of all ranks, are a short
sequence. The plain model computes all of it, and the divided one this rank's part; the two must agree, module by
module. So whatever mixes tokens without going through attention (a convolution, positions that the model counts by
itself, a mean over tokens, attention that is computed by hand) is found before it trains, and named.

Both run without gradients, dropout and autocast, in float32 at least, and leave no trace. Parameters whose
elements are all equal have noise meanwhile: positions or projections that begin as zeros would hide what they do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from ...comm.batch_weight import tensors_in
from ...core.vocabulary.errors import ConfigError, FarandoleError
from .context import Context
from .group import ContextGroup, cut, join
from .transformers_models import Inputs, prepare

_RUN_TOKENS = 4
"""The most tokens of a run that are in the short input."""
_TOLERANCE = 1e-3
"""Largest difference of two outputs, as a share of the largest value."""
_NOISE = 0.1
_LOW = (torch.bfloat16, torch.float16)
_PARTS = 10**9
_WHY = "proof of divided sequences"


def prove(context: Context, model: nn.Module, plain: Callable[..., Any], inputs: Inputs) -> None:
    """Compare the divided model with the plain one on a short input; to be called by all ranks of the group.

    Raises `ConfigError`, on all of them, where the two differ.
    """
    group = context.group
    short = _shortened(context, model, inputs)
    whole = _map(short, lambda tensor, dim: join(group.all_gather(tensor, _WHY), dim), context)
    with _quiet(model), context.closed():
        ready = prepare(model, whole, None)
        with _watched(model) as expected:
            try:
                output = plain(*ready.arguments, **ready.named)
            except FarandoleError:
                raise
            except Exception as problem:
                raise ConfigError(
                    f"context: the plain {type(model).__qualname__} fails on a sequence of few tokens, so it "
                    f"cannot be proven that its sequences can be divided: {type(problem).__name__}: {problem}",
                    remedy="let the model take sequences of any length, or set context = 1",
                ) from None
            expected.append(_Output("its output", list(tensors_in(output))))
    with _quiet(model):
        ready = prepare(model, short, group)
        with context.open_pass(ready.padding, is_short=True), _watched(model) as found:
            output = plain(*ready.arguments, **ready.named)
            found.append(_Output("its output", list(tensors_in(output))))
    _judge(group, model, expected, found)


class _Output(NamedTuple):
    """What a module returned."""

    name: str
    tensors: list[torch.Tensor]


# -- the short input -------------------------------------------------------------------------------


def _shortened(context: Context, model: nn.Module, inputs: Inputs) -> Inputs:
    seen: list[torch.Tensor] = []

    def shorten(tensor: torch.Tensor, dim: int) -> torch.Tensor:
        seen.append(tensor)
        half = tensor.shape[dim] // 2
        few = min(half, _RUN_TOKENS)
        part = torch.cat([tensor.narrow(dim, 0, few), tensor.narrow(dim, half, few)], dim).detach()
        return part.float() if part.dtype in _LOW else part

    short = _map(inputs, shorten, context)
    if not seen:
        lengths = ", ".join(map(str, sorted(context.lengths))) or "none"
        raise ConfigError(
            f"context: no input of this {type(model).__qualname__} is a part of a sequence that was cut (parts "
            f"with these numbers of tokens were cut: {lengths})",
            remedy="tokens, targets = fd.context_shard(tokens, targets), before the model is called",
        )
    return short


def _map(inputs: Inputs, change: Callable[[torch.Tensor, int], torch.Tensor], context: Context) -> Inputs:
    """Return the inputs with each tensor changed that has tokens of this rank."""

    def visit(tensor: torch.Tensor) -> torch.Tensor:
        dim = _dim_of(tensor, context)
        return tensor if dim is None else change(tensor, dim)

    arguments, named = tree_map_only(torch.Tensor, visit, (inputs.arguments, inputs.named))
    return Inputs(arguments, named)


def _dim_of(tensor: torch.Tensor, context: Context) -> int | None:
    lengths = context.lengths | {2 * min(length // 2, _RUN_TOKENS) for length in context.lengths}
    of_kind = context.dims.get(tensor.dim())
    for dim in ([of_kind] if of_kind is not None else []) + sorted(set(context.dims.values()), reverse=True):
        if dim < tensor.dim() and tensor.shape[dim] in lengths:
            return dim
    return None


# -- both runs -------------------------------------------------------------------------------------


@contextmanager
def _quiet(model: nn.Module) -> Iterator[None]:
    """Leave no trace inside, and be exact."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    devices = {each.device for each in model.parameters()}
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.random.fork_rng([each for each in devices if each.type == "cuda"]))
        for kind in {each.type for each in devices}:
            stack.enter_context(torch.autocast(kind, enabled=False))
        stack.enter_context(_revealed(model))
        try:
            for module, _ in modes:
                module.training = False
            yield
        finally:
            for module, mode in modes:
                module.training = mode
            for buffer, before in buffers:
                if not torch.equal(buffer, before):
                    buffer.copy_(before)


@contextmanager
def _revealed(model: nn.Module) -> Iterator[None]:
    """Give constant parameters noise inside, the same on all ranks, and low ones float32."""
    generator = torch.Generator()
    changed: list[tuple[nn.Parameter, torch.Tensor]] = []
    try:
        for number, parameter in enumerate(model.parameters()):
            before = parameter.data
            if type(before) is not torch.Tensor or not before.is_floating_point() or not before.numel():
                continue
            data = before.float() if before.dtype in _LOW else before
            if data.numel() > 1 and bool((data == data.view(-1)[:1].view((1,) * data.dim())).all()):
                noise = torch.randn(data.shape, generator=generator.manual_seed(number), dtype=torch.float32)
                data = data + _NOISE * noise.to(data)
            if data is not before:
                changed.append((parameter, before))
                _set_data(parameter, data)
        yield
    finally:
        for parameter, before in changed:
            _set_data(parameter, before)


def _set_data(parameter: nn.Parameter, data: torch.Tensor) -> None:
    with torch._C.DisableTorchFunction():  # no use of it that is watched
        parameter.data = data


@contextmanager
def _watched(model: nn.Module) -> Iterator[list[_Output]]:
    """Keep what each module inside of `model` returns."""
    seen: list[_Output] = []
    hooks = []
    for name, module in model.named_modules():
        if module is not model:

            def keep(_: nn.Module, __: Any, output: Any, name: str = name) -> None:
                tensors = [output] if isinstance(output, torch.Tensor) else list(tensors_in(output))
                seen.append(_Output(f"module {name!r}", [each.detach().clone() for each in tensors]))

            hooks.append(module.register_forward_hook(keep))
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


# -- the judgement ---------------------------------------------------------------------------------


def _judge(group: ContextGroup, model: nn.Module, expected: Sequence[_Output], found: Sequence[_Output]) -> None:
    has_same_modules = [each.name for each in expected] == [each.name for each in found]
    pairs = list(zip(expected, found, strict=True)) if has_same_modules else [(expected[-1], found[-1])]
    differences = [_difference(group, *pair) for pair in pairs]
    last = differences[-1]
    if last is None:
        last = _difference_of_scalars(group, *pairs[-1])
    first = next(
        (i for i, each in enumerate(differences) if each is not None and each > _TOLERANCE), len(pairs) - 1
    )
    worst = max((last if last is not None else 2.0), 0.0)
    said = group.gather_numbers([int(min(worst, 2.0) * _PARTS), first], _WHY)
    if all(each[0] <= _TOLERANCE * _PARTS for each in said):
        return
    where = min(each[1] for each in said if each[0] > _TOLERANCE * _PARTS)
    share = max(each[0] for each in said) / _PARTS
    how_much = "in shape or number" if share >= 2.0 else f"by {100 * share:.2g} % of the largest value"
    raise ConfigError(
        f"context: this {type(model).__qualname__} gives another output with divided sequences than with whole "
        f"ones ({how_much}); first in {pairs[where][0].name}: something mixes tokens, or counts positions, among "
        "this rank's tokens alone",
        remedy="let positions come from fd.context_positions(length), attention go through "
        "torch.nn.functional.scaled_dot_product_attention (need_weights=False for nn.MultiheadAttention), and "
        "losses and means over tokens stay outside of the model; else set context = 1",
    )


def _difference(group: ContextGroup, expected: _Output, found: _Output) -> float | None:
    """Return the largest difference as a share of the largest value, 2.0 for other shapes; None: nothing seen."""
    if len(expected.tensors) != len(found.tensors):
        return 2.0
    seen = [_difference_of(group, *pair) for pair in zip(expected.tensors, found.tensors, strict=True)]
    known = [each for each in seen if each is not None]
    return max(known) if known else None


def _difference_of(group: ContextGroup, expected: torch.Tensor, found: torch.Tensor) -> float | None:
    if not expected.is_floating_point() or (expected.dim() == 0 and found.dim() == 0):
        return None
    if expected.shape == found.shape:
        return _share(expected, found)
    differing = [dim for dim, sizes in enumerate(zip(expected.shape, found.shape, strict=False))
                 if sizes[0] != sizes[1]]  # fmt: skip
    if expected.dim() != found.dim() or len(differing) != 1:
        return 2.0
    dim = differing[0]
    if expected.shape[dim] != found.shape[dim] * group.size:
        return 2.0
    parts = _parts(group, expected, dim, _whole_length(group, found.shape[dim]))
    return min((_share(part, found) for part in parts), default=2.0)  # none fits the rows of an expert


def _whole_length(group: ContextGroup, here: int) -> list[int]:
    """Return how many tokens the whole short sequence may have, where a dimension has `here` of this rank."""
    return [2 * few * group.size for few in range(1, _RUN_TOKENS + 1) if here % (2 * few) == 0]


def _parts(
    group: ContextGroup, expected: torch.Tensor, dim: int, lengths: Sequence[int]
) -> Iterator[torch.Tensor]:
    """Yield this rank's part of `dim`, which may be samples x tokens or tokens x samples, flattened."""
    for length in lengths:
        for sizes, along in (((-1, length), dim + 1), ((length, -1), dim)):
            yield cut(expected.unflatten(dim, sizes), along, group.rank, group.size).flatten(dim, dim + 1)


def _share(expected: torch.Tensor, found: torch.Tensor) -> float:
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    difference = float((expected - found).abs().max()) if expected.numel() else 0.0
    if difference == 0.0 or not expected.isfinite().all():
        return 0.0
    return difference / largest if largest else 2.0


def _difference_of_scalars(group: ContextGroup, expected: _Output, found: _Output) -> float | None:
    """Compare losses that the model returns, the only output: the mean over the ranks."""
    pairs = [pair for pair in zip(expected.tensors, found.tensors, strict=False) if pair[0].is_floating_point()]
    if not pairs:
        return None
    means = [torch.stack(group.all_gather(each, _WHY)).mean(0) for _, each in pairs]
    return max(_share(each, mean) for (each, _), mean in zip(pairs, means, strict=True))
