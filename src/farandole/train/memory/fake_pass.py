"""One forward and backward pass of a model on fake tensors: its operations run without memory, and are counted.

Fake tensors are tensors of the meta device that say they are on another one. On the meta device itself some
operations are others than in a training: attention is computed by the formula there, with its whole matrix of
scores, and dropout keeps another mask.
"""

from __future__ import annotations

import contextlib
import logging
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ...plan.memory import ActivationFacts, Moment
from .user_code import describe, errors_of_user
from .user_pass import Loss, forward_loss, passes_of

# How much memory of tensors is alive, now and at most: each storage is counted from its creation to its end.

_DEVICE_OF = torch.ops.prim.device.default


class LiveStorages(TorchDispatchMode):
    """Counts storages that operations return while the mode is on; views and results in place count once.

    Storages are identified by Python objects that live as long as their memory. Works on fake tensors too, whose
    storages have a size and no memory. What a kernel allocates and frees inside is not seen.
    """

    def __init__(self, ignored: Iterable[torch.Tensor], copied: Iterable[torch.Tensor] = ()) -> None:
        """Never count the storages of `ignored`; count conversions of `copied` also in `copy_bytes`."""
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self.copy_bytes = 0
        """Bytes of `live_bytes` that are tensors of `copied` in another type."""
        self.history: list[tuple[int, int]] = []
        """`live_bytes` and `copy_bytes` after each storage that was made."""
        self._ignored = {storage._cdata for tensor in ignored for storage in storages_of(tensor)}
        self._copied = {storage._cdata for tensor in copied for storage in storages_of(tensor)}
        self._live: dict[int, _Counted] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one operation and count what it returns."""
        if func is _DEVICE_OF and isinstance(args[0], FakeTensor):  # autograd asks twice an operation
            return args[0].fake_device
        result = func(*args, **(kwargs or {}))
        is_copy = func is torch.ops.aten._to_copy.default and any(
            storage._cdata in self._copied for storage in storages_of(args[0])
        )
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.count(tensor, is_copy=is_copy)
        return result

    def count(self, tensor: torch.Tensor, *, is_copy: bool = False) -> None:
        """Count the storage of `tensor` until its end."""
        for storage in storages_of(tensor):
            key, nbytes = storage._cdata, storage.nbytes()
            if key in self._ignored or key in self._live:
                continue
            copy_bytes = nbytes * is_copy
            self.live_bytes += nbytes
            self.copy_bytes += copy_bytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
            self.history.append((self.live_bytes, self.copy_bytes))
            self._live[key] = _Counted(weakref.ref(storage, partial(self._end, key)), nbytes, copy_bytes)

    def stop_counting(self, tensor: torch.Tensor) -> None:
        """Count the storage of `tensor` no longer, although it is alive."""
        for storage in storages_of(tensor):
            if storage._cdata in self._live:
                self._end(storage._cdata)

    def _end(self, key: int, _: Any = None) -> None:
        counted = self._live.pop(key)
        self.live_bytes -= counted.nbytes
        self.copy_bytes -= counted.copy_bytes


class _Counted(NamedTuple):
    reference: weakref.ref[torch.UntypedStorage]
    nbytes: int
    copy_bytes: int


def storages_of(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    """Return the storages of a dense tensor or one in coordinates; of others none."""
    if tensor.layout is torch.strided:
        return [tensor.untyped_storage()]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices().untyped_storage(), tensor._values().untyped_storage()]
    return []


_NEEDS_VALUES = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    NotImplementedError,
)
_ONE_AT_A_TIME = threading.RLock()
_NO_VALUES = re.compile(
    r"is not supported for tensor subclasses|\bmeta (tensors?|device)\b|no fake impl registered", re.IGNORECASE
)
"""What torch says of `.numpy()` and `.tolist()` of a fake tensor, of values of a tensor on the meta device, and of
a user's operation that says nothing of the shapes of its results."""


def needs_values(error: BaseException) -> bool:
    """Whether code failed because it reads values of tensors, which are not there, or would have to."""
    return isinstance(error, _NEEDS_VALUES) or _NO_VALUES.search(str(error)) is not None


@contextlib.contextmanager
def fake_mode() -> Iterator[None]:
    """Make tensors without memory inside. Real tensors that operations meet become fake."""
    with grouped_products(), _positions_in_order(), FakeTensorMode(allow_non_fake_inputs=True):
        yield


@contextlib.contextmanager
def _positions_in_order() -> Iterator[None]:
    """Tell transformers that positions which a model counts itself are those of one sequence a sample.

    It reads their values for that, and where it cannot, attention gets a mask and no `is_causal`. Positions of one
    row for all samples are taken for such; those that a batch brings have rows of their own.
    """
    masks: Any = sys.modules.get("transformers.masking_utils")
    if not hasattr(masks, "find_packed_sequence_indices"):
        yield
        return
    with _ONE_AT_A_TIME:
        usual = masks.find_packed_sequence_indices

        def find(position_ids: torch.Tensor) -> torch.Tensor | None:
            row = position_ids._base if isinstance(position_ids, FakeTensor) else None
            return None if row is not None and row.dim() == 1 else usual(position_ids)

        masks.find_packed_sequence_indices = find
        try:
            yield
        finally:
            masks.find_packed_sequence_indices = usual


@contextlib.contextmanager
def grouped_products() -> Iterator[None]:
    """Let fake tensors of any type be multiplied by groups; see `_grouped_products`."""
    shapes = torch.library.Library("aten", "IMPL")
    try:
        shapes.impl("_grouped_mm", _grouped_products, "Meta", allow_override=True)
        yield
    finally:
        shapes._destroy()


