"""Repeated blocks that are alike: a pass through some of them says what a pass through all of them needs.

[Note: alike blocks] Blocks are alike if they have one class, parameters of one shape, and equal plain attributes
in all their modules, but for those that count the blocks: the same ones in the whole row, so that it does not
end where another attribute happens to equal the number of a block. A block that is skipped returns its first
tensor, in the form in which a block before it has returned its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ...core.vocabulary.errors import FarandoleError
from ...parallel.blocks import repeated_blocks
from ...plan.memory import ActivationFacts, Moment
from .fake_pass import LargerBatch, run_pass
from .user_code import Loss

_DEPTHS = (1, 2, 3, 4, 5)
"""Blocks of passes that are carried on to all."""
_FEWEST = 8
"""Alike blocks from which that is worth it."""
_KEPT, _FEWEST_ALIKE = 2, 4
_PLAIN = (bool, int, float, str, type(None))


class NotAlikeError(FarandoleError):
    """A block cannot be skipped: what it returns is no form of its first tensor. The user's code is right."""


def activations_of(
    model: nn.Module, batch: Any, loss: Loss | None, *, device: str, precision: str,
    keeps_casts: bool = True, larger: LargerBatch | None = None,
) -> ActivationFacts:  # fmt: skip
    """Return `run_pass`, from passes through some of the alike blocks, if these agree.

    Bytes grow by the same for each block. The moment at which most is alive stays the same one if no other grows
    by more: if the peak grows by what is saved, and by the weights of a block that autocast converts. If it grows
    by less, the moment of most converted weights overtakes it. Where more is converted than the matrices two
    passes more must agree. Where it is not so the whole model is run.

    `keeps_casts`: blocks keep what is converted, as they do unless they are computed again.
    """
    run = [block for _, block in longest_run(model)]
    one_pass = partial(run_pass, model, batch, loss, device=device, precision=precision, larger=larger)
    if len(run) >= _FEWEST:
        converted = _converted_bytes(run[0]) if precision == "bf16" and keeps_casts else 0
        try:
            facts = []
            for depth in _DEPTHS:
                with skipped(run[0], run[depth:]):
                    facts.append(one_pass())
                if len(facts) > 1 and _agree(facts, converted):
                    return _carried(facts[-2], facts[-1], len(run) - depth)
        except NotAlikeError:
            pass
    return one_pass()


