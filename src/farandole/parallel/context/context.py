"""The state of context parallelism in one world: which calls of attention are divided, and what was cut.

[Note: which calls] Attention is divided in the forward pass of a model that `fd.distribute` has divided, and where
such a pass is computed again in backward: then no forward pass of the model is open, and a call counts when its
tokens are as many as a cut left. A call elsewhere with as many tokens is refused: the pass went around the
model that was distributed, and would see this rank's tokens alone.

[Note: counts and gradients] Gradients of keys and values cross ranks, so the weight of a rank's loss must be in
them when they leave attention, and not on the gradients of parameters alone. With counts given by `fd.weight`,
what flows back into the model's outputs is multiplied by this rank's count over the mean count of its group, and
the exchange of gradients weighs by group.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from ...comm.batch_weight import tensors_in
from ...core.vocabulary.errors import ConfigError
from .attention import AttentionCall, DividedAttention


class Context:
    """See the module. The world's session keeps one."""

    def __init__(self, attention: DividedAttention) -> None:
        self.attention, self.group = attention, attention.group
        self.lengths: set[int] = set()
        """Tokens of this rank in the sequences that were cut."""
        self.dims: dict[int, int] = {}
        """By the number of dimensions of a tensor: the one that was cut last."""
        self._is_ragged = False
        self._was_cut_before_pass = False
        self.count_share = 1.0
        """The count that `fd.weight` was given on this rank, over the mean of the group."""
        self._weighs_outputs = True
        self._threads = threading.local()
        self._paddings: list[torch.Tensor | None] = []
        """Those of the forward passes since the last backward pass."""
        self._was_in_backward = False

    # -- cuts ----------------------------------------------------------------------------------------

    def note_cut(self, tensor: torch.Tensor, dim: int, *, is_ragged: bool) -> None:
        """A tensor was cut; `is_ragged`: the ranks' parts have unequal numbers of targets that count."""
        self.lengths.add(tensor.shape[dim])
        self.dims[tensor.dim()] = dim
        self._is_ragged = is_ragged or (self._is_ragged and self._was_cut_before_pass)
        self._was_cut_before_pass = True

    # -- passes; see [Note: which calls] -----------------------------------------------------------------

    @contextmanager
    def open_pass(self, padding: torch.Tensor | None, *, is_short: bool = False) -> Iterator[None]:
        """Divide the calls of attention inside.

        `padding` is (batch, tokens of this rank), False for padding. `is_short`: the pass is that of a proof, over
        fewer tokens than were cut.
        """
        open_passes = self._open_passes
        self._was_cut_before_pass = False
        if self._was_in_backward:
            self._was_in_backward = False
            self._paddings.clear()
        if torch.is_grad_enabled():
            self._paddings.append(padding)
        open_passes.append(padding)
        self._threads.is_short = is_short
        has_fast_path = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)  # fused layers, which call no attention of ours
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(has_fast_path)
            open_passes.pop()

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Divide no calls inside: the plain model."""
        before, self._threads.passes = self._open_passes, []
        self._threads.is_closed = True
        try:
            yield
        finally:
            self._threads.is_closed = False
            self._threads.passes = before

    def is_part(self, length: int) -> bool:
        """Return whether so many tokens, here and now, are this rank's part of a sequence."""
        return bool(self._open_passes) or (not self.is_closed and length in self.lengths)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Return the attention of one call, divided or plain."""
        length = call.query.shape[-2] if call.query.dim() > 1 else 0
        if self._open_passes:
            if length not in self.lengths and not self._threads.is_short:
                raise ConfigError(
                    f"context: attention over {length} tokens of this rank; parts that fd.context_shard cut have "
                    f"{', '.join(map(str, sorted(self.lengths)))}",
                    remedy="add or drop tokens before sequences are cut, or set context = 1 for this model",
                )
            return self._divided(call, self._open_passes[-1])
        if not self.is_part(length):
            return self.attention.plain(*call[:6], scale=call.scale, enable_gqa=call.enable_gqa)
        if torch._C._current_graph_task_id() == -1:
            raise ConfigError(
                f"context: attention over {length} tokens, a part of a sequence that was cut, outside of the "
                "forward pass of the distributed model",
                remedy="call the model that was given to fd.distribute, and not a part or a copy of it",
            )
        self._was_in_backward = True
        if len({id(padding) for padding in self._paddings}) > 1:
            raise ConfigError(
                "context: activations are computed again in backward, after several forward passes with different "
                "padding",
                remedy="call backward() after each forward pass",
            )
        return self._divided(call, self._paddings[-1] if self._paddings else None)

    # -- weights; see [Note: counts and gradients] --------------------------------------------------------

    def weigh(self, count: float) -> float:
        """Weigh this rank's outputs by `count`, and return the mean count of the group; all its ranks call it."""
        mine = torch.tensor([count], dtype=torch.float64, device=self.group.world.device)
        mean = float(torch.cat(self.group.all_gather(mine, "fd.weight")).mean())
        self.count_share = count / mean if mean else 0.0
        return mean

    def weigh_outputs(self, output: Any) -> Any:
        """Return the model's output, through which gradients are weighed."""
        if not torch.is_grad_enabled():
            return output
        weighed = 0

        def pass_through(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal weighed
            if not tensor.requires_grad:
                return tensor
            weighed += 1
            view = tensor.view_as(tensor)
            view.register_hook(self._weighed)
            return view

        made = tree_map_only(torch.Tensor, pass_through, output)
        self._weighs_outputs = weighed > 0 or not any(each.requires_grad for each in tensors_in(output))
        return made

    def _weighed(self, grad: torch.Tensor) -> torch.Tensor:
        has_count = bool(self.group.world.session.batch_weight.count_number)
        return grad * self.count_share if has_count and self.count_share != 1.0 else grad

    @property
    def is_closed(self) -> bool:
        """Whether this thread is inside `closed`."""
        return bool(getattr(self._threads, "is_closed", False))

    @property
    def _open_passes(self) -> list[torch.Tensor | None]:
        found: list[torch.Tensor | None] | None = getattr(self._threads, "passes", None)
        if found is None:
            found = self._threads.passes = []
        return found

    def _divided(self, call: AttentionCall, padding: torch.Tensor | None) -> torch.Tensor:
        output = self.attention.attend(call, padding)
        if output.requires_grad:
            output.register_hook(self._in_backward)
        return output

    def _in_backward(self, _: Any) -> None:
        self._was_in_backward = True
        share = self.group.world.session.batch_weight
        if share.count_number and not self._weighs_outputs:
            raise ConfigError(
                "context: fd.weight cannot reach the outputs of the model, which are inside of an object that is "
                "no tuple, list, dict or dataclass",
                remedy="return tensors, or containers of them",
            )
        if self._is_ragged and not share.count_number:
            raise ConfigError(
                "context: the ranks' parts of a sequence have unequal numbers of targets (others are -100), so "
                "the mean of their losses is not the mean over all targets",
                remedy="call fd.weight((targets != -100).sum()) before backward(), with this rank's targets; "
                "fd.weight(1) if the loss is divided by the same number on all ranks",
            )
