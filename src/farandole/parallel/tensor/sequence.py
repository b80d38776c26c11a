"""Sequence parallel: outside of split regions a rank has some tokens (Korthikanti et al. 2022, section 4.2.2).

[Note: tokens of a block] The first repeated block takes this rank's tokens of the activations; the blocks
after it get what the one before returned, which looks whole (see [Note: lazily whole]) and of which they take
the local part; whatever follows the last block gathers it. So norms, dropout and residuals of a block work on
1/N of the tokens, and keep 1/N of the activations. Where a split region begins, the tokens are gathered:
before the innermost module that has all layers by columns of the region, because the shapes that its code
reads are those of all tokens. Masks, positions and other arguments stay whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...core.vocabulary.errors import ConfigError
from .clone import OwnHook
from .lazy import LazyWhole, expose
from .regions import SEQUENCE, RegionSeed, TensorRanks, begin_region_of_tokens, check_tokens, take_piece


class _TokenHook(OwnHook):
    is_part_of_forward = True

    def __init__(self, ranks: TensorRanks, name: str, seed: RegionSeed | None = None) -> None:
        self.ranks, self.name, self.seed = ranks, name, seed


class EnterBlock(_TokenHook):
    """Give a block this rank's tokens of its first tensor."""

    is_first = True

    def __call__(self, block: nn.Module, args: Any, kwargs: Any) -> Any:
        """See `torch.nn.Module.register_forward_pre_hook`."""
        if self.seed is not None and block.training:
            self.seed.begin()
        return _replaced(args, kwargs, self._mine)

    def _mine(self, x: torch.Tensor) -> torch.Tensor:
        if x.requires_grad and not torch.is_grad_enabled():
            raise ConfigError(
                f"sequence_parallel: {self.name!r} runs in an autograd function's forward pass, as in reentrant "
                "activation checkpointing, whose backward pass would not give its gradients the sums of the ranks",
                remedy="set use_reentrant=False, or recompute in the plan",
            )
        if isinstance(x, LazyWhole) and x.split_dim == SEQUENCE and x.gathered is None:
            return x.local
        whole = x.whole() if isinstance(x, LazyWhole) else x
        check_tokens(whole, self.ranks, self.name)
        return take_piece(whole, SEQUENCE, self.ranks, self.name)


class LeaveBlock(_TokenHook):
    """Let the output of a block look whole."""

    def __call__(self, block: nn.Module, args: Any, output: Any) -> Any:
        """See `torch.nn.Module.register_forward_hook`."""
        if self.seed is not None:
            self.seed.end()
        if isinstance(output, torch.Tensor):
            return self._whole(output)
        if type(output) is tuple and output and isinstance(output[0], torch.Tensor):
            return (self._whole(output[0]), *output[1:])
        return output

    def _whole(self, x: torch.Tensor) -> LazyWhole:
        return expose(x, SEQUENCE, (x.shape[SEQUENCE],) * self.ranks.size, self.ranks, self.name)


class GatherTokens(_TokenHook):
    """Give a module all tokens of its first tensor, of which the block has this rank's."""

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """See `torch.nn.Module.register_forward_pre_hook`."""
        return _replaced(args, kwargs, lambda x: begin_region_of_tokens(x, self.ranks, self.name))


def _replaced(args: Any, kwargs: Any, change: Any) -> Any:
    """Return the arguments with the activation changed: the first tensor with tokens and features."""
    for at, each in enumerate(args):
        if _is_activation(each):
            return (*args[:at], change(each), *args[at + 1 :]), kwargs
    first = ["hidden_states"] if "hidden_states" in kwargs else []
    for key in (*first, *kwargs):
        if _is_activation(kwargs[key]):
            return args, {**kwargs, key: change(kwargs[key])}
    return args, kwargs


def _is_activation(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > SEQUENCE and value.is_floating_point()


def install_tokens(
    model: nn.Module, blocks: list[str], entries: list[str], ranks: TensorRanks, seed: RegionSeed
) -> None:
    """Divide the tokens of `blocks`, and gather them before `entries`. See [Note: tokens of a block]."""
    for name in blocks:
        block = model.get_submodule(name)
        block.register_forward_pre_hook(EnterBlock(ranks, name, seed), with_kwargs=True)
        block.register_forward_hook(LeaveBlock(ranks, name, seed))
    for name in entries:
        model.get_submodule(name).register_forward_pre_hook(GatherTokens(ranks, name), with_kwargs=True)


def put_first(model: nn.Module) -> None:
    """Let hooks of `model` that must be the first to get arguments be that, after others came before them."""
    for module in model.modules():
        hooks: Any = module._forward_pre_hooks
        for key in reversed([key for key, hook in hooks.items() if isinstance(hook, OwnHook) and hook.is_first]):
            hooks.move_to_end(key, last=False)