def _agree(facts: Sequence[ActivationFacts], converted_bytes: int) -> bool:
    grown = [_difference(one, two) for one, two in pairwise(facts)]
    saved, copies, peak, *at = grown[-1]
    if len(grown) == 1:
        return not converted_bytes and not copies and saved == peak and at == [0, saved] * (len(at) // 2)
    most = saved + max(0, converted_bytes - copies)
    return grown[-1] == grown[-2] and (peak >= most or most in map(sum, zip(at[::2], at[1::2], strict=True)))


def _converted_bytes(block: nn.Module) -> int:
    """Return the bytes in bf16 of the matrices of a block: autocast keeps these until the end of a pass."""
    found = [each for each in block.parameters() if each.dim() > 1 and each.dtype == torch.float32]
    return sum(each.numel() * torch.bfloat16.itemsize for each in found)


def _figures(facts: ActivationFacts) -> list[int]:
    at = [each for moment in facts.moments for each in (moment.fixed_bytes, moment.growing_bytes)]
    return [facts.saved_bytes, facts.weight_copy_bytes, facts.peak_bytes, *at]


def _difference(one: ActivationFacts, two: ActivationFacts) -> list[int]:
    return [after - before for before, after in zip(_figures(one), _figures(two), strict=True)]


def _carried(one: ActivationFacts, two: ActivationFacts, blocks: int) -> ActivationFacts:
    grown = zip(_figures(two), _difference(one, two), strict=True)
    saved, copies, _, *at = (figure + blocks * more for figure, more in grown)
    moments = tuple(map(Moment, at[::2], at[1::2]))
    most = max(moments, key=lambda each: each.total_bytes)
    return ActivationFacts(saved, copies, most.total_bytes, (most, *moments[1:]))


def longest_run(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the longest row of repeated blocks that follow each other and are alike; see [Note: alike blocks]."""
    longest: list[tuple[str, nn.Module]] = []
    run: list[tuple[str, nn.Module]] = []
    counting: set[Any] | None = None
    before: _BlockForm | None = None
    seen: set[int] = set()
    for number, (name, block) in enumerate(repeated_blocks(model)):
        form = _BlockForm.of(name, block, number)
        shares = any(id(each) in seen for each in block.parameters())
        seen.update(id(each) for each in block.parameters())
        counts = None if before is None or shares else before.counting(form)
        if counts is not None and (len(run) == 1 or counts == counting):
            run.append((name, block))
        else:
            run = [(name, block)]
        before, counting = form, counts
        longest = max(longest, list(run), key=len)
    return longest


def foldable(model: nn.Module) -> tuple[list[tuple[str, nn.Module]], list[nn.Module]]:
    """Return two blocks that are to be run, and those that are alike and may be skipped after them.

    The first block of a model may need no gradient of its input; the second stands for the others.
    """
    run = longest_run(model)
    left_out = run[_KEPT:] if len(run) >= _FEWEST_ALIKE else []
    return run[:_KEPT], [block for _, block in left_out]


class _BlockForm(NamedTuple):
    """What blocks that are alike have in common, and what may count them."""

    modules: list[Any]
    """Name and class of each module."""
    tensors: list[Any]
    plain: dict[tuple[str, str], Any]
    """Plain attributes, by name of the module and of the attribute."""
    numbers: set[int]
    """The block's number among all blocks, and the one in its list."""

    @classmethod
    def of(cls, name: str, block: nn.Module, number: int) -> _BlockForm:
        place = name.rpartition(".")[2]
        modules = list(block.named_modules())
        tensors = [
            (path, tuple(each.shape), each.dtype, each.requires_grad)
            for path, each in (*block.named_parameters(), *block.named_buffers())
        ]
        plain = {
            (path, key): value
            for path, module in modules
            for key, value in vars(module).items()
            if isinstance(value, _PLAIN)
        }
        numbers = {number, int(place) if place.isdigit() else number}
        return cls([(path, type(module)) for path, module in modules], tensors, plain, numbers)

    def counting(self, following: _BlockForm) -> set[Any] | None:
        """Return which attributes count the blocks from this one to the `following`; None: they are not alike."""
        if (self.modules, self.tensors) != (following.modules, following.tensors):
            return None
        if self.plain.keys() != following.plain.keys():
            return None
        found = {key for key, value in self.plain.items() if value != following.plain[key]}
        for key in found:
            one, two = self.plain[key], following.plain[key]
            if type(one) is not int or type(two) is not int:
                return None
            if one not in self.numbers or two not in following.numbers:
                return None
        return found


@contextmanager
def skipped(first: nn.Module, blocks: Sequence[nn.Module], *, copies: bool = False) -> Iterator[None]:
    """Skip `blocks`; `first` is one that is alike and runs before them. `copies`: they return new memory.

    Inside, a forward pass raises `NotAlikeError` where a block cannot be skipped.
    """
    shapes: list[Any] = []
    forms: list[Any] = []

    def learn(_: nn.Module, arguments: Any, named: Any, output: Any) -> None:
        shapes[:] = [_shapes(arguments, named)]
        forms[:] = [_form(_first_tensor(arguments, named), output)]

    def skip(*arguments: Any, **named: Any) -> Any:
        if not forms or forms[0] is None or shapes[0] != _shapes(arguments, named):
            raise NotAlikeError("a block cannot be skipped")
        tensor = _first_tensor(arguments, named)
        assert tensor is not None, "the first block had a tensor, and this one has its shapes"
        # A view, so that hooks on it and changes of its attributes do not meet those of the block before.
        same = tensor.clone() if copies else tensor.view_as(tensor)
        return same if forms[0] == "tensor" else type(forms[0])([same, *forms[0][1:]])

    before = [vars(block).get("forward") for block in blocks]
    hook = first.register_forward_hook(learn, with_kwargs=True)
    try:
        for block in blocks:
            vars(block)["forward"] = skip
        yield
    finally:
        hook.remove()
        for block, forward in zip(blocks, before, strict=True):
            if forward is None:
                vars(block).pop("forward", None)
            else:
                vars(block)["forward"] = forward


def _first_tensor(arguments: Any, named: Any) -> torch.Tensor | None:
    return next((leaf for leaf in tree_leaves((arguments, named)) if isinstance(leaf, torch.Tensor)), None)


def _shapes(arguments: Any, named: Any) -> list[Any]:
    return [
        (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else type(leaf)
        for leaf in tree_leaves((arguments, named))
    ]


def _form(tensor: torch.Tensor | None, output: Any) -> Any:
    """Return "tensor", a tuple or list whose first entry stands for the tensor, or None if it is neither."""
    if tensor is None or not tensor.is_floating_point():
        return None

    def fits(each: Any) -> bool:
        return isinstance(each, torch.Tensor) and each.shape == tensor.shape and each.dtype == tensor.dtype

    if fits(output):
        return "tensor"
    is_first = type(output) in (tuple, list) and output and fits(output[0])
    if is_first and not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(output[1:])):
        return output
    return None