def _grouped_products(
    rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor | None = None,
    bias: torch.Tensor | None = None, dtype: torch.dtype | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return what `torch._grouped_mm` does, as of experts, of any type: torch itself fakes it in bf16 alone."""
    size = [rows.shape[-2], matrices.shape[-1]]
    if rows.dim() == matrices.dim() == 3:
        size = [rows.shape[0], *size]
    elif rows.dim() == matrices.dim() and ends is not None:
        size = [ends.shape[0], *size]
    return rows.new_empty(size, dtype=dtype)


def make_fake(model: nn.Module, device: str, dtype: torch.dtype | None) -> None:
    """Replace the tensors of `model` by fake ones on `device`, in a fake mode that is on.

    Parameters and buffers, and tensors that are plain attributes of modules. Those of floating point get `dtype`;
    None: their own.
    """
    made: dict[int, torch.Tensor] = {}

    def fake(tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor):
            return tensor
        if id(tensor) not in made:
            kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            empty = torch.empty_strided(tensor.size(), tensor.stride(), dtype=kind, device=device)
            is_parameter = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
        return made[id(tensor)]

    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            tensors.update({name: fake(tensor) for name, tensor in tensors.items()})
        for name, value in list(vars(module).items()):
            if name[:1] != "_" and any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(value)):
                vars(module)[name] = tree_map(fake, value)


class LargerBatch(NamedTuple):
    """A batch beside another one: what differs between their passes grows with the batch."""

    batch: Any
    times: int
    """How many times as large it is."""
    problems: list[str]
    """Gets what its pass raises: then nothing is told apart."""


_Height = tuple[int, int]
"""Bytes that are alive, and those of them that do not grow with the batch."""


def run_pass(
    model: nn.Module, batch: Any, loss: Loss | None, *, device: str, precision: str,
    larger: LargerBatch | None = None,
) -> ActivationFacts:  # fmt: skip
    """Return the memory of one forward and backward pass, in a fake mode that is on.

    A gradient counts until it is accumulated: then it lies in a bucket, among gradients. Arguments are those of
    `user_pass.forward_loss`. Without a `larger` batch what does not grow are the weights that autocast converts.
    Raises `ConfigError` with the user's file and line for what the model raises, but errors of `needs_values` as
    they are.
    """
    saved, history = _heights(model, batch, loss, device, precision)
    if larger is not None:
        try:
            more, others = _heights(model, larger.batch, loss, device, precision)
        except Exception as error:  # such as where two dimensions count the samples
            larger.problems.append(describe(error))
            more, others = saved, []
        if len(others) == len(history):  # the same operations
            saved = _told_apart(saved, more, larger.times)
            history = [_told_apart(one, two, larger.times) for one, two in zip(history, others, strict=True)]
    moments = tuple(Moment(fixed, alive - fixed) for alive, fixed in (max(history, key=of) for of in _HIGHEST))
    return ActivationFacts(*saved, moments[0].total_bytes, moments)


def _with_times(times: int) -> Callable[[_Height], _Height]:
    return lambda at: (at[1] + times * (at[0] - at[1]), at[0])


_HIGHEST: tuple[Callable[[_Height], _Height], ...] = (
    _with_times(1), lambda at: (at[1], at[0]), lambda at: (at[0] - at[1], at[0]), _with_times(4), _with_times(16),
)  # fmt: skip
"""Where most is alive: in all, of what does not grow, of what grows, and in all with larger batches."""


def _told_apart(one: _Height, two: _Height, times: int) -> _Height:
    alive = one[0]
    grown = round((two[0] - alive) / (times - 1))
    return alive, max(one[1], alive - min(alive, max(0, grown)))


def _heights(
    model: nn.Module, batch: Any, loss: Loss | None, device: str, precision: str
) -> tuple[_Height, list[_Height]]:
    """Return what is alive at the end of the forward pass, and after each storage that was made."""
    parameters = list(model.parameters())
    live = LiveStorages([*parameters, *model.buffers()], copied=parameters)
    trainable = [each for each in parameters if each.requires_grad]
    hooks = [each.register_post_accumulate_grad_hook(partial(_stop_counting, live)) for each in trainable]
    for tensor in tree_leaves(batch):
        if isinstance(tensor, torch.Tensor):
            live.count(tensor)
    try:
        with live, silent_logger():
            with errors_of_pass(passes_of(loss)):
                scalar = forward_loss(model, batch, loss, device=device, precision=precision)
            saved = live.live_bytes, live.copy_bytes
            with errors_of_pass("the backward pass"):
                scalar.backward()
    finally:
        for hook in hooks:
            hook.remove()
        model.zero_grad(set_to_none=True)
    return saved, live.history


def _stop_counting(live: LiveStorages, parameter: torch.Tensor) -> None:
    assert parameter.grad is not None, "the hook runs after a gradient was accumulated"
    live.stop_counting(parameter.grad)


@contextlib.contextmanager
def silent_logger() -> Iterator[None]:
    """Keep torch from logging what it also raises."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def errors_of_pass(doing: str) -> Iterator[None]:
    """As `errors_of_user`, but errors of `needs_values` come as they are."""
    kept: BaseException | None = None
    with errors_of_user(doing):
        try:
            yield
        except Exception as error:
            if not needs_values(error):
                raise
            kept = error
    if kept is not None:
        raise kept
